//! Flow control of read requests: how many are outstanding at the peer, and which are held back.
//!
//! A request counts as outstanding from when it may be sent until its bytes have arrived or its read has
//! ended. A peer answers the requests of one read in order, so arrived bytes are attributed to the first
//! ones.
//!
//! Short reads go before long ones, and neither kind may use the whole limit: a short read does not wait
//! behind many long ones.
//!
//! Invariant: every counted or held-back request belongs to a read in flight, and is removed with it, however
//! the read ends.
//! Read next: the engine's `peer/read_requests.rs`, which makes requests.

use std::collections::{BTreeMap, BTreeSet};

use super::{Frame, Outbox};
use crate::limits::PeerLimits;
use crate::operation::Operation;
use crate::wire;

/// The identity and size of a read.
#[derive(Clone, Copy, Debug)]
pub struct Read {
    /// Id of the operation.
    pub id: u64,
    /// Bytes of the whole read.
    pub total: u64,
}

#[derive(Debug)]
pub(super) struct ReadFlowControl<O> {
    short: Requests<O>,
    long: Requests<O>,
    limits: PeerLimits,
}

#[derive(Debug)]
struct Requests<O> {
    /// Held-back requests by read and offset, so that earlier reads go first.
    kept: BTreeMap<(u64, u64), Frame<O>>,
    /// Outstanding requests: the id of the read, and the offset at which the request ends.
    asked: BTreeSet<(u64, u64)>,
}

impl<O> Default for Requests<O> {
    fn default() -> Requests<O> {
        Requests { kept: BTreeMap::new(), asked: BTreeSet::new() }
    }
}

impl<O> ReadFlowControl<O> {
    pub fn new(limits: PeerLimits) -> ReadFlowControl<O> {
        ReadFlowControl { short: Requests::default(), long: Requests::default(), limits }
    }

    fn of(&mut self, read: Read) -> &mut Requests<O> {
        if read.total <= self.limits.short_read_bytes_max { &mut self.short } else { &mut self.long }
    }

    pub fn keep(&mut self, frame: Frame<O>, read: Read) {
        self.of(read).kept.insert((frame.header.transfer, frame.header.offset), frame);
    }

    pub fn keeps_back(&self) -> bool {
        !self.short.kept.is_empty() || !self.long.kept.is_empty()
    }

    /// Takes the next request that may be sent, and counts it as outstanding.
    pub fn next(&mut self) -> Option<Frame<O>> {
        if self.short.asked.len() + self.long.asked.len() >= self.limits.reads_asked_max {
            return None;
        }
        let of_a_kind_max = of_a_kind_max(self.limits.reads_asked_max);
        self.short.next(of_a_kind_max).or_else(|| self.long.next(of_a_kind_max))
    }

    /// Uncounts the requests that the first `moved` bytes of a read have answered.
    pub fn answered(&mut self, read: Read, moved: u64) {
        self.of(read).uncount(read.id, moved);
    }

    /// Removes all requests of a read; returns those that were held back.
    pub fn forget(&mut self, read: Read) -> Vec<Frame<O>> {
        self.of(read).forget(read.id)
    }

    /// Returns all held-back requests, because the peer is lost.
    pub fn close(&mut self) -> impl Iterator<Item = Frame<O>> + use<O> {
        let (short, long) = (std::mem::take(&mut self.short), std::mem::take(&mut self.long));
        short.kept.into_values().chain(long.kept.into_values())
    }

    /// Numbers of outstanding requests of short and of long reads.
    #[cfg(test)]
    pub fn asked(&self) -> (usize, usize) {
        (self.short.asked.len(), self.long.asked.len())
    }
}

/// Most outstanding requests of one kind of read, short or long: three quarters of the limit on both kinds
/// together.
const fn of_a_kind_max(reads_asked_max: usize) -> usize {
    reads_asked_max / 4 * 3
}

impl<O> Requests<O> {
    fn next(&mut self, asked_max: usize) -> Option<Frame<O>> {
        if self.asked.len() >= asked_max {
            return None;
        }
        let ((read, start), frame) = self.kept.pop_first()?;
        let bytes: u64 = wire::placements(&frame.placements).map(|range| u64::from(range.len)).sum();
        self.asked.insert((read, start + bytes));
        Some(frame)
    }

    fn forget(&mut self, read: u64) -> Vec<Frame<O>> {
        self.uncount(read, u64::MAX);
        let mut kept = Vec::new();
        while let Some(place) = self.kept.range((read, 0)..=(read, u64::MAX)).next().map(|(place, _)| *place)
        {
            kept.extend(self.kept.remove(&place));
        }
        kept
    }

    fn uncount(&mut self, read: u64, end: u64) {
        while let Some(request) = self.asked.range((read, 0)..=(read, end)).next().copied() {
            self.asked.remove(&request);
        }
    }
}

impl<O> Outbox<O> {
    /// Whether read requests wait for earlier ones to be answered.
    pub fn keeps_back(&self) -> bool {
        self.reads.keeps_back()
    }
}

impl<O: Operation> Outbox<O> {
    /// Queues a read request, or holds it back while too many are outstanding.
    ///
    /// # Errors
    /// Returns the request when the peer is lost.
    pub fn ask(&mut self, request: Frame<O>, read: Read) -> Result<(), Frame<O>> {
        if self.closed {
            return Err(request);
        }
        self.reads.keep(request, read);
        self.ask_on();
        Ok(())
    }

    /// Notes that the first `moved` bytes of a read have arrived; held-back requests may follow.
    pub fn answered(&mut self, read: Read, moved: u64) {
        self.reads.answered(read, moved);
        self.ask_on();
    }

    /// Ends the requests of a read: returns its held-back ones, and lets other reads use its share of the
    /// limit.
    pub fn forget_requests(&mut self, read: Read) -> Vec<Frame<O>> {
        let kept = self.reads.forget(read);
        self.ask_on();
        kept
    }

    /// Queues read requests that need not be held back any longer.
    fn ask_on(&mut self) {
        while let Some(frame) = self.reads.next() {
            self.own.push_back(frame);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits;
    use crate::wire::{Header, Kind, Placement};

    /// A read with this many requests; those of a long read have 10,000 bytes each.
    fn read(id: u64, requests: u64) -> Read {
        Read { id, total: if requests == 1 { 10 } else { LONG * requests } }
    }

    const LONG: u64 = 10_000;
    const OF_A_KIND_MAX: usize = of_a_kind_max(limits::OUTSTANDING_READS_MAX);

    fn keep(control: &mut ReadFlowControl<()>, read: Read, requests: u64) {
        let len = read.total / requests;
        for request in 0..requests {
            let header = Header { transfer: read.id, offset: len * request, ..Header::new(Kind::Read) };
            let mut placements = Vec::new();
            Placement { offset: 0, len: len as u32 }.encode_into(&mut placements);
            control.keep(Frame { placements: placements.into(), ..Frame::bare(header) }, read);
        }
    }

    fn sent(control: &mut ReadFlowControl<()>) -> usize {
        std::iter::from_fn(|| control.next()).count()
    }

    /// Regression: a read with so many requests would wait for its own end.
    #[test]
    fn a_read_of_more_requests_than_are_asked_at_once_goes_on_as_they_are_answered() {
        let (mut control, many) = (ReadFlowControl::new(PeerLimits::default()), 3 * OF_A_KIND_MAX as u64);
        let read = read(1, many);
        keep(&mut control, read, many);
        assert_eq!(sent(&mut control), OF_A_KIND_MAX);
        let mut moved = 0;
        for (bytes, requests) in
            [(5 * LONG / 2, 2), (LONG / 2, 1), (LONG * OF_A_KIND_MAX as u64, OF_A_KIND_MAX)]
        {
            moved += bytes;
            control.answered(read, moved);
            assert_eq!(sent(&mut control), requests);
        }
    }

    #[test]
    fn a_read_that_ends_makes_room_for_all_that_it_had_asked_for() {
        let (mut control, many) = (ReadFlowControl::new(PeerLimits::default()), OF_A_KIND_MAX as u64 + 5);
        let [first, second] = [1, 2].map(|id| read(id, many));
        keep(&mut control, first, many);
        keep(&mut control, second, many);
        assert_eq!(sent(&mut control), OF_A_KIND_MAX);
        assert_eq!(control.forget(first).len(), 5);
        assert_eq!(sent(&mut control), OF_A_KIND_MAX);
        assert_eq!(control.forget(first).len(), 0);
        assert_eq!(sent(&mut control), 0);
        assert_eq!(control.forget(second).len(), 5);
        assert!(!control.keeps_back() && control.asked() == (0, 0));
    }

    #[test]
    fn a_short_read_waits_behind_no_long_ones_and_leaves_room_for_them() {
        let (mut control, many) =
            (ReadFlowControl::new(PeerLimits::default()), 2 * limits::OUTSTANDING_READS_MAX as u64);
        keep(&mut control, read(0, many), many);
        assert_eq!(sent(&mut control), OF_A_KIND_MAX);
        keep(&mut control, read(1, 1), 1);
        assert_eq!(control.next().map(|frame| frame.header.transfer), Some(1));
        (2..=many).for_each(|id| keep(&mut control, read(id, 1), 1));
        assert_eq!(sent(&mut control), limits::OUTSTANDING_READS_MAX - OF_A_KIND_MAX - 1);
        // As the long ones end, short ones take their share, except for what is reserved for long ones.
        control.answered(read(0, many), many * LONG);
        assert_eq!(
            sent(&mut control),
            limits::OUTSTANDING_READS_MAX - (limits::OUTSTANDING_READS_MAX - OF_A_KIND_MAX)
        );
        assert_eq!(control.asked(), (OF_A_KIND_MAX, limits::OUTSTANDING_READS_MAX - OF_A_KIND_MAX));
    }
}
