//! CUDA events: points in a stream, which are done when all work before them is done.

use super::error::{CudaError, NOT_READY, Result, ask, call, check};
use super::gpu::CudaGpu;
use super::{RawStream, capture};
use cudarc::driver::sys;
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A reusable CUDA event. It stands for the point in a stream where it was recorded last. It takes no
/// timestamps, which makes it cheap.
pub struct CudaEvent {
    gpu: Arc<CudaGpu>,
    pub(super) raw: sys::CUevent,
}

// SAFETY: an event of the driver may be used on any thread.
unsafe impl Send for CudaEvent {}
// SAFETY: an event of the driver may be used on several threads at once.
unsafe impl Sync for CudaEvent {}

impl CudaEvent {
    /// An event that was never recorded, which counts as done.
    pub fn new(gpu: &Arc<CudaGpu>) -> Result<CudaEvent> {
        let _current = gpu.make_current()?;
        let mut raw = ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: the driver writes one pointer, for which there is room.
        unsafe { call!(gpu.about(), cuEventCreate(&mut raw, flags)) }?;
        Ok(CudaEvent { gpu: gpu.clone(), raw })
    }

    /// Whether all work before the event is done. Does not block.
    ///
    /// # Errors
    /// The driver's error when earlier work failed; the whole context is then unusable.
    pub fn query(&self) -> Result<bool> {
        let _current = self.gpu.make_current()?;
        // SAFETY: the event is alive.
        done("cuEventQuery", &self.gpu, unsafe { ask!(cuEventQuery(self.raw)) }?)
    }

    /// Waits until all work before the event is done.
    ///
    /// # Errors
    /// The errors of [`CudaEvent::query`], and [`CudaError::TimedOut`].
    pub fn wait(&self, timeout: Duration) -> Result<()> {
        wait_until(&self.gpu, "an event", timeout, || self.query())
    }

    /// Records the event in a stream of another library, behind all work enqueued there so far.
    ///
    /// # Errors
    /// [`CudaError::StreamCapturing`] for a stream that captures a graph, and the driver's error.
    ///
    /// # Safety
    /// `stream` is a live stream of this GPU's primary context, or null for the default stream.
    pub unsafe fn record_raw(&self, stream: RawStream) -> Result<()> {
        let _current = self.gpu.make_current()?;
        // SAFETY: the caller promises that the stream is live and belongs to this GPU.
        unsafe {
            capture::refuse_capturing(&self.gpu, stream)?;
            call!(self.gpu.about(), cuEventRecord(self.raw, stream))
        }
    }

    /// Makes later work in a stream of another library wait for the event.
    ///
    /// # Safety
    /// `stream` is a live stream of this GPU's primary context, or null for the default stream.
    pub unsafe fn awaited_by_raw(&self, stream: RawStream) -> Result<()> {
        let _current = self.gpu.make_current()?;
        // SAFETY: the caller promises that the stream is live and belongs to this GPU.
        unsafe { call!(self.gpu.about(), cuStreamWaitEvent(stream, self.raw, 0)) }
    }

    /// The GPU on which the event was created.
    pub fn gpu(&self) -> &Arc<CudaGpu> {
        &self.gpu
    }
}

/// Converts the return code of a driver's query: true for done, false for not ready.
pub(super) fn done(call: &'static str, gpu: &CudaGpu, code: u32) -> Result<bool> {
    match code {
        NOT_READY => Ok(false),
        code => check(call, gpu.about(), code).map(|()| true),
    }
}

/// Polls until `is_done` returns true: first without pauses, then every 100 us.
pub(super) fn wait_until(
    gpu: &CudaGpu,
    what: &'static str,
    timeout: Duration,
    mut is_done: impl FnMut() -> Result<bool>,
) -> Result<()> {
    const YIELDS: u32 = 1000;
    const PAUSE: Duration = Duration::from_micros(100);
    let (start, mut asked) = (Instant::now(), 0);
    while !is_done()? {
        let waited = start.elapsed();
        if waited >= timeout {
            return Err(CudaError::TimedOut { gpu: gpu.index(), what, waited: timeout });
        }
        if asked < YIELDS {
            std::thread::yield_now();
        } else {
            std::thread::sleep(PAUSE);
        }
        asked += 1;
    }
    Ok(())
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        if let Ok(_current) = self.gpu.make_current() {
            // SAFETY: the event was made by `new`, and is destroyed once; the driver keeps it for work that
            // still needs it.
            let _ = unsafe { call!(self.gpu.about(), cuEventDestroy_v2(self.raw)) };
        }
    }
}

impl std::fmt::Debug for CudaEvent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CudaEvent({:?} of GPU {})", self.raw, self.gpu.index())
    }
}
