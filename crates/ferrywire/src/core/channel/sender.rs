//! The sending half of a channel: sends frames of the window, and completes what the peer acknowledges.
//!
//! A frame's states: `taken -> sent -> acknowledged -> released -> delivered`. A frame is released when the
//! kernel no longer reads its memory. A connection that copies releases at once.
//!
//! Invariant: a frame's entry, and with it the memory, is kept until the peer has placed the frame and the
//! kernel has released it.
//! Read next: `batch.rs`, one socket call; `pull.rs`, where frames come from.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::batch::Batch;
use super::payload::Payload;
use super::{Channel, PASS_BYTES, Workspace, broken};
use crate::core::peer::PeerState;
use crate::core::queue::{DROPPED, Entry};
use crate::error::Error;
use crate::payload::lane::UNREADABLE;
use ferrywire_net::IoVec;
use ferrywire_proto::limits;
use ferrywire_proto::window::Window;
use ferrywire_proto::wire::{self, HEADER_BYTES, Header};

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
    /// Rest of an acknowledgement frame that is not sent completely.
    ack_frame: Vec<u8>,
    /// The kernel took fewer bytes than offered. Send again when the socket is writable.
    pub blocked: bool,
    /// The kernel could not read the memory of the last call: send one frame per call to find the frame.
    frame_by_frame: bool,
    /// The peer's kernel may lack bytes: a send sets this, a check of the path clears it.
    unproven: bool,
    /// Bytes that the peer's kernel had acknowledged at the last check.
    acked_bytes: u64,
}

impl Channel {
    /// Sends frames that are ready; with `flush`, also a due acknowledgement. Returns the bytes taken by the
    /// kernel.
    pub fn send(&mut self, flush: bool, space: &mut Workspace) -> io::Result<usize> {
        self.payload.look(&mut self.sender, &self.peer.queue);
        if self.sender.blocked || self.payload.stream_ended() {
            return Ok(0);
        }
        let mut moved = 0;
        while !self.sender.blocked && moved < PASS_BYTES {
            self.pull();
            if self.wants_ack_frame(flush) {
                self.make_ack_frame();
            }
            let bytes = self.send_some(&mut space.pieces)?;
            // The next frame may wait for long, and the peer waits for the acknowledgement meanwhile.
            if bytes == 0 && flush && self.ack_frame_fits() && self.receiver.acks.due() {
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

    /// Whether an acknowledgement needs a frame of its own: it is urgent, or no data frame would carry it.
    fn wants_ack_frame(&self, flush: bool) -> bool {
        let acks = &self.receiver.acks;
        let alone = flush && acks.due() && self.sender.sent == self.sender.window.next();
        (acks.urgent() || alone) && self.sender.sent_within == 0 && self.sender.ack_frame.is_empty()
    }

    /// Whether an acknowledgement frame may come next in the stream.
    fn ack_frame_fits(&self) -> bool {
        !self.sender.blocked && self.sender.sent_within == 0 && self.sender.ack_frame.is_empty()
    }

    pub(super) fn make_ack_frame(&mut self) {
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
        let since = batch.timed.then(Instant::now);
        // SAFETY: the pieces point into the acknowledgement frame, into entries of the window, which stay
        // until the peer has acknowledged them and `released` has passed them, into the memory that those
        // entries' operations keep alive, and, never as `stable`, into the rings of the payload. A lent piece
        // of a ring is not used again before the peer has placed it, or its pages are given back to the
        // system.
        let result = unsafe { batch.send(&mut *self.conn) };
        self.payload.count_call(since);
        match result {
            Ok(taken) => {
                if carries_ack {
                    self.receiver.acks.sent_with_header(ack);
                }
                self.sender.blocked = taken < bytes;
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
            return Err(broken("it acknowledged frames that were not sent"));
        }
        let copied = self.conn.released() == u64::MAX;
        while let Some((number, mut entry)) = sender.window.release(count) {
            let end = sender.ends.pop_front().unwrap_or(0);
            // An entry is large: most are moved from the window to their destination without an intermediate
            // copy.
            let mut release = |entry| {
                if copied {
                    self.peer.delivered(entry, None)
                } else {
                    sender.unreleased.push_back((end, entry))
                }
            };
            if self.payload.acknowledged(&mut entry) {
                self.payload.finish(number, entry).into_iter().for_each(release)
            } else {
                release(entry)
            }
        }
        self.finish_released();
        self.tell_backlog();
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
        let unreleased = &mut self.sender.unreleased;
        while let Some((_, entry)) = unreleased.pop_front_if(|(end, _)| *end <= released) {
            self.peer.delivered(entry, None);
        }
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
        self.payload.path_trouble()
    }

    /// Sends everything without waiting for acknowledgements.
    #[cfg(test)]
    pub fn hand_over(&mut self, space: &mut Workspace) {
        let until = self.peer.now() + limits::DRAIN_TIMEOUT;
        while self.peer.now() < until {
            self.sender.blocked = false;
            let sent = self.send(true, space).and_then(|_| self.poll_lane());
            let unsent = self.sender.sent < self.sender.window.next();
            let more = self.payload.is_sending() || unsent || self.peer.queue.has_work();
            if sent.is_err() || !more {
                return;
            }
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
            ack_frame: Vec::new(),
            blocked: false,
            frame_by_frame: false,
            unproven: false,
            acked_bytes: 0,
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
        tracing::warn!(%error, peer = peer.name(), "cannot read registered memory");
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
