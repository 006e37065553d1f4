//! Payload of GPUs in the stream: when a channel begins copies, and what it does when they are done.
//!
//! A payload that is received goes through a ring in parts. While a part has no room the channel *stalls*: it keeps what it
//! has received already, and reads nothing more.
//!
//! Invariant: frames are sent and placed in their order, whether they wait for a copy or not.
//! Read next: `staging/`, which copies.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::super::Channel;
use super::super::batch::Batch;
use super::super::receiver::Receiver;
use super::{Payload, gather};
use crate::core::peer::Landing;
use crate::core::posted::Arrival;
use crate::core::queue::{Entry, SendQueue};
use crate::core::staging::{Receiving, Sending, Staging};
use crate::core::stats::ChannelCounters;
use ferrywire_memory::MemoryLocation;
use ferrywire_proto::limits;
use ferrywire_proto::wire::Refusal;

/// Pieces of a ring at least this long are lent to the socket, where it can be: shorter ones cost less to copy.
const LENT_BYTES_MIN: usize = 64 << 10;

/// What passes between GPUs and the connection.
pub(in super::super) struct StagedPayload {
    staging: Staging,
    counters: Arc<ChannelCounters>,
    /// Enough is cut: no more is taken before some of that is copied.
    awaits_copies: bool,
    /// The payload that is being received goes to a GPU.
    filling: bool,
    /// The next part of it has no room.
    stalled: bool,
    /// What was received and could not be taken because of that.
    kept: Vec<u8>,
}

impl StagedPayload {
    /// With what the first frames to be sent have reserved.
    pub fn new(sending: Sending, counters: Arc<ChannelCounters>) -> StagedPayload {
        StagedPayload {
            staging: Staging { sending, receiving: Receiving::default() },
            counters,
            awaits_copies: false,
            filling: false,
            stalled: false,
            kept: Vec::new(),
        }
    }

    // ---- sending ----

    /// Where frames reserve room.
    pub fn sending(&mut self) -> &mut Sending {
        &mut self.staging.sending
    }

    /// Whether payload of a GPU was ever sent.
    pub fn has_sent(&self) -> bool {
        self.staging.sending.begun()
    }

    /// Whether there is room for a frame of the largest size, and reason to take it.
    pub fn has_room(&self) -> bool {
        !self.awaits_copies && self.staging.sending.has_room()
    }

    /// Whether there is enough in the window for the next socket call.
    pub fn note_enough(&mut self, enough: bool) {
        self.awaits_copies = enough && self.staging.sending.copying();
    }

    /// Begins the copies of frames that were pulled.
    pub fn begin_copies<'a>(&mut self, pulled: impl Iterator<Item = &'a mut Entry>, queue: &SendQueue) {
        let credit = self.staging.sending.begin(pulled);
        if self.staging.pinned_bytes() > 0 {
            self.count();
        }
        queue.credit(credit);
    }

    /// Looks which copies of unsent frames are done.
    pub fn look<'a>(&mut self, unsent: impl Iterator<Item = &'a mut Entry>, queue: &SendQueue) {
        if !self.staging.sending.copying() {
            return;
        }
        let credit = self.staging.sending.look(unsent);
        if !self.staging.sending.copying() {
            self.count();
        }
        queue.credit(credit);
    }

    /// Whether a frame may be sent: no copy of it is under way.
    pub fn is_copied(&self, entry: &mut Entry, queue: &SendQueue) -> bool {
        let credit = self.staging.sending.ready(entry, queue.crc);
        queue.credit(credit.unwrap_or(0));
        credit.is_some()
    }

    /// Adds what follows the header and the placements of a frame.
    pub fn gather(&mut self, entry: &mut Entry, batch: &mut Batch<'_>) {
        if entry.staged.is_none() {
            return gather(entry, batch);
        }
        batch.timed = true;
        let mut lent = false;
        entry.stream_pieces(|base, len| {
            if batch.lends && len >= LENT_BYTES_MIN {
                lent |= batch.lend(base, len)
            } else {
                // The ring's next user writes there before the kernel would have released it.
                batch.add(base, len, false)
            }
        });
        if let Some(staged) = entry.staged.as_mut().filter(|_| lent) {
            self.staging.sending.lend(staged);
        }
    }

    /// A socket call that moved payload of a ring began then, and has returned.
    pub fn count_call(&self, since: Instant) {
        let spent_ns = since.elapsed().as_nanos() as u64;
        self.counters.staging.socket_ns.fetch_add(spent_ns, Ordering::Relaxed);
    }

    /// The kernel has all of a frame: its bytes of the ring are free, unless they are lent.
    pub fn sent(&mut self, entry: &mut Entry) {
        if let Some(staged) = entry.staged.take_if(|staged| !staged.is_lent()) {
            self.staging.sending.give_back(&staged);
        }
    }

    /// The peer has placed a frame, so what was lent of it is read no more.
    pub fn acknowledged(&mut self, entry: &mut Entry) {
        if let Some(staged) = entry.staged.take() {
            self.staging.sending.give_back(&staged);
        }
    }

    // ---- receiving ----

    /// A payload is about to come for a GPU: through a ring, unless that cannot be had.
    pub fn land(&mut self, receiver: &mut Receiver, landing: Landing, location: MemoryLocation) {
        match self.staging.receiving.begin(location, &mut receiver.body.pieces) {
            Ok(()) => {
                receiver.landing = Some(landing);
                self.filling = true;
                self.open_part(receiver);
            }
            Err(error) => {
                tracing::warn!(%error, %location, "a payload cannot be staged");
                landing.fail(&error);
                receiver.refuse(Refusal::Gpu);
            }
        }
        self.count();
    }

    /// Finds room for the next part of the payload; without any, the channel stalls.
    fn open_part(&mut self, receiver: &mut Receiver) {
        match self.staging.receiving.open_part() {
            Some((part, last)) => {
                self.stalled = false;
                let message = last.then(|| usize::from(receiver.header.notify));
                receiver.body.open_part(part, message);
            }
            None => {
                receiver.body.close_part();
                let waited = std::mem::replace(&mut self.stalled, true);
                self.counters.staging.ring_full_events.fetch_add(u64::from(!waited), Ordering::Relaxed);
            }
        }
    }

    /// A part is whole: has it copied, and goes on with the next. True if all of the body is here.
    pub fn finish_part(&mut self, receiver: &mut Receiver) -> bool {
        if !self.filling {
            return true;
        }
        if self.stalled {
            return false;
        }
        let more = self.staging.receiving.close_part();
        if more {
            self.open_part(receiver);
        }
        !more
    }

    /// Whether a frame that is here waits, for its copies or behind one that does.
    pub fn defers(&self) -> bool {
        self.filling || self.waiting() > 0
    }

    /// Takes a frame that waits.
    pub fn take_over(&mut self, arrival: Arrival) {
        self.filling = false;
        self.staging.receiving.expect(arrival);
    }

    /// Frames that wait.
    pub fn waiting(&self) -> usize {
        self.staging.receiving.waiting()
    }

    /// Whether the payload that is being received goes to a GPU.
    pub fn is_filling(&self) -> bool {
        self.filling
    }

    /// Short parts wait for company: begins their copies once they are many.
    pub fn flush_if_full(&mut self) {
        if self.staging.receiving.gathered_bytes() >= limits::STAGING_SLOT_BYTES {
            self.flush();
        }
    }

    /// Begins the copies of what was received, if it ever was for a GPU.
    pub fn flush_received(&mut self) {
        if self.staging.receiving.begun() {
            self.flush();
        }
    }

    fn flush(&mut self) {
        self.staging.receiving.flush();
        self.count();
    }

    /// The peer waits to hear of copies that are done: whether they are looked after before there is more.
    pub fn pauses_after(&self, received_bytes: usize) -> bool {
        received_bytes >= limits::STAGING_LOOK_BYTES && self.staging.receiving.copying()
    }

    /// Whether the payload at hand has no room.
    pub fn is_stalled(&self) -> bool {
        self.stalled
    }

    /// Keeps bytes for later if the channel stalls; true if so.
    pub fn keeps_back(&mut self, bytes: &[u8]) -> bool {
        if self.stalled {
            self.kept.extend_from_slice(bytes);
        }
        self.stalled
    }

    /// Whether it stalls, or did and has not taken all that was received then.
    fn holds_back(&self) -> bool {
        self.stalled || !self.kept.is_empty()
    }

    /// Bytes that were kept, if there is room now for the part that had none.
    pub fn resume(&mut self, receiver: &mut Receiver) -> Option<Vec<u8>> {
        if self.stalled {
            self.open_part(receiver);
        }
        (!self.stalled).then(|| std::mem::take(&mut self.kept))
    }

    /// The rest of the payload that is being received is thrown away. Its landing is kept while parts are copied.
    pub fn break_off(&mut self, landing: Option<Landing>) {
        (self.filling, self.stalled) = (false, false);
        self.staging.receiving.break_off(landing);
    }

    // ---- both ----

    /// Looks what was copied in. Refuses the frame that is being received if its copies have failed.
    fn look_received(&mut self, receiver: &mut Receiver) {
        if self.staging.receiving.look() {
            if let Some(landing) = &receiver.landing {
                self.staging.receiving.blame(landing);
            }
            let landing = receiver.break_off(Refusal::Gpu);
            self.break_off(landing);
        }
        self.staging.receiving.free();
        if !self.staging.receiving.copying() {
            // Parts that waited for company: nothing else is copied, and there may be nothing more to come.
            match self.staging.receiving.gathered_bytes() {
                0 => self.count(),
                _ => self.flush(),
            }
        }
    }

    /// Whether copies are under way, or bytes are here that wait for them.
    fn is_active(&self) -> bool {
        self.staging.copying() || self.holds_back()
    }

    /// Stops placing bytes where `gone` says. Gives a GPU that may still copy there: ask again.
    pub fn abandon(&mut self, gone: &dyn Fn(&Landing) -> bool) -> Option<MemoryLocation> {
        self.staging.receiving.abandon(gone)
    }

    /// Ends all copying.
    pub fn end(&mut self) {
        self.staging.end();
    }

    fn count(&self) {
        let (staging, counters) = (&self.staging, &self.counters.staging);
        counters.pinned_bytes.store(staging.pinned_bytes() as u64, Ordering::Relaxed);
        counters.sent_bytes.store(staging.sending.staged_bytes(), Ordering::Relaxed);
        counters.received_bytes.store(staging.receiving.staged_bytes(), Ordering::Relaxed);
        counters.driver_calls.store(staging.driver_calls(), Ordering::Relaxed);
        let store = |into: &AtomicU64, time: Duration| into.store(time.as_nanos() as u64, Ordering::Relaxed);
        store(&counters.d2h_ns, staging.sending.copying_time());
        store(&counters.h2d_ns, staging.receiving.copying_time());
        store(&counters.send_ring_full_ns, staging.sending.full_time());
        store(&counters.receive_full_ns, staging.receiving.full_time());
    }
}

impl Channel {
    fn staged(&self) -> Option<&StagedPayload> {
        match &self.payload {
            Payload::Staged(staged) => Some(staged),
            Payload::Stream | Payload::Lane(_) => None,
        }
    }

    /// Whether it has to be asked again and again: copies are under way or bytes wait for them, or operations of its peer
    /// wait for a GPU. Nothing tells when they are done.
    pub fn staging_active(&self) -> bool {
        self.staged().is_some_and(StagedPayload::is_active) || self.asks_for_held()
    }

    /// Whether there may be something to receive although the connection does not say so.
    pub fn holds_back(&self) -> bool {
        self.staged().is_some_and(StagedPayload::holds_back)
    }

    /// Whether it reads nothing because the payload at hand has no room.
    pub fn stalled(&self) -> bool {
        self.payload.is_stalled()
    }

    /// Places what was copied meanwhile. True if that was anything.
    pub fn poll_staging(&mut self) -> io::Result<bool> {
        let Payload::Staged(staged) = &mut self.payload else { return Ok(false) };
        if !staged.staging.receiving.active() && !staged.stalled {
            return Ok(false);
        }
        staged.look_received(&mut self.receiver);
        let mut worked = false;
        while let Payload::Staged(staged) = &mut self.payload
            && let Some(arrival) = staged.staging.receiving.next()
        {
            worked = true;
            let landing = arrival.landing.as_ref();
            self.placed(&arrival.header, &arrival.placements, landing, arrival.message, arrival.refusal)?;
        }
        Ok(worked)
    }
}
