//! The type of each function in a plugin's table.
//!
//! A name ends in the first version with this signature; a later signature has a name of its own. A name
//! without a number has one signature in every version. `PP` stands for "pointer to an opaque pointer": an
//! output, or an array of opaque pointers.

use std::ffi::{c_char, c_int, c_ulong, c_void};

use super::constants::ResultCode;
use super::properties::*;
use super::structs::{CommConfig, DeviceHandle, NetAttr, VDevicePropsV9, VDevicePropsV12};

/// An opaque pointer: context, communicator, data, memory handle or request.
pub type P = *mut c_void;
/// Pointer to an opaque pointer: an output, or the first of an array.
pub type PP = *mut *mut c_void;
/// The device-handle argument: points at a pointer that the plugin may read or set. May be null.
pub type Dh = *mut *mut DeviceHandle;

/// The host's logger. Arguments: level, subsystem bits, file, line, format, and the format's values.
///
/// A host may pass none. Finished text must be passed as the value of `"%s"`, never as the format.
pub type Log = Option<
    unsafe extern "C" fn(
        level: c_int,
        flags: c_ulong,
        file: *const c_char,
        line: c_int,
        format: *const c_char,
        ...
    ),
>;
/// The profiler callback that hosts of v10 and later pass.
pub type Prof = Option<
    unsafe extern "C" fn(e_handle: PP, kind: c_int, p_handle: P, plugin_id: i64, ext_data: P) -> ResultCode,
>;

/// Signature of `init` in v4 to v9.
pub type InitV4 = unsafe extern "C" fn(log: Log) -> ResultCode;
/// Signature of `init` in v10.
pub type InitV10 = unsafe extern "C" fn(log: Log, prof: Prof) -> ResultCode;
/// Signature of `init` in v11 and v12: called once per communicator; returns a context, which later calls pass back.
pub type InitV11 = unsafe extern "C" fn(
    context: PP,
    comm_id: u64,
    config: *mut CommConfig,
    log: Log,
    prof: Prof,
) -> ResultCode;

/// Signature of `devices`: writes the number of devices.
pub type Devices = unsafe extern "C" fn(ndev: *mut c_int) -> ResultCode;

/// Signature of `getProperties` in v4.
pub type GetPropertiesV4 = unsafe extern "C" fn(dev: c_int, props: *mut PropertiesV4) -> ResultCode;
/// Signature of `getProperties` in v5 and v6.
pub type GetPropertiesV5 = unsafe extern "C" fn(dev: c_int, props: *mut PropertiesV5) -> ResultCode;
/// Signature of `getProperties` in v7.
pub type GetPropertiesV7 = unsafe extern "C" fn(dev: c_int, props: *mut PropertiesV7) -> ResultCode;
/// Signature of `getProperties` in v8.
pub type GetPropertiesV8 = unsafe extern "C" fn(dev: c_int, props: *mut PropertiesV8) -> ResultCode;
/// Signature of `getProperties` in v9 and v10.
pub type GetPropertiesV9 = unsafe extern "C" fn(dev: c_int, props: *mut PropertiesV9) -> ResultCode;
/// Signature of `getProperties` in v11.
pub type GetPropertiesV11 = unsafe extern "C" fn(dev: c_int, props: *mut PropertiesV11) -> ResultCode;
/// Signature of `getProperties` in v12.
pub type GetPropertiesV12 = unsafe extern "C" fn(dev: c_int, props: *mut PropertiesV12) -> ResultCode;

/// Signature of `listen` in v4 to v10.
pub type ListenV4 = unsafe extern "C" fn(dev: c_int, handle: P, listen_comm: PP) -> ResultCode;
/// Signature of `listen` in v11 and v12.
pub type ListenV11 = unsafe extern "C" fn(context: P, dev: c_int, handle: P, listen_comm: PP) -> ResultCode;

/// Signature of `connect` in v4 to v6.
pub type ConnectV4 = unsafe extern "C" fn(dev: c_int, handle: P, send_comm: PP) -> ResultCode;
/// Signature of `connect` in v7 to v9.
pub type ConnectV7 = unsafe extern "C" fn(dev: c_int, handle: P, send_comm: PP, device: Dh) -> ResultCode;
/// Signature of `connect` in v10.
pub type ConnectV10 = unsafe extern "C" fn(
    dev: c_int,
    config: *mut CommConfig,
    handle: P,
    send_comm: PP,
    device: Dh,
) -> ResultCode;
/// Signature of `connect` in v11 and v12.
pub type ConnectV11 =
    unsafe extern "C" fn(context: P, dev: c_int, handle: P, send_comm: PP, device: Dh) -> ResultCode;

/// Signature of `accept` in v4 to v6.
pub type AcceptV4 = unsafe extern "C" fn(listen_comm: P, recv_comm: PP) -> ResultCode;
/// Signature of `accept` in v7 to v12.
pub type AcceptV7 = unsafe extern "C" fn(listen_comm: P, recv_comm: PP, device: Dh) -> ResultCode;

/// Signature of `regMr` in v4 to v7.
pub type RegMrV4 =
    unsafe extern "C" fn(comm: P, data: P, size: c_int, kind: c_int, mhandle: PP) -> ResultCode;
/// Signature of `regMr` in v8 to v12.
pub type RegMrV8 =
    unsafe extern "C" fn(comm: P, data: P, size: usize, kind: c_int, mhandle: PP) -> ResultCode;
/// Signature of `regMrDmaBuf`.
pub type RegMrDmaBuf = unsafe extern "C" fn(
    comm: P,
    data: P,
    size: usize,
    kind: c_int,
    offset: u64,
    fd: c_int,
    mhandle: PP,
) -> ResultCode;
/// Signature of `deregMr`.
pub type DeregMr = unsafe extern "C" fn(comm: P, mhandle: P) -> ResultCode;

/// Signature of `isend` in v4.
pub type IsendV4 = unsafe extern "C" fn(comm: P, data: P, size: c_int, mhandle: P, request: PP) -> ResultCode;
/// Signature of `isend` in v5 to v8.
pub type IsendV5 =
    unsafe extern "C" fn(comm: P, data: P, size: c_int, tag: c_int, mhandle: P, request: PP) -> ResultCode;
/// Signature of `isend` in v9.
pub type IsendV9 =
    unsafe extern "C" fn(comm: P, data: P, size: usize, tag: c_int, mhandle: P, request: PP) -> ResultCode;
/// Signature of `isend` in v10 to v12.
pub type IsendV10 = unsafe extern "C" fn(
    comm: P,
    data: P,
    size: usize,
    tag: c_int,
    mhandle: P,
    phandle: P,
    request: PP,
) -> ResultCode;

/// Signature of `irecv` in v4: a single buffer.
pub type IrecvV4 = unsafe extern "C" fn(comm: P, data: P, size: c_int, mhandle: P, request: PP) -> ResultCode;
/// Signature of `irecv` in v5 to v8.
pub type IrecvV5 = unsafe extern "C" fn(
    comm: P,
    n: c_int,
    data: PP,
    sizes: *mut c_int,
    tags: *mut c_int,
    mhandles: PP,
    request: PP,
) -> ResultCode;
/// Signature of `irecv` in v9.
pub type IrecvV9 = unsafe extern "C" fn(
    comm: P,
    n: c_int,
    data: PP,
    sizes: *mut usize,
    tags: *mut c_int,
    mhandles: PP,
    request: PP,
) -> ResultCode;
/// Signature of `irecv` in v10 to v12.
pub type IrecvV10 = unsafe extern "C" fn(
    comm: P,
    n: c_int,
    data: PP,
    sizes: *mut usize,
    tags: *mut c_int,
    mhandles: PP,
    phandles: PP,
    request: PP,
) -> ResultCode;

/// Signature of `iflush` in v4: a single buffer.
pub type IflushV4 =
    unsafe extern "C" fn(comm: P, data: P, size: c_int, mhandle: P, request: PP) -> ResultCode;
/// Signature of `iflush` in v5 to v12; sizes are `int` in all of them.
pub type IflushV5 = unsafe extern "C" fn(
    comm: P,
    n: c_int,
    data: PP,
    sizes: *mut c_int,
    mhandles: PP,
    request: PP,
) -> ResultCode;

/// Signature of `test`: asks whether a request is done. `sizes` counts in `int` in every version, and may be null.
pub type Test = unsafe extern "C" fn(request: P, done: *mut c_int, sizes: *mut c_int) -> ResultCode;
/// Signature of `closeSend`, `closeRecv` and `closeListen`.
pub type Close = unsafe extern "C" fn(comm: P) -> ResultCode;
/// Signature of `getDeviceMr`.
pub type GetDeviceMr = unsafe extern "C" fn(comm: P, mhandle: P, device_mhandle: PP) -> ResultCode;
/// Signature of `irecvConsumed`.
pub type IrecvConsumed = unsafe extern "C" fn(recv_comm: P, n: c_int, request: P) -> ResultCode;
/// Signature of `makeVDevice` in v9 to v11.
pub type MakeVDeviceV9 = unsafe extern "C" fn(dev: *mut c_int, props: *mut VDevicePropsV9) -> ResultCode;
/// Signature of `makeVDevice` in v12.
pub type MakeVDeviceV12 = unsafe extern "C" fn(dev: *mut c_int, props: *mut VDevicePropsV12) -> ResultCode;
/// Signature of `finalize`.
pub type Finalize = unsafe extern "C" fn(context: P) -> ResultCode;
/// Signature of `setNetAttr`.
pub type SetNetAttr = unsafe extern "C" fn(context: P, attr: *mut NetAttr) -> ResultCode;
