//! Data that a peer sends outside regions: its inbox, the sinks of operations that wait for data, and the
//! threads that wait for notifications.
//!
//! A receive that has been matched with a message whose bytes still come, and a read, has a *sink*: a target that
//! exists until it is full. The inbox of `ferrywire-proto` matches receives and messages. This file adds the lock, and
//! opens the sinks before the lock is released.
//!
//! Invariant: under every lock that another thread can take, an operation that waits for data is in the inbox
//! or has a sink.
//! Read next: `ferrywire-proto`'s `inbox/`; `peer/`, which calls this for each frame.

use crate::core::operation::{Hold, Op};
use crate::core::waiting::{WaitList, WakeHandle};
use crate::error::Error;
use ferrywire_memory::Memory;
use ferrywire_net::IoVec;
use ferrywire_proto::inbox::{Inbox, Message, Reassembly};
use ferrywire_proto::wire::{Header, Refusal};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[cfg(test)]
mod tests;

/// The target of a receive or read that waits for data. While the sink lives, in the table or under a frame,
/// the operation does not end.
pub(crate) struct Sink {
    pub op: Hold,
    target: Reassembly,
    /// The eager message that has begun, and comes here in one frame.
    begun: Option<Begun>,
}

/// An eager message that a receive has matched when its header came.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Begun {
    number: u64,
    bytes: u64,
}

impl Sink {
    pub fn new(op: Hold, bytes: u64) -> Sink {
        let target =
            Reassembly::new(op.pieces.as_slice().iter().map(|piece| (piece.local, piece.len)), bytes);
        Sink { op, target, begun: None }
    }

    /// Appends the local memory for `len` bytes at `position` of the message.
    ///
    /// # Errors
    /// [`Refusal::NoSink`] if the sink is closed or its memory taken back, [`Refusal::OutOfRegion`] for a range
    /// outside the message.
    pub fn locate(&self, position: u64, len: u64, out: &mut Vec<IoVec>) -> Result<(), Refusal> {
        let memory: &Memory = self.op.memory.as_deref().ok_or(Refusal::NoSink)?;
        if memory.taken_back() {
            return Err(Refusal::NoSink);
        }
        for (offset, len) in self.target.locate(position, len)? {
            let base = memory.span(offset, len).ok_or(Refusal::OutOfRegion)?;
            out.push(IoVec::new(base, len as usize));
        }
        Ok(())
    }

    /// Whether the sink is of an eager message that has begun.
    pub fn has_begun(&self) -> bool {
        self.begun.is_some()
    }

    /// Whether the operation ended before its data arrived, so that nothing more may be placed.
    pub fn closed(&self) -> bool {
        self.target.is_closed()
    }

    /// Takes the bytes of a message that has begun out of its receive's memory, since the receive has ended without it:
    /// the header of the frame as of any message, and a buffer with all but the last `left` bytes. `None` if the frame
    /// is not of such a message, or the memory is the user's again.
    pub fn take_out(&self, header: &Header, left: usize) -> Option<(Header, Vec<u8>)> {
        let is_its =
            |begun: &Begun| begun.bytes == u64::from(header.len) && header.offset == 0 && header.notify == 0;
        let (begun, memory) = (self.begun.filter(is_its)?, self.op.memory.as_deref()?);
        if memory.is_gone() {
            return None;
        }
        let mut message = vec![0; header.len as usize];
        let mut rest = message.get_mut(..(header.len as usize).checked_sub(left)?)?;
        for piece in self.op.pieces.as_slice() {
            let (now, later) = rest.split_at_mut(rest.len().min(piece.len as usize));
            memory.read(piece.local, now).ok()?;
            rest = later;
        }
        Some((header.for_inbox(self.op.key(), begun.number), message))
    }

    fn fill(&self, bytes: u64) -> Result<bool, Refusal> {
        let full = self.target.fill(bytes)?;
        self.op.count(bytes);
        Ok(full)
    }
}

/// An action that an arrived frame causes. Sinks are already open.
pub(crate) type Reply = ferrywire_proto::inbox::Reply<Hold>;

/// The sinks of a peer, by key. Keys are the ids of operations, which follow each other, so neighbours have different
/// locks: a thread that posts reads does not wait for the threads that end others.
#[derive(Default)]
struct Sinks([Mutex<HashMap<u64, Arc<Sink>>>; 16]);

impl Sinks {
    fn with(&self, key: u64) -> MutexGuard<'_, HashMap<u64, Arc<Sink>>> {
        let part = &self.0[key as usize % self.0.len()];
        part.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn insert(&self, sink: Sink) -> Arc<Sink> {
        let sink = Arc::new(sink);
        self.with(sink.op.id).insert(sink.op.id, sink.clone());
        sink
    }

    /// The sink of the message with this number, if the message has begun.
    fn begun(&self, number: u64) -> Option<Arc<Sink>> {
        let is_it = |sink: &&Arc<Sink>| sink.begun.is_some_and(|begun| begun.number == number);
        (0..self.0.len() as u64).find_map(|part| self.with(part).values().find(is_it).cloned())
    }

    fn take_all(&self) -> impl Iterator<Item = Arc<Sink>> + '_ {
        (0..self.0.len() as u64).flat_map(|part| std::mem::take(&mut *self.with(part)).into_values())
    }
}

/// The receiving side of one peer.
#[derive(Default)]
pub(crate) struct Inbound {
    inbox: Mutex<Inbox<Hold>>,
    sinks: Sinks,
    arrivals: WaitList,
}

impl Inbound {
    fn lock(&self) -> MutexGuard<'_, Inbox<Hold>> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks up the sink with this key.
    ///
    /// # Errors
    /// [`Refusal::NoSink`] if there is none.
    pub fn sink(&self, key: u64) -> Result<Arc<Sink>, Refusal> {
        self.sinks.with(key).get(&key).cloned().ok_or(Refusal::NoSink)
    }

    /// Creates a sink for `bytes` bytes of an operation. Its key is the operation's id.
    pub fn open_sink(&self, op: Hold, bytes: u64) {
        self.sinks.insert(Sink::new(op, bytes));
    }

    fn remove_sink(&self, key: u64) -> Option<Arc<Sink>> {
        self.sinks.with(key).remove(&key)
    }

    /// Closes a sink: no new bytes are placed into it, and frames that are not counted yet are refused.
    /// Returns `None` if all its data is counted: then [`Inbound::filled`] removes the sink.
    pub fn close_sink(&self, key: u64) -> Option<Arc<Sink>> {
        // The message of a sink that is closed is known to come to the inbox.
        let mut inbox = self.lock();
        let mut sinks = self.sinks.with(key);
        let sink = sinks.get(&key)?;
        if !sink.target.close() {
            return None;
        }
        if let Some(Begun { number, bytes }) = sink.begun {
            inbox.give_up_begun(number, sink.op.key(), bytes);
        }
        sinks.remove(&key)
    }

    /// Counts `bytes` bytes placed into a sink. Returns true if the sink is now full.
    ///
    /// # Errors
    /// [`Refusal::NoSink`] if the sink is closed, [`Refusal::OutOfRegion`] for more bytes than announced.
    pub fn filled(&self, sink: &Sink, bytes: u64) -> Result<bool, Refusal> {
        let is_full = sink.fill(bytes)?;
        if is_full {
            drop(self.remove_sink(sink.op.id));
        }
        Ok(is_full)
    }

    /// Counts the placed bytes of a transfer with a notification.
    ///
    /// # Errors
    /// [`Refusal::Limit`] if the peer has too many such transfers in flight.
    pub fn count(&self, header: &Header) -> Result<(), Refusal> {
        if self.lock().count(header)? {
            self.arrivals.wake();
        }
        Ok(())
    }

    /// Handles a notification: one that came with its bytes, alone, or behind a transfer's bytes.
    ///
    /// # Errors
    /// [`Refusal::Limit`] if too many notifications are held, [`Refusal::Other`] for one that is here already.
    pub fn notified(&self, header: &Header, message: Vec<u8>) -> Result<(), Refusal> {
        let result = self.lock().notified(header, message);
        // A refused notification keeps its number in the order, and may have released later ones.
        self.arrivals.wake();
        result
    }

    /// Takes the next notification.
    pub fn take_notification(&self) -> Option<Vec<u8>> {
        self.lock().take_notification()
    }

    /// Whether a notification waits, or no more notification can come.
    pub fn has_notification(&self) -> bool {
        self.lock().has_notification()
    }

    /// Whether notifications or messages wait for the user.
    pub fn holds_anything(&self) -> bool {
        self.lock().holds_anything()
    }

    /// Registers `handle` to be woken by the next notification.
    pub fn wake_at_notification(&self, handle: WakeHandle) {
        self.arrivals.add(handle, || self.has_notification());
    }

    /// Removes a waiter that no longer waits.
    pub fn forget_waiter(&self, handle: &WakeHandle) {
        self.arrivals.remove(handle);
    }

    /// Handles an eager message, or the announcement of a large one.
    ///
    /// # Errors
    /// [`Refusal::Limit`] if the peer has no credit for it, [`Refusal::Other`] if its number was used before.
    pub fn message(&self, header: &Header, bytes: Vec<u8>) -> Result<Vec<Reply>, Refusal> {
        let mut inbox = self.lock();
        inbox.message(header, bytes).map(|replies| self.open_sinks(replies))
    }

    /// Matches an eager message whose header has come with its receive. Returns the sink of its bytes, and the actions
    /// that the match causes; `None` if the message is to arrive whole first. A message that broke off with its
    /// connection comes again to the sink that it had.
    pub fn begin(&self, header: &Header) -> Option<(Arc<Sink>, Vec<Reply>)> {
        let mut inbox = self.lock();
        // Copies to a GPU may take long, and the frames behind would wait for them.
        let takes = |op: &Hold| !op.on_gpu() && !op.memory.as_ref().is_some_and(|memory| memory.taken_back());
        let Some((op, replies)) = inbox.begin(header, takes) else {
            if header.offset >= inbox.next_number() {
                return None;
            }
            drop(inbox);
            let is_it = |sink: &Arc<Sink>| {
                sink.op.key() == header.key
                    && sink.begun.is_some_and(|begun| begun.bytes == u64::from(header.len))
            };
            return self.sinks.begun(header.offset).filter(is_it).map(|sink| (sink, Vec::new()));
        };
        let (number, bytes) = (header.offset, u64::from(header.len));
        let sink = self.sinks.insert(Sink { begun: Some(Begun { number, bytes }), ..Sink::new(op, bytes) });
        Some((sink, self.open_sinks(replies)))
    }

    /// Ends a message that has begun, if the sink is of one. Returns the actions that this causes.
    pub fn end_begun(&self, sink: &Sink) -> Vec<Reply> {
        sink.begun.map_or_else(Vec::new, |begun| self.lock().end_begun(begun.bytes))
    }

    /// Forgets the message of a sink that was closed, since its bytes cannot be had any more.
    pub fn forget_given_up(&self, sink: &Sink) -> Vec<Reply> {
        sink.begun.map_or_else(Vec::new, |begun| {
            let mut inbox = self.lock();
            let replies = inbox.forget_given_up(begun.number);
            self.open_sinks(replies)
        })
    }

    /// Takes the sink of a message that has begun and was withdrawn by its sender.
    pub fn take_withdrawn(&self, number: u64) -> Option<Arc<Sink>> {
        let key = self.sinks.begun(number)?.op.id;
        let mut inbox = self.lock();
        let mut sinks = self.sinks.with(key);
        let is_it = |sink: &&Arc<Sink>| sink.begun.is_some_and(|begun| begun.number == number);
        if !sinks.get(&key).filter(is_it)?.target.close() {
            return None;
        }
        let sink = sinks.remove(&key)?;
        sink.begun.iter().for_each(|begun| inbox.withdraw_begun(begun.bytes));
        Some(sink)
    }

    /// Posts a receive. Returns the actions that a message it matches causes.
    pub fn post(&self, op: Hold) -> Vec<Reply> {
        let mut inbox = self.lock();
        let replies = inbox.post(op);
        self.open_sinks(replies)
    }

    /// Returns a message that its receive could not take; see [`Inbox::return_message`].
    pub fn return_message(&self, message: Message) -> Vec<Reply> {
        let mut inbox = self.lock();
        let replies = inbox.return_message(message);
        self.open_sinks(replies)
    }

    /// Posts a receive whose message was withdrawn, ahead of receives that were posted after it.
    pub fn post_again(&self, op: Hold) -> Vec<Reply> {
        let mut inbox = self.lock();
        let replies = inbox.post_again(op);
        self.open_sinks(replies)
    }

    /// Withdraws a posted receive that has matched no message yet.
    pub fn unpost(&self, op: &Arc<Op>) -> Option<Hold> {
        self.lock().unpost(op.key(), |posted| Arc::ptr_eq(posted, op))
    }

    /// Opens the sinks of matched receives while the inbox is locked. Otherwise a receive would be in neither
    /// for a moment, and a thread that cancels it or closes the peer would not find it.
    fn open_sinks(&self, replies: Vec<Reply>) -> Vec<Reply> {
        let open = |reply| match reply {
            Reply::Open { op, bytes } => {
                self.open_sink(op, bytes);
                None
            }
            other => Some(other),
        };
        replies.into_iter().filter_map(open).collect()
    }

    /// Closes the inbox, since the peer is gone. Returns everything that waits for the peer, failed with
    /// `why`. A thread that no longer finds its posted receive sees that the receive has failed.
    pub fn close(&self, why: &Error) -> Vec<Hold> {
        let mut inbox = self.lock();
        let mut ops = inbox.close();
        ops.iter().for_each(|op| op.fail(why.clone()));
        drop(inbox);
        let sinks = self.sinks.take_all().filter(|sink| sink.target.close());
        ops.extend(sinks.map(|sink| sink.op.clone()).inspect(|op| op.fail(why.clone())));
        self.arrivals.wake();
        ops
    }
}

/// Copies a message to its matched receive. Returns false if the operation failed instead, so that the
/// message is for another receive. The caller holds no lock.
pub(crate) fn place(message: &Message, op: &Op) -> bool {
    let Some(memory) = op.memory.as_deref() else { return true };
    let placed = write(message, op, memory);
    if let Err(error) = &placed {
        op.fail(error.clone());
    }
    placed.is_ok()
}

/// The error of a receive whose memory was taken back before its message was placed.
pub(crate) fn taken_back() -> Error {
    Error::invalid("region", "the region was deregistered before the message came")
}

fn write(message: &Message, op: &Op, memory: &Memory) -> Result<(), Error> {
    // The operation has held the memory since it was posted. A caller that takes user-owned memory back after
    // this check waits for the operation; for engine-owned memory it waits for `_call`.
    let _call = memory.call();
    if memory.taken_back() {
        return Err(taken_back());
    }
    let mut rest = &message.bytes[..];
    for piece in op.pieces.as_slice() {
        let (now, later) = rest.split_at(rest.len().min(piece.len as usize));
        memory.write(piece.local, now)?;
        rest = later;
    }
    op.count(message.bytes.len() as u64);
    Ok(())
}
