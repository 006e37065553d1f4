//! Requests of reads: so many are with the peer at once, and the rest is kept back.
//!
//! A request counts from when it may be sent until its bytes are here, or its read has ended. A peer answers the requests
//! of one read in their order, so that the bytes that are here are taken for the answers to the first of them.
//!
//! Short reads go before long ones, and neither kind takes all the room: a short one does not wait behind many long ones, as
//! nothing short waits behind bulk.
//!
//! Invariant: what is counted, or kept, is of a read under way: it leaves with its read, however that ends.
//! Read next: `peer/read_requests.rs`, which makes requests.

use super::{Entry, SMALL_BYTES_MAX};
use crate::core::operation::Op;
use ferrywire_proto::limits;
use ferrywire_proto::wire;
use std::collections::{BTreeMap, BTreeSet};

/// Requests of one kind, short or long, that are with the peer at once.
const OF_A_KIND_MAX: usize = limits::READS_ASKED_MAX / 4 * 3;

#[derive(Default)]
pub(super) struct ReadFlowControl {
    short: Requests,
    long: Requests,
}

#[derive(Default)]
struct Requests {
    /// By read and place in it: what was posted first goes first.
    kept: BTreeMap<(u64, u64), Entry>,
    /// The read of each request that counts, and where its bytes end there.
    asked: BTreeSet<(u64, u64)>,
}

impl ReadFlowControl {
    fn of(&mut self, op: &Op) -> &mut Requests {
        if op.total <= SMALL_BYTES_MAX { &mut self.short } else { &mut self.long }
    }

    pub fn keep(&mut self, entry: Entry, op: &Op) {
        self.of(op).kept.insert((entry.header.transfer, entry.header.offset), entry);
    }

    pub fn keeps_back(&self) -> bool {
        !self.short.kept.is_empty() || !self.long.kept.is_empty()
    }

    /// The next request that may be sent; from here on it counts.
    pub fn next(&mut self) -> Option<Entry> {
        if self.short.asked.len() + self.long.asked.len() >= limits::READS_ASKED_MAX {
            return None;
        }
        self.short.next().or_else(|| self.long.next())
    }

    /// What the bytes of a read that are here answer counts no longer.
    pub fn answered(&mut self, op: &Op) {
        self.of(op).uncount(op.id, op.moved());
    }

    /// A read has ended, or asks for no more: gives back what it has not sent.
    pub fn forget(&mut self, op: &Op) -> Vec<Entry> {
        self.of(op).forget(op.id)
    }

    /// The peer is gone.
    pub fn close(&mut self) -> impl Iterator<Item = Entry> + use<> {
        let ReadFlowControl { short, long } = std::mem::take(self);
        short.kept.into_values().chain(long.kept.into_values())
    }
}

impl Requests {
    fn next(&mut self) -> Option<Entry> {
        if self.asked.len() >= OF_A_KIND_MAX {
            return None;
        }
        let ((read, start), entry) = self.kept.pop_first()?;
        let bytes: u64 = wire::placements(&entry.placements).map(|range| u64::from(range.len)).sum();
        self.asked.insert((read, start + bytes));
        Some(entry)
    }

    fn forget(&mut self, read: u64) -> Vec<Entry> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::operation::Verb;
    use ferrywire_proto::transfer::{Piece, Pieces};
    use ferrywire_proto::wire::{Header, Kind, Placement};

    /// Of a long read the requests are of ten thousand bytes each.
    fn read(id: u64, requests: u64) -> Op {
        let len = if requests == 1 { 10 } else { LONG * requests };
        Op::new(id, Verb::Read, Pieces::One(Piece { local: 0, remote: 0, len }), None, 1)
    }

    const LONG: u64 = 10_000;

    fn keep(asking: &mut ReadFlowControl, op: &Op, requests: u64) {
        let len = op.total / requests;
        for request in 0..requests {
            let header = Header { transfer: op.id, offset: len * request, ..Header::new(Kind::Read) };
            let mut placements = Vec::new();
            Placement { offset: 0, len: len as u32 }.encode_into(&mut placements);
            asking.keep(Entry { placements: placements.into(), ..Entry::bare(header) }, op);
        }
    }

    fn sent(asking: &mut ReadFlowControl) -> usize {
        std::iter::from_fn(|| asking.next()).count()
    }

    /// One read of so many would wait for its own end.
    #[test]
    fn a_read_of_more_requests_than_are_asked_at_once_goes_on_as_they_are_answered() {
        let (mut asking, many) = (ReadFlowControl::default(), 3 * OF_A_KIND_MAX as u64);
        let op = read(1, many);
        keep(&mut asking, &op, many);
        assert_eq!(sent(&mut asking), OF_A_KIND_MAX);
        op.count(5 * LONG / 2);
        asking.answered(&op);
        assert_eq!(sent(&mut asking), 2);
        op.count(LONG / 2);
        asking.answered(&op);
        assert_eq!(sent(&mut asking), 1);
        op.count(LONG * OF_A_KIND_MAX as u64);
        asking.answered(&op);
        assert_eq!(sent(&mut asking), OF_A_KIND_MAX);
    }

    #[test]
    fn a_read_that_ends_makes_room_for_all_that_it_had_asked_for() {
        let (mut asking, many) = (ReadFlowControl::default(), OF_A_KIND_MAX as u64 + 5);
        let [first, second] = [1, 2].map(|id| read(id, many));
        keep(&mut asking, &first, many);
        keep(&mut asking, &second, many);
        assert_eq!(sent(&mut asking), OF_A_KIND_MAX);
        assert_eq!(asking.forget(&first).len(), 5);
        assert_eq!(sent(&mut asking), OF_A_KIND_MAX);
        assert_eq!(asking.forget(&first).len(), 0);
        assert_eq!(sent(&mut asking), 0);
        assert_eq!(asking.forget(&second).len(), 5);
        assert!(!asking.keeps_back() && asking.long.asked.is_empty());
    }

    #[test]
    fn a_short_read_waits_behind_no_long_ones_and_leaves_room_for_them() {
        let (mut asking, many) = (ReadFlowControl::default(), 2 * limits::READS_ASKED_MAX as u64);
        keep(&mut asking, &read(0, many), many);
        assert_eq!(sent(&mut asking), OF_A_KIND_MAX);
        let short: Vec<Op> = (1..=many).map(|id| read(id, 1)).collect();
        keep(&mut asking, &short[0], 1);
        assert_eq!(asking.next().map(|entry| entry.header.transfer), Some(1));
        short[1..].iter().for_each(|op| keep(&mut asking, op, 1));
        assert_eq!(sent(&mut asking), limits::READS_ASKED_MAX - OF_A_KIND_MAX - 1);
        // As the long ones end, short ones take their room, but for what is left to them.
        asking.answered(&{
            let done = read(0, many);
            done.count(many * LONG);
            done
        });
        assert_eq!(sent(&mut asking), limits::READS_ASKED_MAX - (limits::READS_ASKED_MAX - OF_A_KIND_MAX));
        assert_eq!(
            (asking.short.asked.len(), asking.long.asked.len()),
            (OF_A_KIND_MAX, limits::READS_ASKED_MAX - OF_A_KIND_MAX)
        );
    }
}
