//! The copy engine of a simulated GPU: one thread that does the work of all its streams.
//!
//! A stream is a *lane*: items in order, of which only the head may run, once it is due (its delay is
//! over, the event it waits for is done). Lanes with a head that is due take turns, so a lane that is
//! held up does not hold up others.
//!
//! ```text
//!   lane: enqueued -> head -> due -> running -> finished     (a failure: all behind it are given up)
//! ```
//!
//! Invariant: an item touches memory only while its lane is `running`; once [`Engine::remove`] returns,
//! nothing of that lane ever will again.
//! Read next: `work.rs`.

use super::faults::{Fate, Injector, SimFaults};
use super::work::Work;
use super::{Result, SimGpuError};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

pub(super) struct Engine {
    gpu: u32,
    state: Mutex<State>,
    /// There may be something to do.
    work: Condvar,
    /// An item has ended.
    ended: Condvar,
}

struct State {
    lanes: BTreeMap<u64, Lane>,
    next_lane: u64,
    /// The lane that ran last; the next one has its turn.
    last: u64,
    injector: Injector,
    stopping: bool,
}

#[derive(Default)]
struct Lane {
    items: VecDeque<Item>,
    /// When the head may run, from the moment it became the head.
    due: Option<Instant>,
    running: bool,
    failed: Option<SimGpuError>,
}

struct Item {
    work: Work,
    fate: Fate,
}

/// What the thread does next.
enum Turn {
    Run(u64, Item),
    WaitUntil(Instant),
    Wait,
}

impl Engine {
    pub fn new(gpu: u32, faults: SimFaults) -> Engine {
        let injector = Injector::new(gpu, faults);
        let state = State { lanes: BTreeMap::new(), next_lane: 0, last: 0, injector, stopping: false };
        Engine { gpu, state: Mutex::new(state), work: Condvar::new(), ended: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The device's thread, until [`Engine::stop`].
    pub fn run(&self) {
        let mut state = self.lock();
        while !state.stopping {
            state = match state.turn(Instant::now()) {
                Turn::Run(lane, item) => {
                    drop(state);
                    self.run_one(lane, item);
                    self.lock()
                }
                Turn::WaitUntil(due) => {
                    let left = due.saturating_duration_since(Instant::now());
                    self.work.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
                }
                Turn::Wait => self.work.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    fn run_one(&self, lane: u64, item: Item) {
        let outcome = match item.fate.failure {
            Some(failure) => Err(failure),
            None => item.work.run(),
        };
        let mut given_up = VecDeque::new();
        if let Some(lane) = self.lock().lanes.get_mut(&lane) {
            lane.running = false;
            if let Err(cause) = &outcome {
                lane.failed.get_or_insert(cause.clone());
                given_up = std::mem::take(&mut lane.items);
            }
        }
        if let Err(cause) = outcome {
            item.work.give_up(&cause);
            given_up.iter().for_each(|item| item.work.give_up(&cause));
        }
        self.ended.notify_all();
    }

    /// Ends the thread; there are no lanes any more.
    pub fn stop(&self) {
        self.lock().stopping = true;
        self.work.notify_all();
    }

    /// Something that a lane waits for may have happened.
    pub fn wake(&self) {
        // Whoever has just looked and is about to wait is waiting once this is locked.
        drop(self.lock());
        self.work.notify_all();
    }

    pub fn faults(&self) -> SimFaults {
        self.lock().injector.faults.clone()
    }

    pub fn set_faults(&self, faults: SimFaults) {
        self.lock().injector = Injector::new(self.gpu, faults);
        self.work.notify_all();
    }

    pub fn set_stall(&self, stall: bool) {
        self.lock().injector.faults.stall = stall;
        self.work.notify_all();
    }

    // ---- lanes ----

    pub fn add(&self) -> u64 {
        let mut state = self.lock();
        let lane = state.next_lane;
        state.next_lane += 1;
        state.lanes.insert(lane, Lane::default());
        lane
    }

    /// Drops what has not begun, and returns when what has begun is done.
    pub fn remove(&self, lane: u64) {
        let mut state = self.lock();
        let items = state.lanes.get_mut(&lane).map(|lane| std::mem::take(&mut lane.items));
        while state.lanes.get(&lane).is_some_and(|lane| lane.running) {
            state = self.ended.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.lanes.remove(&lane);
        drop(state);
        let cause = SimGpuError::StreamDropped { gpu: self.gpu };
        items.iter().flatten().for_each(|item| item.work.give_up(&cause));
    }

    pub fn enqueue(&self, lane: u64, work: Work) -> Result<()> {
        let mut state = self.lock();
        let State { lanes, injector, .. } = &mut *state;
        let lane = lanes.get_mut(&lane).ok_or(SimGpuError::StreamDropped { gpu: self.gpu })?;
        if let Some(cause) = &lane.failed {
            return Err(cause.clone());
        }
        let fate = match work.is_operation() {
            true => injector.draw(),
            false => Fate { delay: Duration::ZERO, failure: None },
        };
        lane.items.push_back(Item { work, fate });
        drop(state);
        self.work.notify_all();
        Ok(())
    }

    /// Whether the lane is empty and nothing of it runs.
    pub fn query(&self, lane: u64) -> Result<bool> {
        self.lock().lanes.get(&lane).map_or(Ok(true), Lane::query)
    }

    pub fn wait(&self, lane: u64, timeout: Duration) -> Result<()> {
        let until = Instant::now() + timeout;
        let mut state = self.lock();
        while !state.lanes.get(&lane).map_or(Ok(true), Lane::query)? {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(SimGpuError::TimedOut { gpu: self.gpu, what: "a stream", waited: timeout });
            }
            state = self.ended.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }
}

impl State {
    /// Chooses among the lanes, beginning behind the one that ran last.
    fn turn(&mut self, now: Instant) -> Turn {
        if self.injector.faults.stall {
            return Turn::Wait;
        }
        let mut soonest: Option<Instant> = None;
        let (before, behind): (Vec<u64>, Vec<u64>) = self.lanes.keys().partition(|lane| **lane <= self.last);
        for key in behind.into_iter().chain(before) {
            let Some(lane) = self.lanes.get_mut(&key) else { continue };
            match lane.due(now) {
                Some(due) if due <= now => {
                    self.last = key;
                    if let Some(item) = lane.take() {
                        return Turn::Run(key, item);
                    }
                }
                Some(due) => soonest = Some(soonest.map_or(due, |other| other.min(due))),
                None => {}
            }
        }
        soonest.map_or(Turn::Wait, Turn::WaitUntil)
    }
}

impl Lane {
    /// When the head may run; nothing if there is none, or if that depends on somebody else.
    fn due(&mut self, now: Instant) -> Option<Instant> {
        let head = self.items.front()?;
        match &head.work {
            Work::WaitFor(mark) if mark.outcome().is_none() => None,
            _ => Some(*self.due.get_or_insert(now + head.fate.delay)),
        }
    }

    fn take(&mut self) -> Option<Item> {
        self.due = None;
        let item = self.items.pop_front()?;
        self.running = true;
        Some(item)
    }

    fn query(&self) -> Result<bool> {
        match &self.failed {
            Some(cause) => Err(cause.clone()),
            None => Ok(self.items.is_empty() && !self.running),
        }
    }
}
