//! Giving places of the pool back, many at a time.
//!
//! ```text
//!   push ──> ranges (neighbours merged) ── release: batches of at most 128 ranges and 1024 fragments ──> the kernel
//! ```
//! Invariant: a batch stays within what the kernel takes of one call, since it ignores what is beyond; and a token
//! that the kernel has been told of is never told again.

use std::io;
use std::os::fd::RawFd;

use super::{DmabufToken, SO_DEVMEM_DONTNEED};
use ferrywire_sys::checked;

/// `MAX_DONTNEED_TOKENS`: ranges of one call; more are refused.
pub const RANGES_PER_CALL_MAX: usize = 128;
/// `MAX_DONTNEED_FRAGS`: fragments of one call; more are ignored.
pub const FRAGMENTS_PER_CALL_MAX: u32 = 1024;

/// Tokens of one socket that go back with the next release.
#[derive(Debug, Default)]
pub struct Tokens {
    /// None of more fragments than a call takes.
    ranges: Vec<DmabufToken>,
    fragments: usize,
}

/// What a release did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Released {
    /// Calls of the kernel.
    pub calls: usize,
    /// Fragments that it took back.
    pub fragments: usize,
    /// Those that it did not know: released before, or received by another socket.
    pub unknown: usize,
}

impl Tokens {
    /// None.
    pub fn new() -> Tokens {
        Tokens::default()
    }

    /// Adds one.
    pub fn push(&mut self, token: u32) {
        self.add(DmabufToken { token_start: token, token_count: 1 });
        self.fragments += 1;
    }

    /// Fragments whose tokens are here.
    pub fn fragments(&self) -> usize {
        self.fragments
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.fragments == 0
    }

    /// Forgets them all: their socket is closed, and they have gone back with it.
    pub fn clear(&mut self) {
        self.ranges.clear();
        self.fragments = 0;
    }

    /// Gives them all back, on the socket that received them.
    ///
    /// # Errors
    /// Those of the kernel (`EBADF`: no TCP socket). What had not been told by then is still here.
    pub fn release(&mut self, fd: RawFd) -> io::Result<Released> {
        let mut released = Released::default();
        self.merge();
        while let Some((ranges, fragments)) = self.batch() {
            let taken = dont_need(fd, ranges)?;
            let (told, ranges) = (fragments as usize, ranges.len());
            released.calls += 1;
            released.fragments += taken.min(told);
            released.unknown += told.saturating_sub(taken);
            self.forget(ranges, told);
        }
        Ok(released)
    }

    /// What the next call tells, and the fragments of it.
    pub fn batch(&self) -> Option<(&[DmabufToken], u32)> {
        let (mut ranges, mut fragments) = (0, 0);
        for range in self.ranges.iter().take(RANGES_PER_CALL_MAX) {
            if fragments + range.token_count > FRAGMENTS_PER_CALL_MAX {
                break;
            }
            fragments += range.token_count;
            ranges += 1;
        }
        (ranges > 0).then(|| (&self.ranges[..ranges], fragments))
    }

    /// The kernel has taken so many.
    pub fn forget(&mut self, ranges: usize, fragments: usize) {
        self.ranges.drain(..ranges);
        self.fragments -= fragments;
    }

    /// Neighbours become one range, in whichever order they came: fewer ranges are fewer calls.
    pub fn merge(&mut self) {
        if self.ranges.is_sorted_by_key(|range| range.token_start) {
            return;
        }
        let mut apart = std::mem::take(&mut self.ranges);
        apart.sort_unstable_by_key(|range| range.token_start);
        apart.into_iter().for_each(|range| self.add(range));
    }

    fn add(&mut self, range: DmabufToken) {
        let end = |last: &DmabufToken| last.token_start.checked_add(last.token_count);
        match self.ranges.last_mut() {
            Some(last)
                if end(last) == Some(range.token_start)
                    && last.token_count + range.token_count <= FRAGMENTS_PER_CALL_MAX =>
            {
                last.token_count += range.token_count;
            }
            _ => self.ranges.push(range),
        }
    }
}

/// Tells the kernel; gives the fragments that it took back, which this option returns where others return 0.
fn dont_need(fd: RawFd, ranges: &[DmabufToken]) -> io::Result<usize> {
    let bytes = size_of_val(ranges) as libc::socklen_t;
    // SAFETY: the kernel reads `bytes` bytes at `ranges`, which is borrowed for the call.
    let taken =
        unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, SO_DEVMEM_DONTNEED, ranges.as_ptr().cast(), bytes) };
    checked(taken as libc::ssize_t)
}
