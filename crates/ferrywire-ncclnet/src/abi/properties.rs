//! What `getProperties` writes, one struct per layout.
//!
//! Fields were put into the middle twice (v8 and v9), so that reading one version's bytes as another's
//! gives wrong numbers, not an error. v5 = v6 and v9 = v10 are the same.

use std::ffi::{c_char, c_float, c_int};

use super::structs::{VDevicePropsV9, VDevicePropsV12};

layout! {
    /// Properties of a device, v4.
    pub struct PropertiesV4: 40, 8 {
        /// The NIC's name, unique.
        0 name: *const c_char,
        /// Its directory in sysfs, or null.
        8 pci_path: *const c_char,
        /// Equal for devices that share a port.
        16 guid: u64,
        /// `PTR_*` bits.
        24 ptr_support: c_int,
        /// Mbit/s.
        28 speed: c_int,
        /// Port number.
        32 port: c_int,
        /// Communicators it can carry.
        36 max_comms: c_int,
    }

    /// Properties of a device, v5 and v6.
    pub struct PropertiesV6: 48, 8 {
        /// The NIC's name, unique.
        0 name: *const c_char,
        /// Its directory in sysfs, or null.
        8 pci_path: *const c_char,
        /// Equal for devices that share a port.
        16 guid: u64,
        /// `PTR_*` bits.
        24 ptr_support: c_int,
        /// Mbit/s.
        28 speed: c_int,
        /// Port number.
        32 port: c_int,
        /// Microseconds.
        36 latency: c_float,
        /// Communicators it can carry.
        40 max_comms: c_int,
        /// Greatest n of `irecv`.
        44 max_recvs: c_int,
    }

    /// Properties of a device, v7.
    pub struct PropertiesV7: 56, 8 {
        /// The NIC's name, unique.
        0 name: *const c_char,
        /// Its directory in sysfs, or null.
        8 pci_path: *const c_char,
        /// Equal for devices that share a port.
        16 guid: u64,
        /// `PTR_*` bits.
        24 ptr_support: c_int,
        /// Mbit/s.
        28 speed: c_int,
        /// Port number.
        32 port: c_int,
        /// Microseconds.
        36 latency: c_float,
        /// Communicators it can carry.
        40 max_comms: c_int,
        /// Greatest n of `irecv`.
        44 max_recvs: c_int,
        /// One of the `DEVICE_*` types.
        48 net_device_type: c_int,
        /// One of the `DEVICE_VERSION_*`.
        52 net_device_version: c_int,
    }

    /// Properties of a device, v8.
    pub struct PropertiesV8: 64, 8 {
        /// The NIC's name, unique.
        0 name: *const c_char,
        /// Its directory in sysfs, or null.
        8 pci_path: *const c_char,
        /// Equal for devices that share a port.
        16 guid: u64,
        /// `PTR_*` bits.
        24 ptr_support: c_int,
        /// 1: a registration inside another costs next to nothing.
        28 reg_is_global: c_int,
        /// Mbit/s.
        32 speed: c_int,
        /// Port number.
        36 port: c_int,
        /// Microseconds.
        40 latency: c_float,
        /// Communicators it can carry.
        44 max_comms: c_int,
        /// Greatest n of `irecv`.
        48 max_recvs: c_int,
        /// One of the `DEVICE_*` types.
        52 net_device_type: c_int,
        /// One of the `DEVICE_VERSION_*`.
        56 net_device_version: c_int,
    }

    /// Properties of a device, v9 and v10.
    pub struct PropertiesV9: 104, 8 {
        /// The NIC's name, unique.
        0 name: *const c_char,
        /// Its directory in sysfs, or null.
        8 pci_path: *const c_char,
        /// Equal for devices that share a port.
        16 guid: u64,
        /// `PTR_*` bits.
        24 ptr_support: c_int,
        /// 1: a registration inside another costs next to nothing.
        28 reg_is_global: c_int,
        /// 1: every receive into GPU memory needs a flush.
        32 force_flush: c_int,
        /// Mbit/s.
        36 speed: c_int,
        /// Port number.
        40 port: c_int,
        /// Microseconds.
        44 latency: c_float,
        /// Communicators it can carry.
        48 max_comms: c_int,
        /// Greatest n of `irecv`.
        52 max_recvs: c_int,
        /// One of the `DEVICE_*` types.
        56 net_device_type: c_int,
        /// One of the `DEVICE_VERSION_*`.
        60 net_device_version: c_int,
        /// The devices behind it; a plain one names itself.
        64 v_props: VDevicePropsV9,
        /// Largest message between two ranks.
        88 max_p2p_bytes: usize,
        /// Largest message of a collective.
        96 max_coll_bytes: usize,
    }

    /// Properties of a device, v11.
    pub struct PropertiesV11: 112, 8 {
        /// The NIC's name, unique.
        0 name: *const c_char,
        /// Its directory in sysfs, or null.
        8 pci_path: *const c_char,
        /// Equal for devices that share a port.
        16 guid: u64,
        /// `PTR_*` bits.
        24 ptr_support: c_int,
        /// 1: a registration inside another costs next to nothing.
        28 reg_is_global: c_int,
        /// 1: every receive into GPU memory needs a flush.
        32 force_flush: c_int,
        /// Mbit/s.
        36 speed: c_int,
        /// Port number.
        40 port: c_int,
        /// Microseconds.
        44 latency: c_float,
        /// Communicators it can carry.
        48 max_comms: c_int,
        /// Greatest n of `irecv`.
        52 max_recvs: c_int,
        /// One of the `DEVICE_*` types.
        56 net_device_type: c_int,
        /// One of the `DEVICE_VERSION_*`.
        60 net_device_version: c_int,
        /// The devices behind it; a plain one names itself.
        64 v_props: VDevicePropsV9,
        /// Largest message between two ranks.
        88 max_p2p_bytes: usize,
        /// Largest message of a collective.
        96 max_coll_bytes: usize,
        /// 1 in every plugin known.
        104 max_multi_request_size: c_int,
    }

    /// Properties of a device, v12.
    pub struct PropertiesV12: 128, 8 {
        /// The NIC's name, unique.
        0 name: *const c_char,
        /// Its directory in sysfs, or null.
        8 pci_path: *const c_char,
        /// Equal for devices that share a port.
        16 guid: u64,
        /// `PTR_*` bits.
        24 ptr_support: c_int,
        /// 1: a registration inside another costs next to nothing.
        28 reg_is_global: c_int,
        /// 1: every receive into GPU memory needs a flush.
        32 force_flush: c_int,
        /// Mbit/s.
        36 speed: c_int,
        /// Port number.
        40 port: c_int,
        /// Microseconds.
        44 latency: c_float,
        /// Communicators it can carry.
        48 max_comms: c_int,
        /// Greatest n of `irecv`.
        52 max_recvs: c_int,
        /// One of the `DEVICE_*` types.
        56 net_device_type: c_int,
        /// One of the `DEVICE_VERSION_*`.
        60 net_device_version: c_int,
        /// The devices behind it; a plain one names itself.
        64 v_props: VDevicePropsV12,
        /// Largest message between two ranks.
        104 max_p2p_bytes: usize,
        /// Largest message of a collective.
        112 max_coll_bytes: usize,
        /// 1 in every plugin known.
        120 max_multi_request_size: c_int,
        /// Rail, -1 if not known.
        124 rail_id: i16,
        /// Plane, -1 if not known.
        126 plane_id: i16,
    }
}

/// Properties of a device, v5: as v6.
pub type PropertiesV5 = PropertiesV6;
/// Properties of a device, v10: as v9.
pub type PropertiesV10 = PropertiesV9;
