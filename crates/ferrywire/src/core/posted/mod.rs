//! The lane of a channel: which messages may be posted when, and what their results mean.
//!
//! ```text
//!   sender     header in the stream ─── isend ─── done, and acknowledged: the memory is free
//!   receiver   header in the stream ─── irecv ─── done ─── gathered ─── given back ─── counted
//! ```
//!
//! Headers and messages travel separately, in one order. The receiver posts only for headers that it has
//! received. The sender may begin at most one window of messages beyond the receives that the peer has
//! posted. Lengths come from headers, since several plugins never report them. Frames behind one whose
//! payload is missing wait, since an acknowledgement is a count.
//!
//! Invariant: a message's memory is released only after the lane is done with it, or closed.
//! Read next: `sending.rs`, `receiving.rs`; then `channel/`, which owns this.

mod receiving;
mod sending;
mod slots;
#[cfg(test)]
mod tests;

pub(crate) use receiving::Arrival;

use crate::core::peer::Landing;
use crate::core::queue::Entry;
use crate::core::stats::LaneCounters;
use crate::error::Error;
use crate::payload::lane::{InFlight, Lane};
use ferrywire_memory::{Memory, MemoryLocation};
use ferrywire_proto::clock::Clock;
use ferrywire_proto::limits;
use ferrywire_proto::wire::{self, Header};
use receiving::Receiving;
use sending::Sending;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Results of one pass over a lane.
#[derive(Default)]
pub(crate) struct LanePass {
    /// Payload bytes sent and received.
    pub sent_bytes: u64,
    pub received_bytes: u64,
    /// Whether any request was posted, tested as done, or returned.
    pub worked: bool,
    /// Acknowledged frames whose memory is free now.
    pub delivered: Vec<Entry>,
    /// Frames whose payload cannot be packed, with the reason. Their headers were not sent.
    pub given_up: Vec<(u64, Error)>,
    /// The frame whose unreadable memory has ended the lane, with the reason. Its operation must fail, or the
    /// next lane would end on it too.
    pub unreadable: Option<(u64, Error)>,
    /// Whether the lane has ended because a message made no progress for the stall timeout.
    pub stalled: bool,
    /// Frames whose header and payload have arrived, in order.
    pub arrived: Vec<Arrival>,
}

/// Work that may still write to memory that is being released.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Touched {
    /// The lane: it has a posted receive for the memory.
    pub lane: bool,
    /// A GPU with copies in flight.
    pub gpu: Option<MemoryLocation>,
}

/// A channel's lane, with the state of its messages.
pub(crate) struct Posted {
    lane: Box<dyn Lane>,
    sending: Sending,
    receiving: Receiving,
    counters: Arc<LaneCounters>,
    /// Whether the peer has reported since the last check that it holds payload.
    peer_reports_held: bool,
    peer_held: Option<Held>,
    /// A clock that skips time in which this process was stopped: that is no stall.
    clock: Clock,
}

/// The time in which the peer reported again and again that it holds payload.
#[derive(Clone, Copy)]
struct Held {
    since: Duration,
    last: Duration,
}

impl Posted {
    /// Creates the state. `stall_timeout` is the longest time without progress of the oldest message of each
    /// direction.
    pub fn new(lane: Box<dyn Lane>, stall_timeout: Duration, counters: Arc<LaneCounters>) -> Posted {
        let (sending, receiving) =
            (Sending::new(&*lane, stall_timeout), Receiving::new(&*lane, stall_timeout));
        let (peer_reports_held, peer_held) = (false, None);
        let clock = Clock::new(Duration::ZERO);
        Posted { lane, sending, receiving, counters, peer_reports_held, peer_held, clock }
    }

    /// Whether the peer waits for a frame that reports this end of the lane as ready.
    pub fn is_waited_for(&self) -> bool {
        self.lane.may_stand_alone()
    }

    /// Whether the peer has reported its end of the lane as ready.
    pub fn is_peer_ready(&self) -> bool {
        self.sending.is_peer_ready()
    }

    /// Number of frames with a payload for the lane that may be taken now.
    pub fn room(&self) -> usize {
        self.sending.room()
    }

    /// Whether messages are posted or wait to be, so that the lane has to be polled.
    pub fn active(&self) -> bool {
        self.sending.active() || self.receiving.active()
    }

    /// Payload bytes in flight, sent and received. With many of them a short pause between polls delays no
    /// caller.
    pub fn bytes_in_flight(&self) -> usize {
        self.sending.bytes_in_flight() + self.receiving.bytes_in_flight()
    }

    /// Whether some messages are not sent yet.
    #[cfg(test)]
    pub fn is_sending(&self) -> bool {
        self.sending.active()
    }

    /// Whether a message in the lane, or waiting for it, is in memory that its user may have freed. Only the
    /// lane's end withdraws such a message.
    pub fn sends_what_is_gone(&self) -> bool {
        self.sending.uses(|memory| memory.is_gone())
    }

    /// How long to pause after a pass without progress, if the lane specifies that.
    pub fn pause(&self) -> Option<Duration> {
        self.lane.pause()
    }

    /// A description of a dead path under the lane. The silence of a peer that has reported that it holds payload is
    /// excused: also afterwards, because the kernel's retransmissions are as far apart then as the silence was long.
    pub fn path_trouble(&mut self, now: Duration) -> Option<String> {
        if std::mem::take(&mut self.peer_reports_held) {
            let since =
                self.peer_held.filter(|held| now.saturating_sub(held.last) <= limits::PATH_DEAD_AFTER);
            self.peer_held = Some(Held { since: since.map_or(now, |held| held.since), last: now });
        }
        let why = self.lane.path_trouble()?;
        let excused = |held: &Held| now <= held.last + (held.last - held.since) + 2 * limits::PATH_DEAD_AFTER;
        if self.peer_held.as_ref().is_some_and(excused) {
            return None;
        }
        Some(format!("{}: {why}", self.lane.describe()))
    }

    /// Notes the peer's report that it holds payload of the lane.
    pub fn peer_holds_payload(&mut self) {
        self.peer_reports_held = true;
    }

    /// Whether this end holds received payload of the lane for so long that the peer has to be told.
    pub fn holds_payload(&self) -> bool {
        self.lane.holds_payload()
    }

    // ---- sending ----

    /// Takes the payload of a frame for the lane. Frames come in the order of their headers.
    pub fn admit(&mut self, frame: u64, entry: &Entry) {
        self.sending.admit(&mut *self.lane, frame, entry);
    }

    /// Whether the header of this frame waits until its payload is packed.
    pub fn is_unpacked(&self, frame: u64) -> bool {
        self.sending.is_unpacked(frame)
    }

    /// Returns the entry of an acknowledged frame, or keeps it while the lane uses its memory.
    pub fn acknowledged(&mut self, frame: u64, entry: Entry) -> Option<Entry> {
        self.counters.moved.fetch_add(1, Ordering::Relaxed);
        self.sending.acknowledged(frame, entry)
    }

    /// Handles the peer's count of posted receives, of which `low` is the low half.
    ///
    /// # Errors
    /// A violation, if the count is impossible.
    pub fn confirm(&mut self, low: u32) -> Result<(), &'static str> {
        self.sending.confirm(low)
    }

    // ---- receiving ----

    /// Checks the size of an announced message: a plugin does not check what it receives.
    ///
    /// # Errors
    /// A violation, if the message exceeds the agreed size.
    pub fn fits(&self, header: &Header) -> Result<(), &'static str> {
        if header.is_posted() && header.len as usize > self.lane.message_bytes_max() {
            Err("the peer announced a message that is larger than was agreed")
        } else {
            Ok(())
        }
    }

    /// The low half of the number of receives posted at this end, for the next header.
    pub fn posted_count(&self) -> u32 {
        self.receiving.posted_count() as u32
    }

    /// Queues a frame whose bytes in the stream have all arrived.
    pub fn expect(&mut self, arrival: Arrival) {
        self.receiving.expect(arrival);
    }

    /// Number of frames that wait for a payload, their own or an earlier one's.
    pub fn waiting(&self) -> usize {
        self.receiving.waiting()
    }

    /// Stops placing bytes into memory for which `gone` is true. Returns what may still write there; poll until
    /// nothing does.
    pub fn abandon(&mut self, gone: &dyn Fn(&Landing) -> bool) -> Touched {
        self.receiving.abandon(&*self.lane, gone)
    }

    /// Undoes registrations of dropped regions that no message uses.
    pub fn forget_revoked(&mut self) {
        let (sending, receiving) = (&self.sending, &self.receiving);
        let uses =
            |memory: &Arc<Memory>| sending.uses(|each| Arc::ptr_eq(each, memory)) || receiving.uses(memory);
        self.lane.forget_revoked(&uses);
    }

    // ---- both ----

    /// Makes one pass: tests the oldest request of each direction, and posts what may be posted.
    ///
    /// # Errors
    /// Why the lane has failed, with a description of it.
    pub fn poll(&mut self, now: Duration, pass: &mut LanePass) -> Result<(), String> {
        let now = self.clock.read(now);
        let result = self.sending.poll(&mut *self.lane, now, pass).and_then(|()| {
            let sends = self.sending.in_flight();
            self.receiving.poll(&mut *self.lane, sends, now, pass)
        });
        if self.sending.has_released() | self.receiving.has_released() {
            self.forget_revoked();
        }
        let counters = &self.counters;
        let moved = pass.arrived.iter().filter(|arrival| arrival.header.is_posted()).count();
        counters.moved.fetch_add(moved as u64, Ordering::Relaxed);
        counters.sends_most.fetch_max(self.sending.most() as u64, Ordering::Relaxed);
        counters.receives_most.fetch_max(self.receiving.most() as u64, Ordering::Relaxed);
        counters.sends.set(self.sending.occupancy());
        counters.receives.set(self.receiving.occupancy());
        counters.closing_results.store(self.receiving.closing_results(), Ordering::Relaxed);
        result.map_err(|why| format!("{}: {why}", self.lane.describe()))
    }

    /// Handles the end of the connection beside the lane. Messages in flight may still arrive.
    pub fn companion_closed(&mut self, now: Duration, why: &str) {
        let now = self.clock.read(now);
        self.receiving.closing(now, format!("the connection beside it ended: {why}"));
    }

    /// Describes the fill of both windows, for the errors of both ends.
    pub fn state(&self) -> String {
        format!("{}; {}", self.sending.state(), self.receiving.state())
    }

    /// Whether the closed lane no longer reads the memory of its sends. Poll until true.
    pub fn has_released(&mut self) -> bool {
        self.lane.has_released()
    }

    /// Closes the lane. Returns the acknowledged frames that it kept.
    pub fn end(&mut self) -> Vec<Entry> {
        self.lane.close(InFlight { sends: self.sending.in_flight(), receives: self.receiving.in_flight() });
        self.counters.sends.set((0, 0));
        self.counters.receives.set((0, 0));
        self.receiving.clear();
        self.sending.clear()
    }
}

/// Formats seconds for errors.
fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

/// The full count for a low half from the peer, or `None` if it is impossible.
fn widen(low: u32, known: u64, most: u64) -> Option<u64> {
    let count = wire::widen(low, known);
    (count >= known && count <= most).then_some(count)
}
