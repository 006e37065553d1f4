//! The gather queue of a CUDA GPU: one stream per connection.
//!
//! The GPU reports finished work through a word in mapped memory, which the CPU reads without a driver call.
//! A failed GPU never writes the word, so the driver is also asked from time to time.
//!
//! Invariant: the contract of [`GatherDevice`]; a dropped queue no longer uses any memory.
//! Read next: `kernels.rs`, `../cuda/stream.rs`.

use super::device::{Extent, GatherDevice, GatherRun, Mapped};
use super::kernels::{Kernels, RUNS_PER_LAUNCH_MAX};
use crate::cuda::deferred_free::{self, Launching};
use crate::cuda::{CudaError, CudaGpu, CudaStream, PinnedBuffer, pointer};
use crate::error::{Error, Result};
use crate::{GpuCopy, MemoryLocation};
use ferrywire_proto::limits;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Interval at which the driver is asked whether the GPU still works.
const ASK_INTERVAL: Duration = Duration::from_millis(1);

/// A gather queue on a CUDA GPU.
#[derive(Debug)]
pub struct CudaQueue {
    stream: CudaStream,
    /// The kernels, or why the driver cannot compile them: the queue then only copies.
    kernels: Result<Arc<Kernels>, CudaError>,
    /// Number of the last mark that the GPU has reached; the GPU writes it.
    flag: PinnedBuffer,
    marked: u64,
    reached: u64,
    asked: Instant,
    /// When the driver began to answer with errors.
    fails_since: Option<Instant>,
}

impl CudaQueue {
    /// A gather queue with a stream of its own.
    ///
    /// # Errors
    /// The driver's error when it cannot provide stream or memory.
    pub fn new(gpu: &Arc<CudaGpu>) -> Result<CudaQueue> {
        Ok(CudaQueue {
            stream: gpu.urgent_stream(true)?,
            kernels: Kernels::of(gpu),
            flag: gpu.pinned(size_of::<AtomicU64>())?,
            marked: 0,
            reached: 0,
            asked: Instant::now(),
            fails_since: None,
        })
    }

    fn flag(&self) -> u64 {
        // SAFETY: the word is zeroed memory of the buffer, aligned to a page; the GPU writes it as a whole.
        unsafe { AtomicU64::from_ptr(self.flag.as_ptr().cast()) }.load(Ordering::Acquire)
    }

    fn gpu(&self) -> &Arc<CudaGpu> {
        self.stream.gpu()
    }
}

impl Drop for CudaQueue {
    fn drop(&mut self) {
        if let Err(error) = self.stream.finish() {
            tracing::error!(%error, "cannot tell whether gathers of CUDA GPU {} have ended", self.gpu().index());
            self.flag.prevent_reuse();
        }
    }
}

/// Wraps pinned memory; returns an error unless the GPU accesses it at the CPU's address.
pub fn mapped(buffer: PinnedBuffer) -> Result<Mapped> {
    if buffer.as_ptr() as u64 != buffer.address() {
        let why = "the GPU reaches pinned memory at another address than the CPU: use --unpack copy";
        return Err(Error::invalid(format!("CUDA GPU {}", buffer.gpu().index()), why));
    }
    // SAFETY: the buffer is aligned to a page, has that size, is owned here, and stays mapped as long as it
    // lives.
    Ok(unsafe { Mapped::new(buffer.as_ptr(), buffer.len(), buffer) })
}

// SAFETY: pinned memory is ordinary memory of this process, and the memory from `mapped_memory` has the same
// address for the GPU; `drop` waits until the stream is done with all memory.
unsafe impl GatherDevice for CudaQueue {
    fn location(&self) -> MemoryLocation {
        MemoryLocation::Cuda(self.gpu().index())
    }

    fn device_memory(&self, address: u64, bytes: u64) -> Option<(MemoryLocation, Extent)> {
        let found = pointer::stretch(address, bytes)?;
        Some((MemoryLocation::Cuda(found.gpu), Extent { base: found.base, bytes: found.bytes }))
    }

    fn mapped_memory(&self, address: u64) -> Option<Extent> {
        pointer::pinned(self.gpu(), address).map(|(base, bytes)| Extent { base, bytes })
    }

    fn read(&self, address: u64, into: &mut [u8]) -> Result<()> {
        Ok(self.gpu().read_into_slice(address, into)?)
    }

    fn map(&self, bytes: usize) -> Result<Mapped> {
        mapped(self.gpu().pinned(bytes)?)
    }

    fn launching(&self) -> Option<Launching> {
        self.kernels.as_ref().ok().and_then(|_| deferred_free::launching(self.gpu().index()))
    }

    fn check_kernel(&self) -> Result<()> {
        Ok(self.kernels.as_ref().map(drop).map_err(CudaError::clone)?)
    }

    fn gather(&mut self, runs: &[GatherRun]) -> Result<()> {
        let kernels = self.kernels.as_ref().map_err(CudaError::clone)?;
        for runs in runs.chunks(RUNS_PER_LAUNCH_MAX) {
            // SAFETY: the runs are from tables that `map` made, and their fragments were checked against pool
            // and message.
            unsafe { kernels.gather(&self.stream, runs) }?;
        }
        Ok(())
    }

    fn copy(&mut self, copies: &[GpuCopy]) -> Result<()> {
        // SAFETY: all copies are of device or mapped memory that outlives the queue, as the trait requires.
        unsafe { self.stream.copy_batch(copies) }?;
        Ok(())
    }

    fn mark(&mut self) -> Result<()> {
        if self.marked - self.reached >= limits::GATHER_LAUNCHES_MAX as u64 {
            return Err(Error::Internal("a gather recorded more marks than its queue holds".into()));
        }
        // SAFETY: the flag is 8 aligned bytes of pinned memory, which outlives the stream.
        unsafe { self.stream.write_flag_u64(self.flag.address(), self.marked + 1) }?;
        self.marked += 1;
        Ok(())
    }

    fn reached(&mut self) -> Result<u64> {
        let before = self.reached;
        self.reached = self.flag();
        if self.reached == before && self.reached < self.marked && self.asked.elapsed() >= ASK_INTERVAL {
            self.asked = Instant::now();
            match self.stream.query() {
                Ok(_) => self.fails_since = None,
                // After any other error the mark can still be reached, unless the error lasts.
                Err(error) => {
                    let since = *self.fails_since.get_or_insert(self.asked);
                    if error.ends_work() || since.elapsed() >= limits::GPU_ABANDON_TIMEOUT {
                        return Err(error.into());
                    }
                }
            }
        }
        Ok(self.reached)
    }
}
