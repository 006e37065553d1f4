//! Structures that functions of a table take, other than properties.

use std::ffi::{c_int, c_void};

use super::constants::{VIRTUAL_DEVICES_MAX_V9, VIRTUAL_DEVICES_MAX_V12};

layout! {
    /// What `connect` and `accept` may say about the GPU's part in a connection (v7 and later).
    ///
    /// `accept` of an unpack device gets one that is zeroed except for type and version, and completes it.
    pub struct DeviceHandle: 32, 8 {
        /// One of the `DEVICE_*` types.
        0 net_device_type: c_int,
        /// One of the `DEVICE_VERSION_*`.
        4 net_device_version: c_int,
        /// Device memory of the plugin's own form.
        8 handle: *mut c_void,
        /// Bytes at `handle`.
        16 size: usize,
        /// 1: the host must go on testing requests.
        24 needs_proxy_progress: c_int,
    }

    /// The devices of a virtual one, v9 to v11.
    pub struct VDevicePropsV9: 20, 4 {
        /// How many of `devs` count.
        0 ndevs: c_int,
        /// Their indices.
        4 devs: [c_int; VIRTUAL_DEVICES_MAX_V9],
    }

    /// The devices of a virtual one, v12.
    pub struct VDevicePropsV12: 36, 4 {
        /// How many of `devs` count.
        0 ndevs: c_int,
        /// Their indices.
        4 devs: [c_int; VIRTUAL_DEVICES_MAX_V12],
    }

    /// Configuration of a communicator: in `connect` of v10, in `init` of v11 and v12.
    pub struct CommConfig: 4, 4 {
        /// Traffic class, -1 where nobody has set one.
        0 traffic_class: c_int,
    }

    /// One direction of [`NetAttr`].
    pub struct NetDirectionAttr: 16, 4 {
        /// Most peers that are active at once.
        0 max_concurrent_peers: i32,
        /// Fewest.
        4 min_concurrent_peers: i32,
        /// Most flows to one of them.
        8 max_flows_per_peer: i32,
        /// Fewest.
        12 min_flows_per_peer: i32,
    }

    /// A hint about the traffic to come (v11 and v12).
    pub struct NetAttr: 44, 4 {
        /// What will be sent.
        0 send: NetDirectionAttr,
        /// What will be received.
        16 recv: NetDirectionAttr,
        /// Bits of the operations.
        32 op: u32,
        /// Bits of the algorithms.
        36 algo: u32,
        /// Bits of the protocols.
        40 proto: u32,
    }
}

/// The virtual devices of v10: as v9.
pub type VDevicePropsV10 = VDevicePropsV9;
/// The virtual devices of v11: as v9.
pub type VDevicePropsV11 = VDevicePropsV9;
