//! Returns fragments of the pool to the kernel, many at a time.
//!
//! ```text
//!   push ──> ranges (neighbours merged) ── release: batches of at most 128 ranges and 1024 fragments ──> the kernel
//! ```
//! Invariant: a batch stays within the limits of one call, because the kernel ignores what is beyond; a token is never
//! returned twice.

use std::io;
use std::os::fd::RawFd;

use super::{DmabufToken, SO_DEVMEM_DONTNEED};
use ferrywire_sys::checked;

/// `MAX_DONTNEED_TOKENS`: ranges per call; more are refused.
pub const RANGES_PER_CALL_MAX: usize = 128;
/// `MAX_DONTNEED_FRAGS`: fragments per call; more are ignored.
pub const FRAGMENTS_PER_CALL_MAX: u32 = 1024;

/// Tokens of one socket, to be returned by the next release.
#[derive(Debug, Default)]
pub struct Tokens {
    /// Ranges of tokens to be returned; each has at most as many fragments as a call takes.
    ranges: Vec<DmabufToken>,
    fragments: usize,
}

/// The result of returning tokens to the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Released {
    /// Number of system calls that were made.
    pub calls: usize,
    /// Number of fragments that the kernel took back.
    pub fragments: usize,
    /// Number of fragments that the kernel did not know: returned before, or received by another socket.
    pub unknown: usize,
}

impl Tokens {
    /// An empty list of tokens.
    pub fn new() -> Tokens {
        Tokens::default()
    }

    /// Adds the token of a fragment.
    pub fn push(&mut self, token: u32) {
        self.add(DmabufToken { token_start: token, token_count: 1 });
        self.fragments += 1;
    }

    /// Number of fragments whose tokens are in the list.
    pub fn fragments(&self) -> usize {
        self.fragments
    }

    /// Whether the list has no tokens.
    pub fn is_empty(&self) -> bool {
        self.fragments == 0
    }

    /// Drops all tokens: their socket is closed, which has returned them.
    pub fn clear(&mut self) {
        self.ranges.clear();
        self.fragments = 0;
    }

    /// Returns all fragments to the kernel, on the socket that received them.
    ///
    /// # Errors
    /// The kernel's errors (`EBADF`: not a TCP socket). Tokens that were not returned stay in the list.
    pub fn release(&mut self, fd: RawFd) -> io::Result<Released> {
        let mut released = Released::default();
        self.merge();
        while let Some((ranges, fragments)) = self.batch() {
            let taken = dont_need(fd, ranges)?;
            let (reported, ranges) = (fragments as usize, ranges.len());
            released.calls += 1;
            released.fragments += taken.min(reported);
            released.unknown += reported.saturating_sub(taken);
            self.forget(ranges, reported);
        }
        Ok(released)
    }

    /// The ranges of the next call, and the number of their fragments.
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

    /// Drops ranges and fragments that the kernel has taken back.
    pub fn forget(&mut self, ranges: usize, fragments: usize) {
        self.ranges.drain(..ranges);
        self.fragments -= fragments;
    }

    /// Merges neighbouring tokens into ranges, in whichever order they came: fewer ranges are fewer calls.
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

/// Returns ranges; the result of this socket option is the number of fragments taken back.
fn dont_need(fd: RawFd, ranges: &[DmabufToken]) -> io::Result<usize> {
    let bytes = size_of_val(ranges) as libc::socklen_t;
    // SAFETY: the kernel reads `bytes` bytes at `ranges`, which is borrowed for the call.
    let taken =
        unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, SO_DEVMEM_DONTNEED, ranges.as_ptr().cast(), bytes) };
    checked(taken as libc::ssize_t)
}
