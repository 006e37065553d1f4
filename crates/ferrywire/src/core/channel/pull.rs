//! What a channel takes from its peer's queue, and how much of it.
//!
//! Each channel takes a share of what is queued, so that all of a peer's channels have work and none runs ahead.
//!
//! Invariant: a frame is taken only while the window and the way of the payload have room for any frame.
//! Read next: `queue/`, which gives the frames; `sender.rs`, which sends them.

use std::sync::atomic::Ordering;

use super::Channel;
use crate::core::operation::Hold;
use crate::core::queue::Pull;
use crate::core::stats::NO_BACKLOG;
use ferrywire_proto::limits;
use ferrywire_proto::schedule;

/// Bytes of frames kept ready for the next send call.
const READY_BYTES: u64 = limits::SEND_BYTES_PER_CALL_MAX as u64;

impl Channel {
    /// Whether the queue has frames for this channel, and it would take another now.
    pub fn may_pull(&self) -> bool {
        if !self.sender.window.has_room() || !self.payload.has_room() {
            return false;
        }
        let queue = &self.peer.queue;
        if queue.has_work_beside_bulk() && self.small_share() > 0 {
            return true;
        }
        queue.has_work_beside_small() && self.bulk_share().0 > 0 && self.may_take_bulk()
    }

    /// Takes frames from the queue into the window, until there is enough for the next socket call.
    pub(super) fn pull(&mut self) {
        let unsent = self.sender.unsent();
        let small = self.small_share();
        let queue = &self.peer.queue;
        let waits = (small > 0 && queue.has_work_beside_bulk()) || queue.has_work_beside_small();
        let enough = unsent >= READY_BYTES;
        self.payload.note_enough(enough);
        if enough || !waits {
            return;
        }
        let (share, chunk_bytes) = self.bulk_share();
        let bulk = share > 0 && self.may_take_bulk();
        let pull = Pull {
            bytes: (READY_BYTES - unsent).min(if bulk { share } else { u64::MAX }),
            channels: self.peer.live_channels(),
            chunk_bytes,
            staged_bytes: self.payload.staged_chunk_bytes(&self.peer),
            small,
            bulk,
            messages: self.payload.messages(),
        };
        let dropped = self.payload.pull(&self.peer, &self.counters, &mut self.sender.window, pull);
        dropped.into_iter().for_each(Hold::cut_short);
        self.tell_backlog();
    }

    /// Tells the peer's other channels how much this one has in its window: nothing counts while it takes no frames, or it
    /// would keep from them what is for the least loaded.
    pub(super) fn tell_backlog(&self) {
        let backlog = if self.payload.is_open() { self.sender.window.bytes() as u64 } else { NO_BACKLOG };
        self.counters.backlog.store(backlog, Ordering::Relaxed);
    }

    /// Whether this channel is not too far ahead of the least loaded one.
    fn may_take_bulk(&self) -> bool {
        let backlog = self.sender.window.bytes() as u64;
        schedule::may_take(backlog, self.peer.least_backlog(), self.peer.queue.chunk_bytes)
    }

    /// Bytes of bulk that this channel may take, and the longest chunk of it.
    fn bulk_share(&self) -> (u64, usize) {
        let whole = (u64::MAX, self.peer.queue.chunk_bytes);
        let Some(copying_ends) = self.payload.copying_ends(&self.peer) else { return whole };
        let (share, chunk_bytes) = if self.peer.info.same_host && !self.conn.is_long() {
            self.local_share(copying_ends)
        } else {
            whole
        };
        match copying_ends {
            0 => (share, chunk_bytes),
            _ => (share.min(self.peer.staged_share(self.sender.window.bytes() as u64)), chunk_bytes),
        }
    }

    /// [`Channel::bulk_share`] between two ends of one host, of which some copy payload once more before it is sent, or placed.
    fn local_share(&self, copying_ends: u64) -> (u64, usize) {
        // Between other addresses there may be a slow link, which must not hold up what others carry; and what waits for
        // another copy costs the other channels nothing.
        let in_flight = if self.conn.within_host() && copying_ends == 0 {
            self.peer.thread_backlog(self.index)
        } else {
            self.sender.window.bytes() as u64
        };
        let sharing = if self.conn.within_host() { 1 } else { self.peer.channels_per_thread() };
        schedule::local_share(in_flight, sharing, copying_ends, self.peer.queue.chunk_bytes)
    }

    /// Bytes of small operations that this channel may take. While there is no bulk they keep to the
    /// peer's home, so that one thread does all of it.
    fn small_share(&self) -> u64 {
        let backlog = self.sender.window.bytes() as u64;
        match (self.peer.in_bulk(), self.peer.is_home(self.index)) {
            (true, _) => schedule::small_share(backlog, self.peer.least_backlog()),
            (false, true) => u64::MAX,
            (false, false) => 0,
        }
    }
}
