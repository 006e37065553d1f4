//! A frame on its way: what its head says, and where its payload comes from.
//!
//! Invariant: the pieces of a frame are exactly the bytes that its head announces. Read next: `mod.rs`.

use crate::core::operation::{Op, Verb};
use crate::core::staging::Staged;
use crate::error::Error;
use ferrywire_memory::{Memory, Place};
use ferrywire_proto::limits;
use ferrywire_proto::transfer::{Chunk, ChunkLimits, Cutter};
use ferrywire_proto::wire::{self, HEADER_BYTES, Header, Kind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::WITHDRAWN;

/// A frame in a window: encoded head, and what its payload is taken from.
pub(crate) struct Entry {
    pub header: Header,
    pub head: [u8; HEADER_BYTES],
    pub placements: Box<[u8]>,
    pub body: Body,
    pub op: Option<Arc<Op>>,
    /// Where the payload waits to be sent, if it comes from a GPU.
    pub staged: Option<Staged>,
}

/// Why nothing of some memory is sent any more.
pub(crate) const DROPPED: &str = "it was dropped before the operation had ended";

/// Where a frame's payload comes from.
pub(crate) enum Body {
    None,
    /// A run of the operation's message.
    Chunk(Chunk),
}

impl Entry {
    pub(super) fn new(header: Header, placements: Box<[u8]>, body: Body, op: Option<Arc<Op>>) -> Entry {
        Entry { head: header.encode(), header, placements, body, op, staged: None }
    }

    /// A frame of the engine's own, without payload.
    pub fn bare(header: Header) -> Entry {
        Entry::new(header, Box::default(), Body::None, None)
    }

    /// Bytes on the wire, over whatever they travel.
    pub fn bytes(&self) -> usize {
        HEADER_BYTES + self.header.body_bytes()
    }

    /// Bytes of it that go into the stream.
    pub fn stream_bytes(&self) -> usize {
        HEADER_BYTES + self.header.stream_bytes()
    }

    /// Says whether the payload goes over a lane: a frame may travel again over another channel.
    pub(super) fn post(&mut self, lane: bool) {
        let posted = lane && self.header.kind == Kind::Data && self.header.len > 0;
        if posted != self.header.is_posted() {
            self.header.flags ^= wire::FLAG_POSTED;
            self.head = self.header.encode();
        }
    }

    /// The memory and the ranges of it that the payload is taken from.
    pub fn payload(&self) -> Option<(&Arc<Memory>, impl Iterator<Item = (u64, u64)> + '_)> {
        let op = self.op.as_ref()?;
        match (&self.body, &op.memory) {
            (Body::Chunk(chunk), Some(memory)) => Some((memory, chunk.locals(op.pieces.as_slice()))),
            _ => None,
        }
    }

    /// Whether its payload is in memory that its user may have freed, and not in a ring.
    pub fn is_gone(&self) -> bool {
        self.staged.is_none() && self.is_of_gone_memory()
    }

    /// Whether its payload comes from such memory, wherever it is now.
    pub fn is_of_gone_memory(&self) -> bool {
        self.payload().is_some_and(|(memory, _)| memory.is_gone())
    }

    /// The GPU whose memory the payload is to be staged from, if there is any.
    pub fn gpu(&self) -> Option<Place> {
        if self.header.len == 0 || self.header.is_posted() {
            return None;
        }
        self.payload().map(|(memory, _)| memory.place()).filter(|place| *place != Place::Host)
    }

    /// The payload cannot be had: the operation fails, and the frame goes out as one that says nothing, so that
    /// those behind it keep their numbers. Returns credit that it does not need after all.
    pub fn give_up(&mut self, error: &Error) -> u64 {
        self.op.iter().for_each(|op| op.fail(error.clone()));
        let old = std::mem::replace(&mut self.header, Header::new(Kind::Credit));
        let mut credit = 0;
        if old.kind == Kind::Send {
            // The message keeps its turn, and is taken back.
            self.header = Header { kind: Kind::Announce, len: 0, total: WITHDRAWN, ..old };
            credit = eager_cost(old.len.into()) as u64;
        }
        self.head = self.header.encode();
        self.placements = Box::default();
        self.body = Body::None;
        credit
    }

    /// Its memory cannot be read. It is sent again as one that is given up.
    pub fn fail_unread(&self, why: Error) {
        let why = if self.is_gone() { Error::invalid("region", DROPPED) } else { why };
        self.op.iter().for_each(|op| op.fail(why.clone()));
    }

    /// The pieces of host memory that follow head and placements in the stream.
    pub fn stream_pieces(&self, each: impl FnMut(*mut u8, usize)) {
        self.pieces(!self.header.is_posted(), each);
    }

    fn pieces(&self, with_payload: bool, mut each: impl FnMut(*mut u8, usize)) {
        let Some(op) = &self.op else { return };
        if let Some((memory, ranges)) = self.payload().filter(|_| with_payload) {
            if let Some(staged) = &self.staged {
                each(staged.base(), self.header.len as usize);
            }
            for (offset, len) in ranges.filter(|_| self.staged.is_none()) {
                match memory.span(offset, len) {
                    Some(base) => each(base, len as usize),
                    None => debug_assert!(false, "pieces are checked when an operation is posted"),
                }
            }
        }
        if self.header.notify > 0 || self.header.kind == Kind::Notify {
            each(op.message.as_ptr().cast_mut(), op.message.len());
        }
    }

    /// Once the payload is where the CPU can read it.
    pub fn add_crc(&mut self) {
        let mut crc = crc32fast::Hasher::new();
        // SAFETY: the pieces lie in memory that the operation keeps alive.
        self.pieces(true, |base, len| crc.update(unsafe { std::slice::from_raw_parts(base, len) }));
        self.header.flags |= wire::FLAG_CRC;
        self.header.crc = crc.finalize();
        self.header.placements_crc = crc32fast::hash(&self.placements);
        self.head = self.header.encode();
    }
}

/// What an eager message of so many bytes takes of the credit.
pub(super) fn eager_cost(bytes: u64) -> usize {
    bytes as usize + limits::EAGER_OVERHEAD_BYTES
}

pub(super) fn whole(op: &Op) -> Chunk {
    let all = ChunkLimits { bytes: op.total, segments: limits::SEGMENTS_PER_CHUNK_MAX };
    Cutter::default().next(op.pieces.as_slice(), all).unwrap_or(Chunk::EMPTY)
}

/// One frame for a whole operation, its notification included.
pub(super) fn small_entry(op: Arc<Op>) -> Entry {
    let chunk = whole(&op);
    let mut entry = chunk_entry(op, chunk);
    // The notification of a whole comes behind all its parts.
    if entry.op.as_ref().is_none_or(|op| op.whole.is_none()) {
        entry.header.flags &= !wire::FLAG_COUNTED;
    }
    entry.header.notify = entry.op.as_ref().map_or(0, |op| op.message.len() as u16);
    entry.head = entry.header.encode();
    entry
}

pub(super) fn chunk_entry(op: Arc<Op>, chunk: Chunk) -> Entry {
    let mut header = Header::new(Kind::Data);
    header.transfer = op.id;
    header.len = chunk.bytes;
    header.total = op.total;
    let mut placements = Vec::new();
    match op.verb {
        Verb::Send | Verb::Serve => {
            header.flags |= wire::FLAG_SINK;
            header.key = if op.verb == Verb::Send { op.sink.load(Ordering::Relaxed) } else { op.key };
            header.offset = op.number * u64::from(op.verb == Verb::Serve) + chunk.position;
        }
        _ => {
            header.key = op.key;
            if op.notifies() {
                header.flags |= wire::FLAG_COUNTED;
            }
            match chunk.single(op.pieces.as_slice()) {
                Some(offset) => header.offset = offset,
                None => {
                    let list = chunk.placements(op.pieces.as_slice());
                    header.segments = list.len() as u16;
                    list.iter().for_each(|placement| placement.encode_into(&mut placements));
                }
            }
        }
    }
    Entry::new(header, placements.into(), Body::Chunk(chunk), Some(op))
}

/// A notification of its own: delivered once `total` bytes of `transfer` are placed, or, with no bytes to
/// wait for, in its turn, for which `transfer` is its number.
pub(super) fn message_entry(op: Arc<Op>, transfer: u64, total: u64) -> Entry {
    let mut header = Header::new(Kind::Notify);
    header.transfer = transfer;
    header.total = total;
    header.len = op.message.len() as u32;
    Entry::new(header, Box::default(), Body::None, Some(op))
}
