//! The GPU's part in moving received messages from where they landed to their destination.
//!
//! A message consists of fragments of the pool and, where a NIC put bytes elsewhere, pieces of mapped host memory. Each
//! kind is a run of one kernel, which reads its lists in mapped memory, or a number of copies. Requests that arrive
//! while launches are in flight go into the next launch together.
//!
//! Invariant: a list is unchanged until the launch that reads it is done; sources and target belong to the gatherer
//! until [`Gatherer::poll`] reports the message. A dropped gatherer touches no memory any more.
//! Read next: `receiving.rs`, the caller; `unpack/device.rs` of `ferrywire-memory`, the GPU's side.

use ferrywire::{Error, Result};
use ferrywire_memory::GpuCopy;
use ferrywire_memory::unpack::{Fragment, GatherDevice, GatherRun, Mapped, UnpackMode, check_allocated};
use ferrywire_proto::limits::{GATHER_COPIES_PER_LAUNCH_MAX, GATHER_LAUNCHES_MAX};
use std::collections::VecDeque;
use std::task::Poll;

/// Number of a lane's lists, and entries of each list: about twice the fragments of a message of 512 KiB at an MTU
/// of 1500.
const LISTS: usize = 24;
const FRAGMENTS_PER_LIST: usize = 1024;
const LIST_BYTES: usize = FRAGMENTS_PER_LIST * size_of::<Fragment>();

/// The fragments of a message in one kind of memory.
pub(super) struct Run<'a> {
    /// Device address to which the fragments' sources are relative.
    pub source: u64,
    pub fragments: &'a [Fragment],
}

/// A message that is being gathered.
struct Job {
    number: u64,
    target: u64,
    /// Addresses and lengths that may be a user's memory: the target, and for a single copy its source.
    used: [(u64, u64); 2],
    /// Copies of the message that were not launched on the GPU yet.
    copies: VecDeque<GpuCopy>,
    lists: VecDeque<Segment>,
    /// Number of the launch after which the message is complete.
    launch: u64,
    /// The error, if memory of the message was freed.
    failed: Option<Error>,
}

/// Part of a run: as many fragments as one list holds.
struct Segment {
    source: u64,
    fragments: Vec<Fragment>,
}

pub(super) struct Gatherer {
    // Dropped first: the GPU's pending work may touch the fields that follow.
    queue: Box<dyn GatherDevice>,
    mode: UnpackMode,
    memory: Mapped,
    free: Vec<usize>,
    /// Lists that pending launches read, each with the number of its launch.
    taken: VecDeque<(u64, usize)>,
    jobs: VecDeque<Job>,
    launched: u64,
    reached: u64,
}

impl Gatherer {
    pub fn new(queue: Box<dyn GatherDevice>, mode: UnpackMode) -> Result<Gatherer> {
        if mode == UnpackMode::Kernel {
            queue.check_kernel()?;
        }
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

    /// Allocates host memory that is mapped for the GPU.
    pub fn map(&self, bytes: usize) -> Result<Mapped> {
        Ok(self.queue.map(bytes)?)
    }

    /// Number of launches so far.
    pub fn launches(&self) -> u64 {
        self.launched
    }

    /// Begins to gather a message: all runs to `target`, to which their targets are relative.
    pub fn begin(&mut self, number: u64, runs: &[Run<'_>], target: u64) {
        let all = runs.iter().flat_map(|run| run.fragments);
        let bytes = all.map(|each| each.target + u64::from(each.bytes)).max().unwrap_or(0);
        let (lists, launch, failed) = Default::default();
        let used = [(target, bytes), (0, 0)];
        let mut job = Job { number, target, used, copies: VecDeque::new(), lists, launch, failed };
        for run in runs {
            match self.mode {
                UnpackMode::Kernel => job.lists.extend(segments(run)),
                UnpackMode::None => {}
                UnpackMode::Copy | UnpackMode::Host => {
                    job.copies.extend(copies(run.source, run.fragments, target))
                }
            }
        }
        self.jobs.push_back(job);
    }

    /// Begins to gather a message by a single copy.
    pub fn begin_copy(&mut self, number: u64, copy: GpuCopy) {
        let GpuCopy { source, target, bytes } = copy;
        let used = [(target, bytes as u64), (source, bytes as u64)];
        let copies = VecDeque::from([copy]);
        let (lists, launch, failed) = Default::default();
        self.jobs.push_back(Job { number, target, used, copies, lists, launch, failed });
    }

    /// Whether a message is gathered. Does not wait; makes progress on all messages.
    pub fn poll(&mut self, number: u64) -> Poll<Result<()>> {
        let turned = self.turn();
        let Some(at) = self.jobs.iter().position(|job| job.number == number) else {
            return Poll::Ready(Err(Error::Internal(format!("message {number} has no gather in progress"))));
        };
        // A message that was done before a failure of others is done.
        let job = &self.jobs[at];
        if !job.handed_over() || job.launch > self.reached {
            return turned.map_or_else(|error| Poll::Ready(Err(error)), |()| Poll::Pending);
        }
        let failed = self.jobs.remove(at).and_then(|job| job.failed);
        Poll::Ready(failed.map_or(Ok(()), Err))
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

    /// Launches work on the GPU; returns whether there was any.
    fn launch(&mut self) -> Result<bool> {
        // The launch is announced here, because the work may have waited for long: a kernel may have to queue
        // behind a stream that waits for the very transfer that is gathered.
        let launching = self.queue.launching();
        if launching.is_none() {
            self.jobs.iter_mut().for_each(Job::do_without_kernel);
        }
        // Copies are also checked for freed memory, as the kernel's runs are.
        for job in self.jobs.iter_mut().filter(|job| !job.handed_over()) {
            if let Err(error) = check_allocated(&*self.queue, job.used) {
                (job.lists, job.copies, job.failed) = (VecDeque::new(), VecDeque::new(), Some(error.into()));
            }
        }
        let (runs, copies) = self.next();
        if runs.is_empty() && copies.is_empty() {
            return Ok(false);
        }
        if !runs.is_empty() {
            self.queue.gather(&runs)?;
        }
        drop(launching);
        if !copies.is_empty() {
            self.queue.copy(&copies)?;
        }
        self.queue.mark()?;
        Ok(true)
    }

    /// The work of the next launch: as many runs as there are free lists, and as many copies as one launch takes.
    fn next(&mut self) -> (Vec<GatherRun>, Vec<GpuCopy>) {
        let (mut runs, mut copies, launch) = (Vec::new(), Vec::new(), self.launched + 1);
        for job in self.jobs.iter_mut().filter(|job| !job.handed_over()) {
            while let Some(segment) = job.lists.front()
                && let Some(list) = self.free.pop()
            {
                let at = self.memory.at(list * LIST_BYTES, LIST_BYTES).cast::<Fragment>();
                let count = segment.fragments.len();
                // SAFETY: the list belongs to this gatherer, has room for `count` entries and is page-aligned, and
                // no launch reads it now.
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
        (runs, copies)
    }
}

impl Job {
    /// Replaces the lists that were not launched on the GPU yet by copies.
    fn do_without_kernel(&mut self) {
        for Segment { source, fragments } in self.lists.drain(..) {
            self.copies.extend(copies(source, &fragments, self.target));
        }
    }

    fn handed_over(&self) -> bool {
        self.lists.is_empty() && self.copies.is_empty()
    }
}

fn copies(source: u64, fragments: &[Fragment], target: u64) -> impl Iterator<Item = GpuCopy> {
    fragments.iter().map(move |each| GpuCopy {
        source: source + u64::from(each.source),
        target: target + each.target,
        bytes: each.bytes as usize,
    })
}

/// Merges fragments that are adjacent in both places, and cuts the result into lists.
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

#[cfg(test)]
mod tests {
    use super::*;
    use ferrywire_memory::cuda::CudaError;
    use ferrywire_memory::unpack::recorder::{Recorder, Seen, Waiting, one_at_a_time};
    use std::sync::{Arc, Mutex};

    /// Regression: the requested copy was refused although its memory was valid.
    #[test]
    fn a_message_whose_memory_is_gone_fails_alone() {
        let _alone = one_at_a_time();
        let seen = Arc::new(Mutex::new(Seen { memory: Some(5000..6000), ..Seen::default() }));
        let mut gatherer = Gatherer::new(Box::new(Recorder(seen.clone())), UnpackMode::Kernel).unwrap();
        let fragments = [Fragment { source: 10, bytes: 4, target: 0 }];
        let run = || [Run { source: 1000, fragments: &fragments }];
        gatherer.begin(0, &run(), 5000);
        assert!(gatherer.poll(0).is_pending());
        seen.lock().unwrap().reached = 1;
        gatherer.begin(1, &run(), 7000);
        gatherer.begin(2, &run(), 5996);
        assert!(matches!(gatherer.poll(0), Poll::Ready(Ok(()))));
        let freed = CudaError::Freed { address: 7000, bytes: 4 };
        assert_eq!(gatherer.poll(1), Poll::Ready(Err(Error::Cuda(freed))));
        assert!(gatherer.poll(2).is_pending());
        assert_eq!(seen.lock().unwrap().kernels, 2, "one for each of the others");
        seen.lock().unwrap().reached = 2;
        assert!(matches!(gatherer.poll(2), Poll::Ready(Ok(()))));
    }

    #[test]
    fn nothing_is_copied_without_a_kernel_either_where_memory_is_gone() {
        let _alone = one_at_a_time();
        let _waiting = Waiting::new();
        for mode in [UnpackMode::Kernel, UnpackMode::Copy] {
            let seen = Arc::new(Mutex::new(Seen { memory: Some(5000..6000), ..Seen::default() }));
            let mut gatherer = Gatherer::new(Box::new(Recorder(seen.clone())), mode).unwrap();
            let fragments = [Fragment { source: 10, bytes: 4, target: 0 }];
            let copy = |source, target| GpuCopy { source, target, bytes: 4 };
            gatherer.begin(0, &[Run { source: 5000, fragments: &fragments }], 7000);
            gatherer.begin_copy(1, copy(5010, 7000));
            gatherer.begin_copy(2, copy(7000, 5010));
            gatherer.begin_copy(3, copy(5010, 5500));
            let freed = CudaError::Freed { address: 7000, bytes: 4 };
            for gone in 0..3 {
                assert_eq!(gatherer.poll(gone), Poll::Ready(Err(Error::Cuda(freed.clone()))), "{gone}");
            }
            assert!(gatherer.poll(3).is_pending());
            assert_eq!(seen.lock().unwrap().copies, [copy(5010, 5500)]);
        }
    }

    #[test]
    fn a_gather_launched_after_a_stream_waits_uses_no_kernel() {
        let _alone = one_at_a_time();
        let seen = Arc::new(Mutex::new(Seen::default()));
        let mut gatherer = Gatherer::new(Box::new(Recorder(seen.clone())), UnpackMode::Kernel).unwrap();
        let fragments =
            [(10, 4, 0), (30, 2, 4)].map(|(source, bytes, target)| Fragment { source, bytes, target });
        let late = GATHER_LAUNCHES_MAX as u64;
        for number in 0..=late {
            gatherer.begin(number, &[Run { source: 1000, fragments: &fragments }], 5000);
            assert!(gatherer.poll(number).is_pending());
        }
        assert_eq!(gatherer.launches(), late, "the last has to wait for a launch");

        let _waiting = Waiting::new();
        let kernels = {
            let mut seen = seen.lock().unwrap();
            seen.copies.clear();
            seen.reached = late;
            seen.kernels
        };
        assert!(gatherer.poll(late).is_pending());
        {
            let mut seen = seen.lock().unwrap();
            let copy = |source, target, bytes| GpuCopy { source, target, bytes };
            assert_eq!(seen.kernels, kernels, "no kernel stands behind the stream");
            assert_eq!(seen.copies, [copy(1010, 5000, 4), copy(1030, 5004, 2)]);
            seen.reached = late + 1;
        }
        assert!(matches!(gatherer.poll(late), Poll::Ready(Ok(()))));
    }
}
