//! A file descriptor for event loops: it becomes readable when an armed transfer, peer or endpoint has a result.
//!
//! An event loop (`epoll`, `asyncio`) polls one [`Wakeup`], and transfers, peers and endpoints are armed with
//! it. Each arming makes the descriptor readable once:
//!
//! ```text
//!   arm ──▶ readable ──▶ clear ──▶ poll the armed objects ──▶ arm those again that have nothing yet
//! ```
//!
//! Invariant: an event before [`Wakeup::clear`] is seen by a poll after it, and an armed object that has an
//! event later makes the descriptor readable again. Spurious wake-ups are possible: poll.
//! Read next: `../core/waiting.rs`, whose lists hold wake-ups beside threads.
#![forbid(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use crate::core::sleeper::{PassiveWaiter, Sleeper};
use crate::core::waiting::WakeHandle;
use crate::error::{Error, Result};
use ferrywire_sys::fork::Origin;
use ferrywire_sys::poll::Wake;

/// A file descriptor to wait on, readable when an armed object has an event.
///
/// Clones share one descriptor; any number of objects and threads may use it. Only its clones keep it open:
/// objects that are armed with a dropped one wake nothing. In an endpoint without threads, events happen only
/// while the application calls [`Endpoint::progress`](crate::Endpoint::progress).
///
/// ```
/// # use ferrywire::{Endpoint, Wakeup};
/// # use std::time::Duration;
/// # fn main() -> ferrywire::Result<()> {
/// # let timeout = Duration::from_secs(60);
/// # let near = Endpoint::builder().listen("127.0.0.1:0".parse().unwrap()).build()?;
/// # let far = Endpoint::builder().build()?;
/// # let peer = far.connect(near.listen_addresses()[0], timeout)?;
/// let wakeup = Wakeup::new()?;
/// let transfer = peer.notify(b"hello")?;
/// transfer.arm(&wakeup);
/// let outcome = loop {
///     wakeup.wait(Duration::from_secs(1))?; // or with poll, epoll, an event loop
///     wakeup.clear();
///     if let Some(outcome) = transfer.poll() {
///         break outcome;
///     }
///     transfer.arm(&wakeup);
/// };
/// # outcome?; near.accept(timeout)?; Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Wakeup {
    wake: Arc<Wake>,
    origin: Origin,
}

impl Wakeup {
    /// Creates a descriptor that is not readable.
    ///
    /// # Errors
    /// [`Error::Io`] if the process has no free descriptor.
    pub fn new() -> Result<Wakeup> {
        let wake = Wake::new().map_err(|error| Error::io("make an eventfd", &error))?;
        Ok(Wakeup { wake: Arc::new(wake), origin: Origin::here() })
    }

    /// Makes the descriptor unreadable. Poll the armed objects *afterwards*. Reading the descriptor directly
    /// instead loses later events.
    pub fn clear(&self) {
        // A forked child shares the descriptor with its parent; the events are the parent's.
        if !self.origin.is_elsewhere() {
            self.wake.drain();
        }
    }

    /// Makes the descriptor readable, for example from another thread.
    pub fn wake(&self) {
        self.wake.wake();
    }

    /// Waits until the descriptor is readable; false after `timeout`.
    ///
    /// # Errors
    /// [`Error::Io`] if the system call fails.
    pub fn wait(&self, timeout: Duration) -> Result<bool> {
        self.wake.wait(timeout).map_err(|error| Error::io("wait on the descriptor of a wakeup", &error))
    }

    /// An entry for wait lists that makes this descriptor readable.
    pub(crate) fn handle(&self) -> WakeHandle {
        WakeHandle::Descriptor { wake: Arc::downgrade(&self.wake), _passive: None }
    }

    /// The entry for a wait list of a worker's work. While it exists, the worker's thread does not park.
    pub(crate) fn handle_on(&self, sleeper: &Arc<Sleeper>) -> WakeHandle {
        let passive = Some(PassiveWaiter::on(sleeper));
        WakeHandle::Descriptor { wake: Arc::downgrade(&self.wake), _passive: passive }
    }
}

impl AsFd for Wakeup {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.fd()
    }
}

impl AsRawFd for Wakeup {
    fn as_raw_fd(&self) -> RawFd {
        self.wake.fd().as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::waiting::WaitList;

    const SOON: Duration = Duration::from_secs(60);

    #[test]
    fn a_wake_stays_until_it_is_cleared() {
        let wakeup = Wakeup::new().unwrap();
        assert_eq!(wakeup.wait(Duration::ZERO), Ok(false));
        (0..3).for_each(|_| wakeup.wake());
        assert_eq!((wakeup.wait(SOON), wakeup.wait(SOON)), (Ok(true), Ok(true)));
        wakeup.clear();
        assert_eq!(wakeup.wait(Duration::ZERO), Ok(false));
        wakeup.clone().wake();
        assert_eq!(wakeup.wait(SOON), Ok(true));
    }

    #[test]
    fn a_list_keeps_no_descriptor_open_and_forgets_those_that_are_gone() {
        let list = WaitList::default();
        let kept = Wakeup::new().unwrap();
        let gone: Vec<_> = (0..100)
            .map(|_| {
                let wakeup = Wakeup::new().unwrap();
                list.add(wakeup.handle(), || false);
                Arc::downgrade(&wakeup.wake)
            })
            .collect();
        assert!(gone.iter().all(|gone| gone.upgrade().is_none()));
        (0..3).for_each(|_| list.add(kept.handle(), || false));
        assert_eq!(list.len(), 1);
        list.wake();
        assert_eq!((kept.wait(SOON), list.len()), (Ok(true), 0));
    }
}
