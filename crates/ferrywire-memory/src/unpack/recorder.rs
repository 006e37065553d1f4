//! A test double of a gather queue, which only records its calls.

use super::{Extent, GatherDevice, GatherRun, Mapped};
use crate::cuda::deferred_free::{self, Launching};
use crate::error::{Error, Result};
use crate::sim::MappedBuffer;
use crate::{GpuCopy, MemoryLocation};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Lets one test at a time record: a [`Waiting`] stream changes what every queue of the process does.
pub fn one_at_a_time() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The recorded calls, and how much of the recorded work counts as done.
#[derive(Debug, Default)]
pub struct Seen {
    pub kernels: usize,
    pub copies: Vec<GpuCopy>,
    pub reached: u64,
    /// The memory of a recorded CUDA GPU; `None` records a simulated GPU, which checks addresses by itself.
    pub memory: Option<Range<u64>>,
}

#[derive(Debug)]
pub struct Recorder(pub Arc<Mutex<Seen>>);

// SAFETY: the queue copies nothing, and returns no memory that does not exist.
unsafe impl GatherDevice for Recorder {
    fn location(&self) -> MemoryLocation {
        if self.0.lock().unwrap().memory.is_some() {
            MemoryLocation::Cuda(0)
        } else {
            MemoryLocation::SimGpu(0)
        }
    }

    fn device_memory(&self, address: u64, _bytes: u64) -> Option<(MemoryLocation, Extent)> {
        let memory = self.0.lock().unwrap().memory.clone().filter(|memory| memory.contains(&address))?;
        Some((MemoryLocation::Cuda(0), Extent { base: memory.start, bytes: memory.end - memory.start }))
    }

    fn mapped_memory(&self, _address: u64) -> Option<Extent> {
        None
    }

    fn read(&self, _address: u64, _into: &mut [u8]) -> Result<()> {
        Err(Error::Internal("the recorder of a gather cannot read device memory".into()))
    }

    fn map(&self, bytes: usize) -> Result<Mapped> {
        let buffer = MappedBuffer::new(bytes, 1)?;
        // SAFETY: the buffer is aligned to a page, has that size, is owned here, and stays mapped as long as
        // it lives.
        Ok(unsafe { Mapped::new(buffer.as_ptr(), bytes, buffer) })
    }

    fn launching(&self) -> Option<Launching> {
        deferred_free::launching(0)
    }

    fn gather(&mut self, _runs: &[GatherRun]) -> Result<()> {
        self.0.lock().unwrap().kernels += 1;
        Ok(())
    }

    fn copy(&mut self, copies: &[GpuCopy]) -> Result<()> {
        self.0.lock().unwrap().copies.extend(copies);
        Ok(())
    }

    fn mark(&mut self) -> Result<()> {
        Ok(())
    }

    fn reached(&mut self) -> Result<u64> {
        Ok(self.0.lock().unwrap().reached)
    }
}

/// A stream of GPU 0 that waits for a transfer while this value lives.
pub struct Waiting;

impl Waiting {
    #[allow(clippy::new_without_default, reason = "a stream waits from here on")]
    pub fn new() -> Waiting {
        deferred_free::stream_waits(0);
        Waiting
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        deferred_free::stream_goes_on();
    }
}
