//! The engine's handle to an operation, as the protocol's `outbox` and `inbox` hold it.
//!
//! Invariant: one handle that is queued stands for one token of its operation. Read next: `operation.rs`.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::core::operation::Op;
use crate::error::Error;
use ferrywire_proto::operation::{Operation, Verb};
use ferrywire_proto::transfer::Piece;

/// An operation with one of its tokens, which whoever takes it out gives back.
pub(crate) struct Queued(pub Arc<Op>);

impl Operation for Queued {
    fn id(&self) -> u64 {
        self.0.id
    }

    fn verb(&self) -> Verb {
        self.0.verb
    }

    fn key(&self) -> u64 {
        self.0.key
    }

    fn number(&self) -> u64 {
        self.0.number
    }

    fn total(&self) -> u64 {
        self.0.total
    }

    fn bytes_to_cut(&self) -> u64 {
        self.0.bytes_to_cut()
    }

    fn pieces(&self) -> &[Piece] {
        self.0.pieces.as_slice()
    }

    fn message_bytes(&self) -> usize {
        self.0.message.len()
    }

    fn is_counted(&self) -> bool {
        self.0.notifies()
    }

    fn is_child(&self) -> bool {
        self.0.whole.is_some()
    }

    fn on_gpu(&self) -> bool {
        self.0.on_gpu()
    }

    fn is_failing(&self) -> bool {
        self.0.failing()
    }

    fn is_unsendable(&self) -> bool {
        self.0.unsendable()
    }

    /// The operation's memory may be what ended the connection that the frame was sent over, or the user's again. Of a
    /// write that is cancelled nothing is sent again: newer bytes may be at its target by now.
    fn forbids_resend(&self) -> bool {
        if !self.0.unsendable() {
            return false;
        }
        if !self.0.failed() && self.0.verb == Verb::Write {
            self.0.fail(Error::Cancelled);
        }
        self.0.failed()
    }

    fn set_epoch(&self, epoch: u64) {
        self.0.epoch.store(epoch, Ordering::Relaxed);
    }

    fn set_sink(&self, sink: u64) {
        self.0.sink.store(sink, Ordering::Relaxed);
    }

    fn set_uncut(&self) {
        self.0.uncut.store(true, Ordering::Relaxed);
    }

    fn retain(&self) -> Queued {
        self.0.hold();
        Queued(self.0.clone())
    }
}
