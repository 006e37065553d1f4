//! The lock around set-up calls of plugins that are not safe to call from several threads at once.
//!
//! NCCL makes all set-up calls of a communicator from one thread, and GPUDirect-TCPX relies on that. The last
//! `accept` of a connection imports the GPU's receive pool if it is not imported yet, without a lock. If such
//! calls overlap, each imports the pool, and each import unmaps the one before, which other connections
//! already use; their data is lost. The first call for a GPU, a `listen`, fills the plugin's record of the
//! GPU in the same way. ferrywire makes each channel's calls on a thread of its own, so this lock serializes
//! them.
//!
//! Invariant: the lock is held for one call that does not wait for a peer, and waits for the lock are
//! bounded.
//! Read next: `setup.rs`, the calls made under it.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// One lock per process: a plugin shares its state between endpoints too.
pub(super) static SETUP_LOCK: SetupLock = SetupLock::new();

/// A lock with a timeout.
#[derive(Debug)]
pub(super) struct SetupLock {
    is_held: Mutex<bool>,
    released: Condvar,
}

/// The held lock; released when dropped.
#[derive(Debug)]
pub(super) struct Held<'a>(&'a SetupLock);

impl SetupLock {
    const fn new() -> SetupLock {
        SetupLock { is_held: Mutex::new(false), released: Condvar::new() }
    }

    /// Takes the lock; `None` if another thread holds it for all of `limit`.
    pub fn acquire(&self, limit: Duration) -> Option<Held<'_>> {
        let waited = self.released.wait_timeout_while(self.lock(), limit, |is_held| *is_held);
        let (mut is_held, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if std::mem::replace(&mut *is_held, true) { None } else { Some(Held(self)) }
    }

    fn lock(&self) -> MutexGuard<'_, bool> {
        self.is_held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        *self.0.lock() = false;
        self.0.released.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thread_has_it_at_a_time_and_the_others_wait_no_longer_than_they_say() {
        static LOCK: SetupLock = SetupLock::new();
        let held = LOCK.acquire(Duration::ZERO);
        assert!(held.is_some());
        assert!(LOCK.acquire(Duration::from_millis(1)).is_none());
        let waiting = std::thread::spawn(|| LOCK.acquire(Duration::from_secs(60)).is_some());
        drop(held);
        assert!(waiting.join().unwrap());
        assert!(LOCK.acquire(Duration::ZERO).is_some());
    }
}
