//! What a peer sends us, beyond bytes for a region: the peer's inbox, the sinks of operations that wait for data, and who
//! waits for a notification.
//!
//! A receive that has met its large message, and a read of ours, has a *sink*: a target that exists until it is full. The
//! inbox decides what meets what; here it gets its lock, and what it decides about sinks is done before that lock is free.
//!
//! Invariant: an operation that waits for data is in the inbox or has a sink, under every lock that others can take.
//! Read next: `ferrywire-proto`'s `inbox/`; `peer/`, which calls this for each frame.

use crate::core::operation::{Hold, Op};
use crate::core::waiting::{WaitList, WakeHandle};
use crate::error::Error;
use ferrywire_memory::Memory;
use ferrywire_net::IoVec;
use ferrywire_proto::inbox::{Inbox, Message, Reassembly};
use ferrywire_proto::wire::{Header, Refusal};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

#[cfg(test)]
mod tests;

/// A receive or read that waits for its data. While one lives, in the table or under a frame, the operation does not end.
pub(crate) struct Sink {
    pub op: Hold,
    target: Reassembly,
}

impl Sink {
    fn new(op: Hold, bytes: u64) -> Sink {
        let target =
            Reassembly::new(op.pieces.as_slice().iter().map(|piece| (piece.local, piece.len)), bytes);
        Sink { op, target }
    }

    /// Local memory for `len` bytes at `position` of the message.
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

    /// Whether the operation ended before its data was here, so that nothing may be placed any more.
    pub fn closed(&self) -> bool {
        self.target.is_closed()
    }

    fn fill(&self, bytes: u64) -> Result<bool, Refusal> {
        let full = self.target.fill(bytes)?;
        self.op.count(bytes);
        Ok(full)
    }
}

/// What has to be done because of something that arrived; no sink has to be opened any more.
pub(crate) type Reply = ferrywire_proto::inbox::Reply<Hold>;

/// The receiving side of one peer.
#[derive(Default)]
pub(crate) struct Inbound {
    inbox: Mutex<Inbox<Hold>>,
    sinks: RwLock<HashMap<u64, Arc<Sink>>>,
    arrivals: WaitList,
}

impl Inbound {
    fn lock(&self) -> MutexGuard<'_, Inbox<Hold>> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The sink with this key.
    pub fn sink(&self, key: u64) -> Result<Arc<Sink>, Refusal> {
        let sinks = self.sinks.read().unwrap_or_else(PoisonError::into_inner);
        sinks.get(&key).cloned().ok_or(Refusal::NoSink)
    }

    /// Makes a sink for an operation of ours; its key is the operation's id.
    pub fn open_sink(&self, op: Hold, bytes: u64) {
        let mut sinks = self.sinks.write().unwrap_or_else(PoisonError::into_inner);
        sinks.insert(op.id, Arc::new(Sink::new(op, bytes)));
    }

    fn remove_sink(&self, key: u64) -> Option<Arc<Sink>> {
        self.sinks.write().unwrap_or_else(PoisonError::into_inner).remove(&key)
    }

    /// Closes a sink: nothing new is placed into it, and frames of it that are not counted yet are refused. `None`
    /// for one whose data is all counted: [`Inbound::filled`] takes that one out.
    pub fn close_sink(&self, key: u64) -> Option<Arc<Sink>> {
        let mut sinks = self.sinks.write().unwrap_or_else(PoisonError::into_inner);
        if !sinks.get(&key)?.target.close() {
            return None;
        }
        sinks.remove(&key)
    }

    /// Bytes were placed into a sink; true when that was all of its data.
    pub fn filled(&self, sink: &Sink, bytes: u64) -> Result<bool, Refusal> {
        let is_full = sink.fill(bytes)?;
        if is_full {
            drop(self.remove_sink(sink.op.id));
        }
        Ok(is_full)
    }

    /// Bytes of a transfer with a notification were placed.
    pub fn count(&self, header: &Header) -> Result<(), Refusal> {
        if self.lock().count(header)? {
            self.arrivals.wake();
        }
        Ok(())
    }

    /// A notification arrived: with its bytes, on its own, or to follow a transfer's bytes.
    pub fn notified(&self, header: &Header, message: Vec<u8>) -> Result<(), Refusal> {
        let result = self.lock().notified(header, message);
        // One that is refused has had its turn, and may have released others.
        self.arrivals.wake();
        result
    }

    /// The next notification.
    pub fn take_notification(&self) -> Option<Vec<u8>> {
        self.lock().take_notification()
    }

    /// Whether a notification waits, or none will come any more.
    pub fn has_notification(&self) -> bool {
        self.lock().has_notification()
    }

    /// Whether notifications or messages wait for the user.
    pub fn holds_anything(&self) -> bool {
        self.lock().holds_anything()
    }

    /// Asks to be woken at the next notification.
    pub fn wake_at_notification(&self, handle: WakeHandle) {
        self.arrivals.add(handle, || self.has_notification());
    }

    /// It waits no more.
    pub fn forget_waiter(&self, handle: &WakeHandle) {
        self.arrivals.remove(handle);
    }

    /// A whole eager message, or the announcement of a large one, arrived.
    pub fn message(&self, header: &Header, bytes: Vec<u8>) -> Result<Vec<Reply>, Refusal> {
        let mut inbox = self.lock();
        inbox.message(header, bytes).map(|replies| self.open_sinks(replies))
    }

    /// Posts a receive.
    pub fn post(&self, op: Hold) -> Vec<Reply> {
        let mut inbox = self.lock();
        let replies = inbox.post(op);
        self.open_sinks(replies)
    }

    /// A message that its receive could not take; see [`Inbox::return_message`].
    pub fn return_message(&self, message: Message) -> Vec<Reply> {
        let mut inbox = self.lock();
        let replies = inbox.return_message(message);
        self.open_sinks(replies)
    }

    /// Posts a receive whose message was taken back, ahead of those that were posted after it.
    pub fn post_again(&self, op: Hold) -> Vec<Reply> {
        let mut inbox = self.lock();
        let replies = inbox.post_again(op);
        self.open_sinks(replies)
    }

    /// Takes a posted receive out that has met no message yet.
    pub fn unpost(&self, op: &Arc<Op>) -> Option<Hold> {
        self.lock().unpost(op.key(), |posted| Arc::ptr_eq(posted, op))
    }

    /// Opens the sinks of receives that have met their messages, with the inbox locked: else a receive would be nowhere for
    /// a moment, and whoever cancels it or closes the peer would not find it.
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

    /// The peer is gone: gives back everything that waits for it, failed.
    pub fn close(&self, why: &Error) -> Vec<Hold> {
        let mut ops = self.lock().close();
        let sinks = std::mem::take(&mut *self.sinks.write().unwrap_or_else(PoisonError::into_inner));
        ops.extend(sinks.into_values().filter(|sink| sink.target.close()).map(|sink| sink.op.clone()));
        ops.iter().for_each(|op| op.fail(why.clone()));
        self.arrivals.wake();
        ops
    }
}

/// Places a message for the operation that has met it; false if the operation failed instead, so that the message is
/// another's. Nothing is locked.
pub(crate) fn place(message: &Message, op: &Op) -> bool {
    let Some(memory) = op.memory.as_deref() else { return true };
    let placed = write(message, op, memory);
    if let Err(error) = &placed {
        op.fail(error.clone());
    }
    placed.is_ok()
}

fn write(message: &Message, op: &Op, memory: &Memory) -> Result<(), Error> {
    // The operation holds the memory since before it was posted: if it is the user's, a caller that takes it back after
    // this waits for the operation; if it is ours, for the call.
    let _call = memory.call();
    if memory.taken_back() {
        return Err(Error::invalid("region", "it was deregistered before the message came"));
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
