//! What this end has placed of a connection's frames, and what the peer has been told of that.
//!
//! A frame's life here: `placed | refused -> acknowledged`. The acknowledgement is a count, so it covers a refused frame
//! only once its refusal is in the stream.
//!
//! Invariant: `acknowledged <= received`, and refusals leave in the order of their frames.
//! Read next: `receiver.rs`, which counts; `sender.rs`, which sends the counts.

use ferrywire_proto::limits;
use ferrywire_proto::wire::{self, Header, Kind, Refusal};

/// Received frames after which an acknowledgement goes out at once.
const URGENT_FRAMES: u64 = 16;

/// The acknowledgements of one connection.
#[derive(Default)]
pub(super) struct Acks {
    /// Frames that were placed or refused.
    received: u64,
    /// The count that is in the stream.
    acknowledged: u64,
    unacknowledged_bytes: usize,
    /// Frames that were refused, whose refusals are not in the stream yet.
    refused: Vec<(u64, Refusal)>,
    /// Refusals that are in the stream; the peer may not have them.
    told: Vec<(u64, Refusal)>,
}

impl Acks {
    /// Counts a frame of so many bytes that was placed, or refused.
    pub fn count(&mut self, placed: Result<(), Refusal>, bytes: usize) {
        if let Err(refusal) = placed {
            self.refused.push((self.received, refusal));
        }
        self.received += 1;
        self.unacknowledged_bytes += bytes;
    }

    /// Whether an acknowledgement waits to be sent.
    pub fn due(&self) -> bool {
        self.received != self.acknowledged || !self.refused.is_empty()
    }

    /// Whether it should not wait for a frame that takes it along.
    pub fn urgent(&self) -> bool {
        self.unacknowledged_bytes >= limits::ACK_BYTES
            || self.unacknowledged_frames() >= URGENT_FRAMES
            || !self.refused.is_empty()
    }

    /// Frames that were received and not acknowledged.
    pub fn unacknowledged_frames(&self) -> u64 {
        self.received - self.acknowledged
    }

    /// The count that a header may carry: frames whose refusal is not in the stream yet are not covered.
    pub fn covered(&self) -> u64 {
        self.refused.first().map_or(self.received, |(number, _)| *number)
    }

    /// A header with this count is in the stream.
    pub fn sent_with_header(&mut self, low: u32) {
        self.acknowledged = self.acknowledged.max(wire::widen(low, self.acknowledged));
        if self.acknowledged == self.received {
            self.unacknowledged_bytes = 0;
        }
    }

    /// Appends a frame to `out` that is nothing but an acknowledgement, with the refusals that wait. `posted` is the other
    /// count of its header.
    pub fn encode_frame(&mut self, out: &mut Vec<u8>, posted: u32, crc: bool) {
        let mut header = Header::new(Kind::Ack);
        header.ack = self.received as u32;
        header.posted = posted;
        let refused: Vec<_> =
            self.refused.drain(..self.refused.len().min(limits::WINDOW_FRAMES_MAX)).collect();
        let body = wire::encode_refusals(&refused);
        // Told is not heard: the connection may die first, and then the fence tells it again.
        let heard = self.heard();
        self.told.retain(|(number, _)| *number >= heard);
        self.told.extend(refused);
        header.len = body.len() as u32;
        if crc {
            header.flags |= wire::FLAG_CRC;
            header.crc = crc32fast::hash(&body);
        }
        out.extend_from_slice(&header.encode());
        out.extend_from_slice(&body);
        self.acknowledged = self.covered();
        self.unacknowledged_bytes = 0;
    }

    /// The count of frames received, and the refusals among them that the peer may not have: what a fence tells.
    pub fn end(mut self) -> (u64, Vec<(u64, Refusal)>) {
        let heard = self.heard();
        let mut refused = self.told;
        refused.append(&mut self.refused);
        refused.retain(|(number, _)| *number >= heard);
        (self.received, refused)
    }

    /// The peer has heard of all frames below this number, or it could not have sent what is received.
    fn heard(&self) -> u64 {
        self.received.saturating_sub(limits::WINDOW_FRAMES_MAX as u64)
    }
}
