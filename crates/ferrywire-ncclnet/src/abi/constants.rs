//! Constants of the ncclNet interface: result codes, memory and device types, sizes, log levels.
//!
//! The values are NCCL's own.

use std::ffi::c_int;
use std::fmt;

/// Return value of every function in a plugin's table (`ncclResult_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct ResultCode(pub c_int);

impl ResultCode {
    /// Result code: the call succeeded.
    pub const SUCCESS: ResultCode = ResultCode(0);
    /// Result code: a CUDA call failed.
    pub const UNHANDLED_CUDA_ERROR: ResultCode = ResultCode(1);
    /// Result code: a system call failed.
    pub const SYSTEM_ERROR: ResultCode = ResultCode(2);
    /// Result code: internal error. Some plugins return it when their request window is full.
    pub const INTERNAL_ERROR: ResultCode = ResultCode(3);
    /// Result code: an argument is wrong.
    pub const INVALID_ARGUMENT: ResultCode = ResultCode(4);
    /// Result code: the call is not allowed at this point.
    pub const INVALID_USAGE: ResultCode = ResultCode(5);
    /// Result code: the peer failed.
    pub const REMOTE_ERROR: ResultCode = ResultCode(6);
    /// Result code: the operation has not finished.
    pub const IN_PROGRESS: ResultCode = ResultCode(7);
    /// Result code: the operation timed out (newest versions only).
    pub const TIMEOUT: ResultCode = ResultCode(8);

    /// Whether the code is [`ResultCode::SUCCESS`].
    pub const fn is_success(self) -> bool {
        self.0 == 0
    }
}

impl fmt::Display for ResultCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = match self.0 {
            0 => "success",
            1 => "unhandled CUDA error",
            2 => "system error",
            3 => "internal error",
            4 => "invalid argument",
            5 => "invalid usage",
            6 => "remote error",
            7 => "in progress",
            8 => "timeout",
            _ => "not a known result",
        };
        write!(f, "result {} ({words})", self.0)
    }
}

/// Kind of memory that is passed to `regMr`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum PointerType {
    /// Registration of host memory.
    Host = PTR_HOST,
    /// Registration of CUDA device memory.
    Cuda = PTR_CUDA,
}

/// Pointer type, and bit of `ptr_support`: host memory.
pub const PTR_HOST: c_int = 0x1;
/// Pointer type, and bit of `ptr_support`: CUDA memory.
pub const PTR_CUDA: c_int = 0x2;
/// Bit of `ptr_support`: `regMrDmaBuf` works.
pub const PTR_DMABUF: c_int = 0x4;

/// Value of `net_device_type` for an ordinary NIC.
pub const DEVICE_HOST: c_int = 0;
/// Value of `net_device_type` for a device whose received bytes are scattered and gathered by the GPU.
pub const DEVICE_UNPACK: c_int = 1;
/// Value of `net_device_type` for GPU-initiated networking through a proxy.
pub const DEVICE_GIN_PROXY: c_int = 2;
/// Value of `net_device_type` for GPU-initiated networking with GDAKI.
pub const DEVICE_GIN_GDAKI: c_int = 3;
/// Value of `net_device_type` for GPU-initiated networking with GPI.
pub const DEVICE_GIN_GPI: c_int = 4;
/// `net_device_version` of an ordinary NIC.
pub const DEVICE_VERSION_NONE: c_int = 0x0;
/// `net_device_version` of the unpack layout; only one exists.
pub const DEVICE_VERSION_UNPACK: c_int = 0x7;

/// Size of a connection handle in bytes.
pub const HANDLE_BYTES: usize = 128;
/// Size of a connection handle in bytes that the oldest hosts of v4 plugins provide.
pub const HANDLE_BYTES_V4: usize = 64;
/// Most outstanding requests that NCCL posts per communicator (8 before NCCL 2.19).
pub const REQUESTS_MAX: usize = 32;
/// Value of `*request` on entry to `irecv`, v9 and later: the plugin may complete the receive early.
pub const OPTIONAL_RECV_COMPLETION: usize = 0x1;
/// Upper bound in bytes of `max_p2p_bytes` and `max_coll_bytes`.
pub const NET_SIZE_BYTES_MAX: usize = 1 << 40;
/// Largest send or receive of v6 to v8 plugins, in bytes.
pub const MESSAGE_BYTES_MAX_V6: usize = 1 << 30;
/// Most devices that one virtual device may merge, v9 to v11.
pub const VIRTUAL_DEVICES_MAX_V9: usize = 4;
/// Most devices that one virtual device may merge, v12.
pub const VIRTUAL_DEVICES_MAX_V12: usize = 8;
/// Value of a `CommConfig::traffic_class` that is not set.
pub const TRAFFIC_CLASS_UNDEFINED: c_int = -1;
/// Value of a field of `NetAttr` that is not set; for unsigned fields, the value with these bits.
pub const ATTRIBUTE_UNDEFINED: i32 = -1;
/// Value of a `rail_id` or `plane_id` that is unknown.
pub const RAIL_UNKNOWN: i16 = -1;

/// Log level: never printed.
pub const LOG_NONE: c_int = 0;
/// Log level: version lines.
pub const LOG_VERSION: c_int = 1;
/// Log level: warnings and errors.
pub const LOG_WARN: c_int = 2;
/// Log level: informational lines.
pub const LOG_INFO: c_int = 3;
/// Log level: the plugin is about to abort.
pub const LOG_ABORT: c_int = 4;
/// Log level: the most detailed lines.
pub const LOG_TRACE: c_int = 5;

/// Log subsystem bits, as the second argument of the logger.
pub mod subsystem {
    use std::ffi::c_ulong;

    /// Log subsystem bit: initialization.
    pub const INIT: c_ulong = 0x1;
    /// Log subsystem bit: collectives.
    pub const COLL: c_ulong = 0x2;
    /// Log subsystem bit: peer to peer.
    pub const P2P: c_ulong = 0x4;
    /// Log subsystem bit: shared memory.
    pub const SHM: c_ulong = 0x8;
    /// Log subsystem bit: network.
    pub const NET: c_ulong = 0x10;
    /// Log subsystem bit: topology.
    pub const GRAPH: c_ulong = 0x20;
    /// Log subsystem bit: tuning.
    pub const TUNING: c_ulong = 0x40;
    /// Log subsystem bit: environment.
    pub const ENV: c_ulong = 0x80;
    /// Log subsystem bit: allocation.
    pub const ALLOC: c_ulong = 0x100;
    /// Log subsystem bit: calls.
    pub const CALL: c_ulong = 0x200;
    /// Log subsystem bit: the proxy thread.
    pub const PROXY: c_ulong = 0x400;
    /// Log subsystem bit: NVLink SHARP.
    pub const NVLS: c_ulong = 0x800;
    /// Log subsystem bit: bootstrap.
    pub const BOOTSTRAP: c_ulong = 0x1000;
    /// Log subsystem bit: registration.
    pub const REG: c_ulong = 0x2000;
    /// Log subsystem bit: profiling.
    pub const PROFILE: c_ulong = 0x4000;
    /// Log subsystem bit: reliability.
    pub const RAS: c_ulong = 0x8000;
    /// Log subsystem bit: everything.
    pub const ALL: c_ulong = c_ulong::MAX;
}

/// Profiler event type: the event starts.
pub const PROFILE_START: c_int = 0;
/// Profiler event type: the event stops.
pub const PROFILE_STOP: c_int = 1;
/// Profiler event type: the event is updated.
pub const PROFILE_UPDATE: c_int = 2;
/// Profiler event type: the event is updated, then stops.
pub const PROFILE_UPDATE_AND_STOP: c_int = 3;

const _: () = assert!(PTR_HOST & PTR_CUDA == 0 && (PTR_HOST | PTR_CUDA) & PTR_DMABUF == 0);
const _: () = assert!(PointerType::Host as c_int == 1 && PointerType::Cuda as c_int == 2);
const _: () = assert!(HANDLE_BYTES_V4 < HANDLE_BYTES && VIRTUAL_DEVICES_MAX_V9 < VIRTUAL_DEVICES_MAX_V12);
const _: () = assert!(MESSAGE_BYTES_MAX_V6 <= i32::MAX as usize && MESSAGE_BYTES_MAX_V6 < NET_SIZE_BYTES_MAX);
