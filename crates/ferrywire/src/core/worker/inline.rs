//! Callers who drive: what a thread that posts or waits does about the worker itself.
//!
//! A caller claims the crank, turns it, and gives it back when its operation is done or it is better to let
//! the thread do it. Read next: `progress.rs`, what a turn is.

use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use super::progress::Turn;
use super::{Crank, IN_POLL, NO_THREAD, PARKED, SPIN, WakeHandle, Worker};
use crate::core::context::Engine;
use crate::core::peer::PeerState;
use crate::core::queue::SMALL_BYTES_MAX;
use ferrywire_proto::wire::HEADER_BYTES;

/// Longest a caller spins for a crank that the thread is about to give up.
const CLAIM: Duration = Duration::from_millis(2);
/// Bytes that a waiting caller moves before it leaves the rest to the thread, which keeps to its core.
const DRIVE_BYTES: u64 = 4 << 20;
/// Operations that may wait for the driving caller are at most this long.
const DEFERRED_BYTES_MAX: u64 = 4 << 10;
/// Frames that may wait so before they are sent at once: as many as the kernel puts into one packet. One more,
/// and each call makes a second packet with next to nothing in it, which costs as much as the first.
const DEFERRED_FRAMES_MAX: usize = 15;
/// The least that it puts into one: whole segments within 64 KiB, seven of them at an MTU of 9000.
const PACKET_BYTES: usize = 7 * 8948;
/// While so many are sent and not ended, the peer has something to do until a call of two packets is made.
const SENT_FOR_TWO: u64 = 2 * DEFERRED_FRAMES_MAX as u64;

const _: () = assert!(DEFERRED_FRAMES_MAX * (DEFERRED_BYTES_MAX as usize + HEADER_BYTES) <= PACKET_BYTES);

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

    /// Turns the crank once, if nobody else does; true if anything moved, or a GPU is at work for it.
    pub fn turn_once(&self, engine: &Engine) -> bool {
        match self.try_claim() {
            Some(mut claim) => {
                let crank = claim.crank();
                let worked = crank.turn(self, engine, &mut || false) == Turn::Worked;
                worked || (crank.staging_active() && leave_the_core())
            }
            None => false,
        }
    }

    /// Drives until `done`, or until it is better to let the thread do it. True when done.
    fn drive(self: &Arc<Worker>, wait: &mut Wait<'_>, engine: &Engine) -> bool {
        let Some(mut claim) = self.claim() else {
            return false;
        };
        let mut idle_since: Option<Instant> = None;
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
            if rest.is_zero() || self.state.load(Ordering::SeqCst) == IN_POLL {
                return false;
            }
            // Each time: a wake that was for nothing has taken us off the list.
            (wait.register)(WakeHandle::Owner(self.clone()));
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
        worker.driven_by_caller.store(false, Ordering::SeqCst);
        self.crank = None;
        let state = worker.state.load(Ordering::SeqCst);
        // What was polled here may have been the thread's wake, and the thread sleeps on.
        let stop = worker.stop.load(Ordering::SeqCst);
        if state == IN_POLL && (stop || left || !worker.commands.is_empty()) {
            worker.waker.wake();
        }
        let long_park = worker.long_park.load(Ordering::SeqCst);
        // Nobody else looks at the sockets until the thread's pause is over, which is long if this caller slept.
        if state == PARKED && (worker.left_behind.load(Ordering::SeqCst) > 0 || long_park) {
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

/// Waits until `done`, driving the peer's home worker where possible. False when the time is up.
///
/// `register` puts the caller on the lists of what it waits for, and `forget` takes it off again: nobody may ever wake them,
/// while more and more threads wait in vain.
pub(crate) fn wait(
    peer: &Arc<PeerState>,
    limit: Duration,
    mut register: impl FnMut(WakeHandle),
    forget: impl FnOnce(&WakeHandle),
    done: impl FnMut() -> bool,
) -> bool {
    let mut listed = false;
    let register = |handle| {
        // Of workers there are few, and another caller may drive the same one by now.
        listed |= matches!(handle, WakeHandle::Thread(_));
        register(handle);
    };
    let is_done = wait_listed(peer, limit, register, done);
    if listed {
        forget(&WakeHandle::Thread(thread::current()));
    }
    is_done
}

fn wait_listed(
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
    let mut lively = true;
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
        if lively && peer.in_bulk() && wait.spin() {
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
            // Slept out, nothing moves: a receive that nobody matches is in bulk for ever.
            lively = slept.elapsed() < PARK;
            stand_back = lively;
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
    if limit.is_zero() && !done() {
        // Who asks again and again without waiting is the only one who drives.
        engine.progress();
    }
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
    let waiting = peer.queue.waiting();
    let company = waiting < frames_in_company(peer.in_flight_beside_one(), waiting);
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
            None => {
                home.rouse();
            }
        }
    }
    if bulk && peer.queue.has_work() {
        // The others have no channel of this peer.
        let count = engine.workers.len().min(peer.channels()).max(1);
        let mut left = bytes.div_ceil(ROUSE_BYTES);
        // With each operation it begins at another one.
        let first = peer.rouse_first.fetch_add(1, Ordering::Relaxed);
        for step in 0..count {
            let worker = &engine.workers[(first.wrapping_add(step)) % count];
            if left == 0 {
                break;
            }
            left -= u64::from(worker.index != home.index && worker.rouse());
        }
    }
}

/// Bytes of bulk for which one more thread is roused: to rouse a thread that sleeps costs the caller microseconds, as
/// much as to send so many.
const ROUSE_BYTES: u64 = 256 << 10;

/// Frames that a call to the socket waits for, with so many operations in flight beside the one just posted, and so
/// many frames waiting.
fn frames_in_company(in_flight: u64, waiting: usize) -> usize {
    match in_flight {
        0 => 0,
        _ if in_flight.saturating_sub(waiting as u64) < SENT_FOR_TWO => DEFERRED_FRAMES_MAX,
        _ => 2 * DEFERRED_FRAMES_MAX,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::worker::TurnedBy;

    /// Such as one for a notification that is here before its bytes, which another worker's channels bring.
    #[test]
    fn a_caller_that_was_woken_for_nothing_is_woken_again() {
        let endpoint = crate::Endpoint::builder().threads(1).build().unwrap();
        let engine = endpoint.downgrade().upgrade().unwrap();
        let worker =
            Arc::new(Worker::new(0, false, TurnedBy::All, ferrywire_proto::schedule::spin(1, 1)).unwrap());
        let asked = std::cell::Cell::new(0);
        let mut wait = Wait {
            until: Instant::now() + Duration::from_secs(60),
            register: &mut |handle| {
                asked.set(asked.get() + 1);
                worker.owner_asleep.store(true, Ordering::SeqCst);
                handle.wake();
            },
            done: &mut || asked.get() > 2,
        };
        assert!(worker.drive(&mut wait, &engine), "it slept through");
    }

    #[test]
    fn an_operation_alone_goes_at_once_and_many_go_in_whole_packets() {
        assert_eq!(frames_in_company(0, 1), 0);
        let frame = DEFERRED_BYTES_MAX as usize + HEADER_BYTES;
        for in_flight in [1, 15, 31, 63, 1000] {
            for waiting in [1, 14, 29] {
                let frames = frames_in_company(in_flight, waiting);
                let packets = (frames * frame).div_ceil(PACKET_BYTES);
                assert!(packets * PACKET_BYTES - frames * frame < frame, "{in_flight}: packets are not full");
                let sent = in_flight.saturating_sub(waiting as u64);
                assert!(
                    packets == 1 || sent as usize >= frames,
                    "{in_flight}: the peer has too little to do"
                );
            }
        }
    }
}
