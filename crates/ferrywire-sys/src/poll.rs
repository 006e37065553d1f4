//! Waiting for descriptors (`epoll`), and waking the waiting thread from another thread (`eventfd`).
//!
//! Readiness is level-triggered: a descriptor is reported until its cause is gone. Errors are reported apart
//! from readability, because a socket with zero-copy completions has an error and is neither readable nor
//! writable.
//! Invariant: a wake before [`Poller::wait`] returns is never lost.
//! Read next: `ferrywire-net/src/tcp/conn.rs`.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::checked;

/// Token of the [`Waker`]'s own event; no descriptor may use it.
pub const WAKE_TOKEN: u64 = u64::MAX;
/// Most events that one wait returns; the next wait returns the rest.
const EVENTS_PER_WAIT_MAX: usize = 128;

/// A descriptor's readiness, as one wait reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// The token that the descriptor was added with, or [`WAKE_TOKEN`].
    pub token: u64,
    /// A receive will not block: bytes, the end of the stream or a new connection is there.
    pub readable: bool,
    /// A send on the descriptor will not block.
    pub writable: bool,
    /// The descriptor failed, or its error queue has entries (zero-copy completions). Reported whatever the
    /// [`Interest`], and again until the queue is read.
    pub error: bool,
    /// Both directions are closed. Reported whatever the [`Interest`], until the descriptor is removed.
    pub hangup: bool,
}

/// The events that a descriptor is registered for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Interest {
    /// Report when a receive will not block.
    pub read: bool,
    /// Report when a send will not block.
    pub write: bool,
}

impl Interest {
    /// Interest in readability only.
    pub const READ: Interest = Interest { read: true, write: false };
    /// Interest in readability and writability.
    pub const BOTH: Interest = Interest { read: true, write: true };
    /// Interest in errors and hang-ups only, which are always reported.
    pub const NONE: Interest = Interest { read: false, write: false };

    fn bits(self) -> u32 {
        let mut bits = 0;
        if self.read {
            bits |= (libc::EPOLLIN | libc::EPOLLRDHUP) as u32;
        }
        if self.write {
            bits |= libc::EPOLLOUT as u32;
        }
        bits
    }
}

/// An epoll instance and its waker. All methods may be called from any thread.
#[derive(Debug)]
pub struct Poller {
    epoll: OwnedFd,
    wake: Arc<Wake>,
    /// Whether `epoll_pwait2` works here (Linux 5.11): timeouts finer than a millisecond.
    fine: AtomicBool,
}

/// A handle that ends a [`Poller::wait`] from another thread. Clones wake the same poller.
#[derive(Clone, Debug)]
pub struct Waker(Arc<Wake>);

/// An eventfd that is readable from the first [`wake`](Wake::wake) until [`drain`](Wake::drain).
#[derive(Debug)]
pub struct Wake {
    eventfd: OwnedFd,
    pending: AtomicBool,
}

impl Poller {
    /// An epoll instance without descriptors, and its waker.
    pub fn new() -> io::Result<Poller> {
        // SAFETY: no memory is passed.
        let fd = checked(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) } as libc::ssize_t)?;
        // SAFETY: the kernel has just made this descriptor, and no other code owns it.
        let epoll = unsafe { OwnedFd::from_raw_fd(fd as RawFd) };
        let wake = Arc::new(Wake::new()?);
        let poller = Poller { epoll, wake, fine: AtomicBool::new(true) };
        poller.control(libc::EPOLL_CTL_ADD, poller.wake.eventfd.as_raw_fd(), WAKE_TOKEN, Interest::READ)?;
        Ok(poller)
    }

    /// A handle that ends [`Poller::wait`] from any thread.
    pub fn waker(&self) -> Waker {
        Waker(self.wake.clone())
    }

    /// Registers a descriptor. Returns `InvalidInput` for [`WAKE_TOKEN`].
    pub fn add(&self, fd: RawFd, token: u64, interest: Interest) -> io::Result<()> {
        if token == WAKE_TOKEN {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        self.control(libc::EPOLL_CTL_ADD, fd, token, interest)
    }

    /// Replaces the interest of a registered descriptor.
    pub fn modify(&self, fd: RawFd, token: u64, interest: Interest) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, fd, token, interest)
    }

    /// Removes a descriptor. Closing the descriptor removes it too.
    pub fn remove(&self, fd: RawFd) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_DEL, fd, 0, Interest::NONE)
    }

    /// Waits until a descriptor is ready, the timeout ends or a waker is used.
    ///
    /// `events` is cleared first and stays empty on a timeout. `None` waits without a limit.
    pub fn wait(&self, events: &mut Vec<Event>, timeout: Option<Duration>) -> io::Result<()> {
        events.clear();
        let mut ready = [libc::epoll_event { events: 0, u64: 0 }; EVENTS_PER_WAIT_MAX];
        let count = self.wait_uninterrupted(&mut ready, timeout)?;
        for event in &ready[..count] {
            let event = Event::from_kernel(*event);
            if event.token == WAKE_TOKEN {
                self.wake.drain();
            }
            events.push(event);
        }
        Ok(())
    }

    fn wait_uninterrupted(
        &self,
        ready: &mut [libc::epoll_event; EVENTS_PER_WAIT_MAX],
        timeout: Option<Duration>,
    ) -> io::Result<usize> {
        let start = Instant::now();
        loop {
            let left = timeout.map(|limit| limit.saturating_sub(start.elapsed()));
            match self.wait_once(ready, left) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                result => return result,
            }
        }
    }

    fn wait_once(
        &self,
        ready: &mut [libc::epoll_event; EVENTS_PER_WAIT_MAX],
        timeout: Option<Duration>,
    ) -> io::Result<usize> {
        let fine_timeout = timeout.filter(|limit| limit.subsec_nanos() % 1_000_000 != 0);
        if let Some(limit) = fine_timeout.filter(|_| self.fine.load(Ordering::Relaxed)) {
            match self.wait_fine(ready, limit) {
                // Old kernels lack the call, and old sandboxes refuse calls that they do not know.
                Err(e) if matches!(e.raw_os_error(), Some(libc::ENOSYS | libc::EPERM)) => {
                    self.fine.store(false, Ordering::Relaxed);
                }
                result => return result,
            }
        }
        let (fd, room) = (self.epoll.as_raw_fd(), ready.len() as libc::c_int);
        // SAFETY: the kernel writes at most `room` events, the length of `ready`.
        let count = unsafe { libc::epoll_wait(fd, ready.as_mut_ptr(), room, whole_millis(timeout)) };
        checked(count as libc::ssize_t)
    }

    fn wait_fine(
        &self,
        ready: &mut [libc::epoll_event; EVENTS_PER_WAIT_MAX],
        timeout: Duration,
    ) -> io::Result<usize> {
        let limit = libc::timespec {
            tv_sec: timeout.as_secs().try_into().unwrap_or(libc::time_t::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        };
        let (fd, room) = (self.epoll.as_raw_fd(), ready.len() as libc::c_int);
        // SAFETY: the kernel writes at most `room` events, the length of `ready`, and reads one 64-bit
        // `timespec`, which is what the 64-bit targets of this crate have; there is no signal mask.
        let count = unsafe {
            let no_mask = std::ptr::null::<libc::sigset_t>();
            libc::syscall(libc::SYS_epoll_pwait2, fd, ready.as_mut_ptr(), room, &limit, no_mask, 0_usize)
        };
        checked(count as libc::ssize_t)
    }

    fn control(&self, operation: libc::c_int, fd: RawFd, token: u64, interest: Interest) -> io::Result<()> {
        let mut event = libc::epoll_event { events: interest.bits(), u64: token };
        // SAFETY: the kernel reads one event, which outlives the call.
        let result = unsafe { libc::epoll_ctl(self.epoll.as_raw_fd(), operation, fd, &mut event) };
        checked(result as libc::ssize_t).map(drop)
    }
}

/// Converts a timeout for `epoll_wait`. Rounds up, so that no thread spins through the last part of a
/// millisecond.
fn whole_millis(timeout: Option<Duration>) -> libc::c_int {
    match timeout {
        None => -1,
        Some(limit) => limit.as_nanos().div_ceil(1_000_000).try_into().unwrap_or(libc::c_int::MAX),
    }
}

impl Event {
    fn from_kernel(event: libc::epoll_event) -> Event {
        let bits = event.events;
        let has = |mask: libc::c_int| bits & mask as u32 != 0;
        Event {
            token: event.u64,
            readable: has(libc::EPOLLIN | libc::EPOLLRDHUP),
            writable: has(libc::EPOLLOUT),
            error: has(libc::EPOLLERR),
            hangup: has(libc::EPOLLHUP),
        }
    }
}

impl Waker {
    /// Makes the current or next [`Poller::wait`] return with [`WAKE_TOKEN`] among the events.
    ///
    /// Several wakes in a row make one system call. Memory that the caller wrote before is visible to the
    /// woken thread.
    pub fn wake(&self) {
        self.0.wake();
    }
}

impl Wake {
    /// An eventfd that is not readable yet.
    pub fn new() -> io::Result<Wake> {
        let eventfd = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        Ok(Wake { eventfd, pending: AtomicBool::new(false) })
    }

    /// The descriptor that is readable after a wake.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.eventfd.as_fd()
    }

    /// Makes the descriptor readable. Several wakes in a row make one system call.
    pub fn wake(&self) {
        if !self.pending.swap(true, Ordering::AcqRel) {
            // The write cannot fail: the counter holds 2^64 - 2, and one wake is written between two drains.
            let written = rustix::io::write(&self.eventfd, &1_u64.to_ne_bytes());
            debug_assert_eq!(written, Ok(8));
        }
    }

    /// Waits until the eventfd is readable; returns false when `limit` ended first.
    pub fn wait(&self, limit: Duration) -> io::Result<bool> {
        let start = Instant::now();
        loop {
            let left = limit.saturating_sub(start.elapsed());
            let left = Timespec::try_from(left).unwrap_or(Timespec { tv_sec: i64::MAX, tv_nsec: 0 });
            match poll(&mut [PollFd::new(&self.eventfd, PollFlags::IN)], Some(&left)) {
                Err(rustix::io::Errno::INTR) => {}
                result => return Ok(result? > 0),
            }
        }
    }

    /// Empties the counter, then allows wakers to write again. In the reverse order a wake between the two
    /// steps would be lost, and `pending` would suppress every later one.
    pub fn drain(&self) {
        let mut counter = [0; 8];
        let read = rustix::io::read(&self.eventfd, &mut counter);
        debug_assert!(matches!(read, Ok(8) | Err(rustix::io::Errno::AGAIN)));
        self.pending.swap(false, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::AtomicUsize;
    use std::thread;

    use super::*;

    const AT_ONCE: Option<Duration> = Some(Duration::ZERO);
    const SOON: Option<Duration> = Some(Duration::from_secs(5));

    fn poller_with(stream: &UnixStream, interest: Interest) -> Poller {
        let poller = Poller::new().unwrap();
        poller.add(stream.as_raw_fd(), 7, interest).unwrap();
        poller
    }

    fn wait(poller: &Poller, timeout: Option<Duration>) -> Vec<Event> {
        let mut events = Vec::new();
        poller.wait(&mut events, timeout).unwrap();
        events
    }

    #[test]
    fn readiness_is_reported_until_it_is_dealt_with() {
        let (mut near, mut far) = UnixStream::pair().unwrap();
        let poller = poller_with(&near, Interest::READ);
        assert_eq!(wait(&poller, AT_ONCE), []);
        far.write_all(b"x").unwrap();
        let readable = Event { token: 7, readable: true, writable: false, error: false, hangup: false };
        assert_eq!(wait(&poller, SOON), [readable]);
        assert_eq!(wait(&poller, AT_ONCE), [readable]);
        near.read_exact(&mut [0]).unwrap();
        assert_eq!(wait(&poller, AT_ONCE), []);
    }

    #[test]
    fn interest_can_be_changed_and_removed() {
        let (near, _far) = UnixStream::pair().unwrap();
        let poller = poller_with(&near, Interest::NONE);
        assert_eq!(wait(&poller, AT_ONCE), []);
        poller.modify(near.as_raw_fd(), 8, Interest::BOTH).unwrap();
        assert!(matches!(
            wait(&poller, AT_ONCE)[..],
            [Event { token: 8, writable: true, readable: false, .. }]
        ));
        poller.remove(near.as_raw_fd()).unwrap();
        assert_eq!(wait(&poller, AT_ONCE), []);
        assert!(poller.remove(near.as_raw_fd()).is_err());
    }

    #[test]
    fn a_closed_peer_is_readable_and_hung_up() {
        let (near, far) = UnixStream::pair().unwrap();
        let poller = poller_with(&near, Interest::READ);
        drop(far);
        assert!(matches!(wait(&poller, SOON)[..], [Event { readable: true, hangup: true, .. }]));
    }

    #[test]
    fn a_wake_from_another_thread_ends_the_wait() {
        let poller = Poller::new().unwrap();
        let waker = poller.waker();
        let sleeper = thread::spawn(move || {
            thread::sleep(Duration::from_millis(20));
            waker.wake();
        });
        assert!(matches!(wait(&poller, SOON)[..], [Event { token: WAKE_TOKEN, .. }]));
        assert_eq!(wait(&poller, AT_ONCE), []);
        sleeper.join().unwrap();
    }

    #[test]
    fn wakes_before_a_wait_count_once() {
        let poller = Poller::new().unwrap();
        (0..10).for_each(|_| poller.waker().wake());
        assert_eq!(wait(&poller, SOON).len(), 1);
        assert_eq!(wait(&poller, AT_ONCE), []);
    }

    #[test]
    fn no_wake_is_lost() {
        const WAKES: usize = 20_000;
        let poller = Poller::new().unwrap();
        let (waker, posted) = (poller.waker(), Arc::new(AtomicUsize::new(0)));
        let poster = thread::spawn({
            let posted = posted.clone();
            move || {
                for _ in 0..WAKES {
                    posted.fetch_add(1, Ordering::Relaxed);
                    waker.wake();
                }
            }
        });
        while posted.load(Ordering::Relaxed) < WAKES {
            assert_eq!(wait(&poller, SOON).len(), 1, "a wake was lost");
        }
        poster.join().unwrap();
    }

    #[test]
    fn the_waker_token_is_reserved() {
        let (near, _far) = UnixStream::pair().unwrap();
        let refused = Poller::new().unwrap().add(near.as_raw_fd(), WAKE_TOKEN, Interest::READ);
        assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn timeouts_are_never_early_with_or_without_the_fine_call() {
        let poller = Poller::new().unwrap();
        for fine in [true, false] {
            poller.fine.store(fine, Ordering::Relaxed);
            for micros in [300, 1_000, 2_500] {
                let (limit, start) = (Duration::from_micros(micros), Instant::now());
                assert_eq!(wait(&poller, Some(limit)), []);
                assert!(start.elapsed() >= limit, "{micros} us, fine {fine}");
            }
        }
    }

    #[test]
    fn coarse_timeouts_are_rounded_up() {
        assert_eq!(whole_millis(None), -1);
        assert_eq!(whole_millis(AT_ONCE), 0);
        assert_eq!(whole_millis(Some(Duration::from_nanos(1))), 1);
        assert_eq!(whole_millis(Some(Duration::from_millis(2))), 2);
        assert_eq!(whole_millis(Some(Duration::MAX)), libc::c_int::MAX);
    }
}
