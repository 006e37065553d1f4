//! The copy engine of a simulated GPU: one thread that does the work of all its streams.
//!
//! A stream is a *queue* of items in order (a `Queue` in this file). Only the first item may run, once the one before it has
//! ended and it is due: its delay is over and the event it waits for is done. Queues with a due item are served round robin,
//! so a blocked queue does not block others.
//!
//! ```text
//! item: enqueued -> first -> due -> running -> finished     (a failure abandons all items behind it)
//! ```
//!
//! Invariant: an item accesses memory only while its queue is `running`; after [`Engine::remove`] no item of
//! that queue accesses any.
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
    /// Signalled when an item of a queue may be ready to run.
    work: Condvar,
    /// Signalled when an item has ended.
    ended: Condvar,
    /// The moment from which the times for [`Engine::run_due`] are counted.
    epoch: Instant,
}

struct State {
    queues: BTreeMap<u64, Queue>,
    next_queue: u64,
    /// The queue that ran last; the search for the next one starts behind it.
    last: u64,
    injector: Injector,
    stopping: bool,
    /// Whether callers of [`Engine::run_due`] run the items; the engine's thread then runs none.
    stepped: bool,
}

#[derive(Default)]
struct Queue {
    items: VecDeque<Item>,
    /// When the queue's first item may run; set when the item becomes the first.
    due: Option<Instant>,
    running: bool,
    failed: Option<SimGpuError>,
}

struct Item {
    work: Work,
    fate: Fate,
}

/// The next action of the engine's thread.
enum Turn {
    Run(u64, Item),
    WaitUntil(Instant),
    Wait,
}

impl Engine {
    pub fn new(gpu: u32, faults: SimFaults) -> Engine {
        let injector = Injector::new(gpu, faults);
        let state = State {
            queues: BTreeMap::new(),
            next_queue: 0,
            last: 0,
            injector,
            stopping: false,
            stepped: false,
        };
        let (work, ended) = (Condvar::new(), Condvar::new());
        Engine { gpu, state: Mutex::new(state), work, ended, epoch: Instant::now() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Body of the engine's thread; returns after [`Engine::stop`].
    pub fn run(&self) {
        let mut state = self.lock();
        while !state.stopping {
            let turn = if state.stepped { Turn::Wait } else { state.turn(Instant::now()) };
            state = match turn {
                Turn::Run(queue, item) => {
                    drop(state);
                    self.run_one(queue, item);
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

    /// Leaves all items to callers of [`Engine::run_due`]; the engine's thread runs none from now on.
    pub fn step(&self) {
        self.lock().stepped = true;
    }

    /// Runs the items that are due at this time on this thread. Returns whether it ran any.
    pub fn run_due(&self, now: Duration) -> bool {
        let now = self.epoch + now;
        let mut ran = false;
        loop {
            let turn = self.lock().turn(now);
            let Turn::Run(queue, item) = turn else { return ran };
            self.run_one(queue, item);
            ran = true;
        }
    }

    /// Runs the first item of a queue, as if its delay and a stall were over. Returns false if the queue has
    /// no item, or the item waits.
    fn run_first(&self, mut state: MutexGuard<'_, State>, queue: u64) -> bool {
        let first = state.queues.get_mut(&queue).filter(|each| each.is_ready());
        let Some(item) = first.and_then(Queue::take) else { return false };
        drop(state);
        self.run_one(queue, item);
        true
    }

    fn run_one(&self, queue: u64, item: Item) {
        let outcome = match item.fate.failure {
            Some(failure) => Err(failure),
            None => item.work.run(),
        };
        let mut given_up = VecDeque::new();
        if let Some(queue) = self.lock().queues.get_mut(&queue) {
            queue.running = false;
            if let Err(cause) = &outcome {
                queue.failed.get_or_insert(cause.clone());
                given_up = std::mem::take(&mut queue.items);
            }
        }
        if let Err(cause) = outcome {
            item.work.give_up(&cause);
            given_up.iter().for_each(|item| item.work.give_up(&cause));
        }
        self.ended.notify_all();
    }

    /// Ends the engine's thread; call this when no queue exists any more.
    pub fn stop(&self) {
        self.lock().stopping = true;
        self.work.notify_all();
    }

    /// Whether an item of any queue is enqueued or runs.
    pub fn has_work(&self) -> bool {
        self.lock().queues.values().any(|queue| queue.running || !queue.items.is_empty())
    }

    /// Makes the engine's thread check its queues again: an event may have completed.
    pub fn wake(&self) {
        // After this lock, a thread that has just checked its queues is waiting and receives the signal.
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

    // ---- queues ----

    pub fn add(&self) -> u64 {
        let mut state = self.lock();
        let queue = state.next_queue;
        state.next_queue += 1;
        state.queues.insert(queue, Queue::default());
        queue
    }

    /// Drops the items of a queue that have not started, and waits for the item that runs.
    pub fn remove(&self, queue: u64) {
        let mut state = self.lock();
        let items = state.queues.get_mut(&queue).map(|queue| std::mem::take(&mut queue.items));
        while state.queues.get(&queue).is_some_and(|queue| queue.running) {
            state = self.ended.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.queues.remove(&queue);
        drop(state);
        let cause = SimGpuError::StreamDropped { gpu: self.gpu };
        items.iter().flatten().for_each(|item| item.work.give_up(&cause));
    }

    pub fn enqueue(&self, queue: u64, work: Work) -> Result<()> {
        let mut state = self.lock();
        let State { queues, injector, .. } = &mut *state;
        let queue = queues.get_mut(&queue).ok_or(SimGpuError::StreamDropped { gpu: self.gpu })?;
        if let Some(cause) = &queue.failed {
            return Err(cause.clone());
        }
        let fate =
            if work.is_operation() { injector.draw() } else { Fate { delay: Duration::ZERO, failure: None } };
        queue.items.push_back(Item { work, fate });
        drop(state);
        self.work.notify_all();
        Ok(())
    }

    /// Whether the queue is empty and none of its items runs.
    pub fn query(&self, queue: u64) -> Result<bool> {
        self.lock().queues.get(&queue).map_or(Ok(true), Queue::query)
    }

    pub fn wait(&self, queue: u64, timeout: Duration) -> Result<()> {
        let until = Instant::now() + timeout;
        let mut state = self.lock();
        while !state.queues.get(&queue).map_or(Ok(true), Queue::query)? {
            let is_running = state.queues.get(&queue).is_some_and(|queue| queue.running);
            if state.stepped && !is_running {
                if !self.run_first(state, queue) {
                    return Err(SimGpuError::TimedOut { gpu: self.gpu, what: "a stream", waited: timeout });
                }
                state = self.lock();
                continue;
            }
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
    /// Chooses the next queue to serve, starting behind the one that ran last.
    fn turn(&mut self, now: Instant) -> Turn {
        if self.injector.faults.stall {
            return Turn::Wait;
        }
        let mut soonest: Option<Instant> = None;
        let (before, behind): (Vec<u64>, Vec<u64>) =
            self.queues.keys().partition(|queue| **queue <= self.last);
        for key in behind.into_iter().chain(before) {
            let Some(queue) = self.queues.get_mut(&key) else { continue };
            match queue.due(now) {
                Some(due) if due <= now => {
                    self.last = key;
                    if let Some(item) = queue.take() {
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

impl Queue {
    /// When the queue's first item may run; `None` without an item, or while the item waits for an event.
    fn due(&mut self, now: Instant) -> Option<Instant> {
        if !self.is_ready() {
            return None;
        }
        let head = self.items.front()?;
        Some(*self.due.get_or_insert(now + head.fate.delay))
    }

    /// Whether the queue has a first item that waits for no event, nor for the item before it, which another caller may run.
    fn is_ready(&self) -> bool {
        let waits = |item: &Item| matches!(&item.work, Work::WaitFor(mark) if mark.outcome().is_none());
        !self.running && self.items.front().is_some_and(|item| !waits(item))
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
