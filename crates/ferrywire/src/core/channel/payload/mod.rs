//! How a channel's payload travels: the sender and the receiver call this where the ways differ.
//!
//! | way | payload | changes when |
//! |---|---|---|
//! | `Stream` | host memory, in the stream | the first GPU payload comes, sent or received: `Staged` |
//! | `Staged` | GPU and host memory, in the stream; GPU payload passes through staging rings | |
//! | `Lane` | over a lane beside the stream | |
//!
//! Invariant: `Stream` does nothing of its own. A write of host memory passes about 17 of these calls at the source and
//! 14 at the target, each a comparison. Outside this folder only `queue.rs` and `gpu` of `Outbox::next` treat GPU
//! payload differently.
//! Read next: `staged.rs`, `lane.rs`.

mod lane;
mod staged;

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::broken;
use super::receiver::Receiver;
use super::sender::{Batch, Sender};
use crate::core::operation::Hold;
use crate::core::peer::{Landing, PeerState};
use crate::core::posted::{Arrival, Posted, Touched};
use crate::core::queue::{Entry, Pull, Pulled, SendQueue, Stage};
use crate::core::staging::{Hung, Sending};
use crate::core::stats::ChannelCounters;
use crate::core::trace::Track;
use ferrywire_memory::MemoryLocation;
use ferrywire_proto::limits;
use ferrywire_proto::session::FenceCause;
use ferrywire_proto::window::Window;
use ferrywire_proto::wire::{Header, Refusal};
pub(super) use lane::LanePayload;
pub(super) use staged::StagedPayload;

/// How the payload of a channel travels.
pub(super) enum Payload {
    Stream,
    Staged(Box<StagedPayload>),
    Lane(Box<LanePayload>),
}

/// The state of an ended channel's payload that the fence needs.
#[derive(Default)]
pub(super) struct PayloadRemains {
    /// The closed lane, which may still read memory, and a description of its state.
    pub lane: Option<Box<Posted>>,
    pub lane_state: Option<String>,
    pub lane_fault: Option<FenceCause>,
    /// Frames that the peer has acknowledged while the lane still used their memory.
    pub acknowledged: Vec<Entry>,
    /// Copies that a GPU has not finished.
    pub hung: Option<Hung>,
}

impl Payload {
    /// Payload over `posted`, a lane.
    pub fn over_lane(posted: Posted) -> Payload {
        Payload::Lane(Box::new(LanePayload::new(posted)))
    }

    /// The lane, if the payload goes over one.
    pub fn lane(&self) -> Option<&LanePayload> {
        match self {
            Payload::Lane(lane) => Some(lane),
            Payload::Stream | Payload::Staged(_) => None,
        }
    }

    /// The staging, if the payload may come from a GPU or go to one.
    pub fn staged(&self) -> Option<&StagedPayload> {
        match self {
            Payload::Staged(staged) => Some(staged),
            Payload::Stream | Payload::Lane(_) => None,
        }
    }

    // ---- taking frames from the queue ----

    /// Whether any frame may be taken from the queue.
    pub fn has_room(&self) -> bool {
        match self {
            Payload::Stream => true,
            Payload::Staged(staged) => staged.has_room(),
            Payload::Lane(lane) => lane.has_room(),
        }
    }

    /// Whether the peer is known to be ready for payload.
    pub fn is_open(&self) -> bool {
        match self {
            Payload::Stream | Payload::Staged(_) => true,
            Payload::Lane(lane) => lane.is_open(),
        }
    }

    /// The number of ends, 0 to 2, that copy payload once more on its way. `None` over a lane, which itself
    /// limits the bytes in flight.
    pub fn copying_ends(&self, peer: &PeerState) -> Option<u64> {
        let at_peer = u64::from(peer.route.writes_to_gpus());
        match self {
            Payload::Stream => Some(at_peer),
            Payload::Staged(staged) => Some(u64::from(staged.has_sent()) + at_peer),
            Payload::Lane(_) => None,
        }
    }

    /// The shortest and the longest chunk, in bytes, of payload that is staged here.
    pub fn staged_chunk_bytes(&self, peer: &PeerState) -> (usize, usize) {
        match self {
            Payload::Staged(staged) if staged.has_sent() => peer.staged_chunk_bytes(),
            _ => (limits::STAGING_CHUNK_BYTES_MIN, limits::STAGING_BATCH_BYTES),
        }
    }

    /// Number of messages that the lane has room for; `None` where payload goes into the stream.
    pub fn messages(&self) -> Option<usize> {
        match self {
            Payload::Stream | Payload::Staged(_) => None,
            Payload::Lane(lane) => Some(lane.room()),
        }
    }

    /// Notes whether the window has enough frames for the next socket call.
    #[inline]
    pub fn note_enough(&mut self, enough: bool) {
        if let Payload::Staged(staged) = self {
            staged.note_enough(enough);
        }
    }

    /// Queues `posted`, if any, fills the window from the queue, and starts the copies that its payload needs
    /// before it can be sent.
    pub fn pull(
        &mut self,
        posted: Option<Hold>,
        peer: &PeerState,
        counters: &Arc<ChannelCounters>,
        window: &mut Window<Entry>,
        pull: Pull,
    ) -> Pulled {
        let first = window.next();
        let queue = &peer.queue;
        match self {
            Payload::Stream => {
                let mut rings = NoRings::new(counters.track);
                let pulled = queue.pull(posted, window, &mut rings, pull);
                if let Some(sending) = rings.sending {
                    let mut staged = StagedPayload::new(sending, counters.clone());
                    staged.begin_copies(window.from(first), queue);
                    *self = Payload::Staged(Box::new(staged));
                }
                pulled
            }
            Payload::Staged(staged) => {
                staged.fit_rings(queue);
                let pulled = queue.pull(posted, window, staged.sending(), pull);
                staged.begin_copies(window.from(first), queue);
                pulled
            }
            Payload::Lane(lane) => {
                let pulled = queue.pull(posted, window, &mut NoRings::new(counters.track), pull);
                lane.admit(window.from(first).zip(first..));
                pulled
            }
        }
    }

    // ---- sending ----

    /// Checks which payloads have become ready to be sent.
    #[inline]
    pub fn poll_copies(&mut self, sender: &mut Sender, queue: &SendQueue) {
        if let Payload::Staged(staged) = self {
            staged.poll_copies(sender.window.from(sender.sent), queue);
        }
    }

    /// Whether a frame may be sent now.
    #[inline]
    pub fn ready(&mut self, number: u64, entry: &mut Entry, queue: &SendQueue) -> bool {
        match self {
            Payload::Stream => true,
            Payload::Staged(staged) => staged.is_copied(entry, queue),
            Payload::Lane(lane) => lane.is_packed(number),
        }
    }

    /// The error that ends the socket call when a frame's memory was dropped by its user.
    pub fn source_dropped(&self, entry: &Entry) -> io::Error {
        match self {
            Payload::Lane(lane) => lane.source_dropped(entry),
            // `EFAULT` is the kernel's own error for memory that cannot be read.
            Payload::Stream | Payload::Staged(_) => io::Error::from_raw_os_error(libc::EFAULT),
        }
    }

    /// Adds the bytes that follow a frame's header and placements in the stream.
    #[inline]
    pub fn gather(&mut self, entry: &mut Entry, batch: &mut Batch<'_>) {
        match self {
            Payload::Staged(staged) => staged.gather(entry, batch),
            Payload::Stream | Payload::Lane(_) => batch.add_host(entry),
        }
    }

    /// Counts the duration of a measured socket call that began at `since`.
    #[inline]
    pub fn count_call(&self, since: Option<Instant>) {
        if let (Payload::Staged(staged), Some(since)) = (self, since) {
            staged.count_call(since);
        }
    }

    /// Handles a frame that the kernel has taken completely.
    #[inline]
    pub fn sent(&mut self, entry: &mut Entry) {
        if let Payload::Staged(staged) = self {
            staged.sent(entry);
        }
    }

    /// Handles a frame that the peer has placed. Returns true if the frame's memory may still be read beside
    /// the stream; then pass the frame to [`finish`](Payload::finish).
    #[inline]
    pub fn acknowledged(&mut self, entry: &mut Entry) -> bool {
        match self {
            Payload::Stream => false,
            Payload::Staged(staged) => {
                staged.acknowledged(entry);
                false
            }
            Payload::Lane(_) => entry.header.is_posted(),
        }
    }

    /// Returns an acknowledged frame, or `None` while its memory is still read beside the stream.
    pub fn finish(&mut self, number: u64, entry: Entry) -> Option<Entry> {
        match self {
            Payload::Stream | Payload::Staged(_) => Some(entry),
            Payload::Lane(lane) => lane.acknowledged(number, entry),
        }
    }

    /// Number of receives posted to the lane, for the next header; 0 without a lane.
    #[inline]
    pub fn posted_count(&self) -> u32 {
        match self {
            Payload::Stream | Payload::Staged(_) => 0,
            Payload::Lane(lane) => lane.posted_count(),
        }
    }

    // ---- receiving ----

    /// Handles the peer's count of posted receives, and checks that this channel can have such a frame.
    /// Returns true when the peer has become ready with this header.
    #[inline]
    pub fn note_header(&mut self, header: &Header) -> io::Result<bool> {
        match self {
            Payload::Lane(lane) => lane.note_header(header),
            _ if header.is_posted() || header.posted != 0 => {
                Err(broken("a frame announces a message of a lane, and this channel has no lane"))
            }
            _ => Ok(false),
        }
    }

    /// Prepares for the payload of the receiver's frame. Its pieces are the receiver's.
    #[inline]
    pub fn land(&mut self, receiver: &mut Receiver, landing: Landing, counters: &Arc<ChannelCounters>) {
        let gpu = gpu_of(&receiver.header, &landing);
        match (&mut *self, gpu) {
            (Payload::Stream | Payload::Staged(_), None) => receiver.expect(landing),
            (Payload::Staged(staged), Some(location)) => staged.land(receiver, landing, location),
            (Payload::Stream, Some(location)) => {
                let mut staged = Box::new(StagedPayload::new(Sending::new(counters.track), counters.clone()));
                staged.land(receiver, landing, location);
                *self = Payload::Staged(staged);
            }
            (Payload::Lane(lane), None) => lane.land(receiver, landing),
            // The peer would have sent GPU payload over the lane.
            (Payload::Lane(_), Some(_)) => receiver.refuse(Refusal::UnreachableMemory),
        }
    }

    /// Ends a complete part of the body and starts the next one. Returns true if the body is complete.
    #[inline]
    pub fn finish_part(&mut self, receiver: &mut Receiver) -> bool {
        match self {
            Payload::Staged(staged) => staged.finish_part(receiver),
            Payload::Stream | Payload::Lane(_) => true,
        }
    }

    /// Whether a frame whose bytes in the stream have arrived has to wait for payload, its own or an earlier
    /// frame's.
    #[inline]
    pub fn defers(&self, header: &Header) -> bool {
        match self {
            Payload::Stream => false,
            Payload::Staged(staged) => staged.defers(),
            Payload::Lane(lane) => lane.defers(header),
        }
    }

    /// Queues a frame that has to wait for payload.
    pub fn take_over(&mut self, arrival: Arrival) {
        match self {
            Payload::Stream => debug_assert!(false, "a frame in host memory never waits"),
            Payload::Staged(staged) => staged.take_over(arrival),
            Payload::Lane(lane) => lane.take_over(arrival),
        }
    }

    /// Number of frames that wait for payload.
    #[inline]
    pub fn waiting(&self) -> usize {
        match self {
            Payload::Stream => 0,
            Payload::Staged(staged) => staged.waiting(),
            Payload::Lane(lane) => lane.waiting(),
        }
    }

    /// Whether to measure the duration of the next receive call.
    #[inline]
    pub fn times_receive(&self) -> bool {
        matches!(self, Payload::Staged(staged) if staged.is_filling())
    }

    /// Starts the copies of received payload, if it is enough for one batch.
    #[inline]
    pub fn flush_if_full(&mut self) {
        if let Payload::Staged(staged) = self {
            staged.flush_if_full();
        }
    }

    /// Starts the copies of received payload, however little it is.
    #[inline]
    pub fn flush(&mut self) {
        if let Payload::Staged(staged) = self {
            staged.flush_received();
        }
    }

    /// Whether to stop receiving after this many bytes, and to check running copies first.
    #[inline]
    pub fn pauses_after(&self, received_bytes: usize) -> bool {
        matches!(self, Payload::Staged(staged) if staged.pauses_after(received_bytes))
    }

    /// Whether the current payload has no room in its ring.
    pub fn is_stalled(&self) -> bool {
        matches!(self, Payload::Staged(staged) if staged.is_stalled())
    }

    /// Keeps received bytes for later if the current payload has no room. Returns whether it kept them.
    #[inline]
    pub fn keeps_back(&mut self, bytes: &[u8]) -> bool {
        match self {
            Payload::Staged(staged) => staged.keeps_back(bytes),
            Payload::Stream | Payload::Lane(_) => false,
        }
    }

    /// Takes the kept bytes once there is room; `None` while there is not.
    #[inline]
    pub fn resume(&mut self, receiver: &mut Receiver) -> Option<Vec<u8>> {
        match self {
            Payload::Staged(staged) => staged.resume(receiver),
            Payload::Stream | Payload::Lane(_) => Some(Vec::new()),
        }
    }

    /// Discards the rest of the frame that is being received, and frees what was reserved for it.
    pub fn break_off(&mut self, landing: Option<Landing>) {
        match self {
            Payload::Stream => {}
            Payload::Staged(staged) => staged.break_off(landing),
            Payload::Lane(lane) => lane.break_off(),
        }
    }

    // ---- ending ----

    /// Handles the end of the connection with `error`.
    ///
    /// # Errors
    /// `error`, unless announced payload may still arrive over the lane.
    pub fn end_stream(&mut self, error: io::Error, peer: &PeerState) -> io::Result<()> {
        match self {
            Payload::Stream | Payload::Staged(_) => Err(error),
            Payload::Lane(lane) => lane.end_stream(error, peer),
        }
    }

    /// Whether the connection has ended while payload may still arrive.
    #[inline]
    pub fn stream_ended(&self) -> bool {
        matches!(self, Payload::Lane(lane) if lane.stream_ended())
    }

    /// A description of a dead path of the lane.
    pub fn path_trouble(&mut self, now: Duration) -> Option<String> {
        match self {
            Payload::Stream | Payload::Staged(_) => None,
            Payload::Lane(lane) => lane.path_trouble(now),
        }
    }

    /// Whether this end holds received payload of the lane for so long that the peer has to be told.
    pub fn holds_payload(&self) -> bool {
        matches!(self, Payload::Lane(lane) if lane.holds_payload())
    }

    /// Stops placing bytes into memory for which `gone` is true. Returns what may still write there.
    pub fn abandon(&mut self, gone: &dyn Fn(&Landing) -> bool) -> Touched {
        match self {
            Payload::Stream => Touched::default(),
            Payload::Staged(staged) => Touched { lane: false, gpu: staged.abandon(gone) },
            Payload::Lane(lane) => lane.abandon(gone),
        }
    }

    /// Ends all payload movement beside the stream. After this nothing writes to memory any more.
    pub fn end(self) -> PayloadRemains {
        match self {
            Payload::Stream => PayloadRemains::default(),
            Payload::Staged(mut staged) => PayloadRemains { hung: staged.end(), ..PayloadRemains::default() },
            Payload::Lane(lane) => lane.end(),
        }
    }
}

/// The staging of a channel that has staged nothing yet. The first GPU payload makes the rings.
struct NoRings {
    sending: Option<Sending>,
    track: Track,
}

impl NoRings {
    fn new(track: Track) -> NoRings {
        NoRings { sending: None, track }
    }
}

impl Stage for NoRings {
    fn has_room(&self) -> bool {
        self.sending.as_ref().is_none_or(Sending::has_room)
    }

    fn reserve(&mut self, entry: &mut Entry) {
        if entry.gpu().is_some() {
            self.sending.get_or_insert_with(|| Sending::new(self.track)).reserve(entry);
        }
    }
}

/// The GPU that payload in the stream is for, if any.
fn gpu_of(header: &Header, landing: &Landing) -> Option<MemoryLocation> {
    let location = landing.memory()?.location();
    (location != MemoryLocation::Host && header.len > 0 && !header.is_posted()).then_some(location)
}
