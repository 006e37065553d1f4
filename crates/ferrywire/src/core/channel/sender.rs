//! The sending half of a channel: takes frames from the peer's queue, sends them, and completes what the peer
//! acknowledges.
//!
//! A frame's states: `taken -> sent -> acknowledged -> released -> delivered`. A frame is released when the
//! kernel no longer reads its memory. A connection that copies releases at once. Each channel takes a share
//! of the queued bytes, so that all channels of a peer have work and none runs ahead.
//!
//! Invariants: a frame is taken only while the window and the payload path have room for any frame. A frame's
//! entry, and with it the memory, is kept until the peer has placed the frame and the kernel has released it.
//! The pieces of a [`Batch`] are consecutive bytes of the stream.
//! Read next: `queue.rs`, where frames come from.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::payload::Payload;
use super::{Channel, PASS_BYTES, Workspace, broken};
use crate::core::operation::Hold;
use crate::core::peer::PeerState;
use crate::core::queue::{Body, DROPPED, Entry, Pull};
use crate::core::stats::NO_BACKLOG;
use crate::core::trace::{self, Direction};
use crate::error::Error;
use crate::payload::lane::UNREADABLE;
use ferrywire_net::{Conn, IoVec, PathHealth};
use ferrywire_proto::limits;
use ferrywire_proto::schedule::{self, InCache, Traffic};
use ferrywire_proto::window::Window;
use ferrywire_proto::wire::{self, HEADER_BYTES, Header, Kind, Refusal};

/// Passes without other work for which an acknowledgement waits for a short frame whose copy is in flight, and the longest such
/// frame in bytes. The copy of a few bytes takes as long as the call that would send the acknowledgement alone.
const COPY_PASSES: u32 = 16;
const SHORT_COPY_BYTES: u32 = 64 << 10;
/// Smallest piece of host memory in bytes that may be sent without a copy.
const STABLE_BYTES_MIN: usize = 64 << 10;
/// Bytes of frames kept ready for the next send call.
const READY_BYTES: u64 = limits::SEND_BYTES_PER_CALL_MAX as u64;

// One call can take a header, its placements, the blocks of the payload and a notification.
const _: () = assert!(limits::SEGMENTS_PER_CHUNK_MAX + 2 <= ferrywire_sys::IOVECS_PER_CALL_MAX);

/// Which acknowledgements a pass sends in frames of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SendAcks {
    /// Those that are urgent.
    Urgent,
    /// All that are due, unless a frame that can carry them will be ready in a moment.
    UnlessFrameSoon,
    /// All that are due.
    All,
}

/// Frames to send, and their progress through the kernel.
pub(super) struct Sender {
    /// Frames that were taken from the queue and that the peer has not acknowledged.
    pub window: Window<Entry>,
    /// Number of the first frame that the kernel has not taken completely, and the bytes of it that the
    /// kernel has taken.
    pub sent: u64,
    pub sent_within: usize,
    /// Bytes of the stream that the kernel has taken, including the handshake.
    pub stream_sent: u64,
    /// Stream positions of the ends of the window's frames that are sent completely.
    pub ends: VecDeque<u64>,
    /// Acknowledged frames whose memory the kernel still reads, with the stream position of their end.
    pub unreleased: VecDeque<(u64, Entry)>,
    /// Operations of frames that the peer has placed, while an acknowledgement is handled.
    placed: Vec<Hold>,
    /// Rest of an acknowledgement frame that is not sent completely.
    ack_frame: Vec<u8>,
    /// Passes without other work for which the acknowledgement that is due has waited for a copy.
    ack_passes: u32,
    /// Whether the kernel took fewer bytes than offered. If so, send again when the socket is writable.
    pub blocked: bool,
    /// Whether the connection holds bytes of earlier calls that the kernel has not taken.
    holds_back: bool,
    /// Whether each call sends one frame, to find the frame whose memory the kernel could not read in the
    /// last call.
    frame_by_frame: bool,
    /// Whether the peer's kernel may lack bytes: a send sets this, and a check of the path clears it.
    unproven: bool,
    /// Bytes that the peer's kernel had acknowledged at the last check.
    acked_bytes: u64,
    /// Number of the first frame without an acknowledgement at the last check.
    first_checked: u64,
}

impl Channel {
    /// Sends frames that are ready, and acknowledgements. Returns the bytes taken by the kernel.
    pub fn send(&mut self, acks: SendAcks, space: &mut Workspace) -> io::Result<usize> {
        self.payload.poll_copies(&mut self.sender, &self.peer.queue);
        if self.sender.blocked || self.payload.stream_ended() {
            self.publish_load();
            self.hand_over_small();
            return Ok(0);
        }
        if self.sender.holds_back {
            self.flush_held()?;
        }
        let mut moved = 0;
        while !self.sender.blocked && moved < PASS_BYTES {
            self.pull();
            if self.wants_ack_frame(acks) {
                self.make_ack_frame();
            }
            let bytes = self.send_some(&mut space.pieces)?;
            // The next frame may wait for long, and the peer waits for the acknowledgement meanwhile.
            let is_due = acks != SendAcks::Urgent && self.ack_frame_fits() && self.receiver.acks.due();
            if bytes == 0 && is_due && (acks == SendAcks::All || !self.sender.has_frame_soon()) {
                self.make_ack_frame();
                continue;
            }
            if bytes == 0 {
                break;
            }
            moved += bytes;
        }
        self.publish_load();
        if self.sender.blocked {
            self.hand_over_small();
        }
        Ok(moved)
    }

    /// Hands the bytes that the connection holds to the kernel, as far as it has room.
    fn flush_held(&mut self) -> io::Result<()> {
        match self.conn.flush() {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.sender.blocked = true,
            Err(error) => return Err(error),
        }
        self.sender.holds_back = self.sender.blocked;
        Ok(())
    }

    /// Wakes another channel for the operations that it left to this one, if the peer sends bulk. Called when this channel
    /// cannot send.
    fn hand_over_small(&self) {
        if self.peer.in_bulk() {
            self.leave_rest(0);
        }
    }

    /// Whether an acknowledgement needs a frame of its own: it is urgent, or no data frame would carry it.
    fn wants_ack_frame(&self, wanted: SendAcks) -> bool {
        let acks = &self.receiver.acks;
        let alone = wanted != SendAcks::Urgent && acks.due() && self.sender.sent == self.sender.window.next();
        (acks.urgent() || alone) && self.sender.sent_within == 0 && self.sender.ack_frame.is_empty()
    }

    /// Whether an acknowledgement frame may come next in the stream.
    fn ack_frame_fits(&self) -> bool {
        !self.sender.blocked && self.sender.sent_within == 0 && self.sender.ack_frame.is_empty()
    }

    pub(super) fn make_ack_frame(&mut self) {
        self.sender.ack_passes = 0;
        let (posted, crc) = (self.payload.posted_count(), self.peer.queue.crc);
        self.receiver.acks.encode_frame(&mut self.sender.ack_frame, posted, crc);
    }

    /// Makes one socket call. Returns the bytes sent; 0 if nothing is ready or the socket has no room.
    fn send_some(&mut self, pieces: &mut Vec<IoVec>) -> io::Result<usize> {
        loop {
            match self.send_batch(pieces) {
                Err(error) if error.raw_os_error() == Some(libc::EFAULT) => {
                    self.sender.unreadable(error, &self.peer)?;
                }
                sent => return sent,
            }
        }
    }

    fn send_batch(&mut self, pieces: &mut Vec<IoVec>) -> io::Result<usize> {
        let mut batch = Batch::new(pieces, &*self.conn);
        // An acknowledgement covers refused frames only once their refusals are in the stream.
        let ack = self.receiver.acks.covered() as u32;
        let carries_ack = self.sender.gather(&mut batch, ack, &mut self.payload, &self.peer)?;
        if batch.is_empty() {
            return Ok(0);
        }
        let bytes = batch.bytes();
        let timed = batch.timed;
        let since = (timed || trace::is_on()).then(Instant::now);
        // SAFETY: the pieces point into the acknowledgement frame, into entries of the window, which stay
        // until the peer has acknowledged them and `released` has passed them, into the memory that those
        // entries' operations keep alive, and, never as `stable`, into the rings of the payload. A lent piece
        // of a ring is not used again before the peer has placed it, or its pages are given back to the
        // system.
        let result = unsafe { batch.send(&mut *self.conn) };
        self.payload.count_call(since.filter(|_| timed));
        match result {
            Ok(taken) => {
                self.trace_call(Direction::Tx, since, taken);
                if carries_ack {
                    self.sender.ack_passes = 0;
                    self.receiver.acks.sent_with_header(ack);
                }
                self.sender.holds_back = self.conn.has_unsent();
                self.sender.blocked = taken < bytes || self.sender.holds_back;
                self.counters.sent_bytes.fetch_add(taken as u64, Ordering::Relaxed);
                self.sender.account(taken, &mut self.payload);
                Ok(taken)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.sender.blocked = true;
                Ok(0)
            }
            Err(error) => Err(error),
        }
    }

    /// Handles an acknowledgement of all frames below a count, of which `low` is the low half.
    pub(super) fn acknowledged(&mut self, low: u32) -> io::Result<()> {
        let sender = &mut self.sender;
        let count = wire::widen(low, sender.window.first());
        if count == sender.window.first() {
            return Ok(());
        }
        if !sender.window.may_acknowledge(count, sender.sent) {
            return Err(broken("the peer acknowledged frames that were not sent"));
        }
        let (released, mut placed) = (self.conn.released(), 0);
        while let Some((number, mut entry)) = sender.window.release(count) {
            let end = sender.ends.pop_front().unwrap_or(0);
            placed = end;
            if self.payload.acknowledged(&mut entry) {
                let Some(finished) = self.payload.finish(number, entry) else { continue };
                entry = finished;
            }
            if end <= released && sender.unreleased.is_empty() {
                sender.placed.extend(note_delivered(&self.peer, &mut entry, None));
            } else {
                sender.unreleased.push_back((end, entry));
            }
        }
        self.peer.end_operations(&mut sender.placed);
        self.conn.placed(placed);
        self.finish_released();
        self.publish_load();
        Ok(())
    }

    /// Finishes acknowledged frames whose memory the kernel has released.
    pub fn finish_released(&mut self) {
        if !self.sender.unreleased.is_empty() {
            self.read_notices();
        }
    }

    /// Reads the kernel's notices of released memory. While a notice is unread the socket stays ready, and a
    /// thread that polls it does not sleep.
    pub fn read_notices(&mut self) {
        let released = self.conn.released();
        let Sender { unreleased, placed, .. } = &mut self.sender;
        while let Some((_, mut entry)) = unreleased.pop_front_if(|(end, _)| *end <= released) {
            placed.extend(note_delivered(&self.peer, &mut entry, None));
        }
        self.peer.end_operations(placed);
    }

    /// Whether the kernel took fewer bytes than offered, so that the channel waits until the socket is
    /// writable.
    pub fn blocked(&self) -> bool {
        self.sender.blocked
    }

    pub fn unblock(&mut self) {
        self.sender.blocked = false;
    }

    /// Whether frames are in flight, memory of acknowledged frames is still in use, or the peer's kernel may
    /// lack the last bytes sent. On a dead path a lost acknowledgement frame alone keeps the peer waiting.
    pub fn outstanding(&self) -> bool {
        !self.sender.window.is_empty() || !self.sender.unreleased.is_empty() || self.sender.unproven
    }

    /// Whether the path has to be checked: something is to arrive at either end.
    pub fn is_watched(&self) -> bool {
        self.outstanding() || self.sender.blocked || self.awaits_rest()
    }

    /// What the channel has moved, over all connections in bytes, and over this one in frames.
    pub fn traffic(&self) -> Traffic {
        Traffic {
            sent_bytes: self.counters.sent_bytes.load(Ordering::Relaxed),
            sent_frames: self.sender.window.next(),
            received_bytes: self.counters.received_bytes.load(Ordering::Relaxed),
            received_frames: self.receiver.acks.covered(),
        }
    }

    /// Whether an acknowledgement waits to be sent.
    pub fn ack_due(&self) -> bool {
        self.receiver.acks.due()
    }

    /// A description of a dead path, or `None` while the path seems healthy.
    pub fn path_trouble(&mut self) -> Option<String> {
        let health = self.conn.health();
        self.sender.unproven = health.waiting;
        self.sender.note_acked(health.acked_bytes, &self.peer);
        self.counters.note_health(&health);
        self.counters.note_buffers(&*self.conn);
        if health.is_dead() {
            return Some(health.describe());
        }
        if self.peer.info.protection.is_some() {
            self.probe(&health);
            if let Some(why) = self.missing_rest() {
                return Some(why);
            }
        }
        self.payload.path_trouble(self.peer.now())
    }

    /// Reports to the peer that payload waits for this end's GPU, if it does, so that the peer does not take
    /// its silent lane for a dead path.
    pub fn report_held(&mut self) {
        if self.payload.holds_payload() {
            self.receiver.acks.report_held();
        }
    }

    /// Sends an acknowledgement if the peer's kernel has everything and the peer has acknowledged nothing
    /// since the last check. If records were removed on the way, the peer detects that by the number of this
    /// record.
    fn probe(&mut self, health: &PathHealth) {
        let first = self.sender.window.first();
        let is_idle = std::mem::replace(&mut self.sender.first_checked, first) == first;
        if is_idle && !health.waiting && !self.sender.window.is_empty() && self.ack_frame_fits() {
            self.make_ack_frame();
        }
    }

    /// Sends everything without waiting for acknowledgements.
    #[cfg(test)]
    pub fn hand_over(&mut self, space: &mut Workspace) {
        let until = self.peer.now() + limits::DRAIN_TIMEOUT;
        while self.peer.now() < until {
            self.sender.blocked = false;
            let sent = self.send(SendAcks::All, space).and_then(|_| self.poll_lane());
            let unsent = self.sender.sent < self.sender.window.next();
            let more = self.payload.is_sending() || unsent || self.peer.queue.has_work();
            if sent.is_err() || !more {
                return;
            }
        }
    }
}

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
        let queue = &self.peer.queue;
        // The share depends on the backlogs of all channels, which are in the cache of other threads.
        let small = if queue.has_work_beside_bulk() { self.small_share() } else { 0 };
        let waits = small > 0 || queue.has_work_beside_small();
        let enough = unsent >= READY_BYTES;
        self.payload.note_enough(enough);
        if enough || !waits {
            return self.leave_rest(small);
        }
        self.take(None, unsent, small);
    }

    /// Posts an operation and takes its frame, under one lock of the queue. True if it is posted, false if the
    /// peer is gone.
    ///
    /// # Errors
    /// The operation, if the channel would not send its frame now.
    pub fn post(&mut self, op: Hold) -> Result<bool, Hold> {
        let is_free = !self.sender.blocked
            && !self.payload.stream_ended()
            && self.payload.has_room()
            && self.sender.window.has_room();
        let unsent = self.sender.unsent();
        if !is_free || unsent >= READY_BYTES {
            return Err(op);
        }
        self.payload.note_enough(false);
        let small = self.small_share();
        Ok(self.take(Some(op), unsent, small))
    }

    /// Queues `posted`, if any, and takes frames from the queue. `unsent` bytes are ready to be sent, and `small`
    /// bytes of small operations may be taken. Returns false if the posted operation was refused, since the peer
    /// is gone.
    fn take(&mut self, posted: Option<Hold>, unsent: u64, small: u64) -> bool {
        if self.conn.is_long() {
            self.peer.route.note_path(&*self.conn);
        }
        let has_bulk = posted.is_some() || self.peer.queue.has_work_beside_small();
        let (share, chunk_bytes) =
            if has_bulk { self.bulk_share() } else { (0, self.peer.queue.chunk_bytes) };
        let may_take = has_bulk && self.may_take_bulk();
        let bulk = share > 0 && may_take;
        let pull = Pull {
            bytes: (READY_BYTES - unsent).min(if bulk { share } else { u64::MAX }),
            channels: self.peer.live_channels(),
            chunk_bytes,
            staged_bytes: self.payload.staged_chunk_bytes(&self.peer),
            ordered_bytes: if self.peer.is_ordered() { self.peer.ordered_bytes() } else { 0 },
            whole_bytes: self.in_cache().map_or(u64::MAX, |in_cache| in_cache.whole_bytes),
            small,
            bulk,
            // Small operations may go beyond the bound that bulk has used up.
            bulk_in_turn: small > 0 && may_take,
            messages: self.payload.messages(),
        };
        let first = self.sender.window.next();
        let was_ordered = self.peer.next_is_ordered();
        let pulled = self.payload.pull(posted, &self.peer, &self.counters, &mut self.sender.window, pull);
        if trace::is_on() {
            let chunk = self.counters.track.chunk();
            self.sender.window.from(first).for_each(|entry| entry.chunk = chunk);
        }
        pulled.dropped.into_iter().for_each(Hold::cut_short);
        self.publish_load();
        self.leave_rest(small);
        // The other channels left what came first to this one, and may sleep.
        if was_ordered && self.peer.queue.bulk_bytes() > 0 && !self.peer.next_is_ordered() {
            self.peer.wake_home_worker();
            self.peer.rouse_for_bulk(self.peer.queue.bulk_bytes());
        }
        pulled.refused.iter().for_each(|op| op.fail(self.peer.gone()));
        pulled.refused.is_none()
    }

    /// Wakes the channel that takes the operations left in the queue that channels take in order: small ones, if this
    /// channel had a bounded `share` of them, and bulk.
    fn leave_rest(&self, share: u64) {
        let (peer, queue) = (&self.peer, &self.peer.queue);
        if share < u64::MAX && queue.has_work_beside_bulk() || peer.next_is_ordered() && peer.in_bulk() {
            peer.rouse_for_ordered();
        }
    }

    /// Publishes the bytes in this channel's window to the peer's other channels, and whether operations
    /// taken in order are left to this channel. A channel whose lane is not open publishes `NO_BACKLOG`, so that it does not
    /// count as the least loaded.
    pub fn publish_load(&self) {
        let is_open = self.payload.is_open();
        let bytes = self.sender.window.bytes() as u64;
        self.counters.backlog.store(if is_open { bytes } else { NO_BACKLOG }, Ordering::Relaxed);
        let has_room = is_open
            && !self.sender.blocked
            && !self.payload.stream_ended()
            && schedule::has_ordered_room(bytes, self.peer.fill_bytes())
            && self.sender.window.has_room()
            && self.payload.has_room();
        if self.counters.has_ordered_room.load(Ordering::Relaxed) != has_room {
            // A thread that posts afterwards, and finds room here, wakes this channel's worker; what was
            // posted before is seen by the next pull.
            self.counters.has_ordered_room.store(has_room, Ordering::SeqCst);
        }
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
        let ordered = if self.peer.next_is_ordered() { self.ordered_share() } else { None };
        match (ordered, copying_ends) {
            // A channel that is known to have room takes some: others leave it to this one.
            (Some(ordered), _) => (ordered, chunk_bytes),
            (None, 0) => (share, chunk_bytes),
            (None, _) => (share.min(self.peer.staged_share(self.sender.window.bytes() as u64)), chunk_bytes),
        }
    }

    /// [`Channel::bulk_share`] between two ends of one host. `copying_ends` of the two ends copy the payload once more.
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
        let cached = self.in_cache().map_or(u64::MAX, |in_cache| in_cache.in_flight_bytes);
        schedule::local_share(in_flight, sharing, copying_ends, cached, self.peer.queue.chunk_bytes)
    }

    /// How much bulk stays in a cache on its way between two threads of this host. `None` where sends may avoid a copy: such a
    /// connection may lead through NICs. Between network namespaces the kernel soon reports that it copies all the same, and
    /// encryption copies always.
    fn in_cache(&self) -> Option<InCache> {
        let is_copied = || self.peer.info.same_host && !self.conn.is_long() && !self.conn.zero_copy();
        (self.conn.within_host() || is_copied()).then_some(self.peer.queue.in_cache)
    }

    /// Bytes of bulk that this channel may take while the channels fill up in order. `None` once all are busy: then a
    /// channel works in long runs.
    fn ordered_share(&self) -> Option<u64> {
        let peer = &self.peer;
        let are_busy = || !schedule::has_ordered_room(peer.least_backlog(), peer.fill_bytes());
        (!peer.in_bulk() || !are_busy()).then(|| self.small_share())
    }

    /// Bytes of small operations that this channel may take. Without bulk, only the peer's home channel takes
    /// them, so that one thread does all the work. In bulk a channel takes some while the channels before it are busy.
    fn small_share(&self) -> u64 {
        let backlog = self.sender.window.bytes() as u64;
        match (self.peer.in_bulk(), self.peer.is_home(self.index)) {
            (true, _) if self.peer.leaves_ordered(self.index) => 0,
            (true, _) => schedule::ordered_share(backlog, self.peer.least_backlog(), self.peer.fill_bytes()),
            (false, true) => u64::MAX,
            (false, false) => 0,
        }
    }
}

impl Sender {
    /// Creates a sender for a connection over which `stream_sent` bytes have already gone.
    pub fn new(window_frames: usize, stream_sent: u64) -> Sender {
        Sender {
            window: Window::new(window_frames, limits::WINDOW_BYTES_MAX),
            sent: 0,
            sent_within: 0,
            stream_sent,
            ends: VecDeque::new(),
            unreleased: VecDeque::new(),
            placed: Vec::new(),
            ack_frame: Vec::new(),
            ack_passes: 0,
            blocked: false,
            holds_back: false,
            frame_by_frame: false,
            unproven: false,
            acked_bytes: 0,
            first_checked: 0,
        }
    }

    /// Bytes of the window that the kernel has not taken.
    pub fn unsent(&mut self) -> u64 {
        let total: usize = self.window.from(self.sent).map(|entry| entry.stream_bytes()).sum();
        (total - self.sent_within.min(total)) as u64
    }

    /// Adds unsent frames that are ready to a batch. Returns whether one of their headers carries the count
    /// `ack`.
    fn gather(
        &mut self,
        batch: &mut Batch<'_>,
        ack: u32,
        payload: &mut Payload,
        peer: &PeerState,
    ) -> io::Result<bool> {
        batch.add(self.ack_frame.as_mut_ptr(), self.ack_frame.len(), false);
        let posted = payload.posted_count();
        let (mut skip, mut carries_ack, mut frames) = (self.sent_within, false, 0);
        for entry in self.window.from(self.sent) {
            let alone = self.frame_by_frame && frames > 0;
            if alone || batch.is_full() || !payload.ready(self.sent + frames, entry, &peer.queue) {
                break;
            }
            if entry.is_gone() {
                match frames {
                    0 => return Err(payload.source_dropped(entry)),
                    _ => break,
                }
            }
            frames += 1;
            if skip == 0 {
                Header::patch_counts(&mut entry.encoded_header, ack, posted);
                carries_ack = true;
            }
            batch.skip = std::mem::take(&mut skip);
            batch.add(entry.encoded_header.as_mut_ptr(), HEADER_BYTES, false);
            batch.add(entry.placements.as_mut_ptr(), entry.placements.len(), false);
            payload.gather(entry, batch);
        }
        Ok(carries_ack)
    }

    /// Whether a frame that can carry the acknowledgement will be ready in a moment.
    fn has_frame_soon(&mut self) -> bool {
        let is_short = |entry: &mut Entry| entry.staged.is_some() && entry.header.len <= SHORT_COPY_BYTES;
        let is_soon = self.ack_passes < COPY_PASSES && self.window.get_mut(self.sent).is_some_and(is_short);
        self.ack_passes += u32::from(is_soon);
        is_soon
    }

    /// Advances the sent position by `taken` bytes, which the kernel took.
    fn account(&mut self, mut taken: usize, payload: &mut Payload) {
        self.stream_sent += taken as u64;
        self.unproven = true;
        let of_ack = taken.min(self.ack_frame.len());
        self.ack_frame.drain(..of_ack);
        taken -= of_ack;
        let mut position = self.stream_sent - taken as u64;
        while taken > 0 {
            let Some(entry) = self.window.get_mut(self.sent) else {
                break;
            };
            let rest = entry.stream_bytes() - self.sent_within;
            if taken < rest {
                self.sent_within += taken;
                break;
            }
            payload.sent(entry);
            taken -= rest;
            position += rest as u64;
            self.ends.push_back(position);
            self.sent += 1;
            self.sent_within = 0;
            self.frame_by_frame = false;
        }
    }

    /// Handles memory that the kernel cannot read. The first call makes the sender send frame by frame; a
    /// later one fails the operation of the unreadable frame and empties the frame.
    ///
    /// # Errors
    /// `error`, if the frame is partly sent: then only the end of the connection withdraws the frame.
    fn unreadable(&mut self, error: io::Error, peer: &PeerState) -> io::Result<()> {
        let begun = self.sent_within > 0;
        if !std::mem::replace(&mut self.frame_by_frame, true) {
            return Ok(());
        }
        let Some(entry) = self.window.get_mut(self.sent).filter(|entry| entry.payload().is_some()) else {
            return Err(error);
        };
        tracing::warn!(%error, peer = peer.name(), "the kernel cannot read registered memory to send it: the transfer fails");
        let why = if entry.is_gone() { DROPPED } else { UNREADABLE };
        let why = Error::invalid("region", why);
        if begun {
            entry.op.iter().for_each(|op| op.fail(why.clone()));
            return Err(error);
        }
        let credit = entry.give_up(&why);
        if peer.queue.crc {
            entry.add_crc();
        }
        peer.queue.credit(credit);
        Ok(())
    }

    /// Notes progress of the operation whose bytes the peer's kernel has received and the peer has not placed
    /// yet.
    fn note_acked(&mut self, acked_bytes: u64, peer: &PeerState) {
        let before = std::mem::replace(&mut self.acked_bytes, acked_bytes);
        let whole = self.ends.partition_point(|end| *end <= before);
        if acked_bytes <= before || (whole == self.ends.len() && self.sent_within == 0) {
            return;
        }
        let mut entries = self.window.from(self.window.first() + whole as u64);
        if let Some(op) = entries.next().and_then(|entry| entry.op.as_ref()) {
            peer.note_moving(op);
        }
    }
}

/// Handles a frame that the peer has placed or refused, and ends its operation if no other token of it is left.
pub(crate) fn delivered(peer: &Arc<PeerState>, entry: &mut Entry, refusal: Option<Refusal>) {
    if let Some(op) = note_delivered(peer, entry, refusal) {
        op.drop_for(|op| peer.end_operation(op));
    }
}

/// Notes that the peer has placed or refused a frame. Returns the frame's token of its operation.
fn note_delivered(peer: &Arc<PeerState>, entry: &mut Entry, refusal: Option<Refusal>) -> Option<Hold> {
    if peer.queue.had(&entry.header) {
        peer.wake_home_worker();
    }
    let op = entry.op.take()?;
    if let Some(refusal) = refusal {
        peer.refused(&op, refusal);
    }
    match entry.header.kind {
        Kind::Read if op.failing() => peer.end_sink(&op),
        Kind::Read => {}
        _ => {
            let bytes = u64::from(entry.header.len) * u64::from(!matches!(entry.body, Body::None));
            if bytes > 0 {
                op.count_frame(bytes);
            } else {
                op.note_activity();
            }
            peer.note_moved(&op);
            if let Some(chunk) = &entry.chunk
                && bytes > 0
            {
                chunk.placed(Direction::Tx, op.id, bytes);
            }
        }
    }
    Some(op)
}

/// The buffers of one socket call.
pub(super) struct Batch<'a> {
    pieces: &'a mut Vec<IoVec>,
    bytes: usize,
    /// Bytes at the front of the next pieces that an earlier call has sent.
    pub skip: usize,
    /// Whether this call sends without a copy. With `split` the first piece decides.
    stable: Option<bool>,
    /// Whether the connection can send without copies. A call then sends either all of its pieces without a
    /// copy, or none.
    split: bool,
    /// Whether the connection takes lent pieces, whose memory the kernel reads until the peer has placed
    /// them.
    pub lends: bool,
    /// Whether the last piece is lent.
    lent: bool,
    /// Whether a piece was left for the next call. All later pieces then follow in that call too.
    closed: bool,
    /// Whether to measure the duration of the send call.
    pub timed: bool,
}

impl<'a> Batch<'a> {
    /// Creates an empty batch for one call of this connection.
    pub fn new(pieces: &'a mut Vec<IoVec>, conn: &dyn Conn) -> Batch<'a> {
        pieces.clear();
        Batch {
            pieces,
            bytes: 0,
            skip: 0,
            stable: None,
            split: conn.zero_copy(),
            // On a path with a long RTT a lent piece would stay in use for one RTT.
            lends: conn.lends() && !conn.is_long(),
            lent: false,
            closed: false,
            timed: false,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Bytes of all pieces.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn is_full(&self) -> bool {
        self.closed
            || self.bytes >= limits::SEND_BYTES_PER_CALL_MAX
            || self.pieces.len() + 3 > ferrywire_sys::IOVECS_PER_CALL_MAX
    }

    /// Adds a lent piece, if there is room, and closes the batch. Returns whether the piece was added.
    pub fn lend(&mut self, base: *mut u8, len: usize) -> bool {
        let before = self.pieces.len();
        self.add(base, len, false);
        let taken = self.pieces.len() > before;
        self.lent |= taken;
        self.closed |= taken;
        taken
    }

    /// Adds a piece. `stable` allows the kernel to send the piece without a copy.
    pub fn add(&mut self, base: *mut u8, len: usize, stable: bool) {
        let skip = self.skip.min(len);
        self.skip -= skip;
        if len == skip {
            return;
        }
        self.closed |= self.pieces.len() == ferrywire_sys::IOVECS_PER_CALL_MAX
            || (self.split && *self.stable.get_or_insert(stable) != stable);
        if !self.closed {
            // SAFETY: `skip` is less than the length of the piece.
            self.pieces.push(IoVec::new(unsafe { base.add(skip) }, len - skip));
            self.bytes += len - skip;
        }
    }

    /// Adds the bytes that follow a frame's header and placements, where its payload in the stream is host memory.
    #[inline]
    pub fn add_host(&mut self, entry: &Entry) {
        entry.stream_pieces(|base, len| self.add(base, len, len >= STABLE_BYTES_MIN));
    }

    /// Makes the socket call. Returns the bytes that the kernel took.
    ///
    /// # Safety
    /// Each piece is readable for the length of the call. A `stable` piece stays readable until
    /// `Conn::released` has passed it, or the connection is dropped. A lent piece is not written to before
    /// the peer has placed its frame, or its pages have been given back to the system.
    pub unsafe fn send(self, conn: &mut dyn Conn) -> io::Result<usize> {
        // SAFETY: promised by the caller.
        unsafe {
            match (self.lent, self.stable == Some(true)) {
                (true, _) => conn.send_lent(self.pieces),
                (false, true) => conn.send_stable(self.pieces),
                (false, false) => conn.send(self.pieces),
            }
        }
    }
}
