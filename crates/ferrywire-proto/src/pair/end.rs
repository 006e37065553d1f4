//! One end: outbox, inbox, sinks and memory, combined as in the engine's `core/peer/`.
//!
//! Invariant: an operation ends once, when its last token comes back.

use std::collections::{HashMap, HashSet, VecDeque};
use std::rc::Rc;

use crate::inbox::{Inbox, Reassembly, Reply};
use crate::limits::PeerLimits;
use crate::operation::testing::{Facts, Model};
use crate::operation::{Operation, Piece, Pieces, Verb};
use crate::outbox::{Body, Frame, Matched, Outbox, Read};
use crate::wire::{self, Header, Kind, Placement, Refusal, WITHDRAWN};

/// Key of the single region of each end.
pub(super) const REGION: u64 = 77;
/// Bytes of one read request.
const READ_REQUEST_BYTES: u64 = 300;
/// Largest read in bytes that goes before longer ones.
const SHORT_READ_BYTES_MAX: u64 = 100;

struct Sink {
    op: Model,
    target: Reassembly,
    /// The number and the length of the eager message that has begun and comes here.
    begun: Option<(u64, u64)>,
}

pub(super) struct End {
    pub outbox: Outbox<Model>,
    pub inbox: Inbox<Model>,
    sinks: HashMap<u64, Sink>,
    pub memory: Vec<u8>,
    /// How often the peer has placed each byte.
    pub placed: Vec<u8>,
    next_id: u64,
    /// Operations that have ended since the last check.
    pub ended: Vec<Rc<Facts>>,
    /// Tags whose receives may match messages out of order, because a receive was posted again or a message
    /// held again.
    pub disordered: HashSet<u64>,
}

fn read_of(facts: &Facts) -> Read {
    Read { id: facts.id, is_short: facts.total <= SHORT_READ_BYTES_MAX }
}

impl End {
    pub fn new(limits: PeerLimits) -> End {
        End {
            outbox: Outbox::new(limits),
            inbox: Inbox::new(limits),
            sinks: HashMap::new(),
            memory: Vec::new(),
            placed: Vec::new(),
            next_id: 0,
            ended: Vec::new(),
            disordered: HashSet::new(),
        }
    }

    /// A new operation id of this end.
    pub fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// Asserts that the end waits for no frame and no operation.
    pub fn check_idle(&self) {
        assert!(self.sinks.is_empty(), "a sink is left");
        self.outbox.check_idle();
        self.inbox.check_idle();
    }

    // ---- operations ----

    /// Takes a token back; the last one ends its operation.
    pub fn release(&mut self, op: Model) {
        let facts = op.0.clone();
        drop(op);
        if facts.tokens.get() == 0 {
            self.end(&facts);
        }
    }

    fn cut_short(&mut self, op: Model) {
        op.0.fail("cancelled");
        self.release(op);
    }

    fn end(&mut self, facts: &Rc<Facts>) {
        assert!(!facts.has_ended.replace(true), "{facts:?} ended twice");
        self.ended.push(facts.clone());
        if facts.has_failed() {
            self.tell_failure(facts);
        }
        if facts.verb == Verb::Read {
            let kept = self.outbox.forget_requests(read_of(facts));
            assert!(kept.is_empty(), "a request of an ended read holds it");
            // A read without bytes has no request.
            if read_of(facts).is_short && facts.total > 0 {
                self.outbox.short_reads_ended(1);
            }
        }
        if facts.epoch.borrow().as_ref().is_some_and(|epoch| epoch.leave(1)) {
            self.outbox.release_notifications();
        }
        if let Some(parent) = &facts.parent {
            self.release(Model(parent.clone()));
        }
    }

    fn tell_failure(&mut self, facts: &Facts) {
        let mut header = Header::new(Kind::Refuse);
        header.key = Refusal::Other as u64;
        match facts.verb {
            Verb::Send => {
                header.transfer = facts.sink.get();
                if facts.uncut.get() {
                    header.key = Refusal::NoSink as u64;
                }
            }
            Verb::Serve => header.transfer = facts.key,
            Verb::Write if !facts.message.is_empty() => {
                header = Header { transfer: facts.id, total: WITHDRAWN, ..Header::new(Kind::Notify) };
            }
            _ => {}
        }
        if header.transfer != 0 {
            self.say(header);
        }
    }

    fn say(&mut self, header: Header) {
        self.outbox.push_own(Frame::bare(header)).expect("it is open");
    }

    pub fn post(&mut self, op: Model) {
        self.outbox.post(op).expect("it is open");
    }

    /// Writes several children with one notification behind all of them; returns the parent.
    pub fn write_joined(&mut self, parts: Vec<Pieces>, message: Vec<u8>) -> Rc<Facts> {
        let id = self.id();
        let nothing = Pieces::One(Piece { local: 0, remote: 0, len: 0 });
        let parent = Model::over(id, Verb::Write, 0, nothing).with(|facts| {
            facts.total = parts.iter().map(Pieces::total).sum();
            facts.is_parent = true;
            facts.message = message;
        });
        self.outbox.join(&parent);
        for pieces in parts {
            let child = Model::over(id, Verb::Write, REGION, pieces);
            // The child returns this token at its end.
            std::mem::forget(parent.retain());
            let child = child.with(|facts| facts.parent = Some(parent.0.clone()));
            parent.0.children.borrow_mut().push(child.0.clone());
            self.post(child);
        }
        let facts = parent.0.clone();
        if facts.message.is_empty() {
            self.release(parent);
        } else {
            self.outbox.post_behind_children(parent).expect("it is open");
        }
        facts
    }

    pub fn send(&mut self, tag: u64, pieces: Pieces, change: impl FnOnce(&mut Facts)) -> Rc<Facts> {
        let id = self.id();
        let make = |number| {
            let op = Model::over(id, Verb::Send, tag, pieces);
            Some(op.with(|facts| {
                facts.number = number;
                change(facts);
            }))
        };
        let op = self.outbox.number_send(make).expect("it is open");
        let facts = op.0.clone();
        self.outbox.post_joined(op).expect("it is open");
        facts
    }

    pub fn receive(&mut self, op: Model) {
        let replies = self.inbox.post(op);
        self.reply(replies);
    }

    pub fn read(&mut self, op: Model) {
        self.outbox.join(&op);
        if op.total() == 0 {
            return self.release(op);
        }
        let posting = op.retain();
        self.open_sink(op, posting.total(), None);
        let (mut position, mut start, mut ranges) = (0, 0, Vec::new());
        for piece in posting.pieces().to_vec() {
            let mut done = 0;
            while done < piece.len {
                let len = (piece.len - done).min(READ_REQUEST_BYTES);
                ranges.push(Placement { offset: piece.remote + done, len: len as u32 });
                (done, position) = (done + len, position + len);
                if position - start >= READ_REQUEST_BYTES || position == posting.total() {
                    self.ask(&posting, start, &std::mem::take(&mut ranges));
                    start = position;
                }
            }
        }
        self.release(posting);
    }

    fn ask(&mut self, op: &Model, start: u64, ranges: &[Placement]) {
        let mut header = Header::new(Kind::Read);
        (header.transfer, header.key, header.offset, header.total) = (op.id(), REGION, start, op.id());
        header.segments = ranges.len() as u16;
        let mut placements = Vec::new();
        ranges.iter().for_each(|range| range.encode_into(&mut placements));
        let request =
            Frame { header, placements: placements.into(), body: Body::None, op: Some(op.retain()) };
        self.outbox.ask(request, read_of(&op.0)).expect("it is open");
    }

    pub fn cancel(&mut self, facts: &Rc<Facts>) {
        if facts.has_ended.get() {
            return;
        }
        facts.cancelled.set(true);
        for child in facts.children.borrow().iter() {
            self.cancel(child);
        }
        let is_it = |op: &Model| Rc::ptr_eq(&op.0, facts);
        match facts.verb {
            Verb::Recv => match self.inbox.unpost(facts.key, is_it) {
                Some(op) => self.cut_short(op),
                None => self.end_sink(facts),
            },
            Verb::Read => self.end_sink(facts),
            verb => {
                let taken = match verb {
                    Verb::Send => self.outbox.take_back(facts.id),
                    _ => None,
                };
                if let Some(op) = taken.or_else(|| self.outbox.take_out(verb, is_it)) {
                    self.cut_short(op);
                }
            }
        }
    }

    // ---- sinks ----

    fn open_sink(&mut self, op: Model, bytes: u64, begun: Option<(u64, u64)>) {
        let ranges: Vec<_> = op.pieces().iter().map(|piece| (piece.local, piece.len)).collect();
        let sink = Sink { target: Reassembly::new(ranges, bytes), op, begun };
        assert!(self.sinks.insert(sink.op.id(), sink).is_none(), "two sinks with one key");
    }

    fn close_sink(&mut self, key: u64) -> Option<Model> {
        if !self.sinks.get(&key)?.target.close() {
            return None;
        }
        let Sink { op, begun, .. } = self.sinks.remove(&key)?;
        if let Some((number, bytes)) = begun {
            self.inbox.give_up_begun(number, op.key(), bytes);
        }
        Some(op)
    }

    fn end_sink(&mut self, facts: &Facts) {
        if let Some(op) = self.close_sink(facts.id) {
            self.cut_short(op);
        }
        self.stop_asking(facts);
    }

    fn stop_asking(&mut self, facts: &Facts) {
        if facts.verb == Verb::Read {
            let kept = self.outbox.forget_requests(read_of(facts));
            kept.into_iter().filter_map(|frame| frame.op).for_each(|op| self.release(op));
        }
    }

    /// Handles the header of a message whose bytes follow. Returns the header of the frame that goes to its receive, if
    /// that is known.
    pub fn begin(&mut self, header: &Header) -> Option<Header> {
        if header.kind != Kind::Send || header.len == 0 {
            return None;
        }
        let key = match self.inbox.begin(header, |op| !op.0.is_unplaceable) {
            Some((op, replies)) => {
                let (key, bytes) = (op.id(), u64::from(header.len));
                self.open_sink(op, bytes, Some((header.offset, bytes)));
                self.reply(replies);
                key
            }
            None => self.begun(header.offset)?,
        };
        Some(header.for_sink(key))
    }

    /// The key of the sink of a message that has begun.
    fn begun(&self, number: u64) -> Option<u64> {
        let is_it = |(_, sink): &(&u64, &Sink)| sink.begun.is_some_and(|(begun, _)| begun == number);
        self.sinks.iter().find(is_it).map(|(key, _)| *key)
    }

    /// Handles the withdrawal of a message that may have begun.
    fn withdrawn(&mut self, number: u64) {
        let Some(sink) = self.begun(number).and_then(|key| self.sinks.remove(&key)) else { return };
        assert!(sink.target.close(), "the sink of a message that is withdrawn is full");
        let (_, bytes) = sink.begun.expect("it was found by its number");
        self.disordered.insert(sink.op.key());
        self.inbox.withdraw_begun(bytes);
        let replies = self.inbox.post_again(sink.op);
        self.reply(replies);
    }

    // ---- frames ----

    /// Handles a complete frame.
    pub fn arrived(&mut self, header: &Header, placements: &[u8], body: &[u8]) -> Result<(), Refusal> {
        match header.kind {
            Kind::Data => self.data_arrived(header, placements, body),
            Kind::Notify => self.inbox.notified(header, body.to_vec()),
            Kind::Send | Kind::Announce => {
                let replies = self.inbox.message(header, body.to_vec())?;
                self.reply(replies);
                if header.total == WITHDRAWN {
                    self.withdrawn(header.offset);
                }
                Ok(())
            }
            Kind::Match => {
                match self.outbox.matched(header.transfer, header.key) {
                    Matched::Empty(op) => self.release(op),
                    Matched::Queued(_) => {}
                    Matched::Unknown => {
                        let mut refuse = Header::new(Kind::Refuse);
                        (refuse.transfer, refuse.key) = (header.key, Refusal::NoSink as u64);
                        self.say(refuse);
                    }
                }
                Ok(())
            }
            Kind::Credit => {
                self.outbox.return_credit(header.total);
                Ok(())
            }
            Kind::Read => {
                let mut position = 0;
                let pieces = wire::placements(placements).map(|range| {
                    let len = u64::from(range.len);
                    position += len;
                    Piece { local: range.offset, remote: position - len, len }
                });
                let pieces = Pieces::joined(pieces);
                let op = Model::over(self.id(), Verb::Serve, header.total, pieces);
                self.post(op.with(|facts| facts.number = header.offset));
                Ok(())
            }
            Kind::Refuse => {
                self.peer_refused(header);
                Ok(())
            }
            Kind::Ack => unreachable!("it is no frame of the window"),
        }
    }

    fn place(&mut self, offset: u64, bytes: &[u8]) {
        let range = offset as usize..offset as usize + bytes.len();
        self.memory[range.clone()].copy_from_slice(bytes);
        self.placed[range].iter_mut().for_each(|count| *count += 1);
    }

    fn data_arrived(&mut self, header: &Header, placements: &[u8], body: &[u8]) -> Result<(), Refusal> {
        let (payload, message) = body.split_at(header.len as usize);
        if header.flags & wire::FLAG_SINK != 0 {
            self.fill_sink(header, payload)?;
        } else if header.segments == 0 {
            assert_eq!(header.key, REGION);
            self.place(header.offset, payload);
        } else {
            let mut rest = payload;
            for range in wire::placements(placements) {
                let (now, later) = rest.split_at(range.len as usize);
                self.place(range.offset, now);
                rest = later;
            }
            assert!(rest.is_empty());
        }
        if header.flags & wire::FLAG_COUNTED != 0 {
            self.inbox.count(header)?;
        }
        if header.notify > 0 { self.inbox.notified(header, message.to_vec()) } else { Ok(()) }
    }

    fn fill_sink(&mut self, header: &Header, payload: &[u8]) -> Result<(), Refusal> {
        let sink = self.sinks.get(&header.key).ok_or(Refusal::NoSink)?;
        let len = u64::from(header.len);
        let ranges: Vec<_> = sink.target.locate(header.offset, len)?.collect();
        let (full, frame) = (sink.target.fill(len)?, sink.op.retain());
        let mut rest = payload;
        for (offset, len) in ranges {
            let (now, later) = rest.split_at(len as usize);
            self.place(offset, now);
            rest = later;
        }
        frame.0.count(len);
        if full {
            let sink = self.sinks.remove(&header.key).expect("it was here");
            if let Some((_, bytes)) = sink.begun {
                let replies = self.inbox.end_begun(bytes);
                self.reply(replies);
            }
            self.release(sink.op);
        } else if frame.verb() == Verb::Read {
            self.outbox.answered(read_of(&frame.0), frame.0.moved.get());
        }
        self.release(frame);
        Ok(())
    }

    fn reply(&mut self, replies: Vec<Reply<Model>>) {
        let mut replies = VecDeque::from(replies);
        while let Some(reply) = replies.pop_front() {
            match reply {
                Reply::Frame(header) => self.say(header),
                Reply::Open { op, bytes } => self.open_sink(op, bytes, None),
                Reply::Place(op, message) if op.0.is_unplaceable => {
                    op.0.fail("its memory was revoked");
                    self.disordered.insert(op.key());
                    replies.extend(self.inbox.return_message(message));
                    self.release(op);
                }
                Reply::Place(op, message) => {
                    let mut rest = &message.bytes[..];
                    for piece in op.pieces() {
                        let (now, later) = rest.split_at(rest.len().min(piece.len as usize));
                        self.place(piece.local, now);
                        rest = later;
                    }
                    op.0.count(message.bytes.len() as u64);
                    self.release(op);
                }
                Reply::Received(op) => self.release(op),
                Reply::Truncated { op, .. } => {
                    op.0.fail("truncated");
                    self.release(op);
                }
                Reply::Cancelled(op) => self.cut_short(op),
            }
        }
    }

    fn peer_refused(&mut self, header: &Header) {
        let refusal = Refusal::parse(header.key as u8);
        if let Some(op) = self.outbox.withdraw(header.transfer) {
            refused(&op.0, refusal);
            self.release(op);
        } else if let Some(op) = self.close_sink(header.transfer) {
            let untouched = op.0.moved.get() == 0 && op.0.tokens.get() == 1;
            if refusal == Refusal::NoSink && op.verb() == Verb::Recv && untouched {
                self.disordered.insert(op.key());
                let replies = self.inbox.post_again(op);
                return self.reply(replies);
            }
            op.0.fail("the peer withdrew it");
            self.stop_asking(&op.0.clone());
            self.release(op);
        }
    }

    /// Handles that the peer has placed or refused a frame.
    pub fn delivered(&mut self, frame: Frame<Model>, refusal: Option<Refusal>) {
        self.outbox.had(&frame.header);
        let Some(op) = frame.op else { return };
        if let Some(refusal) = refusal {
            refused(&op.0, refusal);
        }
        match (frame.header.kind, frame.body) {
            (Kind::Read, _) if op.is_failing() => self.end_sink(&op.0.clone()),
            (Kind::Read, _) | (_, Body::None) => {}
            (_, Body::Chunk(_)) => op.0.count(frame.header.len.into()),
        }
        self.release(op);
    }

    /// Takes back an operation that ended without needing a frame.
    pub fn dropped(&mut self, op: Model) {
        self.cut_short(op);
    }

    /// The bytes that follow a frame's placements.
    pub fn body(&self, frame: &Frame<Model>) -> Vec<u8> {
        let mut body = Vec::new();
        let Some(op) = &frame.op else { return body };
        if let Body::Chunk(chunk) = &frame.body {
            for (offset, len) in chunk.locals(op.pieces()) {
                body.extend_from_slice(&self.memory[offset as usize..(offset + len) as usize]);
            }
        }
        if frame.header.notify > 0 || frame.header.kind == Kind::Notify {
            body.extend_from_slice(&op.0.message);
        }
        body
    }
}

/// Fails an operation because the peer refused one of its frames.
pub(super) fn refused(facts: &Facts, refusal: Refusal) {
    facts.fail(&format!("refused: {refusal:?}"));
}
