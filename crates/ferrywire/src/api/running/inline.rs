//! Callers that post and that wait: who moves the bytes meanwhile.
//!
//! A caller that posts a small operation to a worker that is idle sends it at once; bulk is left to the threads. A caller that
//! waits polls its peer's worker inline, unless bulk is in flight, and sleeps otherwise.
//!
//! Read next: `../../core/worker/inline.rs`, one worker in a caller's hands.

use super::Running;
use crate::core::peer::PeerState;
use crate::core::queue::SMALL_BYTES_MAX;
use crate::core::sleeper::{Activity, PassiveWaiter};
use crate::core::waiting::WakeHandle;
use crate::core::worker::{SPIN, Wait};
use ferrywire_proto::wire::HEADER_BYTES;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

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

/// Longest a waiting caller sleeps before it looks again.
const PARK: Duration = Duration::from_millis(50);
/// Bytes of bulk for which one more thread is roused: to rouse a thread that sleeps costs the caller microseconds, as
/// much as to send so many.
const ROUSE_BYTES: u64 = 256 << 10;

impl Running {
    /// Waits until `done`, polling the peer's home worker inline where possible. False when the time is up.
    ///
    /// `register` puts the caller on the lists of what it waits for, and `forget` takes it off again: a caller that no one wakes
    /// would stay there, while more and more threads wait in vain.
    pub fn wait(
        &self,
        peer: &PeerState,
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
        let is_done = self.wait_listed(peer, limit, register, done);
        if listed {
            forget(&WakeHandle::Thread(thread::current()));
        }
        is_done
    }

    fn wait_listed(
        &self,
        peer: &PeerState,
        limit: Duration,
        mut register: impl FnMut(WakeHandle),
        mut done: impl FnMut() -> bool,
    ) -> bool {
        let context = &self.workers.context;
        if context.is_caller_driven() {
            return self.wait_driving(limit, done);
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
            let worker = &self.workers[peer.home_index()];
            if !peer.in_bulk() && !stand_back && worker.drive(&mut wait, context) {
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
            let _passive = PassiveWaiter::on(worker.sleeper());
            if !(wait.done)() {
                let slept = Instant::now();
                thread::park_timeout(wait.rest(slept).min(PARK));
                // Slept out, nothing moves: a receive that nobody matches is in bulk for ever.
                lively = slept.elapsed() < PARK;
                stand_back = lively;
            }
        }
    }

    /// Waits in an endpoint without threads: the caller polls everything.
    fn wait_driving(&self, limit: Duration, mut done: impl FnMut() -> bool) -> bool {
        let transport = &self.workers.context.transport;
        let until = transport.now().saturating_add(limit);
        if limit.is_zero() && !done() {
            // A caller that asks again and again without waiting is the only one that polls.
            self.poll_once();
        }
        let mut quiet = 0u32;
        while !done() {
            if transport.now() >= until {
                return done();
            }
            quiet = if self.poll_once() { 0 } else { quiet + 1 };
            match quiet {
                0 => {}
                1..200 => thread::yield_now(),
                _ => thread::sleep(SPIN),
            }
        }
        true
    }

    /// Something was posted for this peer: sends it at once where that is best, else sees to it that a thread will.
    pub fn kick(&self, peer: &Arc<PeerState>, bytes: u64) {
        let context = &self.workers.context;
        let home = &self.workers[peer.home_index()];
        // A caller that drives sends several small operations in one call, when it waits.
        let waiting = peer.queue.waiting();
        let company = waiting < frames_in_company(peer.in_flight_beside_one(), waiting);
        if company && bytes <= DEFERRED_BYTES_MAX && home.sleeper().may_leave_behind() {
            return;
        }
        // Bulk is left to threads that keep to their cores.
        let bulk = bytes > SMALL_BYTES_MAX || peer.in_bulk();
        let is_for_threads = peer.in_bulk() && !context.is_caller_driven();
        if is_for_threads || !home.send_at_once(context, peer) {
            home.sleeper().rouse();
        }
        if bulk && peer.queue.has_work() {
            self.rouse_for_bulk(peer, bytes);
        }
    }

    /// Rouses further workers, as many as these bytes are worth.
    fn rouse_for_bulk(&self, peer: &PeerState, bytes: u64) {
        let sleepers = &self.workers.context.sleepers;
        // The others have no channel of this peer.
        let count = sleepers.len().min(peer.channels()).max(1);
        let mut left = bytes.div_ceil(ROUSE_BYTES);
        // With each operation it begins at another one.
        let first = peer.rouse_first.fetch_add(1, Ordering::Relaxed);
        for step in 0..count {
            let sleeper = &sleepers[(first.wrapping_add(step)) % count];
            if left == 0 {
                break;
            }
            left -= u64::from(sleeper.index != peer.home_index() && sleeper.rouse());
        }
    }

    /// A caller asks after an operation without waiting: polls its worker if the thread stands back.
    pub fn nudge(&self, peer: &PeerState) {
        let home = &self.workers[peer.home_index()];
        if matches!(home.sleeper().activity(), Activity::Parked | Activity::NoThread) {
            home.poll_once(&self.workers.context);
        }
    }
}

/// Frames that a call to the socket waits for, with so many operations in flight beside the one just posted, and so
/// many frames waiting.
fn frames_in_company(in_flight: u64, waiting: usize) -> usize {
    match in_flight {
        0 => 0,
        _ if in_flight.saturating_sub(waiting as u64) < SENT_FOR_TWO => DEFERRED_FRAMES_MAX,
        _ => 2 * DEFERRED_FRAMES_MAX,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
