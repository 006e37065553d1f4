//! Copies by a GPU's multiprocessors: lists of runs in mapped memory, and a kernel that takes one after the
//! other.
//!
//! ```text
//!   CPU   launches ── is the memory there? ── posts a list ─────── sees the mark    posts another ─── ..
//!   GPU      └ begins, waits .................... └ copies, writes the mark ┘  waits ... └ copies, .. ┘ waits, ends
//! ```
//!
//! The owner of the memory may free it at any time, and a kernel that touches freed memory destroys the whole
//! context. A check before the launch is not enough: the memory may be freed in between. But `cuMemFree`
//! waits until all earlier launches are done. So the memory is checked once the kernel is launched, and then
//! the list is posted. (`cuMemUnmap` and shrinking pools do not wait: a user who frees memory that way during
//! a copy breaks kernels and copy engines alike.) A kernel waits for a short time only, in case the driver
//! blocks the check meanwhile.
//!
//! A launch costs this thread 10 to 20 microseconds, and the kernel begins up to 100 microseconds later. So
//! the kernel stays for a while and takes further lists. It does not stay long, since a thread that frees
//! memory, and other kernels, wait for its end. If it ends while a list is posted, it reports whether it has
//! taken the list.
//!
//! Invariant: a list and its runs belong to one batch until its mark is reached, or the kernel reports that
//! it was not taken.
//! Read next: `unpack/kernels.rs` of `ferrywire-memory`; `sm_backoff.rs` there, when multiprocessors are
//! avoided.

use crate::error::{Error, Result};
use ferrywire_memory::GpuCopy;
use ferrywire_memory::cuda::{CudaGpu, CudaStream, PinnedBuffer};
use ferrywire_memory::unpack::{
    COUNTERS, CopyAddresses, CopyList, CopyMailbox, Counter, Kernels, LAUNCH_WAIT, Permit,
};
use ferrywire_proto::limits;
use std::collections::VecDeque;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

/// Longest time from launch to observed beginning that counts as in time. A thread with other work may
/// observe it late.
const IN_TIME: Duration = Duration::from_micros(250);
/// Factor on [`LAUNCH_WAIT`] for a stream that is shared with other work: the time of some copies of a slot.
const SHARED_LAUNCH_WAIT: u32 = 30;
/// How long multiprocessors are avoided after a list that was not posted in time.
const LONG_REST: Duration = Duration::from_secs(60);

/// Bytes of the runs of a list, and of the memory that CPU and GPU share.
const LIST_BYTES: usize = limits::STAGING_LIST_RUNS * size_of::<GpuCopy>();
const MAILBOX_BYTES: usize = size_of::<CopyMailbox>() + LISTS * LIST_BYTES;

static START: LazyLock<Instant> = LazyLock::new(Instant::now);

fn clock() -> Duration {
    START.elapsed()
}

/// How long a kernel stays idle, and the age after which it ends as soon as it is idle.
const STAYS: [Duration; 2] = [Duration::from_micros(200), Duration::from_millis(1)];
/// Number of blocks that a list is cut for, a power of two. Few blocks read what lies in the cores' caches
/// faster than many do, and permit multiprocessors to other kernels.
const BLOCKS: u64 = 2;
/// Most lists in flight: one being copied, and one ready behind it.
const LISTS: usize = 2;

/// The lists in flight on one copier's kernel, and the state of that kernel.
pub(super) struct ListKernel {
    kernels: Arc<Kernels>,
    words: Counter,
    /// The shared memory: a mailbox, and the runs of its lists.
    mailbox: PinnedBuffer,
    /// The launched kernel, unless it is known to have ended.
    launched: Option<Launched>,
    /// Lists in flight, oldest first: their numbers, and the marks behind them.
    lists: VecDeque<(u64, u64)>,
    /// Whether posting to the running kernel is barred: the list would overtake copies that are behind the
    /// kernel, or the kernel would not see it correctly.
    barred: bool,
}

struct Launched {
    /// The list for which the kernel was launched.
    first: u64,
    permit: Permit,
    at: Duration,
    /// The last mark before the kernel in this copier, and when it was seen to be reached.
    behind: u64,
    first_since: Option<Duration>,
    /// Whether the beginning, or the delay, of the kernel was reported.
    settled: bool,
}

/// How to repeat copies that a kernel has not made before it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Again {
    ByEither,
    ByEngine,
}

impl ListKernel {
    pub fn new(kernels: Arc<Kernels>, gpu: &Arc<CudaGpu>) -> Result<ListKernel> {
        let mailbox = gpu.pinned(MAILBOX_BYTES)?;
        let words = kernels.counter().ok_or_else(|| Error::Limit {
            name: "COUNTERS",
            limit: COUNTERS as u64,
            why: "too many channels stage for this GPU, so further channels copy piece by piece: use fewer channels".into(),
        })?;
        if mailbox.address() != mailbox.as_ptr() as u64 {
            return Err(Error::Internal(
                "the GPU reaches pinned memory at another address than the CPU".into(),
            ));
        }
        let lists = VecDeque::with_capacity(LISTS);
        Ok(ListKernel { kernels, words, mailbox, launched: None, lists, barred: false })
    }

    /// Prevents reuse of the memory that the GPU may still read.
    pub fn prevent_reuse(&mut self) {
        self.mailbox.prevent_reuse();
    }

    /// Bytes of pinned memory in use.
    pub fn pinned_bytes(&self) -> usize {
        self.mailbox.pinned_bytes()
    }

    /// Whether this number of runs fits into a list.
    pub fn fits(&self, runs: usize) -> bool {
        runs <= limits::STAGING_LIST_RUNS
    }

    /// Whether a batch can be enqueued: there is no kernel, or the one that stays takes another list. A
    /// kernel whose first list is not copied yet takes no other list: it may have to wait long.
    pub fn takes_more(&self) -> bool {
        let Some(launched) = self.launched.as_ref().filter(|_| self.posts()) else { return true };
        let first_is_done = self.lists.front().is_none_or(|(number, _)| *number > launched.first);
        let open = first_is_done && !self.barred && self.lists.len() < LISTS;
        open && self.mailbox().closed.load(Ordering::Acquire) == 0
    }

    /// Ends posting to the running kernel, which may end at once.
    pub fn bar(&mut self) {
        if self.launched.is_some() && !self.barred && self.lists.len() < LISTS {
            self.post_none();
        }
        self.barred = true;
    }

    fn post_none(&mut self) {
        let number = self.words.next();
        self.mailbox().post(number, &CopyList::NONE);
        self.words.go_on(number + 1);
    }

    /// Whether the next batch would be posted to a running kernel. If the kernel takes it, memory that is
    /// checked after this call is not freed before it is copied.
    pub fn posts(&self) -> bool {
        let gone = self.lists.is_empty() && self.mailbox().ended.load(Ordering::Acquire) != 0;
        self.launched.is_some() && !gone
    }

    /// Permission to use the multiprocessors. `None` while they are busy, unless `needed`.
    pub fn permit(&self, needed: bool) -> Option<Permit> {
        self.kernels.sm_backoff.permit(clock()).or(needed.then_some(Permit::NEEDED))
    }

    /// Posts copies and the mark behind them to the kernel that stays. The kernel may end before it takes
    /// them; see [`ListKernel::poll`].
    ///
    /// # Safety
    /// As for [`Copier::copy`](super::copier::Copier::copy). The memory was checked after
    /// [`posts`](ListKernel::posts) returned true, and the runs fit.
    pub unsafe fn post(&mut self, copies: &[GpuCopy], mark: u64) {
        debug_assert!(self.launched.is_some() && self.lists.len() < LISTS);
        let number = self.words.next();
        self.words.go_on(number + 1);
        self.lists.push_back((number, mark));
        // SAFETY: promised by the caller; of the two lists at most one is in flight, and not this one.
        unsafe { self.lay_out(number, copies) };
        self.mailbox().post(number, &CopyList::of(copies, mark, BLOCKS));
        // Either the kernel sees the list, or this thread sees `closed` from now on.
        fence(Ordering::SeqCst);
    }

    /// Launches a kernel for the copies and the mark behind them, which the GPU writes to `flag`. `there`
    /// checks the memory after the launch.
    ///
    /// # Errors
    /// The error of the launch or of `there`.
    ///
    /// # Safety
    /// As for [`Copier::copy`](super::copier::Copier::copy) if `there` succeeds. `flag` outlives the stream.
    /// The runs fit, and no kernel is running.
    pub unsafe fn launch(
        &mut self,
        stream: &CudaStream,
        copies: &[GpuCopy],
        permit: Permit,
        flag: &PinnedBuffer,
        [behind, mark]: [u64; 2],
        there: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        debug_assert!(self.lists.is_empty() && !self.posts());
        self.forget();
        self.barred = !stream.gpu().kernels_see_news();
        let first = self.words.next();
        self.mailbox().clear(first);
        let addresses = CopyAddresses {
            mailbox: self.mailbox.address(),
            runs: self.mailbox.address() + size_of::<CopyMailbox>() as u64,
            stride: LIST_BYTES as u64,
            completion: flag.address(),
            blocks: self.words.address(),
        };
        // Other work in the stream would wait behind a kernel that stays.
        let stays = if self.barred || stream.has_others() { [Duration::ZERO; 2] } else { STAYS };
        // SAFETY: a posted list stays until its mark is reached; the other conditions are promised by the
        // caller.
        unsafe { self.kernels.copy(stream, addresses, first, BLOCKS, stays) }?;
        self.launched =
            Some(Launched { first, permit, at: clock(), behind, first_since: None, settled: false });
        match there() {
            Ok(()) => {
                // SAFETY: promised by the caller of this function.
                unsafe { self.post(copies, mark) };
                Ok(())
            }
            Err(error) => {
                self.post_none();
                Err(error)
            }
        }
    }

    /// Writes the runs of a list to the memory that the GPU reads.
    ///
    /// # Safety
    /// The runs fit, and the GPU does not read this list's memory.
    unsafe fn lay_out(&mut self, number: u64, copies: &[GpuCopy]) {
        // SAFETY: the caller promises that the GPU does not read this memory; it is aligned, and lies behind
        // the mailbox.
        unsafe {
            let runs = self.mailbox.as_ptr().cast::<CopyMailbox>().add(1).cast::<u8>();
            let runs = runs.add((number % 2) as usize * LIST_BYTES).cast::<GpuCopy>();
            runs.copy_from_nonoverlapping(copies.as_ptr(), copies.len());
        }
    }

    fn mailbox(&self) -> &CopyMailbox {
        // SAFETY: the mailbox is at the beginning of the memory, aligned; shared words are written whole by both
        // sides.
        unsafe { &*self.mailbox.as_ptr().cast::<CopyMailbox>() }
    }

    /// Notes the progress of the lists. If the kernel has ended without the last one, that list is dropped,
    /// and the result says how to repeat its copies.
    pub fn poll(&mut self, reached: u64, stream: &CudaStream) -> Option<Again> {
        while self.lists.pop_front_if(|(_, mark)| *mark <= reached).is_some() {}
        self.settle(reached, stream);
        let (Some(launched), ended) = (&self.launched, self.mailbox().ended.load(Ordering::Acquire)) else {
            return None;
        };
        if ended == 0 || self.lists.front().is_some_and(|(number, _)| *number < ended) {
            return None;
        }
        let in_vain = ended == launched.first;
        if in_vain {
            tracing::warn!(
                "copy kernel for GPU staging did not start in time: copy engines copy for a while"
            );
            self.kernels.sm_backoff.avoid(clock(), LONG_REST);
        }
        self.forget();
        debug_assert!(self.lists.len() <= 1, "at most the last was posted too late");
        self.lists.pop_front().map(|_| if in_vain { Again::ByEngine } else { Again::ByEither })
    }

    /// Notes that the kernel has ended.
    fn forget(&mut self) {
        if self.launched.take().is_none() {
            return;
        }
        match self.mailbox().ended.load(Ordering::Acquire) {
            // The context was lost, and the kernel with it.
            0 => self.words.lose_count(),
            // Block 0 has passed the end on to the other blocks under that number.
            ended => self.words.go_on(ended + 1),
        }
    }

    /// Notes whether the launched kernel has to wait for other work on the GPU.
    fn settle(&mut self, reached: u64, stream: &CudaStream) {
        let begun = self.mailbox().begun.load(Ordering::Relaxed) != 0;
        let first_is_done = |first| self.lists.front().is_none_or(|(number, _)| *number > first);
        let Some(launched) = self.launched.as_ref().filter(|launched| !launched.settled) else { return };
        let (done, sm_backoff, now) = (first_is_done(launched.first), &self.kernels.sm_backoff, clock());
        if reached < launched.behind {
            return;
        }
        let (begun, since) = (begun || done, launched.first_since.unwrap_or(now));
        let waited = now.saturating_sub(since);
        let late =
            waited > LAUNCH_WAIT && (!stream.has_others() || waited > SHARED_LAUNCH_WAIT * LAUNCH_WAIT);
        match (begun, late) {
            // The start time of the kernel is not known.
            (true, _) if now.saturating_sub(launched.at) > IN_TIME => {}
            (true, _) => sm_backoff.served(launched.permit, now),
            (false, true) => sm_backoff.kept_waiting(launched.permit, now),
            (false, false) => {}
        }
        if let Some(launched) = &mut self.launched {
            (launched.settled, launched.first_since) = (begun || late, Some(since));
        }
    }
}

impl Drop for ListKernel {
    /// Called when all work of the stream is done.
    fn drop(&mut self) {
        self.forget();
    }
}
