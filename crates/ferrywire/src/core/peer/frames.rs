//! Handling of frames that arrive: the target of a payload, and the effect of a complete frame.
//!
//! Invariant: every offset from the wire is checked against its region before an address is made from it.
//! Read next: `inbound.rs`.

use std::collections::VecDeque;
use std::sync::Arc;

use super::serving::Request;
use super::state::{Landing, PeerState};
use crate::core::inbound::{Reply, place as place_message};
use crate::core::operation::{Op, Task, Verb};
use crate::error::Error;
use ferrywire_memory::Memory;
use ferrywire_net::IoVec;
use ferrywire_proto::limits;
use ferrywire_proto::outbox::Matched;
use ferrywire_proto::transfer::{Piece, Pieces};
use ferrywire_proto::wire::{self, Header, Kind, Refusal};

impl PeerState {
    /// Finds the target of a data frame's payload and appends it to `pieces`. `last` is the landing of the
    /// last frame, reused if it is of the same region.
    ///
    /// # Errors
    /// The reason to refuse the frame: no such region or sink, a range outside it, or memory that the
    /// transport cannot reach.
    pub fn land(
        self: &Arc<Self>,
        header: &Header,
        placements: &[u8],
        pieces: &mut Vec<IoVec>,
        last: Option<Landing>,
    ) -> Result<Landing, Refusal> {
        if header.flags & wire::FLAG_SINK != 0 {
            let landing = Landing::Sink { sink: self.inbound.sink(header.key)? };
            if let Landing::Sink { sink } = &landing {
                sink.locate(header.offset, u64::from(header.len), pieces)?;
            }
            return Ok(landing);
        }
        let landing = match last {
            Some(Landing::Region { key, .. }) if key == header.key => last.ok_or(Refusal::NoRegion)?,
            _ => Landing::Region { key: header.key, memory: self.named(header.key)? },
        };
        if let Landing::Region { memory, .. } = &landing {
            if memory.revoked() {
                return Err(Refusal::NoRegion);
            }
            place(memory, header, placements, pieces)?;
        }
        Ok(landing)
    }

    /// The region with this key, which the peer may write or read, if the transport can reach its memory.
    fn named(&self, key: u64) -> Result<Arc<Memory>, Refusal> {
        let memory = self.context().regions.find(key)?;
        self.context().check_reach(memory.location(), "local").map_err(|_| Refusal::OutOfReach)?;
        Ok(memory)
    }

    /// Handles a complete frame whose payload is in place.
    ///
    /// # Errors
    /// The reason to refuse the frame.
    pub fn arrived(
        self: &Arc<Self>,
        header: &Header,
        placements: &[u8],
        landing: Option<&Landing>,
        message: Vec<u8>,
    ) -> Result<(), Refusal> {
        match header.kind {
            Kind::Data => self.data_arrived(header, landing, message),
            Kind::Notify => self.inbound.notified(header, message),
            Kind::Send | Kind::Announce => {
                let replies = self.inbound.message(header, message)?;
                self.reply(replies);
                Ok(())
            }
            Kind::Match => {
                match self.queue.matched(header.transfer, header.key) {
                    Matched::Empty(op) => drop(op),
                    Matched::Queued(bytes) => self.rouse_for(bytes),
                    Matched::Unknown => {
                        let mut refuse = Header::new(Kind::Refuse);
                        refuse.transfer = header.key;
                        refuse.key = Refusal::NoSink as u64;
                        self.reply(vec![Reply::Frame(refuse)]);
                    }
                }
                Ok(())
            }
            Kind::Credit => {
                self.queue.credit(header.total);
                Ok(())
            }
            Kind::Read => self.serve(header, placements),
            Kind::Refuse => {
                self.peer_refused(header);
                Ok(())
            }
            Kind::Ack => Ok(()),
        }
    }

    fn data_arrived(
        &self,
        header: &Header,
        landing: Option<&Landing>,
        message: Vec<u8>,
    ) -> Result<(), Refusal> {
        if let Some(Landing::Sink { sink }) = landing {
            if header.len > 0 {
                self.note_moved(&sink.op);
            }
            match self.inbound.filled(sink, u64::from(header.len)) {
                Ok(false) if sink.op.verb() == Verb::Read => self.note_answered(&sink.op),
                Ok(_) => {}
                // The receive or read ended before this frame: the sender is told by the refusal.
                Err(Refusal::NoSink) => return Err(Refusal::NoSink),
                Err(refusal) => {
                    let why = format!("it sent more bytes of a {} than it had announced", sink.op.verb());
                    sink.op.fail(Error::ProtocolViolation { peer: self.info.name.clone(), why });
                    self.end_sink(&sink.op);
                    return Err(refusal);
                }
            }
        }
        if header.flags & wire::FLAG_COUNTED != 0 {
            self.inbound.count(header)?;
        }
        if header.notify > 0 { self.inbound.notified(header, message) } else { Ok(()) }
    }

    pub fn reply(&self, replies: Vec<Reply>) {
        let mut replies = VecDeque::from(replies);
        while let Some(reply) = replies.pop_front() {
            match reply {
                // Beyond this many unsent answers the peer floods this end with requests that are refused;
                // refusals are dropped.
                Reply::Frame(header)
                    if header.kind == Kind::Refuse
                        && self.queue.answers_waiting() >= limits::ANSWERS_WAITING_MAX => {}
                Reply::Frame(header) => self.queue.push_own(header),
                Reply::Place(op, message) => {
                    if !place_message(&message, &op) {
                        // Return it before the receive ends, so that a receive posted then gets this message,
                        // not a later one.
                        replies.extend(self.inbound.return_message(message));
                    }
                }
                Reply::Received(op) => drop(op),
                Reply::Truncated { op, message_bytes } => {
                    op.fail(Error::Truncated { tag: op.key(), message_bytes, buffer_bytes: op.total });
                }
                Reply::Cancelled(op) => op.cut_short(),
                Reply::Open { .. } => debug_assert!(false, "sinks are opened with the inbox locked"),
            }
        }
    }

    /// Handles the peer's refusal of an announced send, or of a send that a receive here has matched.
    fn peer_refused(&self, header: &Header) {
        let refusal = Refusal::parse(header.key as u8);
        if let Some(op) = self.queue.withdraw(header.transfer) {
            self.refused(&op, refusal);
        } else if let Some(sink) = self.inbound.close_sink(header.transfer) {
            let is_untouched = Arc::strong_count(&sink) == 1 && sink.op.is_untouched();
            if refusal == Refusal::NoSink && sink.op.verb() == Verb::Recv && is_untouched {
                // The send was withdrawn before a byte was sent: the receive matches the next message.
                let op = sink.op.clone();
                // Drop it first. The next message may be matched and withdrawn at once, and must find the
                // receive untouched.
                drop(sink);
                let replies = self.inbound.post_again(op);
                return self.reply(replies);
            }
            let why = if refusal != Refusal::Other && is_untouched {
                refusal.text().into()
            } else {
                "it gave the operation up half-way".into()
            };
            sink.op.fail(Error::AccessRefused { peer: self.info.name.clone(), why });
            self.stop_asking(&sink.op);
        }
    }

    /// Handles a read of a local region: answers with a write to the peer's sink, now or when another answer
    /// has ended.
    fn serve(self: &Arc<Self>, header: &Header, placements: &[u8]) -> Result<(), Refusal> {
        let answer = self.answer(header, placements)?;
        if self.places.admit(header, placements)? {
            self.begin_answer(answer);
        }
        Ok(())
    }

    /// Handles the end of an answer: answers the next waiting read. Its region may be gone meanwhile.
    pub fn served(self: &Arc<Self>) {
        // A peer that is over gets no more answers.
        while let Some(Request { header, placements }) =
            self.places.next().filter(|_| self.failure().is_none())
        {
            match self.answer(&header, &placements) {
                Ok(answer) => return self.begin_answer(answer),
                Err(refusal) => {
                    let mut refuse = Header::new(Kind::Refuse);
                    refuse.transfer = header.total;
                    refuse.key = refusal as u64;
                    // The number of waiting requests bounds these frames. The reader learns of the refusal by
                    // no other way.
                    self.queue.push_own(refuse);
                }
            }
        }
    }

    fn answer(self: &Arc<Self>, header: &Header, placements: &[u8]) -> Result<Op, Refusal> {
        let memory = self.named(header.key)?;
        let mut position = 0;
        let mut pieces = Vec::new();
        for placement in wire::placements(placements) {
            let len = u64::from(placement.len);
            memory.span(placement.offset, len).ok_or(Refusal::OutOfRegion)?;
            pieces.push(Piece { local: placement.offset, remote: position, len });
            position += len;
        }
        // The answer's chunks lie in the sink from `header.offset` on.
        header.offset.checked_add(position).ok_or(Refusal::OutOfRegion)?;
        let task = Task::Serve { sink: header.total, start: header.offset };
        let (peer, id) = (Arc::downgrade(self), self.context().next_id());
        Ok(Op::new(peer, id, task, Pieces::joined(pieces), Some(memory)))
    }

    fn begin_answer(self: &Arc<Self>, op: Op) {
        let bytes = op.total;
        if self.queue.post(self.begin(op)) {
            self.rouse_for(bytes);
        }
    }

    /// Wakes the workers for `bytes` newly queued bytes: all workers for bulk, the home worker for small
    /// operations.
    pub fn rouse_for(&self, bytes: u64) {
        if bytes > crate::core::queue::SMALL_BYTES_MAX {
            self.context().sleepers.iter().for_each(|sleeper| {
                sleeper.rouse();
            })
        } else {
            self.wake_home_worker()
        }
    }

    /// Wakes the home worker if frames are queued: only its channels take small operations.
    pub fn wake_home_worker(&self) {
        if self.queue.has_work() {
            self.home().rouse();
        }
    }
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
