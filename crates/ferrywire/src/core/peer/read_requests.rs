//! Requests of a read: which ranges of the peer's memory, and where they go.
//!
//! Read next: `frames.rs`, where the peer's answers arrive.

use std::sync::Arc;

use super::state::PeerState;
use crate::core::operation::{Hold, Op, Verb};
use crate::core::queue::Entry;
use ferrywire_proto::limits;
use ferrywire_proto::wire::{self, Header, Kind};

/// Bytes of one range in a read request, and of one request: so that all channels have answers to carry.
const READ_RANGE_BYTES_MAX: u64 = 64 << 20;
const READ_REQUEST_BYTES: u64 = 64 << 20;

impl PeerState {
    /// Queues the requests of a read, which somebody holds; each names a bounded number of ranges and bytes.
    pub fn ask(&self, op: &Hold, key: u64) {
        let mut position = 0;
        let mut ranges = Vec::new();
        let mut start = 0;
        for piece in op.pieces.as_slice() {
            let mut done = 0;
            while done < piece.len {
                let len = (piece.len - done).min(READ_RANGE_BYTES_MAX);
                ranges.push(wire::Placement { offset: piece.remote + done, len: len as u32 });
                done += len;
                position += len;
                if ranges.len() == limits::SEGMENTS_PER_CHUNK_MAX || position - start >= READ_REQUEST_BYTES {
                    self.ask_one(op, key, start, &ranges);
                    ranges.clear();
                    start = position;
                }
            }
        }
        if !ranges.is_empty() {
            self.ask_one(op, key, start, &ranges);
        }
    }

    fn ask_one(&self, op: &Hold, key: u64, start: u64, ranges: &[wire::Placement]) {
        let mut header = Header::new(Kind::Read);
        header.transfer = op.id;
        header.key = key;
        header.offset = start;
        header.total = op.id;
        header.segments = ranges.len() as u16;
        let mut entry = Entry::bare(header);
        let mut placements = Vec::new();
        ranges.iter().for_each(|range| range.encode_into(&mut placements));
        entry.placements = placements.into();
        entry.op = Some(op.clone());
        self.drop_entries(self.queue.ask(entry, op));
    }

    /// Bytes of a read have been placed: of one with several requests, some may be answered by now. Of others the end says so.
    pub fn note_answered(&self, op: &Op) {
        let pieces = op.pieces.as_slice().len();
        if op.total >= READ_REQUEST_BYTES || pieces >= limits::SEGMENTS_PER_CHUNK_MAX {
            self.queue.answered(op);
            self.wake_home_worker();
        }
    }

    /// A read asks for nothing more.
    pub fn stop_asking(&self, op: &Arc<Op>) {
        if op.verb() != Verb::Read {
            return;
        }
        drop(self.queue.forget_requests(op));
        // Others ask for theirs now.
        self.wake_home_worker();
    }
}
