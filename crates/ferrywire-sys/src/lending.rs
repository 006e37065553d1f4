//! Zero-copy sends through a pipe: `vmsplice` and `splice`.
//!
//! `vmsplice` puts references to pages into a pipe, and `splice` moves the references into a socket. The
//! kernel copies no byte. `MSG_ZEROCOPY` differs: where both ends are on one host, the kernel copies after
//! all. The price is that the receiving process reads the sender's pages, and the kernel reports no
//! completion when it has done so.
//! Read next: `ferrywire-net/src/tcp/lending.rs`, which tracks when the pages may be reused.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use super::signal::without_sigpipe;
use super::{checked, uninterrupted};
use crate::IoVec;

/// A pipe that carries page references from memory to a socket.
#[derive(Debug)]
pub struct PagePipe {
    read: OwnedFd,
    write: OwnedFd,
    /// Bytes in the pipe: taken from memory and not yet given to a socket.
    held: usize,
}

impl PagePipe {
    /// Creates a pipe with room for `bytes` bytes' worth of pages.
    ///
    /// Errors: `EPERM` when this user's pipes already hold too much memory.
    pub fn new(bytes: usize) -> io::Result<PagePipe> {
        let mut ends = [0; 2];
        // SAFETY: the array has room for two descriptors.
        checked(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC | libc::O_NONBLOCK) } as _)?;
        // SAFETY: the descriptors were just opened, and no other code owns them.
        let [read, write] = ends.map(|end| unsafe { OwnedFd::from_raw_fd(end) });
        // SAFETY: the call gets no memory.
        checked(unsafe { libc::fcntl(write.as_raw_fd(), libc::F_SETPIPE_SZ, bytes as libc::c_int) } as _)?;
        Ok(PagePipe { read, write, held: 0 })
    }

    /// Bytes in the pipe: taken from memory and not yet given to a socket.
    pub fn held(&self) -> usize {
        self.held
    }

    /// Puts references to the pages of `piece` into the pipe; returns how many bytes fit.
    ///
    /// Errors: `WouldBlock` when the pipe is full, `EFAULT` when the memory has no pages of its own (device
    /// mappings).
    ///
    /// # Safety
    /// The memory is mapped, and no code writes to it until the receiver has read these bytes.
    pub unsafe fn take(&mut self, piece: IoVec) -> io::Result<usize> {
        let vector = libc::iovec { iov_base: piece.base.cast(), iov_len: piece.len };
        let flags = libc::SPLICE_F_NONBLOCK;
        // SAFETY: the call gets one vector, of memory that the caller vouches for.
        let taken = uninterrupted(|| unsafe { libc::vmsplice(self.write.as_raw_fd(), &vector, 1, flags) })?;
        self.held += taken;
        Ok(taken)
    }

    /// Moves bytes from the pipe into `socket` without blocking; returns how many were moved, which may be
    /// fewer than [`held`](PagePipe::held). `more` announces to the kernel that further bytes follow at once
    /// (`SPLICE_F_MORE`).
    ///
    /// Errors: `WouldBlock` when the socket has no room or the pipe is empty.
    pub fn give(&mut self, socket: RawFd, more: bool) -> io::Result<usize> {
        let flags = libc::SPLICE_F_NONBLOCK | if more { libc::SPLICE_F_MORE } else { 0 };
        let (from, none) = (self.read.as_raw_fd(), std::ptr::null_mut());
        // SAFETY: no memory is passed.
        let splice = || uninterrupted(|| unsafe { libc::splice(from, none, socket, none, self.held, flags) });
        let given = without_sigpipe(splice, |result| result.as_ref().is_ok_and(|given| *given == self.held))?;
        self.held -= given;
        match given {
            0 => Err(io::Error::from(io::ErrorKind::WouldBlock)),
            _ => Ok(given),
        }
    }
}
