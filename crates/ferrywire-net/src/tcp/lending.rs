//! Sends that pass the pages of their last piece by reference; see
//! [`Conn::send_lent`](crate::Conn::send_lent).
//!
//! Page references that the socket has no room for wait in a pipe. The next send offers the bytes again and
//! finds them taken.
//! Invariant: the bytes in the pipe are the next bytes of the stream.

use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::IoVec;
use ferrywire_proto::limits;
use ferrywire_sys::lending::PagePipe;
use ferrywire_sys::socket;

/// `errno` values of systems that refuse the pipe or `splice`.
const REFUSALS: [i32; 4] = [libc::EPERM, libc::EACCES, libc::ENOSYS, libc::EINVAL];

static PIPES: AtomicUsize = AtomicUsize::new(0);

/// The pipe of one connection, through which pages are lent to the socket.
#[derive(Debug, Default)]
pub(super) enum Lending {
    /// No piece was lent yet, so there is no pipe.
    #[default]
    Fresh,
    Open(PagePipe),
    /// This system, or the bound on pipes, does not allow a pipe here.
    Off,
}

impl Lending {
    pub(super) fn usable(&self) -> bool {
        !matches!(self, Lending::Off)
    }

    /// Bytes in the pipe; they are the first bytes of the next send.
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

    /// Moves bytes from the pipe to the socket; returns how many.
    pub(super) fn go_on(&mut self, fd: RawFd) -> io::Result<usize> {
        match self {
            Lending::Open(pipe) if pipe.held() > 0 => pipe.give(fd, false),
            _ => Ok(0),
        }
    }

    /// Sends `pieces`, the last one by reference; returns the bytes taken. `None` means that lending does not
    /// work here and no byte was taken. An error after some bytes were taken is stored in `late`.
    ///
    /// # Safety
    /// The caller keeps the promise of [`Conn::send_lent`](crate::Conn::send_lent).
    pub(super) unsafe fn send(
        &mut self,
        fd: RawFd,
        pieces: &[IoVec],
        late: &mut Option<io::Error>,
    ) -> Option<io::Result<usize>> {
        let (lent, copied) = pieces.split_last()?;
        let copied_bytes: usize = copied.iter().map(|piece| piece.len).sum();
        debug_assert!(copied_bytes == 0 || self.held() == 0, "the bytes in the pipe are sent first");
        let mut sent = 0;
        if copied_bytes > 0 {
            self.pipe()?;
            // SAFETY: the pieces are readable for the length of the call.
            match unsafe { socket::send(fd, copied, libc::MSG_MORE) } {
                Ok(bytes) if bytes == copied_bytes => sent = bytes,
                result => return Some(result),
            }
        }
        let mut lent_bytes = 0;
        while lent_bytes < lent.len {
            // SAFETY: the caller keeps the promise of `send_lent` for the last piece.
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

    /// Sends some bytes of `piece`, from offset `done` on.
    ///
    /// # Safety
    /// The caller keeps the promise of [`Lending::send`].
    unsafe fn send_some(&mut self, fd: RawFd, piece: IoVec, done: usize) -> Option<io::Result<usize>> {
        let pipe = self.pipe()?;
        if pipe.held() == 0 {
            // SAFETY: `done` is within the piece.
            let rest = IoVec::new(unsafe { piece.base.add(done) }, piece.len - done);
            // SAFETY: the caller keeps the promise of `send_lent` for this piece.
            if unsafe { pipe.take(rest) }.is_err() {
                self.turn_off();
                return None;
            }
        }
        let more = done + pipe.held() < piece.len;
        let given = pipe.give(fd, more);
        if given.as_ref().is_err_and(|error| REFUSALS.contains(&error.raw_os_error().unwrap_or(0))) {
            // The next send offers the bytes in the pipe again, and copies them.
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
