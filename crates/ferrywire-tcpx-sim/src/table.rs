//! The functions of `ncclNetPlugin_v7`: the host's pointers in, result codes out.
//!
//! Each call translates and delegates.
//! Invariant: no panic crosses into the host; it becomes result 3.
//! Read next: `plugin.rs`.

use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use ferrywire_ncclnet::abi::{
    DEVICE_UNPACK, DEVICE_VERSION_UNPACK, Dh, Exported, Log, NetV7, P, PP, PTR_CUDA, PTR_HOST, PropertiesV7,
    ResultCode,
};

use crate::cell::Cell;
use crate::comm::{Buffer, Outcome};
use crate::faults::{Direction, faulty_call};
use crate::gpu;
use crate::handle::HANDLE_BYTES_USED;
use crate::listener;
use crate::log::{misuse, set_logger, warning};
use crate::plugin::{self, plugin};
use crate::registration;
use crate::switches::Sizes;

/// The function table under the symbol that NCCL looks up.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
// SAFETY: the name is a literal; the functions lock or check the state that they share.
static ncclNetPlugin_v7: Exported<NetV7> = unsafe {
    Exported::new(NetV7 {
        name: c"GPUDirectTCPX_v7".as_ptr(),
        init: Some(init),
        devices: Some(devices),
        get_properties: Some(get_properties),
        listen: Some(listen),
        connect: Some(connect),
        accept: Some(accept),
        reg_mr: Some(reg_mr),
        reg_mr_dma_buf: None,
        dereg_mr: Some(dereg_mr),
        isend: Some(isend),
        irecv: Some(irecv),
        iflush: Some(iflush),
        test: Some(test),
        close_send: Some(close_send),
        close_recv: Some(close_recv),
        close_listen: Some(close_listen),
        get_device_mr: Some(get_device_mr),
        irecv_consumed: Some(irecv_consumed),
    })
};

const MAX_COMMS: c_int = 65536;

/// Runs the body of a call, which a switch may make faulty.
fn guarded(call: &str, body: impl FnOnce() -> Outcome<()>) -> ResultCode {
    let body = || faulty_call(call).and_then(|()| body());
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => ResultCode::SUCCESS,
        Ok(Err(code)) => code,
        Err(_) => ResultCode::INTERNAL_ERROR,
    }
}

unsafe extern "C" fn init(log: Log) -> ResultCode {
    // The logger is stored before anything else, so that every error can be logged.
    set_logger(log);
    guarded("init", plugin::init)
}

unsafe extern "C" fn devices(ndev: *mut c_int) -> ResultCode {
    guarded("devices", || {
        let count = plugin()?.devices.len() as c_int;
        // SAFETY: the host gives room for the number.
        unsafe { ndev.write(count) };
        Ok(())
    })
}

unsafe extern "C" fn get_properties(dev: c_int, props: *mut PropertiesV7) -> ResultCode {
    guarded("getProperties", || {
        let (index, device) = plugin()?.device(dev)?;
        let properties = PropertiesV7 {
            name: device.name.as_ptr(),
            pci_path: device.pci_path.as_ref().map_or(std::ptr::null(), |path| path.as_ptr()),
            guid: index as u64,
            ptr_support: PTR_HOST | PTR_CUDA,
            speed: device.speed_mbps,
            port: 0,
            latency: 0.0,
            max_comms: MAX_COMMS,
            max_recvs: 1,
            net_device_type: DEVICE_UNPACK,
            net_device_version: DEVICE_VERSION_UNPACK,
        };
        // SAFETY: the host gives room for properties of this version.
        unsafe { props.write(properties) };
        Ok(())
    })
}

/// The connection handle at the host's pointer; a null pointer ends the process.
///
/// # Safety
/// The pointer must be null or that of a connection handle that no other code uses now.
unsafe fn handle_at<'a>(handle: P, call: &str) -> &'a mut [u8; HANDLE_BYTES_USED] {
    // SAFETY: the caller promises null or a handle, which has 128 bytes.
    match unsafe { handle.cast::<[u8; HANDLE_BYTES_USED]>().as_mut() } {
        Some(bytes) => bytes,
        None => misuse(format_args!("{call} without a handle")),
    }
}

unsafe extern "C" fn listen(dev: c_int, handle: P, listen_comm: PP) -> ResultCode {
    guarded("listen", || {
        // SAFETY: the host gives a handle of its own.
        let comm = listener::listen(dev, unsafe { handle_at(handle, "listen") })?;
        // SAFETY: the host gives room for the pointer.
        unsafe { listen_comm.write(comm) };
        Ok(())
    })
}

unsafe extern "C" fn connect(dev: c_int, handle: P, send_comm: PP, _device: Dh) -> ResultCode {
    guarded("connect", || {
        // SAFETY: the host gives room for the pointer.
        unsafe { send_comm.write(std::ptr::null_mut()) };
        // SAFETY: the host gives a handle of its own.
        let comm = listener::connect(dev, unsafe { handle_at(handle, "connect") })?;
        // SAFETY: the host gives room for the pointer.
        unsafe { send_comm.write(comm) };
        Ok(())
    })
}

unsafe extern "C" fn accept(listen_comm: P, recv_comm: PP, device: Dh) -> ResultCode {
    guarded("accept", || {
        // SAFETY: the host gives room for the pointer.
        unsafe { recv_comm.write(std::ptr::null_mut()) };
        // SAFETY: the pointer is null, or to a variable in which the host keeps its pointer.
        let handle = unsafe { device.as_ref() }.copied().unwrap_or(std::ptr::null_mut());
        // SAFETY: the pointer is null, or that of the host's device handle.
        let comm = unsafe { listener::accept(listen_comm, handle)? };
        // SAFETY: the host gives room for the pointer.
        unsafe { recv_comm.write(comm) };
        Ok(())
    })
}

unsafe extern "C" fn reg_mr(comm: P, data: P, size: c_int, kind: c_int, mhandle: PP) -> ResultCode {
    guarded("regMr", || {
        // SAFETY: the host passes the pointer of a comm.
        let cell = unsafe { Cell::open_at(comm, "regMr") };
        let handle = registration::register(cell.device, cell.gpu, data, size, kind)?;
        // SAFETY: the host gives room for the handle.
        unsafe { mhandle.write(handle) };
        Ok(())
    })
}

unsafe extern "C" fn dereg_mr(comm: P, mhandle: P) -> ResultCode {
    guarded("deregMr", || {
        // SAFETY: the host passes the pointer of a comm.
        unsafe { Cell::open_at(comm, "deregMr") };
        registration::deregister(mhandle);
        Ok(())
    })
}

unsafe extern "C" fn isend(
    comm: P,
    data: P,
    size: c_int,
    _tag: c_int,
    mhandle: P,
    request: PP,
) -> ResultCode {
    guarded("isend", || {
        // SAFETY: the host passes the pointer of a comm.
        let cell = unsafe { Cell::at(comm, "isend") };
        let buffer = source(data, size, mhandle)?;
        post(cell, "isend", Direction::Send, buffer, request)
    })
}

/// How the bytes of a send can be read.
fn source(data: *mut c_void, size: c_int, mhandle: *mut c_void) -> Outcome<Buffer> {
    let registration = registration::find(mhandle, "isend")?;
    let mhandle = mhandle as usize;
    let bytes = usize::try_from(size).map_err(|_| ResultCode::INTERNAL_ERROR)?;
    if !registration.covers(data, bytes) {
        warning!("isend of {bytes} bytes at {data:?}, outside of what was registered");
        return Err(ResultCode::INTERNAL_ERROR);
    }
    if !registration.gpu || bytes == 0 {
        return Ok(Buffer { mhandle, data: data.cast(), bytes, gpu: registration.gpu, cuda: None });
    }
    match gpu::source(data as u64, bytes) {
        Some(gpu::Source::View(view)) => Ok(Buffer { mhandle, data: view, bytes, gpu: true, cuda: None }),
        Some(gpu::Source::Cuda(device)) => {
            Ok(Buffer { mhandle, data: data.cast(), bytes, gpu: true, cuda: Some(device) })
        }
        None => {
            warning!("isend of {bytes} bytes at {data:?}: no GPU has memory at this address");
            Err(ResultCode::UNHANDLED_CUDA_ERROR)
        }
    }
}

unsafe extern "C" fn irecv(
    comm: P,
    n: c_int,
    data: PP,
    sizes: *mut c_int,
    _tags: *mut c_int,
    mhandles: PP,
    request: PP,
) -> ResultCode {
    guarded("irecv", || {
        // SAFETY: the host passes the pointer of a comm.
        let cell = unsafe { Cell::at(comm, "irecv") };
        if n != 1 {
            warning!("irecv was called with {n} buffers, but only 1 is supported");
            return Err(ResultCode::INTERNAL_ERROR);
        }
        // SAFETY: the host gives arrays of n elements.
        let (data, size, mhandle) = unsafe { (*data, *sizes, *mhandles) };
        let gpu = registration::find(mhandle, "irecv")?.gpu;
        let bytes = usize::try_from(size).map_err(|_| ResultCode::INTERNAL_ERROR)?;
        let buffer = Buffer { mhandle: mhandle as usize, data: data.cast(), bytes, gpu, cuda: None };
        post(cell, "irecv", Direction::Recv, buffer, request)
    })
}

fn post(cell: &Cell, call: &str, direction: Direction, buffer: Buffer, request: PP) -> Outcome<()> {
    let slot = cell.enter(call, |comm| {
        if comm.direction() != direction {
            misuse(format_args!("{call} on a comm of the other direction"));
        }
        comm.post(buffer)
    })?;
    let pointer = slot.map_or(std::ptr::null_mut(), |slot| cell.request(slot));
    // SAFETY: the host gives room for the request.
    unsafe { request.write(pointer) };
    Ok(())
}

unsafe extern "C" fn test(request: P, done: *mut c_int, sizes: *mut c_int) -> ResultCode {
    guarded("test", || {
        // SAFETY: the host gives room for the answer.
        unsafe { done.write(0) };
        // SAFETY: the host passes the pointer of a request.
        let (cell, slot) = unsafe { Cell::of_request(request, "test") };
        let (finished, sizes_kept) = cell.enter("test", |comm| {
            let finished = comm.test(slot)?;
            Ok((finished, comm.rules.switches.sizes == Sizes::Keep))
        })?;
        let Some(bytes) = finished else { return Ok(()) };
        // SAFETY: the host gives room for the answer.
        unsafe { done.write(1) };
        if !sizes_kept && !sizes.is_null() {
            // SAFETY: the pointer is not null, and the host gives room for at least one size.
            unsafe { sizes.write(bytes as c_int) };
        }
        Ok(())
    })
}

unsafe extern "C" fn iflush(
    _comm: P,
    _n: c_int,
    _data: PP,
    sizes: *mut c_int,
    _mhandles: PP,
    request: PP,
) -> ResultCode {
    guarded("iflush", || {
        // SAFETY: the host gives a pointer to a finished receive's request; the real plugin does not check.
        let (cell, slot) = unsafe { Cell::of_request(*request, "iflush") };
        let bytes = cell.enter("iflush", |comm| comm.received_bytes(slot));
        // SAFETY: the host gives room for one size.
        unsafe { sizes.write(bytes as c_int) };
        Ok(())
    })
}

unsafe extern "C" fn irecv_consumed(_comm: P, n: c_int, request: P) -> ResultCode {
    guarded("irecvConsumed", || {
        if n != 1 {
            warning!("irecvConsumed was called with {n} buffers, but only 1 is supported");
            return Err(ResultCode::INTERNAL_ERROR);
        }
        // SAFETY: the host passes the pointer of a request.
        let (cell, slot) = unsafe { Cell::of_request(request, "irecvConsumed") };
        cell.enter("irecvConsumed", |comm| {
            if comm.direction() != Direction::Recv {
                misuse(format_args!("irecvConsumed of a send"));
            }
            comm.consume(slot)
        })
    })
}

/// Closes a comm of either direction, as one function of the real plugin does.
fn close(comm: P, call: &str) -> ResultCode {
    guarded(call, || {
        // SAFETY: the host passes the pointer of a comm.
        unsafe { Cell::at(comm, call) }.take(call).close();
        Ok(())
    })
}

unsafe extern "C" fn close_send(comm: P) -> ResultCode {
    close(comm, "closeSend")
}

unsafe extern "C" fn close_recv(comm: P) -> ResultCode {
    close(comm, "closeRecv")
}

unsafe extern "C" fn close_listen(listen_comm: P) -> ResultCode {
    guarded("closeListen", || {
        listener::close_listen(listen_comm);
        Ok(())
    })
}

/// `getDeviceMr`: succeeds, and writes nothing.
unsafe extern "C" fn get_device_mr(_comm: P, _mhandle: P, _device_mhandle: PP) -> ResultCode {
    ResultCode::SUCCESS
}
