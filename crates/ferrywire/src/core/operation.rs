//! One operation, and the token that keeps its memory in use.
//!
//! An operation's states: `queued -> cut into chunks -> in flight -> done | failed`. It ends when its last
//! [`Hold`] is dropped, when nothing can touch its memory any more. A failure is recorded at once but
//! reported only then. The queue has a hold, each frame in a window has one, and so has the sink of an
//! operation that waits for the peer's data (`recv`, `read`).
//!
//! Invariant: an operation ends exactly once. Read next: `queue.rs`, where operations wait to be cut.

use crate::core::hold::{self, Held, Holds};
use crate::core::ordering::Gate;
use crate::core::trace;
use crate::core::waiting::{WaitList, WakeHandle};
use crate::error::{Error, Result};
use ferrywire_memory::{Memory, MemoryLocation};
use ferrywire_proto::operation::Operation;
pub(crate) use ferrywire_proto::operation::Verb;
use ferrywire_proto::operation::{Piece, Pieces};
use ferrywire_proto::outbox::Epoch;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Instant;

/// The kind of an operation, with the fields that only this kind has.
pub(crate) enum Task {
    /// Writes to a region of the peer.
    Write { region: u64 },
    /// Sends a message.
    Send {
        tag: u64,
        /// The message's number among all messages to the peer.
        number: u64,
        /// The peer's sink, once an announced send is matched; 0 before.
        sink: AtomicU64,
        /// Whether the send left the queue before any chunk of it was cut.
        uncut: AtomicBool,
    },
    /// Answers a peer's read: writes to the peer's sink from `start` on, in bytes.
    Serve { sink: u64, start: u64 },
    /// Sends a notification without a transfer.
    Notify,
    /// Reads from a region of the peer.
    Read {
        region: u64,
        /// Whether a request of the read was queued.
        asked: AtomicBool,
    },
    /// Waits for a message.
    Recv { tag: u64 },
}

impl Task {
    pub fn read(region: u64) -> Task {
        Task::Read { region, asked: AtomicBool::new(false) }
    }

    pub fn send(tag: u64, number: u64) -> Task {
        Task::Send { tag, number, sink: AtomicU64::new(0), uncut: AtomicBool::new(false) }
    }
}

/// The relation between operations. A transfer over several pairs of regions has one parent, and one child
/// for each pair; see `api/peer/multi_region.rs`.
pub(crate) enum Family {
    Single,
    /// The children that have not ended, once they are created.
    Parent(OnceLock<Box<[Weak<Op>]>>),
    /// The parent ends after its children. Each child holds it until the child's end, whatever still refers
    /// to the child.
    Child {
        parent: Arc<Op>,
        held: Mutex<Option<Hold>>,
    },
}

impl Family {
    /// The family of a child of `parent`.
    pub fn child_of(parent: &Hold) -> Family {
        Family::Child { parent: Arc::clone(parent), held: Mutex::new(Some(parent.clone())) }
    }
}

/// The state that ends an operation, and the waiters for it.
#[derive(Default)]
struct End {
    /// The state: `running -> done | failed`.
    state: AtomicU8,
    cancelled: AtomicBool,
    error: OnceLock<Box<Error>>,
    /// Why this end does not know what the peer has placed of the operation.
    lost: OnceLock<Box<Error>>,
    waiters: WaitList,
    /// Gates of GPU streams that open at the end.
    gates: Mutex<Vec<Gate>>,
    gated: AtomicBool,
}

const RUNNING: u8 = 0;
const DONE: u8 = 1;
const FAILED: u8 = 2;

/// The peer of an operation, which learns of its end.
pub(crate) trait Owner: Send + Sync {
    /// Handles the end of an operation: its last hold was dropped. The caller holds no lock of the peer.
    fn ended(self: Arc<Self>, op: &Op);
}

/// For tests: the owner of an operation whose peer is gone.
#[cfg(test)]
pub(crate) fn no_owner() -> Weak<dyn Owner> {
    struct Gone;
    impl Owner for Gone {
        fn ended(self: Arc<Self>, _op: &Op) {}
    }
    Weak::<Gone>::new()
}

/// An operation: immutable description, atomic state.
pub(crate) struct Op {
    pub id: u64,
    owner: Weak<dyn Owner>,
    pub task: Task,
    pub pieces: Pieces,
    pub total: u64,
    pub memory: Option<Arc<Memory>>,
    /// The notification that goes with the operation.
    pub message: Box<[u8]>,
    pub family: Family,
    /// The epoch that later standalone notifications wait for; unset if they do not wait for this operation.
    pub epoch: OnceLock<Arc<Epoch>>,
    holds: Holds,
    moved: AtomicU64,
    /// Counter that grows with progress other than `moved`, such as of incomplete frames.
    activity: AtomicU64,
    /// When the operation was created, if times are recorded.
    pub began: Option<Instant>,
    end: End,
}

impl Op {
    /// Creates an operation of the peer `owner`. `memory` counts it as a user until its end.
    #[inline]
    pub fn new(
        owner: Weak<dyn Owner>,
        id: u64,
        task: Task,
        pieces: Pieces,
        memory: Option<Arc<Memory>>,
    ) -> Op {
        memory.iter().for_each(|memory| memory.enter());
        Op {
            id,
            owner,
            task,
            total: pieces.total(),
            pieces,
            memory,
            message: Box::default(),
            family: Family::Single,
            epoch: OnceLock::new(),
            holds: Holds::default(),
            moved: AtomicU64::new(0),
            activity: AtomicU64::new(0),
            began: (ferrywire_metrics::are_timed() || trace::is_on()).then(Instant::now),
            end: End::default(),
        }
    }

    pub fn verb(&self) -> Verb {
        match self.task {
            Task::Write { .. } => Verb::Write,
            Task::Send { .. } => Verb::Send,
            Task::Serve { .. } => Verb::Serve,
            Task::Notify => Verb::Notify,
            Task::Read { .. } => Verb::Read,
            Task::Recv { .. } => Verb::Recv,
        }
    }

    /// The operation's kind in metrics.
    pub fn kind(&self) -> ferrywire_metrics::Kind {
        match self.verb() {
            Verb::Write => ferrywire_metrics::Kind::Write,
            Verb::Read => ferrywire_metrics::Kind::Read,
            Verb::Send => ferrywire_metrics::Kind::Send,
            Verb::Recv => ferrywire_metrics::Kind::Recv,
            Verb::Notify => ferrywire_metrics::Kind::Notify,
            Verb::Serve => ferrywire_metrics::Kind::Serve,
        }
    }

    /// Target region or sink. For a send or receive, the tag.
    pub fn key(&self) -> u64 {
        match self.task {
            Task::Write { region } | Task::Read { region, .. } => region,
            Task::Send { tag, .. } | Task::Recv { tag } => tag,
            Task::Serve { sink, .. } => sink,
            Task::Notify => 0,
        }
    }

    /// Notes that a request of this read was queued.
    pub fn set_asked(&self) {
        if let Task::Read { asked, .. } = &self.task {
            asked.store(true, Ordering::Relaxed);
        }
    }

    /// Whether a request of this read was queued; false for other operations.
    pub fn was_asked(&self) -> bool {
        matches!(&self.task, Task::Read { asked, .. } if asked.load(Ordering::Relaxed))
    }

    /// The parent, if this is a child.
    pub fn parent(&self) -> Option<&Arc<Op>> {
        match &self.family {
            Family::Child { parent, .. } => Some(parent),
            Family::Single | Family::Parent(_) => None,
        }
    }

    /// Whether the operation's bytes are moved by its children.
    pub fn is_parent(&self) -> bool {
        matches!(self.family, Family::Parent(_))
    }

    /// Sets the children of a parent.
    pub fn set_children(&self, children: &[Hold]) {
        if let Family::Parent(known) = &self.family {
            let _ = known.set(children.iter().map(|child| Arc::downgrade(child)).collect());
        }
    }

    /// The children that still exist.
    pub fn children(&self) -> impl Iterator<Item = Arc<Op>> + '_ {
        let known = match &self.family {
            Family::Parent(known) => known.get(),
            Family::Single | Family::Child { .. } => None,
        };
        known.into_iter().flatten().filter_map(Weak::upgrade)
    }

    /// Bytes to cut into chunks: 0 for a parent, whose children are cut.
    pub fn bytes_to_cut(&self) -> u64 {
        if self.is_parent() { 0 } else { self.total }
    }

    /// Whether a notification follows the operation's bytes, or those of its parent.
    pub fn notifies(&self) -> bool {
        !self.message.is_empty() || self.parent().is_some_and(|parent| !parent.message.is_empty())
    }

    /// Opens the gate at the end, or now if the operation has ended.
    pub fn open_at_end(&self, gate: Gate) {
        self.end.gates.lock().unwrap_or_else(PoisonError::into_inner).push(gate);
        self.end.gated.store(true, Ordering::SeqCst);
        if self.ended() {
            self.open_gates();
        }
    }

    fn open_gates(&self) {
        if self.end.gated.load(Ordering::SeqCst) && self.end.gated.swap(false, Ordering::SeqCst) {
            let gates = std::mem::take(&mut *self.end.gates.lock().unwrap_or_else(PoisonError::into_inner));
            gates.into_iter().for_each(Gate::open);
        }
    }

    /// Whether the operation's memory is on a GPU.
    pub fn on_gpu(&self) -> bool {
        self.memory.as_ref().is_some_and(|memory| memory.location() != MemoryLocation::Host)
    }

    /// Counts `bytes` bytes that have arrived, which is progress.
    pub fn count(&self, bytes: u64) {
        self.moved.fetch_add(bytes, Ordering::Relaxed);
        self.parent().into_iter().for_each(|parent| parent.count(bytes));
    }

    /// Counts the bytes of a frame whose token the caller has.
    pub fn count_frame(&self, bytes: u64) {
        if !self.holds.is_one() {
            return self.count(bytes);
        }
        // No other frame is left that another thread could count. The parent may have some.
        self.moved.store(self.moved() + bytes, Ordering::Relaxed);
        self.parent().into_iter().for_each(|parent| parent.count(bytes));
    }

    /// Notes progress other than counted bytes: callers that wait for the operation wait longer.
    pub fn note_activity(&self) {
        self.activity.fetch_add(1, Ordering::Relaxed);
        self.parent().into_iter().for_each(|parent| parent.note_activity());
    }

    /// Records a failure; only the first one is kept.
    pub fn fail(&self, error: Error) {
        self.parent().into_iter().for_each(|parent| parent.fail(error.clone()));
        let _ = self.end.error.set(Box::new(error));
    }

    /// Records that the peer is gone, for the reason `error`, and may have placed more than it has reported. The operation ends
    /// with this error, whatever failure was recorded before: any other would promise that no byte of it lands any more.
    pub fn lose(&self, error: &Error) {
        self.fail(error.clone());
        for op in self.parent().map(|parent| &**parent).into_iter().chain([self]) {
            let _ = op.end.lost.set(Box::new(error.clone()));
        }
    }

    /// Requests an early end. The operation fails only if some of its bytes are withheld because of the
    /// request; if everything was sent already, it succeeds.
    pub fn cancel(&self) {
        self.end.cancelled.store(true, Ordering::SeqCst);
    }

    /// The failure with which the operation ends.
    pub fn failure(&self) -> Option<Error> {
        self.end.lost.get().or(self.end.error.get()).map(|error| Error::clone(error))
    }

    /// Whether a failure is recorded.
    pub fn failed(&self) -> bool {
        self.end.error.get().is_some()
    }

    /// Whether the operation has failed or was cancelled, so that no further chunk is cut.
    pub fn failing(&self) -> bool {
        self.failed()
            || self.end.cancelled.load(Ordering::SeqCst)
            || self.parent().is_some_and(|parent| parent.failing())
    }

    /// Whether the operation must not be sent: it has failed, or the user has taken its memory back. The
    /// latter is recorded as a failure.
    pub fn unsendable(&self) -> bool {
        if self.memory.as_ref().is_some_and(|memory| memory.lost_to_user()) {
            self.fail(Error::invalid("region", "the region was deregistered before the transfer had ended"));
        }
        self.failing()
    }

    #[inline]
    pub fn ended(&self) -> bool {
        self.end.state.load(Ordering::SeqCst) != RUNNING
    }

    /// Whether no byte has arrived, and the caller has the only hold.
    pub fn is_untouched(&self) -> bool {
        self.moved() == 0 && self.holds.is_one()
    }

    /// Bytes that have arrived.
    pub fn moved(&self) -> u64 {
        self.moved.load(Ordering::Relaxed)
    }

    /// A counter that grows while the operation makes progress.
    #[inline]
    pub fn progress_counter(&self) -> u64 {
        self.activity.load(Ordering::Relaxed).wrapping_add(self.moved())
    }

    pub fn outcome(&self) -> Option<Result<u64>> {
        // A caller checks once more after it has announced that it will sleep. A weaker load might miss an
        // end whose thread has not seen the announcement.
        match self.end.state.load(Ordering::SeqCst) {
            RUNNING => None,
            DONE => Some(Ok(self.moved())),
            _ => Some(Err(self.failure().unwrap_or(Error::Cancelled))),
        }
    }

    /// Removes a waiter that no longer waits.
    pub fn forget_waiter(&self, handle: &WakeHandle) {
        self.end.waiters.remove(handle);
    }

    /// Registers `handle` to be woken when the operation ends.
    pub fn wake_at_end(&self, handle: WakeHandle) {
        self.end.waiters.add(handle, || self.ended());
    }
}

impl Held for Op {
    fn holds(&self) -> &Holds {
        &self.holds
    }

    fn finish(self: &Arc<Op>) {
        self.finish_with(|op| {
            if let Some(owner) = op.owner.upgrade() {
                owner.ended(op);
            }
        });
    }
}

impl Op {
    /// Ends the operation: its last hold is gone, so nothing touches the memory any more. `ended` lets the owner know.
    fn finish_with(&self, ended: impl FnOnce(&Op)) {
        self.memory.iter().for_each(|memory| memory.leave());
        let state = if self.failed() { FAILED } else { DONE };
        self.end.state.store(state, Ordering::SeqCst);
        self.open_gates();
        self.end.waiters.wake();
        ended(self);
        if let Family::Child { held, .. } = &self.family {
            let parent = held.lock().unwrap_or_else(PoisonError::into_inner).take();
            drop(parent);
        }
    }
}

impl Drop for Op {
    fn drop(&mut self) {
        // An operation that never began has no other end.
        if !self.ended() {
            self.memory.iter().for_each(|memory| memory.leave());
            self.open_gates();
        }
    }
}

/// Keeps an operation, and so its memory, in use.
pub(crate) type Hold = hold::Hold<Op>;

impl Hold {
    /// Drops the token where the operation's owner is at hand, so that it need not be looked up: `ended` lets it know.
    pub fn drop_for(self, ended: impl FnOnce(&Op)) {
        self.drop_with(|op| op.finish_with(ended));
    }

    /// Fails the operation because some of it will not be moved.
    pub fn cut_short(self) {
        self.0.fail(Error::Cancelled);
    }
}

impl Operation for Hold {
    fn id(&self) -> u64 {
        self.0.id
    }

    fn verb(&self) -> Verb {
        self.0.verb()
    }

    fn key(&self) -> u64 {
        self.0.key()
    }

    fn number(&self) -> u64 {
        match self.0.task {
            Task::Send { number, .. } => number,
            Task::Serve { start, .. } => start,
            _ => 0,
        }
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
        self.0.parent().is_some()
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

    /// The operation's memory may have ended the connection, or belong to the user again. A cancelled write
    /// is not resent: its target may hold newer bytes by now.
    fn forbids_resend(&self) -> bool {
        if !self.0.unsendable() {
            return false;
        }
        if !self.0.failed() && self.0.verb() == Verb::Write {
            self.0.fail(Error::Cancelled);
        }
        self.0.failed()
    }

    fn set_epoch(&self, epoch: Arc<Epoch>) {
        let joined = self.0.epoch.set(epoch);
        debug_assert!(joined.is_ok(), "an operation joins one epoch");
    }

    fn set_sink(&self, sink: u64) {
        if let Task::Send { sink: known, .. } = &self.0.task {
            known.store(sink, Ordering::Relaxed);
        }
    }

    fn set_uncut(&self) {
        if let Task::Send { uncut, .. } = &self.0.task {
            uncut.store(true, Ordering::Relaxed);
        }
    }

    fn retain(&self) -> Hold {
        self.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn op(task: Task) -> Op {
        Op::new(no_owner(), 1, task, Pieces::One(Piece { local: 0, remote: 0, len: 0 }), None)
    }

    /// Regression: a lost connection that a NIC still read kept a reference to the child, and the parent did
    /// not end before that reference was dropped.
    #[test]
    fn a_parent_ends_with_its_children_whatever_still_refers_to_them() {
        let mut parent = op(Task::Write { region: 1 });
        parent.family = Family::Parent(OnceLock::new());
        let parent = Hold::new(parent);
        let mut child = op(Task::Write { region: 1 });
        child.family = Family::child_of(&parent);
        let child = Hold::new(child);
        let (parent_seen, child_seen) = (Arc::clone(&parent), Arc::clone(&child));
        drop(parent);
        assert!(!parent_seen.ended(), "the parent ended before its child");
        drop(child);
        assert!(child_seen.ended() && parent_seen.ended());
    }
}
