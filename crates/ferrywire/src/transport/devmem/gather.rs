//! The GPU's part in bringing messages from where they landed to where they belong.
//!
//! A message is some fragments of the pool and, where a NIC put bytes elsewhere, some pieces of mapped host memory. Both
//! are runs of one kernel, which reads its lists in mapped memory, or a copy each. What is asked for while launches are
//! under way goes into the next one together.
//!
//! Invariant: a list is unchanged until the launch that reads it is done; sources and target are the caller's until
//! [`Gatherer::poll`] has said so. Dropped, it touches no memory any more.
//! Read next: `receiving.rs`, who asks; `memory/unpack/device.rs`, the GPU's side.

use crate::error::{Error, Result};
use crate::limits::{GATHER_COPIES_PER_LAUNCH_MAX, GATHER_LAUNCHES_MAX};
use crate::memory::GpuCopy;
use crate::memory::cuda::idle;
use crate::memory::unpack::{Fragment, GatherDevice, GatherRun, Mapped, UnpackMode};
use std::collections::VecDeque;
use std::task::Poll;

/// Lists of a lane, and what each has room for: about twice what a message of 512 KiB consists of at an MTU of 1500.
const LISTS: usize = 24;
const FRAGMENTS_PER_LIST: usize = 1024;
const LIST_BYTES: usize = FRAGMENTS_PER_LIST * size_of::<Fragment>();

/// Fragments of one kind of memory.
pub(super) struct Run<'a> {
    /// Device address that they count from.
    pub source: u64,
    pub fragments: &'a [Fragment],
}

/// A message that is being gathered.
struct Job {
    number: u64,
    target: u64,
    /// What the GPU does not have yet.
    copies: VecDeque<GpuCopy>,
    lists: VecDeque<Segment>,
    /// The launch after which all is done.
    launch: u64,
}

/// As many fragments as one list takes.
struct Segment {
    source: u64,
    fragments: Vec<Fragment>,
}

pub(super) struct Gatherer {
    // Dropped first: whatever it still does may touch what follows.
    queue: Box<dyn GatherDevice>,
    mode: UnpackMode,
    memory: Mapped,
    free: Vec<usize>,
    /// Lists that launches read.
    taken: VecDeque<(u64, usize)>,
    jobs: VecDeque<Job>,
    launched: u64,
    reached: u64,
}

impl Gatherer {
    pub fn new(queue: Box<dyn GatherDevice>, mode: UnpackMode) -> Result<Gatherer> {
        let memory = queue.map(LISTS * LIST_BYTES)?;
        Ok(Gatherer {
            queue,
            mode,
            memory,
            free: (0..LISTS).collect(),
            taken: VecDeque::new(),
            jobs: VecDeque::new(),
            launched: 0,
            reached: 0,
        })
    }

    /// Host memory that the GPU reaches.
    pub fn map(&self, bytes: usize) -> Result<Mapped> {
        self.queue.map(bytes)
    }

    /// Launches so far.
    pub fn launches(&self) -> u64 {
        self.launched
    }

    /// Takes over a message: all runs to the target, from which their targets count.
    pub fn begin(&mut self, number: u64, runs: &[Run<'_>], target: u64) {
        let mut job = Job { number, target, copies: VecDeque::new(), lists: VecDeque::new(), launch: 0 };
        // A kernel may have to stand behind a stream that waits for this very transfer.
        let mode = match self.mode {
            UnpackMode::Kernel if idle::streams_wait() => UnpackMode::Copy,
            mode => mode,
        };
        for run in runs {
            match mode {
                UnpackMode::Kernel => job.lists.extend(segments(run)),
                UnpackMode::None => {}
                UnpackMode::Copy | UnpackMode::Host => {
                    job.copies.extend(run.fragments.iter().map(|each| GpuCopy {
                        source: run.source + u64::from(each.source),
                        target: target + each.target,
                        bytes: each.bytes as usize,
                    }))
                }
            }
        }
        self.jobs.push_back(job);
    }

    /// Takes over one copy.
    pub fn begin_copy(&mut self, number: u64, copy: GpuCopy) {
        let (copies, target) = (VecDeque::from([copy]), copy.target);
        self.jobs.push_back(Job { number, target, copies, lists: VecDeque::new(), launch: 0 });
    }

    /// Whether a message that was begun is done. Does not wait, and makes all of them get on.
    pub fn poll(&mut self, number: u64) -> Poll<Result<()>> {
        if let Err(error) = self.turn() {
            return Poll::Ready(Err(error));
        }
        let Some(at) = self.jobs.iter().position(|job| job.number == number) else {
            return Poll::Ready(Err(Error::Bug(format!("message {number} is not being gathered"))));
        };
        let job = &self.jobs[at];
        if !job.handed_over() || job.launch > self.reached {
            return Poll::Pending;
        }
        self.jobs.remove(at);
        Poll::Ready(Ok(()))
    }

    fn turn(&mut self) -> Result<()> {
        self.reached = self.queue.reached()?;
        while let Some((_, list)) = self.taken.pop_front_if(|(launch, _)| *launch <= self.reached) {
            self.free.push(list);
        }
        while self.launched - self.reached < GATHER_LAUNCHES_MAX as u64 && self.launch()? {
            self.launched += 1;
        }
        Ok(())
    }

    /// Hands over what fits; whether that was anything.
    fn launch(&mut self) -> Result<bool> {
        let (mut runs, mut copies, launch) = (Vec::new(), Vec::new(), self.launched + 1);
        for job in self.jobs.iter_mut().filter(|job| !job.handed_over()) {
            while let Some(segment) = job.lists.front()
                && let Some(list) = self.free.pop()
            {
                let at = self.memory.at(list * LIST_BYTES, LIST_BYTES).cast::<Fragment>();
                let count = segment.fragments.len();
                // SAFETY: a list of our own with room for so many, aligned to a page, that no launch reads now.
                unsafe { std::ptr::copy_nonoverlapping(segment.fragments.as_ptr(), at, count) };
                let (source, target) = (segment.source, job.target);
                runs.push(GatherRun { fragments: at as u64, count: count as u64, source, target });
                self.taken.push_back((launch, list));
                job.lists.pop_front();
                job.launch = launch;
            }
            let room = GATHER_COPIES_PER_LAUNCH_MAX - copies.len();
            let now = room.min(job.copies.len());
            if now > 0 {
                copies.extend(job.copies.drain(..now));
                job.launch = launch;
            }
            if !job.handed_over() {
                break;
            }
        }
        if runs.is_empty() && copies.is_empty() {
            return Ok(false);
        }
        if !runs.is_empty() {
            self.queue.gather(&runs)?;
        }
        if !copies.is_empty() {
            self.queue.copy(&copies)?;
        }
        self.queue.mark()?;
        Ok(true)
    }
}

impl Job {
    fn handed_over(&self) -> bool {
        self.lists.is_empty() && self.copies.is_empty()
    }
}

/// Fragments that follow one another in both places as one, cut into lists.
fn segments(run: &Run<'_>) -> Vec<Segment> {
    let mut merged: Vec<Fragment> = Vec::with_capacity(run.fragments.len());
    for next in run.fragments.iter().filter(|fragment| fragment.bytes > 0) {
        match merged.last_mut() {
            Some(last) if follows(last, next) => last.bytes += next.bytes,
            _ => merged.push(*next),
        }
    }
    let cut = merged.chunks(FRAGMENTS_PER_LIST);
    cut.map(|part| Segment { source: run.source, fragments: part.to_vec() }).collect()
}

fn follows(last: &Fragment, next: &Fragment) -> bool {
    last.source.checked_add(last.bytes) == Some(next.source)
        && last.target + u64::from(last.bytes) == next.target
}
