//! Workers, and who polls their progress engines.
//!
//! A worker owns some channels. Whoever holds its progress engine moves their bytes: normally the worker's thread;
//! but a caller that waits takes the engine over and polls it itself, which spares two thread switches
//! per message, and a caller that posts a small operation to an idle worker sends it at once.
//!
//! A worker thread's life: `running -> in poll -> running`, and `running -> parked -> running` while
//! callers drive. Running, it spins with yields for a moment (none, on a large host, while there is more than enough
//! under way) and then sleeps in the kernel, so that an idle endpoint costs nothing. Parked, it looks in every [`TICK`]
//! and takes over when no caller came.
//!
//! Invariant: the engine's lock is only ever tried for, never waited for, so no thread blocks behind an owner.
//! Read next: `engine.rs` for what a pass is, `inline.rs` for callers who drive.

mod engine;
mod inline;
mod quiesce;
mod workers;

use crate::core::channel::{Channel, Unreleased, Workspace};
use crate::core::context::Context;
use crate::core::operation::Op;
use crate::core::sleeper::{Activity, Sleeper};
use crossbeam_queue::SegQueue;
use ferrywire_memory::cuda::deferred_free;
use ferrywire_proto::schedule::Spin;
use ferrywire_sys::affinity;
use ferrywire_sys::poll::{Event as PollEvent, Poller};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use engine::{Polled, Slot};
pub(crate) use inline::{SPIN, Wait};
pub(crate) use quiesce::{Abandon, abandon, abandon_memory, ask_for_region};
pub(crate) use workers::{Loss, LostChannel, LostChannels, Workers};

/// How long a thread leaves lanes alone that are busy: about a message of 512 KiB at 3 GB/s.
const BACKOFF: Duration = Duration::from_micros(150);
/// The longest, when several in a row have brought nothing: lanes that are busy are slow then.
const BACKOFF_MAX: Duration = Duration::from_micros(1200);
/// The shortest, for lanes that have little to do: a fraction of the time in which they have brought nothing, so that the wait
/// for what comes then is longer by that fraction at most.
const BACKOFF_MIN: Duration = Duration::from_micros(50);
const BACKOFF_FRACTION: u32 = 4;
/// How long an owner sleeps at most while a GPU copies what is staged: nobody tells when it is done.
const COPY_BACKOFF: Duration = Duration::from_micros(30);
/// How often a parked thread looks whether callers still drive.
const TICK: Duration = Duration::from_micros(200);
/// How often a parked thread looks in while a caller sleeps in the kernel as the owner.
const LONG_TICK: Duration = Duration::from_millis(100);
/// Ticks without a caller after which the thread takes over again.
const TICKS_WITHOUT_CALLER: u32 = 5;

/// What others ask of a worker.
pub(crate) enum Command {
    Add(Box<Channel>),
    /// Stops placing bytes where the question says yes.
    Abandon(Arc<Abandon>),
    /// Ends one channel, if it is still of this generation.
    Drop {
        session: u64,
        index: u16,
        generation: u32,
        why: Loss,
    },
}

/// One progress engine and, unless callers drive everything, its thread.
pub(crate) struct Worker {
    pub index: usize,
    engine: Mutex<ProgressEngine>,
    poller: Poller,
    commands: SegQueue<Command>,
    sleeper: Arc<Sleeper>,
    lost: Arc<LostChannels>,
    wanted: AtomicU32,
    drives: AtomicU64,
    /// The thread as the kernel numbers it; 0 before it runs.
    thread_id: AtomicI32,
    stop: AtomicBool,
    polled_by: PolledBy,
    /// Such a call has not returned in time: nobody waits for this worker any more.
    stuck: AtomicBool,
    /// Grows with whatever its owner has done, or looked at.
    steps: AtomicU64,
    /// The thread keeps to one core.
    kept: AtomicBool,
    spin: Spin,
}

/// Which threads poll a worker's progress engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PolledBy {
    /// Its thread, and callers.
    All,
    /// While it has lanes, its thread alone: nothing wakes a caller for what they bring.
    ThreadWithLanes,
    /// Its thread alone: it makes calls that may block, or never return.
    Thread,
}

/// The channels of a worker. Only its owner touches them.
pub(crate) struct ProgressEngine {
    slots: Vec<Option<Slot>>,
    space: Workspace,
    ready: Vec<PollEvent>,
    last_check: Duration,
    /// Bytes moved so far, both ways.
    moved: u64,
    /// The channel that received last.
    hot: Option<usize>,
    polls: u32,
    /// The channel that may send first in this pass.
    first: usize,
    /// Channels without a descriptor, which have to be asked.
    polled: usize,
    /// Requests to let go of memory that somebody may still write to.
    abandoning: Vec<Abandoning>,
    /// What channels that are lost were sending without a copy, while something may still read it.
    unreleased: Vec<Closed>,
}

/// Lane and connection of a channel that is lost.
struct Closed {
    unreleased: Unreleased,
    /// Operations with frames that the peer has not acknowledged.
    ops: Vec<Arc<Op>>,
    since: Duration,
}

/// A request that is not answered yet.
struct Abandoning {
    request: Arc<Abandon>,
    since: Duration,
    /// The request waits for GPUs alone.
    by_gpu: bool,
}

impl Worker {
    /// Its thread spins so long without work before it sleeps in the kernel.
    pub fn new(
        index: usize,
        threaded: bool,
        polled_by: PolledBy,
        spin: Spin,
        lost: Arc<LostChannels>,
    ) -> io::Result<Worker> {
        let poller = Poller::new()?;
        let sleeper = Arc::new(Sleeper::new(index, poller.waker(), threaded));
        let engine = ProgressEngine {
            slots: Vec::new(),
            space: Workspace::new(),
            ready: Vec::new(),
            last_check: Duration::ZERO,
            moved: 0,
            hot: None,
            polls: 0,
            first: 0,
            polled: 0,
            abandoning: Vec::new(),
            unreleased: Vec::new(),
        };
        Ok(Worker {
            index,
            engine: Mutex::new(engine),
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
            kept: AtomicBool::new(false),
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

    /// Gives the worker something to do, and wakes whoever owns it.
    pub fn command(&self, command: Command) {
        self.commands.push(command);
        self.sleeper.rouse();
    }

    /// Whether something was asked of it that it has not begun yet.
    fn has_commands(&self) -> bool {
        !self.commands.is_empty() || self.sleeper.is_to_keep_to_core()
    }

    /// How others wake it.
    pub fn sleeper(&self) -> &Arc<Sleeper> {
        &self.sleeper
    }

    /// Wakes a thread that sleeps for as long as it likes although something has been sent since: a caller
    /// did that, and perhaps nobody waits. Somebody has to look at the paths. Ask now and then.
    pub fn look_after(&self) {
        if self.sleeper.dozes.load(Ordering::SeqCst)
            && self.try_engine().is_some_and(|engine| engine.sleep_limit().is_some())
        {
            self.sleeper.wake();
        }
    }

    /// Its thread, as the kernel numbers it.
    pub fn thread_id(&self) -> i32 {
        self.thread_id.load(Ordering::SeqCst)
    }

    /// Whether only its thread may poll it; not after that has ended.
    fn thread_alone(&self) -> bool {
        let alone = match self.polled_by {
            PolledBy::All => false,
            PolledBy::ThreadWithLanes => self.sleeper.has_lanes(),
            PolledBy::Thread => true,
        };
        alone && self.sleeper.activity() != Activity::NoThread
    }

    /// Whether its channels may have lanes.
    pub fn may_have_lanes(&self) -> bool {
        self.polled_by != PolledBy::All
    }

    /// A call of its thread does not return. Whether that is news.
    pub fn mark_stuck(&self) -> bool {
        !self.stuck.swap(true, Ordering::SeqCst)
    }

    pub fn stuck(&self) -> bool {
        self.stuck.load(Ordering::SeqCst)
    }

    /// Its owner gets on. One thread at a time: that of the engine.
    fn step(&self) {
        self.steps.store(self.steps.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    /// Another number than before when its owner has got on since.
    pub fn steps(&self) -> u64 {
        self.steps.load(Ordering::Relaxed)
    }

    pub fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
        self.sleeper.wake();
        self.sleeper.unpark();
    }

    // ---- the thread ----

    /// The worker thread's whole life.
    pub fn run(self: &Arc<Worker>, context: &Context) {
        let _moving = deferred_free::moving();
        self.sleeper.set_thread(thread::current());
        self.thread_id.store(affinity::thread_id(), Ordering::SeqCst);
        if self.polled_by != PolledBy::Thread {
            self.keep_to_core(context);
        }
        if let Err(error) = affinity::sharpen_timers(COPY_BACKOFF / 10) {
            tracing::debug!(%error, "backoffs of a progress thread are longer than they should be");
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
            // The last pass may have swallowed the wake of whoever wants it to stop.
            let has_work = |engine: &MutexGuard<'_, ProgressEngine>| {
                let stop = self.stop.load(Ordering::SeqCst);
                stop || engine.has_work() || engine.lanes_active() || self.has_commands()
            };
            self.sleeper.sleep(engine, has_work, |engine| {
                let timeout = engine.sleep_limit();
                self.sleeper.dozes.store(timeout.is_none(), Ordering::SeqCst);
                drop(engine);
                // What is ready is reported again to whoever takes the engine.
                if let Err(error) = self.poller.wait(&mut ignored, timeout) {
                    tracing::error!(%error, "waiting for sockets failed");
                    thread::sleep(TICK);
                }
                self.sleeper.dozes.store(false, Ordering::SeqCst);
            });
        }
        self.run_last_commands(context);
        self.sleeper.set_activity(Activity::NoThread);
    }

    /// What it was told before it was to stop counts: a channel that nobody ends keeps its peer, and that all else. A caller
    /// that has the engine, or had it when others gave this worker up, gives it back late, but it does.
    fn run_last_commands(&self, context: &Context) {
        while self.has_commands() {
            match self.try_engine() {
                Some(mut engine) => _ = engine.run_commands(self, context),
                None => thread::park_timeout(TICK),
            }
        }
    }

    /// One thread per core: each keeps to its own. Where both ends are on one host, a channel's two
    /// threads then share a core, and its payload stays in that core's cache. A plugin's threads are started
    /// by ours and held to the same core, so with lanes that waits until every core has some.
    fn keep_to_core(&self, context: &Context) {
        let cores = affinity::allowed_cores().unwrap_or_default();
        if cores.len() != context.sleepers.len() {
            return;
        }
        match affinity::pin_current_thread(cores[self.index]) {
            Ok(()) => self.kept.store(true, Ordering::Relaxed),
            Err(error) => tracing::debug!(%error, "a progress thread cannot be pinned"),
        }
    }

    /// Drives until there is nothing to do; true when a caller wants the engine.
    fn drive_until_idle(&self, engine: &mut ProgressEngine, context: &Context) -> bool {
        let mut idle_since: Option<Instant> = None;
        let mut backoff = BACKOFF;
        loop {
            if self.wanted.load(Ordering::SeqCst) > 0 || self.stop.load(Ordering::Relaxed) {
                return true;
            }
            if engine.poll_once(self, context, &mut || false) == Polled::Worked {
                (idle_since, backoff) = (None, BACKOFF);
                continue;
            }
            if let Some(pause) = engine.lanes_pause() {
                // Channels without a lane have nothing to do with it.
                if engine.has_plain() {
                    self.back_off(engine, pause)
                } else {
                    thread::sleep(pause)
                }
                continue;
            }
            let idle = idle_since.get_or_insert_with(Instant::now).elapsed();
            if self.may_have_lanes() && !self.kept.load(Ordering::Relaxed) && engine.lanes_active() {
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
            let Spin { usual, in_deep_bulk } = self.spin;
            // Where the thread would be back at once it had better yield.
            let deep = || engine.in_deep_bulk() && !engine.has_work() && !engine.lanes_active();
            if idle > usual || (idle > in_deep_bulk && deep()) {
                return false;
            }
            thread::yield_now();
        }
    }

    /// Leaves the cores to the plugin's own threads for a moment, while lanes have enough to do: what a thread
    /// burns by asking again and again, they lack. Whoever has something new ends the backoff. A thread that keeps to
    /// a core shares it with those it started: there a yield is enough, and a timer would interrupt them.
    fn back_off(&self, engine: &mut ProgressEngine, limit: Duration) {
        let has_work = |engine: &&mut ProgressEngine| {
            self.has_commands() || self.stop.load(Ordering::SeqCst) || engine.has_work()
        };
        let mut to_the_end = false;
        self.sleeper.sleep(engine, has_work, |engine| {
            let mut ready = std::mem::take(&mut engine.ready);
            if let Err(error) = self.poller.wait(&mut ready, Some(limit)) {
                tracing::error!(%error, "waiting for sockets failed");
            }
            to_the_end = ready.is_empty();
            engine.ready = ready;
        });
        if !to_the_end {
            // No backoff, or a short one: the plugin's threads get a core all the same.
            thread::yield_now();
        }
    }

    /// Stands back while callers drive.
    fn park(&self, context: &Context) {
        self.sleeper.set_activity(Activity::Parked);
        let mut quiet = 0;
        let mut drives = self.drives.load(Ordering::SeqCst);
        while quiet < TICKS_WITHOUT_CALLER && !self.stop.load(Ordering::Relaxed) {
            self.sleeper.pause(|long| thread::park_timeout(if long { LONG_TICK } else { TICK }));
            if self.sleeper.has_passive_waiters() && !self.sleeper.is_driven() {
                break;
            }
            let now = self.drives.load(Ordering::SeqCst);
            quiet = if now == drives { quiet + 1 } else { 0 };
            drives = now;
            match self.try_engine() {
                // Sends what the last caller left behind.
                Some(mut engine) if self.wanted.load(Ordering::SeqCst) == 0 => {
                    engine.poll_once(self, context, &mut || false);
                }
                Some(_) => {}
                None => quiet = 0,
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

    /// Its peer was told that it is over; until the channel went nothing of the endpoint did, its threads included.
    #[test]
    fn an_endpoint_that_closes_while_a_worker_is_held_up_is_gone_once_that_goes_on() {
        for given_up in [false, true] {
            let builder = || Endpoint::builder().threads(1).channels(1);
            let far = builder().listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
            let near = builder().build().unwrap();
            let peer = near.connect(far.listen_addresses()[0], LIMIT).unwrap();
            let source = near.alloc_host(1 << 20).unwrap();
            // No receive is posted for it.
            let sent = peer.send(1, &source, 0, 1 << 20).unwrap();
            let left = near.downgrade();
            let running = near.running().clone();
            let worker = running.workers[0].clone();
            let since = Instant::now();
            let engine = loop {
                if let Some(engine) = worker.try_engine() {
                    break engine;
                }
                assert!(since.elapsed() < LIMIT, "it is held all the time");
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
                assert!(since.elapsed() < 3 * LIMIT, "given up {given_up}: it is never gone");
                thread::sleep(Duration::from_millis(1));
            }
        }
    }
}
