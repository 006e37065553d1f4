//! Device properties that `getProperties` writes, one struct per layout.
//!
//! v8 and v9 inserted fields in the middle, so reading one version's bytes with another's struct yields wrong
//! numbers instead of an error. v5 and v6 share a layout, and so do v9 and v10.

use std::ffi::{c_char, c_float, c_int};

use super::structs::{VDevicePropsV9, VDevicePropsV12};

layout! {
    /// Properties of a device, v4.
    pub struct PropertiesV4: 40, 8 {
        /// The NIC's name, unique.
        0 name: *const c_char,
        /// The device's directory in sysfs, or null.
        8 pci_path: *const c_char,
        /// GUID of the device, equal for devices that share a port.
        16 guid: u64,
        /// Kinds of memory that the device accepts, as `PTR_*` bits.
        24 ptr_support: c_int,
        /// Link speed of the device in Mbit/s.
        28 speed: c_int,
        /// Number of the port of the device.
        32 port: c_int,
        /// Most communicators of the device.
        36 max_comms: c_int,
    }

    /// Properties of a device, v5 and v6.
    pub struct PropertiesV6: 48, 8 {
        /// The NIC's name, unique.
        0 name: *const c_char,
        /// The device's directory in sysfs, or null.
        8 pci_path: *const c_char,
        /// GUID of the device, equal for devices that share a port.
        16 guid: u64,
        /// Kinds of memory that the device accepts, as `PTR_*` bits.
        24 ptr_support: c_int,
        /// Link speed of the device in Mbit/s.
        28 speed: c_int,
        /// Number of the port of the device.
        32 port: c_int,
        /// Latency of the device in microseconds.
        36 latency: c_float,
        /// Most communicators of the device.
        40 max_comms: c_int,
        /// Most buffers of one `irecv`.
        44 max_recvs: c_int,
    }

    /// Properties of a device, v7.
    pub struct PropertiesV7: 56, 8 {
        /// The NIC's name, unique.
        0 name: *const c_char,
        /// The device's directory in sysfs, or null.
        8 pci_path: *const c_char,
        /// GUID of the device, equal for devices that share a port.
        16 guid: u64,
        /// Kinds of memory that the device accepts, as `PTR_*` bits.
        24 ptr_support: c_int,
        /// Link speed of the device in Mbit/s.
        28 speed: c_int,
        /// Number of the port of the device.
        32 port: c_int,
        /// Latency of the device in microseconds.
        36 latency: c_float,
        /// Most communicators of the device.
        40 max_comms: c_int,
        /// Most buffers of one `irecv`.
        44 max_recvs: c_int,
        /// Type of the device, one of `DEVICE_*`.
        48 net_device_type: c_int,
        /// Version of the device handles, one of `DEVICE_VERSION_*`.
        52 net_device_version: c_int,
    }

    /// Properties of a device, v8.
    pub struct PropertiesV8: 64, 8 {
        /// The NIC's name, unique.
        0 name: *const c_char,
        /// The device's directory in sysfs, or null.
        8 pci_path: *const c_char,
        /// GUID of the device, equal for devices that share a port.
        16 guid: u64,
        /// Kinds of memory that the device accepts, as `PTR_*` bits.
        24 ptr_support: c_int,
        /// 1 if a registration within another one is almost free, else 0.
        28 reg_is_global: c_int,
        /// Link speed of the device in Mbit/s.
        32 speed: c_int,
        /// Number of the port of the device.
        36 port: c_int,
        /// Latency of the device in microseconds.
        40 latency: c_float,
        /// Most communicators of the device.
        44 max_comms: c_int,
        /// Most buffers of one `irecv`.
        48 max_recvs: c_int,
        /// Type of the device, one of `DEVICE_*`.
        52 net_device_type: c_int,
        /// Version of the device handles, one of `DEVICE_VERSION_*`.
        56 net_device_version: c_int,
    }

    /// Properties of a device, v9 and v10.
    pub struct PropertiesV9: 104, 8 {
        /// The NIC's name, unique.
        0 name: *const c_char,
        /// The device's directory in sysfs, or null.
        8 pci_path: *const c_char,
        /// GUID of the device, equal for devices that share a port.
        16 guid: u64,
        /// Kinds of memory that the device accepts, as `PTR_*` bits.
        24 ptr_support: c_int,
        /// 1 if a registration within another one is almost free, else 0.
        28 reg_is_global: c_int,
        /// 1 if every receive into GPU memory needs a flush, else 0.
        32 force_flush: c_int,
        /// Link speed of the device in Mbit/s.
        36 speed: c_int,
        /// Number of the port of the device.
        40 port: c_int,
        /// Latency of the device in microseconds.
        44 latency: c_float,
        /// Most communicators of the device.
        48 max_comms: c_int,
        /// Most buffers of one `irecv`.
        52 max_recvs: c_int,
        /// Type of the device, one of `DEVICE_*`.
        56 net_device_type: c_int,
        /// Version of the device handles, one of `DEVICE_VERSION_*`.
        60 net_device_version: c_int,
        /// Devices behind a virtual device; a plain device names itself.
        64 v_props: VDevicePropsV9,
        /// Largest message between two ranks, in bytes.
        88 max_p2p_bytes: usize,
        /// Largest message of a collective, in bytes.
        96 max_coll_bytes: usize,
    }

    /// Properties of a device, v11.
    pub struct PropertiesV11: 112, 8 {
        /// The NIC's name, unique.
        0 name: *const c_char,
        /// The device's directory in sysfs, or null.
        8 pci_path: *const c_char,
        /// GUID of the device, equal for devices that share a port.
        16 guid: u64,
        /// Kinds of memory that the device accepts, as `PTR_*` bits.
        24 ptr_support: c_int,
        /// 1 if a registration within another one is almost free, else 0.
        28 reg_is_global: c_int,
        /// 1 if every receive into GPU memory needs a flush, else 0.
        32 force_flush: c_int,
        /// Link speed of the device in Mbit/s.
        36 speed: c_int,
        /// Number of the port of the device.
        40 port: c_int,
        /// Latency of the device in microseconds.
        44 latency: c_float,
        /// Most communicators of the device.
        48 max_comms: c_int,
        /// Most buffers of one `irecv`.
        52 max_recvs: c_int,
        /// Type of the device, one of `DEVICE_*`.
        56 net_device_type: c_int,
        /// Version of the device handles, one of `DEVICE_VERSION_*`.
        60 net_device_version: c_int,
        /// Devices behind a virtual device; a plain device names itself.
        64 v_props: VDevicePropsV9,
        /// Largest message between two ranks, in bytes.
        88 max_p2p_bytes: usize,
        /// Largest message of a collective, in bytes.
        96 max_coll_bytes: usize,
        /// Most requests in one multi-request; 1 in every known plugin.
        104 max_multi_request_size: c_int,
    }

    /// Properties of a device, v12.
    pub struct PropertiesV12: 128, 8 {
        /// The NIC's name, unique.
        0 name: *const c_char,
        /// The device's directory in sysfs, or null.
        8 pci_path: *const c_char,
        /// GUID of the device, equal for devices that share a port.
        16 guid: u64,
        /// Kinds of memory that the device accepts, as `PTR_*` bits.
        24 ptr_support: c_int,
        /// 1 if a registration within another one is almost free, else 0.
        28 reg_is_global: c_int,
        /// 1 if every receive into GPU memory needs a flush, else 0.
        32 force_flush: c_int,
        /// Link speed of the device in Mbit/s.
        36 speed: c_int,
        /// Number of the port of the device.
        40 port: c_int,
        /// Latency of the device in microseconds.
        44 latency: c_float,
        /// Most communicators of the device.
        48 max_comms: c_int,
        /// Most buffers of one `irecv`.
        52 max_recvs: c_int,
        /// Type of the device, one of `DEVICE_*`.
        56 net_device_type: c_int,
        /// Version of the device handles, one of `DEVICE_VERSION_*`.
        60 net_device_version: c_int,
        /// Devices behind a virtual device; a plain device names itself.
        64 v_props: VDevicePropsV12,
        /// Largest message between two ranks, in bytes.
        104 max_p2p_bytes: usize,
        /// Largest message of a collective, in bytes.
        112 max_coll_bytes: usize,
        /// Most requests in one multi-request; 1 in every known plugin.
        120 max_multi_request_size: c_int,
        /// Rail of the device; -1 if unknown.
        124 rail_id: i16,
        /// Plane of the device; -1 if unknown.
        126 plane_id: i16,
    }
}

/// Properties of a device, v5: the layout of v6.
pub type PropertiesV5 = PropertiesV6;
/// Properties of a device, v10: the layout of v9.
pub type PropertiesV10 = PropertiesV9;
