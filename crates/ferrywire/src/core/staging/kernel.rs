//! Copies by a GPU's multiprocessors: lists of runs in mapped memory, and a kernel that takes one after the other.
//!
//! ```text
//!   CPU   launches ── is the memory there? ── posts a list ─────── sees the mark    posts another ─── ..
//!   GPU      └ begins, waits .................... └ copies, writes the mark ┘  waits ... └ copies, .. ┘ waits, ends
//! ```
//!
//! The memory is its owner's, who may free it at any time, and a kernel that touches what is gone takes the whole context
//! with it. To ask before the launch is not enough: it may be freed in between. But `cuMemFree` waits until all that was
//! launched before is done. So a list is posted for what is there once the kernel is under way. (`cuMemUnmap` and pools that
//! shrink wait for nobody: who takes memory back that way while it is copied breaks kernels and copy engines alike.) A kernel
//! does not wait long, in case a driver answers nobody meanwhile.
//!
//! A launch costs this thread 10 to 20 microseconds, and the kernel begins up to a hundred later. So it stays for a while and
//! takes further lists; not for long, since others wait for its end: whoever frees memory, or whose kernels need its place. When
//! it goes while something is posted, it tells whether it has taken that.
//!
//! Invariant: a list and its runs belong to one batch until its mark is reached, or the kernel says that it was not taken.
//! Read next: `unpack/kernels.rs` of `ferrywire-memory`; `sm_backoff.rs` there, when nobody asks multiprocessors.

use crate::error::{Error, Result};
use ferrywire_memory::GpuCopy;
use ferrywire_memory::cuda::{CudaGpu, CudaStream, PinnedBuffer};
use ferrywire_memory::unpack::{COUNTERS, CopyDesk, CopyList, CopyPlaces, Counter, Kernels, Leave, PATIENCE};
use ferrywire_proto::limits;
use std::collections::VecDeque;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

/// Work that is seen to have begun so long after its launch, or sooner, counts as in time: who had other things to do looks
/// late.
const IN_TIME: Duration = Duration::from_micros(250);
/// By how much work may begin later where somebody else's stands in the same stream: some copies of a slot.
const SHARED_PATIENCE: u32 = 30;
/// How long nobody asks multiprocessors after a list that was not posted in time.
const LONG_REST: Duration = Duration::from_secs(60);

/// Bytes of the runs of a list, and of all that CPU and GPU share.
const LIST_BYTES: usize = limits::STAGING_LIST_RUNS * size_of::<GpuCopy>();
const DESK_BYTES: usize = size_of::<CopyDesk>() + LISTS * LIST_BYTES;

static START: LazyLock<Instant> = LazyLock::new(Instant::now);

fn clock() -> Duration {
    START.elapsed()
}

/// How long a kernel stays without anything to do, and after which time it goes as soon as it has nothing to do.
const STAYS: [Duration; 2] = [Duration::from_micros(200), Duration::from_millis(1)];
/// Blocks that a list is cut for, a power of two. Few of them read what lies in cores' caches faster than many do, and leave more
/// to others.
const BLOCKS: u64 = 2;
/// Lists that may be under way: one is copied, and one is there when that is done.
const LISTS: usize = 2;

/// What copies by the kernel need.
pub(super) struct ListKernel {
    kernels: Arc<Kernels>,
    words: Counter,
    /// A desk, and the runs of its lists.
    desk: PinnedBuffer,
    /// The kernel that has been launched, unless it is known to have ended.
    launched: Option<Launched>,
    /// Lists that are under way, oldest first: their numbers, and the marks behind them.
    lists: VecDeque<(u64, u64)>,
    /// Nothing is posted to the kernel that is under way: copies that stand behind it would be overtaken, or it would not see
    /// them as they are.
    barred: bool,
}

struct Launched {
    /// The list that it was launched for.
    first: u64,
    leave: Leave,
    at: Duration,
    /// The mark of what this copier has enqueued before it, and since when that is reached.
    behind: u64,
    first_since: Option<Duration>,
    /// Whether it has begun, or is late, has been told.
    settled: bool,
}

/// Who should copy what a kernel has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Again {
    ByEither,
    ByEngine,
}

impl ListKernel {
    pub fn new(kernels: Arc<Kernels>, gpu: &Arc<CudaGpu>) -> Result<ListKernel> {
        let desk = gpu.pinned(DESK_BYTES)?;
        let words = kernels.counter().ok_or_else(|| Error::Limit {
            name: "COUNTERS",
            limit: COUNTERS as u64,
            why: "so many channels stage for this GPU that further ones copy run by run: use fewer".into(),
        })?;
        if desk.address() != desk.as_ptr() as u64 {
            return Err(Error::Internal(
                "the GPU reaches pinned memory at another address than the CPU".into(),
            ));
        }
        let lists = VecDeque::with_capacity(LISTS);
        Ok(ListKernel { kernels, words, desk, launched: None, lists, barred: false })
    }

    /// Bytes of pinned memory that it has.
    pub fn pinned_bytes(&self) -> usize {
        self.desk.pinned_bytes()
    }

    /// Whether so many runs are a list.
    pub fn fits(&self, runs: usize) -> bool {
        runs <= limits::STAGING_LIST_RUNS
    }

    /// Whether something can be enqueued: to the kernel that stays, or since there is none. To one whose first list is not
    /// copied, which may have to wait for others for long, no other is posted.
    pub fn takes_more(&self) -> bool {
        let Some(launched) = self.launched.as_ref().filter(|_| self.posts()) else { return true };
        let first_is_done = self.lists.front().is_none_or(|(number, _)| *number > launched.first);
        let open = first_is_done && !self.barred && self.lists.len() < LISTS;
        open && self.desk().closed.load(Ordering::Acquire) == 0
    }

    /// Nothing is posted any more to the kernel that is there, which may go at once.
    pub fn bar(&mut self) {
        if self.launched.is_some() && !self.barred && self.lists.len() < LISTS {
            self.post_none();
        }
        self.barred = true;
    }

    fn post_none(&mut self) {
        let number = self.words.next();
        self.desk().post(number, &CopyList::NONE);
        self.words.go_on(number + 1);
    }

    /// Whether what comes next is posted to a kernel that is there already. If that takes it, then memory that is there after
    /// this has been asked is not gone before it is copied.
    pub fn posts(&self) -> bool {
        let gone = self.lists.is_empty() && self.desk().ended.load(Ordering::Acquire) != 0;
        self.launched.is_some() && !gone
    }

    /// Leave to have something copied; none while the multiprocessors have no time, unless there is no other way.
    pub fn leave(&self, needed: bool) -> Option<Leave> {
        self.kernels.crowd.leave(clock()).or(needed.then_some(Leave::NEEDED))
    }

    /// Posts the copies and the mark behind them to the kernel that stays, which may go before it takes them: see
    /// [`ListKernel::look`].
    ///
    /// # Safety
    /// As for [`Copier::copy`](super::copier::Copier::copy). The memory was there after it was seen that this is
    /// [what comes next](ListKernel::posts), and so many runs fit.
    pub unsafe fn post(&mut self, copies: &[GpuCopy], mark: u64) {
        debug_assert!(self.launched.is_some() && self.lists.len() < LISTS);
        let number = self.words.next();
        self.words.go_on(number + 1);
        self.lists.push_back((number, mark));
        // SAFETY: by the caller's promise; of two lists at most one is under way, and not this one.
        unsafe { self.lay_out(number, copies) };
        self.desk().post(number, &CopyList::of(copies, mark, BLOCKS));
        // Either the kernel sees what is posted, or `closed` is seen from now on.
        fence(Ordering::SeqCst);
    }

    /// Launches a kernel for the copies and the mark behind them, to which `told` is set; `there` says afterwards whether the
    /// memory is there.
    ///
    /// # Safety
    /// As for [`Copier::copy`](super::copier::Copier::copy) if `there` says so; what is told outlives the stream. So many runs
    /// fit, and no kernel is under way.
    pub unsafe fn launch(
        &mut self,
        stream: &CudaStream,
        copies: &[GpuCopy],
        leave: Leave,
        told: &PinnedBuffer,
        [behind, mark]: [u64; 2],
        there: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        debug_assert!(self.lists.is_empty() && !self.posts());
        self.forget();
        self.barred = !stream.gpu().kernels_see_news();
        let first = self.words.next();
        self.desk().clear(first);
        let places = CopyPlaces {
            desk: self.desk.address(),
            runs: self.desk.address() + size_of::<CopyDesk>() as u64,
            stride: LIST_BYTES as u64,
            told: told.address(),
            blocks: self.words.address(),
        };
        // Others would stand behind one that stays.
        let stays = if self.barred || stream.has_others() { [Duration::ZERO; 2] } else { STAYS };
        // SAFETY: what is posted stays until its mark is reached; the rest by the caller's promise.
        unsafe { self.kernels.copy(stream, places, first, BLOCKS, stays) }?;
        self.launched =
            Some(Launched { first, leave, at: clock(), behind, first_since: None, settled: false });
        match there() {
            Ok(()) => {
                // SAFETY: by the caller's promise.
                unsafe { self.post(copies, mark) };
                Ok(())
            }
            Err(error) => {
                self.post_none();
                Err(error)
            }
        }
    }

    /// Puts the runs of a list where the GPU reads them.
    ///
    /// # Safety
    /// So many fit, and nobody reads where this list's are.
    unsafe fn lay_out(&mut self, number: u64, copies: &[GpuCopy]) {
        // SAFETY: there is room behind the desk, aligned, that nobody reads, by the caller's promise.
        unsafe {
            let runs = self.desk.as_ptr().cast::<CopyDesk>().add(1).cast::<u8>();
            let runs = runs.add((number % 2) as usize * LIST_BYTES).cast::<GpuCopy>();
            runs.copy_from_nonoverlapping(copies.as_ptr(), copies.len());
        }
    }

    fn desk(&self) -> &CopyDesk {
        // SAFETY: it is at the beginning of the memory, aligned; what both sides see at once they write whole.
        unsafe { &*self.desk.as_ptr().cast::<CopyDesk>() }
    }

    /// Sees how far the lists are. When the kernel has gone without the last of them, that is no longer under way, and this says
    /// who should copy it.
    pub fn look(&mut self, reached: u64, stream: &CudaStream) -> Option<Again> {
        while self.lists.pop_front_if(|(_, mark)| *mark <= reached).is_some() {}
        self.settle(reached, stream);
        let (Some(launched), ended) = (&self.launched, self.desk().ended.load(Ordering::Acquire)) else {
            return None;
        };
        if ended == 0 || self.lists.front().is_some_and(|(number, _)| *number < ended) {
            return None;
        }
        let in_vain = ended == launched.first;
        if in_vain {
            tracing::warn!("a kernel waited for its copies in vain: copy engines do them for a while");
            self.kernels.crowd.avoid(clock(), LONG_REST);
        }
        self.forget();
        debug_assert!(self.lists.len() <= 1, "at most the last was posted too late");
        self.lists.pop_front().map(|_| if in_vain { Again::ByEngine } else { Again::ByEither })
    }

    /// The kernel has gone.
    fn forget(&mut self) {
        if self.launched.take().is_none() {
            return;
        }
        match self.desk().ended.load(Ordering::Acquire) {
            // Its context was lost, and the kernel with it.
            0 => self.words.lose_count(),
            // It has told its blocks that there is no list of that number.
            ended => self.words.go_on(ended + 1),
        }
    }

    /// Sees whether what was launched has to wait for others.
    fn settle(&mut self, reached: u64, stream: &CudaStream) {
        let begun = self.desk().begun.load(Ordering::Relaxed) != 0;
        let first_is_done = |first| self.lists.front().is_none_or(|(number, _)| *number > first);
        let Some(launched) = self.launched.as_ref().filter(|launched| !launched.settled) else { return };
        let (done, crowd, now) = (first_is_done(launched.first), &self.kernels.crowd, clock());
        if reached < launched.behind {
            return;
        }
        let (begun, since) = (begun || done, launched.first_since.unwrap_or(now));
        let waited = now.saturating_sub(since);
        let late = waited > PATIENCE && (!stream.has_others() || waited > SHARED_PATIENCE * PATIENCE);
        match (begun, late) {
            // When it began is not known.
            (true, _) if now.saturating_sub(launched.at) > IN_TIME => {}
            (true, _) => crowd.served(launched.leave, now),
            (false, true) => crowd.kept_waiting(launched.leave, now),
            (false, false) => {}
        }
        if let Some(launched) = &mut self.launched {
            (launched.settled, launched.first_since) = (begun || late, Some(since));
        }
    }
}

impl Drop for ListKernel {
    /// When all of the stream's work is done.
    fn drop(&mut self) {
        self.forget();
    }
}
