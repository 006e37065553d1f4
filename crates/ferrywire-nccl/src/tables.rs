//! The functions of `ncclNetPlugin_v5` to `_v12`: NCCL's pointers in, result codes out.
//!
//! There is no v4: NCCL 2.8 to 2.11, which use it, call `connect` and `accept` once and expect them to block, with all
//! connects of a rank before its accepts. Here both ends prove themselves to each other during repeated calls. Without
//! a matching table, those versions use their own sockets. NCCL 2.12 to 2.16 repeat the calls, but also make all connects of
//! a rank before its accepts: see `acceptor.rs`.
//!
//! Each version's table is a static. Functions that differ between versions are a few lines around a common body.
//! Invariants: no panic crosses into NCCL, it becomes result 3; every output is written on every path.
//! Read next: `properties.rs`, `device.rs` and `merged.rs`, then `attempt.rs` and `comm.rs`.

use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::ptr;

use ferrywire_ncclnet::abi::*;

use crate::attempt;
use crate::channels;
use crate::comm::{Comm, Memory, Request};
use crate::device::devices as devices_of_this_host;
use crate::failure::{Fault, Outcome, guarded};
use crate::listener::{self, ListenComm};
use crate::log;
use crate::merged::{self, device};
use crate::properties::*;
use crate::ranks;
use crate::settings;
use crate::sweeper;

fn start(log: Log) -> ResultCode {
    log::set_logger(log);
    guarded(begin)
}

unsafe extern "C" fn init_v5(log: Log) -> ResultCode {
    start(log)
}

/// Runs `init` for versions of NCCL that have tuners.
fn start_tuned(log: Log) -> ResultCode {
    log::set_logger(log);
    guarded(|| {
        begin()?;
        channels::ask();
        Ok(())
    })
}

fn begin() -> Outcome<()> {
    settings::see_cores();
    devices_of_this_host()?;
    merged::begin();
    Ok(())
}

unsafe extern "C" fn init_v9(log: Log) -> ResultCode {
    start_tuned(log)
}

unsafe extern "C" fn init_v10(log: Log, _prof: Prof) -> ResultCode {
    start_tuned(log)
}

unsafe extern "C" fn init_v11(
    context: PP,
    comm_id: u64,
    _config: *mut CommConfig,
    log: Log,
    _prof: Prof,
) -> ResultCode {
    let result = start_tuned(log);
    if result != ResultCode::SUCCESS {
        return result;
    }
    guarded(|| {
        if !context.is_null() {
            // SAFETY: NCCL gives room for the pointer to the context.
            unsafe { context.write(context_of(comm_id)) };
            ranks::begin(comm_id.max(1));
        }
        Ok(())
    })
}

/// The context of a rank: only the id of its communicator, as a pointer value. It is never dereferenced, because NCCL
/// may end a rank whose start failed with another plugin's pointer. Never null, which NCCL might take for missing.
fn context_of(comm_id: u64) -> P {
    ptr::without_provenance_mut(comm_id.max(1) as usize)
}

unsafe extern "C" fn finalize(context: P) -> ResultCode {
    guarded(|| {
        let communicator = context.addr() as u64;
        if ranks::end(communicator) {
            attempt::communicator_ended(communicator);
            listener::communicator_ended(communicator);
        }
        sweeper::sweep();
        Ok(())
    })
}

unsafe extern "C" fn set_net_attr(_context: P, _attributes: *mut NetAttr) -> ResultCode {
    ResultCode::SUCCESS
}

unsafe extern "C" fn devices(ndev: *mut c_int) -> ResultCode {
    guarded(|| {
        let count = merged::count()? as c_int;
        // SAFETY: NCCL gives room for the number of devices.
        unsafe { ndev.write(count) };
        Ok(())
    })
}

/// # Safety
/// `handle` has room for a handle, `listen_comm` for a pointer.
unsafe fn listen(
    dev: c_int,
    communicator: u64,
    waits_for_connect: bool,
    handle: P,
    listen_comm: PP,
) -> ResultCode {
    guarded(|| {
        sweeper::sweep();
        let (comm, made) = ListenComm::open(device(dev)?, communicator, waits_for_connect)?;
        let mut bytes = [0; HANDLE_BYTES];
        made.write(&mut bytes);
        // SAFETY: the caller promises room for a handle and a pointer.
        unsafe {
            handle.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), HANDLE_BYTES);
            listen_comm.write(Box::into_raw(Box::new(comm)).cast());
        }
        Ok(())
    })
}

unsafe extern "C" fn listen_v5(dev: c_int, handle: P, listen_comm: PP) -> ResultCode {
    // SAFETY: NCCL gives room for the pointer; its handle has this size.
    unsafe { listen(dev, 0, true, handle, listen_comm) }
}

unsafe extern "C" fn listen_v7(dev: c_int, handle: P, listen_comm: PP) -> ResultCode {
    // SAFETY: NCCL gives room for the pointer; its handle has this size.
    unsafe { listen(dev, 0, false, handle, listen_comm) }
}

unsafe extern "C" fn listen_v11(context: P, dev: c_int, handle: P, listen_comm: PP) -> ResultCode {
    // SAFETY: NCCL gives room for the pointer; its handle has this size.
    unsafe { listen(dev, context.addr() as u64, false, handle, listen_comm) }
}

/// # Safety
/// `handle` is a handle, the same in each call; `send_comm` has room for a pointer.
unsafe fn connect(context: P, dev: c_int, handle: P, send_comm: PP) -> ResultCode {
    guarded(|| {
        // SAFETY: the caller promises a handle, or null.
        let handle = unsafe {
            send_comm.write(ptr::null_mut());
            handle.cast::<[u8; HANDLE_BYTES]>().as_mut()
        };
        let handle = handle.ok_or_else(|| Fault::usage("connect was called without a handle"))?;
        let comm = attempt::connect(device(dev)?, handle, context.addr() as u64)?;
        // SAFETY: the caller promises room for the pointer.
        unsafe { send_comm.write(raw(comm)) };
        Ok(())
    })
}

unsafe extern "C" fn connect_v5(dev: c_int, handle: P, send_comm: PP) -> ResultCode {
    // SAFETY: NCCL gives a handle, and room for the pointer.
    unsafe { connect(ptr::null_mut(), dev, handle, send_comm) }
}

/// The comm as a pointer for NCCL; null while there is no comm.
fn raw(comm: Option<Box<Comm>>) -> P {
    comm.map_or(ptr::null_mut(), |comm| Box::into_raw(comm).cast())
}

unsafe extern "C" fn connect_v7(dev: c_int, handle: P, send_comm: PP, _device: Dh) -> ResultCode {
    // SAFETY: NCCL gives a handle, and room for the pointer. The device handle is not written.
    unsafe { connect_v5(dev, handle, send_comm) }
}

unsafe extern "C" fn connect_v10(
    dev: c_int,
    _config: *mut CommConfig,
    handle: P,
    send_comm: PP,
    _device: Dh,
) -> ResultCode {
    // SAFETY: NCCL gives a handle, and room for the pointer.
    unsafe { connect_v5(dev, handle, send_comm) }
}

unsafe extern "C" fn connect_v11(
    context: P,
    dev: c_int,
    handle: P,
    send_comm: PP,
    _device: Dh,
) -> ResultCode {
    // SAFETY: NCCL gives a handle, and room for the pointer.
    unsafe { connect(context, dev, handle, send_comm) }
}

unsafe extern "C" fn accept_v5(listen_comm: P, recv_comm: PP) -> ResultCode {
    guarded(|| {
        // SAFETY: NCCL gives room for the pointer, and a listener that no other thread uses now.
        let listener = unsafe {
            recv_comm.write(ptr::null_mut());
            listen_comm.cast::<ListenComm>().as_ref()
        };
        let comm = listener.ok_or_else(|| Fault::usage("accept was called without a listener"))?.accept()?;
        // SAFETY: NCCL gives room for the pointer.
        unsafe { recv_comm.write(raw(comm)) };
        Ok(())
    })
}

unsafe extern "C" fn accept_v7(listen_comm: P, recv_comm: PP, _device: Dh) -> ResultCode {
    // SAFETY: NCCL gives a listener, and room for the pointer.
    unsafe { accept_v5(listen_comm, recv_comm) }
}

/// A registration, the result of `regMr`. Host memory needs no registration, but its addresses identify the
/// requests that use the memory.
struct Registered(Range<usize>);

/// # Safety
/// `mhandle` is null or has room for a pointer.
unsafe fn register(data: P, bytes: Outcome<usize>, kind: c_int, mhandle: PP) -> ResultCode {
    guarded(|| {
        if kind != PTR_HOST {
            return Err(Fault::usage("memory of GPUs cannot be registered"));
        }
        let (begin, bytes) = (data as usize, bytes?);
        let end = begin.checked_add(bytes);
        let end = end.ok_or_else(|| {
            Fault::usage(format_args!("{bytes} bytes of memory at {begin:#x} exceed the address space"))
        })?;
        if !mhandle.is_null() {
            // SAFETY: the caller promises room for the pointer, or null.
            unsafe { mhandle.write(Box::into_raw(Box::new(Registered(begin..end))).cast()) };
        }
        Ok(())
    })
}

unsafe extern "C" fn reg_mr_v5(_comm: P, data: P, bytes: c_int, kind: c_int, mhandle: PP) -> ResultCode {
    // SAFETY: NCCL gives room for the pointer.
    unsafe { register(data, size(bytes), kind, mhandle) }
}

unsafe extern "C" fn reg_mr_v8(_comm: P, data: P, bytes: usize, kind: c_int, mhandle: PP) -> ResultCode {
    // SAFETY: NCCL gives room for the pointer.
    unsafe { register(data, Ok(bytes), kind, mhandle) }
}

unsafe extern "C" fn dereg_mr(comm: P, mhandle: P) -> ResultCode {
    guarded(|| {
        if mhandle.is_null() {
            return Ok(());
        }
        // SAFETY: the registration was made by `regMr`, and is deregistered once.
        let registered = unsafe { Box::from_raw(mhandle.cast::<Registered>()) };
        // SAFETY: the pointer is null, or that of an open comm.
        if let Some(comm) = unsafe { comm.cast::<Comm>().as_ref() } {
            comm.deregister(mhandle as Memory, &registered.0);
        }
        Ok(())
    })
}

/// # Safety
/// `comm` is null or an open comm of this plugin.
unsafe fn comm_at<'a>(comm: P) -> Outcome<&'a Comm> {
    // SAFETY: the caller promises null or an open comm.
    unsafe { comm.cast::<Comm>().as_ref() }.ok_or_else(|| Fault::usage("the comm is NULL"))
}

fn size(bytes: c_int) -> Outcome<usize> {
    usize::try_from(bytes).map_err(|_| Fault::usage(format_args!("the size {bytes} is negative")))
}

/// # Safety
/// The promises of [`comm_at`] and [`write_request`] hold, and `data` is readable until the request is done or the
/// comm is closed.
unsafe fn isend(comm: P, data: P, bytes: Outcome<usize>, tag: c_int, mhandle: P, request: PP) -> ResultCode {
    guarded(|| {
        // SAFETY: the caller promises an open comm and readable data.
        let posted = unsafe { comm_at(comm) }?.isend(data.cast(), bytes?, tag, mhandle as Memory)?;
        // SAFETY: the caller promises room for the request.
        unsafe { write_request(request, posted) };
        Ok(())
    })
}

/// # Safety
/// `request` is valid for writing a pointer.
unsafe fn write_request(request: PP, posted: Option<&Request>) {
    let pointer =
        posted.map_or(ptr::null_mut(), |request| ptr::from_ref(request).cast_mut().cast::<c_void>());
    // SAFETY: the caller promises room for the pointer.
    unsafe { request.write(pointer) };
}

unsafe extern "C" fn isend_v5(
    comm: P,
    data: P,
    bytes: c_int,
    tag: c_int,
    mhandle: P,
    request: PP,
) -> ResultCode {
    // SAFETY: NCCL gives an open comm, data that stays readable, and room for the request.
    unsafe { isend(comm, data, size(bytes), tag, mhandle, request) }
}

unsafe extern "C" fn isend_v9(
    comm: P,
    data: P,
    bytes: usize,
    tag: c_int,
    mhandle: P,
    request: PP,
) -> ResultCode {
    // SAFETY: NCCL gives an open comm, data that stays readable, and room for the request.
    unsafe { isend(comm, data, Ok(bytes), tag, mhandle, request) }
}

unsafe extern "C" fn isend_v10(
    comm: P,
    data: P,
    bytes: usize,
    tag: c_int,
    mhandle: P,
    _phandle: P,
    request: PP,
) -> ResultCode {
    // SAFETY: NCCL gives an open comm, data that stays readable, and room for the request.
    unsafe { isend(comm, data, Ok(bytes), tag, mhandle, request) }
}

/// # Safety
/// The promises of [`comm_at`] and [`write_request`] hold, and no other code uses the buffer until the request is
/// done or the comm is closed.
unsafe fn irecv(
    comm: P,
    n: c_int,
    buffer: impl FnOnce() -> (P, Outcome<usize>, P),
    request: PP,
) -> ResultCode {
    guarded(|| {
        if n != MAX_RECVS {
            return Err(Fault::usage(format_args!(
                "irecv was called with {n} buffers, but only {MAX_RECVS} is supported"
            )));
        }
        let (data, bytes, mhandle) = buffer();
        // SAFETY: the caller promises an open comm and a buffer. The request's value on entry permits an early end,
        // which is not used.
        let posted = unsafe { comm_at(comm) }?.irecv(data.cast(), bytes?, mhandle as Memory)?;
        // SAFETY: the caller promises room for the request.
        unsafe { write_request(request, posted) };
        Ok(())
    })
}

/// # Safety
/// `mhandles` is null or an array of at least one element.
unsafe fn first(mhandles: PP) -> P {
    // SAFETY: the caller promises null or an array.
    unsafe { mhandles.as_ref() }.copied().unwrap_or(ptr::null_mut())
}

unsafe extern "C" fn irecv_v5(
    comm: P,
    n: c_int,
    data: PP,
    sizes: *mut c_int,
    _tags: *mut c_int,
    mhandles: PP,
    request: PP,
) -> ResultCode {
    // SAFETY: NCCL gives an open comm and arrays of n elements, and n is 1 where they are read.
    unsafe { irecv(comm, n, || (*data, size(*sizes), first(mhandles)), request) }
}

unsafe extern "C" fn irecv_v9(
    comm: P,
    n: c_int,
    data: PP,
    sizes: *mut usize,
    _tags: *mut c_int,
    mhandles: PP,
    request: PP,
) -> ResultCode {
    // SAFETY: NCCL gives an open comm and arrays of n elements, and n is 1 where they are read.
    unsafe { irecv(comm, n, || (*data, Ok(*sizes), first(mhandles)), request) }
}

unsafe extern "C" fn irecv_v10(
    comm: P,
    n: c_int,
    data: PP,
    sizes: *mut usize,
    _tags: *mut c_int,
    mhandles: PP,
    _phandles: PP,
    request: PP,
) -> ResultCode {
    // SAFETY: NCCL gives an open comm and arrays of n elements, and n is 1 where they are read.
    unsafe { irecv(comm, n, || (*data, Ok(*sizes), first(mhandles)), request) }
}

unsafe extern "C" fn iflush_v5(
    _comm: P,
    _n: c_int,
    _data: PP,
    _sizes: *mut c_int,
    _mhandles: PP,
    request: PP,
) -> ResultCode {
    // SAFETY: NCCL gives room for the request.
    unsafe { write_request(request, None) };
    ResultCode::SUCCESS
}

unsafe extern "C" fn test(request: P, done: *mut c_int, sizes: *mut c_int) -> ResultCode {
    // SAFETY: NCCL gives room for the answer, which must be written on every path.
    unsafe { done.write(0) };
    guarded(|| {
        // SAFETY: the pointer is null, or a request of an open comm.
        let request = unsafe { request.cast::<Request>().as_ref() };
        let request = request.ok_or_else(|| Fault::usage("test was called without a request"))?;
        // SAFETY: the comm of the request is open.
        let Some(bytes) = (unsafe { request.test() })? else { return Ok(()) };
        // SAFETY: NCCL gives room for the answer, and, unless null, for at least one size.
        unsafe {
            done.write(1);
            if !sizes.is_null() {
                sizes.write(c_int::try_from(bytes).unwrap_or(c_int::MAX));
            }
        }
        Ok(())
    })
}

/// Closes a comm of either kind by dropping it.
unsafe extern "C" fn close(comm: P) -> ResultCode {
    guarded(|| {
        sweeper::sweep();
        if !comm.is_null() {
            // SAFETY: the comm is one of this plugin, and NCCL does not use it any more.
            drop(unsafe { Box::from_raw(comm.cast::<Comm>()) });
        }
        Ok(())
    })
}

unsafe extern "C" fn close_listen(listen_comm: P) -> ResultCode {
    guarded(|| {
        sweeper::sweep();
        if !listen_comm.is_null() {
            // SAFETY: the listener is one of this plugin, and NCCL does not use it any more.
            drop(unsafe { Box::from_raw(listen_comm.cast::<ListenComm>()) });
        }
        Ok(())
    })
}

/// Exports a table: the functions that all versions share, and those of this version.
macro_rules! export {
    ($($symbol:ident $table:ident { $($slot:ident: $function:ident),+ $(,)? })+) => {$(
        /// The table of this version under the symbol that NCCL looks up.
        #[unsafe(no_mangle)]
        #[allow(non_upper_case_globals)]
        #[allow(clippy::needless_update, reason = "the oldest tables have no slot that stays empty")]
        // SAFETY: the name is a literal; the functions lock or check the state that they share.
        pub static $symbol: Exported<$table> = unsafe {
            Exported::new($table {
                name: c"ferrywire".as_ptr(),
                devices: Some(devices),
                dereg_mr: Some(dereg_mr),
                test: Some(test),
                close_send: Some(close),
                close_recv: Some(close),
                close_listen: Some(close_listen),
                $($slot: Some($function),)+
                ..$table::zeroed()
            })
        };
    )+};
}

export! {
    ncclNetPlugin_v5 NetV5 {
        init: init_v5, get_properties: get_properties_v6, listen: listen_v5, connect: connect_v5, accept: accept_v5,
        reg_mr: reg_mr_v5, isend: isend_v5, irecv: irecv_v5, iflush: iflush_v5,
    }
    ncclNetPlugin_v6 NetV6 {
        init: init_v5, get_properties: get_properties_v6, listen: listen_v5, connect: connect_v5, accept: accept_v5,
        reg_mr: reg_mr_v5, isend: isend_v5, irecv: irecv_v5, iflush: iflush_v5,
    }
    ncclNetPlugin_v7 NetV7 {
        init: init_v5, get_properties: get_properties_v7, listen: listen_v7, connect: connect_v7, accept: accept_v7,
        reg_mr: reg_mr_v5, isend: isend_v5, irecv: irecv_v5, iflush: iflush_v5,
    }
    ncclNetPlugin_v8 NetV8 {
        init: init_v5, get_properties: get_properties_v8, listen: listen_v7, connect: connect_v7, accept: accept_v7,
        reg_mr: reg_mr_v8, isend: isend_v5, irecv: irecv_v5, iflush: iflush_v5,
    }
    ncclNetPlugin_v9 NetV9 {
        init: init_v9, get_properties: get_properties_v9, listen: listen_v7, connect: connect_v7, accept: accept_v7,
        reg_mr: reg_mr_v8, isend: isend_v9, irecv: irecv_v9, iflush: iflush_v5,
        make_v_device: make_v_device_v9,
    }
    ncclNetPlugin_v10 NetV10 {
        init: init_v10, get_properties: get_properties_v9, listen: listen_v7, connect: connect_v10,
        accept: accept_v7, reg_mr: reg_mr_v8, isend: isend_v10, irecv: irecv_v10, iflush: iflush_v5,
        make_v_device: make_v_device_v9,
    }
    ncclNetPlugin_v11 NetV11 {
        init: init_v11, get_properties: get_properties_v11, listen: listen_v11, connect: connect_v11,
        accept: accept_v7, reg_mr: reg_mr_v8, isend: isend_v10, irecv: irecv_v10, iflush: iflush_v5,
        make_v_device: make_v_device_v9,
        finalize: finalize, set_net_attr: set_net_attr,
    }
    ncclNetPlugin_v12 NetV12 {
        init: init_v11, get_properties: get_properties_v12, listen: listen_v11, connect: connect_v11,
        accept: accept_v7, reg_mr: reg_mr_v8, isend: isend_v10, irecv: irecv_v10, iflush: iflush_v5,
        make_v_device: make_v_device_v12,
        finalize: finalize, set_net_attr: set_net_attr,
    }
}
