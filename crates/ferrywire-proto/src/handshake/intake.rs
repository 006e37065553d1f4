//! Splits a handshake's incoming bytes: a preamble, then frames; a refusal may replace any frame.
//!
//! The length of the next frame is checked against the state machine's expectation, so the buffer never holds
//! more than one message of a known bound.
//! Invariants: `want` is exact; bytes behind the handshake are never taken.
//! Read next: `initiator.rs`.

use std::ops::RangeInclusive;

use super::error::{REFUSAL_MARK, REFUSAL_TEXT_BYTES_MAX};
use super::{HandshakeError, PREAMBLE_BYTES, Refusal};
use crate::limits::HANDSHAKE_BYTES_MAX;

/// Bytes of a foreign answer that are examined to guess its protocol.
const FOREIGN_BYTES: usize = 16;

/// The frame that is expected next.
#[derive(Clone, Debug)]
pub(super) struct Expect {
    /// Name of the frame in errors.
    pub(super) what: &'static str,
    /// Lengths that the frame may have, in bytes.
    pub(super) bytes: RangeInclusive<usize>,
}

/// A complete part of a handshake's incoming bytes.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Incoming {
    Preamble(Vec<u8>),
    Message(Vec<u8>),
    Refusal(Refusal),
}

/// The part of a handshake's incoming bytes that is being read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Preamble,
    Length,
    Message(usize),
    RefusalHead,
    RefusalText { code: u8, bytes: usize },
    Foreign,
}

/// The incoming direction of a handshake.
#[derive(Debug)]
pub(super) struct Intake {
    part: Part,
    buffer: Vec<u8>,
    total: usize,
    /// Whether no part is complete yet, so the bytes may be another protocol's answer.
    first: bool,
}

impl Intake {
    /// The intake of a responder, which receives a preamble first.
    pub(super) fn of_responder() -> Intake {
        Intake { part: Part::Preamble, buffer: Vec::new(), total: 0, first: true }
    }

    /// The intake of an initiator, which receives frames only.
    pub(super) fn of_initiator() -> Intake {
        Intake { part: Part::Length, buffer: Vec::new(), total: 0, first: true }
    }

    /// Number of bytes that complete the current part of the handshake.
    pub(super) fn want(&self) -> usize {
        let part_bytes = match self.part {
            Part::Preamble => PREAMBLE_BYTES,
            Part::Length => 2,
            Part::Message(bytes) => bytes,
            Part::RefusalHead => 3,
            Part::RefusalText { bytes, .. } => bytes,
            Part::Foreign => FOREIGN_BYTES,
        };
        part_bytes.saturating_sub(self.buffer.len())
    }

    /// Takes up to [`Intake::want`] bytes off `bytes`; returns a part that became complete.
    pub(super) fn take(
        &mut self,
        bytes: &mut &[u8],
        expect: &Expect,
    ) -> Result<Option<Incoming>, HandshakeError> {
        let (now, later) = bytes.split_at(self.want().min(bytes.len()));
        *bytes = later;
        self.total += now.len();
        if self.total > HANDSHAKE_BYTES_MAX {
            let (bytes, max) = (self.total, HANDSHAKE_BYTES_MAX);
            return Err(HandshakeError::Length { what: "the handshake", bytes, min: 0, max });
        }
        self.buffer.extend_from_slice(now);
        if self.want() > 0 { Ok(None) } else { self.complete(expect) }
    }

    /// The error to report when the connection closes at this point.
    pub(super) fn closed(&self, expect: &Expect) -> HandshakeError {
        match self.part {
            Part::Foreign => HandshakeError::foreign_answer(&self.buffer),
            Part::Preamble if !self.buffer.is_empty() && !super::MAGIC.starts_with(self.magic_part()) => {
                HandshakeError::foreign(&self.buffer)
            }
            Part::Preamble => HandshakeError::Closed("the preamble"),
            _ => HandshakeError::Closed(expect.what),
        }
    }

    fn magic_part(&self) -> &[u8] {
        &self.buffer[..self.buffer.len().min(super::MAGIC.len())]
    }

    fn complete(&mut self, expect: &Expect) -> Result<Option<Incoming>, HandshakeError> {
        if self.part == Part::Length {
            return self.length(expect);
        }
        let whole = std::mem::take(&mut self.buffer);
        match self.part {
            Part::RefusalHead => return self.refusal_head(&whole),
            Part::Foreign => return Err(HandshakeError::foreign_answer(&whole)),
            _ => {}
        }
        let part = std::mem::replace(&mut self.part, Part::Length);
        self.first = false;
        Ok(Some(match part {
            Part::Preamble => Incoming::Preamble(whole),
            Part::RefusalText { code, .. } => Incoming::Refusal(Refusal::decode(code, &whole)),
            _ => Incoming::Message(whole),
        }))
    }

    fn length(&mut self, expect: &Expect) -> Result<Option<Incoming>, HandshakeError> {
        let length = [self.buffer[0], self.buffer[1]];
        let bytes = usize::from(u16::from_le_bytes(length));
        let (min, max) = (*expect.bytes.start(), *expect.bytes.end());
        if bytes == usize::from(REFUSAL_MARK) {
            self.part = Part::RefusalHead;
        } else if expect.bytes.contains(&bytes) {
            self.part = Part::Message(bytes);
        } else if self.first && bytes > max && length.iter().all(|byte| matches!(byte, b' '..=b'~')) {
            self.part = Part::Foreign;
            return Ok(None);
        } else {
            return Err(HandshakeError::Length { what: expect.what, bytes, min, max });
        }
        self.buffer.clear();
        Ok(None)
    }

    fn refusal_head(&mut self, head: &[u8]) -> Result<Option<Incoming>, HandshakeError> {
        let (code, bytes) = (head[0], usize::from(u16::from_le_bytes([head[1], head[2]])));
        if bytes > REFUSAL_TEXT_BYTES_MAX {
            let max = REFUSAL_TEXT_BYTES_MAX;
            return Err(HandshakeError::Length { what: "a refusal", bytes, min: 0, max });
        }
        if bytes == 0 {
            return Ok(Some(Incoming::Refusal(Refusal::decode(code, &[]))));
        }
        self.part = Part::RefusalText { code, bytes };
        Ok(None)
    }
}
