//! Room for read requests: the hand-over from threads that end or place reads without the lock of the queue, to the one
//! that keeps requests back under the lock because too many are outstanding.
//!
//! Invariant: what a thread counts is taken under the lock by the thread that keeps requests back after that, or the
//! counting thread learns that requests wait.
//! Read next: `queue.rs`, which has the lock; `tests/model/read_room.rs`, which tries the interleavings.

use crate::core::sync::{AtomicBool, AtomicUsize, fence};
use std::sync::atomic::Ordering;

#[derive(Default)]
pub(crate) struct ReadRoom {
    /// Whether read requests are kept back until earlier reads are answered.
    keeps_back: AtomicBool,
    /// Short reads that have ended, and that the outbox still counts as outstanding.
    short_ended: AtomicUsize,
}

impl ReadRoom {
    /// Counts a short read that has ended. Returns true if the caller has to make room for requests that wait, under the
    /// lock.
    pub fn end_short(&self) -> bool {
        self.short_ended.fetch_add(1, Ordering::Relaxed);
        self.is_wanted()
    }

    /// Whether requests wait for what this thread has just counted.
    pub fn is_wanted(&self) -> bool {
        fence(Ordering::SeqCst);
        self.keeps_back.load(Ordering::Relaxed)
    }

    /// Tells other threads that requests are kept back. Afterwards the caller, which has the lock, looks once more for room:
    /// it sees all that was counted by threads that have not learnt of it.
    pub fn keep_back(&self) {
        self.keeps_back.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Sets whether requests are still kept back. The caller has the lock.
    pub fn set(&self, keeps_back: bool) {
        self.keeps_back.store(keeps_back, Ordering::Relaxed);
    }

    /// Takes the number of short reads that have ended since the last call. The caller has the lock.
    pub fn take_ended(&self) -> usize {
        if self.short_ended.load(Ordering::Relaxed) == 0 {
            return 0;
        }
        self.short_ended.swap(0, Ordering::Relaxed)
    }
}
