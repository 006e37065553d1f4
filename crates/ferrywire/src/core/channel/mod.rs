//! One connection of a peer, with its window: frames out, frames in.
//!
//! | part | file | does |
//! |---|---|---|
//! | [`Sender`] | `sender.rs` | sends frames of the window, and knows what the kernel and the peer have of them |
//! | | `pull.rs` | takes frames from the peer's queue: how many, and of which size |
//! | | `batch.rs` | the pieces of one socket call |
//! | [`Receiver`] | `receiver.rs` | takes frames out of the stream, and says what they cause |
//! | | `body.rs` | what of a frame's body is still to come, and where it goes |
//! | | `acks.rs` | what was placed, and what the peer has been told of that |
//! | [`Payload`] | `payload/` | what is different where payload comes from a GPU, or travels over a lane |
//! | | `dropped.rs` | what the connection still sends of memory that its user has dropped |
//!
//! A write: `pull` fills the window, `send_batch` gathers frames straight from the memory that they describe, `account`
//! moves the mark behind what the kernel took, `acknowledged` ends what the peer has placed. At the other end: `take_header`,
//! `land` finds the target, `copy_in` or the socket call itself fills it, `placed` counts the frame, and that count is the
//! acknowledgement.
//!
//! Invariant: after [`Channel::end`] not a byte of this connection is placed any more.
//! Read next: `sender.rs`, `receiver.rs`; then `worker/`, which owns channels and says which is polled when.

mod acks;
mod batch;
mod body;
mod dropped;
mod payload;
mod pull;
mod receiver;
mod sender;

pub(crate) use dropped::Unreleased;

use crate::core::peer::{Landing, PeerState};
use crate::core::posted::Posted;
use crate::core::queue::Entry;
use crate::core::stats::{ChannelCounters, NO_BACKLOG};
use ferrywire_memory::MemoryLocation;
use ferrywire_net::{Conn, IoVec};
use ferrywire_proto::limits;
use ferrywire_proto::session::FenceCause;
use ferrywire_proto::wire::Refusal;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use payload::{Ended, Payload};
use receiver::Receiver;
use sender::Sender;

/// Bytes that one pass may move in each direction before other channels have theirs.
const PASS_BYTES: usize = 4 << 20;
/// Where nothing of an operation has come for so long, it may be over.
const BULK_PAUSE: Duration = Duration::from_millis(5);

/// A channel, owned by one worker.
pub(crate) struct Channel {
    conn: Box<dyn Conn>,
    pub peer: Arc<PeerState>,
    pub index: u16,
    pub generation: u32,
    pub counters: Arc<ChannelCounters>,
    sender: Sender,
    receiver: Receiver,
    payload: Payload,
}

/// What is left of a channel that ended, for the fence.
pub(crate) struct Remains {
    /// Frames received and placed.
    pub placed: u64,
    /// Frames received and refused, those that the peer may have been told of included.
    pub refused: Vec<(u64, Refusal)>,
    /// Frames sent or queued here and not acknowledged, oldest first.
    pub entries: Vec<(u64, Entry)>,
    /// The state the lane was in, in words, if there was one.
    pub lane: Option<String>,
    /// How the lane failed, if it was the lane.
    pub lane_fault: Option<FenceCause>,
    /// What was closed, while something may still read the memory of which it was sending.
    pub unreleased: Option<Unreleased>,
}

/// What may still write to memory that is taken back.
pub(crate) struct Touched {
    /// The lane, whose receive for it is posted.
    pub lane: bool,
    /// A GPU, with copies that are under way.
    pub gpu: Option<MemoryLocation>,
}

/// Buffers that a worker lends to the channel that it polls.
pub(crate) struct Workspace {
    pub scratch: Box<[u8]>,
    pieces: Vec<IoVec>,
}

impl Workspace {
    pub fn new() -> Workspace {
        let pieces = Vec::with_capacity(ferrywire_sys::IOVECS_PER_CALL_MAX);
        Workspace { scratch: vec![0; limits::SCRATCH_BYTES].into(), pieces }
    }
}

// SAFETY: the pieces are only meaningful within one call; between calls the list is empty.
unsafe impl Send for Workspace {}

impl Channel {
    pub fn new(mut conn: Box<dyn Conn>, peer: Arc<PeerState>, index: u16, generation: u32) -> Channel {
        let counters = peer.counters(index);
        counters.start(&*conn, generation);
        // The handshake's bytes are part of the stream that `released` counts.
        let stream_sent = Some(conn.released()).filter(|bytes| *bytes < u64::MAX).unwrap_or(0);
        Channel {
            sender: Sender::new(peer.info.window, stream_sent),
            receiver: Receiver::new(),
            payload: Payload::Stream,
            conn,
            peer,
            index,
            generation,
            counters,
        }
    }

    /// With a lane for the payload of its data frames.
    pub fn with_lane(mut self, posted: Posted) -> Channel {
        let is_waited_for = posted.is_waited_for();
        self.payload = Payload::over_lane(posted);
        if is_waited_for {
            // Of no frames, and the first that the peer hears.
            self.make_ack_frame();
        }
        self.tell_backlog();
        self
    }

    pub fn conn(&self) -> &dyn Conn {
        &*self.conn
    }

    /// This channel over what `wrap` makes of its connection.
    #[cfg(test)]
    pub fn with_conn(self, wrap: impl FnOnce(Box<dyn Conn>) -> Box<dyn Conn>) -> Channel {
        Channel { conn: wrap(self.conn), ..self }
    }

    /// Whether there is so much to send or to receive that its thread need not watch for more.
    pub fn in_deep_bulk(&self) -> bool {
        let coming = self.receiver.bulk_since.is_some_and(|since| since.elapsed() < BULK_PAUSE);
        !self.has_lane() && (coming || self.peer.in_deep_bulk())
    }

    /// Whether it is for the owner of this channel to ask whether held operations may begin: for one of those it has of a peer.
    pub fn asks_for_held(&self) -> bool {
        self.peer.held.any() && self.peer.is_home(self.index)
    }

    /// Stops placing bytes into this memory: the rest of a payload under way is thrown away. Says what may still write there.
    pub fn abandon(&mut self, gone: impl Fn(&Landing) -> bool) -> Touched {
        if self.receiver.landing.as_ref().is_some_and(&gone) {
            let landing = self.receiver.break_off(Refusal::NoRegion);
            self.payload.break_off(landing);
        }
        self.payload.abandon(&gone)
    }

    /// Ends the channel: closes the connection, then tells what it placed and what it did not deliver.
    pub fn end(mut self) -> Remains {
        self.conn.shutdown();
        let Ended { lane, lane_state, lane_fault, acknowledged } = self.payload.end();
        acknowledged.into_iter().for_each(|entry| self.peer.delivered(entry, None));
        self.counters.alive.store(false, Ordering::Relaxed);
        self.counters.backlog.store(NO_BACKLOG, Ordering::Relaxed);
        self.counters.staging.pinned_bytes.store(0, Ordering::Relaxed);
        let unreleased = Unreleased::of(lane, self.conn, self.sender.stream_sent);
        self.sender.unreleased.into_iter().for_each(|(_, entry)| self.peer.delivered(entry, None));
        let mut entries = self.sender.window.drain();
        // Over another channel they are staged again.
        entries.iter_mut().for_each(|(_, entry)| entry.staged = None);
        let (placed, refused) = self.receiver.acks.end();
        Remains { placed, refused, entries, lane: lane_state, lane_fault, unreleased }
    }
}

fn broken(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the stream is broken: {what}"))
}
