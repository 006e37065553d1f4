//! What [`outbox`](crate::outbox) and [`inbox`](crate::inbox) know of an operation: its geometry and whether it may go on.
//!
//! Both are generic over a *handle* to the operation. The engine's handle keeps memory alive and ends the operation when
//! the last one goes; a test's handle is a number with a few fields.
//!
//! Invariant: a handle stands for one token of its operation. It is moved, never copied; where one operation needs another
//! token, as each chunk of it does, that comes from [`Operation::retain`]. Read next: `outbox/mod.rs`.

use std::fmt;
use std::sync::Arc;

use crate::outbox::Epoch;
use crate::transfer::Piece;

/// What an operation does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// Writes to a region of the peer.
    Write,
    /// Sends a tagged message.
    Send,
    /// Answers a peer's read: writes to its sink.
    Serve,
    /// Sends a notification alone.
    Notify,
    /// Waits for a peer's data, asked for by us.
    Read,
    /// Waits for a tagged message.
    Recv,
}

impl fmt::Display for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Verb::Write => "write",
            Verb::Send => "send",
            Verb::Serve => "answer to a read",
            Verb::Notify => "notify",
            Verb::Read => "read",
            Verb::Recv => "recv",
        })
    }
}

/// A handle to an operation, which stands for one of its tokens.
pub trait Operation: Sized {
    /// The number under which the peer hears of it. The children of a write share their parent's.
    fn id(&self) -> u64;
    /// What it does.
    fn verb(&self) -> Verb;
    /// Target region or sink; of a send and a receive the tag.
    fn key(&self) -> u64;
    /// Of a send its number among the messages to the peer; of an answer to a read, where it starts in the sink.
    fn number(&self) -> u64;
    /// Bytes of all pieces; of a parent, of all its children.
    fn total(&self) -> u64;
    /// Bytes that are cut for it: a parent leaves them to its children.
    fn bytes_to_cut(&self) -> u64;
    /// Which bytes go where.
    fn pieces(&self) -> &[Piece];
    /// Bytes of the notification that goes with it.
    fn message_bytes(&self) -> usize;
    /// Whether the peer counts its bytes, since a notification of its own or of its parent follows them.
    fn is_counted(&self) -> bool;
    /// Whether it is a child: its parent's notification comes behind all children.
    fn is_child(&self) -> bool;
    /// Whether its bytes are in memory of a GPU.
    fn on_gpu(&self) -> bool;
    /// Whether it has failed or is to end early, so that nothing more of it is begun.
    fn is_failing(&self) -> bool;
    /// Whether nothing more of it may be sent: it is failing, or its memory was taken back, which it notes as its failure.
    fn is_unsendable(&self) -> bool;
    /// Whether a frame of it that was sent before must not be sent again. That is then noted as its failure.
    fn forbids_resend(&self) -> bool;
    /// The epoch that it has joined, and leaves at its end.
    fn set_epoch(&self, epoch: Arc<Epoch>);
    /// The peer's sink that an announced send has met.
    fn set_sink(&self, sink: u64);
    /// It left the queue before a byte of it was cut.
    fn set_uncut(&self);
    /// Another token of the operation.
    fn retain(&self) -> Self;
}

#[cfg(test)]
pub(crate) mod testing;
