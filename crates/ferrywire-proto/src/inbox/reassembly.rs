//! The target of a message that arrives in frames in any order: where its bytes go, and how many are missing.
//!
//! States: `open -> full | closed`. One atomic counter decides between `full` and `closed`: the last frame of
//! a message is either counted before a cancel, and the operation succeeds, or refused to its sender after
//! it.
//!
//! Invariant: a closed target has counted fewer bytes than its message has, and counts no more.
//! Read next: `transfer.rs` for [`Scatter`].

use std::sync::atomic::Ordering;

use crate::sync::AtomicU64;
use crate::transfer::Scatter;
use crate::wire::Refusal;

/// Value of [`Reassembly::remaining`] once the target is closed. No message is that long.
const CLOSED: u64 = u64::MAX;

/// The target of a receive or read that waits for its data.
#[derive(Debug)]
pub struct Reassembly {
    scatter: Scatter,
    /// Bytes that are not counted yet, or [`CLOSED`].
    remaining: AtomicU64,
}

impl Reassembly {
    /// The target of a message of `bytes` bytes, over these `(offset, len)` ranges of local memory.
    pub fn new(ranges: impl IntoIterator<Item = (u64, u64)>, bytes: u64) -> Reassembly {
        Reassembly { scatter: Scatter::new(ranges), remaining: AtomicU64::new(bytes) }
    }

    /// Local `(offset, len)` ranges of `len` bytes at `position` of the message.
    ///
    /// # Errors
    /// `NoSink` when the target is closed, `OutOfRegion` for bytes beyond the message.
    pub fn locate(&self, position: u64, len: u64) -> Result<impl Iterator<Item = (u64, u64)> + '_, Refusal> {
        if self.is_closed() {
            return Err(Refusal::NoSink);
        }
        self.scatter.locate(position, len).ok_or(Refusal::OutOfRegion)
    }

    /// Whether the operation ended before all its data arrived, so no more bytes may be placed.
    pub fn is_closed(&self) -> bool {
        self.remaining.load(Ordering::Acquire) == CLOSED
    }

    /// Closes the target. Returns false when all bytes are counted, or when it is closed already.
    pub fn close(&self) -> bool {
        let closed = |left: u64| (left != 0 && left != CLOSED).then_some(CLOSED);
        self.remaining.fetch_update(Ordering::AcqRel, Ordering::Acquire, closed).is_ok()
    }

    /// Counts placed bytes; returns true when they were the last ones.
    ///
    /// # Errors
    /// `NoSink` when the target is closed, so that the sender learns that the operation does not have the
    /// bytes. `OutOfRegion` when more bytes come than are missing.
    pub fn fill(&self, bytes: u64) -> Result<bool, Refusal> {
        let less = |left: u64| if left == CLOSED { None } else { left.checked_sub(bytes) };
        match self.remaining.fetch_update(Ordering::AcqRel, Ordering::Acquire, less) {
            Ok(left) => Ok(bytes > 0 && left == bytes),
            Err(CLOSED) => Err(Refusal::NoSink),
            Err(_) => Err(Refusal::OutOfRegion),
        }
    }
}
