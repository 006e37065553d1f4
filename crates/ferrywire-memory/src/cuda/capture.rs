//! Keeps this library's driver calls out of the CUDA graphs that other code captures.
//!
//! While a thread captures a graph in the global mode, PyTorch's default, the driver refuses queries,
//! allocations, frees and the like on every thread that is not in the relaxed mode, and makes the graph
//! invalid. So all calls of this library run in the relaxed mode. Other code relies on the mode of its thread,
//! so the thread gets its mode back: after the call, or, on a thread that moves data, when it no longer does.
//! Such a thread polls the GPU often and pays for one exchange.
//!
//! Invariant: a thread that runs other code has the mode that the other code chose, except within
//! `CudaGpu::with_current`.
//! Read next: `gpu.rs`, whose guard of the current context is also one of the mode.

use super::error::{CudaError, Result, ask, call};
use super::gpu::CudaGpu;
use super::{RawStream, deferred_free};
use std::cell::Cell;
use std::marker::PhantomData;

/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
const RELAXED: u32 = 2;
/// `CU_STREAM_CAPTURE_STATUS_NONE`.
const NOT_CAPTURING: u32 = 0;
/// The driver's answer for the default stream while a stream that it is ordered with captures.
const CAPTURES_IMPLICITLY: u32 = 906;

thread_local! {
    /// The mode that the thread gets back; `None` unless this module has changed it.
    static BEFORE: Cell<Option<u32>> = const { Cell::new(None) };
}

/// Keeps this thread in the relaxed mode. Dropping the value ends that, except on a thread that moves data.
#[derive(Debug)]
#[must_use = "the mode lasts as long as the value lives"]
pub(super) struct Relaxed {
    ends: bool,
    _thread: PhantomData<*const ()>,
}

/// Puts this thread into the relaxed mode. Without a driver that is initialised there is nothing to do.
pub(super) fn relax() -> Relaxed {
    let changed = BEFORE.get().is_none() && exchange(RELAXED).map(|mode| BEFORE.set(Some(mode))).is_some();
    Relaxed { ends: changed && !deferred_free::moves(), _thread: PhantomData }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        if self.ends {
            restore();
        }
    }
}

/// Gives this thread the mode back that it had before [`relax`].
pub(super) fn restore() {
    if let Some(mode) = BEFORE.take().filter(|mode| *mode != RELAXED) {
        exchange(mode);
    }
}

/// Sets the mode of this thread; returns the mode from before, `None` if the driver refuses.
fn exchange(mut mode: u32) -> Option<u32> {
    // SAFETY: the driver reads and writes one number, which has the size of its enumeration.
    let code = unsafe { ask!(cuThreadExchangeStreamCaptureMode((&raw mut mode).cast())) }.ok()?;
    (code == 0).then_some(mode)
}

/// Refuses a stream that captures a graph: what orders the stream with a transfer would become part of the
/// graph, and a replay would not be ordered with any transfer.
///
/// # Errors
/// [`CudaError::StreamCapturing`], and the driver's error.
///
/// # Safety
/// `stream` is a live stream of this GPU's primary context, which is current, or null for the default stream.
pub(super) unsafe fn refuse_capturing(gpu: &CudaGpu, stream: RawStream) -> Result<()> {
    let mut status = NOT_CAPTURING;
    // SAFETY: the caller promises a live stream; the driver writes one number, which has the size of its
    // enumeration.
    let asked = unsafe { call!(gpu.about(), cuStreamIsCapturing(stream, (&raw mut status).cast())) };
    match asked {
        Ok(()) if status == NOT_CAPTURING => Ok(()),
        Err(error) if error.code() != Some(CAPTURES_IMPLICITLY) => Err(error),
        _ => Err(CudaError::StreamCapturing { gpu: gpu.index(), stream: stream as u64 }),
    }
}
