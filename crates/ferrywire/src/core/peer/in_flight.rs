//! What the operations of a peer have in flight, and whether the peer moves bulk.
//!
//! The worker threads move bulk while callers sleep; anything else is moved by the caller that waits for it. A change
//! from one to the other wakes threads, and takes as long as several messages. So bulk begins with the post that
//! brings many bytes into flight, and ends only where a caller is about to wait for few. Between two waits the bytes
//! in flight say little: many operations may have ended at once, and the caller has not posted the next ones yet. A peer
//! for which no caller waits stays in bulk.
//!
//! Invariant: every operation that has begun ends once.
//! Read next: `../worker/inline.rs`, which asks where it posts and waits.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::core::operation::{Op, Verb};

/// Bytes in flight with which bulk begins.
const BULK_BYTES: u64 = 512 << 10;
/// Bytes in flight below which it ends.
const BULK_BYTES_MIN: u64 = BULK_BYTES / 2;
/// Longest operation in bytes that is no bulk while it is alone: a default chunk. Its caller has nothing else to do, and
/// moves it for less CPU time than the threads.
pub(super) const LONE_BYTES_MAX: u64 = 2 << 20;

/// Operations that have begun and not ended, and their bytes.
#[derive(Default)]
pub(crate) struct InFlight {
    /// Number of operations other than receives, which may wait for ever.
    operations: AtomicU64,
    receives: AtomicU64,
    /// Number of operations that answer the peer's reads.
    answers: AtomicU64,
    bytes: AtomicU64,
    long: AtomicU64,
    is_bulk: AtomicBool,
    /// Whether the operation that began last was alone, and short enough to be no bulk so.
    began_lone: AtomicBool,
}

impl InFlight {
    /// Counts an operation that begins. `lone_bytes` is the longest one that is no bulk while it is alone.
    pub fn begun(&self, op: &Op, lone_bytes: u64) {
        let bytes = self.bytes.fetch_add(op.bytes_to_cut(), Ordering::SeqCst) + op.bytes_to_cut();
        let verb = op.verb();
        let others = match verb {
            Verb::Recv => self.receives.fetch_add(1, Ordering::SeqCst) + self.operations(),
            _ => self.operations.fetch_add(1, Ordering::SeqCst) + self.receives.load(Ordering::SeqCst),
        };
        if verb == Verb::Serve {
            self.answers.fetch_add(1, Ordering::Relaxed);
        }
        let is_lone = others == 0 && bytes <= lone_bytes;
        if self.began_lone.load(Ordering::Relaxed) != is_lone {
            self.began_lone.store(is_lone, Ordering::Relaxed);
        }
        if bytes >= BULK_BYTES {
            self.begun_much(op, is_lone);
        }
    }

    /// Counts an operation that begins, once many bytes are in flight with it.
    fn begun_much(&self, op: &Op, is_lone: bool) {
        if is_long(op) {
            self.long.fetch_add(1, Ordering::Relaxed);
        }
        if !is_lone && !self.is_bulk.load(Ordering::SeqCst) {
            self.is_bulk.store(true, Ordering::SeqCst);
        }
    }

    /// Counts operations with `bytes` bytes in all that have ended. None of them is a receive, an answer or long.
    pub fn ended_together(&self, operations: u64, bytes: u64) {
        self.bytes.fetch_sub(bytes, Ordering::SeqCst);
        self.operations.fetch_sub(operations, Ordering::SeqCst);
    }

    /// Counts an operation that has ended.
    pub fn ended(&self, op: &Op) {
        self.bytes.fetch_sub(op.bytes_to_cut(), Ordering::SeqCst);
        match op.verb() {
            Verb::Recv => _ = self.receives.fetch_sub(1, Ordering::SeqCst),
            _ => _ = self.operations.fetch_sub(1, Ordering::SeqCst),
        }
        if op.verb() == Verb::Serve {
            self.answers.fetch_sub(1, Ordering::Relaxed);
        }
        if is_long(op) {
            self.long.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Ends bulk if little is in flight now that a caller is about to wait. Returns whether it has ended, if only for a
    /// moment. `lone_bytes` returns what [`InFlight::begun`] takes.
    pub fn end_bulk(&self, lone_bytes: impl Fn() -> u64) -> bool {
        if !self.is_bulk.load(Ordering::Relaxed) || self.is_much(BULK_BYTES_MIN, lone_bytes()) {
            return false;
        }
        let has_ended = self.is_bulk.swap(false, Ordering::SeqCst);
        // An operation that began meanwhile may have found bulk, and not begun it.
        if self.is_much(BULK_BYTES, lone_bytes()) {
            self.is_bulk.store(true, Ordering::SeqCst);
        }
        has_ended
    }

    /// Whether the worker threads move the bytes while callers sleep.
    pub fn is_bulk(&self) -> bool {
        self.is_bulk.load(Ordering::SeqCst)
    }

    /// Number of operations other than receives.
    pub fn operations(&self) -> u64 {
        self.operations.load(Ordering::SeqCst)
    }

    /// Number of operations that answer the peer's reads.
    pub fn answers(&self) -> u64 {
        self.answers.load(Ordering::SeqCst)
    }

    /// Number of operations that are bulk by their bytes alone, receives among them.
    pub fn long(&self) -> u64 {
        self.long.load(Ordering::Relaxed)
    }

    /// Bytes of all operations, receives among them.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::SeqCst)
    }

    /// Whether at least `least` bytes are in flight, and not all of one operation that began as a lone one. The last of
    /// several did not: the threads have begun to move it.
    fn is_much(&self, least: u64, lone_bytes: u64) -> bool {
        let bytes = self.bytes();
        let is_lone = bytes <= lone_bytes && self.is_alone() && self.began_lone.load(Ordering::Relaxed);
        bytes >= least && !is_lone
    }

    fn is_alone(&self) -> bool {
        self.operations() + self.receives.load(Ordering::SeqCst) <= 1
    }
}

/// Whether an operation is bulk by its bytes alone.
pub(super) fn is_long(op: &Op) -> bool {
    op.bytes_to_cut() >= BULK_BYTES
}
