//! A frame that is being received: which part of it comes next, and where that goes.
//!
//! Invariant: bytes are taken in the order of the stream; a part is left only when it is whole.
//! Read next: `receiving.rs`, which feeds it.

use std::io;
use std::time::Instant;

use super::broken;
use crate::core::peer::Landing;
use crate::core::posted::Arrival;
use crate::payload::lane::Run;
use ferrywire_net::IoVec;
use ferrywire_proto::wire::{self, HEADER_BYTES, Header, Kind, Refusal};

// SAFETY: the pieces point into memory that the landing keeps alive, or into the receiver's own message;
// whichever thread owns the channel may write there.
unsafe impl Send for Receiver {}

pub(super) struct Receiver {
    pub(super) stage: Stage,
    pub(super) head: [u8; HEADER_BYTES],
    pub(super) have: usize,
    pub(super) header: Header,
    pub(super) placements: Vec<u8>,
    pub(super) pieces: Vec<IoVec>,
    pub(super) next: usize,
    pub(super) left: usize,
    /// Bytes that the pieces take before the next part of a staged payload needs others.
    pub(super) room: usize,
    /// The payload goes to a GPU, and its next part has no room.
    pub(super) staged: bool,
    pub(super) stalled: bool,
    /// What was received and could not be taken because of that.
    pub(super) kept: Vec<u8>,
    pub(super) landing: Option<Landing>,
    /// Where a payload goes that comes over the lane.
    pub(super) target: Vec<Run>,
    pub(super) message: Vec<u8>,
    pub(super) refusal: Option<Refusal>,
    pub(super) crc: crc32fast::Hasher,
    /// Frames placed; the count that is acknowledged.
    pub(super) received: u64,
    pub(super) acknowledged: u64,
    pub(super) unacknowledged_bytes: usize,
    pub(super) refused: Vec<(u64, Refusal)>,
    /// Refusals that are in the stream; the peer may not have them.
    pub(super) told: Vec<(u64, Refusal)>,
    /// When the last frame came of an operation that is deep bulk by itself.
    pub(super) bulk_since: Option<Instant>,
    /// Length of the last frame's head and placements, if its payload was large.
    pub(super) bulk_head: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    Head,
    Placements,
    Body,
}

impl Receiver {
    pub(super) fn new() -> Receiver {
        Receiver {
            stage: Stage::Head,
            head: [0; HEADER_BYTES],
            have: 0,
            header: Header::new(Kind::Ack),
            placements: Vec::new(),
            pieces: Vec::new(),
            next: 0,
            left: 0,
            room: usize::MAX,
            staged: false,
            stalled: false,
            kept: Vec::new(),
            landing: None,
            target: Vec::new(),
            message: Vec::new(),
            refusal: None,
            crc: crc32fast::Hasher::new(),
            received: 0,
            acknowledged: 0,
            unacknowledged_bytes: 0,
            refused: Vec::new(),
            told: Vec::new(),
            bulk_since: None,
            bulk_head: 0,
        }
    }

    /// Makes room for bytes that go to a message of our own, behind the payload's pieces.
    pub(super) fn expect_message(&mut self, len: usize) {
        self.message.resize(len, 0);
        if len > 0 {
            self.pieces.push(IoVec::new(self.message.as_mut_ptr(), len));
        }
    }

    /// The places that the rest of the payload goes to, and their bytes.
    pub(super) fn direct_pieces(&self, out: &mut Vec<IoVec>) -> usize {
        if self.stage == Stage::Body {
            out.extend(self.pieces[self.next..].iter().take(ferrywire_sys::IOVECS_PER_CALL_MAX - 1));
        }
        out.iter().map(|piece| piece.len).sum()
    }

    /// Bytes to receive through the scratch buffer behind the direct pieces.
    pub(super) fn tail_bytes(&self) -> usize {
        match self.stage {
            Stage::Body if self.pieces.is_empty() && self.left > 0 => self.left,
            Stage::Body if self.bulk_head > 0 => self.bulk_head,
            Stage::Head if self.bulk_head > 0 => self.bulk_head.saturating_sub(self.have).max(1),
            Stage::Placements => self.header.placement_bytes() - self.placements.len(),
            _ => usize::MAX,
        }
    }

    /// So many bytes were received into the pieces.
    pub(super) fn advance(&mut self, mut bytes: usize) {
        self.left -= bytes;
        if self.staged {
            self.room -= bytes;
        }
        while bytes > 0 {
            let piece = &mut self.pieces[self.next];
            let used = bytes.min(piece.len);
            if self.header.flags & wire::FLAG_CRC != 0 {
                // SAFETY: these bytes of the piece were just received.
                self.crc.update(unsafe { std::slice::from_raw_parts(piece.base, used) });
            }
            // SAFETY: `used` is at most the length of the piece.
            *piece = IoVec::new(unsafe { piece.base.add(used) }, piece.len - used);
            bytes -= used;
            self.next += usize::from(piece.len == 0);
        }
    }

    /// Copies payload bytes that came through the scratch buffer to their place.
    pub(super) fn copy_in(&mut self, bytes: &[u8]) -> usize {
        let used = self.left.min(self.room).min(bytes.len());
        if self.pieces.is_empty() {
            self.left -= used;
            return used;
        }
        let mut from = &bytes[..used];
        while !from.is_empty() {
            let piece = self.pieces[self.next];
            let now = from.len().min(piece.len);
            // SAFETY: the piece is live memory of at least `now` bytes (see `receive_some`).
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), piece.base, now) };
            self.advance(now);
            from = &from[now..];
        }
        used
    }

    /// What the descriptors' checksum has to be.
    pub(super) fn placements_crc(&self) -> u32 {
        match self.header.flags & wire::FLAG_CRC {
            0 => 0,
            _ => crc32fast::hash(&self.placements),
        }
    }

    /// The frame, of which the stream has brought all it brings.
    pub(super) fn arrival(&mut self, message: Vec<u8>) -> Arrival {
        Arrival {
            header: self.header,
            placements: std::mem::take(&mut self.placements),
            landing: self.landing.take(),
            message,
            refusal: self.refusal,
            target: std::mem::take(&mut self.target),
        }
    }

    pub(super) fn check_body(&mut self) -> io::Result<()> {
        let elsewhere = self.header.is_posted();
        if self.header.flags & wire::FLAG_CRC == 0 || self.refusal.is_some() || elsewhere {
            return Ok(());
        }
        check_crc(self.header.crc, std::mem::take(&mut self.crc).finalize())
    }

    pub(super) fn mark_acknowledged(&mut self) {
        self.acknowledged = self.received_without_refusals();
        self.unacknowledged_bytes = 0;
    }

    pub(super) fn acknowledged_through(&mut self, low: u32) {
        self.acknowledged = self.acknowledged.max(wire::widen(low, self.acknowledged));
        if self.acknowledged == self.received {
            self.unacknowledged_bytes = 0;
        }
    }

    /// The count that may be told: frames whose refusal is not in the stream yet are not covered.
    pub(super) fn received_without_refusals(&self) -> u64 {
        self.refused.first().map_or(self.received, |(number, _)| *number)
    }
}

pub(super) fn check_crc(expected: u32, computed: u32) -> io::Result<()> {
    match expected == computed {
        true => Ok(()),
        false => Err(broken(&wire::WireError::Checksum { expected, computed }.to_string())),
    }
}
