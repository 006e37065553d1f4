//! Copies of a CUDA GPU, by its multiprocessors or its copy engines.
//!
//! A copy engine does not disturb kernels and is not delayed by them. But each run costs a driver call, and
//! each mark stops the engine for some microseconds. It also reads bytes that a core has just written, still
//! in the core's cache, at two thirds of its speed: just received bytes go to a GPU at 30 GB/s instead of 46.
//! A kernel reads the list of runs from mapped memory, writes the mark itself, and reads at 44 GB/s. So
//! multiprocessors copy every batch that is worth a launch, unless they are busy, and every batch that comes
//! while a kernel stays.
//!
//! Invariant: memory that its owner has freed is not touched. Read next: `kernel.rs`.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::thread;
use std::time::{Duration, Instant};

use super::copier::{Copier, Run, Way};
use super::kernel::{Again, ListKernel};
use crate::error::{Error, Result};
use ferrywire_memory::GpuCopy;
use ferrywire_memory::cuda::{
    CudaError, CudaEvent, CudaGpu, CudaStream, PinnedBuffer, deferred_free, pointer,
};
use ferrywire_memory::unpack::Kernels;

/// Interval between driver queries for failed copies, after the last copy or query. The second constant is
/// the number of checks of the flag per check of the clock.
const QUESTION_INTERVAL: Duration = Duration::from_millis(2);
const POLLS_PER_CLOCK_READ: u32 = 16;
/// Pause between two queries whether a copier's work has ended.
const END_PAUSE: Duration = Duration::from_micros(20);
/// Fewest runs of a batch that the kernel copies.
const KERNEL_RUNS_MIN: usize = 3;
/// Fewest bytes of a batch that the kernel copies whatever the number of runs.
const KERNEL_BYTES_MIN: usize = 128 << 10;
/// Shortest run, in bytes, for which copy engines are better than busy multiprocessors: each run is a driver
/// call.
const ENGINE_RUN_BYTES_MIN: usize = 64 << 10;

/// Most short runs that copy engines copy while multiprocessors are busy: a longer list waits for the
/// multiprocessors.
const ENGINE_RUNS_MAX: usize = 128;

/// Whether launches return only after their kernels have ended, which a debug setting of the driver causes.
/// If so, no copy can be posted to a running kernel.
static LAUNCHES_BLOCK: LazyLock<bool> =
    LazyLock::new(|| std::env::var_os("CUDA_LAUNCH_BLOCKING").is_some_and(|value| value != "0"));

pub(super) struct CudaCopier {
    /// Its work uses the memory and the kernel below.
    stream: CudaStream,
    /// The work was seen to end, and none was enqueued since.
    has_ended: bool,
    /// The last mark that was reached, written by the GPU.
    flag: PinnedBuffer,
    kernel: Option<ListKernel>,
    /// The mark before the first batch, the mark of the last batch (`marked`), and the mark of the batch before it (`behind`).
    before: u64,
    marked: u64,
    behind: u64,
    /// Checks without progress, and the time of the last driver call for copies.
    polls: u32,
    asked: Instant,
    calls: u64,
    /// Recorded behind this copier's last work, if `is_fenced`.
    end: CudaEvent,
    is_fenced: bool,
    batch: Vec<GpuCopy>,
    /// GPU memory that the batch uses, from the first to the last byte in each allocation.
    used: Vec<Range<u64>>,
    way: Way,
}

impl CudaCopier {
    pub fn new(gpu: &Arc<CudaGpu>, way: Way) -> Result<CudaCopier> {
        // A thread that moves data must not load kernels: a driver may wait for a stream before it loads.
        // `Prepared` has logged why there are none.
        let kernels = Kernels::loaded(gpu).filter(|_| !*LAUNCHES_BLOCK);
        let kernel =
            kernels.map(|kernels| ListKernel::new(kernels, gpu)).transpose().unwrap_or_else(|error| {
                tracing::warn!(%error, "copy kernel for GPU staging not used: copy engines copy piece by piece");
                None
            });
        let (stream, flag) = (gpu.urgent_stream(way == Way::In)?, gpu.pinned(size_of::<u64>())?);
        let (batch, used) = (Vec::new(), Vec::new());
        Ok(CudaCopier {
            stream,
            has_ended: true,
            flag,
            kernel,
            before: 0,
            marked: 0,
            behind: 0,
            polls: 0,
            asked: Instant::now(),
            calls: 0,
            end: CudaEvent::new(gpu)?,
            is_fenced: false,
            batch,
            used,
            way,
        })
    }

    fn kernel_takes_more(&self) -> bool {
        self.kernel.as_ref().is_none_or(ListKernel::takes_more)
    }

    /// The last mark that was reached.
    fn mark_reached(&self) -> u64 {
        // SAFETY: 8 bytes, page-aligned, alive as long as `self`; every writer writes all 8 bytes at once.
        let flag = unsafe { AtomicU64::from_ptr(self.flag.as_ptr().cast()) };
        flag.load(Ordering::Acquire).max(self.before)
    }

    /// Converts runs to copies. Adjacent runs in one allocation become one copy. Adjacent runs may belong to
    /// different allocations, and no copy may cross the border.
    ///
    /// Checks that the GPU memory is still allocated: one query per allocation and batch.
    ///
    /// # Errors
    /// [`CudaError::Freed`] for memory that its owner has freed.
    fn fill(&mut self, runs: &[Run]) -> Result<()> {
        self.batch.clear();
        self.used.clear();
        let mut known = 0..0;
        for &Run { host, device, bytes } in runs {
            let end = device + bytes as u64;
            let asked = device < known.start || known.end < end;
            if asked {
                self.calls += 1;
                known = allocation(&(device..end))?;
                self.used.push(device..end);
            }
            if let Some(used) = self.used.last_mut() {
                *used = used.start.min(device)..used.end.max(end);
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

    /// Lets the multiprocessors copy the batch, if that is better and they have time. Returns whether they
    /// do.
    ///
    /// A kernel may have to wait behind a stream that waits for this very transfer; a copy engine does not.
    ///
    /// # Safety
    /// As for [`Copier::copy`].
    unsafe fn copy_by_kernel(&mut self) -> Result<bool> {
        let (runs, bytes) = (self.batch.len(), self.batch.iter().map(|copy| copy.bytes).sum::<usize>());
        if runs < KERNEL_RUNS_MIN && bytes < KERNEL_BYTES_MIN {
            return Ok(false);
        }
        let Some(kernel) = self.kernel.as_mut().filter(|kernel| kernel.fits(runs)) else { return Ok(false) };
        let Some(_launching) = deferred_free::launching(self.stream.gpu().index()) else { return Ok(false) };
        let needed = runs > ENGINE_RUNS_MAX && bytes / runs < ENGINE_RUN_BYTES_MIN;
        let Some(permit) = kernel.permit(needed) else { return Ok(false) };
        let there = || self.used.iter().try_for_each(|used| allocation(used).map(drop));
        self.calls += 1 + self.used.len() as u64;
        let marks = [self.behind, self.marked];
        // SAFETY: the flag outlives the stream; the other conditions are promised by the caller.
        unsafe { kernel.launch(&self.stream, &self.batch, permit, &self.flag, marks, there) }.map(|()| true)
    }

    /// Ends posting to the kernel, which may end then: later work in the stream is not part of the kernel.
    fn bar(&mut self) {
        if let Some(kernel) = &mut self.kernel {
            kernel.bar();
        }
    }

    /// Lets the copy engines copy the batch.
    ///
    /// # Safety
    /// As for [`Copier::copy`].
    unsafe fn copy_by_engine(&mut self) -> Result<()> {
        self.bar();
        // SAFETY: the caller promises ranges of a ring, or of a checked placement, though its owner may have
        // freed it since.
        let calls = unsafe { self.stream.copy_each(&self.batch, self.way == Way::In) };
        // The driver's error for freed memory does not say that the memory is freed.
        let gone = || self.used.iter().find_map(|used| allocation(used).err());
        self.calls += calls.map_err(|error| gone().unwrap_or(error.into()))? as u64 + 1;
        // SAFETY: the device address of pinned memory, aligned to a page, which outlives the stream.
        Ok(unsafe { self.stream.write_flag_u64(self.flag.address(), self.marked) }?)
    }

    /// Copies the batch in the better of the two ways.
    ///
    /// # Safety
    /// As for [`Copier::copy`].
    unsafe fn enqueue(&mut self) -> Result<()> {
        // SAFETY: promised by the caller of this function.
        if unsafe { self.copy_by_kernel() }? {
            return Ok(());
        }
        // SAFETY: promised by the caller of this function.
        unsafe { self.copy_by_engine() }
    }
}

impl Drop for CudaCopier {
    fn drop(&mut self) {
        if !self.finish() {
            self.flag.prevent_reuse();
            self.kernel.iter_mut().for_each(ListKernel::prevent_reuse);
        }
    }
}

/// The addresses of the allocation that contains `used`. Its owner may have freed it without notice.
fn allocation(used: &Range<u64>) -> Result<Range<u64>> {
    let bytes = used.end - used.start;
    let found = pointer::stretch(used.start, bytes).map(|found| found.base..found.base + found.bytes);
    let found = found.filter(|found| used.end <= found.end);
    found.ok_or_else(|| CudaError::Freed { address: used.start, bytes }.into())
}

impl Copier for CudaCopier {
    unsafe fn copy(&mut self, runs: &[Run], mark: u64) -> Result<()> {
        if self.marked == 0 {
            (self.before, self.marked) = (mark - 1, mark - 1);
        }
        (self.behind, self.marked) = (self.marked, mark);
        (self.has_ended, self.is_fenced) = (false, false);
        (self.polls, self.asked) = (0, Instant::now());
        let posts = self.kernel.as_ref().is_some_and(ListKernel::posts);
        self.fill(runs)?;
        match &mut self.kernel {
            Some(kernel) if posts && kernel.fits(self.batch.len()) => {
                // SAFETY: promised by the caller of `copy`. The memory was checked after the kernel was seen
                // to run.
                unsafe { kernel.post(&self.batch, mark) };
                Ok(())
            }
            // SAFETY: promised by the caller of `copy`.
            _ => unsafe { self.enqueue() },
        }
    }

    fn reached(&mut self) -> (u64, Option<Error>) {
        let (mut reached, mut failed) = (self.mark_reached(), None);
        let waits = reached < self.marked || !self.kernel_takes_more();
        self.polls = if waits { self.polls.wrapping_add(1) } else { 0 };
        if self.polls > 0
            && self.polls.is_multiple_of(POLLS_PER_CLOCK_READ)
            && self.asked.elapsed() >= QUESTION_INTERVAL
        {
            (self.asked, self.calls) = (Instant::now(), self.calls + 1);
            failed = self.stream.query().err().map(Error::from);
            reached = self.mark_reached();
        }
        let again = self.kernel.as_mut().and_then(|kernel| kernel.poll(reached, &self.stream));
        if let Some(again) = again.filter(|_| failed.is_none()) {
            // SAFETY: the mark is not reached, so the promise to `copy` still holds, and no other batch was
            // enqueued since.
            let begun = unsafe {
                match again {
                    Again::ByEither => self.enqueue(),
                    Again::ByEngine => self.copy_by_engine(),
                }
            };
            failed = begun.err();
        }
        (reached, failed)
    }

    /// A kernel that waits behind another in its stream delays kernels of other streams that share a hardware
    /// queue. A short batch costs as many driver calls as a long one, so it waits for the copies before it,
    /// and copies that come meanwhile are joined to it.
    fn takes_more(&self, bytes: usize) -> bool {
        let posts = self.kernel.as_ref().is_some_and(ListKernel::posts);
        let waits = !posts && bytes < KERNEL_BYTES_MIN && self.mark_reached() < self.marked;
        self.kernel_takes_more() && !waits
    }

    fn last_reached(&self) -> u64 {
        self.mark_reached()
    }

    /// The stream may be shared, and other copies in it may not end: only the work of this copier counts. While that does
    /// not end, dropping the copier would block.
    fn ends_within(&mut self, timeout: Duration) -> bool {
        self.bar();
        let start = Instant::now();
        self.is_fenced = self.is_fenced || self.stream.record(&self.end).is_ok();
        loop {
            self.calls += 1;
            let ended = if self.is_fenced { self.end.query() } else { self.stream.query() };
            match ended {
                Ok(true) => self.has_ended = true,
                Ok(false) => {}
                // After any other error the copies may still run.
                Err(error) => self.has_ended = error.ends_work(),
            }
            if self.has_ended || start.elapsed() >= timeout {
                return self.has_ended;
            }
            thread::sleep(END_PAUSE);
        }
    }

    fn finish(&mut self) -> bool {
        self.bar();
        // Others may enqueue work in the stream, so it is not asked twice.
        if !self.has_ended {
            let ended = self.stream.finish();
            self.has_ended = ended.is_ok();
            if let Err(error) = ended {
                let gpu = self.stream.gpu().index();
                tracing::error!(%error, "cannot tell whether staging copies of CUDA GPU {gpu} have ended");
            }
        }
        self.has_ended
    }

    fn calls(&self) -> u64 {
        self.calls
    }

    fn pinned_bytes(&self) -> usize {
        self.flag.pinned_bytes() + self.kernel.as_ref().map_or(0, ListKernel::pinned_bytes)
    }
}
