//! Operations that wait for a GPU stream before they begin: posted and counted, but not queued.
//!
//! The thread that polls the peer's home worker also polls the GPU, and starts operations that are ready.
//!
//! Invariant: an operation is either in this list or has begun. If it is cancelled, fails or loses its memory
//! while it waits, it ends as if it had begun.
//! Read next: `on_stream.rs`, which adds and starts operations; `../ordering.rs`, the stream events.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::core::operation::{Hold, Op, Verb};
use crate::core::ordering::StreamEvent;
use crate::error::Error;

/// Starts an operation of the peer `P`.
type Start<P> = Box<dyn FnOnce(&Arc<P>, Hold) + Send>;

pub(super) struct Waiting<P> {
    pub ready: StreamEvent,
    pub op: Hold,
    pub start: Start<P>,
}

struct List<P> {
    waiting: Vec<Waiting<P>>,
    closed: bool,
}

/// The operations of one peer `P` that wait for a GPU stream.
pub(crate) struct StreamQueue<P> {
    any: AtomicBool,
    list: Mutex<List<P>>,
    /// Locked while operations are started, so that they start in order.
    pub(super) releasing: Mutex<()>,
    /// How often the list was searched for ready operations.
    #[cfg(test)]
    pub polls: std::sync::atomic::AtomicUsize,
}

/// Groups that stay in order during one pass over the list, even if the GPU finishes a later operation's event
/// meanwhile: operations of one event, receives of one tag, and notifications.
#[derive(Default)]
struct Order {
    last: Option<StreamEvent>,
    tags: HashSet<u64>,
    notification: bool,
}

impl Order {
    fn is_behind<P>(&self, waiting: &Waiting<P>) -> bool {
        let op = &waiting.op;
        self.last.as_ref().is_some_and(|last| last.is_same(&waiting.ready))
            || (op.verb() == Verb::Recv && self.tags.contains(&op.key()))
            || (op.verb() == Verb::Notify && self.notification)
    }

    fn stays<P>(&mut self, waiting: &Waiting<P>) {
        match waiting.op.verb() {
            Verb::Recv => drop(self.tags.insert(waiting.op.key())),
            Verb::Notify => self.notification = true,
            _ => {}
        }
        self.last = Some(waiting.ready.clone());
    }
}

impl<P> Default for StreamQueue<P> {
    fn default() -> StreamQueue<P> {
        StreamQueue {
            any: AtomicBool::new(false),
            list: Mutex::new(List { waiting: Vec::new(), closed: false }),
            releasing: Mutex::new(()),
            #[cfg(test)]
            polls: std::sync::atomic::AtomicUsize::new(0),
        }
    }
}

impl<P> StreamQueue<P> {
    fn lock(&self) -> MutexGuard<'_, List<P>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether operations wait, so that a thread has to poll the GPU.
    pub fn any(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }

    /// Whether this operation waits here for a stream.
    pub fn knows(&self, op: &Arc<Op>) -> bool {
        self.any() && self.lock().waiting.iter().any(|waiting| Arc::ptr_eq(&waiting.op, op))
    }

    /// Adds an operation; returns it if the peer is gone.
    pub(super) fn add(&self, waiting: Waiting<P>) -> Result<(), Waiting<P>> {
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
    pub(super) fn take(&self) -> Vec<(Waiting<P>, Option<Error>)> {
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
