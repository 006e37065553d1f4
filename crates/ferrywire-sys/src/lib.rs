//! Linux system calls that rustix and socket2 do not offer safely.
//!
//! One file per kernel interface. Each function is safe to call, or `unsafe` with the one promise that the
//! kernel needs.
//! Invariant: no policy here; the caller decides what a value means for the engine. Functions take raw
//! descriptors: a wrong one returns `EBADF`, never undefined behaviour. System calls that only devmem TCP
//! needs (netlink, flow rules) are in `ferrywire-devmem`, `sys/`.
//! Read next: `socket.rs`, then `poll.rs`, in which the workers wait.

pub mod affinity;
pub mod cmsg;
pub mod files;
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

/// Converts the result of a C call that returns -1 and sets `errno` on failure; then the error is that of
/// `errno`.
pub fn checked(result: libc::ssize_t) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// Repeats a system call until no signal interrupts it (`EINTR`).
pub fn uninterrupted(mut call: impl FnMut() -> libc::ssize_t) -> io::Result<usize> {
    loop {
        match checked(call()) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}
