//! Copies of a CUDA GPU: by its copy engines where runs are few, by a kernel where they are many.
//!
//! A copy engine costs 3.6 us per batch beside its bytes and does not disturb the multiprocessors, but every further run
//! is work for the driver: 100,000 blocks of 4 KiB pass at 10 GB/s, with all cores busy. A kernel reads the list of runs
//! from mapped memory and writes the mark itself: one call, however many there are.
//!
//! Invariant: entries of the list, and the count of blocks that are done, belong to one batch until its mark is
//! reached. Read next: `memory/unpack/kernels.rs`.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::copier::{Copier, Run, Way};
use super::ring::Ring;
use crate::error::{Error, Result};
use crate::limits;
use crate::memory::GpuCopy;
use crate::memory::cuda::{CudaError, CudaGpu, CudaStream, PinnedBuffer, idle, pointer};
use crate::memory::unpack::{COUNTERS, CopyList, Counter, Kernels};

/// Looks at an unchanged flag after which the driver is asked whether the copies have failed.
const LOOKS_PER_QUESTION: u32 = 4096;
/// Runs of a batch from which on the kernel copies them.
const KERNEL_RUNS_MIN: usize = 3;

pub(super) struct CudaCopier {
    /// Dropped before the memory that its work uses.
    stream: CudaStream,
    flag: PinnedBuffer,
    kernel: Option<ListKernel>,
    marked: u64,
    asked: u32,
    calls: u64,
    batch: Vec<GpuCopy>,
    way: Way,
}

/// What copies by the kernel need.
struct ListKernel {
    kernels: Arc<Kernels>,
    done: Counter,
    list: PinnedBuffer,
    ring: Ring,
    /// The marks of the batches in the ring.
    marks: VecDeque<u64>,
}

impl CudaCopier {
    pub fn new(gpu: &Arc<CudaGpu>, way: Way) -> Result<CudaCopier> {
        let kernel = match ListKernel::new(gpu) {
            Ok(kernel) => Some(kernel),
            Err(error) => {
                tracing::warn!(%error, "scattered memory is copied run by run");
                None
            }
        };
        let (stream, flag) = (gpu.urgent_stream(way == Way::In)?, gpu.pinned(size_of::<u64>())?);
        Ok(CudaCopier { stream, flag, kernel, marked: 0, asked: 0, calls: 0, batch: Vec::new(), way })
    }

    fn flag(&self) -> u64 {
        // SAFETY: 8 bytes, page-aligned, alive as long as `self`; only the GPU writes there, and whole.
        unsafe { AtomicU64::from_ptr(self.flag.as_ptr().cast()) }.load(Ordering::Acquire)
    }

    /// The runs as the GPU takes them: those of one allocation that touch on both sides as one. What lies side by side
    /// may be of several allocations, over whose border no copy may go.
    ///
    /// Sees that the memory of GPUs is still there: its owner may have freed it without a word, and neither a copy engine
    /// nor a kernel would forgive that. One question per allocation and batch.
    fn fill(&mut self, runs: &[Run]) -> Result<()> {
        self.batch.clear();
        let mut known = 0..0;
        for &Run { host, device, bytes } in runs {
            let end = device + bytes as u64;
            let asked = device < known.start || known.end < end;
            if asked {
                self.calls += 1;
                known = pointer::stretch(device, bytes as u64)
                    .map(|found| found.base..found.base + found.bytes)
                    .filter(|found| end <= found.end)
                    .ok_or(CudaError::Freed { address: device, bytes: bytes as u64 })?;
            }
            let (source, target) = match self.way {
                Way::Out => (device, host as u64),
                Way::In => (host as u64, device),
            };
            let touches = |last: &&mut GpuCopy| {
                last.source + last.bytes as u64 == source && last.target + last.bytes as u64 == target
            };
            match self.batch.last_mut().filter(|_| !asked).filter(touches) {
                Some(last) => last.bytes += bytes,
                None => self.batch.push(GpuCopy { source, target, bytes }),
            }
        }
        Ok(())
    }
}

impl Copier for CudaCopier {
    unsafe fn copy(&mut self, runs: &[Run], mark: u64) -> Result<()> {
        (self.marked, self.asked) = (mark, 0);
        self.fill(runs)?;
        // A kernel may have to stand behind a stream that waits for this very transfer; a copy engine's work does not. (The
        // driver has the multiprocessors do the shortest copies to a GPU as well, for which there is no other way.)
        if self.batch.len() >= KERNEL_RUNS_MIN
            && !idle::streams_wait()
            && let Some(kernel) = &mut self.kernel
            // SAFETY: the flag outlives the stream; the rest by the caller's promise.
            && unsafe { kernel.copy(&self.stream, &self.batch, &self.flag, mark) }?
        {
            self.calls += 1;
            return Ok(());
        }
        // SAFETY: by the caller's promise, ranges of a ring, or of a checked placement; and the device address of
        // pinned memory, aligned to a page, which outlives the stream.
        unsafe {
            self.calls += self.stream.copy_batch(&self.batch)? as u64 + 1;
            Ok(self.stream.write_flag_u64(self.flag.address(), mark)?)
        }
    }

    fn reached(&mut self) -> (u64, Option<Error>) {
        let mut reached = self.flag();
        let mut failed = None;
        self.asked = if reached >= self.marked { 0 } else { self.asked.wrapping_add(1) };
        if self.asked > 0 && self.asked.is_multiple_of(LOOKS_PER_QUESTION) {
            self.calls += 1;
            failed = self.stream.query().err().map(Error::from);
            reached = self.flag();
        }
        if let Some(kernel) = &mut self.kernel {
            kernel.free(reached);
        }
        (reached, failed)
    }

    fn stop(&mut self) -> u64 {
        self.stream.finish();
        self.flag()
    }

    fn calls(&self) -> u64 {
        self.calls
    }
}

impl ListKernel {
    fn new(gpu: &Arc<CudaGpu>) -> Result<ListKernel> {
        let (kernels, list) = (Kernels::of(gpu)?, gpu.pinned(limits::STAGING_LIST_BYTES)?);
        let done = kernels.counter().ok_or_else(|| Error::Limit {
            name: "COUNTERS",
            limit: COUNTERS as u64,
            why: "so many channels stage for this GPU that further ones copy run by run: use fewer".into(),
        })?;
        if list.address() != list.as_ptr() as u64 {
            return Err(Error::Bug("the GPU reaches pinned memory at another address than the CPU".into()));
        }
        let ring = Ring::new(limits::STAGING_LIST_BYTES);
        Ok(ListKernel { kernels, done, list, ring, marks: VecDeque::new() })
    }

    /// Enqueues the copies and the mark behind them; false if the list has no room.
    ///
    /// # Safety
    /// As for [`Copier::copy`]; the flag outlives the stream.
    unsafe fn copy(
        &mut self,
        stream: &CudaStream,
        copies: &[GpuCopy],
        flag: &PinnedBuffer,
        mark: u64,
    ) -> Result<bool> {
        let Some(offset) = self.ring.take(size_of_val(copies)) else { return Ok(false) };
        self.marks.push_back(mark);
        // SAFETY: the ring gave so many bytes, aligned, which nobody reads until the launch.
        unsafe {
            let to = self.list.as_ptr().add(offset).cast::<GpuCopy>();
            to.copy_from_nonoverlapping(copies.as_ptr(), copies.len());
        }
        let list = CopyList {
            runs: self.list.address() + offset as u64,
            count: copies.len() as u64,
            longest: copies.iter().map(|copy| copy.bytes as u64).max().unwrap_or(0),
            flag: flag.address(),
            value: mark,
            done: self.done.address(),
        };
        // SAFETY: the entries stay until the mark is reached; the rest by the caller's promise.
        unsafe { self.kernels.copy(stream, list) }?;
        Ok(true)
    }

    /// Forgets the batches up to a mark.
    fn free(&mut self, reached: u64) {
        while self.marks.pop_front_if(|mark| *mark <= reached).is_some() {
            self.ring.give_back();
        }
    }
}
