//! Payload over a lane beside the stream, in the order of the stream's headers.
//!
//! Invariant: a payload is received only after its header, and a frame is counted only after its payload.
//! Read next: `posted/`, which decides which message is posted when.

use std::io;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::super::receiver::{Receiver, check_crc};
use super::super::{Channel, broken, delivered};
use super::{Payload, PayloadRemains};
use crate::core::peer::{Landing, PeerState};
use crate::core::posted::{Arrival, LanePass, Posted, Touched};
use crate::core::queue::{DROPPED, Entry};
use crate::error::Error;
use crate::payload::lane::Run;
use ferrywire_memory::{Memory, MemoryLocation};
use ferrywire_net::IoVec;
use ferrywire_proto::session::FenceCause;
use ferrywire_proto::wire::{self, Header};
use std::sync::Arc;

/// The lane of a channel, and the frames that wait for its messages.
pub(in super::super) struct LanePayload {
    posted: Box<Posted>,
    /// Target of the payload whose header was received last.
    target: Vec<Run>,
    /// The error that ended the connection, while the lane still has messages to deliver.
    stream_ended: Option<io::Error>,
    /// How the lane failed, if the lane failed and not the connection.
    fault: Option<FenceCause>,
}

impl LanePayload {
    pub fn new(posted: Posted) -> LanePayload {
        LanePayload { posted: Box::new(posted), target: Vec::new(), stream_ended: None, fault: None }
    }

    // ---- sending ----

    /// Number of messages that the lane can take now.
    pub fn room(&self) -> usize {
        self.posted.room()
    }

    /// Whether the lane has to be polled.
    pub fn is_active(&self) -> bool {
        self.posted.active()
    }

    /// How long to pause after a poll without progress, if an active lane specifies that.
    pub fn pause(&self) -> Option<Duration> {
        self.is_active().then(|| self.posted.pause()).flatten()
    }

    /// Whether any frame may be taken from the queue: each may have a payload, for which the lane needs room.
    pub fn has_room(&self) -> bool {
        self.room() > 0
    }

    /// Whether the peer has reported that its end of the lane is ready.
    pub fn is_open(&self) -> bool {
        self.posted.is_peer_ready()
    }

    /// Hands the payloads of pulled frames, with their frame numbers, to the lane.
    pub fn admit<'a>(&mut self, pulled: impl Iterator<Item = (&'a mut Entry, u64)>) {
        for (entry, number) in pulled {
            debug_assert!(entry.staged.is_none(), "a lane reaches the GPU itself");
            if entry.header.is_posted() {
                self.posted.admit(number, entry);
            }
        }
    }

    /// Whether the header of this frame may be sent without waiting for its payload.
    pub fn is_packed(&self, number: u64) -> bool {
        !self.posted.is_unpacked(number)
    }

    /// The error that ends the connection when the user has dropped the memory of a frame to be sent.
    pub fn source_dropped(&self, entry: &Entry) -> io::Error {
        if !entry.header.is_posted() {
            return io::Error::from_raw_os_error(libc::EFAULT);
        }
        // The lane has the message already, and the peer would take it for the next frame's payload.
        entry.op.iter().for_each(|op| op.fail(Error::invalid("region", DROPPED)));
        io::Error::other("the user freed the memory of a message that a lane still sends")
    }

    /// Returns an acknowledged frame, or keeps it while the lane still uses its memory.
    pub fn acknowledged(&mut self, number: u64, entry: Entry) -> Option<Entry> {
        self.posted.acknowledged(number, entry)
    }

    /// Number of receives posted to the lane at this end, for the next header.
    pub fn posted_count(&self) -> u32 {
        self.posted.posted_count()
    }

    // ---- receiving ----

    /// Handles the peer's count of posted receives and checks the size of its message. Returns true when this
    /// header is the first sign that the peer's end is ready.
    pub fn note_header(&mut self, header: &Header) -> io::Result<bool> {
        let is_first = !self.posted.is_peer_ready();
        self.posted.fits(header).and_then(|()| self.posted.confirm(header.posted)).map_err(broken)?;
        if header.flags & wire::FLAG_HELD != 0 {
            self.posted.peer_holds_payload();
        }
        Ok(is_first)
    }

    /// Prepares for the payload of this landing: over the lane, or only a notification in the stream.
    pub fn land(&mut self, receiver: &mut Receiver, landing: Landing) {
        if receiver.header.is_posted() {
            self.target = runs(&landing, &mut receiver.body.pieces);
            // The checksum covers the lane's bytes, and is checked once they have arrived.
            receiver.body.leave_unchecked();
        }
        receiver.expect(landing);
    }

    /// Whether a frame whose bytes in the stream have arrived has to wait: for its own payload, or for that
    /// of an earlier frame.
    pub fn defers(&self, header: &Header) -> bool {
        header.is_posted() || self.posted.waiting() > 0
    }

    /// Queues a frame whose payload is still in flight.
    pub fn take_over(&mut self, arrival: Arrival) {
        let target = std::mem::take(&mut self.target);
        self.posted.expect(Arrival { target, ..arrival });
    }

    /// Number of frames that wait for a payload.
    pub fn waiting(&self) -> usize {
        self.posted.waiting()
    }

    /// Forgets the target of a refused frame.
    pub fn break_off(&mut self) {
        self.target.clear();
    }

    /// Stops placing bytes into memory for which `gone` is true. Returns what may still write there; poll until
    /// nothing does.
    pub fn abandon(&mut self, gone: &dyn Fn(&Landing) -> bool) -> Touched {
        self.posted.abandon(gone)
    }

    // ---- both ----

    /// Handles the end of the connection. Payloads of received headers may still arrive over the lane.
    /// Returns `error` if none is expected.
    pub fn end_stream(&mut self, error: io::Error, peer: &PeerState) -> io::Result<()> {
        if self.posted.waiting() == 0 || self.stream_ended() {
            return Err(error);
        }
        self.posted.companion_closed(peer.now(), &error.to_string());
        self.stream_ended = Some(error);
        Ok(())
    }

    /// Whether the connection has ended.
    pub fn stream_ended(&self) -> bool {
        self.stream_ended.is_some()
    }

    /// A description of a dead path under the lane.
    pub fn path_trouble(&mut self, now: Duration) -> Option<String> {
        let trouble = self.posted.path_trouble(now);
        self.fault = self.fault.or(trouble.as_ref().map(|_| FenceCause::LaneFailed));
        trouble
    }

    /// Whether this end holds received payload of the lane for so long that the peer has to be told.
    pub fn holds_payload(&self) -> bool {
        self.posted.holds_payload()
    }

    /// Closes the lane.
    pub fn end(mut self) -> PayloadRemains {
        let lane_state = Some(self.posted.state());
        let acknowledged = self.posted.end();
        PayloadRemains {
            lane: Some(self.posted),
            lane_state,
            lane_fault: self.fault,
            acknowledged,
            hung: None,
        }
    }
}

impl Channel {
    /// Payload bytes that the lane has in flight.
    pub fn lane_bytes_in_flight(&self) -> usize {
        self.payload.lane().map_or(0, |lane| lane.posted.bytes_in_flight())
    }

    /// Whether the lane sends from memory that its user has dropped, and may have freed.
    pub fn lane_sends_what_is_gone(&self) -> bool {
        self.payload.lane().is_some_and(|lane| lane.posted.sends_what_is_gone())
    }

    /// Undoes the lane's registrations of dropped regions.
    pub fn forget_revoked(&mut self) {
        if let Payload::Lane(lane) = &mut self.payload {
            lane.posted.forget_revoked();
        }
    }

    /// Polls the lane, if there is one. Returns whether it made progress.
    pub fn poll_lane(&mut self) -> io::Result<bool> {
        let Payload::Lane(lane) = &mut self.payload else { return Ok(false) };
        if !lane.posted.active() {
            return lane.stream_ended.take().map_or(Ok(false), Err);
        }
        let mut pass = LanePass::default();
        let result = lane.posted.poll(self.peer.now(), &mut pass);
        self.counters.sent_bytes.fetch_add(pass.sent_bytes, Ordering::Relaxed);
        self.counters.received_bytes.fetch_add(pass.received_bytes, Ordering::Relaxed);
        for mut entry in pass.delivered {
            delivered(&self.peer, &mut entry, None);
        }
        let fault = match () {
            () if pass.unreadable.is_some() => FenceCause::SourceUnreadable,
            () if pass.stalled => FenceCause::LaneStalled,
            () => FenceCause::LaneFailed,
        };
        if let Some((frame, why)) = pass.unreadable
            && let Some(entry) = self.sender.window.get_mut(frame)
        {
            tracing::warn!(%why, peer = self.peer.name(), "the lane cannot read registered memory to send it: the transfer fails");
            entry.fail_unread(why);
        }
        for (frame, error) in pass.given_up {
            let Some(entry) = self.sender.window.get_mut(frame) else { continue };
            let credit = entry.give_up(&error);
            if self.peer.queue.crc {
                entry.add_crc();
            }
            self.peer.queue.credit(credit);
        }
        for arrival in pass.arrived {
            let Arrival { header, placements, landing, message, refusal, target, chunk } = arrival;
            if refusal.is_none() {
                check_posted(&header, &target, &message)?;
            }
            self.placed(&header, &placements, landing.as_ref(), message, refusal, chunk)?;
        }
        if result.is_err()
            && let Payload::Lane(lane) = &mut self.payload
        {
            lane.fault = Some(fault);
        }
        result.map(|()| pass.worked).map_err(io::Error::other)
    }
}

#[cfg(test)]
impl Payload {
    /// Whether some messages are not sent yet.
    pub fn is_sending(&self) -> bool {
        matches!(self, Payload::Lane(lane) if lane.posted.is_sending())
    }
}

/// Converts the pieces of a landing to runs of its memory, and clears the pieces.
fn runs(landing: &Landing, pieces: &mut Vec<IoVec>) -> Vec<Run> {
    let run = |memory: &Arc<Memory>, piece: IoVec| Run {
        memory: memory.clone(),
        offset: memory.offset_of(piece.base),
        bytes: piece.len,
    };
    let pieces = pieces.drain(..);
    landing.memory().map_or(Vec::new(), |memory| pieces.map(|piece| run(memory, piece)).collect())
}

/// Checks a payload that came over a lane. Checksums are used only where both ends use host memory.
fn check_posted(header: &Header, target: &[Run], message: &[u8]) -> io::Result<()> {
    if header.flags & wire::FLAG_CRC == 0 || !header.is_posted() {
        return Ok(());
    }
    let mut crc = crc32fast::Hasher::new();
    for run in target.iter().filter(|run| run.memory.location() == MemoryLocation::Host) {
        // SAFETY: the run is inside live host memory, which the frame's landing keeps.
        crc.update(unsafe { std::slice::from_raw_parts(run.base(), run.bytes) });
    }
    crc.update(message);
    check_crc(header.crc, crc.finalize())
}
