//! Inline progress: a caller that posts or waits polls the worker's channels itself.
//!
//! A caller claims the progress engine and polls it. It gives the engine back when its operation is done or
//! the worker's thread does better.
//!
//! Invariant: a claim gives the engine back when it is dropped, and wakes the worker's thread if work is
//! left.
//! Read next: `engine.rs`, one pass.

use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use super::engine::Polled;
use super::{ProgressEngine, Worker};
use crate::core::context::Context;
use crate::core::peer::PeerState;
use crate::core::sleeper::Activity;
use crate::core::waiting::WakeHandle;

/// How long a caller that polls inline spins without work before it sleeps in the kernel.
pub(crate) const SPIN: Duration = Duration::from_micros(50);
/// How long a waiting caller spins before it sleeps, while the worker threads make progress.
const BULK_SPIN: Duration = Duration::from_micros(200);
/// Longest time a caller spins for an engine that the thread is about to give up.
const CLAIM: Duration = Duration::from_millis(2);
/// Bytes that a waiting caller moves before it hands the rest to the thread, which is pinned to a core.
const DRIVE_BYTES: u64 = 4 << 20;
impl Worker {
    /// Claims the progress engine for a caller. `None` if another caller has it, or only the thread may poll.
    fn claim(&self) -> Option<Claim<'_>> {
        if self.thread_alone() {
            return None;
        }
        self.wanted.fetch_add(1, Ordering::SeqCst);
        let start = Instant::now();
        let engine = loop {
            if let Some(engine) = self.try_engine() {
                break Some(engine);
            }
            if self.sleeper.is_driven() || start.elapsed() > CLAIM {
                break None;
            }
            thread::yield_now();
        };
        self.wanted.fetch_sub(1, Ordering::SeqCst);
        engine.map(|engine| self.claimed(engine))
    }

    fn claimed<'a>(&'a self, engine: MutexGuard<'a, ProgressEngine>) -> Claim<'a> {
        self.sleeper.begin_drive();
        self.drives.fetch_add(1, Ordering::SeqCst);
        Claim { worker: self, engine: Some(engine) }
    }

    /// Sends the queued frames of one peer. False if another thread polls this worker, or only its own thread
    /// may.
    pub fn send_at_once(&self, context: &Context, peer: &Arc<PeerState>) -> bool {
        let Some(mut claim) = self.try_claim() else { return false };
        claim.engine().send_for(self, context, peer);
        true
    }

    fn try_claim(&self) -> Option<Claim<'_>> {
        if self.thread_alone() {
            return None;
        }
        self.try_engine().map(|engine| self.claimed(engine))
    }

    /// Makes one pass unless another thread polls this worker. True if bytes moved or a GPU is copying for a
    /// channel.
    pub fn poll_once(&self, context: &Context) -> bool {
        match self.try_claim() {
            Some(mut claim) => {
                let engine = claim.engine();
                let worked = engine.poll_once(self, context, &mut || false) == Polled::Worked;
                worked || (engine.staging_active() && leave_the_core())
            }
            None => false,
        }
    }

    /// Polls until `done` returns true, or until the worker's thread does better. Returns whether it is done.
    pub fn drive(&self, wait: &mut Wait<'_>, context: &Context) -> bool {
        let Some(mut claim) = self.claim() else {
            return false;
        };
        let mut idle_since: Option<Instant> = None;
        let bulk = claim.engine().moved.saturating_add(DRIVE_BYTES);
        loop {
            match claim.engine().poll_once(self, context, wait.done) {
                Polled::Done => return true,
                Polled::Worked if claim.engine().moved > bulk => return false,
                Polled::Worked => {
                    idle_since = None;
                    continue;
                }
                Polled::Idle => {}
            }
            if self.thread_alone() {
                // A lane was added meanwhile: only the thread polls lanes.
                return false;
            }
            let now = Instant::now();
            if now.duration_since(*idle_since.get_or_insert(now)) < SPIN {
                thread::yield_now();
                continue;
            }
            let rest = wait.rest(now);
            if rest.is_zero() || self.sleeper.activity() == Activity::InPoll {
                return false;
            }
            // Register before each sleep: a wake-up takes the caller off the lists, even a spurious one.
            (wait.register)(WakeHandle::Owner(self.sleeper.clone()));
            self.sleep_as_owner(claim.engine(), wait, rest);
            idle_since = None;
        }
    }

    fn sleep_as_owner(&self, engine: &mut ProgressEngine, wait: &mut Wait<'_>, rest: Duration) {
        let has_work =
            |engine: &&mut ProgressEngine| engine.has_work() || self.has_commands() || (wait.done)();
        self.sleeper.sleep_as_owner(engine, has_work, |engine| {
            let limit = engine.sleep_limit().map_or(rest, |limit| limit.min(rest));
            let mut ready = std::mem::take(&mut engine.ready);
            if let Err(error) = self.poller.wait(&mut ready, Some(limit)) {
                tracing::error!(%error, "polling sockets failed");
            }
            engine.ready = ready;
        });
    }
}

/// Yields the core to other threads, which may be making the copies.
fn leave_the_core() -> bool {
    thread::yield_now();
    true
}

/// The progress engine, held by a caller.
struct Claim<'a> {
    worker: &'a Worker,
    engine: Option<MutexGuard<'a, ProgressEngine>>,
}

impl Claim<'_> {
    fn engine(&mut self) -> &mut ProgressEngine {
        match &mut self.engine {
            Some(engine) => engine,
            None => unreachable!("a claim holds the engine until it is dropped"),
        }
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let Some(engine) = self.engine.take() else { return };
        let worker = self.worker;
        let left = |engine: &MutexGuard<'_, ProgressEngine>| {
            engine.has_work() || engine.acks_due() || engine.staging_active()
        };
        let is_asked = || worker.stop.load(Ordering::SeqCst) || worker.has_commands();
        worker.sleeper.end_drive(engine, left, is_asked);
    }
}

/// A waiting caller: until when it waits, and for what.
pub(crate) struct Wait<'a> {
    pub until: Instant,
    /// Puts the caller on the wait lists of what it waits for.
    pub register: &'a mut dyn FnMut(WakeHandle),
    pub done: &'a mut dyn FnMut() -> bool,
}

impl Wait<'_> {
    pub fn rest(&self, now: Instant) -> Duration {
        self.until.saturating_duration_since(now)
    }

    /// Spins with yields for up to [`BULK_SPIN`]. Returns whether it is done. With many operations in flight
    /// the next one finishes soon, and waking a sleeping caller for each costs the worker threads more.
    pub fn spin(&mut self) -> bool {
        let start = Instant::now();
        let limit = self.rest(start).min(BULK_SPIN);
        while start.elapsed() < limit {
            thread::yield_now();
            if (self.done)() {
                return true;
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::worker::{LostChannels, PolledBy};

    /// Example: a notification has arrived before its bytes, which another worker's channels receive.
    #[test]
    fn a_caller_that_was_woken_for_nothing_is_woken_again() {
        let endpoint = crate::Endpoint::builder().threads(1).build().unwrap();
        let running = endpoint.running().clone();
        let spin = ferrywire_proto::schedule::spin(1, 1);
        let lost = Arc::new(LostChannels::new(running.context().control_waker()));
        let worker = Arc::new(Worker::new(0, false, PolledBy::All, spin, lost).unwrap());
        let asked = std::cell::Cell::new(0);
        let mut wait = Wait {
            until: Instant::now() + Duration::from_secs(60),
            register: &mut |handle| {
                asked.set(asked.get() + 1);
                worker.sleeper.owner_asleep.store(true, Ordering::SeqCst);
                handle.wake();
            },
            done: &mut || asked.get() > 2,
        };
        assert!(worker.drive(&mut wait, running.context()), "it slept through");
    }
}
