//! The channel's receiving half: from the socket to the places of payloads, and what a whole frame causes.
//!
//! Read next: `peer/frames.rs`, which says where a payload goes and what its arrival means.

use std::io;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::receiver::{Stage, check_crc};
use super::{Channel, Remains, TURN_BYTES, Touched, Unreleased, Workspace, broken};
use crate::core::peer::Landing;
use crate::core::stats::NO_BACKLOG;
use crate::payload::lane::Run;
use ferrywire_memory::Place;
use ferrywire_net::IoVec;
use ferrywire_proto::limits;
use ferrywire_proto::wire::{self, HEADER_BYTES, Header, Kind, Refusal};

impl Channel {
    /// Receives what is there, within a turn's bounds. Returns the bytes.
    pub fn receive(&mut self, space: &mut Workspace) -> io::Result<usize> {
        let (mut moved, mut cut_short) = (0, false);
        while moved < TURN_BYTES && self.ended.is_none() && self.resume()? {
            let (bytes, room) = match self.receive_some(space) {
                Ok(result) => result,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => {
                    self.stream_ended(error)?;
                    break;
                }
            };
            moved += bytes;
            if bytes < room {
                break;
            }
            // The peer waits to hear of copies that are done: they are looked after before there is more.
            cut_short = moved >= limits::STAGING_LOOK_BYTES && self.staging.receiving.copying();
            if cut_short {
                break;
            }
        }
        if self.staging.receiving.begun() && !cut_short {
            self.flush_parts();
        }
        self.counters.received_bytes.fetch_add(moved as u64, Ordering::Relaxed);
        if let Some(Landing::Sink { sink, .. }) = self.rx.landing.as_ref().filter(|_| moved > 0) {
            self.peer.note_moving(&sink.op);
        }
        Ok(moved)
    }

    /// One socket call. Returns the bytes received and the room there was.
    fn receive_some(&mut self, space: &mut Workspace) -> io::Result<(usize, usize)> {
        let Workspace { scratch, pieces } = space;
        pieces.clear();
        let direct_bytes = self.rx.direct_pieces(pieces);
        let tail = self.rx.tail_bytes().min(scratch.len());
        pieces.push(IoVec::new(scratch.as_mut_ptr(), tail));
        let since = self.rx.staged.then(Instant::now);
        // SAFETY: the direct pieces lie in memory that `rx.landing` keeps alive and unrevoked, or in
        // `rx.message`; the tail is the worker's own scratch buffer.
        let bytes = unsafe { self.conn.recv(pieces)? };
        self.count_wire(since);
        if bytes == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the peer closed the connection"));
        }
        let placed = bytes.min(direct_bytes);
        if placed > 0 {
            self.rx.advance(placed);
            self.finish_if_complete()?;
        }
        self.consume(&scratch[..bytes - placed])?;
        // Short parts wait for company, until there is nothing more to receive.
        if self.staging.receiving.gathered_bytes() >= limits::STAGING_SLOT_BYTES {
            self.flush_parts();
        }
        Ok((bytes, direct_bytes + tail))
    }

    /// Takes bytes that came through the scratch buffer.
    pub(super) fn consume(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            if self.rx.stalled {
                self.rx.kept.extend_from_slice(bytes);
                return Ok(());
            }
            let used = match self.rx.stage {
                Stage::Head => self.take_head(bytes)?,
                Stage::Placements => self.take_placements(bytes)?,
                Stage::Body => self.rx.copy_in(bytes),
            };
            bytes = &bytes[used..];
            self.finish_if_complete()?;
        }
        Ok(())
    }

    fn take_head(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let used = (HEADER_BYTES - self.rx.have).min(bytes.len());
        self.rx.head[self.rx.have..self.rx.have + used].copy_from_slice(&bytes[..used]);
        self.rx.have += used;
        if self.rx.have == HEADER_BYTES {
            self.rx.have = 0;
            let header = Header::decode(&self.rx.head).map_err(|error| broken(&error.to_string()))?;
            if self.peer.queue.crc && header.flags & wire::FLAG_CRC == 0 {
                return Err(broken("a frame without the checksum that was agreed on"));
            }
            self.hear_posted(&header)?;
            if header.kind != Kind::Ack {
                self.acknowledged(header.ack)?;
            }
            if header.kind == Kind::Data && self.peer.is_deep_bulk(header.total) {
                self.rx.bulk_since = Some(Instant::now());
            }
            self.rx.header = header;
            self.rx.placements.clear();
            self.rx.stage = Stage::Placements;
            if header.segments == 0 {
                self.land();
            }
        }
        Ok(used)
    }

    fn take_placements(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let need = self.rx.header.placement_bytes() - self.rx.placements.len();
        let used = need.min(bytes.len());
        self.rx.placements.extend_from_slice(&bytes[..used]);
        if used == need {
            let (expected, computed) = (self.rx.header.placements_crc, self.rx.placements_crc());
            check_crc(expected, computed)?;
            self.land();
        }
        Ok(used)
    }

    /// The head is whole: finds out where the payload goes.
    fn land(&mut self) {
        let rx = &mut self.rx;
        rx.pieces.clear();
        rx.next = 0;
        rx.message.clear();
        rx.refusal = None;
        rx.left = rx.header.stream_bytes() - rx.header.placement_bytes();
        rx.target.clear();
        (rx.room, rx.staged) = (usize::MAX, false);
        rx.stage = Stage::Body;
        rx.crc = crc32fast::Hasher::new();
        let bulk = rx.left >= limits::DIRECT_RECEIVE_BYTES_MIN;
        rx.bulk_head = if bulk { HEADER_BYTES + rx.header.placement_bytes() } else { 0 };
        match rx.header.kind {
            Kind::Data => match self.peer.land(&rx.header, &rx.placements, &mut rx.pieces, rx.landing.take())
            {
                Ok(landing) => {
                    if let Some(place) = on_gpu(&rx.header, &landing) {
                        return self.land_on_gpu(place, landing);
                    }
                    if rx.header.is_posted() {
                        rx.target = runs(&landing, &mut rx.pieces);
                    }
                    rx.landing = Some(landing);
                    rx.expect_message(usize::from(rx.header.notify));
                }
                Err(refusal) => {
                    rx.refusal = Some(refusal);
                    rx.pieces.clear();
                }
            },
            _ => rx.expect_message(rx.header.len as usize),
        }
    }

    fn finish_if_complete(&mut self) -> io::Result<()> {
        if self.rx.stage != Stage::Body || (self.rx.staged && !self.finish_part()) || self.rx.left > 0 {
            return Ok(());
        }
        self.rx.stage = Stage::Head;
        let header = self.rx.header;
        self.rx.check_body()?;
        if header.kind == Kind::Ack {
            return self.refusals();
        }
        let message = match header.notify > 0 || header.kind != Kind::Data {
            true => std::mem::take(&mut self.rx.message),
            false => Vec::new(),
        };
        match &mut self.posted {
            // What comes behind a payload that is missing waits for it.
            Some(posted) if header.is_posted() || posted.waiting() > 0 => {
                posted.expect(self.rx.arrival(message));
                self.within_window()
            }
            _ if self.rx.staged || self.staging.receiving.waiting() > 0 => {
                self.rx.staged = false;
                self.rx.room = usize::MAX;
                let arrival = self.rx.arrival(message);
                self.staging.receiving.expect(arrival);
                self.within_window()
            }
            _ => {
                let placements = std::mem::take(&mut self.rx.placements);
                let landing = self.rx.landing.take();
                let result = self.placed(&header, &placements, landing.as_ref(), message, self.rx.refusal);
                self.rx.landing = landing.filter(|landing| !landing.once());
                self.rx.placements = placements;
                result
            }
        }
    }

    /// All of a frame is here, and its payload in place: counts it.
    pub(super) fn placed(
        &mut self,
        header: &Header,
        placements: &[u8],
        landing: Option<&Landing>,
        message: Vec<u8>,
        refusal: Option<Refusal>,
    ) -> io::Result<()> {
        let result = match refusal {
            Some(refusal) => Err(refusal),
            None => self.peer.arrived(header, placements, landing, message),
        };
        if let Err(refusal) = result {
            self.rx.refused.push((self.rx.received, refusal));
        }
        self.rx.received += 1;
        self.rx.unacknowledged_bytes += HEADER_BYTES + header.body_bytes();
        self.within_window()
    }

    fn within_window(&self) -> io::Result<()> {
        let waiting = self.posted.as_ref().map_or(0, |posted| posted.waiting());
        let waiting = (waiting + self.staging.receiving.waiting()) as u64;
        match self.rx.received + waiting - self.rx.acknowledged > limits::WINDOW_FRAMES_MAX as u64 {
            true => Err(broken("it sent more frames than its window holds")),
            false => Ok(()),
        }
    }

    /// The peer refused some frames; they are still in the window, since the count behind them waits.
    fn refusals(&mut self) -> io::Result<()> {
        let message = std::mem::take(&mut self.rx.message);
        for (low, refusal) in wire::refusals(&message) {
            let number = wire::widen(low, self.window.first());
            if let Some(op) = self.window.get_mut(number).and_then(|entry| entry.op.clone()) {
                self.peer.refused(&op, refusal);
            }
        }
        self.acknowledged(self.rx.header.ack)
    }

    /// Stops placing bytes into this memory: the rest of a payload under way is thrown away. Says who may still write there.
    pub fn abandon(&mut self, gone: impl Fn(&Landing) -> bool) -> Touched {
        if self.rx.landing.as_ref().is_some_and(&gone) {
            self.break_off(Refusal::NoRegion);
        }
        let gpu = self.staging.receiving.abandon(&gone);
        Touched { lane: self.posted.as_mut().is_some_and(|posted| posted.abandon(&gone)), gpu }
    }

    /// Ends the channel: closes the connection, then tells what it placed and what it did not deliver.
    pub fn end(mut self) -> Remains {
        self.conn.shutdown();
        self.staging.end();
        let lane = self.posted.as_ref().map(|posted| posted.state());
        let mut posted = self.posted.take();
        if let Some(posted) = &mut posted {
            posted.end().into_iter().for_each(|entry| self.peer.delivered(entry, None));
        }
        self.counters.alive.store(false, Ordering::Relaxed);
        self.counters.backlog.store(NO_BACKLOG, Ordering::Relaxed);
        self.counters.staging.pinned_bytes.store(0, Ordering::Relaxed);
        let unreleased = Unreleased::of(posted, self.conn, self.stream_sent);
        self.held.drain(..).for_each(|(_, entry)| self.peer.delivered(entry, None));
        let mut entries = self.window.drain();
        // Over another channel they are staged again.
        entries.iter_mut().for_each(|(_, entry)| entry.staged = None);
        let heard = self.rx.received.saturating_sub(limits::WINDOW_FRAMES_MAX as u64);
        let mut refused = self.rx.told;
        refused.append(&mut self.rx.refused);
        refused.retain(|(number, _)| *number >= heard);
        let (placed, lane_failed) = (self.rx.received, self.lane_failed);
        Remains { placed, refused, entries, lane, lane_failed, unreleased }
    }
}

/// The GPU that a payload of the stream goes to, if it goes to one.
fn on_gpu(header: &Header, landing: &Landing) -> Option<Place> {
    let place = landing.memory()?.place();
    (place != Place::Host && header.len > 0 && !header.is_posted()).then_some(place)
}

/// Pieces of a landing as runs of its memory, for a lane; the pieces go.
fn runs(landing: &Landing, pieces: &mut Vec<IoVec>) -> Vec<Run> {
    let runs = pieces.drain(..).filter_map(|piece| {
        let memory = landing.memory()?;
        Some(Run { memory: memory.clone(), offset: memory.offset_of(piece.base), bytes: piece.len })
    });
    runs.collect()
}

/// Checks a payload that came over a lane. Checksums are agreed on only where both ends use host memory.
pub(super) fn check_posted(header: &Header, target: &[Run], message: &[u8]) -> io::Result<()> {
    if header.flags & wire::FLAG_CRC == 0 || !header.is_posted() {
        return Ok(());
    }
    let mut crc = crc32fast::Hasher::new();
    for run in target.iter().filter(|run| run.memory.place() == Place::Host) {
        // SAFETY: the run is inside live host memory, which the frame's landing keeps.
        crc.update(unsafe { std::slice::from_raw_parts(run.base(), run.bytes) });
    }
    crc.update(message);
    check_crc(header.crc, crc.finalize())
}
