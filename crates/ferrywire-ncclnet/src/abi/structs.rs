//! Structs that the functions of a table take, except properties.

use std::ffi::{c_int, c_void};

use super::constants::{VIRTUAL_DEVICES_MAX_V9, VIRTUAL_DEVICES_MAX_V12};

layout! {
    /// The GPU's part in a connection, as `connect` or `accept` may describe it (v7 and later).
    ///
    /// `accept` of an unpack device receives a handle with only type and version set, and fills in the rest.
    pub struct DeviceHandle: 32, 8 {
        /// Type of the device, one of `DEVICE_*`.
        0 net_device_type: c_int,
        /// Version of the device handles, one of `DEVICE_VERSION_*`.
        4 net_device_version: c_int,
        /// Device memory, in a layout of the plugin's own.
        8 handle: *mut c_void,
        /// Number of bytes at `handle`.
        16 size: usize,
        /// 1 if the host must keep testing requests for the GPU to make progress, else 0.
        24 needs_proxy_progress: c_int,
    }

    /// The devices of a virtual device, v9 to v11.
    pub struct VDevicePropsV9: 20, 4 {
        /// Number of valid entries in `devs`.
        0 ndevs: c_int,
        /// Indices of the merged devices.
        4 devs: [c_int; VIRTUAL_DEVICES_MAX_V9],
    }

    /// The devices of a virtual device, v12.
    pub struct VDevicePropsV12: 36, 4 {
        /// Number of valid entries in `devs`.
        0 ndevs: c_int,
        /// Indices of the merged devices.
        4 devs: [c_int; VIRTUAL_DEVICES_MAX_V12],
    }

    /// Configuration of a communicator: an argument of `connect` in v10, of `init` in v11 and v12.
    pub struct CommConfig: 4, 4 {
        /// Traffic class of the communicator, or [`TRAFFIC_CLASS_UNDEFINED`](super::TRAFFIC_CLASS_UNDEFINED).
        0 traffic_class: c_int,
    }

    /// Expected traffic in one direction of [`NetAttr`].
    pub struct NetDirectionAttr: 16, 4 {
        /// Most peers that are active at once.
        0 max_concurrent_peers: i32,
        /// Fewest peers that are active at once.
        4 min_concurrent_peers: i32,
        /// Most flows to one peer.
        8 max_flows_per_peer: i32,
        /// Fewest flows to one peer.
        12 min_flows_per_peer: i32,
    }

    /// A hint to the plugin about future traffic (v11 and v12).
    pub struct NetAttr: 44, 4 {
        /// Expected outgoing traffic of the communicator.
        0 send: NetDirectionAttr,
        /// Expected incoming traffic of the communicator.
        16 recv: NetDirectionAttr,
        /// Bits of the collective operations that the traffic hint concerns.
        32 op: u32,
        /// Bits of the collective algorithms that the traffic hint concerns.
        36 algo: u32,
        /// Bits of the collective protocols that the traffic hint concerns.
        40 proto: u32,
    }
}

/// The devices of a virtual device, v10: the layout of v9.
pub type VDevicePropsV10 = VDevicePropsV9;
/// The devices of a virtual device, v11: the layout of v9.
pub type VDevicePropsV11 = VDevicePropsV9;
