//! Operations and what becomes of them.
//!
//! Each takes a place for a transfer, by which it is followed. Where that is NULL nobody follows it, and it runs on; so
//! it does when its handle is freed.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use ferrywire_memory::cuda::CudaGpu;

use crate::blocks::Blocks;
use crate::handles::{self, object};
use crate::memory::{Region, Remote};
use crate::peer::Peer;
use crate::status::{
    FERRYWIRE_OK, FERRYWIRE_PENDING, Failure, Out, array, bytes, call, limit, put_if_wanted,
};

/// An operation under way.
pub struct Transfer(pub(crate) ferrywire::Transfer);

object!(Transfer, "ferrywire_transfer", 7);

/// Posts an operation and gives its handle out, if that is wanted.
///
/// # Safety
/// `transfer` is null or a place for a handle.
unsafe fn post(
    transfer: *mut *mut Transfer,
    start: impl FnOnce() -> Result<ferrywire::Transfer, Failure>,
) -> c_int {
    call(|| {
        if transfer.is_null() {
            start()?;
            return Ok(FERRYWIRE_OK);
        }
        // SAFETY: by the caller's promise.
        let out = unsafe { handles::place(transfer) }?;
        out.put(handles::new(Transfer(start()?))?);
        Ok(FERRYWIRE_OK)
    })
}

/// A notification that goes with bytes; null is none.
///
/// # Safety
/// As of [`bytes`].
unsafe fn note<'a>(message: *const c_void, message_bytes: usize) -> Result<Option<&'a [u8]>, Failure> {
    match message.is_null() && message_bytes == 0 {
        true => Ok(None),
        // SAFETY: by the caller's promise.
        false => unsafe { bytes("the message", message, message_bytes) }.map(Some),
    }
}

/// Writes `bytes` bytes of `source` into the peer's region. Complete when they are in its memory. `message` (or NULL,
/// else at least a byte) is delivered to the peer then.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_write(
    peer: *mut Peer,
    source: *const Region,
    source_offset: u64,
    target: *const Remote,
    target_offset: u64,
    bytes: u64,
    message: *const c_void,
    message_bytes: usize,
    transfer: *mut *mut Transfer,
) -> c_int {
    let start = || {
        let (peer, source, target) = (handles::get(peer)?, handles::get(source)?, handles::get(target)?);
        // SAFETY: by the caller's promise.
        let transfer = match unsafe { note(message, message_bytes) }? {
            None => peer.peer.write(&source.region, source_offset, &target.0, target_offset, bytes)?,
            Some(message) => peer.peer.write_notify(
                &source.region,
                source_offset,
                &target.0,
                target_offset,
                bytes,
                message,
            )?,
        };
        Ok(transfer)
    };
    // SAFETY: by the caller's promise.
    unsafe { post(transfer, start) }
}

/// Reads `bytes` bytes of the peer's region into `target`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_read(
    peer: *mut Peer,
    target: *const Region,
    target_offset: u64,
    source: *const Remote,
    source_offset: u64,
    bytes: u64,
    transfer: *mut *mut Transfer,
) -> c_int {
    let start = || {
        let (peer, target, source) = (handles::get(peer)?, handles::get(target)?, handles::get(source)?);
        Ok(peer.peer.read(&target.region, target_offset, &source.0, source_offset, bytes)?)
    };
    // SAFETY: by the caller's promise.
    unsafe { post(transfer, start) }
}

/// Sends a message with a tag; it meets the peer's receives of that tag in the order of posting.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_send(
    peer: *mut Peer,
    tag: u64,
    source: *const Region,
    offset: u64,
    bytes: u64,
    transfer: *mut *mut Transfer,
) -> c_int {
    let start = || {
        let (peer, source) = (handles::get(peer)?, handles::get(source)?);
        Ok(peer.peer.send(tag, &source.region, offset, bytes)?)
    };
    // SAFETY: by the caller's promise.
    unsafe { post(transfer, start) }
}

/// Receives the next message with this tag, of at most `bytes` bytes. The transfer's bytes are the message's length.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_recv(
    peer: *mut Peer,
    tag: u64,
    target: *const Region,
    offset: u64,
    bytes: u64,
    transfer: *mut *mut Transfer,
) -> c_int {
    let start = || {
        let (peer, target) = (handles::get(peer)?, handles::get(target)?);
        Ok(peer.peer.recv(tag, &target.region, offset, bytes)?)
    };
    // SAFETY: by the caller's promise.
    unsafe { post(transfer, start) }
}

/// Writes the blocks of a list, or those whose numbers are among `count` `indices` (or NULL: all), as one operation.
/// `message` as in `ferrywire_write`, once the bytes of all blocks are in the peer's memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_write_blocks(
    peer: *mut Peer,
    blocks: *const Blocks,
    indices: *const u32,
    count: usize,
    message: *const c_void,
    message_bytes: usize,
    transfer: *mut *mut Transfer,
) -> c_int {
    let start = || {
        let (peer, blocks) = (handles::get(peer)?, handles::get(blocks)?);
        // SAFETY: by the caller's promise.
        let (indices, message) = unsafe { (chosen(indices, count)?, note(message, message_bytes)?) };
        Ok(peer.peer.write_blocks(&blocks.0, indices, message)?)
    };
    // SAFETY: by the caller's promise.
    unsafe { post(transfer, start) }
}

/// Reads the blocks of a list, or those whose numbers are among `count` `indices` (or NULL: all), as one operation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_read_blocks(
    peer: *mut Peer,
    blocks: *const Blocks,
    indices: *const u32,
    count: usize,
    transfer: *mut *mut Transfer,
) -> c_int {
    let start = || {
        let (peer, blocks) = (handles::get(peer)?, handles::get(blocks)?);
        // SAFETY: by the caller's promise.
        let indices = unsafe { chosen(indices, count) }?;
        Ok(peer.peer.read_blocks(&blocks.0, indices)?)
    };
    // SAFETY: by the caller's promise.
    unsafe { post(transfer, start) }
}

/// # Safety
/// As of [`array`].
unsafe fn chosen<'a>(indices: *const u32, count: usize) -> Result<Option<&'a [u32]>, Failure> {
    match indices.is_null() && count == 0 {
        true => Ok(None),
        // SAFETY: by the caller's promise.
        false => unsafe { array("indices", indices, count) }.map(Some),
    }
}

/// Delivers a small message, of at most 8192 bytes, which may be empty, after everything posted to this peer before it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_notify(
    peer: *mut Peer,
    message: *const c_void,
    message_bytes: usize,
    transfer: *mut *mut Transfer,
) -> c_int {
    let start = || {
        let peer = handles::get(peer)?;
        // SAFETY: by the caller's promise.
        let message = unsafe { bytes("the message", message, message_bytes) }?;
        Ok(peer.peer.notify(message)?)
    };
    // SAFETY: by the caller's promise.
    unsafe { post(transfer, start) }
}

/// The outcome, or FERRYWIRE_PENDING while it is under way. `moved` (or NULL) is told how many bytes were moved.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_transfer_poll(transfer: *const Transfer, moved: *mut u64) -> c_int {
    call(|| match handles::get(transfer)?.0.poll().transpose()? {
        None => Ok(FERRYWIRE_PENDING),
        Some(bytes) => {
            // SAFETY: by the caller's promise.
            unsafe { put_if_wanted(moved, bytes) };
            Ok(FERRYWIRE_OK)
        }
    })
}

/// Waits for the end, at most `total_ms` milliseconds altogether and `stall_ms` without progress; less than 0 is without
/// end. `moved` (or NULL) is told how many bytes were moved. After FERRYWIRE_ERROR_TIMEOUT it is still under way.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_transfer_wait(
    transfer: *const Transfer,
    total_ms: i64,
    stall_ms: i64,
    moved: *mut u64,
) -> c_int {
    call(|| {
        let bytes = handles::get(transfer)?.0.wait_for(limit(total_ms), limit(stall_ms))?;
        // SAFETY: by the caller's promise.
        unsafe { put_if_wanted(moved, bytes) };
        Ok(FERRYWIRE_OK)
    })
}

/// Waits until one of `count` transfers with one peer has ended, well or not, and puts its place among them at `first`;
/// the transfer itself tells how it ended. Limits as in `ferrywire_transfer_wait`, `stall_ms` for a time in which none of
/// them moves. After FERRYWIRE_ERROR_TIMEOUT all are still under way.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_transfer_wait_any(
    transfers: *const *mut Transfer,
    count: usize,
    total_ms: i64,
    stall_ms: i64,
    first: *mut usize,
) -> c_int {
    call(|| {
        // SAFETY: by the caller's promise.
        let (out, list) =
            unsafe { (Out::new("the place for the first", first)?, array("transfers", transfers, count)?) };
        let list: Vec<Arc<Transfer>> =
            list.iter().map(|transfer| handles::get(*transfer)).collect::<Result<_, _>>()?;
        let each = list.iter().map(|transfer| &transfer.0);
        out.put(ferrywire::Transfer::wait_any_for(each, limit(total_ms), limit(stall_ms))?);
        Ok(FERRYWIRE_OK)
    })
}

/// Bytes that have arrived so far; 0 for a wrong handle.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_transfer_bytes_moved(transfer: *const Transfer) -> u64 {
    let mut bytes = 0;
    call(|| {
        bytes = handles::get(transfer)?.0.bytes_moved();
        Ok(FERRYWIRE_OK)
    });
    bytes
}

/// Ends the operation early, if it is not too late. It still has to be waited for before its memory is free: the
/// outcome is FERRYWIRE_ERROR_CANCELLED, or FERRYWIRE_OK if everything had arrived.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_transfer_cancel(transfer: *mut Transfer) -> c_int {
    call(|| {
        handles::get(transfer)?.0.cancel();
        Ok(FERRYWIRE_OK)
    })
}

/// Lets a CUDA stream wait, on the device, until the transfer has ended, however it ends; `stream` as in
/// `ferrywire_peer_on_stream`. While it waits no memory of a GPU may be freed in the process.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_transfer_block_stream(
    transfer: *const Transfer,
    gpu: u32,
    stream: *mut c_void,
) -> c_int {
    call(|| {
        let transfer = handles::get(transfer)?;
        let gpu = CudaGpu::open(gpu).map_err(ferrywire::Error::from)?;
        // SAFETY: by the caller's promise, a live stream of this GPU.
        unsafe { transfer.0.hold_raw(&gpu, stream.cast()) }?;
        Ok(FERRYWIRE_OK)
    })
}

/// Frees the handle; the operation runs on. NULL is fine.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_transfer_free(transfer: *mut Transfer) -> c_int {
    handles::free(transfer)
}
