//! The unsafe fence for Linux: every system call that rustix and socket2 do not offer safely.
//!
//! One file per kernel interface, each a few functions that are safe to call, or `unsafe` with the one
//! promise that the kernel needs. Invariant: no policy here. What a number means for the engine is
//! decided by the caller. Functions take raw descriptors: a wrong one gives `EBADF`, never undefined
//! behaviour.
//! Calls that only devmem TCP makes (netlink, flow rules) are in `ferrywire-devmem`, `sys/`.
//! Read next: `socket.rs`, then `poll.rs`, which the workers wait in.

pub mod affinity;
pub mod cmsg;
pub mod fork;
mod iovec;
pub mod lending;
pub mod mapping;
pub mod nics;
pub mod numa;
pub mod poll;
pub mod random;
pub mod rng;
pub mod signal;
pub mod socket;
pub mod tcp_info;
pub mod udmabuf;
pub mod zerocopy;

pub use iovec::{IOVECS_PER_CALL_MAX, IoVec};

use std::io;

/// The result of a call that returns -1 and sets `errno` when it fails.
pub fn checked(result: libc::ssize_t) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// Repeats a call that was interrupted by a signal.
pub fn uninterrupted(mut call: impl FnMut() -> libc::ssize_t) -> io::Result<usize> {
    loop {
        match checked(call()) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}
