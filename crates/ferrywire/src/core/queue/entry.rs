//! An encoded frame in a window, with the memory that its payload comes from.
//!
//! Invariant: the pieces of a frame are exactly the bytes that its header announces. Read next: `mod.rs`.

use crate::core::operation::Hold;
use crate::core::staging::Staged;
use crate::error::Error;
use ferrywire_memory::{Memory, MemoryLocation};
use ferrywire_proto::outbox::{Body, Frame, withdrawn};
use ferrywire_proto::wire::{self, HEADER_BYTES, Header, Kind};
use std::sync::Arc;

/// An encoded frame of a window, and the source of its payload.
pub(crate) struct Entry {
    pub header: Header,
    pub encoded_header: [u8; HEADER_BYTES],
    pub placements: Box<[u8]>,
    pub body: Body,
    pub op: Option<Hold>,
    /// The payload's bytes in a staging ring, if it comes from a GPU.
    pub staged: Option<Staged>,
}

/// Why an operation on dropped memory fails.
pub(crate) const DROPPED: &str = "it was dropped before the operation had ended";

impl Entry {
    /// Creates a frame without payload, such as an answer.
    pub fn bare(header: Header) -> Entry {
        Entry::from(Frame::bare(header))
    }

    /// Bytes of the frame, in the stream and over a lane.
    pub fn bytes(&self) -> usize {
        HEADER_BYTES + self.header.body_bytes()
    }

    /// Bytes of the frame that go into the stream.
    pub fn stream_bytes(&self) -> usize {
        HEADER_BYTES + self.header.stream_bytes()
    }

    /// The source memory of the payload, with its ranges as (offset, length) in bytes.
    pub fn payload(&self) -> Option<(&Arc<Memory>, impl Iterator<Item = (u64, u64)> + '_)> {
        let op = self.op.as_ref()?;
        match (&self.body, &op.memory) {
            (Body::Chunk(chunk), Some(memory)) => Some((memory, chunk.locals(op.pieces.as_slice()))),
            _ => None,
        }
    }

    /// Whether the payload must be read from memory that its user may have freed; false if a ring has it.
    pub fn is_gone(&self) -> bool {
        self.staged.is_none() && self.is_of_gone_memory()
    }

    /// Whether the payload comes from memory that its user may have freed, even if a ring has it now.
    pub fn is_of_gone_memory(&self) -> bool {
        self.payload().is_some_and(|(memory, _)| memory.is_gone())
    }

    /// The GPU whose memory the payload is staged from, if any.
    pub fn gpu(&self) -> Option<MemoryLocation> {
        if self.header.len == 0 || self.header.is_posted() {
            return None;
        }
        self.payload()
            .map(|(memory, _)| memory.location())
            .filter(|location| *location != MemoryLocation::Host)
    }

    /// Gives up the payload: the operation fails, and the frame is sent without effect so that later frames
    /// keep their numbers. Returns credit in bytes that the frame no longer needs.
    pub fn give_up(&mut self, error: &Error) -> u64 {
        self.op.iter().for_each(|op| op.fail(error.clone()));
        let (header, credit) = withdrawn(&self.header);
        self.header = header;
        self.encoded_header = self.header.encode();
        self.placements = Box::default();
        self.body = Body::None;
        credit
    }

    /// Fails the operation of a frame whose memory cannot be read. The frame is sent again without effect.
    pub fn fail_unread(&self, why: Error) {
        let why = if self.is_gone() { Error::invalid("region", DROPPED) } else { why };
        self.op.iter().for_each(|op| op.fail(why.clone()));
    }

    /// Calls `each` with the host memory that follows header and placements in the stream.
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

    /// Adds the checksum, once the CPU can read the payload.
    pub fn add_crc(&mut self) {
        let mut crc = crc32fast::Hasher::new();
        // SAFETY: the pieces lie in memory that the operation keeps alive.
        self.pieces(true, |base, len| crc.update(unsafe { std::slice::from_raw_parts(base, len) }));
        self.header.flags |= wire::FLAG_CRC;
        self.header.crc = crc.finalize();
        self.header.placements_crc = crc32fast::hash(&self.placements);
        self.encoded_header = self.header.encode();
    }
}

impl From<Frame<Hold>> for Entry {
    fn from(Frame { header, placements, body, op }: Frame<Hold>) -> Entry {
        Entry { encoded_header: header.encode(), header, placements, body, op, staged: None }
    }
}

impl From<Entry> for Frame<Hold> {
    /// Drops the staged bytes: the frame's next channel stages them again.
    fn from(Entry { header, placements, body, op, .. }: Entry) -> Frame<Hold> {
        Frame { header, placements, body, op }
    }
}
