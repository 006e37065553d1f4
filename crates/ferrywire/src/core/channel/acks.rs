//! Acknowledgements of one connection: the frames that this end has received, and what the peer has been sent
//! about them.
//!
//! A received frame's states: `placed | refused -> acknowledged`. An acknowledgement is a count of frames.
//! The count covers a refused frame only once its refusal is in the stream.
//!
//! Invariant: `acknowledged <= received`, and refusals are sent in the order of their frames.
//! Read next: `receiver.rs` counts received frames; `sender.rs` sends the counts.

use ferrywire_proto::limits;
use ferrywire_proto::wire::{self, Header, Kind, Refusal};

/// Received frames after which an acknowledgement is sent at once.
const URGENT_FRAMES: u64 = 16;

/// Counts of received and acknowledged frames of one connection.
#[derive(Default)]
pub(super) struct Acks {
    /// Frames that were placed or refused.
    received: u64,
    /// The highest count written to the stream.
    acknowledged: u64,
    unacknowledged_bytes: usize,
    /// Numbers and reasons of refused frames whose refusals are not in the stream yet.
    refused: Vec<(u64, Refusal)>,
    /// Refusals that are in the stream. The peer may not have received them.
    reported: Vec<(u64, Refusal)>,
}

impl Acks {
    /// Counts a frame of `bytes` bytes that was placed, or refused with the reason in `placed`.
    pub fn count(&mut self, placed: Result<(), Refusal>, bytes: usize) {
        if let Err(refusal) = placed {
            self.refused.push((self.received, refusal));
        }
        self.received += 1;
        self.unacknowledged_bytes += bytes;
    }

    /// Whether an acknowledgement or a refusal waits to be sent.
    pub fn due(&self) -> bool {
        self.received != self.acknowledged || !self.refused.is_empty()
    }

    /// Whether the acknowledgement should be sent now, not with the next data frame.
    pub fn urgent(&self) -> bool {
        self.unacknowledged_bytes >= limits::ACK_BYTES
            || self.unacknowledged_frames() >= URGENT_FRAMES
            || !self.refused.is_empty()
    }

    /// Frames that were received and not acknowledged.
    pub fn unacknowledged_frames(&self) -> u64 {
        self.received - self.acknowledged
    }

    /// The count for the next header. The count ends before the first frame whose refusal is not in the
    /// stream yet.
    pub fn covered(&self) -> u64 {
        self.refused.first().map_or(self.received, |(number, _)| *number)
    }

    /// Notes that a header with this count (its low 32 bits) is in the stream.
    pub fn sent_with_header(&mut self, low: u32) {
        self.acknowledged = self.acknowledged.max(wire::widen(low, self.acknowledged));
        if self.acknowledged == self.received {
            self.unacknowledged_bytes = 0;
        }
    }

    /// Appends a frame to `out` that carries only an acknowledgement and the waiting refusals. `posted` is
    /// the count of posted lane receives for its header.
    pub fn encode_frame(&mut self, out: &mut Vec<u8>, posted: u32, crc: bool) {
        let mut header = Header::new(Kind::Ack);
        header.ack = self.received as u32;
        header.posted = posted;
        let refused: Vec<_> =
            self.refused.drain(..self.refused.len().min(limits::WINDOW_FRAMES_MAX)).collect();
        let body = wire::encode_refusals(&refused);
        // A refusal in the stream may still be lost with the connection; then the fence reports the refusal
        // again.
        let known_to_peer = self.known_to_peer();
        self.reported.retain(|(number, _)| *number >= known_to_peer);
        self.reported.extend(refused);
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

    /// Returns what a fence reports: the number of frames received, and the refusals that the peer may not
    /// have.
    pub fn end(mut self) -> (u64, Vec<(u64, Refusal)>) {
        let known_to_peer = self.known_to_peer();
        let mut refused = self.reported;
        refused.append(&mut self.refused);
        refused.retain(|(number, _)| *number >= known_to_peer);
        (self.received, refused)
    }

    /// The peer has received the acknowledgements of all frames below this number: its window bounds how far
    /// it sends ahead of them.
    fn known_to_peer(&self) -> u64 {
        self.received.saturating_sub(limits::WINDOW_FRAMES_MAX as u64)
    }
}
