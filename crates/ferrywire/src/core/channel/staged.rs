//! The channel's part in staging: when it begins copies, and what it does when they are done.
//!
//! Invariant: frames are placed in their order, whether they wait for a copy or not.
//! Read next: `staging/`.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::Channel;
use super::receiver::Stage;
use crate::core::peer::Landing;
use ferrywire_memory::Place;
use ferrywire_proto::wire::{Kind, Refusal};

impl Channel {
    /// Whether copies are under way, or bytes are here that wait for them: nobody tells when they are done.
    pub fn staging_active(&self) -> bool {
        self.staging.copying() || self.rx.stalled || !self.rx.kept.is_empty() || self.asks_for_held()
    }

    /// Whether it is for the owner of this channel to ask whether held operations may begin: for one of those it has of a peer.
    pub fn asks_for_held(&self) -> bool {
        self.peer.held.any() && self.peer.is_home(self.index)
    }

    /// Whether there may be something to receive although the connection does not say so.
    pub fn holds_back(&self) -> bool {
        self.rx.stalled || !self.rx.kept.is_empty()
    }

    /// Whether it reads nothing because the payload at hand has no room.
    pub fn stalled(&self) -> bool {
        self.rx.stalled
    }

    /// Begins the copies of what was pulled, from this frame on.
    pub(super) fn stage(&mut self, first: u64) {
        let credit = self.staging.sending.begin(self.window.from(first));
        if self.staging.pinned_bytes() > 0 {
            self.count_staged();
        }
        if credit > 0 {
            self.peer.queue.credit(credit);
        }
    }

    /// A socket call that moved staged payload began then, and has returned.
    pub(super) fn count_wire(&self, since: Option<Instant>) {
        if let Some(since) = since {
            let spent_ns = since.elapsed().as_nanos() as u64;
            self.counters.staging.wire_ns.fetch_add(spent_ns, Ordering::Relaxed);
        }
    }

    /// Tells of copies out once they are all done.
    pub(super) fn count_copied_out(&self) {
        if !self.staging.sending.copying() {
            self.count_staged();
        }
    }

    fn count_staged(&self) {
        let (staging, counters) = (&self.staging, &self.counters.staging);
        counters.pinned_bytes.store(staging.pinned_bytes() as u64, Ordering::Relaxed);
        counters.sent_bytes.store(staging.sending.staged_bytes(), Ordering::Relaxed);
        counters.received_bytes.store(staging.receiving.staged_bytes(), Ordering::Relaxed);
        counters.driver_calls.store(staging.driver_calls(), Ordering::Relaxed);
        let store = |into: &AtomicU64, time: Duration| into.store(time.as_nanos() as u64, Ordering::Relaxed);
        store(&counters.copy_out_ns, staging.sending.copying_time());
        store(&counters.copy_in_ns, staging.receiving.copying_time());
        store(&counters.send_full_ns, staging.sending.full_time());
        store(&counters.receive_full_ns, staging.receiving.full_time());
    }

    /// Places what was copied meanwhile. True if that was anything.
    pub fn turn_staging(&mut self) -> io::Result<bool> {
        if !self.staging.receiving.active() && !self.rx.stalled {
            return Ok(false);
        }
        if self.staging.receiving.look() {
            if let Some(landing) = &self.rx.landing {
                self.staging.receiving.blame(landing);
            }
            self.break_off(Refusal::Gpu);
        }
        self.staging.receiving.free();
        if !self.staging.receiving.copying() {
            // Parts that waited for company: nothing else is copied, and there may be nothing more to come.
            match self.staging.receiving.gathered_bytes() {
                0 => self.count_staged(),
                _ => self.flush_parts(),
            }
        }
        let mut worked = false;
        while let Some(arrival) = self.staging.receiving.next() {
            worked = true;
            let landing = arrival.landing.as_ref();
            self.placed(&arrival.header, &arrival.placements, landing, arrival.message, arrival.refusal)?;
        }
        Ok(worked)
    }

    /// The payload that is about to come goes to a GPU: through a ring, unless that cannot be had.
    pub(super) fn land_on_gpu(&mut self, place: Place, landing: Landing) {
        // Over a lane it would have come without this.
        let begun = match self.posted.is_some() {
            true => Err(Refusal::OutOfReach),
            false => self.staging.receiving.begin(place, &mut self.rx.pieces).map_err(|error| {
                tracing::warn!(%error, %place, "a payload cannot be staged");
                landing.fail(&error);
                Refusal::Gpu
            }),
        };
        self.rx.pieces.clear();
        match begun {
            Ok(()) => {
                self.rx.landing = Some(landing);
                self.rx.staged = true;
                self.open_part();
            }
            Err(refusal) => self.rx.refusal = Some(refusal),
        }
        self.count_staged();
    }

    /// Finds room for the next part of a staged payload; without any, the channel stalls.
    fn open_part(&mut self) {
        let rx = &mut self.rx;
        rx.pieces.clear();
        rx.next = 0;
        let Some((part, last)) = self.staging.receiving.open_part() else {
            let waited = std::mem::replace(&mut rx.stalled, true);
            self.counters.staging.full.fetch_add(u64::from(!waited), Ordering::Relaxed);
            return;
        };
        rx.stalled = false;
        rx.pieces.push(part);
        rx.room = part.len;
        if last {
            let message = usize::from(rx.header.notify);
            rx.expect_message(message);
            rx.room += message;
        }
    }

    /// A part may be whole: has it copied, and goes on with the next. True if all of the payload is here.
    pub(super) fn finish_part(&mut self) -> bool {
        if self.rx.room > 0 || self.rx.stalled {
            return false;
        }
        match self.staging.receiving.close_part() {
            true => {
                self.open_part();
                false
            }
            false => true,
        }
    }

    /// Goes on where it stalled, if there is room now; true if it may read.
    pub(super) fn resume(&mut self) -> io::Result<bool> {
        if !self.rx.stalled && self.rx.kept.is_empty() {
            return Ok(true);
        }
        if self.rx.stalled {
            self.open_part();
        }
        let kept = std::mem::take(&mut self.rx.kept);
        if self.rx.stalled {
            self.rx.kept = kept;
            return Ok(false);
        }
        self.consume(&kept)?;
        Ok(!self.rx.stalled)
    }

    /// The rest of the payload under way is thrown away.
    pub(super) fn break_off(&mut self, refusal: Refusal) {
        let landing = self.rx.landing.take();
        if self.rx.stage == Stage::Body && self.rx.header.kind == Kind::Data {
            let rx = &mut self.rx;
            rx.pieces.clear();
            rx.target.clear();
            rx.next = 0;
            rx.refusal = Some(refusal);
            (rx.staged, rx.stalled, rx.room) = (false, false, usize::MAX);
        }
        self.staging.receiving.break_off(landing);
    }

    /// Begins the copies of what one socket call brought.
    pub(super) fn flush_parts(&mut self) {
        self.staging.receiving.flush();
        self.count_staged();
    }
}
