//! Frames about operations that carry no data: complete frames, the answers to messages and read requests, and
//! refusals.
//!
//! Invariant: answers that wait to be sent are bounded. Refusals beyond the bound are dropped.
//! Read next: `inbound.rs`.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::serving::Request;
use super::state::PeerState;
use crate::core::inbound::{Reply, Sink, place as place_message};
use crate::core::operation::{Hold, Op, Task, Verb};
use crate::core::queue::WITHDRAWN;
use crate::error::Error;
use ferrywire_memory::cuda::deferred_free;
use ferrywire_proto::inbox::Message;
use ferrywire_proto::limits;
use ferrywire_proto::operation::{Piece, Pieces};
use ferrywire_proto::outbox::Matched;
use ferrywire_proto::wire::{self, Header, Kind, Refusal};

impl PeerState {
    /// Handles a complete frame that has no payload for a region or sink.
    ///
    /// # Errors
    /// The reason to refuse the frame.
    pub fn arrived(
        self: &Arc<Self>,
        header: &Header,
        placements: &[u8],
        message: Vec<u8>,
    ) -> Result<(), Refusal> {
        match header.kind {
            Kind::Notify => self.inbound.notified(header, message),
            Kind::Send | Kind::Announce => {
                let replies = self.inbound.message(header, message)?;
                self.reply(replies);
                if header.total == WITHDRAWN {
                    self.message_withdrawn(header.offset);
                }
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
            // The receiver itself handles data frames and acknowledgements.
            Kind::Data | Kind::Ack => Ok(()),
        }
    }

    /// Sends and applies the actions that an arrived message, or a posted receive, causes.
    pub fn reply(&self, replies: Vec<Reply>) {
        // Most messages cause none.
        if replies.is_empty() {
            return;
        }
        let mut replies = VecDeque::from(replies);
        while let Some(reply) = replies.pop_front() {
            match reply {
                // Beyond this many unsent answers the peer floods this end with requests that are refused;
                // refusals are dropped.
                Reply::Frame(header)
                    if header.kind == Kind::Refuse
                        && self.queue.answers_waiting() >= limits::ANSWERS_WAITING_MAX => {}
                Reply::Frame(header) => self.queue.push_own(header),
                Reply::Place(op, message) => replies.extend(self.place(op, message)),
                Reply::Received(op) => drop(op),
                Reply::Truncated { op, message_bytes } => {
                    op.fail(Error::Truncated { tag: op.key(), message_bytes, buffer_bytes: op.total });
                }
                Reply::Cancelled(op) => op.cut_short(),
                Reply::Open { .. } => {
                    debug_assert!(false, "the inbox did not open a sink while it was locked")
                }
            }
        }
    }

    /// Copies a message to its receive. Returns the actions that follow if the receive could not take it.
    fn place(&self, op: Hold, message: Message) -> Vec<Reply> {
        let (mut op, mut message) = (op, message);
        // Several messages for a GPU are copied at once, and a thread that moves data must not wait for the GPU. Without a
        // channel no worker polls such copies.
        if op.on_gpu() && !message.bytes.is_empty() && (deferred_free::moves() || self.live_channels() > 0) {
            (op, message) = match self.messages.add(op, message) {
                Ok(is_first) => {
                    self.count_messages();
                    if is_first {
                        self.home().rouse();
                    }
                    return Vec::new();
                }
                Err(both) => both,
            };
        }
        if place_message(&message, &op) {
            return Vec::new();
        }
        // Return the message before the receive ends, so that a receive posted then gets this message, not a later one.
        self.inbound.return_message(message)
    }

    /// Ends the receives of short messages that are copied to their GPUs. Returns whether there were any.
    pub fn end_placed(&self) -> bool {
        if !self.messages.any() {
            return false;
        }
        let ended = self.messages.poll();
        self.count_messages();
        let worked = !ended.is_empty();
        for (letter, error) in ended {
            let Some(op) = letter.op().cloned() else { continue };
            match error {
                None => op.count(letter.message.bytes.len() as u64),
                // Return the message before the receive ends, so that a receive posted then gets this
                // message, not a later one.
                Some(error) => {
                    op.fail(error);
                    let replies = self.inbound.return_message(letter.into_message());
                    self.reply(replies);
                }
            }
        }
        worked
    }

    /// Counts the pinned memory of short messages.
    pub fn count_messages(&self) {
        let bytes = self.messages.pinned_bytes() as u64;
        self.counters
            .iter()
            .take(1)
            .for_each(|first| first.staging.message_bytes.store(bytes, Ordering::Relaxed));
    }

    /// Posts the receive of a message again that had begun and broke off, since its sender cannot send it once more.
    fn message_withdrawn(&self, number: u64) {
        let Some(sink) = self.inbound.take_withdrawn(number) else { return };
        self.post_again(sink);
    }

    /// Handles the peer's refusal of an announced send, or of a send that a receive here has matched.
    pub(super) fn peer_refused(&self, header: &Header) {
        let refusal = Refusal::parse(header.key as u8);
        if let Some(op) = self.queue.withdraw(header.transfer) {
            self.refused(&op, refusal);
        } else if let Some(sink) = self.inbound.close_sink(header.transfer) {
            let is_untouched = is_untouched(&sink);
            if refusal == Refusal::NoSink && sink.op.verb() == Verb::Recv && is_untouched {
                // The send was withdrawn before a byte was sent: the receive matches the next message.
                return self.post_again(sink);
            }
            if sink.op.memory.as_ref().is_some_and(|memory| memory.taken_back()) {
                // This end refused the bytes first; the peer's refusal is only its answer.
                let why = "the region was deregistered while a transfer filled it";
                sink.op.fail(Error::invalid("region", why));
                return self.stop_asking(&sink.op);
            }
            let why = if refusal != Refusal::Other && is_untouched {
                refusal.text().into()
            } else {
                "the peer ended the transfer before all its bytes were sent".into()
            };
            sink.op.fail(Error::AccessRefused { peer: self.info.name.clone(), why });
            self.stop_asking(&sink.op);
        }
    }

    /// Posts the receive of a sink again that was taken and is untouched.
    fn post_again(&self, sink: Arc<Sink>) {
        let op = sink.op.clone();
        // Drop the sink first. The next message may be matched and withdrawn at once, and must find the receive
        // untouched.
        drop(sink);
        let replies = self.inbound.post_again(op);
        self.reply(replies);
    }

    /// Tells the peer that an operation of this end failed, so that the peer does not wait for the
    /// operation's remaining bytes.
    pub(super) fn tell_failure(&self, op: &Op) {
        let mut header = Header::new(Kind::Refuse);
        header.key = Refusal::Other as u64;
        match &op.task {
            Task::Send { sink, uncut, .. } => {
                header.transfer = sink.load(Ordering::Relaxed);
                if uncut.load(Ordering::Relaxed) {
                    // No chunk was cut, so the receive can match the next message.
                    header.key = Refusal::NoSink as u64;
                }
            }
            Task::Serve { sink, .. } => header.transfer = *sink,
            Task::Write { .. } if !op.message.is_empty() => {
                header = Header::new(Kind::Notify);
                header.transfer = op.id;
                header.total = WITHDRAWN;
            }
            _ => {}
        }
        // Ids start at 1: a send that was not matched has no sink.
        if header.transfer != 0 {
            self.queue.push_own(header);
        }
    }
}

/// Whether nothing of a sink that was taken is placed, or will be.
fn is_untouched(sink: &Arc<Sink>) -> bool {
    Arc::strong_count(sink) == 1 && sink.op.is_untouched()
}

impl PeerState {
    /// Handles a read of a local region: answers with a write to the peer's sink, now or when another answer
    /// has ended.
    pub(super) fn serve(self: &Arc<Self>, header: &Header, placements: &[u8]) -> Result<(), Refusal> {
        let answer = self.answer(header, placements)?;
        if self.serving.admit(header, placements)? {
            self.begin_answer(answer);
        }
        Ok(())
    }

    /// Handles the end of an answer: answers the next waiting read. The region of that read may be gone
    /// meanwhile.
    pub fn served(self: &Arc<Self>) {
        // A lost or closed peer gets no more answers.
        while let Some(Request { header, placements }) =
            self.serving.next().filter(|_| self.failure().is_none())
        {
            match self.answer(&header, &placements) {
                Ok(answer) => return self.begin_answer(answer),
                Err(refusal) => {
                    let mut refuse = Header::new(Kind::Refuse);
                    refuse.transfer = header.total;
                    refuse.key = refusal as u64;
                    // The number of waiting requests bounds these frames. No other message reports the
                    // refusal to the reader.
                    self.queue.push_own(refuse);
                }
            }
        }
    }

    fn answer(self: &Arc<Self>, header: &Header, placements: &[u8]) -> Result<Op, Refusal> {
        let memory = self.context().reachable_region(header.key)?;
        let mut bytes = 0;
        for placement in wire::placements(placements) {
            let len = u64::from(placement.len);
            memory.span(placement.offset, len).ok_or(Refusal::OutOfRegion)?;
            bytes += len;
        }
        // The answer's chunks lie in the sink from `header.offset` on.
        header.offset.checked_add(bytes).ok_or(Refusal::OutOfRegion)?;
        let pieces = wire::placements(placements).scan(0, |position, placement| {
            let len = u64::from(placement.len);
            let remote = std::mem::replace(position, *position + len);
            Some(Piece { local: placement.offset, remote, len })
        });
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
}
