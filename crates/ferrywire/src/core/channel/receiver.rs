//! The receiving half of a channel: reads the socket, places payload, and counts complete frames for the
//! acknowledgements.
//!
//! A frame's states: `header -> placements -> body -> placed | refused -> counted -> acknowledged`. A large
//! payload is received directly into its target, with the next frame's header in the same call. Small frames
//! are received together through a scratch buffer. A short message whose receive waits is matched when its header comes,
//! and goes on as a frame for that receive.
//!
//! A body is received in *parts*. Most bodies are one part. A payload that goes through a staging ring has
//! several: each part needs room in the ring. An acknowledgement is a count of frames, which covers a refused
//! frame only once its refusal is in the stream.
//!
//! Invariants: bytes are taken in the order of the stream; a stage ends only when all its bytes have arrived.
//! Every offset from the wire is checked against its region before an address is made from it.
//! Read next: `../peer/replies.rs`, which handles complete frames without payload.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::record_rest::RecordRest;
use super::{Channel, PASS_BYTES, Workspace, broken};
use crate::core::inbound::Sink;
use crate::core::operation::Verb;
use crate::core::peer::{Landing, PeerState};
use crate::core::posted::Arrival;
use crate::core::trace::{self, ChunkStart, Direction};
use crate::error::Error;
use ferrywire_memory::Memory;
use ferrywire_net::IoVec;
use ferrywire_proto::limits;
use ferrywire_proto::window::Acks;
use ferrywire_proto::wire::{self, HEADER_BYTES, Header, Kind, Refusal};

/// State of the frame that is being received, and the counts of earlier frames.
pub(super) struct Receiver {
    stage: Stage,
    /// The encoded header, and the bytes of it received so far.
    encoded: [u8; HEADER_BYTES],
    have: usize,
    pub header: Header,
    placements: Vec<u8>,
    pub body: Body,
    /// Keeps the target of the payload alive. The landing of a region is kept for the next frame.
    pub landing: Option<Landing>,
    refusal: Option<Refusal>,
    pub acks: Acks,
    /// Arrival time of the last frame whose operation was large enough to count as deep bulk.
    pub bulk_since: Option<Instant>,
    /// Bytes of the last frame's header and placements if its payload was large, else 0.
    bulk_header_bytes: usize,
    /// Whether the connection holds bytes that it has read from the socket and not delivered.
    holds_more: bool,
    /// The wait for the rest of a record, if a part of one has come.
    rest: Option<RecordRest>,
    /// When the header came, for a trace.
    chunk: Option<ChunkStart>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Header,
    Placements,
    Body,
}

impl Channel {
    /// Receives available bytes, up to the limit of one pass. Returns the number of bytes received.
    pub fn receive(&mut self, space: &mut Workspace) -> io::Result<usize> {
        let (mut moved, mut pauses) = (0, false);
        while moved < PASS_BYTES && !pauses && !self.payload.stream_ended() && self.resume()? {
            let (bytes, room) = match self.receive_some(space) {
                Ok(result) => result,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => {
                    self.payload.end_stream(error, &self.peer)?;
                    break;
                }
            };
            moved += bytes;
            if bytes < room {
                break;
            }
            pauses = self.payload.pauses_after(moved);
        }
        if !pauses {
            self.payload.flush();
        }
        self.receiver.holds_more = self.conn.has_received();
        self.counters.received_bytes.fetch_add(moved as u64, Ordering::Relaxed);
        if let Some(Landing::Sink { sink, .. }) = self.receiver.landing.as_ref().filter(|_| moved > 0) {
            self.peer.note_moving(&sink.op);
        }
        Ok(moved)
    }

    /// Whether bytes have been received that no event of the socket announces.
    pub fn has_received(&self) -> bool {
        self.receiver.holds_more && !self.payload.is_stalled() && !self.payload.stream_ended()
    }

    /// Whether the rest of a record is on its way.
    pub(super) fn awaits_rest(&self) -> bool {
        self.conn.begun_bytes() > 0 && !self.payload.is_stalled()
    }

    /// The error if no byte of a begun record has come for [`RECORD_REST_TIMEOUT`](limits::RECORD_REST_TIMEOUT) and the
    /// peer timeout, while this end was looking.
    pub(super) fn missing_rest(&mut self) -> Option<String> {
        if !self.awaits_rest() {
            self.receiver.rest = None;
            return None;
        }
        let received = self.counters.received_bytes.load(Ordering::Relaxed) + self.conn.begun_bytes() as u64;
        let limit = limits::RECORD_REST_TIMEOUT.max(self.peer.context().config.peer_timeout);
        let waited = self.receiver.rest.get_or_insert_default().waited(received, self.peer.now());
        (waited > limit).then(|| {
            let waited = waited.as_secs_f64();
            format!("the rest of a record did not come within {waited:.0} s: removed on its way, or the peer is stopped")
        })
    }

    /// Resumes a payload that had no room in its ring. Returns whether the channel may read from the socket.
    fn resume(&mut self) -> io::Result<bool> {
        let Some(kept) = self.payload.resume(&mut self.receiver) else { return Ok(false) };
        self.consume(&kept)?;
        Ok(!self.payload.is_stalled())
    }

    /// Makes one socket call. Returns the bytes received and the bytes there was room for.
    fn receive_some(&mut self, space: &mut Workspace) -> io::Result<(usize, usize)> {
        let Workspace { scratch, pieces } = space;
        pieces.clear();
        let direct_bytes = self.receiver.direct_pieces(pieces);
        let tail = self.receiver.tail_bytes().min(scratch.len());
        pieces.push(IoVec::new(scratch.as_mut_ptr(), tail));
        let timed = self.payload.times_receive();
        let since = (timed || trace::is_on()).then(Instant::now);
        // SAFETY: the direct pieces lie in memory that the receiver's landing keeps alive and unrevoked, in a ring of the
        // payload, or in the body's message; the tail is the worker's own scratch buffer.
        let bytes = unsafe { self.conn.recv(pieces)? };
        self.payload.count_call(since.filter(|_| timed));
        if bytes == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the peer closed the connection"));
        }
        self.trace_call(Direction::Rx, since, bytes);
        let placed = bytes.min(direct_bytes);
        if placed > 0 {
            self.receiver.body.advance(placed);
            self.finish_if_complete()?;
        }
        self.consume(&scratch[..bytes - placed])?;
        self.payload.flush_if_full();
        Ok((bytes, direct_bytes + tail))
    }

    /// Consumes bytes that were received into the scratch buffer.
    fn consume(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            if self.payload.keeps_back(bytes) {
                return Ok(());
            }
            let used = match self.receiver.stage {
                Stage::Header => self.take_header(bytes)?,
                Stage::Placements => self.take_placements(bytes)?,
                Stage::Body => self.receiver.body.copy_in(bytes),
            };
            bytes = &bytes[used..];
            self.finish_if_complete()?;
        }
        Ok(())
    }

    fn take_header(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let receiver = &mut self.receiver;
        let used = (HEADER_BYTES - receiver.have).min(bytes.len());
        receiver.encoded[receiver.have..receiver.have + used].copy_from_slice(&bytes[..used]);
        receiver.have += used;
        if receiver.have == HEADER_BYTES {
            receiver.have = 0;
            let header = Header::decode(&receiver.encoded).map_err(|error| broken(&error.to_string()))?;
            self.begin_frame(header)?;
        }
        Ok(used)
    }

    fn begin_frame(&mut self, header: Header) -> io::Result<()> {
        if self.peer.queue.crc && header.flags & wire::FLAG_CRC == 0 {
            return Err(broken("a frame lacks the agreed checksum"));
        }
        if self.payload.note_header(&header)? {
            self.publish_load();
        }
        if header.kind != Kind::Ack {
            self.acknowledged(header.ack)?;
        }
        if header.kind == Kind::Data && self.peer.is_deep_bulk(header.total) {
            self.receiver.bulk_since = Some(Instant::now());
        }
        self.receiver.chunk = self.counters.track.chunk();
        self.receiver.header = header;
        self.receiver.placements.clear();
        self.receiver.stage = Stage::Placements;
        if header.segments == 0 {
            self.land();
        }
        Ok(())
    }

    fn take_placements(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let receiver = &mut self.receiver;
        let need = receiver.header.placement_bytes() - receiver.placements.len();
        let used = need.min(bytes.len());
        receiver.placements.extend_from_slice(&bytes[..used]);
        if used == need {
            check_crc(receiver.header.placements_crc, receiver.placements_crc())?;
            self.land();
        }
        Ok(used)
    }

    /// Finds the target of the body, once header and placements are complete.
    fn land(&mut self) {
        self.receiver.begin_body();
        let begun = self.begin_message();
        let receiver = &mut self.receiver;
        let Receiver { header, placements, body, landing, .. } = receiver;
        let target = match begun {
            Some(landing) => Ok(landing),
            None if header.kind != Kind::Data => return body.expect_message(header.len as usize),
            None => find_target(&self.peer, header, placements, &mut body.pieces, landing.take()),
        };
        match target {
            Ok(landing) => self.payload.land(receiver, landing, &self.counters),
            Err(refusal) => receiver.refuse(refusal),
        }
    }

    /// Matches an eager message with its receive, so that its bytes go there at once. The frame is then like that of a
    /// message which was announced.
    fn begin_message(&mut self) -> Option<Landing> {
        let Receiver { header, body, .. } = &mut self.receiver;
        // A lane does not bring these bytes, and may not reach the receive's memory.
        if header.kind != Kind::Send || header.len == 0 || self.payload.lane().is_some() {
            return None;
        }
        let (sink, replies) = self.peer.inbound.begin(header)?;
        self.peer.reply(replies);
        if sink.locate(0, u64::from(header.len), &mut body.pieces).is_err() {
            body.pieces.clear();
            self.peer.end_without_message(&sink.op);
            return None;
        }
        *header = header.for_sink(sink.op.id);
        Some(Landing::Sink { sink })
    }

    /// Completes a frame whose bytes in the stream have all arrived, and counts it unless its payload is
    /// still in flight.
    fn finish_if_complete(&mut self) -> io::Result<()> {
        let receiver = &mut self.receiver;
        let whole = receiver.stage == Stage::Body && receiver.body.part_is_whole();
        if !whole || !self.payload.finish_part(receiver) {
            return Ok(());
        }
        debug_assert_eq!(receiver.body.left(), 0, "the last part ends the body");
        receiver.stage = Stage::Header;
        receiver.check_body()?;
        let header = receiver.header;
        if header.kind == Kind::Ack {
            return self.refusals();
        }
        let message = receiver.take_message();
        if self.payload.defers(&header) {
            self.payload.take_over(receiver.arrival(message));
            return self.within_window();
        }
        let placements = std::mem::take(&mut receiver.placements);
        let (landing, refusal, chunk) = (receiver.landing.take(), receiver.refusal, receiver.chunk);
        let result = self.placed(&header, &placements, landing.as_ref(), message, refusal, chunk);
        self.receiver.landing = landing.filter(|landing| !landing.once());
        self.receiver.placements = placements;
        result
    }

    /// Counts a complete frame whose payload is in place, or refused.
    pub(super) fn placed(
        &mut self,
        header: &Header,
        placements: &[u8],
        landing: Option<&Landing>,
        message: Vec<u8>,
        refusal: Option<Refusal>,
        chunk: Option<ChunkStart>,
    ) -> io::Result<()> {
        let result = match refusal {
            Some(refusal) => Err(refusal),
            None if header.kind == Kind::Data => self.data_placed(header, landing, message),
            None => self.peer.arrived(header, placements, message),
        };
        if let (Some(chunk), Ok(()), Kind::Data | Kind::Send) = (chunk, result, header.kind) {
            chunk.placed(Direction::Rx, header.transfer, u64::from(header.len));
        }
        self.receiver.acks.count(result, HEADER_BYTES + header.body_bytes());
        self.within_window()
    }

    /// Counts payload that is in place: for the receive or read that waits for it, and for the notification
    /// that follows it.
    fn data_placed(
        &self,
        header: &Header,
        landing: Option<&Landing>,
        message: Vec<u8>,
    ) -> Result<(), Refusal> {
        let peer = &self.peer;
        if let Some(Landing::Sink { sink }) = landing {
            if header.len > 0 {
                peer.note_moved(&sink.op);
            }
            match peer.inbound.filled(sink, u64::from(header.len)) {
                Ok(false) if sink.op.verb() == Verb::Read => peer.note_answered(&sink.op),
                Ok(true) => peer.reply(peer.inbound.end_begun(sink)),
                Ok(false) => {}
                // The receive or read ended before this frame.
                Err(Refusal::NoSink) => match sink.take_out(header, 0) {
                    Some((header, message)) => return peer.arrived(&header, &[], message),
                    // The refusal reports it to the sender.
                    None => {
                        peer.reply(peer.inbound.forget_given_up(sink));
                        return Err(Refusal::NoSink);
                    }
                },
                Err(refusal) => {
                    let why = format!("the peer sent more bytes of a {} than announced", sink.op.verb());
                    sink.op.fail(Error::ProtocolViolation { peer: peer.info.name.clone(), why });
                    peer.end_sink(&sink.op);
                    return Err(refusal);
                }
            }
        }
        if header.flags & wire::FLAG_COUNTED != 0 {
            peer.inbound.count(header)?;
        }
        if header.notify > 0 { peer.inbound.notified(header, message) } else { Ok(()) }
    }

    fn within_window(&self) -> io::Result<()> {
        let waiting = self.payload.waiting() as u64;
        if self.receiver.acks.unacknowledged_frames() + waiting > limits::WINDOW_FRAMES_MAX as u64 {
            Err(broken("the peer sent more frames than the window holds"))
        } else {
            Ok(())
        }
    }

    /// Fails the operations of refused frames. Their frames are still in the window: the count that covers
    /// them is handled after this.
    fn refusals(&mut self) -> io::Result<()> {
        let message = self.receiver.body.take_message();
        for (low, refusal) in wire::refusals(&message) {
            let window = &mut self.sender.window;
            let number = wire::widen(low, window.first());
            if let Some(op) = window.get_mut(number).and_then(|entry| entry.op.as_ref()) {
                self.peer.refused(op, refusal);
            }
        }
        self.acknowledged(self.receiver.header.ack)
    }
}

impl Receiver {
    pub fn new() -> Receiver {
        Receiver {
            stage: Stage::Header,
            encoded: [0; HEADER_BYTES],
            have: 0,
            header: Header::new(Kind::Ack),
            placements: Vec::new(),
            body: Body::default(),
            landing: None,
            refusal: None,
            acks: Acks::default(),
            bulk_since: None,
            bulk_header_bytes: 0,
            holds_more: false,
            rest: None,
            chunk: None,
        }
    }

    /// Appends the targets of the rest of the body. Returns their bytes.
    fn direct_pieces(&self, out: &mut Vec<IoVec>) -> usize {
        if self.stage == Stage::Body {
            out.extend(self.body.rest().iter().take(ferrywire_sys::IOVECS_PER_CALL_MAX - 1));
        }
        out.iter().map(|piece| piece.len).sum()
    }

    /// Number of bytes to receive into the scratch buffer behind the direct pieces.
    fn tail_bytes(&self) -> usize {
        match self.stage {
            Stage::Body if self.body.is_thrown_away() => self.body.left(),
            Stage::Body if self.bulk_header_bytes > 0 => self.bulk_header_bytes,
            Stage::Header if self.bulk_header_bytes > 0 => {
                self.bulk_header_bytes.saturating_sub(self.have).max(1)
            }
            Stage::Placements => self.header.placement_bytes() - self.placements.len(),
            _ => usize::MAX,
        }
    }

    fn begin_body(&mut self) {
        let bytes = self.header.stream_bytes() - self.header.placement_bytes();
        self.body.begin(bytes, self.header.flags & wire::FLAG_CRC != 0);
        self.stage = Stage::Body;
        self.refusal = None;
        let bulk = bytes >= limits::DIRECT_RECEIVE_BYTES_MIN;
        self.bulk_header_bytes = if bulk { HEADER_BYTES + self.header.placement_bytes() } else { 0 };
    }

    /// Receives the payload into the current pieces, which `landing` keeps alive. The notification follows.
    pub fn expect(&mut self, landing: Landing) {
        self.landing = Some(landing);
        self.body.expect_message(usize::from(self.header.notify));
    }

    /// Refuses the frame, and discards the rest of its body.
    pub fn refuse(&mut self, refusal: Refusal) {
        self.refusal = Some(refusal);
        self.body.throw_away();
    }

    /// Refuses the frame if its payload is being received. Returns the landing of this frame, or the one kept
    /// from the last frame.
    pub fn break_off(&mut self, refusal: Refusal) -> Option<Landing> {
        if self.stage == Stage::Body && self.header.kind == Kind::Data {
            self.refuse(refusal);
        }
        self.landing.take()
    }

    /// Receives the rest of a message that has begun into a buffer, and returns the receive that had it; `None` if the
    /// frame is of something else.
    pub fn take_out(&mut self) -> Option<Arc<Sink>> {
        let Some(Landing::Sink { sink }) = &self.landing else { return None };
        let (header, message) = sink.take_out(&self.header, self.body.left())?;
        self.header = header;
        self.body.go_on_in(message);
        match self.landing.take() {
            Some(Landing::Sink { sink }) => Some(sink),
            _ => None,
        }
    }

    /// Takes the message of a complete frame; empty if the frame has none.
    fn take_message(&mut self) -> Vec<u8> {
        if self.header.notify > 0 || self.header.kind != Kind::Data {
            self.body.take_message()
        } else {
            Vec::new()
        }
    }

    /// Takes the current frame out. Its bytes in the stream have all arrived.
    fn arrival(&mut self, message: Vec<u8>) -> Arrival {
        Arrival {
            header: self.header,
            placements: std::mem::take(&mut self.placements),
            landing: self.landing.take(),
            message,
            refusal: self.refusal,
            target: Vec::new(),
            chunk: self.chunk,
        }
    }

    /// The checksum of the placements that the header must carry.
    fn placements_crc(&self) -> u32 {
        match self.header.flags & wire::FLAG_CRC {
            0 => 0,
            _ => crc32fast::hash(&self.placements),
        }
    }

    /// Checks the checksum of the body, unless the body was discarded.
    fn check_body(&mut self) -> io::Result<()> {
        match self.body.take_crc().filter(|_| self.refusal.is_none()) {
            Some(computed) => check_crc(self.header.crc, computed),
            None => Ok(()),
        }
    }
}

/// Finds the target of a data frame's payload and appends it to `pieces`. `last` is the landing of the
/// last frame, reused if it is of the same region.
///
/// # Errors
/// The reason to refuse the frame: no such region or sink, a range outside it, or memory that the
/// transport cannot reach.
fn find_target(
    peer: &PeerState,
    header: &Header,
    placements: &[u8],
    pieces: &mut Vec<IoVec>,
    last: Option<Landing>,
) -> Result<Landing, Refusal> {
    if header.flags & wire::FLAG_SINK != 0 {
        let sink = peer.inbound.sink(header.key)?;
        sink.locate(header.offset, u64::from(header.len), pieces)?;
        return Ok(Landing::Sink { sink });
    }
    let landing = match last {
        Some(Landing::Region { key, .. }) if key == header.key => last.ok_or(Refusal::NoRegion)?,
        _ => Landing::Region { key: header.key, memory: peer.context().reachable_region(header.key)? },
    };
    if let Landing::Region { memory, .. } = &landing {
        if memory.revoked() {
            return Err(Refusal::NoRegion);
        }
        place(memory, header, placements, pieces)?;
    }
    Ok(landing)
}

fn place(
    memory: &Memory,
    header: &Header,
    placements: &[u8],
    pieces: &mut Vec<IoVec>,
) -> Result<(), Refusal> {
    if header.segments == 0 {
        let base = memory.span(header.offset, u64::from(header.len)).ok_or(Refusal::OutOfRegion)?;
        push_piece(pieces, base, header.len);
        return Ok(());
    }
    let mut sum = 0u64;
    for placement in wire::placements(placements) {
        let base = memory.span(placement.offset, u64::from(placement.len)).ok_or(Refusal::OutOfRegion)?;
        push_piece(pieces, base, placement.len);
        sum += u64::from(placement.len);
    }
    if sum == u64::from(header.len) { Ok(()) } else { Err(Refusal::OutOfRegion) }
}

/// Adds a piece unless it is empty. The receive loop could not advance past an empty piece.
fn push_piece(pieces: &mut Vec<IoVec>, base: *mut u8, len: u32) {
    if len > 0 {
        pieces.push(IoVec::new(base, len as usize));
    }
}

pub(super) fn check_crc(expected: u32, computed: u32) -> io::Result<()> {
    if expected == computed {
        Ok(())
    } else {
        Err(broken(&wire::WireError::Checksum { expected, computed }.to_string()))
    }
}

/// The body of the frame that is being received. Placements are not part of the body.
#[derive(Default)]
pub(super) struct Body {
    /// Targets of the current part. If empty, its bytes are discarded.
    pub pieces: Vec<IoVec>,
    /// Index of the first piece that is not full yet.
    next: usize,
    /// Bytes still to be received: of the body, and (`part_left`) of the current part.
    left: usize,
    part_left: usize,
    /// The notification or message that follows the payload.
    message: Vec<u8>,
    /// Checksum of the bytes received so far, if the frame has one.
    crc: Option<crc32fast::Hasher>,
}

// SAFETY: the pieces point into memory that the frame's landing keeps alive, into a ring of the channel's payload, or into
// the body's own message; whichever thread owns the channel may write there.
unsafe impl Send for Body {}

impl Body {
    /// Starts a body of `bytes` bytes.
    pub fn begin(&mut self, bytes: usize, has_crc: bool) {
        self.pieces.clear();
        self.next = 0;
        (self.left, self.part_left) = (bytes, bytes);
        self.message.clear();
        self.crc = has_crc.then(crc32fast::Hasher::new);
    }

    /// Adds a buffer of `len` bytes for the message that follows the payload.
    pub fn expect_message(&mut self, len: usize) {
        self.message.resize(len, 0);
        if len > 0 {
            self.pieces.push(IoVec::new(self.message.as_mut_ptr(), len));
        }
    }

    /// Receives the rest of the body into the end of `message`, which is the whole body.
    pub fn go_on_in(&mut self, message: Vec<u8>) {
        self.message = message;
        self.pieces.clear();
        self.next = 0;
        let placed = self.message.len() - self.left;
        let rest = &mut self.message[placed..];
        self.pieces.push(IoVec::new(rest.as_mut_ptr(), rest.len()));
    }

    /// Starts a part whose bytes go to `piece`. `message` is the length of the message behind the last part.
    pub fn open_part(&mut self, piece: IoVec, message: Option<usize>) {
        self.close_part();
        self.pieces.push(piece);
        let message = message.unwrap_or(0);
        self.part_left = piece.len + message;
        debug_assert!(self.part_left <= self.left, "a part is longer than the rest of the body");
        if message > 0 {
            self.expect_message(message);
        }
    }

    /// Ends the current part while the next one has no room yet.
    pub fn close_part(&mut self) {
        self.pieces.clear();
        self.next = 0;
        self.part_left = 0;
    }

    /// Discards the rest of the body.
    pub fn throw_away(&mut self) {
        self.pieces.clear();
        self.next = 0;
        self.part_left = self.left;
    }

    /// Bytes of the body that are still to be received.
    pub fn left(&self) -> usize {
        self.left
    }

    /// Whether the current part has been received completely.
    pub fn part_is_whole(&self) -> bool {
        self.part_left == 0
    }

    /// Whether the rest of the body is discarded.
    pub fn is_thrown_away(&self) -> bool {
        self.pieces.is_empty() && self.left > 0
    }

    /// Targets of the rest of the current part.
    pub fn rest(&self) -> &[IoVec] {
        &self.pieces[self.next..]
    }

    /// Notes that `bytes` bytes were received into the pieces.
    pub fn advance(&mut self, mut bytes: usize) {
        self.left -= bytes;
        self.part_left -= bytes;
        while bytes > 0 {
            let piece = &mut self.pieces[self.next];
            let used = bytes.min(piece.len);
            if let Some(crc) = &mut self.crc {
                // SAFETY: these bytes of the piece were just received.
                crc.update(unsafe { std::slice::from_raw_parts(piece.base, used) });
            }
            // SAFETY: `used` is at most the length of the piece.
            *piece = IoVec::new(unsafe { piece.base.add(used) }, piece.len - used);
            bytes -= used;
            self.next += usize::from(piece.len == 0);
        }
    }

    /// Copies bytes from the scratch buffer to the current part. Returns the number of bytes taken.
    pub fn copy_in(&mut self, bytes: &[u8]) -> usize {
        let used = self.part_left.min(bytes.len());
        if self.pieces.is_empty() {
            self.left -= used;
            self.part_left -= used;
            return used;
        }
        let mut from = &bytes[..used];
        while !from.is_empty() {
            let piece = self.pieces[self.next];
            let now = from.len().min(piece.len);
            // SAFETY: the piece is live memory of at least `now` bytes (see `receive_some`).
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), piece.base, now) };
            self.advance(now);
            from = &from[now..];
        }
        used
    }

    /// Skips the checksum here: the frame's checksum also covers bytes that travel beside the stream.
    pub fn leave_unchecked(&mut self) {
        self.crc = None;
    }

    /// The checksum of all received bytes, if the frame has one.
    pub fn take_crc(&mut self) -> Option<u32> {
        self.crc.take().map(crc32fast::Hasher::finalize)
    }

    /// Takes the message that was received.
    pub fn take_message(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.message)
    }
}
