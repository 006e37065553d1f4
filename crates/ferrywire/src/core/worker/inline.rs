//! Callers who drive: what a thread that posts or waits does about the worker itself.
//!
//! A caller claims the crank, turns it, and gives it back when its operation is done or it is better to let
//! the thread do it. Read next: `progress.rs`, what a turn is.

use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use super::progress::Turn;
use super::{Crank, Worker};
use crate::core::context::Context;
use crate::core::peer::PeerState;
use crate::core::sleeper::Activity;
use crate::core::waiting::WakeHandle;

/// How long a caller that polls inline spins without work before it sleeps in the kernel.
pub(crate) const SPIN: Duration = Duration::from_micros(50);
/// How long a waiting caller looks before it sleeps while the threads work.
const BULK_SPIN: Duration = Duration::from_micros(200);
/// Longest a caller spins for a crank that the thread is about to give up.
const CLAIM: Duration = Duration::from_millis(2);
/// Bytes that a waiting caller moves before it leaves the rest to the thread, which keeps to its core.
const DRIVE_BYTES: u64 = 4 << 20;
impl Worker {
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
            if self.sleeper.driven_by_caller.load(Ordering::SeqCst) || start.elapsed() > CLAIM {
                break None;
            }
            thread::yield_now();
        };
        self.wanted.fetch_sub(1, Ordering::SeqCst);
        crank.map(|crank| self.claimed(crank))
    }

    fn claimed<'a>(&'a self, crank: MutexGuard<'a, Crank>) -> Claim<'a> {
        self.sleeper.driven_by_caller.store(true, Ordering::SeqCst);
        self.drives.fetch_add(1, Ordering::SeqCst);
        Claim { worker: self, crank: Some(crank) }
    }

    /// Sends what waits for one peer, if no other thread polls this worker; false if one does, or no caller may.
    pub fn send_at_once(&self, context: &Context, peer: &Arc<PeerState>) -> bool {
        let Some(mut claim) = self.try_claim() else { return false };
        claim.crank().send_for(self, context, peer);
        true
    }

    fn try_claim(&self) -> Option<Claim<'_>> {
        if self.thread_alone() {
            return None;
        }
        self.try_crank().map(|crank| self.claimed(crank))
    }

    /// Turns the crank once, if nobody else does; true if anything moved, or a GPU is at work for it.
    pub fn poll_once(&self, context: &Context) -> bool {
        match self.try_claim() {
            Some(mut claim) => {
                let crank = claim.crank();
                let worked = crank.turn(self, context, &mut || false) == Turn::Worked;
                worked || (crank.staging_active() && leave_the_core())
            }
            None => false,
        }
    }

    /// Drives until `done`, or until it is better to let the thread do it. True when done.
    pub fn drive(&self, wait: &mut Wait<'_>, context: &Context) -> bool {
        let Some(mut claim) = self.claim() else {
            return false;
        };
        let mut idle_since: Option<Instant> = None;
        let bulk = claim.crank().moved.saturating_add(DRIVE_BYTES);
        loop {
            match claim.crank().turn(self, context, wait.done) {
                Turn::Done => return true,
                Turn::Worked if claim.crank().moved > bulk => return false,
                Turn::Worked => {
                    idle_since = None;
                    continue;
                }
                Turn::Idle => {}
            }
            if self.thread_alone() {
                // It has got a lane meanwhile.
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
            // Each time: a wake that was for nothing has taken us off the list.
            (wait.register)(WakeHandle::Owner(self.sleeper.clone()));
            self.sleep_as_owner(claim.crank(), wait, rest);
            idle_since = None;
        }
    }

    fn sleep_as_owner(&self, crank: &mut Crank, wait: &mut Wait<'_>, rest: Duration) {
        self.sleeper.owner_asleep.store(true, Ordering::SeqCst);
        if !crank.has_work() && !self.has_commands() && !(wait.done)() {
            let limit = crank.sleep_limit().map_or(rest, |limit| limit.min(rest));
            let mut ready = std::mem::take(&mut crank.ready);
            if let Err(error) = self.poller.wait(&mut ready, Some(limit)) {
                tracing::error!(%error, "waiting for sockets failed");
            }
            crank.ready = ready;
        }
        self.sleeper.owner_asleep.store(false, Ordering::SeqCst);
    }
}

/// Lets whatever copies have the core for a moment.
fn leave_the_core() -> bool {
    thread::yield_now();
    true
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
        let left =
            |crank: &MutexGuard<'_, Crank>| crank.has_work() || crank.acks_due() || crank.staging_active();
        let left = self.crank.as_ref().is_some_and(left);
        let worker = self.worker;
        let sleeper = &worker.sleeper;
        sleeper.driven_by_caller.store(false, Ordering::SeqCst);
        self.crank = None;
        let activity = sleeper.activity();
        // What was polled here may have been the thread's wake, and the thread sleeps on.
        let stop = worker.stop.load(Ordering::SeqCst);
        if activity == Activity::InPoll && (stop || left || worker.has_commands()) {
            sleeper.wake();
        }
        let long_park = sleeper.long_park.load(Ordering::SeqCst);
        // Nobody else looks at the sockets until the thread's pause is over, which is long if this caller slept.
        if activity == Activity::Parked && (sleeper.has_passive_waiters() || long_park) {
            sleeper.unpark();
        }
    }
}

/// A caller that waits, until when, and for what.
pub(crate) struct Wait<'a> {
    pub until: Instant,
    /// Puts the caller on the lists of what it waits for.
    pub register: &'a mut dyn FnMut(WakeHandle),
    pub done: &'a mut dyn FnMut() -> bool,
}

impl Wait<'_> {
    pub fn rest(&self, now: Instant) -> Duration {
        self.until.saturating_duration_since(now)
    }

    /// Looks again and again for a moment, whenever the threads leave time for it; true when done. While many
    /// operations are in flight the next one is done soon, and to be woken for each costs the threads more.
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
    use crate::core::worker::{LostChannels, TurnedBy};

    /// Such as one for a notification that is here before its bytes, which another worker's channels bring.
    #[test]
    fn a_caller_that_was_woken_for_nothing_is_woken_again() {
        let endpoint = crate::Endpoint::builder().threads(1).build().unwrap();
        let running = endpoint.running().clone();
        let spin = ferrywire_proto::schedule::spin(1, 1);
        let lost = Arc::new(LostChannels::new(running.context().control_waker()));
        let worker = Arc::new(Worker::new(0, false, TurnedBy::All, spin, lost).unwrap());
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
