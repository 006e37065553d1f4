//! A descriptor that tells when something has happened, for programs that wait for many things at once.
//!
//! An event loop (`epoll`, `asyncio`) watches one [`Wakeup`]; transfers, peers and endpoints are attached to it. Each
//! attachment wakes once:
//!
//! ```text
//!   attach ──▶ readable ──▶ clear ──▶ look at what was attached ──▶ attach again what has nothing yet
//! ```
//!
//! Invariant: what happened before [`Wakeup::clear`] is there for those who look after it, and what was attached and
//! has something since makes the descriptor readable again. It may be readable although nobody has anything: look.
//! Read next: `worker/`, whose waiting lists hold it beside threads.
#![forbid(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use crate::core::sleeper::{PassiveWaiter, Sleeper};
use crate::core::waiting::WakeHandle;
use crate::error::{Error, Result};
use ferrywire_sys::fork::Origin;
use ferrywire_sys::poll::Wake;

/// A descriptor to wait on, readable when one of the things attached to it has something to give.
///
/// Clones share it; any number of things and threads may use one. Nothing keeps it open but its clones: what was
/// attached to one that is gone wakes nobody. In an endpoint without threads somebody has to call
/// [`Endpoint::progress`](crate::Endpoint::progress) for anything to happen.
///
/// ```
/// # use ferrywire::{Endpoint, Wakeup};
/// # use std::time::Duration;
/// # fn main() -> ferrywire::Result<()> {
/// # let limit = Duration::from_secs(60);
/// # let near = Endpoint::builder().listen("127.0.0.1:0".parse().unwrap()).build()?;
/// # let far = Endpoint::builder().build()?;
/// # let peer = far.connect(near.listen_addresses()[0], limit)?;
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
/// # outcome?; near.accept(limit)?; Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Wakeup {
    wake: Arc<Wake>,
    origin: Origin,
}

impl Wakeup {
    /// A new one, not readable.
    ///
    /// # Errors
    /// [`Error::Io`] when the process has no descriptor left.
    pub fn new() -> Result<Wakeup> {
        let wake = Wake::new().map_err(|error| Error::io("make an eventfd", &error))?;
        Ok(Wakeup { wake: Arc::new(wake), origin: Origin::here() })
    }

    /// Makes it not readable; look at what is attached *afterwards*. Who reads the descriptor instead of calling this
    /// misses what comes next.
    pub fn clear(&self) {
        // A forked child shares the descriptor with its parent, whose wakes these are.
        if !self.origin.is_elsewhere() {
            self.wake.drain();
        }
    }

    /// Makes it readable: another thread has something to tell.
    pub fn wake(&self) {
        self.wake.wake();
    }

    /// Waits until it is readable; false when the time was up before.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn wait(&self, limit: Duration) -> Result<bool> {
        self.wake.wait(limit).map_err(|error| Error::io("wait for an eventfd", &error))
    }

    /// What goes into a list of those who wait.
    pub(crate) fn handle(&self) -> WakeHandle {
        WakeHandle::Descriptor { wake: Arc::downgrade(&self.wake), _passive: None }
    }

    /// What goes into a list of waiters for work of this worker: while it is there the thread does not stand back.
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
