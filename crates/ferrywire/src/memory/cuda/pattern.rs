//! Bytes that tell where they belong, written and compared by the GPU: for benchmarks and tests, which would else
//! measure copies to the host.

use super::{CudaBuffer, CudaGpu, CudaStream, Result, WordPattern};
use crate::memory::unpack::{Kernels, PatternParameters};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Writes and compares patterns on one GPU; each call waits until it is done.
#[derive(Debug)]
pub struct CudaPattern {
    stream: CudaStream,
    kernels: Arc<Kernels>,
    /// The index of the first wrong byte; held from its reset until it is read.
    first: Mutex<CudaBuffer>,
}

/// A kernel that runs over all memory of a GPU takes less than a second.
const DEADLINE: Duration = Duration::from_secs(120);

impl CudaPattern {
    /// What is needed for it, on this GPU.
    pub fn new(gpu: &Arc<CudaGpu>) -> Result<CudaPattern> {
        Ok(CudaPattern {
            stream: gpu.stream()?,
            kernels: Kernels::of(gpu)?,
            first: Mutex::new(gpu.alloc(8, 8)?),
        })
    }

    /// Writes `bytes` bytes of the pattern, from its byte `offset` on.
    ///
    /// # Safety
    /// `bytes` bytes at `address` are memory that the GPU reaches, and nobody else uses them meanwhile.
    pub unsafe fn fill(&self, pattern: WordPattern, offset: u64, address: u64, bytes: u64) -> Result<()> {
        // SAFETY: by the caller's promise.
        unsafe { self.kernels.fill(&self.stream, parameters(pattern, offset, address, bytes)) }?;
        self.stream.wait(DEADLINE)
    }

    /// The index of the first of `bytes` bytes that is not the pattern's, from its byte `offset` on.
    ///
    /// # Safety
    /// As for [`CudaPattern::fill`].
    pub unsafe fn first_difference(
        &self,
        pattern: WordPattern,
        offset: u64,
        address: u64,
        bytes: u64,
    ) -> Result<Option<u64>> {
        // SAFETY: by the caller's promise.
        unsafe { self.least_difference(&[parameters(pattern, offset, address, bytes)]) }
    }

    /// Writes several stretches, with one launch for each and one wait for all.
    ///
    /// # Safety
    /// As for [`CudaPattern::fill`], for each.
    pub(crate) unsafe fn fill_parts(&self, parts: &[PatternParameters]) -> Result<()> {
        for part in parts.iter().filter(|part| part.bytes > 0) {
            // SAFETY: by the caller's promise.
            unsafe { self.kernels.fill(&self.stream, *part) }?;
        }
        self.stream.wait(DEADLINE)
    }

    /// The first of several stretches that differs, and the index of its first wrong byte.
    ///
    /// # Safety
    /// As for [`CudaPattern::fill`], for each.
    pub(crate) unsafe fn first_difference_of_parts(
        &self,
        parts: &[PatternParameters],
    ) -> Result<Option<(usize, u64)>> {
        // SAFETY: by the caller's promise, here and below.
        if unsafe { self.least_difference(parts) }?.is_none() {
            return Ok(None);
        }
        // All together tell that there is one; halves of halves, which.
        let (mut first, mut end) = (0, parts.len());
        while end - first > 1 {
            let middle = first.midpoint(end);
            // SAFETY: as above.
            match unsafe { self.least_difference(&parts[first..middle]) }? {
                Some(_) => end = middle,
                None => first = middle,
            }
        }
        // SAFETY: as above.
        let index = unsafe { self.least_difference(&parts[first..end]) }?;
        // One that has gone meanwhile was there.
        Ok(Some((first, index.unwrap_or(0))))
    }

    /// The least index of a wrong byte in any of several stretches, each counted from its own first byte.
    ///
    /// # Safety
    /// As for [`CudaPattern::fill`], for each.
    unsafe fn least_difference(&self, parts: &[PatternParameters]) -> Result<Option<u64>> {
        let buffer = self.first.lock().unwrap_or_else(PoisonError::into_inner);
        let first = buffer.address();
        // SAFETY: 8 bytes of our own.
        unsafe { self.stream.fill(first, 0xFF, 8) }?;
        for part in parts.iter().filter(|part| part.bytes > 0) {
            // SAFETY: 8 bytes of our own; the rest by the caller's promise.
            unsafe { self.kernels.check(&self.stream, *part, first) }?;
        }
        self.stream.wait(DEADLINE)?;
        let mut found = [0; 8];
        buffer.gpu().read_into_slice(first, &mut found)?;
        Ok(Some(u64::from_ne_bytes(found)).filter(|first| *first != u64::MAX))
    }

    /// For tests: keeps a stream of the same GPU busy for a time, so that what comes behind is seen to be waited
    /// for. This has to live until the time is over.
    #[doc(hidden)]
    pub fn hold_up(&self, stream: &CudaStream, time: Duration) -> Result<()> {
        self.kernels.delay(stream, time)
    }
}

fn parameters(pattern: WordPattern, offset: u64, address: u64, bytes: u64) -> PatternParameters {
    let WordPattern { key, step, flip } = pattern;
    PatternParameters { key, step, flip, offset, address, bytes }
}
