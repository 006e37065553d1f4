//! Those who wait for one thing, and how each of them is woken.
//!
//! Invariant: a waiter that is added is woken, at once if the thing is there and else when it comes; whoever brings it pays one
//! load where no one waits. Read next: `sleeper.rs`, for a caller that sleeps on a worker's sockets.

use super::sleeper::{PassiveWaiter, Sleeper};
use super::sync::{AtomicBool, Mutex, Thread, Wake};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, Weak};

/// A waiter, as it is woken.
#[derive(Clone)]
pub(crate) enum WakeHandle {
    /// A parked thread.
    Thread(Thread),
    /// A caller that sleeps in this worker's poller.
    Owner(Arc<Sleeper>),
    /// A descriptor that somebody may look at, if it is still there.
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

    /// Whether nobody is left to be woken.
    fn is_gone(&self) -> bool {
        matches!(self, WakeHandle::Descriptor { wake, .. } if wake.strong_count() == 0)
    }
}

/// Those who wait for one thing.
#[derive(Default)]
pub(crate) struct WaitList {
    any: AtomicBool,
    list: Mutex<Vec<WakeHandle>>,
}

impl WaitList {
    /// Adds a waiter, and wakes everybody if the thing is there by then. Who is on the list already is there once.
    pub fn add(&self, handle: WakeHandle, is_there: impl FnOnce() -> bool) {
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        list.retain(|other| !other.is_gone());
        if !list.iter().any(|other| other.is(&handle)) {
            list.push(handle);
        }
        drop(list);
        self.any.store(true, Ordering::SeqCst);
        // The thread that brought it meanwhile may have seen an empty list.
        if is_there() {
            self.wake();
        }
    }

    /// Takes somebody out that waits no more and was not woken.
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

    /// Wakes everybody, once. Costs one load when nobody waits.
    pub fn wake(&self) {
        if self.any.load(Ordering::SeqCst) {
            let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
            self.any.store(false, Ordering::SeqCst);
            let waiting = std::mem::take(&mut *list);
            drop(list);
            waiting.iter().for_each(WakeHandle::wake);
        }
    }
}
