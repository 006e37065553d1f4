//! What a peer sends beyond bytes for a region: messages to match, data for receives and reads, notifications.
//!
//! Three parts: `matching`, which finds the receive of each message; `reassembly`, the target of a message or read whose
//! data come in frames; `notifications`. An [`Inbox`] decides, and its caller acts: what has to happen because of a frame
//! comes back as [`Reply`]s, in the order in which it has to happen.
//!
//! Invariant: whatever a peer can make an inbox hold is charged to a limit of `limits.rs`.
//! Pure: no lock, no memory. Read next: `matching.rs`, then `outbox/mod.rs`, the other direction.

mod matching;
mod notifications;
mod reassembly;
#[cfg(test)]
mod tests;

pub use reassembly::Reassembly;

use crate::limits::{self, PeerLimits};
use crate::operation::Operation;
use crate::wire::{Header, Refusal};
use matching::Matching;
use notifications::Notifications;

/// A message that came whole.
#[derive(Debug)]
pub struct Message {
    tag: u64,
    number: u64,
    /// What it says.
    pub bytes: Vec<u8>,
}

impl Message {
    /// What it takes of the peer's credit until a receive has met it.
    pub fn cost(&self) -> usize {
        self.bytes.len() + limits::EAGER_OVERHEAD_BYTES
    }
}

/// What has to be done because of something that arrived, or was posted.
#[derive(Debug)]
pub enum Reply<O> {
    /// This frame has to be sent.
    Frame(Header),
    /// A receive has met a large message: its [`Reassembly`] has to be there under the operation's id before anything
    /// else happens, the inbox's next call included. The frame that asks for the data follows.
    Open {
        /// The receive.
        op: O,
        /// Bytes of the message.
        bytes: u64,
    },
    /// This message has to be placed, and the receive has ended then. A GPU may take long for that. A message that cannot
    /// be placed has to come back: [`Inbox::return_message`].
    Place(O, Message),
    /// The receive has a message without bytes and has ended.
    Received(O),
    /// The receive has met a message that is longer than it, and has failed.
    Truncated {
        /// The receive.
        op: O,
        /// Bytes of the message.
        message_bytes: u64,
    },
    /// The receive is not posted again: it was cancelled, or the peer is gone.
    Cancelled(O),
}

/// The receiving side of one peer.
#[derive(Debug)]
pub struct Inbox<O> {
    notifications: Notifications,
    messages: Matching<O>,
    closed: bool,
}

impl<O> Default for Inbox<O> {
    fn default() -> Inbox<O> {
        Inbox::new(PeerLimits::default())
    }
}

impl<O> Inbox<O> {
    /// An empty one, for a peer with the same limits.
    pub fn new(limits: PeerLimits) -> Inbox<O> {
        Inbox { notifications: Notifications::new(limits), messages: Matching::new(limits), closed: false }
    }
}

impl<O: Operation> Inbox<O> {
    /// Bytes of a transfer with a notification were placed; true if that released the notification.
    ///
    /// # Errors
    /// `Limit` when the peer has too many such transfers under way.
    pub fn count(&mut self, header: &Header) -> Result<bool, Refusal> {
        self.notifications.count(header)
    }

    /// A notification arrived: with its bytes, on its own, or to follow a transfer's bytes.
    ///
    /// # Errors
    /// `Limit` when too many are held, `Other` for one that is here already.
    pub fn notified(&mut self, header: &Header, message: Vec<u8>) -> Result<(), Refusal> {
        self.notifications.arrive(header, message)
    }

    /// The next notification.
    pub fn take_notification(&mut self) -> Option<Vec<u8>> {
        self.notifications.take()
    }

    /// Whether a notification waits, or none will come any more.
    pub fn has_notification(&self) -> bool {
        !self.notifications.is_empty() || self.closed
    }

    /// Whether notifications or messages wait for the user.
    pub fn holds_anything(&self) -> bool {
        !self.notifications.is_empty() || !self.messages.unexpected.is_empty()
    }

    /// A whole eager message, or the announcement of a large one, arrived.
    ///
    /// # Errors
    /// `Limit` for what the peer has no credit for, `Other` for a number that was used before.
    pub fn message(&mut self, header: &Header, bytes: Vec<u8>) -> Result<Vec<Reply<O>>, Refusal> {
        self.messages.message(header, bytes)
    }

    /// Posts a receive.
    pub fn post(&mut self, op: O) -> Vec<Reply<O>> {
        self.messages.post(op, false)
    }

    /// Posts a receive whose message was taken back, ahead of those that were posted after it.
    pub fn post_again(&mut self, op: O) -> Vec<Reply<O>> {
        if op.is_failing() || self.closed {
            return vec![Reply::Cancelled(op)];
        }
        self.messages.post(op, true)
    }

    /// A message whose receive could not take it, because that memory was deregistered or its GPU has failed: it is for
    /// the next receive that has met no other, since its sender knows it as delivered. Its credit, which the peer may have
    /// again, is owed: however many receives fail, what is held of the peer's is bounded by its credit and what is being
    /// placed.
    pub fn return_message(&mut self, message: Message) -> Vec<Reply<O>> {
        self.messages.return_message(message)
    }

    /// Takes a posted receive of this tag out that has met no message yet.
    pub fn unpost(&mut self, tag: u64, is_it: impl Fn(&O) -> bool) -> Option<O> {
        self.messages.unpost(tag, is_it)
    }

    /// The peer is gone: gives back the receives that wait for it. What is here whole can still be taken.
    pub fn close(&mut self) -> Vec<O> {
        self.closed = true;
        self.notifications.close();
        self.messages.close()
    }

    /// Tags of messages that no receive has met.
    #[cfg(test)]
    pub(crate) fn unexpected_tags(&self) -> Vec<u64> {
        self.messages.unexpected.keys().copied().collect()
    }

    /// Announcements that no receive has met.
    #[cfg(test)]
    pub(crate) fn announced_len(&self) -> usize {
        self.messages.announced_held
    }

    /// Credit of the peer that is free and was not given back yet.
    #[cfg(test)]
    pub(crate) fn consumed_bytes(&self) -> usize {
        self.messages.consumed
    }

    /// Nothing is held that waits for a frame or a receive.
    #[cfg(test)]
    pub(crate) fn check_idle(&self) {
        self.notifications.check_idle();
        self.messages.check_idle();
    }
}
