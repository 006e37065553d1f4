//! GPU payload in the stream: when a channel starts copies, and how it continues when they finish.
//!
//! A received payload passes through a staging ring in parts. While a part has no room in the ring the
//! channel *stalls*: it keeps the bytes it has received, and reads no more.
//!
//! Invariant: frames are sent and placed in order, whether they wait for a copy or not.
//! Read next: `staging/`, which copies.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::super::Channel;
use super::super::receiver::Receiver;
use super::super::sender::Batch;
use super::Payload;
use crate::core::peer::Landing;
use crate::core::posted::Arrival;
use crate::core::queue::{Entry, SendQueue, Stage};
use crate::core::staging::{Hung, Receiving, Sending, Staged, Staging};
use crate::core::stats::ChannelCounters;
use ferrywire_memory::MemoryLocation;
use ferrywire_proto::limits;
use ferrywire_proto::wire::Refusal;

/// Smallest piece of a ring in bytes that is lent to the socket; a shorter one is cheaper to copy.
const LENT_BYTES_MIN: usize = 32 << 10;

/// State of the payload between GPUs and the connection.
pub(in super::super) struct StagedPayload {
    staging: Staging,
    counters: Arc<ChannelCounters>,
    /// The counters in `counters.staging` at the beginning of this connection.
    before: [u64; 7],
    /// Whether enough frames are taken: no more until some of their copies finish.
    awaits_copies: bool,
    /// Whether the payload that is being received goes to a GPU.
    filling: bool,
    /// Whether the next part of the received payload has no room in the ring.
    stalled: bool,
    /// Bytes received while stalled.
    kept: Vec<u8>,
}

impl StagedPayload {
    /// Creates the state with the reservations of the first frames to be sent.
    pub fn new(sending: Sending, counters: Arc<ChannelCounters>) -> StagedPayload {
        let before = counters.staging.of_connections().map(|counter| counter.load(Ordering::Relaxed));
        StagedPayload {
            staging: Staging { sending, receiving: Receiving::new(counters.track) },
            before,
            counters,
            awaits_copies: false,
            filling: false,
            stalled: false,
            kept: Vec::new(),
        }
    }

    // ---- sending ----

    /// The sending half, where frames reserve room.
    pub fn sending(&mut self) -> &mut Sending {
        &mut self.staging.sending
    }

    /// Whether GPU payload was ever sent.
    pub fn has_sent(&self) -> bool {
        self.staging.sending.begun()
    }

    /// Whether there is room for a frame of the largest size, and no reason to wait with it.
    pub fn has_room(&self) -> bool {
        !self.awaits_copies && self.staging.sending.has_room()
    }

    /// Notes whether the window holds enough bytes for the next socket call. If so, no frame is taken until a copy ends.
    pub fn note_enough(&mut self, enough: bool) {
        self.awaits_copies = enough && self.staging.sending.copying();
    }

    /// Starts the copies of pulled frames.
    pub fn begin_copies<'a>(&mut self, pulled: impl Iterator<Item = &'a mut Entry>, queue: &SendQueue) {
        let credit = self.staging.sending.begin(pulled);
        if self.staging.pinned_bytes() > 0 {
            self.count();
        }
        queue.credit(credit);
    }

    /// Checks which copies of unsent frames are finished.
    pub fn poll_copies<'a>(&mut self, unsent: impl Iterator<Item = &'a mut Entry>, queue: &SendQueue) {
        if !self.staging.sending.copying() {
            return;
        }
        let credit = self.staging.sending.poll(unsent);
        if !self.staging.sending.copying() {
            self.count();
        }
        queue.credit(credit);
    }

    /// Whether a frame may be sent: none of its copies is in flight.
    pub fn is_copied(&self, entry: &mut Entry, queue: &SendQueue) -> bool {
        let credit = self.staging.sending.ready(entry, queue.crc);
        queue.credit(credit.unwrap_or(0));
        credit.is_some()
    }

    /// Adds the bytes that follow a frame's header and placements.
    pub fn gather(&mut self, entry: &mut Entry, batch: &mut Batch<'_>) {
        if entry.staged.is_none() {
            return batch.add_host(entry);
        }
        batch.timed = true;
        let mut lent = false;
        entry.stream_pieces(|base, len| {
            if batch.lends && len >= LENT_BYTES_MIN {
                lent |= batch.lend(base, len)
            } else {
                // The ring's next frame overwrites the bytes before a zero-copy send would have released
                // them.
                batch.add(base, len, false)
            }
        });
        if let Some(staged) = entry.staged.as_mut().filter(|_| lent) {
            self.staging.sending.lend(staged);
        }
    }

    /// Counts the duration of a socket call that moved bytes of a ring and began at `since`.
    pub fn count_call(&self, since: Instant) {
        let spent_ns = since.elapsed().as_nanos() as u64;
        self.counters.staging.socket_ns.fetch_add(spent_ns, Ordering::Relaxed);
    }

    /// Frees a frame's bytes of the ring once the kernel has taken the frame, unless they are lent.
    pub fn sent(&mut self, entry: &mut Entry) {
        if let Some(staged) = entry.staged.take_if(|staged| !staged.is_lent()) {
            self.give_back(&staged);
        }
    }

    /// Frees the lent bytes of a frame that the peer has placed.
    pub fn acknowledged(&mut self, entry: &mut Entry) {
        if let Some(staged) = entry.staged.take() {
            self.give_back(&staged);
        }
    }

    fn give_back(&mut self, staged: &Staged) {
        self.staging.sending.give_back(staged);
        self.counters.staging.send_ring.set(self.staging.sending.ring_bytes());
    }

    // ---- receiving ----

    /// Prepares for a GPU payload through a ring. Without a ring the frame is refused.
    pub fn land(&mut self, receiver: &mut Receiver, landing: Landing, location: MemoryLocation) {
        match self.staging.receiving.begin(location, landing.memory(), &mut receiver.body.pieces) {
            Ok(()) => {
                receiver.landing = Some(landing);
                self.filling = true;
                self.open_part(receiver);
            }
            Err(error) => {
                tracing::warn!(%error, %location, "cannot stage the payload of a frame: the frame is refused");
                landing.fail(&error);
                receiver.refuse(Refusal::Gpu);
            }
        }
        self.count();
    }

    /// Reserves room for the next part of the payload. Without room the channel stalls.
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

    /// Ends a complete part: starts its copy and opens the next part. Returns true if the body is complete.
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

    /// Whether a complete frame has to wait, for its copies or behind a frame that does.
    pub fn defers(&self) -> bool {
        self.filling || self.staging.receiving.is_broken() || self.waiting() > 0
    }

    /// Queues a frame until its copies finish.
    pub fn take_over(&mut self, arrival: Arrival) {
        self.filling = false;
        self.staging.receiving.expect(arrival);
    }

    /// Number of frames that wait for copies.
    pub fn waiting(&self) -> usize {
        self.staging.receiving.waiting()
    }

    /// Whether the payload that is being received goes to a GPU.
    pub fn is_filling(&self) -> bool {
        self.filling
    }

    /// Starts the copies of short parts once enough of them have gathered.
    pub fn flush_if_full(&mut self) {
        if self.staging.receiving.gathered_bytes() >= limits::STAGING_SLOT_BYTES {
            self.flush();
        }
    }

    /// Starts the copies of received payload, if any was for a GPU.
    pub fn flush_received(&mut self) {
        if self.staging.receiving.begun() {
            self.flush();
        }
    }

    fn flush(&mut self) {
        self.staging.receiving.flush();
        self.count();
    }

    /// Whether to check running copies before receiving more: the peer waits for acknowledgements of finished
    /// ones.
    pub fn pauses_after(&self, received_bytes: usize) -> bool {
        received_bytes >= limits::STAGING_POLL_BYTES && self.staging.receiving.copying()
    }

    /// Whether the current payload has no room in its ring.
    pub fn is_stalled(&self) -> bool {
        self.stalled
    }

    /// Keeps bytes for later if the channel stalls. Returns whether it kept them.
    pub fn keeps_back(&mut self, bytes: &[u8]) -> bool {
        if self.stalled {
            self.kept.extend_from_slice(bytes);
        }
        self.stalled
    }

    /// Whether the channel stalls, or has kept bytes that it has not consumed since.
    fn holds_back(&self) -> bool {
        self.stalled || !self.kept.is_empty()
    }

    /// Takes the kept bytes, if the part that had no room has some now.
    pub fn resume(&mut self, receiver: &mut Receiver) -> Option<Vec<u8>> {
        if self.stalled {
            self.open_part(receiver);
        }
        (!self.stalled).then(|| std::mem::take(&mut self.kept))
    }

    /// Discards the rest of the payload that is being received. Its landing is kept while parts are being
    /// copied.
    pub fn break_off(&mut self, landing: Option<Landing>) {
        (self.filling, self.stalled) = (false, false);
        self.staging.receiving.break_off(landing);
    }

    // ---- both ----

    /// Checks which copies to the GPU are finished. Refuses the frame that is being received if its copies
    /// have failed.
    fn poll_received(&mut self, receiver: &mut Receiver) {
        if self.staging.receiving.poll() {
            if let Some(landing) = &receiver.landing {
                self.staging.receiving.blame(landing);
            }
            let landing = receiver.break_off(Refusal::Gpu);
            self.break_off(landing);
        }
        self.staging.receiving.free();
        if !self.staging.receiving.copying() {
            // Short parts were gathering. No other copy is running and no more bytes may come, so copy them
            // now.
            match self.staging.receiving.gathered_bytes() {
                0 => self.count(),
                _ => self.flush(),
            }
        }
    }

    /// Adapts the rings to the directions in which payload goes now.
    pub fn fit_rings(&mut self, queue: &SendQueue) {
        self.staging.fit_rings(queue.short_rings);
    }

    /// Whether copies are in flight, or received bytes wait for them.
    pub fn is_active(&self) -> bool {
        self.staging.copying() || self.holds_back()
    }

    /// Stops placing bytes into memory for which `gone` is true. Returns a GPU that may still copy there;
    /// poll until `None`.
    pub fn abandon(&mut self, gone: &dyn Fn(&Landing) -> bool) -> Option<MemoryLocation> {
        self.staging.receiving.abandon(gone)
    }

    /// Ends all copying.
    pub fn end(&mut self) -> Option<Hung> {
        let hung = self.staging.end();
        self.count();
        hung
    }

    fn count(&self) {
        let (staging, counters) = (&self.staging, &self.counters.staging);
        counters.pinned_bytes.store(staging.pinned_bytes() as u64, Ordering::Relaxed);
        counters.send_ring.set(staging.sending.ring_bytes());
        counters.receive_ring.set(staging.receiving.ring_bytes());
        let ns = |time: Duration| time.as_nanos() as u64;
        let of_this = [
            staging.sending.staged_bytes(),
            staging.receiving.staged_bytes(),
            staging.driver_calls(),
            ns(staging.sending.copying_time()),
            ns(staging.receiving.copying_time()),
            ns(staging.sending.full_time()),
            ns(staging.receiving.full_time()),
        ];
        for ((counter, before), more) in counters.of_connections().into_iter().zip(self.before).zip(of_this) {
            counter.store(before + more, Ordering::Relaxed);
        }
    }
}

impl Channel {
    /// Whether the channel may have bytes to consume that the socket does not report.
    pub fn holds_back(&self) -> bool {
        self.payload.staged().is_some_and(StagedPayload::holds_back)
    }

    /// Places frames whose copies have finished. Returns whether there were any.
    pub fn poll_staging(&mut self) -> io::Result<bool> {
        let Payload::Staged(staged) = &mut self.payload else { return Ok(false) };
        if !staged.staging.receiving.active() && !staged.stalled {
            return Ok(false);
        }
        staged.fit_rings(&self.peer.queue);
        staged.poll_received(&mut self.receiver);
        let mut worked = false;
        while let Payload::Staged(staged) = &mut self.payload
            && let Some(arrival) = staged.staging.receiving.next()
        {
            worked = true;
            let Arrival { header, placements, landing, message, refusal, chunk, .. } = arrival;
            self.placed(&header, &placements, landing.as_ref(), message, refusal, chunk)?;
        }
        Ok(worked)
    }
}
