//! One connection of a peer, with its window: frames out, frames in.
//!
//! Sending: the channel pulls frames from the peer's queue into its window and gathers as many as fit
//! into one socket call, straight from the memory they describe. Receiving: a large payload goes straight
//! to its place, with the next frame's head in the same call; small frames come many at a time through
//! the worker's scratch buffer. Each frame placed is counted, and the count is the acknowledgement.
//! Where the channel has a lane, the payload of data frames goes over that, in the order of the heads.
//!
//! Invariant: after [`Channel::end`] not a byte of this connection is placed any more.
//! Read next: `posted/` for the lane; `worker/`, which owns channels and decides when they get their turn.

mod batch;
mod dropped;
mod lane;
mod receiver;
mod receiving;
mod staged;

pub(crate) use dropped::Unreleased;

use crate::core::operation::Hold;
use crate::core::peer::PeerState;
use crate::core::posted::Posted;
use crate::core::queue::{DROPPED, Entry, Pull};
use crate::core::staging::Staging;
use crate::core::stats::{ChannelCounters, NO_BACKLOG};
use crate::error::Error;
use crate::payload::lane::UNREADABLE;
use ferrywire_memory::Place;
use ferrywire_net::{Conn, IoVec};
use ferrywire_proto::limits;
use ferrywire_proto::schedule;
use ferrywire_proto::window::Window;
use ferrywire_proto::wire::{self, HEADER_BYTES, Header, Kind, Refusal};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use batch::Batch;
use receiver::Receiver;

/// Bytes of frames kept ready for the next send call.
const READY_BYTES: u64 = limits::SEND_BYTES_PER_CALL_MAX as u64;
/// Bytes one turn may move in each direction before other channels have theirs.
const TURN_BYTES: usize = 4 << 20;
/// Where nothing of an operation has come for so long, it may be over.
const BULK_PAUSE: Duration = Duration::from_millis(5);
/// Received frames after which an acknowledgement goes out at once.
const ACK_FRAMES: u64 = 16;

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
    /// Whether it was the lane that failed.
    pub lane_failed: bool,
    /// What was closed, while something may still read the memory of which it was sending.
    pub unreleased: Option<Unreleased>,
}

/// Who may still write to memory that is taken back.
pub(crate) struct Touched {
    /// The lane, whose receive for it is posted.
    pub lane: bool,
    /// A GPU, with copies that are under way.
    pub gpu: Option<Place>,
}

/// Buffers that a worker lends to the channel whose turn it is.
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

/// A channel, owned by one worker.
pub(crate) struct Channel {
    conn: Box<dyn Conn>,
    pub peer: Arc<PeerState>,
    pub index: u16,
    pub generation: u32,
    pub counters: Arc<ChannelCounters>,
    window: Window<Entry>,
    /// Number of the first frame not wholly handed to the kernel, and how much of it is.
    sent: u64,
    sent_within: usize,
    /// An acknowledgement on its own that is partly sent.
    ack_frame: Vec<u8>,
    blocked: bool,
    /// The kernel could not read some of what it was given last.
    frame_by_frame: bool,
    /// It has cut enough, and takes no more before some of that is copied.
    awaits_copies: bool,
    /// Something was sent since the path was last seen to have taken everything.
    unproven: bool,
    stream_sent: u64,
    /// Bytes that the peer's kernel had acknowledged when it was last asked.
    acked_bytes: u64,
    /// Acknowledged frames whose memory the kernel still reads, with their end in the stream.
    held: VecDeque<(u64, Entry)>,
    ends: VecDeque<u64>,
    rx: Receiver,
    /// What carries the payload, if it is not the connection.
    posted: Option<Box<Posted>>,
    /// What passes between GPUs and the connection.
    staging: Staging,
    /// The connection has ended, with this error; the lane has still something to bring.
    ended: Option<io::Error>,
    lane_failed: bool,
}

impl Channel {
    pub fn new(mut conn: Box<dyn Conn>, peer: Arc<PeerState>, index: u16, generation: u32) -> Channel {
        let counters = peer.counters(index);
        counters.start(&*conn, generation);
        // The handshake's bytes are part of the stream that `released` counts.
        let stream_sent = Some(conn.released()).filter(|bytes| *bytes < u64::MAX).unwrap_or(0);
        Channel {
            window: Window::new(peer.window_frames, limits::WINDOW_BYTES_MAX),
            conn,
            peer,
            index,
            generation,
            counters,
            sent: 0,
            sent_within: 0,
            ack_frame: Vec::new(),
            blocked: false,
            frame_by_frame: false,
            awaits_copies: false,
            unproven: false,
            stream_sent,
            acked_bytes: 0,
            held: VecDeque::new(),
            ends: VecDeque::new(),
            rx: Receiver::new(),
            posted: None,
            staging: Staging::default(),
            ended: None,
            lane_failed: false,
        }
    }

    /// With a lane for the payload of its data frames.
    pub fn with_lane(mut self, posted: Posted) -> Channel {
        let is_waited_for = posted.is_waited_for();
        self.posted = Some(Box::new(posted));
        if is_waited_for {
            // Of no frames, and the first that the peer hears.
            self.make_ack_frame();
        }
        self.tell_backlog();
        self
    }

    /// What others reckon with: one that takes nothing yet would keep from them what is for the least loaded.
    fn tell_backlog(&self) {
        let is_heard = self.posted.as_ref().is_none_or(|posted| posted.is_heard());
        let backlog = if is_heard { self.window.bytes() as u64 } else { NO_BACKLOG };
        self.counters.backlog.store(backlog, Ordering::Relaxed);
    }

    pub fn conn(&self) -> &dyn Conn {
        &*self.conn
    }

    /// The same channel over what this makes of its connection.
    #[cfg(test)]
    pub fn with_conn(self, wrap: impl FnOnce(Box<dyn Conn>) -> Box<dyn Conn>) -> Channel {
        Channel { conn: wrap(self.conn), ..self }
    }

    /// Whether the kernel took less than we had, so that we wait until it can take more.
    pub fn blocked(&self) -> bool {
        self.blocked
    }

    pub fn unblock(&mut self) {
        self.blocked = false;
    }

    /// Whether the queue has frames for this channel, and it would take another now.
    pub fn may_pull(&self) -> bool {
        if self.awaits_copies
            || !self.window.has_room()
            || self.posted.as_ref().is_some_and(|posted| posted.room() == 0)
        {
            return false;
        }
        if !self.staging.sending.has_room() {
            return false;
        }
        let queue = &self.peer.queue;
        if queue.has_work_beside_bulk() && self.small_share() > 0 {
            return true;
        }
        let (backlog, least) = (self.window.bytes() as u64, self.peer.least_backlog());
        queue.has_work_beside_small()
            && self.bulk_share().0 > 0
            && schedule::may_take(backlog, least, queue.chunk_bytes)
    }

    /// Bytes of bulk that this channel may take, and the longest chunk of it.
    fn bulk_share(&self) -> (u64, usize) {
        let chunk_bytes = self.peer.queue.chunk_bytes;
        if self.posted.is_some() {
            return (u64::MAX, chunk_bytes);
        }
        let staged = u64::from(self.staging.sending.begun()) + u64::from(self.peer.writes_to_gpus());
        let (share, chunk_bytes) = match self.peer.same_host && !self.conn.is_long() {
            true => self.local_share(staged),
            false => (u64::MAX, chunk_bytes),
        };
        match staged {
            0 => (share, chunk_bytes),
            _ => (share.min(self.peer.staged_share(self.window.bytes() as u64)), chunk_bytes),
        }
    }

    /// The same between two ends of one host, of which some stage.
    fn local_share(&self, staged: u64) -> (u64, usize) {
        // Between other addresses there may be a slow link, which must not hold up what others carry; and what is
        // staged waits for a GPU, at no cost to the other channels.
        let in_flight = match self.conn.within_host() && staged == 0 {
            true => self.peer.thread_backlog(self.index),
            false => self.window.bytes() as u64,
        };
        let sharing = if self.conn.within_host() { 1 } else { self.peer.channels_per_thread() };
        schedule::local_share(in_flight, sharing, staged, self.peer.queue.chunk_bytes)
    }

    /// Bytes of small operations that this channel may take. While there is no bulk they keep to the
    /// peer's home, so that one thread does all of it.
    fn small_share(&self) -> u64 {
        match (self.peer.in_bulk(), self.peer.is_home(self.index)) {
            (true, _) => schedule::small_share(self.window.bytes() as u64, self.peer.least_backlog()),
            (false, true) => u64::MAX,
            (false, false) => 0,
        }
    }

    /// Whether frames are in flight, acknowledged frames' memory is still in use, or the peer's kernel may
    /// not have what we sent last: on a dead path a mere acknowledgement keeps the peer waiting.
    pub fn outstanding(&self) -> bool {
        !self.window.is_empty() || !self.held.is_empty() || self.unproven
    }

    /// Whether there is so much to send or to receive that its thread need not watch for more.
    pub fn in_deep_bulk(&self) -> bool {
        let coming = self.rx.bulk_since.is_some_and(|since| since.elapsed() < BULK_PAUSE);
        self.posted.is_none() && (coming || self.peer.in_deep_bulk())
    }

    /// Whether an acknowledgement waits to be sent.
    pub fn ack_due(&self) -> bool {
        self.rx.received != self.rx.acknowledged || !self.rx.refused.is_empty()
    }

    fn ack_urgent(&self) -> bool {
        self.rx.unacknowledged_bytes >= limits::ACK_BYTES
            || self.rx.received - self.rx.acknowledged >= ACK_FRAMES
            || !self.rx.refused.is_empty()
    }

    // ---- sending ----

    /// Sends what there is to send; with `flush`, also an acknowledgement that is due.
    /// Returns the bytes taken by the kernel.
    pub fn send(&mut self, flush: bool, space: &mut Workspace) -> io::Result<usize> {
        if self.staging.sending.copying() {
            let credit = self.staging.sending.look(self.window.from(self.sent));
            self.count_copied_out();
            self.peer.queue.credit(credit);
        }
        if self.blocked || self.ended.is_some() {
            return Ok(0);
        }
        let mut moved = 0;
        while !self.blocked && moved < TURN_BYTES {
            self.pull();
            let with_ack = self.sent_within == 0 && (self.ack_urgent() || (flush && self.ack_due()));
            if self.ack_frame.is_empty() && with_ack && (self.sent == self.window.next() || self.ack_urgent())
            {
                self.make_ack_frame();
            }
            let bytes = self.send_some(&mut space.pieces)?;
            // What is next is still being copied out of a GPU, for however long: the peer waits for this meanwhile.
            let ack_alone = bytes == 0 && flush && !self.blocked && self.sent_within == 0 && self.ack_due();
            if ack_alone && self.ack_frame.is_empty() {
                self.make_ack_frame();
                continue;
            }
            if bytes == 0 {
                break;
            }
            moved += bytes;
        }
        Ok(moved)
    }

    fn pull(&mut self) {
        let unsent = self.unsent();
        let small = self.small_share();
        let queue = &self.peer.queue;
        let waits = (small > 0 && queue.has_work_beside_bulk()) || queue.has_work_beside_small();
        let enough = unsent >= READY_BYTES;
        self.awaits_copies = enough && self.staging.sending.copying();
        if enough || !waits {
            return;
        }
        let backlog = self.window.bytes() as u64;
        let least = self.peer.least_backlog();
        let (share, chunk_bytes) = self.bulk_share();
        let bulk = share > 0 && schedule::may_take(backlog, least, queue.chunk_bytes);
        let pull = Pull {
            bytes: (READY_BYTES - unsent).min(if bulk { share } else { u64::MAX }),
            channels: self.peer.live_channels(),
            chunk_bytes,
            staged_bytes: match self.staging.sending.begun() {
                true => self.peer.staged_chunk_bytes(),
                false => (limits::STAGING_CHUNK_BYTES_MIN, limits::STAGING_BATCH_BYTES),
            },
            small,
            bulk,
            messages: self.posted.as_ref().map(|posted| posted.room()),
        };
        let first = self.window.next();
        let (_, dropped) = self.peer.queue.pull(&mut self.window, &mut self.staging.sending, pull);
        self.stage(first);
        if let Some(posted) = &mut self.posted {
            for (entry, frame) in self.window.from(first).zip(first..) {
                if entry.header.is_posted() {
                    posted.admit(frame, entry);
                }
            }
        }
        dropped.into_iter().for_each(Hold::cut_short);
        self.tell_backlog();
    }

    fn unsent(&mut self) -> u64 {
        let total: usize = self.window.from(self.sent).map(|entry| entry.stream_bytes()).sum();
        (total - self.sent_within.min(total)) as u64
    }

    fn make_ack_frame(&mut self) {
        let mut header = Header::new(Kind::Ack);
        header.ack = self.rx.received as u32;
        header.posted = self.posted.as_ref().map_or(0, |posted| posted.told());
        let refused: Vec<_> =
            self.rx.refused.drain(..self.rx.refused.len().min(limits::WINDOW_FRAMES_MAX)).collect();
        let body = wire::encode_refusals(&refused);
        // Told is not heard: the connection may die first, and then the fence tells it again.
        let heard = self.rx.received.saturating_sub(limits::WINDOW_FRAMES_MAX as u64);
        self.rx.told.retain(|(number, _)| *number >= heard);
        self.rx.told.extend(refused);
        header.len = body.len() as u32;
        if self.peer.queue.crc {
            header.flags |= wire::FLAG_CRC;
            header.crc = crc32fast::hash(&body);
        }
        self.ack_frame.extend_from_slice(&header.encode());
        self.ack_frame.extend_from_slice(&body);
        self.rx.mark_acknowledged();
    }

    /// One socket call. Returns the bytes it took, 0 when there is nothing to send or no room.
    fn send_some(&mut self, pieces: &mut Vec<IoVec>) -> io::Result<usize> {
        loop {
            match self.send_batch(pieces) {
                Err(error) if error.raw_os_error() == Some(libc::EFAULT) => self.unreadable(error)?,
                sent => return sent,
            }
        }
    }

    /// Some of what was to be sent the kernel cannot read: finds out of which frame, and lets that one carry nothing.
    ///
    /// # Errors
    /// The same, where some of the frame is sent: then only the end of the connection takes it back.
    fn unreadable(&mut self, error: io::Error) -> io::Result<()> {
        let begun = self.sent_within > 0;
        if !std::mem::replace(&mut self.frame_by_frame, true) {
            return Ok(());
        }
        let Some(entry) = self.window.get_mut(self.sent).filter(|entry| entry.payload().is_some()) else {
            return Err(error);
        };
        tracing::warn!(%error, peer = self.peer.name(), "memory that is registered cannot be read");
        let why = match entry.is_gone() {
            true => DROPPED,
            false => UNREADABLE,
        };
        let why = Error::invalid("region", why);
        if begun {
            entry.op.iter().for_each(|op| op.fail(why.clone()));
            return Err(error);
        }
        let credit = entry.give_up(&why);
        if self.peer.queue.crc {
            entry.add_crc();
        }
        self.peer.queue.credit(credit);
        Ok(())
    }

    fn send_batch(&mut self, pieces: &mut Vec<IoVec>) -> io::Result<usize> {
        pieces.clear();
        let mut batch = Batch {
            pieces,
            bytes: 0,
            skip: 0,
            stable: None,
            split: self.conn.zero_copy(),
            lent: false,
            closed: false,
        };
        batch.add(self.ack_frame.as_mut_ptr(), self.ack_frame.len(), false);
        // An acknowledgement covers refused frames only once their refusals are in the stream.
        let ack = self.rx.received_without_refusals() as u32;
        let posted = self.posted.as_ref().map_or(0, |posted| posted.told());
        let mut skip = self.sent_within;
        let (mut fresh, mut staged, mut frames) = (false, false, 0);
        // Over a long path what is lent would fill the rings: it is free only a round trip later.
        let lends = self.conn.lends() && !self.conn.is_long();
        for entry in self.window.from(self.sent) {
            let alone = self.frame_by_frame && frames > 0;
            let held = self.posted.as_ref().is_some_and(|posted| posted.holds_head(self.sent + frames));
            if alone || held || batch.full() {
                break;
            }
            match self.staging.sending.ready(entry, self.peer.queue.crc) {
                None => break,
                Some(0) => {}
                Some(credit) => self.peer.queue.credit(credit),
            }
            if entry.is_gone() {
                match frames {
                    // The lane has its message, and the peer would take that for the next frame's.
                    0 if entry.header.is_posted() => {
                        entry.op.iter().for_each(|op| op.fail(Error::invalid("region", DROPPED)));
                        return Err(io::Error::other("the memory of a message that a lane has was dropped"));
                    }
                    // As if the kernel had said so.
                    0 => return Err(io::Error::from_raw_os_error(libc::EFAULT)),
                    _ => break,
                }
            }
            frames += 1;
            if skip == 0 {
                Header::patch_counts(&mut entry.head, ack, posted);
                fresh = true;
            }
            batch.skip = std::mem::take(&mut skip);
            batch.add(entry.head.as_mut_ptr(), HEADER_BYTES, false);
            batch.add(entry.placements.as_mut_ptr(), entry.placements.len(), false);
            let in_ring = entry.staged.is_some();
            staged |= in_ring;
            let mut lent = false;
            entry.stream_pieces(|base, len| match in_ring && lends && len >= LENT_BYTES_MIN {
                true => lent |= batch.lend(base, len),
                false => batch.add(base, len, len >= STABLE_BYTES_MIN && !in_ring),
            });
            if let Some(staged) = entry.staged.as_mut().filter(|_| lent) {
                self.staging.sending.lend(staged);
            }
        }
        let (bytes, stable, lent) = (batch.bytes, batch.stable == Some(true), batch.lent);
        if pieces.is_empty() {
            return Ok(0);
        }
        let since = staged.then(Instant::now);
        // SAFETY: the pieces point into the acknowledgement frame and into entries of the window, which
        // stay until the peer has acknowledged them and `released` has passed them, into the memory those
        // entries' operations keep alive, and, never as `stable`, into the rings of `staging`. What is lent of
        // those is not used again before the peer has placed it, or is given back to the system.
        let result = unsafe {
            match (lent, stable) {
                (true, _) => self.conn.send_lent(pieces),
                (false, true) => self.conn.send_stable(pieces),
                (false, false) => self.conn.send(pieces),
            }
        };
        self.count_wire(since);
        match result {
            Ok(taken) => {
                if fresh {
                    self.rx.acknowledged_through(ack);
                }
                self.blocked = taken < bytes;
                self.account(taken);
                Ok(taken)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.blocked = true;
                Ok(0)
            }
            Err(error) => Err(error),
        }
    }

    /// The kernel took so many bytes: moves the mark between sent and unsent.
    fn account(&mut self, mut taken: usize) {
        self.counters.sent_bytes.fetch_add(taken as u64, Ordering::Relaxed);
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
            if let Some(staged) = entry.staged.take_if(|staged| !staged.is_lent()) {
                self.staging.sending.give_back(&staged);
            }
            taken -= rest;
            position += rest as u64;
            self.ends.push_back(position);
            self.sent += 1;
            self.sent_within = 0;
            self.frame_by_frame = false;
        }
    }

    /// The peer has placed all frames below `count`.
    fn acknowledged(&mut self, low: u32) -> io::Result<()> {
        let count = wire::widen(low, self.window.first());
        if count == self.window.first() {
            return Ok(());
        }
        if !self.window.may_acknowledge(count, self.sent) {
            return Err(broken("it acknowledged frames that were not sent"));
        }
        let copied = self.conn.released() == u64::MAX;
        while let Some((number, mut entry)) = self.window.release(count) {
            if let Some(staged) = entry.staged.take() {
                self.staging.sending.give_back(&staged);
            }
            let end = self.ends.pop_front().unwrap_or(0);
            let entry = match &mut self.posted {
                Some(posted) if entry.header.is_posted() => posted.acknowledged(number, entry),
                _ => Some(entry),
            };
            let Some(entry) = entry else { continue };
            match copied {
                true => self.peer.delivered(entry, None),
                false => self.held.push_back((end, entry)),
            }
        }
        self.let_go_held();
        self.tell_backlog();
        Ok(())
    }

    /// Finishes acknowledged frames whose memory the kernel has let go of.
    pub fn let_go_held(&mut self) {
        if !self.held.is_empty() {
            self.read_notices();
        }
    }

    /// Takes what the kernel tells of memory that it has let go of, acknowledged or not: until that is read, the socket
    /// is ready, and nobody who waits for it sleeps.
    pub fn read_notices(&mut self) {
        let released = self.conn.released();
        while self.held.front().is_some_and(|(end, _)| *end <= released) {
            if let Some((_, entry)) = self.held.pop_front() {
                self.peer.delivered(entry, None);
            }
        }
    }

    /// Sends all there is, without waiting for a word of the peer's.
    #[cfg(test)]
    pub fn hand_over(&mut self, space: &mut Workspace) {
        let until = self.peer.now() + limits::DRAIN_DEADLINE;
        while self.peer.now() < until {
            self.blocked = false;
            let sent = self.send(true, space).and_then(|_| self.turn_lane());
            let sending = self.posted.as_ref().is_some_and(|posted| posted.is_sending());
            let more = sending || self.sent < self.window.next() || self.peer.queue.has_work();
            if sent.is_err() || !more {
                return;
            }
        }
    }

    /// The peer's kernel has so much: whatever of that is of a frame that the peer has not placed yet gets on.
    fn note_acked(&mut self, acked_bytes: u64) {
        let before = std::mem::replace(&mut self.acked_bytes, acked_bytes);
        let whole = self.ends.partition_point(|end| *end <= before);
        if acked_bytes <= before || (whole == self.ends.len() && self.sent_within == 0) {
            return;
        }
        let mut entries = self.window.from(self.window.first() + whole as u64);
        if let Some(op) = entries.next().and_then(|entry| entry.op.as_ref()) {
            self.peer.note_moving(op);
        }
    }

    /// A dead path, in words, or `None` while there is no reason to think so.
    pub fn path_trouble(&mut self) -> Option<String> {
        let health = self.conn.health();
        self.unproven = health.waiting;
        self.note_acked(health.acked_bytes);
        self.counters.note_health(&health);
        self.counters.note_buffers(&*self.conn);
        if health.is_dead() {
            return Some(health.describe());
        }
        let trouble = self.posted.as_ref().and_then(|posted| posted.path_trouble());
        self.lane_failed |= trouble.is_some();
        trouble
    }
}

/// Pieces at least this long may go out without a copy.
const STABLE_BYTES_MIN: usize = 64 << 10;
/// Pieces of a ring at least this long are lent to the socket, where it can be: shorter ones cost less to copy.
const LENT_BYTES_MIN: usize = 64 << 10;

fn broken(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the stream is broken: {what}"))
}
