//! Requests that make every worker release some memory.
//!
//! Invariant: once all workers have answered, no channel places bytes into the memory.
//! Read next: `release.rs`, a worker's answer.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::{Command, Pass, SPIN, Workers};
use crate::core::channel::Unreleased;
use crate::core::operation::Op;
use crate::core::peer::Landing;
use crate::error::{Error, Result};
use ferrywire_memory::{Memory, MemoryLocation};
use ferrywire_proto::limits;
use ferrywire_proto::stall_timer::StallTimer;

/// How long after its request a thread that waits for answers spins while GPUs copy. Most copies end sooner; those of
/// a stalled GPU may take seconds.
const COPIES_SPIN: Duration = Duration::from_millis(1);
/// Pause of a thread that waits for answers, after a short spin. Spinning with yields takes so much of a
/// small or overloaded host that the worker is kept from answering, for seconds.
const PAUSE: Duration = Duration::from_micros(100);

/// A request to all workers to release some memory, and which workers have answered.
pub(crate) struct Abandon {
    pub(super) gone: Box<dyn Fn(&Landing) -> bool + Send + Sync>,
    /// Whether a worker ends a channel that cannot release the memory otherwise. Set when the user reuses the
    /// memory in any case.
    pub(super) force: bool,
    /// Whether to wait also until nothing is sent from the memory, including over closed connections.
    pub(super) sources: bool,
    pub(super) answered: Box<[AtomicBool]>,
    /// For each worker, the GPU whose copies it waits for; `None` if it also waits for something else.
    gpus: Box<[Mutex<Option<MemoryLocation>>]>,
}

/// Lane and connection of a lost channel, which may still read memory.
pub(super) struct Closed {
    pub(super) unreleased: Unreleased,
    /// Operations with frames that the peer has not acknowledged.
    pub(super) ops: Vec<Arc<Op>>,
    pub(super) since: Duration,
}

/// A request that is not answered yet.
pub(super) struct Abandoning {
    pub(super) request: Arc<Abandon>,
    pub(super) since: Duration,
    /// Whether the request waits only for GPU copies.
    pub(super) by_gpu: bool,
}

impl Abandon {
    fn new(
        workers: &Workers,
        force: bool,
        sources: bool,
        gone: impl Fn(&Landing) -> bool + Send + Sync + 'static,
    ) -> Arc<Abandon> {
        let answered = workers.iter().map(|_| AtomicBool::new(false)).collect();
        let gpus = workers.iter().map(|_| Mutex::default()).collect();
        Arc::new(Abandon { gone: Box::new(gone), force, sources, answered, gpus })
    }

    fn has_answered(&self, worker: usize) -> bool {
        self.answered[worker].load(Ordering::Acquire)
    }

    /// Index of the first worker that has not answered.
    fn missing(&self) -> Option<usize> {
        self.answered.iter().position(|answered| !answered.load(Ordering::Acquire))
    }

    /// Notes the GPU whose copies `worker` waits for, or `None`.
    pub(super) fn note_gpu(&self, worker: usize, gpu: Option<MemoryLocation>) {
        *self.gpus[worker].lock().unwrap_or_else(PoisonError::into_inner) = gpu;
    }

    fn gpu(&self, worker: usize) -> Option<MemoryLocation> {
        *self.gpus[worker].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether all workers have answered.
    pub fn is_answered(&self) -> bool {
        self.missing().is_none()
    }
}

/// Detects a worker that has not answered and makes no progress. A worker that progresses is waited for:
/// before it answers it may have megabytes to place, on a busy host.
struct Standstill {
    stall_timer: StallTimer,
    /// The worker that was checked last, and its step count then.
    seen: Option<(usize, u64)>,
}

impl Standstill {
    fn new() -> Standstill {
        Standstill { stall_timer: StallTimer::new(limits::ABANDON_TIMEOUT), seen: None }
    }

    /// Whether the worker has made no progress for `ABANDON_TIMEOUT`. Call often.
    fn is_over(&mut self, worker: usize, steps: u64, now: Duration) -> bool {
        if self.seen.replace((worker, steps)) != Some((worker, steps)) {
            self.stall_timer = StallTimer::new(limits::ABANDON_TIMEOUT);
        }
        self.stall_timer.is_over(now)
    }
}

/// Makes every worker stop placing bytes where `gone` returns true. Returns when all have stopped.
///
/// # Errors
/// [`Error::ResourceBusy`] about `what` when a worker that has not answered makes no progress for
/// `limits::ABANDON_TIMEOUT`, or is stuck in a plugin call that does not return. Without `force` also when a
/// GPU has not finished its copies within `limits::GPU_ABANDON_TIMEOUT`.
pub(crate) fn abandon(
    workers: &Workers,
    what: impl FnOnce() -> String,
    force: bool,
    gone: impl Fn(&Landing) -> bool + Send + Sync + 'static,
) -> Result<()> {
    answer(workers, &Abandon::new(workers, force, false, gone), what)
}

/// Queues the request at every worker and waits for all answers. This thread polls each worker that no other
/// thread polls, which needs no wake-up; only the threads of the other workers are woken. A woken thread
/// polls for a while before it sleeps again. The next request, such as that of the next cancelled read, would
/// have to wait for that thread, and thus for a time slice of each thread on its core.
fn answer(workers: &Workers, request: &Arc<Abandon>, what: impl FnOnce() -> String) -> Result<()> {
    for worker in workers.iter() {
        worker.commands.push(Command::Abandon(request.clone()));
    }
    for worker in workers.iter() {
        if !request.has_answered(worker.index) {
            worker.poll_once(&workers.context);
        }
        if !request.has_answered(worker.index) {
            worker.sleeper().rouse();
        }
    }
    wait_for(workers, request, what)
}

/// Waits until every worker has answered.
fn wait_for(workers: &Workers, request: &Abandon, what: impl FnOnce() -> String) -> Result<()> {
    let force = request.force;
    let mut standstill = Standstill::new();
    let start = Instant::now();
    // A worker answers at its next pass, or when its lanes are done. Without an owner this thread polls it.
    while let Some(missing) = request.missing() {
        let (stuck, steps) = (workers[missing].stuck(), workers[missing].steps());
        if stuck || standstill.is_over(missing, steps, start.elapsed()) {
            let why = if stuck { ", in a call of a plugin that has not returned" } else { "" };
            let (what, by) = (what(), format!("progress thread {missing}{why}"));
            return Err(Error::ResourceBusy { what, by, waited: standstill.stall_timer.waited() });
        }
        let late = !force && start.elapsed() >= limits::GPU_ABANDON_TIMEOUT;
        if let Some(location) = request.gpu(missing).filter(|_| late) {
            let by = format!("copies to {location}, which is stalled or slow");
            return Err(Error::ResourceBusy { what: what(), by, waited: start.elapsed() });
        }
        let limit = match workers.poll_once() {
            Pass::Worked => Duration::MAX,
            Pass::Copies => COPIES_SPIN,
            Pass::Idle => SPIN,
        };
        if start.elapsed() < limit { thread::yield_now() } else { thread::sleep(PAUSE) }
    }
    Ok(())
}

/// Asks every worker to place nothing more into a region that peers address by its key. Local operations on
/// the region continue. The caller polls [`Abandon::is_answered`].
pub(crate) fn ask_for_region(workers: &Workers, memory: &Arc<Memory>) -> Arc<Abandon> {
    let memory = memory.clone();
    let request =
        Abandon::new(workers, false, true, move |landing| !landing.once() && landing.is_in(&memory));
    workers.iter().for_each(|worker| worker.command(Command::Abandon(request.clone())));
    request
}

/// Makes every worker release `memory`.
///
/// # Errors
/// As for [`abandon`].
pub(crate) fn abandon_memory(workers: &Workers, memory: &Arc<Memory>, force: bool) -> Result<()> {
    let (what, memory) = (memory.describe(), memory.clone());
    let request = Abandon::new(workers, force, true, move |landing| landing.is_in(&memory));
    answer(workers, &request, || what)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::sleeper::Activity;

    const LOOK: Duration = Duration::from_millis(50);

    /// Polls until the standstill is over. Returns that time, or `None` if it never is.
    fn given_up_at(mut seen: impl FnMut(Duration) -> (usize, u64)) -> Option<Duration> {
        let mut standstill = Standstill::new();
        (0..20_000).map(|look| look * LOOK).find(|now| {
            let (worker, steps) = seen(*now);
            standstill.is_over(worker, steps, *now)
        })
    }

    #[test]
    fn a_slow_worker_is_waited_for() {
        assert_eq!(
            given_up_at(|now| (1, now.as_secs() / 4)),
            None,
            "a worker with a step every four seconds is waited for"
        );
    }

    #[test]
    fn a_stalled_worker_is_not_waited_for() {
        assert_eq!(given_up_at(|_| (1, 7)), Some(limits::ABANDON_TIMEOUT));
        let since = Duration::from_secs(60);
        let gave_up = given_up_at(|now| (1, now.min(since).as_secs()));
        assert_eq!(gave_up, Some(since + limits::ABANDON_TIMEOUT), "after the last step");
        // Worker 0 answers after four seconds; from then on worker 1 is waited for.
        let answered = Duration::from_secs(4);
        let gave_up = given_up_at(|now| (usize::from(now >= answered), 7));
        assert_eq!(gave_up, Some(answered + limits::ABANDON_TIMEOUT));
    }

    /// Number of times that a thread has gone to sleep.
    fn sleeps(thread: i32) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/self/task/{thread}/status")).unwrap();
        let count = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        count.unwrap().trim().parse().unwrap()
    }

    /// Regression: each request woke every thread. On a busy host each thread then had to run before a read
    /// was cancelled.
    #[test]
    fn a_request_to_workers_that_sleep_wakes_no_thread() {
        const REQUESTS: u64 = 50;
        let endpoint = crate::Endpoint::builder().threads(2).build().unwrap();
        let workers = &endpoint.running().workers;
        let since = Instant::now();
        let await_sleep = || {
            while workers.iter().any(|worker| worker.sleeper().activity() != Activity::InPoll) {
                assert!(since.elapsed() < Duration::from_secs(60), "the threads do not go to sleep");
                thread::sleep(Duration::from_millis(1));
            }
            workers.iter().map(|worker| sleeps(worker.thread_id())).sum::<u64>()
        };
        let before = await_sleep();
        for _ in 0..REQUESTS {
            abandon(workers, String::new, false, |_| false).unwrap();
            await_sleep();
        }
        let woken = await_sleep() - before;
        assert!(woken < REQUESTS / 2, "{REQUESTS} requests woke threads {woken} times");
    }

    #[test]
    fn every_pass_and_what_it_does_are_steps() {
        let endpoint = crate::Endpoint::builder().threads(0).build().unwrap();
        let running = endpoint.running().clone();
        let worker = &running.workers[0];
        let stepped = |before: u64| {
            worker.poll_once(running.context());
            worker.steps() - before
        };
        let idle = stepped(worker.steps());
        assert!(idle > 0);
        for index in 0..2 {
            let (session, generation, why) = (0, 0, String::new().into());
            worker.command(Command::Drop { session, index, generation, why });
        }
        assert!(stepped(worker.steps()) >= idle + 2, "a step for each command");
    }
}
