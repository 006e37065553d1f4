//! A frame to be sent: its header, and the source of its payload.
//!
//! Invariant: the pieces of the payload have exactly the bytes that the header announces.
//! Read next: `mod.rs`.

use crate::limits;
use crate::operation::{Operation, Verb};
use crate::transfer::{Chunk, ChunkLimits, Cutter};
use crate::wire::{self, HEADER_BYTES, Header, Kind, WITHDRAWN};

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
    /// The header.
    pub header: Header,
    /// Encoded placement descriptors.
    pub placements: Box<[u8]>,
    /// Source of the payload.
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

    /// Replaces the payload, which is not available, by nothing. Returns the credit that becomes free.
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
    pub(super) fn is_staged(&self) -> bool {
        self.header.len > 0
            && !self.header.is_posted()
            && matches!(self.body, Body::Chunk(_))
            && self.op.as_ref().is_some_and(O::on_gpu)
    }

    /// Prepares a frame for being sent again: empties it if its operation forbids that. Returns the credit
    /// that becomes free.
    pub(super) fn withdraw_if_forbidden(&mut self) -> u64 {
        let forbidden =
            matches!(self.body, Body::Chunk(_)) && self.op.as_ref().is_some_and(O::forbids_resend);
        if forbidden { self.withdraw() } else { 0 }
    }
}

/// The header that replaces a frame without available payload, and the credit that becomes free. Later frames
/// keep their numbers. An eager message keeps its number too, and is withdrawn.
pub fn withdrawn(header: &Header) -> (Header, u64) {
    match header.kind {
        Kind::Send => {
            let announce = Header { kind: Kind::Announce, len: 0, total: WITHDRAWN, ..*header };
            (announce, eager_cost(header.len.into()) as u64)
        }
        _ => (Header::new(Kind::Credit), 0),
    }
}

/// Credit that an eager message of `bytes` bytes costs.
pub(super) fn eager_cost(bytes: u64) -> usize {
    bytes as usize + limits::EAGER_OVERHEAD_BYTES
}

/// The whole operation as one chunk.
pub(super) fn whole(op: &impl Operation) -> Chunk {
    let all = ChunkLimits { bytes: op.total(), segments: limits::SEGMENTS_PER_CHUNK_MAX };
    Cutter::default().next(op.pieces(), all).unwrap_or(Chunk::EMPTY)
}

/// One frame for a whole operation and its notification.
pub(super) fn small_frame<O: Operation>(op: O) -> Frame<O> {
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
pub(super) fn chunk_frame<O: Operation>(op: O, chunk: Chunk, key: u64) -> Frame<O> {
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
pub(super) fn message_frame<O: Operation>(op: O, transfer: u64, total: u64) -> Frame<O> {
    let mut header = Header::new(Kind::Notify);
    header.transfer = transfer;
    header.total = total;
    header.len = op.message_bytes() as u32;
    Frame { header, placements: Box::default(), body: Body::None, op: Some(op) }
}
