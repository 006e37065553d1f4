//! The target of a message that comes in frames of any order: where its bytes go, and how many are missing.
//!
//! Life: `open -> full | closed`. One atomic counter decides between the two, so that the last frame of a message is
//! either counted before a cancel, and the operation has the message, or refused to its sender after the cancel.
//!
//! Invariant: a closed target has counted less than its message, and nothing is counted any more.
//! Read next: `transfer.rs` for [`Scatter`].

use std::sync::atomic::Ordering;

use crate::sync::AtomicU64;
use crate::transfer::Scatter;
use crate::wire::Refusal;

/// Value of [`Reassembly::remaining`] once it is closed. No message is that long.
const CLOSED: u64 = u64::MAX;

/// A receive or read that waits for its data.
#[derive(Debug)]
pub struct Reassembly {
    scatter: Scatter,
    /// Bytes that are not placed and counted yet, or [`CLOSED`].
    remaining: AtomicU64,
}

impl Reassembly {
    /// Of a message of so many bytes, for these `(offset, len)` ranges of local memory.
    pub fn new(ranges: impl IntoIterator<Item = (u64, u64)>, bytes: u64) -> Reassembly {
        Reassembly { scatter: Scatter::new(ranges), remaining: AtomicU64::new(bytes) }
    }

    /// Local `(offset, len)` ranges for `len` bytes at `position` of the message.
    ///
    /// # Errors
    /// `NoSink` once it is closed, `OutOfRegion` for bytes that it has no room for.
    pub fn locate(&self, position: u64, len: u64) -> Result<impl Iterator<Item = (u64, u64)> + '_, Refusal> {
        if self.is_closed() {
            return Err(Refusal::NoSink);
        }
        self.scatter.locate(position, len).ok_or(Refusal::OutOfRegion)
    }

    /// Whether the operation ended before its data was here, so that nothing may be placed any more.
    pub fn is_closed(&self) -> bool {
        self.remaining.load(Ordering::Acquire) == CLOSED
    }

    /// Closes it; false when all of its data is counted, or it is closed already.
    pub fn close(&self) -> bool {
        let closed = |left: u64| (left != 0 && left != CLOSED).then_some(CLOSED);
        self.remaining.fetch_update(Ordering::AcqRel, Ordering::Acquire, closed).is_ok()
    }

    /// Counts placed bytes; true when those were the last.
    ///
    /// # Errors
    /// `NoSink` once it is closed: the sender is refused what the operation does not have. `OutOfRegion` for more
    /// bytes than are left, which are none of the message's.
    pub fn fill(&self, bytes: u64) -> Result<bool, Refusal> {
        let less = |left: u64| if left == CLOSED { None } else { left.checked_sub(bytes) };
        match self.remaining.fetch_update(Ordering::AcqRel, Ordering::Acquire, less) {
            Ok(left) => Ok(bytes > 0 && left == bytes),
            Err(CLOSED) => Err(Refusal::NoSink),
            Err(_) => Err(Refusal::OutOfRegion),
        }
    }
}
