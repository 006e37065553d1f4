//! Requests of a read: the ranges of the peer's memory to read.
//!
//! Invariant: each request names a bounded number of ranges and bytes.
//! Read next: `../channel/receiver.rs`, where the peer's answers arrive.

use std::sync::Arc;

use super::state::PeerState;
use crate::core::operation::{Hold, Op, Verb};
use crate::core::queue::Entry;
use ferrywire_proto::limits;
use ferrywire_proto::wire::{self, Header, Kind, PLACEMENT_BYTES};

/// Most bytes of one range in a read request, and of one request. The bound spreads the answers over all
/// channels.
const READ_RANGE_BYTES_MAX: u64 = 64 << 20;
const READ_REQUEST_BYTES: u64 = 64 << 20;

impl PeerState {
    /// Queues the requests of a read of the region with `key`. `op` keeps the read alive.
    pub fn ask(&self, op: &Hold, key: u64) {
        let pieces = op.pieces.as_slice();
        let bytes_max = pieces.len().min(limits::SEGMENTS_PER_CHUNK_MAX) * PLACEMENT_BYTES;
        let (mut position, mut start) = (0, 0);
        let mut ranges = Vec::with_capacity(bytes_max);
        for piece in pieces {
            let mut done = 0;
            while done < piece.len {
                let len = (piece.len - done).min(READ_RANGE_BYTES_MAX);
                wire::Placement { offset: piece.remote + done, len: len as u32 }.encode_into(&mut ranges);
                done += len;
                position += len;
                let is_full = ranges.len() == limits::SEGMENTS_PER_CHUNK_MAX * PLACEMENT_BYTES;
                if is_full || position - start >= READ_REQUEST_BYTES || position == op.total {
                    self.ask_one(op, key, start, std::mem::take(&mut ranges));
                    start = position;
                }
            }
        }
    }

    /// Queues a request for encoded ranges, whose bytes lie in the sink from `start` on.
    fn ask_one(&self, op: &Hold, key: u64, start: u64, ranges: Vec<u8>) {
        let mut header = Header::new(Kind::Read);
        header.transfer = op.id;
        header.key = key;
        header.offset = start;
        header.total = op.id;
        header.segments = (ranges.len() / PLACEMENT_BYTES) as u16;
        let mut entry = Entry::bare(header);
        entry.placements = ranges.into();
        entry.op = Some(op.clone());
        self.drop_entries(self.queue.ask(entry, op));
    }

    /// Notes that bytes of a read were placed. If the read has several requests, some may be complete, and
    /// further requests may go out; a read with one request is handled when it ends.
    pub fn note_answered(&self, op: &Op) {
        let pieces = op.pieces.as_slice().len();
        if op.total >= READ_REQUEST_BYTES || pieces >= limits::SEGMENTS_PER_CHUNK_MAX {
            self.queue.answered(op);
            self.wake_home_worker();
        }
    }

    /// Withdraws the unsent requests of a read.
    pub fn stop_asking(&self, op: &Arc<Op>) {
        if op.verb() != Verb::Read {
            return;
        }
        drop(self.queue.forget_requests(op));
        // Requests of other reads may go out now that those of a long one are gone.
        self.wake_home_worker();
    }
}
