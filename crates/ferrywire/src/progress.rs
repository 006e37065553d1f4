//! Who turns the crank.
//!
//! A worker owns some channels. Whoever holds its crank moves their bytes: normally the worker's thread;
//! but a caller that waits takes the crank over and drives it itself, which spares two thread switches
//! per message, and a caller that posts a small operation to an idle worker sends it at once.
//!
//! A worker thread's life: `running -> in poll -> running`, and `running -> parked -> running` while
//! callers drive. Running, it spins with yields for a moment and then sleeps in the kernel, so that an
//! idle endpoint costs nothing. Parked, it looks in every [`TICK`] and takes over when no caller came.
//!
//! Invariant: the crank is only ever tried for, never waited for, so nobody blocks behind an owner.
//! Read next: `peer.rs` for what the frames do.

use crate::channel::{Channel, Workspace};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::limits;
use crate::memory::Memory;
use crate::patience::Patience;
use crate::peer::{Landing, PeerState};
use crate::queue::SMALL_BYTES_MAX;
use crate::sys::affinity;
use crate::sys::poll::{Event as Ready, Interest, Poller, WAKE_TOKEN, Waker};
use crossbeam_queue::SegQueue;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

/// How long an owner without work spins before it sleeps in the kernel.
const SPIN: Duration = Duration::from_micros(50);
/// How often a parked thread looks whether callers still drive.
const TICK: Duration = Duration::from_micros(200);
/// Likewise while a caller sleeps in the kernel as the owner.
const LONG_TICK: Duration = Duration::from_millis(100);
/// Ticks without a caller after which the thread takes over again.
const TICKS_WITHOUT_CALLER: u32 = 5;
/// Every so many turns, the channel that received last is not asked first.
const HOT_TURNS: u32 = 8;
/// Longest a caller spins for a crank that the thread is about to give up.
const CLAIM: Duration = Duration::from_millis(2);
/// Bytes that a waiting caller moves before it leaves the rest to the thread, which keeps to its core.
const DRIVE_BYTES: u64 = 4 << 20;
/// Frames that may wait for the driving caller before they are sent at once.
const DEFERRED_FRAMES_MAX: usize = 16;
/// Operations that may wait so are at most this long.
const DEFERRED_BYTES_MAX: u64 = 4 << 10;

/// Who is to be woken when something has happened.
pub(crate) enum WakeHandle {
    /// A parked thread.
    Thread(Thread),
    /// A caller that sleeps in this worker's poller.
    Owner(Arc<Worker>),
}

impl WakeHandle {
    pub fn wake(&self) {
        match self {
            WakeHandle::Thread(thread) => thread.unpark(),
            WakeHandle::Owner(worker) => worker.wake_owner(),
        }
    }
}

/// Those who wait for one thing.
#[derive(Default)]
pub(crate) struct WaitList {
    any: AtomicBool,
    list: Mutex<Vec<WakeHandle>>,
}

impl WaitList {
    /// Adds somebody; check the condition again afterwards.
    pub fn add(&self, handle: WakeHandle) {
        self.list.lock().unwrap_or_else(PoisonError::into_inner).push(handle);
        self.any.store(true, Ordering::SeqCst);
    }

    /// Wakes everybody, once. Costs one load when nobody waits.
    pub fn wake(&self) {
        if self.any.load(Ordering::SeqCst) {
            let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
            self.any.store(false, Ordering::SeqCst);
            let waiting = std::mem::take(&mut *list);
            drop(list);
            waiting.iter().for_each(WakeHandle::wake);
        }
    }
}

/// What others ask of a worker.
pub(crate) enum Command {
    Add(Box<Channel>),
    /// Stops placing bytes where the question says yes.
    Abandon(Arc<Abandon>),
    /// Every worker has lanes: each keeps to its core.
    KeepToCore,
    /// Ends one channel, if it is still of this generation.
    Drop {
        session: u64,
        index: u16,
        generation: u32,
        why: String,
    },
}

const RUNNING: u8 = 0;
const IN_POLL: u8 = 1;
const PARKED: u8 = 2;
const NO_THREAD: u8 = 3;

/// One crank and, unless callers drive everything, its thread.
pub(crate) struct Worker {
    pub index: usize,
    crank: Mutex<Crank>,
    poller: Poller,
    waker: Waker,
    commands: SegQueue<Command>,
    state: AtomicU8,
    owner_asleep: AtomicBool,
    /// The parked thread looks in rarely, because a caller sleeps as the owner.
    long_park: AtomicBool,
    driven_by_caller: AtomicBool,
    wanted: AtomicU32,
    drives: AtomicU64,
    left_behind: AtomicU32,
    /// The thread sleeps, and nothing but an event will wake it.
    dozes: AtomicBool,
    thread: OnceLock<Thread>,
    /// The thread as the kernel numbers it; 0 before it runs.
    thread_id: AtomicI32,
    stop: AtomicBool,
    /// Only its thread turns it: it makes calls that may block, or never return.
    thread_only: bool,
    /// Such a call has not returned in time: nobody waits for this worker any more.
    stuck: AtomicBool,
    /// Channels it has, where they have lanes.
    lanes: AtomicUsize,
}

/// The channels of a worker. Only its owner touches them.
pub(crate) struct Crank {
    slots: Vec<Option<Slot>>,
    space: Workspace,
    ready: Vec<Ready>,
    last_check: Duration,
    /// Bytes moved so far, both ways.
    moved: u64,
    /// The channel that received last.
    hot: Option<usize>,
    turns: u32,
    /// The channel that may send first in this turn.
    first: usize,
    /// Channels without a descriptor, which have to be asked.
    polled: usize,
    /// Requests to let go of memory that a lane may still write to, and since when.
    abandoning: Vec<(Arc<Abandon>, Duration)>,
}

struct Slot {
    channel: Box<Channel>,
    waits_to_write: bool,
    polled: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Turn {
    Idle,
    Worked,
    Done,
}

impl Worker {
    pub fn new(index: usize, threaded: bool, thread_only: bool) -> io::Result<Worker> {
        let poller = Poller::new()?;
        let waker = poller.waker();
        let crank = Crank {
            slots: Vec::new(),
            space: Workspace::new(),
            ready: Vec::new(),
            last_check: Duration::ZERO,
            moved: 0,
            hot: None,
            turns: 0,
            first: 0,
            polled: 0,
            abandoning: Vec::new(),
        };
        Ok(Worker {
            index,
            crank: Mutex::new(crank),
            poller,
            waker,
            commands: SegQueue::new(),
            state: AtomicU8::new(if threaded { RUNNING } else { NO_THREAD }),
            owner_asleep: AtomicBool::new(false),
            long_park: AtomicBool::new(false),
            driven_by_caller: AtomicBool::new(false),
            wanted: AtomicU32::new(0),
            drives: AtomicU64::new(0),
            left_behind: AtomicU32::new(0),
            dozes: AtomicBool::new(false),
            thread: OnceLock::new(),
            thread_id: AtomicI32::new(0),
            stop: AtomicBool::new(false),
            thread_only,
            stuck: AtomicBool::new(false),
            lanes: AtomicUsize::new(0),
        })
    }

    fn try_crank(&self) -> Option<MutexGuard<'_, Crank>> {
        match self.crank.try_lock() {
            Ok(crank) => Some(crank),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Gives the worker something to do, and wakes whoever owns it.
    pub fn command(&self, command: Command) {
        self.commands.push(command);
        self.rouse();
    }

    /// Makes sure that somebody looks at the worker soon.
    pub fn rouse(&self) {
        match self.state.load(Ordering::SeqCst) {
            IN_POLL => self.waker.wake(),
            PARKED if !self.driven_by_caller.load(Ordering::SeqCst) => self.unpark(),
            _ => {}
        }
        self.wake_owner();
    }

    /// Whether what is posted now may be left: a caller has the crank, or had it just now, and nobody sleeps on
    /// it; and should no caller come back, the thread looks within a tick.
    fn may_leave_behind(&self) -> bool {
        if self.state.load(Ordering::SeqCst) != PARKED || self.owner_asleep.load(Ordering::SeqCst) {
            return false;
        }
        if self.long_park.load(Ordering::SeqCst) {
            self.unpark();
        }
        true
    }

    /// Wakes a thread that sleeps for as long as it likes although something has been sent since: a caller
    /// did that, and perhaps nobody waits. Somebody has to look at the paths. Ask now and then.
    pub fn look_after(&self) {
        if self.dozes.load(Ordering::SeqCst)
            && self.try_crank().is_some_and(|crank| crank.sleep_limit().is_some())
        {
            self.waker.wake();
        }
    }

    fn wake_owner(&self) {
        if self.owner_asleep.load(Ordering::SeqCst) {
            self.waker.wake();
        }
    }

    fn unpark(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }

    /// Its thread, as the kernel numbers it.
    pub fn thread_id(&self) -> i32 {
        self.thread_id.load(Ordering::SeqCst)
    }

    /// Whether only its thread may turn it; not after that has ended.
    fn thread_alone(&self) -> bool {
        self.thread_only && self.state.load(Ordering::SeqCst) != NO_THREAD
    }

    /// Whether its channels have lanes.
    pub fn has_lanes(&self) -> bool {
        self.thread_only
    }

    /// A call of its thread does not return. Whether that is news.
    pub fn mark_stuck(&self) -> bool {
        !self.stuck.swap(true, Ordering::SeqCst)
    }

    pub fn stuck(&self) -> bool {
        self.stuck.load(Ordering::SeqCst)
    }

    pub fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
        self.waker.wake();
        self.unpark();
    }

    // ---- the thread ----

    /// The worker thread's whole life.
    pub fn run(self: &Arc<Worker>, engine: &Engine) {
        let _ = self.thread.set(thread::current());
        self.thread_id.store(affinity::thread_id(), Ordering::SeqCst);
        if !self.thread_only {
            self.keep_to_core(engine);
        }
        let mut ignored = Vec::new();
        while !self.stop.load(Ordering::SeqCst) {
            let Some(mut crank) = self.try_crank() else {
                self.park(engine);
                continue;
            };
            if self.drive_until_idle(&mut crank, engine) {
                drop(crank);
                self.park(engine);
                continue;
            }
            self.state.store(IN_POLL, Ordering::SeqCst);
            if crank.has_work() || crank.lanes_active() || !self.commands.is_empty() {
                self.state.store(RUNNING, Ordering::SeqCst);
                continue;
            }
            let timeout = crank.sleep_limit();
            self.dozes.store(timeout.is_none(), Ordering::SeqCst);
            drop(crank);
            // What is ready is reported again to whoever takes the crank.
            if let Err(error) = self.poller.wait(&mut ignored, timeout) {
                tracing::error!(%error, "waiting for sockets failed");
                thread::sleep(TICK);
            }
            self.dozes.store(false, Ordering::SeqCst);
            self.state.store(RUNNING, Ordering::SeqCst);
        }
        self.state.store(NO_THREAD, Ordering::SeqCst);
    }

    /// One thread per core: each keeps to its own. Where both ends are on one host, a channel's two
    /// threads then share a core, and its payload stays in that core's cache. A plugin's threads are started
    /// by ours and held to the same core, so with lanes that waits until every core has some.
    fn keep_to_core(&self, engine: &Engine) {
        let cores = affinity::allowed_cores().unwrap_or_default();
        if cores.len() == engine.workers.len()
            && let Err(error) = affinity::pin_current_thread(cores[self.index])
        {
            tracing::debug!(%error, "a progress thread cannot be pinned");
        }
    }

    /// Drives until there is nothing to do; true when a caller wants the crank.
    fn drive_until_idle(&self, crank: &mut Crank, engine: &Engine) -> bool {
        let mut idle_since: Option<Instant> = None;
        loop {
            if self.wanted.load(Ordering::SeqCst) > 0 || self.stop.load(Ordering::Relaxed) {
                return true;
            }
            if crank.turn(self, engine, &mut || false) == Turn::Worked {
                idle_since = None;
                continue;
            }
            if idle_since.get_or_insert_with(Instant::now).elapsed() > SPIN {
                return false;
            }
            thread::yield_now();
        }
    }

    /// Stands back while callers drive.
    fn park(&self, engine: &Engine) {
        self.state.store(PARKED, Ordering::SeqCst);
        let mut quiet = 0;
        let mut drives = self.drives.load(Ordering::SeqCst);
        while quiet < TICKS_WITHOUT_CALLER && !self.stop.load(Ordering::Relaxed) {
            let long = self.owner_asleep.load(Ordering::SeqCst);
            self.long_park.store(long, Ordering::SeqCst);
            // An owner who has woken meanwhile may not have seen how long we are about to sleep.
            let long = long && self.owner_asleep.load(Ordering::SeqCst);
            thread::park_timeout(if long { LONG_TICK } else { TICK });
            self.long_park.store(false, Ordering::SeqCst);
            if self.left_behind.load(Ordering::SeqCst) > 0 && !self.driven_by_caller.load(Ordering::SeqCst) {
                break;
            }
            let now = self.drives.load(Ordering::SeqCst);
            quiet = if now == drives { quiet + 1 } else { 0 };
            drives = now;
            match self.try_crank() {
                // Sends what the last caller left behind.
                Some(mut crank) if self.wanted.load(Ordering::SeqCst) == 0 => {
                    crank.turn(self, engine, &mut || false);
                }
                Some(_) => {}
                None => quiet = 0,
            }
        }
        self.state.store(RUNNING, Ordering::SeqCst);
    }

    // ---- callers ----

    /// Takes the crank for a caller; `None` when another caller has it, or no caller may.
    fn claim(&self) -> Option<Claim<'_>> {
        if self.thread_alone() {
            return None;
        }
        self.wanted.fetch_add(1, Ordering::SeqCst);
        let start = Instant::now();
        let crank = loop {
            if let Some(crank) = self.try_crank() {
                break Some(crank);
            }
            if self.driven_by_caller.load(Ordering::SeqCst) || start.elapsed() > CLAIM {
                break None;
            }
            thread::yield_now();
        };
        self.wanted.fetch_sub(1, Ordering::SeqCst);
        crank.map(|crank| self.claimed(crank))
    }

    fn claimed<'a>(&'a self, crank: MutexGuard<'a, Crank>) -> Claim<'a> {
        self.driven_by_caller.store(true, Ordering::SeqCst);
        self.drives.fetch_add(1, Ordering::SeqCst);
        Claim { worker: self, crank: Some(crank) }
    }

    fn try_claim(&self) -> Option<Claim<'_>> {
        if self.thread_alone() {
            return None;
        }
        self.try_crank().map(|crank| self.claimed(crank))
    }

    /// Turns the crank once, if nobody else does; true if anything moved.
    pub fn turn_once(&self, engine: &Engine) -> bool {
        match self.try_claim() {
            Some(mut claim) => claim.crank().turn(self, engine, &mut || false) == Turn::Worked,
            None => false,
        }
    }

    /// Drives until `done`, or until it is better to let the thread do it. True when done.
    fn drive(self: &Arc<Worker>, wait: &mut Wait<'_>, engine: &Engine) -> bool {
        let Some(mut claim) = self.claim() else {
            return false;
        };
        let mut idle_since: Option<Instant> = None;
        let mut registered = false;
        let bulk = claim.crank().moved.saturating_add(DRIVE_BYTES);
        loop {
            match claim.crank().turn(self, engine, wait.done) {
                Turn::Done => return true,
                Turn::Worked if claim.crank().moved > bulk => return false,
                Turn::Worked => {
                    idle_since = None;
                    continue;
                }
                Turn::Idle => {}
            }
            let now = Instant::now();
            if now.duration_since(*idle_since.get_or_insert(now)) < SPIN {
                thread::yield_now();
                continue;
            }
            let rest = wait.rest(now);
            if rest.is_zero() || self.state.load(Ordering::SeqCst) == IN_POLL {
                return false;
            }
            if !std::mem::replace(&mut registered, true) {
                (wait.register)(WakeHandle::Owner(self.clone()));
            }
            self.sleep_as_owner(claim.crank(), wait, rest);
            idle_since = None;
        }
    }

    fn sleep_as_owner(&self, crank: &mut Crank, wait: &mut Wait<'_>, rest: Duration) {
        self.owner_asleep.store(true, Ordering::SeqCst);
        if !crank.has_work() && self.commands.is_empty() && !(wait.done)() {
            let limit = crank.sleep_limit().map_or(rest, |limit| limit.min(rest));
            let mut ready = std::mem::take(&mut crank.ready);
            if let Err(error) = self.poller.wait(&mut ready, Some(limit)) {
                tracing::error!(%error, "waiting for sockets failed");
            }
            crank.ready = ready;
        }
        self.owner_asleep.store(false, Ordering::SeqCst);
    }
}

/// The crank in a caller's hands.
struct Claim<'a> {
    worker: &'a Worker,
    crank: Option<MutexGuard<'a, Crank>>,
}

impl Claim<'_> {
    fn crank(&mut self) -> &mut Crank {
        match &mut self.crank {
            Some(crank) => crank,
            None => unreachable!("a claim holds the crank until it is dropped"),
        }
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let left = self.crank.as_ref().is_some_and(|crank| crank.has_work() || crank.acks_due());
        let worker = self.worker;
        worker.driven_by_caller.store(false, Ordering::SeqCst);
        self.crank = None;
        let state = worker.state.load(Ordering::SeqCst);
        if state == IN_POLL && (left || !worker.commands.is_empty()) {
            worker.waker.wake();
        }
        let long_park = worker.long_park.load(Ordering::SeqCst);
        if state == PARKED && (worker.left_behind.load(Ordering::SeqCst) > 0 || (left && long_park)) {
            worker.unpark();
        }
    }
}

struct Wait<'a> {
    until: Instant,
    register: &'a mut dyn FnMut(WakeHandle),
    done: &'a mut dyn FnMut() -> bool,
}

impl Wait<'_> {
    fn rest(&self, now: Instant) -> Duration {
        self.until.saturating_duration_since(now)
    }

    /// Looks again and again for a moment, whenever the threads leave time for it; true when done. While many
    /// operations are in flight the next one is done soon, and to be woken for each costs the threads more.
    fn spin(&mut self) -> bool {
        let start = Instant::now();
        while start.elapsed() < BULK_SPIN {
            thread::yield_now();
            if (self.done)() {
                return true;
            }
        }
        false
    }
}

/// Waits until `done`, driving the peer's home worker where possible. False when the time is up.
pub(crate) fn wait(
    peer: &Arc<PeerState>,
    limit: Duration,
    mut register: impl FnMut(WakeHandle),
    mut done: impl FnMut() -> bool,
) -> bool {
    let engine = peer.engine().clone();
    if engine.caller_driven() {
        return wait_driving(&engine, limit, done);
    }
    let now = Instant::now();
    let until = now.checked_add(limit).unwrap_or_else(|| now + Duration::from_secs(86400 * 365));
    let mut wait = Wait { until, register: &mut register, done: &mut done };
    let mut stand_back = false;
    loop {
        if (wait.done)() {
            return true;
        }
        let worker = peer.home().clone();
        if !peer.in_bulk() && !stand_back && worker.drive(&mut wait, &engine) {
            return true;
        }
        stand_back = true;
        if wait.rest(Instant::now()).is_zero() {
            return (wait.done)();
        }
        if peer.in_bulk() && wait.spin() {
            return true;
        }
        (wait.register)(WakeHandle::Thread(thread::current()));
        worker.left_behind.fetch_add(1, Ordering::SeqCst);
        if worker.state.load(Ordering::SeqCst) == PARKED && !worker.driven_by_caller.load(Ordering::SeqCst) {
            worker.unpark();
        }
        if !(wait.done)() {
            let slept = Instant::now();
            thread::park_timeout(wait.rest(slept).min(PARK));
            stand_back = slept.elapsed() < PARK;
        }
        worker.left_behind.fetch_sub(1, Ordering::SeqCst);
    }
}

/// How long a caller looks before it sleeps while the threads work.
const BULK_SPIN: Duration = Duration::from_micros(200);
/// Longest a waiting caller sleeps before it looks again.
const PARK: Duration = Duration::from_millis(50);

/// Waiting in an endpoint without threads: the caller turns everything.
fn wait_driving(engine: &Engine, limit: Duration, mut done: impl FnMut() -> bool) -> bool {
    let until = engine.transport.now().saturating_add(limit);
    let mut quiet = 0u32;
    while !done() {
        if engine.transport.now() >= until {
            return done();
        }
        quiet = if engine.progress() { 0 } else { quiet + 1 };
        match quiet {
            0 => {}
            1..200 => thread::yield_now(),
            _ => thread::sleep(SPIN),
        }
    }
    true
}

/// Something was posted for this peer: sends it at once where that is best, else sees to it that
/// somebody will.
pub(crate) fn kick(peer: &Arc<PeerState>, bytes: u64) {
    let engine = peer.engine();
    let home = peer.home();
    // A caller that drives sends several small operations in one call, when it waits.
    let company = peer.in_flight_beside_one() && peer.queue.waiting() < DEFERRED_FRAMES_MAX;
    if company && bytes <= DEFERRED_BYTES_MAX && home.may_leave_behind() {
        return;
    }
    // Bulk is left to threads that keep to their cores.
    let bulk = bytes > SMALL_BYTES_MAX || peer.in_bulk();
    if peer.in_bulk() && !engine.caller_driven() {
        home.rouse();
    } else {
        match home.try_claim() {
            Some(mut claim) => claim.crank().send_for(home, engine, peer),
            None => home.rouse(),
        }
    }
    if bulk && peer.queue.has_work() {
        for worker in engine.workers.iter().filter(|worker| worker.index != home.index) {
            worker.rouse();
        }
    }
}

/// A caller asks after an operation without waiting: moves things on if the thread stands back.
pub(crate) fn nudge(peer: &Arc<PeerState>) {
    let engine = peer.engine();
    let home = peer.home();
    if matches!(home.state.load(Ordering::SeqCst), PARKED | NO_THREAD) {
        home.turn_once(engine);
    }
}

impl Crank {
    /// One turn: commands, what can be received, then, unless `done`, what can be sent.
    fn turn(&mut self, worker: &Worker, engine: &Engine, done: &mut dyn FnMut() -> bool) -> Turn {
        let mut worked = self.obey(worker, engine);
        worked |= self.receive(worker, engine);
        worked |= self.turn_lanes(worker, engine);
        if done() {
            return Turn::Done;
        }
        // While more comes in, acknowledgements that are not urgent wait for company.
        let quiet = !worked;
        worked |= self.send(worker, engine, quiet);
        if done() {
            return Turn::Done;
        }
        let now = engine.transport.now();
        if now.saturating_sub(self.last_check) >= limits::PATH_CHECK_INTERVAL {
            self.last_check = now;
            self.check_paths(worker, engine);
        }
        if worked { Turn::Worked } else { Turn::Idle }
    }

    fn obey(&mut self, worker: &Worker, engine: &Engine) -> bool {
        let mut worked = false;
        while let Some(command) = worker.commands.pop() {
            worked = true;
            match command {
                Command::Add(channel) => self.add(worker, engine, channel),
                Command::KeepToCore if worker.thread_alone() => worker.keep_to_core(engine),
                Command::KeepToCore => {}
                Command::Abandon(request) => {
                    self.abandoning.push((request, engine.transport.now()));
                    self.let_go(worker, engine);
                }
                Command::Drop { session, index, generation, why } => {
                    let place = self.slots.iter().position(|slot| {
                        slot.as_ref().is_some_and(|slot| {
                            let channel = &slot.channel;
                            channel.peer.session == session
                                && channel.index == index
                                && channel.generation == generation
                        })
                    });
                    if let Some(place) = place {
                        self.lose(worker, engine, place, why);
                    }
                }
            }
        }
        worked
    }

    /// Answers requests to let go of memory once no lane may write there any more. A channel whose lane
    /// does not come to an end with it is lost instead.
    fn let_go(&mut self, worker: &Worker, engine: &Engine) {
        let now = engine.transport.now();
        for (request, since) in std::mem::take(&mut self.abandoning) {
            let late = now.saturating_sub(since) > limits::LANE_ABANDON_DEADLINE;
            let mut busy = false;
            for place in 0..self.slots.len() {
                let Some(slot) = &mut self.slots[place] else { continue };
                let touched = slot.channel.abandon(&request.gone);
                if touched && late {
                    let why = "memory was taken back while a message was being received into it";
                    self.lose(worker, engine, place, why.into());
                } else if touched {
                    busy = true;
                } else {
                    slot.channel.forget_revoked();
                }
            }
            match busy {
                true => self.abandoning.push((request, since)),
                false => request.answered[worker.index].store(true, Ordering::Release),
            }
        }
    }

    /// Moves the lanes on; all of them at every turn, since nothing tells which has something.
    fn turn_lanes(&mut self, worker: &Worker, engine: &Engine) -> bool {
        if !worker.thread_only {
            return false;
        }
        let mut worked = false;
        for place in 0..self.slots.len() {
            let Some(slot) = &mut self.slots[place] else { continue };
            match slot.channel.turn_lane() {
                Ok(moved) => worked |= moved,
                Err(error) => {
                    self.fail(worker, engine, place, &error);
                    worked = true;
                }
            }
        }
        if !self.abandoning.is_empty() {
            self.let_go(worker, engine);
        }
        worked
    }

    fn lanes_active(&self) -> bool {
        !self.abandoning.is_empty() || self.slots.iter().flatten().any(|slot| slot.channel.lane_active())
    }

    fn add(&mut self, worker: &Worker, engine: &Engine, channel: Box<Channel>) {
        let place = self.slots.iter().position(Option::is_none).unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        let fd = channel.conn().fd();
        self.polled += usize::from(fd.is_none());
        self.slots[place] = Some(Slot { channel, waits_to_write: false, polled: fd.is_none() });
        if worker.thread_only {
            worker.lanes.fetch_add(1, Ordering::SeqCst);
            if engine.workers.iter().all(|each| each.lanes.load(Ordering::SeqCst) > 0) {
                engine.workers.iter().for_each(|each| each.command(Command::KeepToCore));
            }
        }
        if let Some(fd) = fd
            && let Err(error) = worker.poller.add(fd, place as u64, Interest::READ)
        {
            self.lose(worker, engine, place, error.to_string());
        }
    }

    fn lose(&mut self, worker: &Worker, engine: &Engine, place: usize, why: String) {
        let Some(mut slot) = self.slots[place].take() else {
            return;
        };
        worker.lanes.fetch_sub(usize::from(worker.thread_only), Ordering::SeqCst);
        if slot.channel.peer.skips_drain() {
            slot.channel.hand_over(&mut self.space);
        }
        match slot.channel.conn().fd() {
            Some(fd) => drop(worker.poller.remove(fd)),
            None => self.polled -= 1,
        }
        let (peer, index, generation) =
            (slot.channel.peer.clone(), slot.channel.index, slot.channel.generation);
        let remains = slot.channel.end();
        engine.lost(peer, index, generation, why, remains);
    }

    fn fail(&mut self, worker: &Worker, engine: &Engine, place: usize, error: &io::Error) {
        self.lose(worker, engine, place, error.to_string());
    }

    fn receive(&mut self, worker: &Worker, engine: &Engine) -> bool {
        if let Some(worked) = self.receive_hot(worker, engine) {
            return worked;
        }
        let mut worked = false;
        let mut ready = std::mem::take(&mut self.ready);
        if self.slots.len() > self.polled {
            if let Err(error) = worker.poller.wait(&mut ready, Some(Duration::ZERO)) {
                tracing::error!(%error, "looking at sockets failed");
            }
            for event in &ready {
                worked |= self.react(worker, engine, *event);
            }
        }
        self.ready = ready;
        if self.polled > 0 {
            for place in 0..self.slots.len() {
                if self.slots[place].as_ref().is_some_and(|slot| slot.polled) {
                    worked |= self.receive_at(worker, engine, place);
                }
            }
        }
        worked
    }

    /// Asks the channel that received last before asking the kernel about all: while messages go to and
    /// fro, that spares a system call. `None` when it is the others' turn.
    fn receive_hot(&mut self, worker: &Worker, engine: &Engine) -> Option<bool> {
        self.turns = self.turns.wrapping_add(1);
        let place = self.hot.filter(|_| !self.turns.is_multiple_of(HOT_TURNS))?;
        let slot = self.slots.get(place)?.as_ref()?;
        if slot.waits_to_write || slot.polled {
            return None;
        }
        match self.receive_at(worker, engine, place) {
            false if self.turns.is_multiple_of(2) => None,
            worked => Some(worked),
        }
    }

    fn react(&mut self, worker: &Worker, engine: &Engine, event: Ready) -> bool {
        if event.token == WAKE_TOKEN {
            return false;
        }
        let place = event.token as usize;
        let Some(Some(slot)) = self.slots.get_mut(place) else {
            return false;
        };
        if event.writable {
            slot.channel.unblock();
        }
        if event.error {
            slot.channel.let_go_held();
        }
        if event.readable || event.hangup || event.error {
            return self.receive_at(worker, engine, place);
        }
        true
    }

    fn receive_at(&mut self, worker: &Worker, engine: &Engine, place: usize) -> bool {
        let Some(slot) = &mut self.slots[place] else {
            return false;
        };
        match slot.channel.receive(&mut self.space) {
            Ok(bytes) => {
                self.moved += bytes as u64;
                if bytes > 0 {
                    self.hot = Some(place);
                }
                bytes > 0
            }
            Err(error) => {
                self.fail(worker, engine, place, &error);
                true
            }
        }
    }

    fn send(&mut self, worker: &Worker, engine: &Engine, flush: bool) -> bool {
        let mut worked = false;
        // Each turn begins with another channel: where they share what may be in flight, the first takes it.
        self.first = (self.first + 1).checked_rem(self.slots.len()).unwrap_or(0);
        for place in (self.first..self.slots.len()).chain(0..self.first) {
            worked |= self.send_at(worker, engine, place, flush);
        }
        worked
    }

    fn send_at(&mut self, worker: &Worker, engine: &Engine, place: usize, flush: bool) -> bool {
        let Some(slot) = &mut self.slots[place] else {
            return false;
        };
        if slot.polled {
            slot.channel.unblock();
        }
        match slot.channel.send(flush, &mut self.space) {
            Ok(bytes) => {
                slot.watch(worker, place);
                self.moved += bytes as u64;
                bytes > 0
            }
            Err(error) => {
                self.fail(worker, engine, place, &error);
                true
            }
        }
    }

    /// Sends what waits for one peer.
    fn send_for(&mut self, worker: &Worker, engine: &Engine, peer: &Arc<PeerState>) {
        for place in 0..self.slots.len() {
            if self.slots[place].as_ref().is_some_and(|slot| Arc::ptr_eq(&slot.channel.peer, peer)) {
                self.send_at(worker, engine, place, false);
            }
        }
    }

    fn check_paths(&mut self, worker: &Worker, engine: &Engine) {
        for place in 0..self.slots.len() {
            let Some(slot) = &mut self.slots[place] else {
                continue;
            };
            slot.channel.let_go_held();
            if !slot.channel.outstanding() && !slot.channel.blocked() {
                continue;
            }
            if let Some(why) = slot.channel.path_trouble() {
                self.lose(worker, engine, place, why);
            }
        }
    }

    /// Whether something waits that a socket will not tell us of.
    fn has_work(&self) -> bool {
        self.slots.iter().flatten().any(|slot| {
            let channel = &slot.channel;
            !channel.blocked() && channel.may_pull()
        })
    }

    fn acks_due(&self) -> bool {
        self.slots.iter().flatten().any(|slot| slot.channel.ack_due())
    }

    /// How long the owner may sleep without looking at anything.
    fn sleep_limit(&self) -> Option<Duration> {
        if self.polled > 0 {
            return Some(Duration::from_millis(1));
        }
        let outstanding = self.slots.iter().flatten().any(|slot| slot.channel.outstanding());
        outstanding.then_some(limits::PATH_CHECK_INTERVAL)
    }
}

impl Slot {
    /// Waits for room in the socket only while there is none.
    fn watch(&mut self, worker: &Worker, place: usize) {
        let blocked = self.channel.blocked();
        if blocked == self.waits_to_write {
            return;
        }
        let interest = if blocked { Interest::BOTH } else { Interest::READ };
        if let Some(fd) = self.channel.conn().fd()
            && let Err(error) = worker.poller.modify(fd, place as u64, interest)
        {
            tracing::error!(%error, "changing what to wait for failed");
        }
        self.waits_to_write = blocked;
    }
}

/// A request to all workers to let go of some memory, and which of them have answered.
pub(crate) struct Abandon {
    gone: Box<dyn Fn(&Landing) -> bool + Send + Sync>,
    answered: Box<[AtomicBool]>,
}

impl Abandon {
    /// The first worker that has not answered.
    fn missing(&self) -> Option<usize> {
        self.answered.iter().position(|answered| !answered.load(Ordering::Acquire))
    }
}

/// Makes every worker stop placing bytes where `gone` says; returns when none does any more.
///
/// # Errors
/// [`Error::HeldUp`] about `what` when a worker does not answer within `limits::ABANDON_DEADLINE`, or cannot
/// because a call of a plugin does not return.
pub(crate) fn abandon(
    engine: &Engine,
    what: impl FnOnce() -> String,
    gone: impl Fn(&Landing) -> bool + Send + Sync + 'static,
) -> Result<()> {
    let answered = engine.workers.iter().map(|_| AtomicBool::new(false)).collect();
    let request = Arc::new(Abandon { gone: Box::new(gone), answered });
    for worker in &engine.workers {
        worker.command(Command::Abandon(request.clone()));
    }
    let mut patience = Patience::new(limits::ABANDON_DEADLINE);
    let start = Instant::now();
    // Each worker answers at its next turn; whoever has no owner is turned from here.
    while let Some(missing) = request.missing() {
        let stuck = engine.workers[missing].stuck();
        if stuck || patience.is_over(start.elapsed()) {
            let why = if stuck { ", in a call of a plugin that has not returned" } else { "" };
            let (what, by) = (what(), format!("progress thread {missing}{why}"));
            return Err(Error::HeldUp { what, by, waited: patience.waited() });
        }
        for worker in &engine.workers {
            worker.turn_once(engine);
        }
        thread::yield_now();
    }
    Ok(())
}

/// Makes every worker let go of a span of memory.
pub(crate) fn abandon_memory(engine: &Engine, memory: &Arc<Memory>) -> Result<()> {
    let (what, memory) = (memory.describe(), memory.clone());
    abandon(engine, || what, move |landing| landing.is_in(&memory))
}
