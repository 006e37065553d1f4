//! What a channel's connection still sends of memory that its user has dropped.
//!
//! A socket that copies has the bytes once a call has taken them. One that sends without copies reads the memory until the
//! peer's host has acknowledged the bytes, and sends whatever is there when it sends them again.
//!
//! Invariant: when a worker has answered a request to release memory, no connection of its channels reads it.
//! Read next: `progress/crank.rs`, which asks.

use std::sync::Arc;

use super::Channel;
use crate::error::Error;
use crate::operation::Op;
use crate::queue::{DROPPED, Entry};

impl Channel {
    /// Frames whose payload the kernel still reads from memory that its user has dropped, and may have freed: sent without
    /// a copy, and not released. Connections that copy have none.
    fn unreleased_of_dropped_memory(&mut self) -> Vec<Arc<Op>> {
        let released = self.conn.released();
        if released >= self.stream_sent {
            return Vec::new();
        }
        let is_read =
            |end: u64, entry: &Entry| end > released && !entry.header.is_posted() && entry.is_gone();
        // The frame behind the last whole one is partly sent, unless nothing of it is.
        let partial = (self.sent_within > 0).then_some(self.stream_sent);
        let ends = self.ends.iter().copied().chain(partial);
        let window = ends.zip(self.window.from(0)).map(|(end, entry)| (end, &*entry));
        let held = self.held.iter().map(|(end, entry)| (*end, entry));
        let read = window.chain(held).filter(|(end, entry)| is_read(*end, entry));
        read.filter_map(|(_, entry)| entry.op.clone()).collect()
    }

    /// Whether the kernel still reads memory that its user has dropped. If so the connection is aborted: the channel is to be
    /// lost. Operations whose bytes the kernel does not release in time fail, whatever the peer has placed of them.
    pub fn abort_sending_of_dropped_memory(&mut self) -> bool {
        let ops = self.unreleased_of_dropped_memory();
        if ops.is_empty() {
            return false;
        }
        if !self.conn.abort() {
            tracing::error!(peer = self.peer.name(), "the kernel may still send of memory that was dropped");
            ops.iter().for_each(|op| op.fail(Error::invalid("region", DROPPED)));
        }
        true
    }
}
