//! Bytes that tell where they belong, written and compared by the GPU: for benchmarks and tests, which would else
//! measure copies to the host.

use super::{CudaBuffer, CudaGpu, CudaStream, Result};
use crate::memory::unpack::{Kernels, PatternParameters};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// An endless sequence of 8-byte words: with `sum = key + w * step`, word `w` is `sum ^ sum << 32 ^ flip`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WordPattern {
    /// Word 0, before its halves are mixed.
    pub key: u64,
    /// Distance of neighbouring words.
    pub step: u64,
    /// Bits that are turned in every word.
    pub flip: u64,
}

impl WordPattern {
    /// The byte at `offset`, words being little-endian.
    pub fn byte(self, offset: u64) -> u8 {
        let sum = self.key.wrapping_add((offset / 8).wrapping_mul(self.step));
        (sum ^ (sum << 32) ^ self.flip).to_le_bytes()[(offset % 8) as usize]
    }
}

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
        let buffer = self.first.lock().unwrap_or_else(PoisonError::into_inner);
        let first = buffer.address();
        // SAFETY: 8 bytes of our own; the rest by the caller's promise.
        unsafe {
            self.stream.fill(first, 0xFF, 8)?;
            self.kernels.check(&self.stream, parameters(pattern, offset, address, bytes), first)?;
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
