//! How a channel's payload travels, asked by the sender and the receiver wherever that makes a difference.
//!
//! | way | payload | leaves when |
//! |---|---|---|
//! | `Stream` | of host memory, in the stream | the first payload of a GPU comes, either way: then it is `Staged` |
//! | `Staged` | of GPUs and of the host, in the stream; that of GPUs passes through rings | |
//! | `Lane` | over a lane beside the stream | |
//!
//! Invariant: `Stream` does nothing: a write of host memory over TCP costs one comparison at each question.
//! Read next: `staged.rs`, `lane.rs`.

mod lane;
mod staged;

use std::io;
use std::sync::Arc;
use std::time::Instant;

use super::batch::Batch;
use super::receiver::Receiver;
use super::sender::Sender;
use super::{Touched, broken};
use crate::core::operation::Hold;
use crate::core::peer::{Landing, PeerState};
use crate::core::posted::{Arrival, Posted};
use crate::core::queue::{Entry, Pull, SendQueue};
use crate::core::staging::Sending;
use crate::core::stats::ChannelCounters;
use ferrywire_memory::MemoryLocation;
use ferrywire_proto::limits;
use ferrywire_proto::session::FenceCause;
use ferrywire_proto::window::Window;
use ferrywire_proto::wire::{Header, Refusal};
use lane::LanePayload;
use staged::StagedPayload;

/// Pieces at least this long may go out without a copy.
const STABLE_BYTES_MIN: usize = 64 << 10;

/// How the payload of a channel travels.
pub(super) enum Payload {
    Stream,
    Staged(Box<StagedPayload>),
    Lane(LanePayload),
}

/// What is left of the payload of a channel that has ended.
#[derive(Default)]
pub(super) struct Ended {
    /// The closed lane, which may still read memory, and the state it was in, in words.
    pub lane: Option<Box<Posted>>,
    pub lane_state: Option<String>,
    pub lane_fault: Option<FenceCause>,
    /// Frames that the peer has acknowledged, and whose memory the lane kept.
    pub acknowledged: Vec<Entry>,
}

impl Payload {
    /// Over a lane.
    pub fn over_lane(posted: Posted) -> Payload {
        Payload::Lane(LanePayload::new(posted))
    }

    // ---- taking frames from the queue ----

    /// Whether any frame may be taken.
    pub fn has_room(&self) -> bool {
        match self {
            Payload::Stream => true,
            Payload::Staged(staged) => staged.has_room(),
            Payload::Lane(lane) => lane.has_room(),
        }
    }

    /// Whether the peer is known to be ready for it.
    pub fn is_open(&self) -> bool {
        match self {
            Payload::Stream | Payload::Staged(_) => true,
            Payload::Lane(lane) => lane.is_open(),
        }
    }

    /// At how many of the two ends payload is copied once more on its way. `None`: it bounds what is in flight by itself.
    pub fn copying_ends(&self, peer: &PeerState) -> Option<u64> {
        let at_peer = u64::from(peer.writes_to_gpus());
        match self {
            Payload::Stream => Some(at_peer),
            Payload::Staged(staged) => Some(u64::from(staged.has_sent()) + at_peer),
            Payload::Lane(_) => None,
        }
    }

    /// The shortest and the longest chunk of what is copied here once more.
    pub fn staged_chunk_bytes(&self, peer: &PeerState) -> (usize, usize) {
        match self {
            Payload::Staged(staged) if staged.has_sent() => peer.staged_chunk_bytes(),
            _ => (limits::STAGING_CHUNK_BYTES_MIN, limits::STAGING_BATCH_BYTES),
        }
    }

    /// Messages that there is room for beside the stream; `None` where payload goes into it.
    pub fn messages(&self) -> Option<usize> {
        match self {
            Payload::Stream | Payload::Staged(_) => None,
            Payload::Lane(lane) => Some(lane.room()),
        }
    }

    /// Whether there is enough in the window for the next socket call.
    #[inline]
    pub fn note_enough(&mut self, enough: bool) {
        if let Payload::Staged(staged) = self {
            staged.note_enough(enough);
        }
    }

    /// Fills the window from the queue, and begins what has to happen to its payload before that can be sent. Returns the
    /// operations that ended without needing a frame.
    pub fn pull(
        &mut self,
        peer: &PeerState,
        counters: &Arc<ChannelCounters>,
        window: &mut Window<Entry>,
        pull: Pull,
    ) -> Vec<Hold> {
        let first = window.next();
        let queue = &peer.queue;
        match self {
            Payload::Stream => {
                let mut sending = Sending::default();
                let (_, dropped) = queue.pull(window, &mut sending, pull);
                if sending.begun() {
                    let mut staged = StagedPayload::new(sending, counters.clone());
                    staged.begin_copies(window.from(first), queue);
                    *self = Payload::Staged(Box::new(staged));
                }
                dropped
            }
            Payload::Staged(staged) => {
                let (_, dropped) = queue.pull(window, staged.sending(), pull);
                staged.begin_copies(window.from(first), queue);
                dropped
            }
            Payload::Lane(lane) => {
                let (_, dropped) = queue.pull(window, &mut Sending::default(), pull);
                lane.admit(window.from(first).zip(first..));
                dropped
            }
        }
    }

    // ---- sending ----

    /// Looks what has become ready to be sent.
    #[inline]
    pub fn look(&mut self, sender: &mut Sender, queue: &SendQueue) {
        if let Payload::Staged(staged) = self {
            staged.look(sender.window.from(sender.sent), queue);
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

    /// The user has dropped the memory of a frame that is to be sent: the error that ends the socket call.
    pub fn source_dropped(&self, entry: &Entry) -> io::Error {
        match self {
            Payload::Lane(lane) => lane.source_dropped(entry),
            // As if the kernel had said so.
            Payload::Stream | Payload::Staged(_) => io::Error::from_raw_os_error(libc::EFAULT),
        }
    }

    /// Adds what follows the header and the placements of a frame in the stream.
    #[inline]
    pub fn gather(&mut self, entry: &mut Entry, batch: &mut Batch<'_>) {
        match self {
            Payload::Staged(staged) => staged.gather(entry, batch),
            Payload::Stream | Payload::Lane(_) => gather(entry, batch),
        }
    }

    /// A socket call for which the time was taken has returned.
    #[inline]
    pub fn count_call(&self, since: Option<Instant>) {
        if let (Payload::Staged(staged), Some(since)) = (self, since) {
            staged.count_call(since);
        }
    }

    /// The kernel has all of a frame.
    #[inline]
    pub fn sent(&mut self, entry: &mut Entry) {
        if let Payload::Staged(staged) = self {
            staged.sent(entry);
        }
    }

    /// The peer has placed a frame. True if its memory may be read beside the stream: then it is to be
    /// [`finish`](Payload::finish)ed here.
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

    /// Gives an acknowledged frame back, unless its memory is still read beside the stream.
    pub fn finish(&mut self, number: u64, entry: Entry) -> Option<Entry> {
        match self {
            Payload::Stream | Payload::Staged(_) => Some(entry),
            Payload::Lane(lane) => lane.acknowledged(number, entry),
        }
    }

    /// Receives that were posted here beside the stream, for the peer.
    #[inline]
    pub fn posted_count(&self) -> u32 {
        match self {
            Payload::Stream | Payload::Staged(_) => 0,
            Payload::Lane(lane) => lane.posted_count(),
        }
    }

    // ---- receiving ----

    /// What the peer says of its receives beside the stream, and whether its frame can be of this channel. True when the
    /// peer has become ready with it.
    #[inline]
    pub fn hear(&mut self, header: &Header) -> io::Result<bool> {
        match self {
            Payload::Lane(lane) => lane.hear(header),
            _ if header.is_posted() || header.posted != 0 => {
                Err(broken("it sends over a lane, and this channel has none"))
            }
            _ => Ok(false),
        }
    }

    /// The payload of the receiver's frame is about to come, for this landing, whose pieces are the receiver's.
    #[inline]
    pub fn land(&mut self, receiver: &mut Receiver, landing: Landing, counters: &Arc<ChannelCounters>) {
        let gpu = gpu_of(&receiver.header, &landing);
        match (&mut *self, gpu) {
            (Payload::Stream | Payload::Staged(_), None) => receiver.expect(landing),
            (Payload::Staged(staged), Some(location)) => staged.land(receiver, landing, location),
            (Payload::Stream, Some(location)) => {
                let mut staged = Box::new(StagedPayload::new(Sending::default(), counters.clone()));
                staged.land(receiver, landing, location);
                *self = Payload::Staged(staged);
            }
            (Payload::Lane(lane), None) => lane.land(receiver, landing),
            // Over the lane it would have come without this.
            (Payload::Lane(_), Some(_)) => receiver.refuse(Refusal::OutOfReach),
        }
    }

    /// A part of the body is whole: goes on with the next one. True if all of the body is here.
    #[inline]
    pub fn finish_part(&mut self, receiver: &mut Receiver) -> bool {
        match self {
            Payload::Staged(staged) => staged.finish_part(receiver),
            Payload::Stream | Payload::Lane(_) => true,
        }
    }

    /// Whether a frame, of which the stream has brought all it brings, has to wait for payload, its own or that of one
    /// before it.
    #[inline]
    pub fn defers(&self, header: &Header) -> bool {
        match self {
            Payload::Stream => false,
            Payload::Staged(staged) => staged.defers(),
            Payload::Lane(lane) => lane.defers(header),
        }
    }

    /// Takes a frame that has to wait.
    pub fn take_over(&mut self, arrival: Arrival) {
        match self {
            Payload::Stream => debug_assert!(false, "no frame has to wait"),
            Payload::Staged(staged) => staged.take_over(arrival),
            Payload::Lane(lane) => lane.take_over(arrival),
        }
    }

    /// Frames that wait.
    #[inline]
    pub fn waiting(&self) -> usize {
        match self {
            Payload::Stream => 0,
            Payload::Staged(staged) => staged.waiting(),
            Payload::Lane(lane) => lane.waiting(),
        }
    }

    /// Whether the time of the next socket call that receives is to be taken.
    #[inline]
    pub fn times_receive(&self) -> bool {
        matches!(self, Payload::Staged(staged) if staged.is_filling())
    }

    /// Begins what has to happen to payload that was received, if that is enough.
    #[inline]
    pub fn flush_if_full(&mut self) {
        if let Payload::Staged(staged) = self {
            staged.flush_if_full();
        }
    }

    /// Begins what has to happen to payload that was received, however little it is.
    #[inline]
    pub fn flush(&mut self) {
        if let Payload::Staged(staged) = self {
            staged.flush_received();
        }
    }

    /// Whether what was received is to be looked after before there is more.
    #[inline]
    pub fn pauses_after(&self, received_bytes: usize) -> bool {
        matches!(self, Payload::Staged(staged) if staged.pauses_after(received_bytes))
    }

    /// Whether the payload at hand has no room.
    pub fn is_stalled(&self) -> bool {
        matches!(self, Payload::Staged(staged) if staged.is_stalled())
    }

    /// Keeps bytes that were received for later if the payload at hand has no room; true if so.
    #[inline]
    pub fn keeps_back(&mut self, bytes: &[u8]) -> bool {
        match self {
            Payload::Staged(staged) => staged.keeps_back(bytes),
            Payload::Stream | Payload::Lane(_) => false,
        }
    }

    /// Bytes that were kept back, once there is room again; `None` while there is not.
    #[inline]
    pub fn resume(&mut self, receiver: &mut Receiver) -> Option<Vec<u8>> {
        match self {
            Payload::Staged(staged) => staged.resume(receiver),
            Payload::Stream | Payload::Lane(_) => Some(Vec::new()),
        }
    }

    /// The rest of the frame that is being received is thrown away: frees what was at work for it.
    pub fn break_off(&mut self, landing: Option<Landing>) {
        match self {
            Payload::Stream => {}
            Payload::Staged(staged) => staged.break_off(landing),
            Payload::Lane(lane) => lane.break_off(),
        }
    }

    // ---- ending ----

    /// The connection is at its end, with this error.
    ///
    /// # Errors
    /// `error`, unless payload that the connection has announced may still come.
    pub fn end_stream(&mut self, error: io::Error, peer: &PeerState) -> io::Result<()> {
        match self {
            Payload::Stream | Payload::Staged(_) => Err(error),
            Payload::Lane(lane) => lane.end_stream(error, peer),
        }
    }

    /// Whether the connection has ended, and payload may still come.
    #[inline]
    pub fn stream_ended(&self) -> bool {
        matches!(self, Payload::Lane(lane) if lane.stream_ended())
    }

    /// A dead path beside that of the stream, in words.
    pub fn path_trouble(&mut self) -> Option<String> {
        match self {
            Payload::Stream | Payload::Staged(_) => None,
            Payload::Lane(lane) => lane.path_trouble(),
        }
    }

    /// Stops placing bytes where `gone` says. Says what may still write there.
    pub fn abandon(&mut self, gone: &dyn Fn(&Landing) -> bool) -> Touched {
        match self {
            Payload::Stream => Touched { lane: false, gpu: None },
            Payload::Staged(staged) => Touched { lane: false, gpu: staged.abandon(gone) },
            Payload::Lane(lane) => Touched { lane: lane.abandon(gone), gpu: None },
        }
    }

    /// Ends all that moves payload beside the stream: when this returns, nothing of it writes to memory any more.
    pub fn end(self) -> Ended {
        match self {
            Payload::Stream => Ended::default(),
            Payload::Staged(mut staged) => {
                staged.end();
                Ended::default()
            }
            Payload::Lane(lane) => lane.end(),
        }
    }
}

/// Adds what follows the header and the placements of a frame whose payload, if it goes into the stream, is host memory.
#[inline]
fn gather(entry: &Entry, batch: &mut Batch<'_>) {
    entry.stream_pieces(|base, len| batch.add(base, len, len >= STABLE_BYTES_MIN));
}

/// The GPU that a payload of the stream goes to, if it goes to one.
fn gpu_of(header: &Header, landing: &Landing) -> Option<MemoryLocation> {
    let location = landing.memory()?.location();
    (location != MemoryLocation::Host && header.len > 0 && !header.is_posted()).then_some(location)
}
