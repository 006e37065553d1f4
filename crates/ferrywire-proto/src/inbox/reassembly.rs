//! The target of a message that arrives in frames in any order: where its bytes go, and how many are missing.
//!
//! States: `open -> full | closed`. One atomic counter decides between `full` and `closed`. If the last frame
//! of a message is counted before a cancel, the operation succeeds; if it comes after the cancel, it is
//! refused to its sender.
//!
//! Invariant: a closed target has counted fewer bytes than its message has, and counts no more.
//! Read next: `matching.rs`, which matches messages and receives.

use std::sync::atomic::Ordering;

use crate::sync::AtomicU64;
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

    /// Closes the target. Returns false when all bytes are counted, or when the target is closed already.
    pub fn close(&self) -> bool {
        let closed = |left: u64| (left != 0 && left != CLOSED).then_some(CLOSED);
        self.remaining.fetch_update(Ordering::AcqRel, Ordering::Acquire, closed).is_ok()
    }

    /// Counts placed bytes of the message; returns true when they were the last ones.
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

/// Maps positions of a message to local memory; a single range needs no allocation.
#[derive(Clone, Debug)]
pub enum Scatter {
    /// A single range, which may be empty.
    One((u64, u64)),
    /// The ranges of a message, in its order.
    Many {
        /// `(offset, len)` of each range.
        ranges: Vec<(u64, u64)>,
        /// The position of each range in the message.
        starts: Vec<u64>,
    },
}

impl Scatter {
    /// A map over `(offset, len)` ranges of a region, in the message's order. Empty ranges are dropped.
    pub fn new(ranges: impl IntoIterator<Item = (u64, u64)>) -> Scatter {
        let mut ranges = ranges.into_iter().filter(|(_, len)| *len > 0);
        let first = ranges.next().unwrap_or_default();
        let Some(second) = ranges.next() else { return Scatter::One(first) };
        let ranges: Vec<(u64, u64)> = [first, second].into_iter().chain(ranges).collect();
        let start = |end: &mut u64, (_, len): &(u64, u64)| Some(std::mem::replace(end, *end + len));
        let starts = ranges.iter().scan(0, start).collect();
        Scatter::Many { ranges, starts }
    }

    fn parts(&self) -> (&[(u64, u64)], &[u64]) {
        match self {
            Scatter::One(range) => (std::slice::from_ref(range), &[0]),
            Scatter::Many { ranges, starts } => (ranges, starts),
        }
    }

    /// Local `(offset, len)` ranges of `len` bytes at `position`; `None` when they exceed the ranges.
    pub fn locate(&self, position: u64, len: u64) -> Option<impl Iterator<Item = (u64, u64)> + '_> {
        let (ranges, starts) = self.parts();
        let total = starts.last()? + ranges.last()?.1;
        if position.checked_add(len)? > total {
            return None;
        }
        let first = starts.partition_point(|start| *start <= position).saturating_sub(1);
        let mut left = len;
        let mut within = position - starts.get(first)?;
        Some(ranges[first..].iter().map_while(move |(offset, size)| {
            if left == 0 {
                return None;
            }
            let take = (size - within).min(left);
            let range = (offset + within, take);
            left -= take;
            within = 0;
            Some(range)
        }))
    }
}
