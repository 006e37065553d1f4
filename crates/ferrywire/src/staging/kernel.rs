//! Copies by a GPU's multiprocessors: a list of runs in mapped memory, and one launch for all of them.
//!
//! ```text
//!   CPU   list, launch ── is the memory there? ── opens the gate ────────────── sees the mark
//!   GPU      └ begins, waits at the gate ............ └ copies, writes the mark ┘
//! ```
//!
//! The memory is its owner's, who may free it at any time, and a kernel that touches what is gone takes the whole context
//! with it. To ask before the launch is not enough: it may be freed in between. But `cuMemFree` waits until all that was
//! launched before is done. So a kernel waits at a gate, and it is opened for what is there once the kernel is under way.
//! (`cuMemUnmap` and pools that shrink wait for nobody: who takes memory back that way while it is copied breaks kernels
//! and copy engines alike.) A gate that stays closed for long counts as shut, in case a driver answers nobody meanwhile.
//!
//! Invariant: entries of the list, and the count of blocks that are done, belong to one batch until its mark is
//! reached. Read next: `memory/unpack/kernels.rs`; `memory/unpack/crowd.rs`, when nobody asks multiprocessors.

use crate::error::{Error, Result};
use crate::limits;
use crate::memory::GpuCopy;
use crate::memory::cuda::{CudaGpu, CudaStream, PinnedBuffer};
use crate::memory::unpack::{COUNTERS, CopyGate, CopyList, Counter, Kernels, Leave, PATIENCE};
use std::sync::atomic::Ordering;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

/// Work that is seen to have begun so long after its launch, or sooner, counts as in time: who had other things to do looks
/// late.
const IN_TIME: Duration = Duration::from_micros(250);
/// By how much work may begin later where somebody else's stands in the same stream: some copies of a slot.
const SHARED_PATIENCE: u32 = 30;
/// How long nobody asks multiprocessors after a gate that was not opened in time.
const LONG_REST: Duration = Duration::from_secs(60);

static START: LazyLock<Instant> = LazyLock::new(Instant::now);

fn clock() -> Duration {
    START.elapsed()
}

/// What copies by the kernel need.
pub(super) struct ListKernel {
    kernels: Arc<Kernels>,
    done: Counter,
    /// A gate, and the runs behind it.
    list: PinnedBuffer,
    /// What is under way.
    batch: Option<Batch>,
    /// Into how many blocks a batch is cut.
    blocks: u64,
}

struct Batch {
    mark: u64,
    leave: Leave,
    launched: Duration,
    /// Since when nothing of this copier's stood before it.
    first_since: Option<Duration>,
    /// Whether it has begun, or is late, has been told.
    settled: bool,
}

/// Where the GPU tells how far it is: two words of pinned memory.
pub(super) struct Told<'a>(pub &'a PinnedBuffer);

impl ListKernel {
    pub fn new(gpu: &Arc<CudaGpu>, blocks: u64) -> Result<ListKernel> {
        let (kernels, list) = (Kernels::of(gpu)?, gpu.pinned(limits::STAGING_LIST_BYTES)?);
        let done = kernels.counter().ok_or_else(|| Error::Limit {
            name: "COUNTERS",
            limit: COUNTERS as u64,
            why: "so many channels stage for this GPU that further ones copy run by run: use fewer".into(),
        })?;
        if list.address() != list.as_ptr() as u64 {
            return Err(Error::Bug("the GPU reaches pinned memory at another address than the CPU".into()));
        }
        Ok(ListKernel { kernels, done, list, batch: None, blocks })
    }

    /// Whether so many runs can be copied now.
    pub fn takes(&self, runs: usize) -> bool {
        self.is_idle() && size_of::<CopyGate>() + runs * size_of::<GpuCopy>() <= self.list.len()
    }

    /// Whether nothing is under way, as far as was seen.
    pub fn is_idle(&self) -> bool {
        self.batch.is_none()
    }

    /// Leave to have something copied; none while the multiprocessors have no time, unless there is no other way.
    pub fn leave(&self, needed: bool) -> Option<Leave> {
        self.kernels.crowd.leave(clock()).or(needed.then_some(Leave::NEEDED))
    }

    /// Enqueues the copies and the mark behind them; `there` says afterwards whether the memory is there.
    ///
    /// # Safety
    /// As for [`Copier::copy`](super::copier::Copier::copy) if `there` says so; what tells the end outlives the stream. So
    /// many runs are taken.
    pub unsafe fn copy(
        &mut self,
        stream: &CudaStream,
        copies: &[GpuCopy],
        leave: Leave,
        told: &Told,
        mark: u64,
        there: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        debug_assert!(self.takes(copies.len()));
        // SAFETY: there is room, aligned, which nobody reads until the launch.
        unsafe {
            let gate = self.list.as_ptr().cast::<CopyGate>();
            gate.write(CopyGate { state: 0.into(), begun: 0.into() });
            gate.add(1).cast::<GpuCopy>().copy_from_nonoverlapping(copies.as_ptr(), copies.len());
        }
        let list = CopyList {
            runs: self.list.address() + size_of::<CopyGate>() as u64,
            count: copies.len() as u64,
            longest: copies.iter().map(|copy| copy.bytes as u64).max().unwrap_or(0),
            gate: self.list.address(),
            told: told.0.address(),
            value: mark,
            done: self.done.address(),
            blocks: self.blocks,
        };
        // SAFETY: the entries stay until the mark is reached; the rest by the caller's promise.
        unsafe { self.kernels.copy(stream, list) }?;
        self.batch = Some(Batch { mark, leave, launched: clock(), first_since: None, settled: false });
        let there = there();
        let state = if there.is_ok() { CopyGate::OPEN } else { CopyGate::SHUT };
        self.gate().state.store(state, Ordering::Release);
        there
    }

    fn gate(&self) -> &CopyGate {
        // SAFETY: it is at the beginning of the list, aligned; both sides write its words whole.
        unsafe { &*self.list.as_ptr().cast::<CopyGate>() }
    }

    /// Sees whether what is under way has to wait for others, and forgets it when its mark is reached.
    pub fn look(&mut self, reached: u64, stream: &CudaStream) {
        let Some(Batch { mark, leave, launched, first_since, settled }) = self.batch else { return };
        let (done, crowd, now) = (mark <= reached, &self.kernels.crowd, clock());
        if !settled && mark <= reached + 1 {
            let begun = done || self.gate().begun.load(Ordering::Relaxed) != 0;
            let waited = now.saturating_sub(first_since.unwrap_or(now));
            let late = waited > PATIENCE && (!stream.has_others() || waited > SHARED_PATIENCE * PATIENCE);
            match (begun, late) {
                // When it began is not known.
                (true, _) if now.saturating_sub(launched) > IN_TIME => {}
                (true, _) => crowd.served(leave, now),
                (false, true) => crowd.kept_waiting(leave, now),
                (false, false) => {}
            }
            if let Some(batch) = &mut self.batch {
                batch.settled = begun || late;
                batch.first_since.get_or_insert(now);
            }
        }
        if done {
            self.batch = None;
        }
    }

    /// What was under way has found its gate closed for too long, and has ended without having copied anything of use.
    pub fn give_up(&mut self) {
        tracing::warn!("copies waited for their gate in vain: copy engines do them for a while");
        self.batch = None;
        self.kernels.crowd.avoid(clock(), LONG_REST);
    }
}
