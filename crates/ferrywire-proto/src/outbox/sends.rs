//! Tagged sends: their numbers, the peer's credit for eager messages, and the announcements of sends that are
//! not eager.
//!
//! A send's states: `numbered -> queued -> sent eagerly | announced -> matched -> cut into chunks`. A message
//! is sent eagerly if it is short and the peer has credit for it. Otherwise it is announced, and its bytes
//! follow once a receive of the peer has matched it.
//!
//! Invariant: every number is sent once. A send that cannot be sent any more is withdrawn under its number.
//! Read next: `sequencer.rs`; the peer's side is `inbox/matching.rs`.

use std::collections::HashMap;

use super::sequencer::Sequencer;
use super::{Body, Frame, Outbox, whole};
use crate::limits::{self, PeerLimits};
use crate::operation::Operation;
use crate::wire::{Header, Kind, WITHDRAWN};

/// Outcome of the peer's match of an announced send.
#[derive(Debug)]
pub enum Matched<O> {
    /// The send is queued; this many bytes follow.
    Queued(u64),
    /// The send has no bytes, and has ended.
    Empty(O),
    /// No such send is announced: it never was, or it was withdrawn.
    Unknown,
}

/// Tagged sends to the peer.
#[derive(Debug)]
pub(super) struct Sends<O> {
    next_number: u64,
    pub sequencer: Sequencer<O>,
    credit: usize,
    /// Sends that are announced and not matched yet, by id.
    pub announced: HashMap<u64, O>,
}

impl<O> Sends<O> {
    pub fn new(limits: PeerLimits) -> Sends<O> {
        Sends {
            next_number: 0,
            sequencer: Sequencer::new(limits),
            credit: limits.eager_credit_bytes,
            announced: HashMap::new(),
        }
    }
}

impl<O> Outbox<O> {
    /// Eager credit in bytes that is left.
    pub fn eager_credit_bytes(&self) -> usize {
        self.sends.credit
    }
}

impl<O: Operation> Outbox<O> {
    /// Gives the next number to a send that `make` creates, and makes later notifications wait for it. Does
    /// not queue it. `None` when the peer is lost or `make` returns `None`.
    pub fn number_send(&mut self, make: impl FnOnce(u64) -> Option<O>) -> Option<O> {
        if self.closed {
            return None;
        }
        let op = make(self.sends.next_number)?;
        self.sends.next_number += 1;
        self.join(&op);
        Some(op)
    }

    /// Returns eager credit: the peer has consumed messages, or a frame that had used credit was withdrawn.
    pub fn return_credit(&mut self, bytes: u64) {
        self.sends.credit =
            self.limits.eager_credit_bytes.min(self.sends.credit.saturating_add(bytes as usize));
    }

    /// Handles the peer's match of an announced send: the send's data go to `sink`, if it has any.
    pub fn matched(&mut self, transfer: u64, sink: u64) -> Matched<O> {
        let Some(op) = self.sends.announced.remove(&transfer) else { return Matched::Unknown };
        op.set_sink(sink);
        let bytes = op.total();
        if bytes == 0 {
            return Matched::Empty(op);
        }
        if self.is_small(&op) {
            self.matched.push_back((op, sink));
        } else {
            self.push_bulk(op, sink);
        }
        Matched::Queued(bytes)
    }

    /// Cancels an announced send that no receive has matched yet, and asks the peer to discard the
    /// announcement.
    pub fn take_back(&mut self, transfer: u64) -> Option<O> {
        let op = self.sends.announced.remove(&transfer)?;
        let mut header = Header::new(Kind::Announce);
        (header.transfer, header.key, header.offset, header.total) =
            (op.id(), op.key(), op.number(), WITHDRAWN);
        self.own.push_back(Frame::bare(header));
        Some(op)
    }

    /// Removes an announced send that the peer has refused.
    pub fn withdraw(&mut self, transfer: u64) -> Option<O> {
        self.sends.announced.remove(&transfer)
    }

    /// Sends a message eagerly if it is short and credit allows; otherwise announces it.
    pub(super) fn send_frame(&mut self, op: O, lane: bool, dropped: &mut Vec<O>) -> Frame<O> {
        let mut header = Header::new(Kind::Announce);
        header.transfer = op.id();
        header.key = op.key();
        header.offset = op.number();
        header.total = op.total();
        if op.is_unsendable() {
            header.total = WITHDRAWN;
            dropped.push(op);
            return Frame::bare(header);
        }
        let cost = eager_cost(op.total());
        if op.total() > self.limits.eager_bytes_max as u64
            // Payload that the lane can send from GPU memory is not staged.
            || (lane && op.on_gpu() && op.total() > 0)
            || cost > self.sends.credit
            // A peer that is behind would copy each of these messages once more.
            || (op.total() >= self.limits.eager_long_bytes as u64
                && cost + self.limits.eager_credit_bytes - self.sends.credit > self.limits.eager_ahead_bytes)
            || op.pieces().len() > limits::SEGMENTS_PER_CHUNK_MAX
        {
            self.sends.announced.insert(op.id(), op);
            return Frame::bare(header);
        }
        self.sends.credit -= cost;
        header.kind = Kind::Send;
        header.len = op.total() as u32;
        Frame { header, placements: Box::default(), body: Body::Chunk(whole(&op)), op: Some(op) }
    }

    /// Number of announced sends that are not matched.
    #[cfg(test)]
    pub(crate) fn announced_len(&self) -> usize {
        self.sends.announced.len()
    }
}

/// Credit that an eager message of `bytes` bytes costs.
pub(super) fn eager_cost(bytes: u64) -> usize {
    bytes as usize + limits::EAGER_OVERHEAD_BYTES
}
