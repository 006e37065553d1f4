//! Operations that wait for a GPU stream before they begin: posted and counted, but not queued.
//!
//! The thread that polls the peer's home worker also polls the GPU, and starts operations that are ready.
//!
//! Invariant: an operation is either in this list or has begun. If it is cancelled, fails or loses its memory
//! while it waits, it ends as if it had begun.
//! Read next: `ordering.rs`, the stream events.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::state::PeerState;
use crate::core::operation::{Hold, Op, Verb};
use crate::core::ordering::StreamEvent;
use crate::error::{Error, Result};

/// Starts an operation.
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

/// The operations of one peer that wait for a GPU stream.
#[derive(Default)]
pub(crate) struct StreamQueue {
    any: AtomicBool,
    list: Mutex<List>,
    /// Held while operations are started, so that they start in order.
    releasing: Mutex<()>,
    /// How often the list was searched for ready operations.
    #[cfg(test)]
    pub polls: std::sync::atomic::AtomicUsize,
}

/// What has to stay in order during one pass over the list, even if the GPU finishes a later operation's
/// event meanwhile: operations of one event, receives of one tag, and notifications.
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

    /// Whether operations wait, so that a thread has to poll the GPU.
    pub fn any(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }

    /// Whether this operation waits.
    pub fn knows(&self, op: &Arc<Op>) -> bool {
        self.any() && self.lock().waiting.iter().any(|waiting| Arc::ptr_eq(&waiting.op, op))
    }

    /// Adds an operation; returns it if the peer is gone.
    fn add(&self, waiting: Waiting) -> std::result::Result<(), Waiting> {
        let mut list = self.lock();
        if list.closed {
            return Err(waiting);
        }
        list.waiting.push(waiting);
        self.any.store(true, Ordering::SeqCst);
        Ok(())
    }

    /// Removes the operations that need not wait any longer, in order, with the error of the GPU if it
    /// failed.
    fn take(&self) -> Vec<(Waiting, Option<Error>)> {
        #[cfg(test)]
        self.polls.fetch_add(1, Ordering::SeqCst);
        let mut list = self.lock();
        let mut taken = Vec::new();
        let mut order = Order::default();
        let mut at = 0;
        while let Some(waiting) = list.waiting.get(at) {
            let may_begin = if waiting.op.unsendable() {
                Ok(true)
            } else if order.is_behind(waiting) {
                Ok(false)
            } else {
                waiting.ready.poll()
            };
            match may_begin {
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

    /// Closes the list, since the peer is gone, and returns all waiting operations.
    pub fn close(&self) -> Vec<Hold> {
        let mut list = self.lock();
        list.closed = true;
        self.any.store(false, Ordering::SeqCst);
        list.waiting.drain(..).map(|waiting| waiting.op).collect()
    }
}

impl PeerState {
    /// Starts an operation once `ready` has happened. The operation already counts as posted.
    ///
    /// # Errors
    /// The peer's error if the peer is gone; the operation then has failed with it.
    pub fn start_after(
        self: &Arc<Self>,
        ready: StreamEvent,
        op: Hold,
        start: impl FnOnce(&Arc<PeerState>, Hold) + Send + 'static,
    ) -> Result<()> {
        if let Err(Waiting { op, .. }) = self.stream_queue.add(Waiting { ready, op, start: Box::new(start) })
        {
            op.fail(self.gone());
            return Err(self.gone());
        }
        self.home().rouse();
        Ok(())
    }

    /// Queues an operation once `ready` has happened. Later notifications wait for it from now on. Errors as
    /// for [`PeerState::start_after`].
    pub fn post_after(self: &Arc<Self>, ready: StreamEvent, op: Hold) -> Result<()> {
        if op.verb() != Verb::Notify {
            self.queue.join(&op);
        }
        self.start_after(ready, op, |state, op| state.start(op))
    }

    /// Queues an operation that has waited for a stream.
    pub fn start(self: &Arc<Self>, op: Hold) {
        let bytes = op.total;
        match self.queue.post_joined(op) {
            Ok(()) => self.rouse_for(bytes),
            Err(op) => op.fail(self.gone()),
        }
    }

    /// Starts operations that need not wait any longer. Returns whether there were any.
    pub fn start_ready(self: &Arc<Self>) -> bool {
        if !self.stream_queue.any() {
            return false;
        }
        // Another thread is starting operations, and will poll again soon.
        let Ok(_alone) = self.stream_queue.releasing.try_lock() else { return false };
        let taken = self.stream_queue.take();
        let worked = !taken.is_empty();
        for (Waiting { op, start, .. }, error) in taken {
            if let Some(error) = error {
                op.fail(error);
            }
            match op.verb() {
                // The send has a number that the peer expects: it is withdrawn through the queue.
                Verb::Send => start(self, op),
                _ if op.failing() => op.cut_short(),
                _ => start(self, op),
            }
        }
        worked
    }
}
