//! One operation under way, and the handle by which its caller follows it.
//!
//! An operation's life: `queued -> cut into chunks -> in flight -> done | failed`. It ends when nothing
//! can touch its memory any more: a failure is noted at once but shown only when the last chunk has
//! left the last window. Operations that wait for the peer's data (`recv`, `read`) hold one token until
//! their sink is full or taken away.
//!
//! Read next: `queue/`, where operations wait to be cut.

use crate::core::ordering::Gate;
use crate::core::waiting::{WaitList, WakeHandle};
use crate::error::{Error, Result};
use ferrywire_memory::{Memory, Place};
pub(crate) use ferrywire_proto::operation::Verb;
use ferrywire_proto::transfer::Pieces;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

/// No standalone notification waits for the operation.
pub(crate) const NO_EPOCH: u64 = u64::MAX;

const RUNNING: u8 = 0;
const DONE: u8 = 1;
const FAILED: u8 = 2;

/// An operation: immutable description, atomic state.
pub(crate) struct Op {
    pub id: u64,
    pub verb: Verb,
    pub pieces: Pieces,
    pub total: u64,
    pub memory: Option<Arc<Memory>>,
    /// Target region or sink; for `send` and `recv` the tag.
    pub key: u64,
    /// Notification that goes with it.
    pub message: Box<[u8]>,
    /// For `send`: its number among the peer's messages. For `Serve`: where the answer starts in the sink.
    pub number: u64,
    /// Which fence of standalone notifications it belongs to; [`NO_EPOCH`] if none waits for it.
    pub epoch: AtomicU64,
    /// The peer's sink, once an announced send is matched.
    pub sink: AtomicU64,
    /// It has left the queue before a byte of it was cut.
    pub uncut: AtomicBool,
    /// The operation that it is a part of; see `api/peer/multi_region.rs`.
    pub whole: Option<Arc<Op>>,
    /// Its own parts, if it is a whole.
    parts: OnceLock<Box<[Weak<Op>]>>,
    tokens: AtomicU32,
    moved: AtomicU64,
    /// Changes with each part of it that moves, of frames too that are not whole yet.
    stirred: AtomicU64,
    state: AtomicU8,
    cancelled: AtomicBool,
    error: OnceLock<Error>,
    waiters: WaitList,
    /// Streams of GPUs that wait for the end.
    gates: Mutex<Vec<Gate>>,
    gated: AtomicBool,
}

impl Op {
    pub fn new(id: u64, verb: Verb, pieces: Pieces, memory: Option<Arc<Memory>>, key: u64) -> Op {
        memory.iter().for_each(|memory| memory.enter());
        Op {
            id,
            verb,
            total: pieces.total(),
            pieces,
            memory,
            key,
            message: Box::default(),
            number: 0,
            epoch: AtomicU64::new(NO_EPOCH),
            sink: AtomicU64::new(0),
            uncut: AtomicBool::new(false),
            whole: None,
            parts: OnceLock::new(),
            tokens: AtomicU32::new(1),
            moved: AtomicU64::new(0),
            stirred: AtomicU64::new(0),
            state: AtomicU8::new(RUNNING),
            cancelled: AtomicBool::new(false),
            error: OnceLock::new(),
            waiters: WaitList::default(),
            gates: Mutex::default(),
            gated: AtomicBool::new(false),
        }
    }

    /// Bytes that are cut for it: a whole leaves them to its parts.
    pub fn bytes_to_cut(&self) -> u64 {
        if self.is_whole() { 0 } else { self.total }
    }

    /// Makes it the whole of these.
    pub fn set_parts(&self, parts: &[Arc<Op>]) {
        let _ = self.parts.set(parts.iter().map(Arc::downgrade).collect());
    }

    /// Its parts that are still under way.
    pub fn parts(&self) -> impl Iterator<Item = Arc<Op>> + '_ {
        self.parts.get().into_iter().flatten().filter_map(Weak::upgrade)
    }

    /// Whether it is nothing but its parts.
    pub fn is_whole(&self) -> bool {
        self.parts.get().is_some()
    }

    /// Whether a notification of its own follows its bytes, or those of the whole.
    pub fn notifies(&self) -> bool {
        !self.message.is_empty() || self.whole.as_ref().is_some_and(|whole| !whole.message.is_empty())
    }

    /// Takes a token: something more holds the operation's memory.
    pub fn hold(&self) {
        self.tokens.fetch_add(1, Ordering::Relaxed);
    }

    /// Gives a token back; true when it was the last and the operation has ended.
    #[must_use]
    pub fn let_go(&self) -> bool {
        if self.tokens.fetch_sub(1, Ordering::AcqRel) != 1 {
            return false;
        }
        self.memory.iter().for_each(|memory| memory.leave());
        let state = if self.failed() { FAILED } else { DONE };
        self.state.store(state, Ordering::SeqCst);
        self.open_gates();
        self.waiters.wake();
        true
    }

    /// Opens a gate at the end, which may have been.
    pub fn open_at_end(&self, gate: Gate) {
        self.gates.lock().unwrap_or_else(PoisonError::into_inner).push(gate);
        self.gated.store(true, Ordering::SeqCst);
        if self.ended() {
            self.open_gates();
        }
    }

    fn open_gates(&self) {
        if self.gated.swap(false, Ordering::SeqCst) {
            let gates = std::mem::take(&mut *self.gates.lock().unwrap_or_else(PoisonError::into_inner));
            gates.into_iter().for_each(Gate::open);
        }
    }

    /// Whether its bytes are in memory of a GPU.
    pub fn on_gpu(&self) -> bool {
        self.memory.as_ref().is_some_and(|memory| memory.place() != Place::Host)
    }

    /// Counts bytes that arrived.
    pub fn count(&self, bytes: u64) {
        self.moved.fetch_add(bytes, Ordering::Relaxed);
        self.whole.iter().for_each(|whole| whole.count(bytes));
    }

    /// Some of it moves: whoever waits for it waits on.
    pub fn stir(&self) {
        self.stirred.fetch_add(1, Ordering::Relaxed);
        self.whole.iter().for_each(|whole| whole.stir());
    }

    /// Notes a failure; the first one stays.
    pub fn fail(&self, error: Error) {
        self.whole.iter().for_each(|whole| whole.fail(error.clone()));
        let _ = self.error.set(error);
    }

    /// Asks for an early end. It becomes a failure where something is held back because of it; when
    /// everything was on its way already, the operation succeeds.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::SeqCst);
    }

    /// Something was held back: the operation was cancelled, unless it has failed before.
    pub fn cut_short(&self) {
        self.fail(Error::Cancelled);
    }

    /// The failure that is noted.
    pub fn failure(&self) -> Option<Error> {
        self.error.get().cloned()
    }

    /// Whether a failure is noted.
    pub fn failed(&self) -> bool {
        self.error.get().is_some()
    }

    /// Whether it has failed or is to end early, so that no further chunk should be cut.
    pub fn failing(&self) -> bool {
        self.failed()
            || self.cancelled.load(Ordering::SeqCst)
            || self.whole.as_ref().is_some_and(|whole| whole.failing())
    }

    /// Whether it must not be sent: it has failed, or the user has taken its memory back.
    pub fn unsendable(&self) -> bool {
        if self.memory.as_ref().is_some_and(|memory| memory.lost_to_user()) {
            self.fail(Error::invalid("region", "it was deregistered before the operation had ended"));
        }
        self.failing()
    }

    pub fn ended(&self) -> bool {
        self.state.load(Ordering::SeqCst) != RUNNING
    }

    /// Whether nothing has come of what it waits for, nor is being placed; whoever asks has its only token otherwise.
    pub fn untouched(&self) -> bool {
        self.moved() == 0 && self.tokens.load(Ordering::Acquire) == 1
    }

    /// Bytes that have arrived.
    pub fn moved(&self) -> u64 {
        self.moved.load(Ordering::Relaxed)
    }

    pub fn stirred(&self) -> u64 {
        self.stirred.load(Ordering::Relaxed)
    }

    pub fn outcome(&self) -> Option<Result<u64>> {
        match self.state.load(Ordering::Acquire) {
            RUNNING => None,
            DONE => Some(Ok(self.moved())),
            _ => Some(Err(self.failure().unwrap_or(Error::Cancelled))),
        }
    }

    /// A waiter waits no more.
    pub fn forget_waiter(&self, handle: &WakeHandle) {
        self.waiters.remove(handle);
    }

    /// Asks to be woken at the end.
    pub fn wake_at_end(&self, handle: WakeHandle) {
        self.waiters.add(handle);
        if self.ended() {
            self.waiters.wake();
        }
    }
}

impl Drop for Op {
    fn drop(&mut self) {
        // One that was never posted has no other end.
        if !self.ended() {
            self.memory.iter().for_each(|memory| memory.leave());
            self.open_gates();
        }
    }
}
