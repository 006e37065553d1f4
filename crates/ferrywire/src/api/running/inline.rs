//! Callers that post and wait: which thread moves the bytes meanwhile.
//!
//! A caller that posts a small operation to an idle worker sends it inline; bulk is left to the worker
//! threads. A caller that waits polls its peer's worker inline, unless bulk is in flight, and otherwise
//! sleeps.
//!
//! Invariant: after `kick` the operation is sent, or a worker's thread or a polling caller will send it.
//! Read next: `../../core/worker/inline.rs`, one worker polled by a caller.

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

/// Largest operation, in bytes, that may wait to be sent together with others.
const DEFERRED_BYTES_MAX: u64 = 4 << 10;
/// Most frames that wait to be sent together: as many as the kernel puts into one packet. One more frame would
/// need a second packet, almost empty, which costs as much as the first.
const DEFERRED_FRAMES_MAX: usize = 15;
/// Fewest bytes that the kernel puts into one packet: whole segments within 64 KiB, seven at an MTU of 9000.
const PACKET_BYTES: usize = 7 * 8948;
/// Operations in flight with which the peer stays busy until a call of two packets is made.
const SENT_FOR_TWO: u64 = 2 * DEFERRED_FRAMES_MAX as u64;

const _: () = assert!(DEFERRED_FRAMES_MAX * (DEFERRED_BYTES_MAX as usize + HEADER_BYTES) <= PACKET_BYTES);

/// Longest time that a waiting caller sleeps before it checks again.
const PARK: Duration = Duration::from_millis(50);
/// Bytes of bulk per additional worker that is woken. Waking a sleeping thread costs the caller microseconds,
/// as much as sending these bytes.
const ROUSE_BYTES: u64 = 256 << 10;

impl Running {
    /// Waits until `done` returns true, and polls the peer's home worker inline where possible. Returns false
    /// after `limit`.
    ///
    /// `register` adds the caller to the wait lists of the event, and `forget` removes it. Without `forget`
    /// callers whose wait timed out would accumulate there.
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
            // Only threads have to be removed: there are few workers, and another caller may poll the same
            // one by now.
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
                // After a full sleep nothing moves. An unmatched receive counts as bulk for ever, so the
                // caller polls again.
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
            // A caller that polls with a zero timeout may be the only thread that polls.
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

    /// Handles a newly posted operation: sends it inline where that is best, or makes sure that a thread
    /// sends it.
    pub fn kick(&self, peer: &Arc<PeerState>, bytes: u64) {
        let context = &self.workers.context;
        let home = &self.workers[peer.home_index()];
        // A caller that polls inline sends several small operations in one call when it waits.
        let waiting = peer.queue.waiting();
        let company = waiting < frames_in_company(peer.in_flight_beside_one(), waiting);
        if company && bytes <= DEFERRED_BYTES_MAX && home.sleeper().may_leave_behind() {
            return;
        }
        // Bulk is left to threads that are pinned to their cores.
        let bulk = bytes > SMALL_BYTES_MAX || peer.in_bulk();
        let is_for_threads = peer.in_bulk() && !context.is_caller_driven();
        if is_for_threads || !home.send_at_once(context, peer) {
            home.sleeper().rouse();
        }
        if bulk && peer.queue.has_work() {
            self.rouse_for_bulk(peer, bytes);
        }
    }

    /// Wakes further workers, in proportion to `bytes`.
    fn rouse_for_bulk(&self, peer: &PeerState, bytes: u64) {
        let sleepers = &self.workers.context.sleepers;
        // Other workers have no channel of this peer.
        let count = sleepers.len().min(peer.channels()).max(1);
        let mut left = bytes.div_ceil(ROUSE_BYTES);
        // Each operation starts at another worker.
        let first = peer.rouse_first.fetch_add(1, Ordering::Relaxed);
        for step in 0..count {
            let sleeper = &sleepers[(first.wrapping_add(step)) % count];
            if left == 0 {
                break;
            }
            left -= u64::from(sleeper.index != peer.home_index() && sleeper.rouse());
        }
    }

    /// Supports polling of a transfer: polls the home worker if its thread is parked or there is none.
    pub fn nudge(&self, peer: &PeerState) {
        let home = &self.workers[peer.home_index()];
        if matches!(home.sleeper().activity(), Activity::Parked | Activity::NoThread) {
            home.poll_once(&self.workers.context);
        }
    }
}

/// Number of frames to wait for before a socket call, with `in_flight` operations in flight besides the one
/// just posted, and `waiting` frames queued.
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
