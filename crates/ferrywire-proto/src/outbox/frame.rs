//! A frame that is to be sent: what its header says, and where its payload comes from.
//!
//! Invariant: the payload's pieces are exactly the bytes that the header announces. Read next: `mod.rs`.

use crate::limits;
use crate::operation::{Operation, Verb};
use crate::transfer::{Chunk, ChunkLimits, Cutter};
use crate::wire::{self, HEADER_BYTES, Header, Kind, WITHDRAWN};

/// Where a frame's payload comes from.
#[derive(Debug)]
pub enum Body {
    /// Nothing, or the operation's notification.
    None,
    /// A run of the operation's message.
    Chunk(Chunk),
}

/// A frame, not encoded yet.
#[derive(Debug)]
pub struct Frame<O> {
    /// What it says.
    pub header: Header,
    /// Encoded placement descriptors.
    pub placements: Box<[u8]>,
    /// Where its payload comes from.
    pub body: Body,
    /// The operation that it is of, with a token of its own.
    pub op: Option<O>,
}

impl<O> Frame<O> {
    /// One without payload or operation.
    pub fn bare(header: Header) -> Frame<O> {
        Frame { header, placements: Box::default(), body: Body::None, op: None }
    }

    /// Bytes of it, over whatever they travel.
    pub fn bytes(&self) -> usize {
        HEADER_BYTES + self.header.body_bytes()
    }

    /// The payload cannot be had: the frame becomes one that says nothing. Returns the credit that it does not need.
    fn withdraw(&mut self) -> u64 {
        let (header, credit) = withdrawn(&self.header);
        self.header = header;
        self.placements = Box::default();
        self.body = Body::None;
        credit
    }
}

impl<O: Operation> Frame<O> {
    /// Whether its payload is to be copied out of a GPU before it can be sent.
    pub(super) fn is_staged(&self) -> bool {
        self.header.len > 0
            && !self.header.is_posted()
            && matches!(self.body, Body::Chunk(_))
            && self.op.as_ref().is_some_and(O::on_gpu)
    }

    /// Before it is sent again: it carries nothing if its operation forbids that. Returns credit that is free then.
    pub(super) fn withdraw_if_forbidden(&mut self) -> u64 {
        let forbidden =
            matches!(self.body, Body::Chunk(_)) && self.op.as_ref().is_some_and(O::forbids_resend);
        if forbidden { self.withdraw() } else { 0 }
    }
}

/// What takes the place of a frame whose payload cannot be had, so that those behind it keep their numbers, and the credit
/// that is not needed after all. An eager message keeps its turn, and is taken back.
pub fn withdrawn(header: &Header) -> (Header, u64) {
    match header.kind {
        Kind::Send => {
            let announce = Header { kind: Kind::Announce, len: 0, total: WITHDRAWN, ..*header };
            (announce, eager_cost(header.len.into()) as u64)
        }
        _ => (Header::new(Kind::Credit), 0),
    }
}

/// What an eager message of so many bytes takes of the credit.
pub(super) fn eager_cost(bytes: u64) -> usize {
    bytes as usize + limits::EAGER_OVERHEAD_BYTES
}

/// All of an operation as one chunk.
pub(super) fn whole(op: &impl Operation) -> Chunk {
    let all = ChunkLimits { bytes: op.total(), segments: limits::SEGMENTS_PER_CHUNK_MAX };
    Cutter::default().next(op.pieces(), all).unwrap_or(Chunk::EMPTY)
}

/// One frame for a whole operation, its notification included.
pub(super) fn small_frame<O: Operation>(op: O) -> Frame<O> {
    let (chunk, key) = (whole(&op), op.key());
    let (notify, is_child) = (op.message_bytes() as u16, op.is_child());
    let mut frame = chunk_frame(op, chunk, key);
    // The notification of a parent comes behind all its children.
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

/// A notification of its own: delivered once `total` bytes of `transfer` are placed, or, with no bytes to
/// wait for, in its turn, for which `transfer` is its number.
pub(super) fn message_frame<O: Operation>(op: O, transfer: u64, total: u64) -> Frame<O> {
    let mut header = Header::new(Kind::Notify);
    header.transfer = transfer;
    header.total = total;
    header.len = op.message_bytes() as u32;
    Frame { header, placements: Box::default(), body: Body::None, op: Some(op) }
}
