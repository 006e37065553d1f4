//! The view that [`outbox`](crate::outbox) and [`inbox`](crate::inbox) have of an operation: its pieces, and
//! whether it may go on.
//!
//! A message is a list of [`Piece`]s: which local bytes belong to which remote bytes.
//!
//! The outbox and the inbox are generic over a *handle* to the operation. The engine's handle keeps memory
//! alive, and dropping the last handle ends the operation; a test's handle is a number with a few fields.
//!
//! Invariant: a handle stands for one token of its operation. Handles are moved, never copied;
//! [`Operation::retain`] makes another one, for example for each chunk.
//! Read next: `outbox/mod.rs`.

use std::fmt;
use std::sync::Arc;

use crate::outbox::Epoch;

/// Kind of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// Writes to a region of the peer.
    Write,
    /// Sends a tagged message.
    Send,
    /// Serves a peer's read: writes to the peer's sink.
    Serve,
    /// Sends a standalone notification.
    Notify,
    /// Waits for the data of a read.
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

/// `len` bytes at offset `local` of the local region and at offset `remote` of the remote target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Offset in the local region, in bytes.
    pub local: u64,
    /// Offset in the remote target, in bytes.
    pub remote: u64,
    /// Length of the piece in bytes.
    pub len: u64,
}

impl Piece {
    /// Appends `next` if it follows this piece on both sides; false if it does not.
    fn join(&mut self, next: &Piece) -> bool {
        let follows = self.local + self.len == next.local && self.remote + self.len == next.remote;
        self.len += if follows { next.len } else { 0 };
        follows
    }
}

/// The pieces of one message; a single piece needs no allocation.
#[derive(Clone, Debug)]
pub enum Pieces {
    /// A message of a single piece.
    One(Piece),
    /// A message of several pieces, shared with a prepared block list.
    Many(Arc<[Piece]>),
}

impl Pieces {
    /// The pieces of a message, in this order. Pieces that touch on both sides are joined; a message without
    /// bytes becomes one empty piece.
    pub fn joined(pieces: impl IntoIterator<Item = Piece>) -> Pieces {
        let mut pieces = pieces.into_iter().filter(|piece| piece.len > 0);
        let Some(mut first) = pieces.next() else {
            return Pieces::One(Piece { local: 0, remote: 0, len: 0 });
        };
        match pieces.find(|piece| !first.join(piece)) {
            None => Pieces::One(first),
            Some(second) => Pieces::Many(merge([first, second].into_iter().chain(pieces)).into()),
        }
    }

    /// The pieces of the message, in order.
    #[inline]
    pub fn as_slice(&self) -> &[Piece] {
        match self {
            Pieces::One(piece) => std::slice::from_ref(piece),
            Pieces::Many(pieces) => pieces,
        }
    }

    /// Total length of the message in bytes.
    #[inline]
    pub fn total(&self) -> u64 {
        match self {
            Pieces::One(piece) => piece.len,
            Pieces::Many(pieces) => pieces.iter().map(|piece| piece.len).sum(),
        }
    }
}

/// Drops empty pieces, and joins pieces that touch on both sides.
pub fn merge(pieces: impl IntoIterator<Item = Piece>) -> Vec<Piece> {
    let mut out: Vec<Piece> = Vec::new();
    for piece in pieces.into_iter().filter(|piece| piece.len > 0) {
        if !out.last_mut().is_some_and(|last| last.join(&piece)) {
            out.push(piece);
        }
    }
    out
}

/// A handle to an operation; each handle stands for one token.
pub trait Operation: Sized {
    /// Id of the operation on the wire. The children of a write share their parent's.
    fn id(&self) -> u64;
    /// Kind of the operation.
    fn verb(&self) -> Verb;
    /// Key of the target region or sink; for a send or a receive, the tag.
    fn key(&self) -> u64;
    /// For a send, its number among the messages to the peer; for a served read, the offset in the peer's
    /// sink.
    fn number(&self) -> u64;
    /// Bytes of all pieces; for a parent, of all its children.
    fn total(&self) -> u64;
    /// Bytes to cut into chunks; 0 for a parent, whose children are cut.
    fn bytes_to_cut(&self) -> u64;
    /// The pieces of the message: local and remote ranges.
    fn pieces(&self) -> &[Piece];
    /// Bytes of the attached notification.
    fn message_bytes(&self) -> usize;
    /// Whether the peer counts the placed bytes, because a notification of the operation or of its parent
    /// follows them.
    fn is_counted(&self) -> bool;
    /// Whether the operation is a child; its parent's notification follows all children.
    fn is_child(&self) -> bool;
    /// Whether the local bytes are in GPU memory.
    fn on_gpu(&self) -> bool;
    /// Whether the operation has failed or is cancelled, so that no further part of it starts.
    fn is_failing(&self) -> bool;
    /// Whether no more of the operation may be sent: it is failing, or its memory was revoked. In the second
    /// case this call records the failure.
    fn is_unsendable(&self) -> bool;
    /// Whether a frame of the operation that was sent before must not be sent again. If so, this call records
    /// the failure.
    fn forbids_resend(&self) -> bool;
    /// Stores the epoch that the operation has joined and leaves at its end.
    fn set_epoch(&self, epoch: Arc<Epoch>);
    /// Stores the peer's sink, after an announced send was matched.
    fn set_sink(&self, sink: u64);
    /// Notes that the operation left the queue before any of its bytes were cut into chunks.
    fn set_uncut(&self);
    /// Another handle to the operation, with a token of its own.
    fn retain(&self) -> Self;
}

#[cfg(test)]
pub(crate) mod testing;
