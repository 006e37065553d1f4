//! What a channel's connection still sends of memory that its user has dropped.
//!
//! A socket that copies has the bytes once a call has taken them. One that sends without copies reads the memory until the
//! peer's host has acknowledged the bytes, and sends whatever is there when it sends them again.
//!
//! Invariant: when a worker has answered a request to release memory, no connection of its channels reads it.
//! Read next: `worker/engine.rs`, which asks.

use std::sync::Arc;

use super::Channel;
use crate::core::operation::Op;
use crate::core::posted::Posted;
use crate::core::queue::{DROPPED, Entry};
use crate::error::Error;
use ferrywire_net::Conn;

/// What carried the payload of a channel that has ended, kept open to hear when nothing reads its sources any more.
pub(crate) struct Unreleased {
    lane: Option<Box<Posted>>,
    /// An aborted connection, and how much was sent over it.
    conn: Option<(Box<dyn Conn>, u64)>,
}

impl Unreleased {
    /// The closed lane, and the connection with the bytes that were sent over it; `None` where both have released everything. A
    /// connection that has not is aborted: packets of it that a NIC holds are sent nevertheless, and read then.
    pub fn of(lane: Option<Box<Posted>>, mut conn: Box<dyn Conn>, sent_bytes: u64) -> Option<Unreleased> {
        let reads = conn.released() < sent_bytes;
        if reads {
            conn.abort();
        }
        let mut unreleased = Unreleased { lane, conn: reads.then_some((conn, sent_bytes)) };
        (!unreleased.has_released()).then_some(unreleased)
    }

    /// Whether nothing reads the memory any more. Ask again.
    pub fn has_released(&mut self) -> bool {
        self.lane.take_if(|lane| lane.has_released());
        self.conn.take_if(|(conn, sent_bytes)| conn.released() >= *sent_bytes);
        self.lane.is_none() && self.conn.is_none()
    }
}

impl Channel {
    /// Aborts the connection if the kernel may still read memory that its user has dropped; true if so: the channel is to be
    /// lost once [`Channel::has_released_dropped_memory`] says so.
    pub fn abort_sending_of_dropped_memory(&mut self) -> bool {
        let reads = !self.unreleased_of_dropped_memory().is_empty();
        if reads {
            self.conn.abort();
        }
        reads
    }

    /// Whether the kernel reads none of it any more.
    pub fn has_released_dropped_memory(&mut self) -> bool {
        self.unreleased_of_dropped_memory().is_empty()
    }

    /// The kernel has not released it in time: the operations fail, whatever the peer has placed of them.
    pub fn fail_unreleased(&mut self) {
        let ops = self.unreleased_of_dropped_memory();
        if !ops.is_empty() {
            tracing::error!(peer = self.peer.name(), "the kernel may still send of memory that was dropped");
        }
        ops.iter().for_each(|op| op.fail(Error::invalid("region", DROPPED)));
    }

    /// Operations with frames of dropped memory behind which the kernel has not released everything. The kernel's notices
    /// say up to where it has, so frames that were copied behind an unreleased one count as well: that costs a connection
    /// more than need be, and no byte. A connection that never sends without copies has none.
    fn unreleased_of_dropped_memory(&mut self) -> Vec<Arc<Op>> {
        let released = self.conn.released();
        if released >= self.sender.stream_sent {
            return Vec::new();
        }
        let is_read =
            |end: u64, entry: &Entry| end > released && !entry.header.is_posted() && entry.is_gone();
        // The frame behind the last whole one is partly sent, unless nothing of it is.
        let sender = &mut self.sender;
        let partial = (sender.sent_within > 0).then_some(sender.stream_sent);
        let ends = sender.ends.iter().copied().chain(partial);
        let window = ends.zip(sender.window.from(0)).map(|(end, entry)| (end, &*entry));
        let unreleased = sender.unreleased.iter().map(|(end, entry)| (*end, entry));
        let read = window.chain(unreleased).filter(|(end, entry)| is_read(*end, entry));
        read.filter_map(|(_, entry)| entry.op.as_deref().cloned()).collect()
    }
}
