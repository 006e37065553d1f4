//! Operations and their outcomes.
//!
//! Each posting function has an optional output argument for a transfer handle. With NULL the operation runs without a
//! handle; freeing the handle does not end the operation either.

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

/// A posted operation, for polling, waiting and cancelling.
pub struct Transfer(pub(crate) ferrywire::Transfer);

object!(Transfer, "ferrywire_transfer", 7);

/// Posts an operation and returns its handle, if the caller wants one.
///
/// # Safety
/// `transfer` is null or valid for writing a handle.
unsafe fn post(
    transfer: *mut *mut Transfer,
    start: impl FnOnce() -> Result<ferrywire::Transfer, Failure>,
) -> c_int {
    call(|| {
        if transfer.is_null() {
            start()?;
            return Ok(FERRYWIRE_OK);
        }
        // SAFETY: the caller promises null, or room for a handle.
        let out = unsafe { handles::place(transfer) }?;
        out.put(handles::new(Transfer(start()?))?);
        Ok(FERRYWIRE_OK)
    })
}

/// An optional notification that follows the payload; a null message means no notification.
///
/// # Safety
/// `message` is null or points to `message_bytes` bytes that do not change during the call.
unsafe fn note<'a>(message: *const c_void, message_bytes: usize) -> Result<Option<&'a [u8]>, Failure> {
    if message.is_null() && message_bytes == 0 {
        Ok(None)
    } else {
        // SAFETY: the caller promises as many bytes as stated.
        unsafe { bytes("the message", message, message_bytes) }.map(Some)
    }
}

/// Writes `bytes` bytes of `source` at `source_offset` into the peer's region `target` at `target_offset`. The transfer
/// completes when the bytes are in the peer's memory; `message`, of `message_bytes` bytes, is then delivered to the
/// peer as a notification (NULL for none, otherwise 1 to 8192 bytes).
///
/// Errors: FERRYWIRE_ERROR_USAGE for a range outside of a region or a region that is not registered;
/// FERRYWIRE_ERROR_PEER and FERRYWIRE_ERROR_CLOSED for a peer that is lost or closed, now or as the transfer's outcome.
/// `transfer` receives a handle of the operation; with NULL the operation runs without one.
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
        // SAFETY: the caller promises as many bytes as stated.
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
    // SAFETY: the caller promises null, or room for a handle.
    unsafe { post(transfer, start) }
}

/// Reads `bytes` bytes of the peer's region `source` at `source_offset` into `target` at `target_offset`. The transfer
/// completes when the bytes are in `target`. Errors and `transfer` as in `ferrywire_write`.
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
    // SAFETY: the caller promises null, or room for a handle.
    unsafe { post(transfer, start) }
}

/// Sends `bytes` bytes of `source` at `offset` as a message with `tag`. Messages with one tag match the peer's receives
/// with that tag in the order in which both were posted. Errors and `transfer` as in `ferrywire_write`.
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
    // SAFETY: the caller promises null, or room for a handle.
    unsafe { post(transfer, start) }
}

/// Receives the next message with `tag`, of at most `bytes` bytes, into `target` at `offset`. The transfer's number of
/// bytes is the message's length; a longer message ends the transfer with FERRYWIRE_ERROR_USAGE. Errors and `transfer`
/// as in `ferrywire_write`.
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
    // SAFETY: the caller promises null, or room for a handle.
    unsafe { post(transfer, start) }
}

/// Writes blocks of a list as one operation: those whose numbers are in `indices` (`count` of them), or all if
/// `indices` is NULL. `message` is delivered once the bytes of all blocks are in the peer's memory. `message`, errors
/// and `transfer` as in `ferrywire_write`.
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
        // SAFETY: the caller promises arrays of the stated sizes.
        let (indices, message) = unsafe { (chosen(indices, count)?, note(message, message_bytes)?) };
        Ok(peer.peer.write_blocks(&blocks.0, indices, message)?)
    };
    // SAFETY: the caller promises null, or room for a handle.
    unsafe { post(transfer, start) }
}

/// Reads blocks of a list as one operation: those whose numbers are in `indices` (`count` of them), or all if `indices`
/// is NULL. Errors and `transfer` as in `ferrywire_write`.
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
        // SAFETY: the caller promises an array of the stated size.
        let indices = unsafe { chosen(indices, count) }?;
        Ok(peer.peer.read_blocks(&blocks.0, indices)?)
    };
    // SAFETY: the caller promises null, or room for a handle.
    unsafe { post(transfer, start) }
}

/// # Safety
/// `indices` is null or points to `count` numbers that do not change during the call.
unsafe fn chosen<'a>(indices: *const u32, count: usize) -> Result<Option<&'a [u32]>, Failure> {
    if indices.is_null() && count == 0 {
        Ok(None)
    } else {
        // SAFETY: the caller promises an array of `count` numbers.
        unsafe { array("indices", indices, count) }.map(Some)
    }
}

/// Delivers a small message of 0 to 8192 bytes to the peer as a notification, after everything posted to this peer
/// before it. Errors and `transfer` as in `ferrywire_write`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_notify(
    peer: *mut Peer,
    message: *const c_void,
    message_bytes: usize,
    transfer: *mut *mut Transfer,
) -> c_int {
    let start = || {
        let peer = handles::get(peer)?;
        // SAFETY: the caller promises as many bytes as stated.
        let message = unsafe { bytes("the message", message, message_bytes) }?;
        Ok(peer.peer.notify(message)?)
    };
    // SAFETY: the caller promises null, or room for a handle.
    unsafe { post(transfer, start) }
}

/// Returns FERRYWIRE_PENDING while the operation is in flight, FERRYWIRE_OK once it has succeeded, or else its error.
/// Sets `*moved`, unless `moved` is NULL, to the number of bytes moved once it has succeeded.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_transfer_poll(transfer: *const Transfer, moved: *mut u64) -> c_int {
    call(|| match handles::get(transfer)?.0.poll().transpose()? {
        None => Ok(FERRYWIRE_PENDING),
        Some(bytes) => {
            // SAFETY: the caller promises null, or room for the number.
            unsafe { put_if_wanted(moved, bytes) };
            Ok(FERRYWIRE_OK)
        }
    })
}

/// Waits until the operation has ended: at most `total_ms` milliseconds in all, and at most `stall_ms` milliseconds
/// without progress; a negative value is no limit. Returns FERRYWIRE_OK or the operation's error, and sets `*moved`,
/// unless `moved` is NULL, to the number of bytes moved. After FERRYWIRE_ERROR_TIMEOUT the operation is still in
/// flight.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_transfer_wait(
    transfer: *const Transfer,
    total_ms: i64,
    stall_ms: i64,
    moved: *mut u64,
) -> c_int {
    call(|| {
        let bytes = handles::get(transfer)?.0.wait_for(limit(total_ms), limit(stall_ms))?;
        // SAFETY: the caller promises null, or room for the number.
        unsafe { put_if_wanted(moved, bytes) };
        Ok(FERRYWIRE_OK)
    })
}

/// Waits until one of `count` transfers with one peer has ended, with success or an error, and sets `*first` to its
/// index in `transfers`; `ferrywire_transfer_poll` then returns its outcome. Waits at most `total_ms` milliseconds in
/// all, and at most `stall_ms` milliseconds in which none of the transfers makes progress; a negative value is no
/// limit. After FERRYWIRE_ERROR_TIMEOUT all transfers are still in flight.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_transfer_wait_any(
    transfers: *const *mut Transfer,
    count: usize,
    total_ms: i64,
    stall_ms: i64,
    first: *mut usize,
) -> c_int {
    call(|| {
        // SAFETY: the caller promises room for the index, and an array of `count` handles.
        let (out, list) = unsafe {
            (Out::new("the output pointer for the index", first)?, array("transfers", transfers, count)?)
        };
        let list: Vec<Arc<Transfer>> =
            list.iter().map(|transfer| handles::get(*transfer)).collect::<Result<_, _>>()?;
        let each = list.iter().map(|transfer| &transfer.0);
        out.put(ferrywire::Transfer::wait_any_for(each, limit(total_ms), limit(stall_ms))?);
        Ok(FERRYWIRE_OK)
    })
}

/// Returns the number of bytes that have arrived so far; 0 for a wrong handle.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_transfer_bytes_moved(transfer: *const Transfer) -> u64 {
    let mut bytes = 0;
    call(|| {
        bytes = handles::get(transfer)?.0.bytes_moved();
        Ok(FERRYWIRE_OK)
    });
    bytes
}

/// Asks the operation to end early. Its memory is in use until the operation has ended, so wait for it: the outcome is
/// FERRYWIRE_ERROR_CANCELLED, or FERRYWIRE_OK if all bytes had arrived before. If the peer is lost or closed before it has
/// reported what it placed, a write ends with FERRYWIRE_ERROR_PEER or FERRYWIRE_ERROR_CLOSED: bytes of it may land until the
/// peer's end notices.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_transfer_cancel(transfer: *mut Transfer) -> c_int {
    call(|| {
        handles::get(transfer)?.0.cancel();
        Ok(FERRYWIRE_OK)
    })
}

/// Makes a CUDA stream wait, on the device, until the transfer has ended, with success or an error. `gpu` and `stream`
/// as in `ferrywire_peer_on_stream`. While the stream waits, no memory of a GPU may be freed in this process: the
/// driver would wait for the stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_transfer_block_stream(
    transfer: *const Transfer,
    gpu: u32,
    stream: *mut c_void,
) -> c_int {
    call(|| {
        let transfer = handles::get(transfer)?;
        let gpu = CudaGpu::open(gpu)?;
        // SAFETY: the caller promises a live stream of this GPU.
        unsafe { transfer.0.block_raw_stream(&gpu, stream.cast()) }?;
        Ok(FERRYWIRE_OK)
    })
}

/// Frees the handle; the operation continues. NULL is allowed.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_transfer_free(transfer: *mut Transfer) -> c_int {
    handles::free(transfer)
}
