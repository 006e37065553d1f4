//! Operations of a peer begin and end here. This counts what they have in flight, and says whether the peer moves bulk.
//!
//! The worker threads move bulk while callers sleep; anything else is moved by the caller that waits for it. A change
//! from one to the other wakes threads, and takes as long as several messages. So bulk begins with the post that
//! brings many bytes into flight, and ends only where a caller is about to wait for few. Between two waits the bytes
//! in flight say little: many operations may have ended at once, and the caller has not posted the next ones yet. A peer
//! for which no caller waits stays in bulk.
//!
//! Invariant: every operation that has begun ends once, when its last hold is dropped.
//! Read next: `../worker/inline.rs`, which asks where it posts and waits.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::core::operation::{Hold, Op, Owner, Verb};
use crate::core::trace::{self, Track};
use ferrywire_metrics::Kind;

use super::PeerState;

/// Bytes in flight with which bulk begins.
const BULK_BYTES: u64 = 512 << 10;
/// Bytes in flight below which it ends.
const BULK_BYTES_MIN: u64 = BULK_BYTES / 2;
/// Longest operation in bytes that is no bulk while it is alone: a default chunk. Its caller has nothing else to do, and
/// moves it for less CPU time than the threads.
const LONE_BYTES_MAX: u64 = 2 << 20;

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

impl PeerState {
    /// Whether operations other than receives are in flight. A receive may wait for ever.
    pub fn in_flight(&self) -> bool {
        self.in_flight.operations() > 0
    }

    /// Number of operations in flight besides the one just posted.
    pub fn in_flight_beside_one(&self) -> u64 {
        self.in_flight.operations().saturating_sub(1)
    }

    /// Whether one operation other than receives is in flight.
    pub fn has_one_in_flight(&self) -> bool {
        self.in_flight.operations() == 1
    }

    /// Whether the worker threads move the peer's bytes while callers sleep. So it stays after bulk until a caller waits for few.
    pub fn in_bulk(&self) -> bool {
        self.in_flight.is_bulk()
    }

    /// Lets callers move the bytes again if few are in flight. Called where a caller is about to wait.
    pub fn end_bulk(&self) {
        // In bulk a post does not wake the home worker, and other channels may not take its frames any more.
        if self.in_flight.end_bulk(|| self.lone_bytes()) {
            self.wake_home_worker();
        }
    }

    /// Longest operation in bytes that its caller moves while it is the only one of this peer, and the only long one of
    /// all peers: their channels share workers. Several threads copy to and from GPUs sooner, use several NICs and
    /// connections at once, and callers poll no lane.
    fn lone_bytes(&self) -> u64 {
        let by_threads = self.route.is_far() || self.route.is_staged();
        if by_threads || self.context.long_operations.load(Ordering::SeqCst) > 1 { 0 } else { LONE_BYTES_MAX }
    }

    /// Begins an operation that the user posts.
    ///
    /// # Errors
    /// Returns the operation if the peer is being closed. Either the closing caller sees this operation in
    /// flight, or this call sees the close. A child operation is accepted: its parent has begun.
    #[inline]
    pub fn begin_posted(&self, op: Op) -> std::result::Result<Hold, Hold> {
        let op = self.begin(op);
        if op.parent().is_none() && self.life.closing.load(Ordering::SeqCst) {
            op.fail(self.gone());
            return Err(op);
        }
        Ok(op)
    }

    /// Begins an operation, which ends when its last hold is dropped.
    #[inline]
    pub fn begin(&self, op: Op) -> Hold {
        if op.on_gpu() {
            self.route.note_gpu();
        }
        if is_long(&op) {
            self.context.long_operations.fetch_add(1, Ordering::SeqCst);
        }
        self.in_flight.begun(&op, self.lone_bytes());
        if op.parent().is_none() {
            self.history.operations[op.kind() as usize].started.fetch_add(1, Ordering::Relaxed);
        }
        Hold::new(op)
    }

    /// Drops tokens of operations of this peer, and ends those whose last token it was. Ends of most operations are counted
    /// together, since posting threads write the same counters. The caller holds no lock of the peer.
    pub fn end_operations(self: &Arc<Self>, holds: &mut Vec<Hold>) {
        let (mut operations, mut bytes, mut completed) = (0, 0, [0; Kind::ALL.len()]);
        let counted_alone = |op: &mut Hold| {
            let is_plain =
                matches!(op.verb(), Verb::Write | Verb::Send | Verb::Notify) && op.parent().is_none();
            if !is_plain || is_long(op) || op.failing() || op.began.is_some() || !op.is_last() {
                return true;
            }
            operations += 1;
            bytes += op.bytes_to_cut();
            completed[op.kind() as usize] += 1;
            false
        };
        for op in holds.extract_if(.., counted_alone) {
            op.drop_for(|op| self.end_operation(op));
        }
        if operations == 0 {
            return;
        }
        self.in_flight.ended_together(operations, bytes);
        for (counters, completed) in self.history.operations.iter().zip(completed) {
            if completed > 0 {
                counters.completed.fetch_add(completed, Ordering::Relaxed);
            }
        }
        while let Some(first) = holds.first() {
            let epoch = first.epoch.get().cloned();
            let joined = |op: &&Hold| op.epoch.get().map(Arc::as_ptr) == epoch.as_ref().map(Arc::as_ptr);
            let count = holds.iter().take_while(joined).count();
            for op in holds.drain(..count) {
                op.drop_for(|op| {
                    if op.failed() {
                        self.tell_failure(op)
                    }
                });
            }
            if let Some(epoch) = epoch {
                self.queue.left(&epoch, count as u64);
            }
        }
        // A notification may have waited for these operations.
        self.wake_home_worker();
    }

    /// Handles the end of an operation of this peer. The caller holds no lock of the peer.
    pub fn end_operation(self: &Arc<Self>, op: &Op) {
        if is_long(op) {
            self.context.long_operations.fetch_sub(1, Ordering::SeqCst);
        }
        self.in_flight.ended(op);
        if op.parent().is_none() {
            let counters = &self.history.operations[op.kind() as usize];
            let ended = if op.failed() { &counters.failed } else { &counters.completed };
            ended.fetch_add(1, Ordering::Relaxed);
            if let Some(began) = op.began {
                trace::transfer_ended(
                    self.counters.first().map_or(Track::default(), |each| each.track),
                    op,
                    began,
                );
                ferrywire_metrics::record_transfer(op.kind(), began.elapsed());
            }
        }
        if op.failed() {
            self.tell_failure(op);
        }
        if op.verb() == Verb::Serve {
            self.served();
        }
        self.queue.ended(op);
        // A notification may have waited for this operation.
        self.wake_home_worker();
    }
}

impl Owner for PeerState {
    fn ended(self: Arc<Self>, op: &Op) {
        self.end_operation(op);
    }
}

/// Whether an operation is bulk by its bytes alone.
fn is_long(op: &Op) -> bool {
    op.bytes_to_cut() >= BULK_BYTES
}
