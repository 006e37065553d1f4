//! How many frames a channel takes from its peer's queue.
//!
//! Each channel takes a share of the queued bytes, so that all channels of a peer have work and none runs
//! ahead.
//!
//! Invariant: a frame is taken only while the window and the payload path have room for any frame.
//! Read next: `queue/`, where frames come from; `sender.rs`, which sends them.

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
    /// Whether the queue has frames for this channel, and the channel would take one now.
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

    /// Moves frames from the queue into the window, until one socket call can be filled.
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

    /// Publishes the bytes in this channel's window to the peer's other channels. A channel whose lane is not
    /// open publishes `NO_BACKLOG`, so that it does not count as the least loaded.
    pub(super) fn tell_backlog(&self) {
        let backlog = if self.payload.is_open() { self.sender.window.bytes() as u64 } else { NO_BACKLOG };
        self.counters.backlog.store(backlog, Ordering::Relaxed);
    }

    /// Whether this channel is close enough to the least loaded one to take bulk.
    fn may_take_bulk(&self) -> bool {
        let backlog = self.sender.window.bytes() as u64;
        schedule::may_take(backlog, self.peer.least_backlog(), self.peer.queue.chunk_bytes)
    }

    /// Bytes of bulk that this channel may take, and its longest chunk in bytes.
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

    /// [`Channel::bulk_share`] between two ends of one host. At `copying_ends` of them payload is copied once
    /// more.
    fn local_share(&self, copying_ends: u64) -> (u64, usize) {
        // Channels between different addresses may include a slow link, which must not delay the fast ones.
        // Bytes that wait for another copy cost the other channels nothing. Both count by channel, not by
        // thread.
        let in_flight = if self.conn.within_host() && copying_ends == 0 {
            self.peer.thread_backlog(self.index)
        } else {
            self.sender.window.bytes() as u64
        };
        let sharing = if self.conn.within_host() { 1 } else { self.peer.channels_per_thread() };
        schedule::local_share(in_flight, sharing, copying_ends, self.peer.queue.chunk_bytes)
    }

    /// Bytes of small operations that this channel may take. Without bulk, only the peer's home channel takes
    /// them, so that one thread does all the work.
    fn small_share(&self) -> u64 {
        let backlog = self.sender.window.bytes() as u64;
        match (self.peer.in_bulk(), self.peer.is_home(self.index)) {
            (true, _) => schedule::small_share(backlog, self.peer.least_backlog()),
            (false, true) => u64::MAX,
            (false, false) => 0,
        }
    }
}
