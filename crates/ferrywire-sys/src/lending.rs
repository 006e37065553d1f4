//! Pages lent to a socket: sent by reference, through a pipe that takes them from memory and gives them on.
//!
//! `vmsplice` puts references to the pages of memory into a pipe, and `splice` moves them from there into a socket. No
//! byte is copied on the way. Unlike `MSG_ZEROCOPY`, which the kernel undoes by a copy where both ends are on one host,
//! the pages are read by whoever receives them, and nobody tells when that has been done.
//! Read next: `ferrywire-net/src/tcp/lending.rs`, who waits for that.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use super::signal::without_sigpipe;
use super::{checked, uninterrupted};
use crate::IoVec;

/// A pipe between memory and a socket.
#[derive(Debug)]
pub struct PagePipe {
    read: OwnedFd,
    write: OwnedFd,
    /// Bytes in it.
    held: usize,
}

impl PagePipe {
    /// A pipe with room for as many pages as so many bytes have.
    ///
    /// Errors: `EPERM` when this user has too much memory in pipes.
    pub fn new(bytes: usize) -> io::Result<PagePipe> {
        let mut ends = [0; 2];
        // SAFETY: room for two descriptors.
        checked(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC | libc::O_NONBLOCK) } as _)?;
        // SAFETY: descriptors that were just opened, and are nobody else's.
        let [read, write] = ends.map(|end| unsafe { OwnedFd::from_raw_fd(end) });
        // SAFETY: no memory is passed.
        checked(unsafe { libc::fcntl(write.as_raw_fd(), libc::F_SETPIPE_SZ, bytes as libc::c_int) } as _)?;
        Ok(PagePipe { read, write, held: 0 })
    }

    /// Bytes that are on their way through it.
    pub fn held(&self) -> usize {
        self.held
    }

    /// Puts references to the pages of a piece into it; gives the bytes that they have.
    ///
    /// Errors: `WouldBlock` when it is full, `EFAULT` where the memory has no pages of its own (device mappings).
    ///
    /// # Safety
    /// The memory is mapped, and nobody writes to it until whoever receives these bytes has read them.
    pub unsafe fn take(&mut self, piece: IoVec) -> io::Result<usize> {
        let vector = libc::iovec { iov_base: piece.base.cast(), iov_len: piece.len };
        let flags = libc::SPLICE_F_NONBLOCK;
        // SAFETY: one vector, of memory that the caller vouches for.
        let taken = uninterrupted(|| unsafe { libc::vmsplice(self.write.as_raw_fd(), &vector, 1, flags) })?;
        self.held += taken;
        Ok(taken)
    }

    /// Moves what it holds, or some of it, into a socket, without blocking; gives the bytes. With `more`, other bytes
    /// follow at once.
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
