//! Releases memory that its user dropped while a connection or lane may still send it.
//!
//! A socket that copies is done with the memory when the send call returns. A zero-copy socket reads the
//! memory until the peer's host has acknowledged the bytes; a retransmission sends the memory's current
//! contents.
//!
//! Invariant: when a worker has answered a request to release memory, no connection of its channels reads
//! that memory.
//! Read next: `worker/release.rs`, which calls this.

use std::sync::Arc;

use super::Channel;
use crate::core::operation::Op;
use crate::core::posted::Posted;
use crate::core::queue::{DROPPED, Entry};
use crate::error::Error;
use ferrywire_net::Conn;

/// The lane and connection of an ended channel, kept open until neither reads its source memory any more.
pub(crate) struct Unreleased {
    lane: Option<Box<Posted>>,
    /// An aborted connection, and the number of bytes sent over it.
    conn: Option<(Box<dyn Conn>, u64)>,
}

impl Unreleased {
    /// Keeps the closed lane and the connection, over which `sent_bytes` bytes were sent. Returns `None` if
    /// both have released all memory. A connection that has not is aborted; packets that a NIC has queued are
    /// sent even then, and read the memory.
    pub fn of(lane: Option<Box<Posted>>, mut conn: Box<dyn Conn>, sent_bytes: u64) -> Option<Unreleased> {
        let reads = conn.released() < sent_bytes;
        if reads {
            conn.abort();
        }
        let mut unreleased = Unreleased { lane, conn: reads.then_some((conn, sent_bytes)) };
        (!unreleased.has_released()).then_some(unreleased)
    }

    /// Whether neither lane nor connection reads memory any more. Poll until true.
    pub fn has_released(&mut self) -> bool {
        self.lane.take_if(|lane| lane.has_released());
        self.conn.take_if(|(conn, sent_bytes)| conn.released() >= *sent_bytes);
        self.lane.is_none() && self.conn.is_none()
    }
}

impl Channel {
    /// Aborts the connection if the kernel may still read memory that its user has dropped. If true, the
    /// caller loses the channel once [`Channel::has_released_dropped_memory`] returns true.
    pub fn abort_sending_of_dropped_memory(&mut self) -> bool {
        let reads = !self.unreleased_of_dropped_memory().is_empty();
        if reads {
            self.conn.abort();
        }
        reads
    }

    /// Whether the kernel no longer reads memory that its user has dropped.
    pub fn has_released_dropped_memory(&mut self) -> bool {
        self.unreleased_of_dropped_memory().is_empty()
    }

    /// Fails the operations whose dropped memory the kernel has not released in time, even where the peer has
    /// placed their bytes.
    pub fn fail_unreleased(&mut self) {
        let ops = self.unreleased_of_dropped_memory();
        if !ops.is_empty() {
            tracing::error!(
                peer = self.peer.name(),
                "the kernel may still send from memory that was dropped"
            );
        }
        ops.iter().for_each(|op| op.fail(Error::invalid("region", DROPPED)));
    }

    /// Operations on dropped memory that the kernel may still read. The kernel reports one stream position up
    /// to which memory is released, so a copied frame behind an unreleased one counts too. This costs a
    /// connection in rare cases, never data. A connection that copies everything has no such operations.
    fn unreleased_of_dropped_memory(&mut self) -> Vec<Arc<Op>> {
        let released = self.conn.released();
        if released >= self.sender.stream_sent {
            return Vec::new();
        }
        let is_read =
            |end: u64, entry: &Entry| end > released && !entry.header.is_posted() && entry.is_gone();
        // The frame after the last fully sent one is partly sent, unless `sent_within` is 0.
        let sender = &mut self.sender;
        let partial = (sender.sent_within > 0).then_some(sender.stream_sent);
        let ends = sender.ends.iter().copied().chain(partial);
        let window = ends.zip(sender.window.from(0)).map(|(end, entry)| (end, &*entry));
        let unreleased = sender.unreleased.iter().map(|(end, entry)| (*end, entry));
        let read = window.chain(unreleased).filter(|(end, entry)| is_read(*end, entry));
        read.filter_map(|(_, entry)| entry.op.as_deref().cloned()).collect()
    }
}
