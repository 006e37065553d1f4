//! Lists of waiters for one event, and how each waiter is woken.
//!
//! Invariant: an added waiter is woken: at once if the event has happened, else when it does. A thread that
//! signals an event without waiters pays one atomic load.
//! Read next: `sleeper.rs`, for a caller that sleeps on a worker's sockets.

use super::sleeper::{PassiveWaiter, Sleeper};
use super::sync::{AtomicBool, Mutex, Thread, Wake};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, Weak};

/// How to wake one waiter.
#[derive(Clone)]
pub(crate) enum WakeHandle {
    /// A parked thread.
    Thread(Thread),
    /// A caller that sleeps in this worker's poller.
    Owner(Arc<Sleeper>),
    /// A file descriptor that an application may poll, if it still exists.
    Descriptor { wake: Weak<Wake>, _passive: Option<PassiveWaiter> },
}

impl WakeHandle {
    fn is(&self, other: &WakeHandle) -> bool {
        match (self, other) {
            (WakeHandle::Thread(one), WakeHandle::Thread(two)) => one.id() == two.id(),
            (WakeHandle::Owner(one), WakeHandle::Owner(two)) => Arc::ptr_eq(one, two),
            (WakeHandle::Descriptor { wake: one, .. }, WakeHandle::Descriptor { wake: two, .. }) => {
                one.ptr_eq(two)
            }
            _ => false,
        }
    }

    pub fn wake(&self) {
        match self {
            WakeHandle::Thread(thread) => thread.unpark(),
            WakeHandle::Owner(sleeper) => sleeper.wake_owner(),
            WakeHandle::Descriptor { wake, .. } => {
                if let Some(wake) = wake.upgrade() {
                    wake.wake();
                }
            }
        }
    }

    /// Whether the waiter no longer exists.
    fn is_gone(&self) -> bool {
        matches!(self, WakeHandle::Descriptor { wake, .. } if wake.strong_count() == 0)
    }
}

/// The waiters for one event.
#[derive(Default)]
pub(crate) struct WaitList {
    any: AtomicBool,
    list: Mutex<Vec<WakeHandle>>,
}

impl WaitList {
    /// Adds a waiter, unless it is in the list. If `is_there` returns true, the event has happened, and all
    /// waiters are woken.
    pub fn add(&self, handle: WakeHandle, is_there: impl FnOnce() -> bool) {
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        list.retain(|other| !other.is_gone());
        if !list.iter().any(|other| other.is(&handle)) {
            list.push(handle);
        }
        drop(list);
        self.any.store(true, Ordering::SeqCst);
        // The thread that signalled the event meanwhile may have seen an empty list.
        if is_there() {
            self.wake();
        }
    }

    /// Removes a waiter that no longer waits and was not woken.
    pub fn remove(&self, handle: &WakeHandle) {
        if self.any.load(Ordering::SeqCst) {
            let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
            list.retain(|other| !other.is(handle));
        }
    }

    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.list.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Wakes all waiters and empties the list. Without waiters this costs one atomic load.
    #[inline]
    pub fn wake(&self) {
        if self.any.load(Ordering::SeqCst) {
            self.wake_all();
        }
    }

    fn wake_all(&self) {
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        self.any.store(false, Ordering::SeqCst);
        let waiting = std::mem::take(&mut *list);
        drop(list);
        waiting.iter().for_each(WakeHandle::wake);
    }
}
