//! Sends that leave their last piece where it is; see [`Conn::send_lent`](crate::Conn::send_lent).
//!
//! What the socket has no room for waits in a pipe. The stream goes on with it: whoever sends next offers the same bytes
//! again, and finds them taken.
//! Invariant: the bytes in the pipe are the next of the stream.

use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::IoVec;
use ferrywire_proto::limits;
use ferrywire_sys::lending::PagePipe;
use ferrywire_sys::socket;

/// What a system that does not let us says.
const REFUSALS: [i32; 4] = [libc::EPERM, libc::EACCES, libc::ENOSYS, libc::EINVAL];

static PIPES: AtomicUsize = AtomicUsize::new(0);

/// The pipe of one connection.
#[derive(Debug, Default)]
pub(super) enum Lending {
    /// Nothing was lent yet.
    #[default]
    Fresh,
    Open(PagePipe),
    /// It cannot be done here.
    Off,
}

impl Lending {
    pub(super) fn usable(&self) -> bool {
        !matches!(self, Lending::Off)
    }

    /// Bytes that are in the pipe: the first of what is offered next.
    pub(super) fn held(&self) -> usize {
        match self {
            Lending::Open(pipe) => pipe.held(),
            _ => 0,
        }
    }

    fn pipe(&mut self) -> Option<&mut PagePipe> {
        if matches!(self, Lending::Fresh) {
            let others = PIPES.fetch_add(1, Ordering::Relaxed);
            let is_free = others < limits::LENDING_PIPES_MAX;
            *self = match is_free.then(|| PagePipe::new(limits::LENDING_PIPE_BYTES)) {
                Some(Ok(pipe)) => Lending::Open(pipe),
                _ => {
                    PIPES.fetch_sub(1, Ordering::Relaxed);
                    Lending::Off
                }
            };
        }
        match self {
            Lending::Open(pipe) => Some(pipe),
            _ => None,
        }
    }

    fn turn_off(&mut self) {
        drop(std::mem::replace(self, Lending::Off));
    }

    /// Sends the bytes in the pipe; gives how many went.
    pub(super) fn go_on(&mut self, fd: RawFd) -> io::Result<usize> {
        match self {
            Lending::Open(pipe) if pipe.held() > 0 => pipe.give(fd, false),
            _ => Ok(0),
        }
    }

    /// Sends pieces, of which the last is lent; gives the bytes that went. None: it cannot be done here, and nothing was.
    /// An error behind some of the bytes is left in `late`.
    ///
    /// # Safety
    /// As of [`Conn::send_lent`](crate::Conn::send_lent).
    pub(super) unsafe fn send(
        &mut self,
        fd: RawFd,
        pieces: &[IoVec],
        late: &mut Option<io::Error>,
    ) -> Option<io::Result<usize>> {
        let (lent, copied) = pieces.split_last()?;
        let copied_bytes: usize = copied.iter().map(|piece| piece.len).sum();
        debug_assert!(copied_bytes == 0 || self.held() == 0, "what is in the pipe comes first");
        let mut sent = 0;
        if copied_bytes > 0 {
            self.pipe()?;
            // SAFETY: readable for the length of the call.
            match unsafe { socket::send(fd, copied, libc::MSG_MORE) } {
                Ok(bytes) if bytes == copied_bytes => sent = bytes,
                result => return Some(result),
            }
        }
        let mut lent_bytes = 0;
        while lent_bytes < lent.len {
            // SAFETY: by the caller's promise.
            match unsafe { self.send_some(fd, *lent, lent_bytes) } {
                Some(Ok(bytes)) => lent_bytes += bytes,
                Some(Err(error)) if sent + lent_bytes == 0 => return Some(Err(error)),
                None if sent + lent_bytes == 0 => return None,
                Some(Err(error)) => {
                    *late = Some(error).filter(|error| error.kind() != io::ErrorKind::WouldBlock);
                    break;
                }
                None => break,
            }
        }
        Some(Ok(sent + lent_bytes))
    }

    /// Sends some of a piece, which is sent up to `done`.
    ///
    /// # Safety
    /// As of [`Lending::send`].
    unsafe fn send_some(&mut self, fd: RawFd, piece: IoVec, done: usize) -> Option<io::Result<usize>> {
        let pipe = self.pipe()?;
        if pipe.held() == 0 {
            // SAFETY: within the piece.
            let rest = IoVec::new(unsafe { piece.base.add(done) }, piece.len - done);
            // SAFETY: by the caller's promise.
            if unsafe { pipe.take(rest) }.is_err() {
                self.turn_off();
                return None;
            }
        }
        let more = done + pipe.held() < piece.len;
        let given = pipe.give(fd, more);
        if given.as_ref().is_err_and(|error| REFUSALS.contains(&error.raw_os_error().unwrap_or(0))) {
            // What is in the pipe is offered again, and copied.
            self.turn_off();
            return None;
        }
        Some(given)
    }
}

impl Drop for Lending {
    fn drop(&mut self) {
        if matches!(self, Lending::Open(_)) {
            PIPES.fetch_sub(1, Ordering::Relaxed);
        }
    }
}
