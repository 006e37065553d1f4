//! Operations that wait for a GPU before they begin: posted, counted, and not queued yet.
//!
//! Whoever polls the progress engine of the peer's home asks the GPU, again and again, and begins what may begin.
//!
//! Invariant: an operation is here or it has begun; one that is cancelled, fails or loses its memory meanwhile
//! ends as if it had begun. Read next: `ordering.rs`, what they wait for.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::state::PeerState;
use crate::core::operation::{Hold, Op, Verb};
use crate::core::ordering::StreamEvent;
use crate::error::{Error, Result};

/// What begins an operation.
type Start = Box<dyn FnOnce(&Arc<PeerState>, Hold) + Send>;

struct Waiting {
    ready: StreamEvent,
    op: Hold,
    start: Start,
}

#[derive(Default)]
struct List {
    waiting: Vec<Waiting>,
    closed: bool,
}

/// The operations of one peer that wait.
#[derive(Default)]
pub(crate) struct StreamQueue {
    any: AtomicBool,
    list: Mutex<List>,
    /// One at a time begins them, so that they begin in their order.
    releasing: Mutex<()>,
    /// How often those that wait were looked through.
    #[cfg(test)]
    pub looks: std::sync::atomic::AtomicUsize,
}

/// What has been seen to wait on, in one look through the list: what the GPU finishes meanwhile keeps its order.
#[derive(Default)]
struct Order {
    last: Option<StreamEvent>,
    tags: HashSet<u64>,
    notification: bool,
}

impl Order {
    fn is_behind(&self, waiting: &Waiting) -> bool {
        let op = &waiting.op;
        self.last.as_ref().is_some_and(|last| last.is_same(&waiting.ready))
            || (op.verb() == Verb::Recv && self.tags.contains(&op.key()))
            || (op.verb() == Verb::Notify && self.notification)
    }

    fn stays(&mut self, waiting: &Waiting) {
        match waiting.op.verb() {
            Verb::Recv => drop(self.tags.insert(waiting.op.key())),
            Verb::Notify => self.notification = true,
            _ => {}
        }
        self.last = Some(waiting.ready.clone());
    }
}

impl StreamQueue {
    fn lock(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether there are some: somebody has to ask.
    pub fn any(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }

    /// Whether this one waits.
    pub fn knows(&self, op: &Arc<Op>) -> bool {
        self.any() && self.lock().waiting.iter().any(|waiting| Arc::ptr_eq(&waiting.op, op))
    }

    /// Adds one; gives it back when the peer is gone.
    fn add(&self, waiting: Waiting) -> std::result::Result<(), Waiting> {
        let mut list = self.lock();
        if list.closed {
            return Err(waiting);
        }
        list.waiting.push(waiting);
        self.any.store(true, Ordering::SeqCst);
        Ok(())
    }

    /// Takes out those that wait no longer, in their order, with the reason if they must not begin.
    fn take(&self) -> Vec<(Waiting, Option<Error>)> {
        #[cfg(test)]
        self.looks.fetch_add(1, Ordering::SeqCst);
        let mut list = self.lock();
        let mut taken = Vec::new();
        let mut order = Order::default();
        let mut at = 0;
        while let Some(waiting) = list.waiting.get(at) {
            let answer = match waiting.op.unsendable() {
                true => Ok(true),
                false if order.is_behind(waiting) => Ok(false),
                false => waiting.ready.poll(),
            };
            match answer {
                Ok(false) => {
                    order.stays(waiting);
                    at += 1;
                }
                Ok(true) => taken.push((list.waiting.remove(at), None)),
                Err(error) => taken.push((list.waiting.remove(at), Some(error))),
            }
        }
        self.any.store(!list.waiting.is_empty(), Ordering::SeqCst);
        taken
    }

    /// The peer is gone: gives all operations back, which hold a token.
    pub fn close(&self) -> Vec<Hold> {
        let mut list = self.lock();
        list.closed = true;
        self.any.store(false, Ordering::SeqCst);
        list.waiting.drain(..).map(|waiting| waiting.op).collect()
    }
}

impl PeerState {
    /// Begins an operation once memory may be used. It counts as posted already.
    pub fn hold(
        self: &Arc<Self>,
        ready: StreamEvent,
        op: Hold,
        start: impl FnOnce(&Arc<PeerState>, Hold) + Send + 'static,
    ) -> Result<()> {
        if let Err(Waiting { op, .. }) = self.held.add(Waiting { ready, op, start: Box::new(start) }) {
            op.fail(self.gone());
            return Err(self.gone());
        }
        self.home().rouse();
        Ok(())
    }

    /// Queues an operation once memory may be used; what is posted behind it knows of it already.
    pub fn post_after(self: &Arc<Self>, ready: StreamEvent, op: Hold) -> Result<()> {
        if op.verb() != Verb::Notify {
            self.queue.join(&op);
        }
        self.hold(ready, op, |state, op| state.start(op))
    }

    /// Queues an operation that waited.
    pub fn start(self: &Arc<Self>, op: Hold) {
        let bytes = op.total;
        match self.queue.post_held(op) {
            Ok(()) => self.rouse_for(bytes),
            Err(op) => op.fail(self.gone()),
        }
    }

    /// Begins what need not wait any longer; true if that was anything.
    pub fn release_held(self: &Arc<Self>) -> bool {
        if !self.held.any() {
            return false;
        }
        // Somebody else is at it, and will be again soon.
        let Ok(_alone) = self.held.releasing.try_lock() else { return false };
        let taken = self.held.take();
        let worked = !taken.is_empty();
        for (Waiting { op, start, .. }, error) in taken {
            if let Some(error) = error {
                op.fail(error);
            }
            match op.verb() {
                // It has its number, which the peer waits for: it is withdrawn in its turn.
                Verb::Send => start(self, op),
                _ if op.failing() => op.cut_short(),
                _ => start(self, op),
            }
        }
        worked
    }
}
