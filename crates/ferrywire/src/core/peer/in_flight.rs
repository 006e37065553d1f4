//! What the operations of a peer have in flight, and whether that is bulk.
//!
//! The worker threads move bulk while callers sleep; anything else is moved by the caller that waits for it. A change
//! from one to the other wakes threads, and takes as long as several messages. So bulk begins with the post that
//! brings many bytes into flight, and ends only when a caller is about to wait for few. Between two waits the bytes
//! in flight say little: many operations may have ended at once, and the caller has not posted the next ones yet.
//!
//! Invariant: every operation that has begun ends once.
//! Read next: `../worker/inline.rs`, which asks where it posts and waits.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::core::operation::{Op, Verb};

/// Bytes in flight with which bulk begins.
pub(super) const BULK_BYTES: u64 = 512 << 10;
/// Bytes in flight below which it ends.
const BULK_BYTES_MIN: u64 = BULK_BYTES / 2;
/// Longest operation in bytes that is no bulk while it is alone and neither end copies it to or from a GPU: one chunk. The
/// caller has nothing else to do, and moves it for less CPU time than the threads.
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
    is_bulk: AtomicBool,
}

impl InFlight {
    /// Counts an operation that begins. `lone_bytes` is the longest one that is no bulk while it is alone.
    pub fn begun(&self, op: &Op, lone_bytes: u64) {
        let bytes = self.bytes.fetch_add(op.bytes_to_cut(), Ordering::Relaxed) + op.bytes_to_cut();
        match op.verb() {
            Verb::Recv => _ = self.receives.fetch_add(1, Ordering::Relaxed),
            _ => _ = self.operations.fetch_add(1, Ordering::SeqCst),
        }
        if op.verb() == Verb::Serve {
            self.answers.fetch_add(1, Ordering::Relaxed);
        }
        if bytes >= BULK_BYTES && !self.is_lone(bytes, lone_bytes) && !self.is_bulk.load(Ordering::Relaxed) {
            self.is_bulk.store(true, Ordering::SeqCst);
        }
    }

    /// Counts an operation that has ended.
    pub fn ended(&self, op: &Op) {
        self.bytes.fetch_sub(op.bytes_to_cut(), Ordering::Relaxed);
        match op.verb() {
            Verb::Recv => _ = self.receives.fetch_sub(1, Ordering::Relaxed),
            // Ordered with the check of the queue that follows.
            _ => _ = self.operations.fetch_sub(1, Ordering::SeqCst),
        }
        if op.verb() == Verb::Serve {
            self.answers.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Ends bulk if little is in flight now that a caller is about to wait. Returns whether it has ended here.
    /// `lone_bytes` is as in [`InFlight::begun`].
    pub fn end_bulk(&self, lone_bytes: u64) -> bool {
        if !self.is_bulk.load(Ordering::Relaxed) {
            return false;
        }
        let bytes = self.bytes();
        let is_little = bytes < BULK_BYTES_MIN || self.is_lone(bytes, lone_bytes);
        is_little && self.is_bulk.swap(false, Ordering::SeqCst)
    }

    /// Whether so much is in flight that the worker threads should move it while callers sleep.
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

    /// Bytes of all operations, receives among them.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    fn is_lone(&self, bytes: u64, lone_bytes: u64) -> bool {
        let operations = self.operations.load(Ordering::Relaxed) + self.receives.load(Ordering::Relaxed);
        bytes <= lone_bytes && operations <= 1
    }
}
