//! The receiving side of one peer: tagged messages, data for receives and reads, notifications.
//!
//! Three parts: `matching` finds the receive of each message; `reassembly` is the target of a message or read
//! whose data arrives in frames; `notifications`. An [`Inbox`] decides and its caller acts: the consequences
//! of a frame come back as [`Reply`]s, in the order in which they must be carried out.
//!
//! Invariant: everything that a peer makes an inbox hold is charged to a limit of `limits.rs`. Pure: no lock,
//! no memory access.
//! Read next: `matching.rs`, then `outbox/mod.rs`, the other direction.

mod matching;
mod notifications;
mod reassembly;
#[cfg(test)]
mod tests;

pub use reassembly::{Reassembly, Scatter};

use crate::limits::{self, PeerLimits};
use crate::operation::Operation;
use crate::wire::{Header, Refusal};
use matching::Matching;
use notifications::Notifications;

/// An eager message, which arrived whole.
#[derive(Debug)]
pub struct Message {
    tag: u64,
    number: u64,
    /// Content of the message in bytes.
    pub bytes: Vec<u8>,
}

impl Message {
    /// Credit in bytes that the message uses until a receive matches it.
    pub fn cost(&self) -> usize {
        self.bytes.len() + limits::EAGER_OVERHEAD_BYTES
    }
}

/// An action for the caller, after a frame arrived or a receive was posted.
#[derive(Debug)]
pub enum Reply<O> {
    /// Send this frame to the peer.
    Frame(Header),
    /// A receive has matched an announced message. Make its [`Reassembly`] available under the operation's id
    /// before anything else, the next call of the inbox included. The frame that requests the data follows.
    Open {
        /// The receive that has matched.
        op: O,
        /// Length of the announced message in bytes.
        bytes: u64,
    },
    /// Copy this message to the receive's memory; the receive then ends. The copy to a GPU may take long.
    /// Pass a message that cannot be copied to [`Inbox::return_message`].
    Place(O, Message),
    /// The receive has matched a message without bytes, and ends.
    Received(O),
    /// The receive has matched a message longer than its memory, and fails.
    Truncated {
        /// The receive that fails.
        op: O,
        /// Length of the message in bytes.
        message_bytes: u64,
    },
    /// The receive cannot be posted again: it was cancelled, or the peer is lost.
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
    /// An empty inbox. The peer's outbox must have equal limits.
    pub fn new(limits: PeerLimits) -> Inbox<O> {
        Inbox { notifications: Notifications::new(limits), messages: Matching::new(limits), closed: false }
    }
}

impl<O: Operation> Inbox<O> {
    /// Counts placed bytes of a transfer that a notification follows; returns whether they released the
    /// notification.
    ///
    /// # Errors
    /// `Limit` when the peer has too many such transfers in flight.
    pub fn count(&mut self, header: &Header) -> Result<bool, Refusal> {
        self.notifications.count(header)
    }

    /// Takes a notification that has arrived: with bytes, standalone, or to follow a transfer's bytes.
    ///
    /// # Errors
    /// `Limit` when too many are held, `Other` when this notification arrived before.
    pub fn notified(&mut self, header: &Header, message: Vec<u8>) -> Result<(), Refusal> {
        self.notifications.arrive(header, message)
    }

    /// Takes the next notification that is ready.
    pub fn take_notification(&mut self) -> Option<Vec<u8>> {
        self.notifications.take()
    }

    /// Whether a notification is ready, or none will arrive any more.
    pub fn has_notification(&self) -> bool {
        !self.notifications.is_empty() || self.closed
    }

    /// Whether notifications or messages are held for the user.
    pub fn holds_anything(&self) -> bool {
        !self.notifications.is_empty() || !self.messages.unexpected.is_empty()
    }

    /// Takes an eager message or an announcement that has arrived.
    ///
    /// # Errors
    /// `Limit` when the peer exceeds its credit, `Other` for a number that was used before.
    pub fn message(&mut self, header: &Header, bytes: Vec<u8>) -> Result<Vec<Reply<O>>, Refusal> {
        self.messages.message(header, bytes)
    }

    /// Matches an eager message when its header has come, if its receive is posted and `takes` is true of it. The bytes
    /// that follow go to the receive's memory. Returns the receive and the consequences of the match. A message that is
    /// not matched here goes to [`Inbox::message`] once it is complete.
    ///
    /// The caller has the receive until the message [ends](Inbox::end_begun), or [goes on](Inbox::give_up_begun) without
    /// it. A message that breaks off with its connection keeps its receive: its sender sends it again, or
    /// [withdraws](Inbox::withdraw_begun) it.
    pub fn begin(&mut self, header: &Header, takes: impl Fn(&O) -> bool) -> Option<(O, Vec<Reply<O>>)> {
        if self.closed { None } else { self.messages.begin(header, takes) }
    }

    /// The number of the first message that has neither arrived nor begun.
    pub fn next_number(&self) -> u64 {
        self.messages.next_number
    }

    /// Ends a message of `bytes` bytes that has begun, and is placed.
    pub fn end_begun(&mut self, bytes: u64) -> Vec<Reply<O>> {
        self.messages.end_begun(bytes)
    }

    /// Gives up a message that has begun, since its receive has ended without it. Once it is complete it goes to
    /// [`Inbox::message`], and is for the next receive.
    pub fn give_up_begun(&mut self, number: u64, tag: u64, bytes: u64) {
        self.messages.give_up_begun(number, tag, bytes);
    }

    /// Forgets a message that was given up, and that cannot be had any more.
    pub fn forget_given_up(&mut self, number: u64) -> Vec<Reply<O>> {
        self.messages.forget_given_up(number)
    }

    /// Withdraws a message of `bytes` bytes that has begun. [Post](Inbox::post_again) its receive again.
    pub fn withdraw_begun(&mut self, bytes: u64) {
        self.messages.withdraw_begun(bytes);
    }

    /// Posts a receive, behind the others of its tag; returns the consequences.
    pub fn post(&mut self, op: O) -> Vec<Reply<O>> {
        self.messages.post(op, false)
    }

    /// Posts a receive whose message was withdrawn, ahead of the receives posted after it.
    pub fn post_again(&mut self, op: O) -> Vec<Reply<O>> {
        if op.is_failing() || self.closed {
            return vec![Reply::Cancelled(op)];
        }
        self.messages.post(op, true)
    }

    /// Offers a message whose receive could not take it, since its memory was deregistered or its GPU failed,
    /// to the next unmatched receive: the sender already counts the message as delivered. The credit of the
    /// message may have been returned already, so it is deducted from later returns. However many receives
    /// fail, the peer's held bytes are bounded by its credit and the messages being copied.
    pub fn return_message(&mut self, message: Message) -> Vec<Reply<O>> {
        self.messages.return_message(message)
    }

    /// Removes a posted receive of this tag that has matched no message yet.
    pub fn unpost(&mut self, tag: u64, is_it: impl Fn(&O) -> bool) -> Option<O> {
        self.messages.unpost(tag, is_it)
    }

    /// Closes the inbox of a lost peer; returns its waiting receives. Complete messages and notifications can
    /// still be taken.
    pub fn close(&mut self) -> Vec<O> {
        self.closed = true;
        self.notifications.close();
        self.messages.close()
    }

    /// Tags of unmatched messages.
    #[cfg(test)]
    pub(crate) fn unexpected_tags(&self) -> Vec<u64> {
        self.messages.unexpected.keys().copied().collect()
    }

    /// Number of unmatched announcements.
    #[cfg(test)]
    pub(crate) fn announced_len(&self) -> usize {
        self.messages.announced_held
    }

    /// Credit in bytes that is free and not returned to the peer yet.
    #[cfg(test)]
    pub(crate) fn consumed_bytes(&self) -> usize {
        self.messages.consumed
    }

    /// Asserts that the inbox holds nothing that waits for a frame or a receive.
    #[cfg(test)]
    pub(crate) fn check_idle(&self) {
        self.notifications.check_idle();
        self.messages.check_idle();
    }
}
