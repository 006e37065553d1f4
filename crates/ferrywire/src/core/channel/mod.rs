//! One connection of a peer, with its window of frames.
//!
//! | part | file | does |
//! |---|---|---|
//! | [`Sender`] | `sender.rs` | takes frames from the peer's queue, sends them, and tracks them until the peer has placed them |
//! | [`Receiver`] | `receiver.rs` | parses the stream into frames, finds the memory of their payload, and counts them |
//! | [`Payload`] | `payload/` | payload that comes from a GPU, or travels over a lane |
//! | | `dropped.rs` | memory that its user dropped while the connection may still send it |
//!
//! A write: `pull` fills the window. `send_batch` sends frames straight from the source memory. `account`
//! advances the sent position by what the kernel took. `acknowledged` completes what the peer has placed, and
//! `delivered` drops the frame's token; the last one ends the operation. On the target: `take_header` parses, `land` finds the target memory,
//! `copy_in` or the socket call itself fills it, and `placed` counts the frame. That count is the
//! acknowledgement.
//!
//! Invariant: after [`Channel::end`] no byte of this connection is placed.
//! Read next: `sender.rs`, `receiver.rs`; then `worker/`, which owns channels and decides which one is polled
//! when.

mod dropped;
mod payload;
mod receiver;
mod record_rest;
mod sender;

pub(crate) use dropped::Unreleased;
pub(crate) use sender::{SendAcks, delivered};

use crate::core::peer::{Landing, PeerState};
use crate::core::posted::{Posted, Touched};
use crate::core::queue::Entry;
use crate::core::stats::{ChannelCounters, NO_BACKLOG};
use crate::core::trace::{Direction, Stage};
use ferrywire_net::{Conn, IoVec};
use ferrywire_proto::limits;
use ferrywire_proto::session::FenceCause;
use ferrywire_proto::wire::Refusal;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use payload::{LanePayload, Payload, PayloadRemains, StagedPayload};
use receiver::Receiver;
use sender::Sender;

/// Bytes that one pass may move in each direction before the other channels are polled.
const PASS_BYTES: usize = 4 << 20;
/// Time without a frame after which a bulk operation may be over.
const BULK_PAUSE: Duration = Duration::from_millis(5);

/// A connection of a peer with its window. One worker owns it.
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

/// The state of an ended channel that the fence needs.
pub(crate) struct Remains {
    /// Frames received and placed.
    pub placed: u64,
    /// Frames received and refused, including those whose refusal the peer may already have.
    pub refused: Vec<(u64, Refusal)>,
    /// Frames sent or queued here and not acknowledged, oldest first.
    pub entries: Vec<(u64, Entry)>,
    /// A description of the lane's state, if the channel had a lane.
    pub lane: Option<String>,
    /// How the lane failed, if the lane failed and not the connection.
    pub lane_fault: Option<FenceCause>,
    /// The closed lane and connection, while they may still read source memory.
    pub unreleased: Option<Unreleased>,
}

/// Buffers that a worker lends to the channel it polls.
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
        peer.route.note_path(&*conn);
        // `released` also counts the bytes of the handshake.
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

    /// Adds a lane for the payload of data frames.
    pub fn with_lane(mut self, posted: Posted) -> Channel {
        let is_waited_for = posted.is_waited_for();
        self.payload = Payload::over_lane(posted);
        if is_waited_for {
            // An empty acknowledgement, the first frame that the peer receives: it reports that this end of
            // the lane is ready.
            self.make_ack_frame();
        }
        self.publish_load();
        self
    }

    pub fn conn(&self) -> &dyn Conn {
        &*self.conn
    }

    /// Replaces the connection by the result of `wrap`.
    #[cfg(test)]
    pub fn with_conn(self, wrap: impl FnOnce(Box<dyn Conn>) -> Box<dyn Conn>) -> Channel {
        Channel { conn: wrap(self.conn), ..self }
    }

    /// Whether so much is queued or arriving that the thread need not spin for more.
    pub fn in_deep_bulk(&self) -> bool {
        let coming = self.receiver.bulk_since.is_some_and(|since| since.elapsed() < BULK_PAUSE);
        !self.has_lane() && (coming || self.peer.in_deep_bulk())
    }

    /// Whether the payload goes over a lane.
    pub fn has_lane(&self) -> bool {
        self.payload.lane().is_some()
    }

    /// Whether the lane has to be polled: it raises no event when it makes progress.
    pub fn lane_active(&self) -> bool {
        self.payload.lane().is_some_and(LanePayload::is_active)
    }

    /// How long to pause after a poll without progress, if the lane specifies that.
    pub fn lane_pause(&self) -> Option<Duration> {
        self.payload.lane().and_then(LanePayload::pause)
    }

    /// Whether the channel has to be polled: copies are in flight, bytes wait for copies, or operations of
    /// its peer wait for a GPU or its stream. None of these raises an event when it is done.
    pub fn staging_active(&self) -> bool {
        self.payload.staged().is_some_and(StagedPayload::is_active)
            || self.polls_stream_queue()
            || self.polls_messages()
    }

    /// Whether the channel has staged payload of GPUs.
    pub fn stages(&self) -> bool {
        self.payload.staged().is_some()
    }

    /// Whether the channel reads nothing because the current payload has no room.
    pub fn stalled(&self) -> bool {
        self.payload.is_stalled()
    }

    /// Whether this channel polls its peer's operations that wait for a GPU stream. One channel of each peer
    /// does.
    pub fn polls_stream_queue(&self) -> bool {
        self.peer.stream_queue.any() && self.peer.is_home(self.index)
    }

    /// Whether this channel polls the short messages of its peer that are copied to GPUs. Every channel does: the
    /// worker that has received such a message goes on polling.
    pub fn polls_messages(&self) -> bool {
        self.peer.messages.any()
    }

    /// Stops placing bytes into memory for which `gone` is true. The rest of a payload in flight is
    /// discarded, that of a short message goes to a buffer. Returns what may still write to that memory.
    pub fn abandon(&mut self, gone: impl Fn(&Landing) -> bool) -> Touched {
        if self.receiver.landing.as_ref().is_some_and(&gone) {
            match self.receiver.take_out() {
                Some(sink) => self.peer.end_without_message(&sink.op),
                None => {
                    let landing = self.receiver.break_off(Refusal::NoRegion);
                    self.payload.break_off(landing);
                }
            }
        }
        let touched = self.payload.abandon(&gone);
        Touched { gpu: touched.gpu.or_else(|| self.peer.messages.abandon(&gone)), ..touched }
    }

    /// Records a socket call for a trace, if its duration was measured.
    #[inline]
    fn trace_call(&self, direction: Direction, since: Option<Instant>, bytes: usize) {
        if let Some(since) = since {
            self.counters.track.row(Stage::Socket(direction)).ends(since, bytes);
        }
    }

    /// Closes the connection. Returns the frames placed and those not delivered.
    pub fn end(mut self) -> Remains {
        self.conn.shutdown();
        let PayloadRemains { lane, lane_state, lane_fault, acknowledged, hung } = self.payload.end();
        acknowledged.into_iter().for_each(|mut entry| delivered(&self.peer, &mut entry, None));
        self.counters.alive.store(false, Ordering::Relaxed);
        self.counters.backlog.store(NO_BACKLOG, Ordering::Relaxed);
        self.counters.has_ordered_room.store(false, Ordering::SeqCst);
        self.counters.staging.pinned_bytes.store(0, Ordering::Relaxed);
        self.counters.staging.send_ring.set((0, 0));
        self.counters.staging.receive_ring.set((0, 0));
        let unreleased = Unreleased::of(lane, self.conn, self.sender.stream_sent);
        self.sender.unreleased.into_iter().for_each(|(_, mut entry)| delivered(&self.peer, &mut entry, None));
        let mut entries = self.sender.window.drain();
        if let Some(mut hung) = hung {
            let copied = entries.iter().filter(|(_, entry)| entry.staged.is_some());
            hung.keep(self.receiver.landing.take(), copied.filter_map(|(_, entry)| entry.op.clone()));
            hung.leave();
        }
        // A resent frame is staged again by its next channel.
        entries.iter_mut().for_each(|(_, entry)| entry.staged = None);
        let (placed, refused) = self.receiver.acks.end();
        Remains { placed, refused, entries, lane: lane_state, lane_fault, unreleased }
    }
}

fn broken(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the stream is broken: {what}"))
}
