//! Synchronization tools: a lock that survives a panic, and a wake-up.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex, even if a thread panicked while it had the lock: no panic may cross into the host.
pub fn locked<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Wakes a worker that sleeps in `poll`; each worker has one.
///
/// Invariant: work published before [`Wake::wake`] is seen by a worker that calls [`Wake::prepare`] and then looks for
/// work before it sleeps.
#[derive(Debug)]
pub struct Wake {
    eventfd: OwnedFd,
    asleep: AtomicBool,
}

impl Wake {
    pub fn new() -> io::Result<Wake> {
        // SAFETY: no memory is passed.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just made this descriptor, and it has no other owner.
        Ok(Wake { eventfd: unsafe { OwnedFd::from_raw_fd(fd) }, asleep: AtomicBool::new(false) })
    }

    /// The descriptor on which the worker sleeps.
    pub fn fd(&self) -> RawFd {
        self.eventfd.as_raw_fd()
    }

    /// Announces that the worker is about to sleep.
    pub fn prepare(&self) {
        self.asleep.store(true, Ordering::SeqCst);
    }

    /// Announces that the worker is awake. `readable` says whether `poll` has found a wake-up; if so, it is
    /// discarded.
    ///
    /// A waking thread may write only after the worker has found the work by itself. That wake-up ends the next sleep
    /// and is discarded after it.
    pub fn awake(&self, readable: bool) {
        self.asleep.store(false, Ordering::SeqCst);
        if readable {
            let mut count = 0_u64;
            // SAFETY: the kernel writes the eight bytes of `count`.
            unsafe { libc::read(self.fd(), (&raw mut count).cast(), size_of::<u64>()) };
        }
    }

    /// Wakes the worker, if it sleeps.
    pub fn wake(&self) {
        if self.asleep.swap(false, Ordering::SeqCst) {
            let one = 1_u64;
            // SAFETY: the kernel reads the eight bytes of `one`.
            unsafe { libc::write(self.fd(), (&raw const one).cast(), size_of::<u64>()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn readable(wake: &Wake) -> bool {
        let mut fds = [libc::pollfd { fd: wake.fd(), events: libc::POLLIN, revents: 0 }];
        // SAFETY: the kernel writes only into `fds`, whose length is given.
        unsafe { libc::poll(fds.as_mut_ptr(), 1, 0) == 1 }
    }

    #[test]
    fn a_wake_up_that_comes_late_ends_one_sleep_and_no_more() {
        let wake = Wake::new().expect("a descriptor");
        // Already awake: the worker saw the work before it slept, and the other thread writes only now.
        wake.prepare();
        wake.awake(false);
        let one = 1_u64;
        // SAFETY: the kernel reads the eight bytes of `one`.
        unsafe { libc::write(wake.fd(), (&raw const one).cast(), size_of::<u64>()) };
        wake.prepare();
        let found = readable(&wake);
        wake.awake(found);
        assert!(found && !readable(&wake), "it would never sleep again");
    }

    #[test]
    fn a_sleeper_is_woken() {
        let wake = Wake::new().expect("a descriptor");
        wake.wake();
        assert!(!readable(&wake), "nobody sleeps");
        wake.prepare();
        wake.wake();
        assert!(readable(&wake));
        wake.awake(true);
        assert!(!readable(&wake));
    }
}
