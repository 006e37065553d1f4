//! The payload of a channel that has a lane: what may be posted when, and what comes of it.
//!
//! ```text
//!   sender     header in the stream ─── isend ─── done, and acknowledged: the memory is free
//!   receiver   header in the stream ─── irecv ─── done ─── gathered ─── given back ─── counted
//! ```
//!
//! Heads and messages travel apart, in one order. The receiver posts for headers it has seen and for
//! nothing else; the sender begins a message only if the peer has posted for all but a window of those
//! before it. Lengths come from headers: several plugins never write them. Frames behind one whose payload
//! is missing wait, since what is acknowledged is a count.
//!
//! Invariant: a message's memory is let go only after the lane is done with it, or closed.
//! Read next: `sending.rs`, `receiving.rs`, then `channel/`, which owns this.

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
use ferrywire_memory::Memory;
use ferrywire_proto::clock::Clock;
use ferrywire_proto::wire::{self, Header};
use receiving::Receiving;
use sending::Sending;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// What a turn has brought.
#[derive(Default)]
pub(crate) struct Turned {
    /// Payload bytes that were sent, and that arrived.
    pub sent_bytes: u64,
    pub received_bytes: u64,
    /// Whether anything was posted, done or finished.
    pub worked: bool,
    /// Acknowledged frames whose memory is free now.
    pub delivered: Vec<Entry>,
    /// Frames whose payload cannot be sent, and why. Their headers were held.
    pub given_up: Vec<(u64, Error)>,
    /// The frame whose memory cannot be read, and why, where that has ended the lane. Its operation is to fail, or the next
    /// lane would end of it too.
    pub unreadable: Option<(u64, Error)>,
    /// A message has made no progress for the stall limit, and that has ended the lane.
    pub stalled: bool,
    /// Frames that have arrived whole, in order.
    pub arrived: Vec<Arrival>,
}

/// A channel's lane with its bookkeeping.
pub(crate) struct Posted {
    lane: Box<dyn Lane>,
    sending: Sending,
    receiving: Receiving,
    counters: Arc<LaneCounters>,
    /// Time in which this process was stopped is nobody's standing still.
    clock: Clock,
}

impl Posted {
    /// `stall_limit` is the longest the oldest message of either direction may stand still.
    pub fn new(lane: Box<dyn Lane>, stall_limit: Duration, counters: Arc<LaneCounters>) -> Posted {
        let (sending, receiving) = (Sending::new(&*lane, stall_limit), Receiving::new(&*lane, stall_limit));
        Posted { lane, sending, receiving, counters, clock: Clock::new(Duration::ZERO) }
    }

    /// Whether the other end waits to hear that our side of the lane stands.
    pub fn is_waited_for(&self) -> bool {
        self.lane.may_stand_alone()
    }

    /// Whether the peer's side of the lane stands, as far as is known.
    pub fn is_heard(&self) -> bool {
        self.sending.is_heard()
    }

    /// Frames with a payload for the lane that may be taken now.
    pub fn room(&self) -> usize {
        self.sending.room()
    }

    /// Whether anything is posted, or could be: then somebody has to ask.
    pub fn active(&self) -> bool {
        self.sending.active() || self.receiving.active()
    }

    /// Bytes in the lane's hands, both ways: as long as they are many, nobody is late who asks a little later.
    pub fn bytes_in_flight(&self) -> usize {
        self.sending.bytes_in_flight() + self.receiving.bytes_in_flight()
    }

    /// Whether messages are not sent yet.
    #[cfg(test)]
    pub fn is_sending(&self) -> bool {
        self.sending.active()
    }

    /// Whether a message that the lane has, or is to have, is of memory that its user may have freed. Only the lane's
    /// end takes it back.
    pub fn sends_what_is_gone(&self) -> bool {
        self.sending.uses(|memory| memory.is_gone())
    }

    /// How long whoever turns it is to rest after a turn that brought nothing, where the lane says so.
    pub fn pause(&self) -> Option<Duration> {
        self.lane.pause()
    }

    /// A dead path under the lane, in words.
    pub fn path_trouble(&self) -> Option<String> {
        self.lane.path_trouble().map(|why| format!("{}: {why}", self.lane.describe()))
    }

    // ---- sending ----

    /// A frame was taken whose payload goes over the lane. In the order of their headers.
    pub fn admit(&mut self, frame: u64, entry: &Entry) {
        self.sending.admit(&mut *self.lane, frame, entry);
    }

    /// Whether the header of this frame waits for its payload.
    pub fn holds_head(&self, frame: u64) -> bool {
        self.sending.holds_head(frame)
    }

    /// The peer has placed this frame: gives the entry back, unless the lane is not done with its memory.
    pub fn acknowledged(&mut self, frame: u64, entry: Entry) -> Option<Entry> {
        self.counters.moved.fetch_add(1, Ordering::Relaxed);
        self.sending.acknowledged(frame, entry)
    }

    /// How many receives the peer says it has posted, in the low half.
    pub fn confirm(&mut self, low: u32) -> Result<(), &'static str> {
        self.sending.confirm(low)
    }

    // ---- receiving ----

    /// Whether there is room for a message that a header tells of: a plugin does not check what it receives.
    pub fn fits(&self, header: &Header) -> Result<(), &'static str> {
        if header.is_posted() && header.len as usize > self.lane.message_bytes_max() {
            Err("it announces a message that is larger than was agreed")
        } else {
            Ok(())
        }
    }

    /// How many receives were posted here, for the peer.
    pub fn told(&self) -> u32 {
        self.receiving.posted_count() as u32
    }

    /// A frame's part of the stream is here.
    pub fn expect(&mut self, arrival: Arrival) {
        self.receiving.expect(arrival);
    }

    /// Frames that wait for payload, their own or that of one before them.
    pub fn waiting(&self) -> usize {
        self.receiving.waiting()
    }

    /// Stops placing bytes where `gone` says. True while the lane may still write there: ask again.
    pub fn abandon(&mut self, gone: &dyn Fn(&Landing) -> bool) -> bool {
        self.receiving.abandon(&*self.lane, gone)
    }

    /// Undoes registrations of memory whose region is gone.
    pub fn forget_revoked(&mut self) {
        let (sending, receiving) = (&self.sending, &self.receiving);
        let uses =
            |memory: &Arc<Memory>| sending.uses(|each| Arc::ptr_eq(each, memory)) || receiving.uses(memory);
        self.lane.forget_revoked(&uses);
    }

    // ---- both ----

    /// Tests the oldest of each direction and posts what may be posted.
    ///
    /// # Errors
    /// Why the lane is of no use any more, with the state it was in.
    pub fn turn(&mut self, now: Duration, turned: &mut Turned) -> Result<(), String> {
        let now = self.clock.look(now);
        let result = self.sending.turn(&mut *self.lane, now, turned).and_then(|()| {
            let sends = self.sending.in_flight();
            self.receiving.turn(&mut *self.lane, sends, now, turned)
        });
        if self.sending.has_let_go() | self.receiving.has_let_go() {
            self.forget_revoked();
        }
        let counters = &self.counters;
        let moved = turned.arrived.iter().filter(|arrival| arrival.header.is_posted()).count();
        counters.moved.fetch_add(moved as u64, Ordering::Relaxed);
        counters.sends_most.fetch_max(self.sending.most() as u64, Ordering::Relaxed);
        counters.receives_most.fetch_max(self.receiving.most() as u64, Ordering::Relaxed);
        counters.closing_results.store(self.receiving.closing_results(), Ordering::Relaxed);
        result.map_err(|why| format!("{}: {why}", self.lane.describe()))
    }

    /// The connection beside the lane has ended: what was begun may still arrive.
    pub fn companion_closed(&mut self, now: Duration, why: &str) {
        let now = self.clock.look(now);
        self.receiving.closing(now, format!("the connection beside it ended: {why}"));
    }

    /// The fill of both windows in words, for the errors of both ends.
    pub fn state(&self) -> String {
        format!("{}; {}", self.sending.state(), self.receiving.state())
    }

    /// Whether nothing reads the memory any more of which the closed lane was sending. Ask again.
    pub fn has_released(&mut self) -> bool {
        self.lane.has_released()
    }

    /// Closes the lane. Gives back the acknowledged frames that it held.
    pub fn end(&mut self) -> Vec<Entry> {
        self.lane.close(InFlight { sends: self.sending.in_flight(), receives: self.receiving.in_flight() });
        self.receiving.clear();
        self.sending.clear()
    }
}

/// Whole seconds, for errors.
fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

/// The full count for a low half that the peer told, if it can be one.
fn widen(low: u32, known: u64, most: u64) -> Option<u64> {
    let count = wire::widen(low, known);
    (count >= known && count <= most).then_some(count)
}
