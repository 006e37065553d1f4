//! Workers: each has a progress engine, polled by its thread or by callers.
//!
//! A worker owns some channels. The thread that holds the progress engine moves their bytes. Normally this is
//! the worker's thread. A waiting caller takes the engine over and polls it inline, which saves two thread
//! switches per message. A caller that posts a small operation to an idle worker sends it inline.
//!
//! A worker thread's states: `running -> in poll -> running`, and `running -> parked -> running` while
//! callers poll inline. A running thread without work spins with yields for a moment and then sleeps in the
//! kernel, so that an idle endpoint uses no CPU. Where cores are spare it does not spin while enough bytes are in
//! flight. A parked thread wakes after a [`TICK`] or a few, and takes over when no caller has polled.
//!
//! Invariants: threads only try to take the engine's lock and never wait for it, so no thread blocks behind an
//! owner. Workers own channels, channels refer to their peer's state, and that refers to the [`Context`]. No
//! reference points back.
//! Read next: `engine.rs`, one pass; `inline.rs`, callers that post and wait.

mod engine;
mod inline;
mod lost;
#[cfg(test)]
mod order_tests;
mod pinning;
mod quiesce;
mod release;

use crate::core::channel::Channel;
use crate::core::context::Context;
use crate::core::sleeper::{Activity, Sleeper};
use crossbeam_queue::SegQueue;
use ferrywire_memory::cuda::deferred_free;
use ferrywire_proto::schedule::Spin;
use ferrywire_sys::poll::Poller;
use ferrywire_sys::{affinity, signal};
use std::io;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use engine::{Polled, ProgressEngine};
pub(crate) use inline::Pauses;
use inline::SPIN;
pub(crate) use lost::{Loss, LostChannel, LostChannels};
pub(crate) use quiesce::{Abandon, abandon, abandon_memory, ask_for_region};

/// Pause of a thread whose lanes are busy: about the time of a 512 KiB message at 3 GB/s.
const BACKOFF: Duration = Duration::from_micros(150);
/// Longest pause, after several without progress: busy lanes are slow then.
const BACKOFF_MAX: Duration = Duration::from_micros(1200);
/// Shortest pause for lanes with few bytes in flight. The pause is 1/[`BACKOFF_FRACTION`] of the idle time so
/// far, so it extends the wait by that fraction at most.
const BACKOFF_MIN: Duration = Duration::from_micros(50);
const BACKOFF_FRACTION: u32 = 4;
/// Longest sleep of the engine's owner while a GPU copies staged payload: the end of a copy raises no event.
const COPY_BACKOFF: Duration = Duration::from_micros(30);
/// How often a parked thread checks whether callers still poll inline.
const TICK: Duration = Duration::from_micros(200);
/// Polls of callers per tick with which the next pause is longer by a tick: a caller that polls so often sends itself what it
/// has left, and the thread would only keep it from a core.
const OFTEN: u64 = 2;
/// Longest pause in ticks beside a caller that polls often.
const TICKS_MAX: u32 = 5;
/// How often a parked thread checks while a caller that owns the progress engine sleeps in the kernel.
const LONG_TICK: Duration = Duration::from_millis(100);
/// Ticks without a polling caller after which the thread takes over.
const TICKS_WITHOUT_CALLER: u32 = 5;

/// Requests of other threads to a worker.
pub(crate) enum Command {
    Add(Box<Channel>),
    /// Stops placing bytes into memory for which the request's `gone` is true.
    Abandon(Arc<Abandon>),
    /// Ends one channel, if its generation still matches.
    Drop {
        session: u64,
        index: u16,
        generation: u32,
        why: Loss,
    },
}

/// All workers of one endpoint.
pub(crate) struct Workers {
    pub context: Arc<Context>,
    list: Box<[Arc<Worker>]>,
    lost: Arc<LostChannels>,
}

impl Workers {
    /// Creates the list of workers. `lost` takes their lost channels.
    pub fn new(context: Arc<Context>, list: Box<[Arc<Worker>]>, lost: Arc<LostChannels>) -> Workers {
        Workers { context, list, lost }
    }

    /// Lost channels that wait for their fence.
    pub fn lost(&self) -> &LostChannels {
        &self.lost
    }

    /// Polls every worker that no other thread polls. Returns the most that one of them did.
    pub fn poll_once(&self) -> Pass {
        self.list.iter().map(|worker| worker.poll_once(&self.context)).max().unwrap_or(Pass::Idle)
    }
}

/// What one pass has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Pass {
    /// Nothing, and nothing needs a pass soon.
    Idle,
    /// Nothing, but a GPU copies for a channel, and the end of a copy raises no event.
    Copies,
    /// It has moved something forward.
    Worked,
}

impl Pass {
    /// Whether a caller that waits for a transfer polls again without a pause.
    pub fn goes_on(self) -> bool {
        self != Pass::Idle
    }
}

impl Deref for Workers {
    type Target = [Arc<Worker>];

    fn deref(&self) -> &[Arc<Worker>] {
        &self.list
    }
}

/// A progress engine and its thread, if the endpoint has threads.
pub(crate) struct Worker {
    pub index: usize,
    engine: Mutex<ProgressEngine>,
    poller: Poller,
    commands: SegQueue<Command>,
    sleeper: Arc<Sleeper>,
    lost: Arc<LostChannels>,
    wanted: AtomicU32,
    drives: AtomicU64,
    /// Kernel thread id; 0 before the thread runs.
    thread_id: AtomicI32,
    stop: AtomicBool,
    polled_by: PolledBy,
    /// Whether a blocking call of the thread has not returned in time, so that other threads no longer wait
    /// for this worker.
    stuck: AtomicBool,
    /// Grows with each step of the owner, whether it moved bytes or only polled.
    steps: AtomicU64,
    spin: Spin,
}

/// Which threads poll a worker's progress engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PolledBy {
    /// The worker's thread and callers.
    All,
    /// The worker's thread alone while the worker has lanes: lanes raise no event that would wake a caller.
    ThreadWithLanes,
    /// The worker's thread alone: the thread makes calls that may block or never return.
    Thread,
}

impl Worker {
    /// Creates a worker. `spin` is how long its thread spins without work before it sleeps in the kernel.
    ///
    /// # Errors
    /// The system's error when it has no file descriptors for the poller.
    pub fn new(
        index: usize,
        threaded: bool,
        polled_by: PolledBy,
        spin: Spin,
        lost: Arc<LostChannels>,
    ) -> io::Result<Worker> {
        let poller = Poller::new()?;
        let sleeper = Arc::new(Sleeper::new(index, poller.waker(), threaded));
        Ok(Worker {
            index,
            engine: Mutex::new(ProgressEngine::new()),
            poller,
            commands: SegQueue::new(),
            sleeper,
            lost,
            wanted: AtomicU32::new(0),
            drives: AtomicU64::new(0),
            thread_id: AtomicI32::new(0),
            stop: AtomicBool::new(false),
            polled_by,
            stuck: AtomicBool::new(false),
            steps: AtomicU64::new(0),
            spin,
        })
    }

    fn try_engine(&self) -> Option<MutexGuard<'_, ProgressEngine>> {
        match self.engine.try_lock() {
            Ok(engine) => Some(engine),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Queues a command and wakes the worker's owner.
    pub fn command(&self, command: Command) {
        self.commands.push(command);
        self.sleeper.rouse();
    }

    /// Whether commands wait to be run.
    fn has_commands(&self) -> bool {
        !self.commands.is_empty() || self.sleeper.is_to_pin()
    }

    /// The part of the worker that wakes it.
    pub fn sleeper(&self) -> &Arc<Sleeper> {
        &self.sleeper
    }

    /// Wakes a thread that sleeps without a timeout although a caller has sent something since: no other thread
    /// would check the paths. The control thread calls this regularly.
    pub fn wake_dozing(&self) {
        if self.sleeper.dozes.load(Ordering::SeqCst)
            && self.try_engine().is_some_and(|engine| engine.sleep_limit().is_some())
        {
            self.sleeper.wake();
        }
    }

    /// Whether the current thread is the worker's own.
    fn is_this_thread(&self) -> bool {
        affinity::thread_id() == self.thread_id()
    }

    /// Kernel id of the worker's thread; 0 before it runs.
    pub fn thread_id(&self) -> i32 {
        self.thread_id.load(Ordering::SeqCst)
    }

    /// Whether only the worker's thread may poll. After that thread has ended, callers may.
    fn thread_alone(&self) -> bool {
        let alone = match self.polled_by {
            PolledBy::All => false,
            PolledBy::ThreadWithLanes => self.sleeper.has_lanes(),
            PolledBy::Thread => true,
        };
        alone && self.sleeper.activity() != Activity::NoThread
    }

    /// Whether the worker's channels may have lanes.
    pub fn may_have_lanes(&self) -> bool {
        self.polled_by != PolledBy::All
    }

    /// Notes that a call of the worker's thread does not return. True the first time.
    pub fn mark_stuck(&self) -> bool {
        !self.stuck.swap(true, Ordering::SeqCst)
    }

    pub fn stuck(&self) -> bool {
        self.stuck.load(Ordering::SeqCst)
    }

    /// Counts a step of the owner. Only the thread with the engine's lock calls this, so a plain load and
    /// store suffice.
    fn step(&self) {
        self.steps.store(self.steps.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    /// A number that changes when the owner makes progress.
    pub fn steps(&self) -> u64 {
        self.steps.load(Ordering::Relaxed)
    }

    pub fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
        self.sleeper.wake();
        self.sleeper.unpark();
    }

    // ---- the thread ----

    /// Runs the worker's thread until [`Worker::stop`].
    pub fn run(self: &Arc<Worker>, context: &Context) {
        let _moving = deferred_free::moving();
        signal::block_sigpipe();
        self.sleeper.set_thread(thread::current());
        self.thread_id.store(affinity::thread_id(), Ordering::SeqCst);
        if let Err(error) = affinity::sharpen_timers(COPY_BACKOFF / 10) {
            tracing::debug!(%error, "cannot shorten the timer slack of a progress thread: its backoffs are longer");
        }
        let mut ignored = Vec::new();
        while !self.stop.load(Ordering::SeqCst) {
            let Some(mut engine) = self.try_engine() else {
                self.park(context);
                continue;
            };
            if self.drive_until_idle(&mut engine, context) {
                drop(engine);
                self.park(context);
                continue;
            }
            // The last pass may have consumed the wake-up of the thread that called `stop`.
            let has_work = |engine: &MutexGuard<'_, ProgressEngine>| {
                let stop = self.stop.load(Ordering::SeqCst);
                stop || engine.has_work() || engine.lanes_active() || self.has_commands()
            };
            self.sleeper.sleep(engine, has_work, |engine| {
                let timeout = engine.sleep_limit();
                self.sleeper.dozes.store(timeout.is_none(), Ordering::SeqCst);
                drop(engine);
                // The poller reports ready sockets again to the next owner.
                if let Err(error) = self.poller.wait(&mut ignored, timeout) {
                    tracing::error!(%error, worker = self.index, "cannot poll the sockets of a worker");
                    thread::sleep(TICK);
                }
                self.sleeper.dozes.store(false, Ordering::SeqCst);
            });
        }
        self.run_last_commands(context);
        self.sleeper.set_activity(Activity::NoThread);
    }

    /// Runs commands that were queued before the stop. A channel that is not ended would keep its peer, and
    /// so the endpoint. A caller that still has the engine releases it, even if late.
    fn run_last_commands(&self, context: &Context) {
        while self.has_commands() {
            match self.try_engine() {
                Some(mut engine) => _ = engine.run_commands(self, context),
                None => thread::park_timeout(TICK),
            }
        }
    }

    /// Polls until nothing is left to do. Returns true if a caller wants the engine, or the worker stops.
    fn drive_until_idle(&self, engine: &mut ProgressEngine, context: &Context) -> bool {
        let mut idle_since: Option<Instant> = None;
        let mut backoff = BACKOFF;
        loop {
            if self.wanted.load(Ordering::SeqCst) > 0 || self.stop.load(Ordering::Relaxed) {
                return true;
            }
            engine.pin_or_unpin(self, context);
            if engine.poll_once(self, context, &mut || false) == Polled::Worked {
                (idle_since, backoff) = (None, BACKOFF);
                continue;
            }
            if let Some(pause) = engine.lanes_pause() {
                // The pause is for lanes; for a channel without one, socket events end it.
                if engine.has_plain() {
                    self.back_off(engine, pause)
                } else {
                    thread::sleep(pause)
                }
                continue;
            }
            let idle = idle_since.get_or_insert_with(Instant::now).elapsed();
            if self.may_have_lanes() && !engine.pinning.is_pinned() && engine.lanes_active() {
                let rest = idle / BACKOFF_FRACTION;
                if engine.lanes_in_bulk() {
                    self.back_off(engine, backoff);
                    backoff = BACKOFF_MAX.min(2 * backoff);
                } else if rest >= BACKOFF_MIN {
                    self.back_off(engine, rest.min(BACKOFF_MAX));
                } else {
                    thread::yield_now();
                }
                continue;
            }
            let Spin { usual, with_staging, in_deep_bulk } = self.spin;
            let usual = if engine.stages() { with_staging } else { usual };
            // A thread that would be woken at once yields, which costs less.
            let deep = || engine.in_deep_bulk() && !engine.has_work() && !engine.lanes_active();
            if idle > usual || (idle > in_deep_bulk && deep()) {
                return false;
            }
            thread::yield_now();
        }
    }

    /// Pauses for up to `limit` while lanes have enough in flight: polling takes CPU time from the plugin's
    /// own threads. Socket events and commands end the pause. A pinned thread shares its core with the
    /// plugin's threads; for such a thread a yield is enough, and a timer would interrupt the plugin's
    /// threads.
    fn back_off(&self, engine: &mut ProgressEngine, limit: Duration) {
        let has_work = |engine: &&mut ProgressEngine| {
            self.has_commands() || self.stop.load(Ordering::SeqCst) || engine.has_work()
        };
        let mut to_the_end = false;
        self.sleeper.sleep(engine, has_work, |engine| {
            let mut ready = std::mem::take(&mut engine.ready);
            if let Err(error) = self.poller.wait(&mut ready, Some(limit)) {
                tracing::error!(%error, worker = self.index, "cannot poll the sockets of a worker");
            }
            to_the_end = ready.is_empty();
            engine.ready = ready;
        });
        if !to_the_end {
            // The pause was short or did not happen: yield the core to the plugin's threads.
            thread::yield_now();
        }
    }

    /// Waits while callers poll inline.
    fn park(&self, context: &Context) {
        self.sleeper.set_activity(Activity::Parked);
        let (mut quiet, mut ticks) = (0, 1);
        let mut drives = self.drives.load(Ordering::SeqCst);
        while quiet < TICKS_WITHOUT_CALLER && !self.stop.load(Ordering::Relaxed) {
            self.sleeper.pause(|long| thread::park_timeout(if long { LONG_TICK } else { TICK * ticks }));
            if self.sleeper.has_passive_waiters() && !self.sleeper.is_driven() {
                break;
            }
            let (before, engine) = (drives, self.try_engine());
            drives = self.drives.load(Ordering::SeqCst);
            let polled = drives.wrapping_sub(before);
            quiet = if polled == 0 && engine.is_some() { quiet + 1 } else { 0 };
            ticks = if polled >= OFTEN * u64::from(ticks) { TICKS_MAX.min(ticks + 1) } else { 1 };
            if let Some(mut engine) = engine
                && self.wanted.load(Ordering::SeqCst) == 0
            {
                // Send the frames that the last caller left queued.
                engine.poll_once(self, context, &mut || false);
            }
        }
        self.sleeper.set_activity(Activity::Running);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Endpoint, Error};

    const LIMIT: Duration = Duration::from_secs(60);

    /// Regression: the peer learned of the close, but the held channel kept the endpoint and its threads
    /// alive for ever.
    #[test]
    fn an_endpoint_that_closes_while_a_worker_is_held_up_is_gone_once_that_goes_on() {
        for given_up in [false, true] {
            let builder = || Endpoint::builder().threads(1).channels(1);
            let far = builder().listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
            let near = builder().build().unwrap();
            let peer = near.connect(far.listen_addresses()[0], LIMIT).unwrap();
            let source = near.alloc_host(1 << 20).unwrap();
            // The peer posts no receive for this message.
            let sent = peer.send(1, &source, 0, 1 << 20).unwrap();
            let left = near.downgrade();
            let running = near.running().clone();
            let worker = running.workers[0].clone();
            let since = Instant::now();
            let engine = loop {
                if let Some(engine) = worker.try_engine() {
                    break engine;
                }
                assert!(since.elapsed() < LIMIT, "another thread holds the engine all the time");
                thread::yield_now();
            };
            if given_up {
                worker.mark_stuck();
            }
            let closed = near.close(Duration::from_millis(1));
            assert!(matches!(closed, Err(Error::Stalled { .. })), "{closed:?}");
            drop(engine);
            drop((worker, running, sent, source, peer, near));
            while left.strong_count() > 0 {
                assert!(since.elapsed() < 3 * LIMIT, "given up {given_up}: the endpoint is never freed");
                thread::sleep(Duration::from_millis(1));
            }
        }
    }
}
