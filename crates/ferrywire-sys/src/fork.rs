//! Detects that an object is used in a forked child of the process that created it, and keeps descriptors from children.
//!
//! A child has a copy of its parent's memory, but none of its threads: locks stay in the state they had, and
//! file descriptors are shared.
//! Invariant: the check costs one atomic load and takes no lock.
//! Read next: [`Origin::check`]; [`Withheld`].

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::process;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

/// Most descriptors that are kept from children at a time; a child gets the others.
const WITHHELD_MAX: usize = 4096;
const FREE: RawFd = -1;

/// The descriptors that forked children do not get.
static WITHHELD: [AtomicI32; WITHHELD_MAX] = [const { AtomicI32::new(FREE) }; WITHHELD_MAX];

/// Forks since the first call of [`Origin::here`]; a `pthread_atfork` handler counts them in the child.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// The process in which an object was created. Objects store one and check it on use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    forks: u32,
    process: u32,
}

impl Origin {
    /// The current process. The first call installs the `pthread_atfork` handler.
    pub fn here() -> Origin {
        install_handler();
        Origin { forks: FORKS.load(Ordering::Relaxed), process: process::id() }
    }

    /// Whether the current process is a forked child of the origin.
    pub fn is_elsewhere(self) -> bool {
        FORKS.load(Ordering::Relaxed) != self.forks
    }

    /// # Errors
    /// [`Forked`] when the current process is a forked child of the origin.
    pub fn check(self) -> Result<(), Forked> {
        if self.is_elsewhere() {
            return Err(Forked { built_in: self.process, here: process::id() });
        }
        Ok(())
    }
}

/// An object of the parent process was used in a forked child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forked {
    /// Process id of the parent, which created the object.
    pub built_in: u32,
    /// Process id of the child, which used it.
    pub here: u32,
}

/// Keeps a descriptor from forked children, as long as this value exists; it must be dropped before the descriptor is
/// closed. For descriptors whose effect in the kernel lasts until all copies are closed, such as locks, bindings and
/// connections. In a child the number belongs to an empty file, so that the object that owns it can be dropped there.
#[derive(Debug)]
pub struct Withheld {
    place: Option<usize>,
    fd: RawFd,
}

impl Withheld {
    /// Keeps `fd` from the children that are forked from now on.
    pub fn new(fd: BorrowedFd<'_>) -> Withheld {
        install_handler();
        let fd = fd.as_raw_fd();
        let take = |place: &AtomicI32| replace(place, FREE, fd);
        Withheld { place: WITHHELD.iter().position(take), fd }
    }
}

impl Drop for Withheld {
    fn drop(&mut self) {
        if let Some(place) = self.place {
            // In a child the place is free already, and may have been taken again.
            replace(&WITHHELD[place], self.fd, FREE);
        }
    }
}

fn replace(place: &AtomicI32, from: RawFd, to: RawFd) -> bool {
    place.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok()
}

/// Installs the `pthread_atfork` handler, once.
fn install_handler() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        // SAFETY: the handler only counts and makes system calls, which is allowed after a fork.
        let refused = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        if refused != 0 {
            tracing::warn!(
                "cannot register a fork handler: use of ferrywire in a forked child will not be detected"
            );
        }
    });
}

extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    // An empty file, and whether this function has to close it.
    let (mut empty, mut spare) = (FREE, false);
    for place in &WITHHELD {
        let fd = place.swap(FREE, Ordering::Relaxed);
        if fd == FREE {
            continue;
        }
        if empty == FREE {
            empty = empty_file();
            spare = empty != FREE;
        }
        if empty == FREE && is_at_limit() {
            // SAFETY: the call only changes a descriptor of the child. No other thread can take the number.
            unsafe { libc::close(fd) };
            empty = empty_file();
            spare = empty != FREE && empty != fd;
        }
        // SAFETY: the call only changes descriptors of the child. The number stays in use, so no other file gets it.
        if empty != fd && unsafe { libc::dup3(empty, fd, libc::O_CLOEXEC) } < 0 {
            // There is no empty file, or the limit was lowered below the number. It is better free than the parent's.
            // SAFETY: as above.
            unsafe { libc::close(fd) };
        }
    }
    if spare {
        // SAFETY: the descriptor is this function's own.
        unsafe { libc::close(empty) };
    }
}

/// A new empty file; [`FREE`] on failure.
fn empty_file() -> RawFd {
    // SAFETY: no memory is passed.
    unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) }
}

/// Whether the last system call failed because the process has as many descriptors as it may.
fn is_at_limit() -> bool {
    io::Error::last_os_error().raw_os_error() == Some(libc::EMFILE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::{PAGE_BYTES, anonymous_file};
    use std::fs::{File, TryLockError};
    use std::io::Read;
    use std::os::fd::{AsFd, OwnedFd};

    /// A forked child that does nothing, until this value is dropped.
    struct Child {
        pid: libc::pid_t,
    }

    impl Child {
        /// Returns once the child's handlers have run.
        fn fork() -> Child {
            let (mut started, starts) = io::pipe().expect("a pipe");
            // SAFETY: the child only makes system calls and exits.
            let pid = unsafe { libc::fork() };
            assert!(pid >= 0, "no fork: {}", io::Error::last_os_error());
            if pid == 0 {
                // SAFETY: as above.
                unsafe {
                    libc::write(starts.as_raw_fd(), [0u8].as_ptr().cast(), 1);
                    libc::sleep(60);
                    libc::_exit(0);
                }
            }
            drop(starts);
            started.read_exact(&mut [0]).expect("the child lives");
            Child { pid }
        }
    }

    impl Drop for Child {
        fn drop(&mut self) {
            // SAFETY: the child is this process's own and was not waited for yet.
            unsafe {
                libc::kill(self.pid, libc::SIGKILL);
                libc::waitpid(self.pid, std::ptr::null_mut(), 0);
            }
        }
    }

    /// A locked file, and another opening of it.
    fn locked() -> (File, File) {
        let file: OwnedFd = anonymous_file(PAGE_BYTES).expect("memory");
        let other = File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).expect("it exists");
        let file = File::from(file);
        file.try_lock().expect("it is free");
        (file, other)
    }

    /// One test, because a child of another one could have copies of these files.
    #[test]
    fn what_a_withheld_descriptor_holds_ends_although_a_child_lives() {
        let (file, other) = locked();
        let (shared, shared_other) = locked();
        let withheld = Withheld::new(file.as_fd());
        drop(Withheld::new(shared.as_fd()));
        let _child = Child::fork();
        assert!(matches!(other.try_lock(), Err(TryLockError::WouldBlock)), "the parent has it");
        drop((withheld, file, shared));
        other.try_lock().expect("the child has no copy");
        assert!(
            matches!(shared_other.try_lock(), Err(TryLockError::WouldBlock)),
            "the child has a copy of what is no longer withheld"
        );
    }
}
