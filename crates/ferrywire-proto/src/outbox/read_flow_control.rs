//! Flow control of read requests: how many are outstanding at the peer, and which are held back.
//!
//! A request counts as outstanding from when it may be sent until its bytes have arrived or its read has
//! ended. A peer answers the requests of one read in order, so arrived bytes are attributed to the first
//! ones. A short read has a single request, which counts until the read's end, so these are only counted.
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

/// The identity and kind of a read.
#[derive(Clone, Copy, Debug)]
pub struct Read {
    /// Id of the operation.
    pub id: u64,
    /// Whether it goes before long reads. A short read has a single request.
    pub is_short: bool,
}

#[derive(Debug)]
pub(super) struct ReadFlowControl<O> {
    short: ShortReads<O>,
    long: LongReads<O>,
    limits: PeerLimits,
}

#[derive(Debug)]
struct ShortReads<O> {
    /// Held-back requests by read, so that earlier reads go first.
    kept: BTreeMap<u64, Frame<O>>,
    /// Number of outstanding requests.
    asked: usize,
}

#[derive(Debug)]
struct LongReads<O> {
    /// Held-back requests by read and offset, so that earlier reads go first.
    kept: BTreeMap<(u64, u64), Frame<O>>,
    /// Outstanding requests: the id of the read, and the offset at which the request ends.
    asked: BTreeSet<(u64, u64)>,
}

impl<O> ReadFlowControl<O> {
    pub fn new(limits: PeerLimits) -> ReadFlowControl<O> {
        let short = ShortReads { kept: BTreeMap::new(), asked: 0 };
        ReadFlowControl { short, long: LongReads { kept: BTreeMap::new(), asked: BTreeSet::new() }, limits }
    }

    /// Counts a request as outstanding and returns it, or keeps it if there is no room.
    pub fn ask(&mut self, frame: Frame<O>, read: Read) -> Option<Frame<O>> {
        if read.is_short {
            if self.has_room_for(self.short.asked) {
                self.short.asked += 1;
                return Some(frame);
            }
            self.short.kept.insert(read.id, frame);
            return None;
        }
        self.long.kept.insert((read.id, frame.header.offset), frame);
        self.next()
    }

    fn has_room_for(&self, of_its_kind: usize) -> bool {
        let max = self.limits.reads_asked_max;
        self.short.asked + self.long.asked.len() < max && of_its_kind < of_a_kind_max(max)
    }

    pub fn keeps_back(&self) -> bool {
        !self.short.kept.is_empty() || !self.long.kept.is_empty()
    }

    /// Takes the next request that may be sent, and counts it as outstanding.
    pub fn next(&mut self) -> Option<Frame<O>> {
        if self.has_room_for(self.short.asked)
            && let Some((_, frame)) = self.short.kept.pop_first()
        {
            self.short.asked += 1;
            return Some(frame);
        }
        if self.has_room_for(self.long.asked.len()) { self.long.next() } else { None }
    }

    /// Uncounts the requests that the first `moved` bytes of a long read have answered. That of a short read counts until
    /// its end.
    pub fn answered(&mut self, read: Read, moved: u64) {
        if !read.is_short {
            self.long.uncount(read.id, moved);
        }
    }

    /// Removes the requests of a read that were held back, and returns them. A long read has no others then; a short
    /// one counts as outstanding until its end.
    pub fn forget(&mut self, read: Read) -> Vec<Frame<O>> {
        if !read.is_short {
            return self.long.forget(read.id);
        }
        let kept = self.short.kept.remove(&read.id);
        self.short.asked += usize::from(kept.is_some());
        kept.into_iter().collect()
    }

    /// Uncounts `count` short reads that have ended.
    pub fn end_short(&mut self, count: usize) {
        debug_assert!(count <= self.short.asked, "more reads end than were asked for");
        self.short.asked = self.short.asked.saturating_sub(count);
    }

    /// Returns all held-back requests, because the peer is lost.
    pub fn close(&mut self) -> impl Iterator<Item = Frame<O>> + use<O> {
        self.short.asked += self.short.kept.len();
        let (short, long) = (std::mem::take(&mut self.short.kept), std::mem::take(&mut self.long.kept));
        self.long.asked.clear();
        short.into_values().chain(long.into_values())
    }

    /// Numbers of outstanding requests of short and of long reads.
    #[cfg(test)]
    pub fn asked(&self) -> (usize, usize) {
        (self.short.asked, self.long.asked.len())
    }
}

/// Most outstanding requests of one kind of read, short or long: three quarters of the limit on both kinds
/// together.
const fn of_a_kind_max(reads_asked_max: usize) -> usize {
    reads_asked_max / 4 * 3
}

impl<O> LongReads<O> {
    fn next(&mut self) -> Option<Frame<O>> {
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
        self.own.extend(self.reads.ask(request, read));
        Ok(())
    }

    /// Notes that the first `moved` bytes of a read have arrived; held-back requests may follow.
    pub fn answered(&mut self, read: Read, moved: u64) {
        self.reads.answered(read, moved);
        self.ask_on();
    }

    /// Ends the requests of a read: returns its held-back ones, and lets other reads use its share of the
    /// limit. A short read has its share until [`Outbox::short_reads_ended`].
    pub fn forget_requests(&mut self, read: Read) -> Vec<Frame<O>> {
        let kept = self.reads.forget(read);
        self.ask_on();
        kept
    }

    /// Lets other reads use the shares of `count` short reads that have ended. Each had a request, sent or withdrawn.
    pub fn short_reads_ended(&mut self, count: usize) {
        self.reads.end_short(count);
        self.ask_on();
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
        Read { id, is_short: requests == 1 }
    }

    const LONG: u64 = 10_000;
    const OF_A_KIND_MAX: usize = of_a_kind_max(limits::OUTSTANDING_READS_MAX);

    /// Asks for a read with this many requests; returns how many of them may be sent.
    fn ask(control: &mut ReadFlowControl<()>, read: Read, requests: u64) -> usize {
        let len = if read.is_short { 10 } else { LONG };
        let ask = |request| {
            let header = Header { transfer: read.id, offset: len * request, ..Header::new(Kind::Read) };
            let mut placements = Vec::new();
            Placement { offset: 0, len: len as u32 }.encode_into(&mut placements);
            control.ask(Frame { placements: placements.into(), ..Frame::bare(header) }, read)
        };
        (0..requests).filter_map(ask).count()
    }

    fn sent(control: &mut ReadFlowControl<()>) -> usize {
        std::iter::from_fn(|| control.next()).count()
    }

    /// Regression: a read with so many requests would wait for its own end.
    #[test]
    fn a_read_of_more_requests_than_are_asked_at_once_goes_on_as_they_are_answered() {
        let (mut control, many) = (ReadFlowControl::new(PeerLimits::default()), 3 * OF_A_KIND_MAX as u64);
        let read = read(1, many);
        assert_eq!(ask(&mut control, read, many), OF_A_KIND_MAX);
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
        assert_eq!(ask(&mut control, first, many), OF_A_KIND_MAX);
        assert_eq!(ask(&mut control, second, many), 0);
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
        assert_eq!(ask(&mut control, read(0, many), many), OF_A_KIND_MAX);
        let room = limits::OUTSTANDING_READS_MAX - OF_A_KIND_MAX;
        assert_eq!((1..=many).map(|id| ask(&mut control, read(id, 1), 1)).sum::<usize>(), room);
        // As the long ones end, short ones take their share, except for what is reserved for long ones.
        control.answered(read(0, many), many * LONG);
        assert_eq!(sent(&mut control), OF_A_KIND_MAX);
        assert_eq!(control.asked(), (OF_A_KIND_MAX, room));
    }

    /// A short read that is cancelled while its request is held back counts like one that was sent, until it ends.
    #[test]
    fn short_reads_make_room_when_they_end() {
        let (mut control, many) = (ReadFlowControl::new(PeerLimits::default()), OF_A_KIND_MAX as u64 + 5);
        let asked: usize = (0..many).map(|id| ask(&mut control, read(id, 1), 1)).sum();
        assert_eq!(asked, OF_A_KIND_MAX);
        let cancelled = control.forget(read(many - 1, 1));
        assert_eq!(cancelled[0].header.transfer, many - 1);
        assert!(control.forget(read(0, 1)).is_empty(), "the request was sent");
        assert_eq!((sent(&mut control), control.asked()), (0, (OF_A_KIND_MAX + 1, 0)));
        control.end_short(3);
        let next: Vec<u64> =
            std::iter::from_fn(|| control.next()).map(|frame| frame.header.transfer).collect();
        assert_eq!(next, [OF_A_KIND_MAX as u64, OF_A_KIND_MAX as u64 + 1]);
        control.end_short(OF_A_KIND_MAX);
        assert_eq!(sent(&mut control), 2);
        control.end_short(2);
        assert!(!control.keeps_back() && control.asked() == (0, 0));
    }
}
