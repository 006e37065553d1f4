//! Asynchronous copies between pinned memory and a GPU.
//!
//! A copier executes its batches in order. The mark behind a batch is a number that the copier writes to host
//! memory once the batch is done, so that checking it costs a load and no driver call.
//!
//! Invariant: a dropped copier no longer touches any memory that was passed to it.
//! Read next: `cuda.rs`; `pipeline.rs`, the only user, which makes a copier of either kind.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::error::{Error, Result};
use ferrywire_memory::cuda::PinnedBuffer;
use ferrywire_memory::sim::{MappedBuffer, SimStream};
use ferrywire_memory::{Gpu, MemoryLocation};

/// The direction of a copier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// From the GPU.
    Out,
    /// To the GPU.
    In,
}

/// One run of a copy: its address in pinned memory, its address on the GPU, and its length in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub host: usize,
    pub device: u64,
    pub bytes: usize,
}

/// A queue of copies of one GPU in one direction.
pub(super) trait Copier: Send {
    /// Enqueues copies and a mark behind them. Marks increase. Call this only while `takes_more`.
    ///
    /// # Errors
    /// The driver's error; the copier must then be dropped.
    ///
    /// # Safety
    /// Both sides of each run stay allocated, and no other code writes to the source or uses the target,
    /// until the mark is reached or the copier is dropped.
    unsafe fn copy(&mut self, runs: &[Run], mark: u64) -> Result<()>;

    /// The last mark that was reached, and an error if later ones are known never to be reached.
    fn reached(&mut self) -> (u64, Option<Error>);

    /// Whether the batches that wait, of `_bytes` bytes in all, should be enqueued now, not after the earlier ones.
    fn takes_more(&self, _bytes: usize) -> bool {
        true
    }

    /// The last mark that was reached, without a look at the rest. Call this once the work has ended.
    fn last_reached(&self) -> u64;

    /// Whether the copies that have begun end within this time. If so, dropping the copier does not block.
    fn ends_within(&mut self, _timeout: Duration) -> bool {
        true
    }

    /// Waits until the copies that have begun have ended. False if that cannot be known: then the copier must not be
    /// dropped, and the memory that was passed to it must not be used.
    fn finish(&mut self) -> bool {
        true
    }

    /// Number of driver calls, including queries.
    fn calls(&self) -> u64;

    /// Bytes of pinned memory that the copier uses itself.
    fn pinned_bytes(&self) -> usize {
        0
    }
}

/// Host memory that a GPU reaches.
pub(super) enum Pinned {
    Sim(MappedBuffer),
    Cuda(PinnedBuffer),
}

impl Pinned {
    pub fn base(&self) -> usize {
        match self {
            Pinned::Sim(buffer) => buffer.as_ptr() as usize,
            Pinned::Cuda(buffer) => buffer.as_ptr() as usize,
        }
    }

    pub fn bytes(&self) -> usize {
        match self {
            Pinned::Sim(buffer) => buffer.len(),
            Pinned::Cuda(buffer) => buffer.pinned_bytes(),
        }
    }
}

/// Allocates pinned memory near a GPU that is open. For set-up only: the call may wait for the GPU.
///
/// # Errors
/// The GPU is not open, or the driver's error.
pub(super) fn pinned(location: MemoryLocation, bytes: usize) -> Result<Pinned> {
    match Gpu::opened(location)? {
        Gpu::Sim(_) => Ok(Pinned::Sim(MappedBuffer::new(bytes, 4096)?)),
        Gpu::Cuda(gpu) => Ok(Pinned::Cuda(gpu.pinned(bytes)?)),
    }
}

/// The copies of a simulated GPU.
pub(super) struct SimCopier {
    stream: SimStream,
    flag: Arc<AtomicU64>,
    marked: u64,
    calls: u64,
    way: Way,
}

impl SimCopier {
    pub fn new(stream: SimStream, way: Way) -> SimCopier {
        SimCopier { stream, flag: Arc::default(), marked: 0, calls: 0, way }
    }
}

impl Copier for SimCopier {
    unsafe fn copy(&mut self, runs: &[Run], mark: u64) -> Result<()> {
        (self.marked, self.calls) = (mark, self.calls + runs.len() as u64 + 1);
        for run in runs {
            // SAFETY: promised by the caller of `copy`.
            unsafe {
                match self.way {
                    Way::Out => self.stream.to_host(run.device, run.host as *mut u8, run.bytes)?,
                    Way::In => self.stream.from_host(run.host as *const u8, run.device, run.bytes)?,
                }
            }
        }
        Ok(self.stream.write_flag(&self.flag, mark)?)
    }

    fn reached(&mut self) -> (u64, Option<Error>) {
        let reached = self.flag.load(Ordering::Acquire);
        if reached >= self.marked {
            return (reached, None);
        }
        self.calls += 1;
        let failed = self.stream.query().err().map(Error::from);
        // Copies before the failure are done.
        (self.flag.load(Ordering::Acquire), failed)
    }

    fn last_reached(&self) -> u64 {
        self.flag.load(Ordering::Acquire)
    }

    fn calls(&self) -> u64 {
        self.calls
    }
}

#[cfg(test)]
mod tests {
    use super::super::pipeline::copier;
    use super::*;
    use ferrywire_memory::sim::{SimFaults, SimGpu, SimGpuError};
    use std::time::Instant;

    const BYTES: usize = 4096;

    /// A GPU, some of its memory, and pinned memory.
    fn scene(index: u32) -> (Arc<SimGpu>, ferrywire_memory::sim::SimBuffer, Pinned) {
        let gpu = SimGpu::open(index).unwrap();
        gpu.set_faults(SimFaults::default());
        let buffer = gpu.alloc(BYTES, 4096).unwrap();
        (gpu, buffer, pinned(MemoryLocation::SimGpu(index), BYTES).unwrap())
    }

    fn host(pinned: &Pinned) -> &[u8] {
        // SAFETY: the ring has so many bytes, and the copier is idle when the tests read them.
        unsafe { std::slice::from_raw_parts(pinned.base() as *const u8, BYTES) }
    }

    fn until(copier: &mut dyn Copier, mark: u64) -> Option<Error> {
        let start = Instant::now();
        loop {
            match copier.reached() {
                (reached, None) if reached < mark => assert!(start.elapsed() < Duration::from_secs(60)),
                (_, failed) => return failed,
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_mark_is_reached_when_the_copies_before_it_are_done() {
        let (gpu, buffer, ring) = scene(11);
        let run = |at: usize| Run {
            host: ring.base() + at,
            device: buffer.address() + at as u64,
            bytes: BYTES / 2,
        };
        gpu.write_from_slice(buffer.address(), &[7; BYTES]).unwrap();
        let mut out = copier(MemoryLocation::SimGpu(11), Way::Out).unwrap();
        gpu.set_stall(true);
        for (at, mark) in [(0, 1), (BYTES / 2, 2)] {
            // SAFETY: both sides outlive the copier, and no other code uses them before the mark.
            unsafe { out.copy(&[run(at)], mark) }.unwrap();
        }
        assert!(matches!(out.reached(), (0, None)), "nothing is copied");
        assert_eq!(host(&ring), [0; BYTES]);
        gpu.set_stall(false);
        assert!(until(&mut *out, 2).is_none());
        assert_eq!(host(&ring), [7; BYTES]);

        // SAFETY: nothing is being copied, and the memory belongs to this test.
        unsafe { std::ptr::write_bytes(ring.base() as *mut u8, 9, BYTES) };
        let mut into = copier(MemoryLocation::SimGpu(11), Way::In).unwrap();
        // SAFETY: both sides outlive the copier, and no other code uses them before the mark.
        unsafe { into.copy(&[run(0), run(BYTES / 2)], 5) }.unwrap();
        assert!(until(&mut *into, 5).is_none());
        assert_eq!(gpu.read_to_vec(buffer.address(), BYTES).unwrap(), [9; BYTES]);
    }

    #[test]
    fn a_failure_is_reported_with_the_marks_before_it() {
        let (gpu, buffer, ring) = scene(12);
        gpu.set_faults(SimFaults { fail_after: Some(2), ..SimFaults::default() });
        let mut out = copier(MemoryLocation::SimGpu(12), Way::Out).unwrap();
        let run = Run { host: ring.base(), device: buffer.address(), bytes: BYTES };
        for mark in 1..=4 {
            // SAFETY: both sides outlive the copier, and no other code uses them.
            let enqueued = unsafe { out.copy(&[run], mark) };
            assert!(enqueued.is_ok() || mark > 2, "{enqueued:?}");
        }
        assert!(matches!(until(&mut *out, 4), Some(Error::SimGpu(_))));
        assert_eq!(out.reached().0, 2);
    }

    #[test]
    fn a_dropped_copier_is_done_with_the_memory() {
        let (gpu, buffer, ring) = scene(13);
        gpu.write_from_slice(buffer.address(), &[7; BYTES]).unwrap();
        gpu.set_stall(true);
        let mut out = copier(MemoryLocation::SimGpu(13), Way::Out).unwrap();
        let run = Run { host: ring.base(), device: buffer.address(), bytes: BYTES };
        // SAFETY: both sides outlive the copier.
        unsafe { out.copy(&[run], 1) }.unwrap();
        drop(out);
        gpu.set_stall(false);
        // The GPU finishes its other work before this read.
        assert_eq!(gpu.read_to_vec(buffer.address(), 1).unwrap(), [7]);
        assert_eq!(host(&ring), [0; BYTES], "the copies that had not begun were not made");
    }

    #[test]
    fn a_gpu_that_is_not_open_has_no_copier() {
        let gone = MemoryLocation::SimGpu(14);
        assert!(matches!(pinned(gone, BYTES).err(), Some(Error::SimGpu(SimGpuError::NotOpen { index: 14 }))));
        assert!(matches!(
            copier(gone, Way::In).err(),
            Some(Error::SimGpu(SimGpuError::NotOpen { index: 14 }))
        ));
    }
}
