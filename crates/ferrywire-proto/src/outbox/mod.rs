//! The sending side of one peer: all frames that its channels have yet to send. Each channel pulls from here.
//!
//! Order: frames of lost channels, the engine's own frames (followed by notifications that were too far
//! ahead), then the two queue classes, small operations and bulk. Small operations neither wait behind bulk
//! nor starve it.
//!
//! A [`Cutter`] walks a bulk operation once and hands out [`Chunk`]s, runs of its pieces with a bounded number of
//! bytes and placements. Chunks shrink as the rest shrinks, which keeps the end of a transfer short.
//!
//! Invariants: the chunks of an operation cover each of its bytes exactly once, in order; each pulled frame is
//! in exactly one window, or back in the outbox, until the peer has acknowledged it; each handle that enters
//! leaves once: in a frame, in the list of dropped ones, or returned to the caller; the pieces of a payload have
//! exactly the bytes that its header announces. Pure: no lock, no memory access, no clock.
//! Read next: `window.rs`, which holds frames after the pull.

mod epochs;
mod read_flow_control;
mod sends;
mod sequencer;
#[cfg(test)]
mod tests;

pub use epochs::Epoch;
pub use read_flow_control::Read;
pub use sends::Matched;

use std::collections::VecDeque;

use crate::limits::{self, PeerLimits};
use crate::operation::{Operation, Piece, Verb};
use crate::wire::{self, HEADER_BYTES, Header, Kind, Placement, WITHDRAWN};
use epochs::Epochs;
use read_flow_control::ReadFlowControl;
use sends::{Sends, eager_cost};
use sequencer::Sequencer;

/// Bytes of small operations after which a bulk chunk is pulled.
const SMALL_RUN_BYTES: u64 = 512 << 10;

/// Limits of one pull by a channel.
#[derive(Clone, Copy, Debug)]
pub struct Pull {
    /// Most bytes of frames that one pull takes.
    pub bytes: u64,
    /// Channels among which bulk is divided.
    pub channels: usize,
    /// Longest chunk of one pull in bytes.
    pub chunk_bytes: usize,
    /// Shortest and longest chunk of staged payload, in bytes.
    pub staged_bytes: (usize, usize),
    /// Largest bulk operation in bytes that channels take in order; 0 for none.
    pub ordered_bytes: u64,
    /// Longest chunk of such an operation in bytes, unless it is staged. A longer one is cut into equal chunks.
    pub whole_bytes: u64,
    /// Most bytes of small operations that one pull takes.
    pub small: u64,
    /// Whether bulk may be pulled; false for a channel that is too far ahead of the others, or has as much in flight as it may.
    pub bulk: bool,
    /// Whether bulk may be pulled after many small operations even if `bulk` is false, so that they cannot keep it out.
    pub bulk_in_turn: bool,
    /// Messages that fit the window of the channel's lane; `None` without a lane.
    pub messages: Option<usize>,
}

#[derive(Debug)]
struct Bulk<O> {
    op: O,
    /// Key of the target region or sink.
    key: u64,
    cutter: Cutter,
}

impl<O: Operation> Bulk<O> {
    fn bytes_left(&self) -> u64 {
        self.op.bytes_to_cut() - self.cutter.position()
    }

    /// The bytes of the operation unless it has too many pieces for one frame; 1 if only its notification is left.
    fn ordered_bytes(&self) -> Option<u64> {
        if self.bytes_left() == 0 {
            return Some(1);
        }
        (self.op.pieces().len() <= limits::SEGMENTS_PER_CHUNK_MAX).then(|| self.op.total())
    }

    /// Removes a bulk operation before all of it is cut.
    fn leave(self) -> O {
        if self.cutter.position() == 0 {
            self.op.set_uncut();
        }
        self.op
    }
}

/// The sending side of one peer.
#[derive(Debug)]
pub struct Outbox<O> {
    resend: VecDeque<Frame<O>>,
    own: VecDeque<Frame<O>>,
    /// Notifications that were too far ahead and may now be sent. Kept apart from `own`, whose length is
    /// bounded, and pulled before `small`.
    admitted: VecDeque<(u64, O)>,
    small: VecDeque<O>,
    /// Short announced sends that were matched, with their sinks: small operations, taken in turn with those in `small`. Receives
    /// wait for them, and without a turn of their own they would wait behind all that was posted before the match.
    matched: VecDeque<(O, u64)>,
    /// Whether the last small operation was a matched send.
    took_matched: bool,
    bulk: VecDeque<Bulk<O>>,
    small_run: u64,
    /// Bytes of queued bulk operations that are not cut yet.
    bulk_bytes: u64,
    epochs: Epochs<O>,
    sends: Sends<O>,
    notifications: Sequencer<O>,
    reads: ReadFlowControl<O>,
    limits: PeerLimits,
    closed: bool,
}

impl<O> Outbox<O> {
    /// An empty outbox. The peer's inbox must have equal limits.
    pub fn new(limits: PeerLimits) -> Outbox<O> {
        Outbox {
            resend: VecDeque::new(),
            own: VecDeque::new(),
            admitted: VecDeque::new(),
            small: VecDeque::new(),
            matched: VecDeque::new(),
            took_matched: false,
            bulk: VecDeque::new(),
            small_run: 0,
            bulk_bytes: 0,
            epochs: Epochs::default(),
            sends: Sends::new(limits),
            notifications: Sequencer::new(limits),
            reads: ReadFlowControl::new(limits),
            limits,
            closed: false,
        }
    }

    /// Number of items that are queued in the outbox.
    pub fn len(&self) -> usize {
        self.resend.len() + self.own.len() + self.admitted.len() + self.small_len() + self.bulk.len()
    }

    /// Whether nothing is queued in the outbox.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of queued small operations.
    pub fn small_len(&self) -> usize {
        self.small.len() + self.matched.len()
    }

    /// Number of queued bulk operations.
    pub fn bulk_len(&self) -> usize {
        self.bulk.len()
    }

    /// Bytes of queued bulk operations that are not cut yet.
    pub fn bulk_bytes(&self) -> u64 {
        self.bulk_bytes
    }

    /// Number of queued frames of the engine's own, such as answers to the peer.
    pub fn answers_len(&self) -> usize {
        self.own.len()
    }
}

impl<O: Operation> Outbox<O> {
    /// The bytes of the first bulk operation unless it has too many pieces for one frame; 1 if only its notification is
    /// left.
    pub fn next_ordered_bytes(&self) -> Option<u64> {
        self.bulk.front()?.ordered_bytes()
    }

    /// Queues an operation.
    ///
    /// # Errors
    /// Returns the operation when the peer is lost.
    pub fn post(&mut self, op: O) -> Result<(), O> {
        if self.closed {
            return Err(op);
        }
        // A served read belongs to the peer: this end's notifications do not wait for it.
        if !matches!(op.verb(), Verb::Notify | Verb::Serve) {
            self.join(&op);
        }
        self.post_joined(op)
    }

    /// Queues an operation that has joined its epoch already.
    ///
    /// # Errors
    /// Returns the operation when the peer is lost.
    pub fn post_joined(&mut self, op: O) -> Result<(), O> {
        if self.closed {
            return Err(op);
        }
        match op.verb() {
            Verb::Notify => self.small.extend(self.epochs.post(op)),
            Verb::Send => self.small.push_back(op),
            _ => self.enqueue(op),
        }
        Ok(())
    }

    /// Queues the notification of a parent, whose children are queued or done.
    ///
    /// # Errors
    /// Returns the operation when the peer is lost.
    pub fn post_behind_children(&mut self, parent: O) -> Result<(), O> {
        if self.closed {
            return Err(parent);
        }
        let key = parent.key();
        self.push_bulk(parent, key);
        Ok(())
    }

    /// Makes later notifications wait for an operation that is not queued itself.
    pub fn join(&mut self, op: &O) {
        op.set_epoch(self.epochs.join());
    }

    /// Queues a frame that the engine itself makes, such as an answer to the peer.
    ///
    /// # Errors
    /// Returns the frame when the peer is lost.
    pub fn push_own(&mut self, frame: Frame<O>) -> Result<(), Frame<O>> {
        if self.closed {
            return Err(frame);
        }
        self.own.push_back(frame);
        Ok(())
    }

    /// Queues the undelivered frames of a lost channel, oldest first, ahead of everything else. Must not be
    /// called after [`Outbox::close`], which would never return them.
    pub fn resend(&mut self, frames: impl DoubleEndedIterator<Item = Frame<O>>) {
        debug_assert!(!self.closed, "nothing is sent again to a lost peer");
        frames.rev().for_each(|frame| self.resend.push_front(frame));
    }

    /// Whether the peer is lost.
    pub fn is_closed(&self) -> bool {
        self.closed
    }

    /// Queues the notifications whose epochs are over; to be called when [`Epoch::leave`] returns true.
    pub fn release_notifications(&mut self) {
        while let Some(op) = self.epochs.next() {
            self.small.push_back(op);
        }
    }

    /// Notes that the peer has this frame. If the frame is numbered, later ones that were too far ahead may
    /// follow; returns whether any do.
    pub fn had(&mut self, header: &Header) -> bool {
        if !is_numbered(header) {
            return false;
        }
        let message = header.kind != Kind::Notify;
        let admitted = if message {
            self.sends.sequencer.had(header.offset)
        } else {
            self.notifications.had(header.transfer)
        };
        let any = !admitted.is_empty();
        for (number, op) in admitted {
            if message {
                self.small.push_back(op);
            } else {
                self.admitted.push_back((number, op));
            }
        }
        any
    }

    /// Removes the part of an operation of this kind that is not cut yet.
    pub fn take_out(&mut self, verb: Verb, is_it: impl Fn(&O) -> bool) -> Option<O> {
        if let Some(at) = self.bulk.iter().position(|bulk| is_it(&bulk.op)) {
            let bulk = self.bulk.remove(at)?;
            self.bulk_bytes -= bulk.bytes_left();
            return Some(bulk.leave());
        }
        if let Some(at) = self.matched.iter().position(|(op, _)| is_it(op)) {
            let (op, _) = self.matched.remove(at)?;
            op.set_uncut();
            return Some(op);
        }
        // A send keeps its number and is withdrawn when pulled; so is a queued notification.
        if verb != Verb::Write && verb != Verb::Serve {
            return None;
        }
        let at = self.small.iter().position(is_it)?;
        self.small.remove(at)
    }

    /// Closes the outbox for good; returns all operations, queued or waiting.
    pub fn close(&mut self) -> Vec<O> {
        self.closed = true;
        self.bulk_bytes = 0;
        let mut ops: Vec<O> = self.small.drain(..).collect();
        ops.extend(self.matched.drain(..).map(|(op, _)| op));
        ops.extend(self.bulk.drain(..).map(|bulk| bulk.op));
        ops.extend(self.sends.announced.drain().map(|(_, op)| op));
        ops.extend(self.epochs.close());
        ops.extend(self.resend.drain(..).filter_map(|frame| frame.op));
        ops.extend(self.own.drain(..).filter_map(|frame| frame.op));
        ops.extend(self.admitted.drain(..).map(|(_, op)| op));
        ops.extend(self.sends.sequencer.close().chain(self.notifications.close()));
        ops.extend(self.reads.close().filter_map(|frame| frame.op));
        ops
    }

    /// Takes the next frame; with `gpu`, also frames with payload in GPU memory. Operations that ended
    /// without needing a frame are added to `dropped`.
    pub fn next(&mut self, pull: Pull, gpu: bool, dropped: &mut Vec<O>) -> Option<Frame<O>> {
        if let Some(mut frame) = self.resend.pop_front_if(|frame| gpu || !frame.is_staged()) {
            let credit = frame.withdraw_if_forbidden();
            self.return_credit(credit);
            return Some(frame);
        }
        if let Some(frame) = self.own.pop_front() {
            return Some(frame);
        }
        if let Some((number, op)) = self.admitted.pop_front() {
            return Some(message_frame(op, number, 0));
        }
        let is_turn = self.small_run >= SMALL_RUN_BYTES;
        let bulk_waits = !self.bulk.is_empty() && (pull.bulk || pull.bulk_in_turn && is_turn);
        if pull.small > 0
            && !(is_turn && bulk_waits)
            && let Some(frame) = self.next_small(pull, gpu, dropped)
        {
            self.small_run += frame.bytes() as u64;
            return Some(frame);
        }
        if bulk_waits || self.bulk.is_empty() {
            self.small_run = 0;
        }
        if bulk_waits { self.next_bulk(pull, gpu, dropped) } else { None }
    }

    fn next_small(&mut self, pull: Pull, gpu: bool, dropped: &mut Vec<O>) -> Option<Frame<O>> {
        if !self.took_matched
            && let Some(frame) = self.next_matched(gpu, dropped)
        {
            return Some(frame);
        }
        if let Some(frame) = self.next_posted(pull, gpu, dropped) {
            self.took_matched = false;
            return Some(frame);
        }
        self.next_matched(gpu, dropped)
    }

    fn next_matched(&mut self, gpu: bool, dropped: &mut Vec<O>) -> Option<Frame<O>> {
        while let Some((op, sink)) = self.matched.pop_front_if(|(op, _)| gpu || !op.on_gpu()) {
            if !op.is_unsendable() {
                self.took_matched = true;
                let chunk = whole(&op);
                return Some(chunk_frame(op, chunk, sink));
            }
            op.set_uncut();
            dropped.push(op);
        }
        None
    }

    fn next_posted(&mut self, pull: Pull, gpu: bool, dropped: &mut Vec<O>) -> Option<Frame<O>> {
        while let Some(op) = self.small.pop_front_if(|op| gpu || !op.on_gpu()) {
            if op.is_unsendable() && op.verb() != Verb::Send {
                dropped.push(op);
                continue;
            }
            let frame = match op.verb() {
                Verb::Send => {
                    let op = self.sends.sequencer.admit_numbered(op);
                    op.map(|op| self.send_frame(op, pull.messages.is_some(), dropped))
                }
                Verb::Notify => {
                    let numbered = self.notifications.number(op);
                    numbered.map(|(number, op)| message_frame(op, number, 0))
                }
                _ => Some(small_frame(op)),
            };
            if frame.is_some() {
                return frame;
            }
        }
        None
    }

    fn next_bulk(&mut self, pull: Pull, gpu: bool, dropped: &mut Vec<O>) -> Option<Frame<O>> {
        loop {
            let bulk = self.bulk.front_mut().filter(|bulk| gpu || !bulk.op.on_gpu())?;
            let is_staged = bulk.op.on_gpu() && pull.messages.is_none();
            let (min, max) = if is_staged {
                (pull.staged_bytes.0, pull.chunk_bytes.min(pull.staged_bytes.1))
            } else {
                (limits::CHUNK_BYTES_MIN, pull.chunk_bytes)
            };
            let is_ordered = bulk.ordered_bytes().is_some_and(|bytes| bytes <= pull.ordered_bytes);
            let bytes = if is_ordered && !is_staged {
                equal_part(bulk.bytes_left(), pull.whole_bytes)
            } else {
                chunk_bytes(self.bulk_bytes, pull.channels, min, max)
            };
            let limits = ChunkLimits { bytes, segments: limits::SEGMENTS_PER_CHUNK_MAX };
            let chunk =
                if bulk.op.is_unsendable() { None } else { bulk.cutter.next(bulk.op.pieces(), limits) };
            let Some(chunk) = chunk else {
                let bulk = self.bulk.pop_front()?;
                self.bulk_bytes -= bulk.bytes_left();
                let op = bulk.leave();
                if op.is_failing() {
                    dropped.push(op);
                    continue;
                }
                let (id, total) = (op.id(), op.total());
                return Some(message_frame(op, id, total));
            };
            self.bulk_bytes -= u64::from(chunk.bytes);
            let (key, last) = (bulk.key, bulk.cutter.position() == bulk.op.total());
            // The operation's own token travels with its last frame, which is a chunk or the notification.
            if last && bulk.op.message_bytes() == 0 {
                return self.bulk.pop_front().map(|bulk| chunk_frame(bulk.op, chunk, key));
            }
            return Some(chunk_frame(bulk.op.retain(), chunk, key));
        }
    }

    fn enqueue(&mut self, op: O) {
        if self.is_small(&op) {
            self.small.push_back(op);
        } else {
            let key = op.key();
            self.push_bulk(op, key);
        }
    }

    /// Whether one frame takes the whole operation.
    fn is_small(&self, op: &O) -> bool {
        op.total() <= self.limits.small_bytes_max && op.pieces().len() <= limits::SEGMENTS_PER_CHUNK_MAX
    }

    fn push_bulk(&mut self, op: O, key: u64) {
        self.bulk_bytes += op.bytes_to_cut();
        self.bulk.push_back(Bulk { op, key, cutter: Cutter::default() });
    }

    /// Asserts that the outbox holds nothing that waits for the peer or for an operation.
    #[cfg(test)]
    pub(crate) fn check_idle(&self) {
        assert!(self.is_empty() && self.sends.announced.is_empty() && self.bulk_bytes == 0);
        assert!(!self.reads.keeps_back() && self.reads.asked() == (0, 0), "requests of reads are left");
        assert!(
            self.sends.sequencer.is_idle() && self.notifications.is_idle(),
            "numbers are not known to be there"
        );
        assert!(self.epochs.is_idle(), "a notification waits");
    }
}

/// Whether a frame has a number, so that later frames wait for it.
pub fn is_numbered(header: &Header) -> bool {
    match header.kind {
        Kind::Send | Kind::Announce => true,
        Kind::Notify => header.total == 0,
        _ => false,
    }
}

/// Source of a frame's payload.
#[derive(Debug)]
pub enum Body {
    /// No payload, or the operation's notification.
    None,
    /// A run of the operation's message.
    Chunk(Chunk),
}

/// A frame that is not encoded yet.
#[derive(Debug)]
pub struct Frame<O> {
    /// The frame's header.
    pub header: Header,
    /// Encoded placement descriptors of the frame.
    pub placements: Box<[u8]>,
    /// Source of the frame's payload.
    pub body: Body,
    /// The operation that the frame belongs to, with a token of its own.
    pub op: Option<O>,
}

impl<O> Frame<O> {
    /// A frame without payload and operation.
    pub fn bare(header: Header) -> Frame<O> {
        Frame { header, placements: Box::default(), body: Body::None, op: None }
    }

    /// Bytes of the whole frame, on the channel and its lane together.
    pub fn bytes(&self) -> usize {
        HEADER_BYTES + self.header.body_bytes()
    }

    /// Replaces the frame's payload, which is not available, by nothing. Returns the eager credit in bytes
    /// that becomes free.
    fn withdraw(&mut self) -> u64 {
        let (header, credit) = withdrawn(&self.header);
        self.header = header;
        self.placements = Box::default();
        self.body = Body::None;
        credit
    }
}

impl<O: Operation> Frame<O> {
    /// Whether the payload must be copied out of a GPU before it is sent.
    fn is_staged(&self) -> bool {
        self.header.len > 0
            && !self.header.is_posted()
            && matches!(self.body, Body::Chunk(_))
            && self.op.as_ref().is_some_and(O::on_gpu)
    }

    /// Prepares a frame for being sent again: empties it if its operation forbids that. Returns the eager
    /// credit in bytes that becomes free.
    fn withdraw_if_forbidden(&mut self) -> u64 {
        let forbidden =
            matches!(self.body, Body::Chunk(_)) && self.op.as_ref().is_some_and(O::forbids_resend);
        if forbidden { self.withdraw() } else { 0 }
    }
}

/// The header that replaces that of a frame without available payload, and the eager credit in bytes that
/// becomes free. Later frames keep their numbers. An eager message keeps its number too, and is withdrawn.
pub fn withdrawn(header: &Header) -> (Header, u64) {
    match header.kind {
        Kind::Send => {
            let announce = Header { kind: Kind::Announce, len: 0, total: WITHDRAWN, ..*header };
            (announce, eager_cost(header.len.into()) as u64)
        }
        _ => (Header::new(Kind::Credit), 0),
    }
}

/// One chunk that covers a whole operation, of no more pieces than one frame takes.
fn whole(op: &impl Operation) -> Chunk {
    Chunk { bytes: op.total() as u32, ..Chunk::EMPTY }
}

/// One frame for a whole operation and its notification.
fn small_frame<O: Operation>(op: O) -> Frame<O> {
    let (chunk, key) = (whole(&op), op.key());
    let (notify, is_child) = (op.message_bytes() as u16, op.is_child());
    let mut frame = chunk_frame(op, chunk, key);
    // The notification of a parent follows all its children, so the peer counts a child's bytes.
    if !is_child {
        frame.header.flags &= !wire::FLAG_COUNTED;
    }
    frame.header.notify = notify;
    frame
}

/// A frame for one chunk, to the region or sink `key`.
fn chunk_frame<O: Operation>(op: O, chunk: Chunk, key: u64) -> Frame<O> {
    let mut header = Header::new(Kind::Data);
    header.transfer = op.id();
    header.len = chunk.bytes;
    header.total = op.total();
    header.key = key;
    let mut placements = Vec::new();
    match op.verb() {
        Verb::Send | Verb::Serve => {
            header.flags |= wire::FLAG_SINK;
            header.offset = op.number() * u64::from(op.verb() == Verb::Serve) + chunk.position;
        }
        _ => {
            if op.is_counted() {
                header.flags |= wire::FLAG_COUNTED;
            }
            match chunk.single(op.pieces()) {
                Some(offset) => header.offset = offset,
                None => {
                    let list = chunk.placements(op.pieces());
                    header.segments = list.len() as u16;
                    list.iter().for_each(|placement| placement.encode_into(&mut placements));
                }
            }
        }
    }
    Frame { header, placements: placements.into(), body: Body::Chunk(chunk), op: Some(op) }
}

/// A frame for a notification. With `total`, it is delivered once `total` bytes of `transfer` are placed;
/// without, `transfer` is its number and it is delivered in its turn.
fn message_frame<O: Operation>(op: O, transfer: u64, total: u64) -> Frame<O> {
    let mut header = Header::new(Kind::Notify);
    header.transfer = transfer;
    header.total = total;
    header.len = op.message_bytes() as u32;
    Frame { header, placements: Box::default(), body: Body::None, op: Some(op) }
}

/// Bounds of the size of one chunk.
#[derive(Clone, Copy, Debug)]
pub struct ChunkLimits {
    /// Most bytes of one chunk.
    pub bytes: u64,
    /// Most pieces of the chunk, and so most placements.
    pub segments: usize,
}

/// A run of a message: `bytes` bytes, starting `within` bytes into piece `first`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    first: u32,
    within: u64,
    /// Length of the chunk in bytes.
    pub bytes: u32,
    /// Offset of the chunk in the message, in bytes.
    pub position: u64,
}

impl Chunk {
    /// The chunk of a message without bytes.
    pub const EMPTY: Chunk = Chunk { first: 0, within: 0, bytes: 0, position: 0 };

    /// The chunk's runs of pieces, in order.
    fn runs<'a>(&self, pieces: &'a [Piece]) -> impl Iterator<Item = Piece> + use<'a> {
        let mut left = u64::from(self.bytes);
        let mut within = self.within;
        pieces[(self.first as usize).min(pieces.len())..].iter().map_while(move |piece| {
            if left == 0 {
                return None;
            }
            let len = (piece.len - within).min(left);
            let run = Piece { local: piece.local + within, remote: piece.remote + within, len };
            left -= len;
            within = 0;
            Some(run)
        })
    }

    /// Local `(offset, len)` ranges of the chunk, in order.
    #[inline]
    pub fn locals<'a>(&self, pieces: &'a [Piece]) -> impl Iterator<Item = (u64, u64)> + use<'a> {
        self.runs(pieces).map(|run| (run.local, run.len))
    }

    /// Remote placements of the chunk, in order; placements that touch are joined.
    pub fn placements(&self, pieces: &[Piece]) -> Vec<Placement> {
        let mut out: Vec<Placement> = Vec::new();
        for run in self.runs(pieces) {
            match out.last_mut() {
                Some(last) if last.offset + u64::from(last.len) == run.remote => last.len += run.len as u32,
                _ => out.push(Placement { offset: run.remote, len: run.len as u32 }),
            }
        }
        out
    }

    /// The remote offset of a chunk that is one run; `None` for several runs.
    #[inline]
    pub fn single(&self, pieces: &[Piece]) -> Option<u64> {
        let piece = pieces.get(self.first as usize)?;
        (piece.len - self.within >= u64::from(self.bytes)).then_some(piece.remote + self.within)
    }
}

/// Walks a message once and hands out its chunks.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cutter {
    piece: usize,
    within: u64,
    position: u64,
}

impl Cutter {
    /// Number of bytes of the operation that were cut into chunks so far.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// The next chunk within the limits; `None` at the end.
    pub fn next(&mut self, pieces: &[Piece], limits: ChunkLimits) -> Option<Chunk> {
        let start = *self;
        let mut bytes = 0;
        for _ in 0..limits.segments.max(1) {
            let Some(piece) = pieces.get(self.piece) else {
                break;
            };
            let len = (piece.len - self.within).min(limits.bytes - bytes);
            bytes += len;
            self.within += len;
            if self.within < piece.len {
                break;
            }
            self.piece += 1;
            self.within = 0;
            if bytes == limits.bytes {
                break;
            }
        }
        self.position += bytes;
        (bytes > 0).then_some(Chunk {
            first: start.piece as u32,
            within: start.within,
            bytes: bytes as u32,
            position: start.position,
        })
    }
}

/// The first of as few equal parts of `bytes` as have at most `part_bytes_max` bytes, in whole pages where that allows it.
fn equal_part(bytes: u64, part_bytes_max: u64) -> u64 {
    let parts = bytes.div_ceil(part_bytes_max.max(1)).max(1);
    bytes.div_ceil(parts).next_multiple_of(4096).min(part_bytes_max)
}

/// Size of the next chunk in bytes: half of an equal share of the rest, in whole pages, within the bounds.
pub fn chunk_bytes(rest: u64, channels: usize, chunk_bytes_min: usize, chunk_bytes_max: usize) -> u64 {
    let max = chunk_bytes_max as u64;
    let min = (chunk_bytes_min as u64).min(max);
    let share = (rest / (2 * channels.max(1) as u64)).next_multiple_of(4096);
    share.clamp(min, max)
}
