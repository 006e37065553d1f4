//! Requests of reads: so many are with the peer at once, and the rest is kept back.
//!
//! A request counts from when it may be sent until its bytes are here, or its read has ended. A peer answers the requests
//! of one read in their order, so that the bytes that are here are taken for the answers to the first of them.
//!
//! Invariant: what is counted, or kept, is of a read under way: it leaves with its read, however that ends.
//! Read next: `peer/asking.rs`, which makes requests.

use super::Entry;
use crate::limits;
use crate::operation::Op;
use crate::wire;
use std::collections::{BTreeMap, BTreeSet};

#[derive(Default)]
pub(super) struct Asking {
    /// By read and place in it: what was posted first goes first.
    kept: BTreeMap<(u64, u64), Entry>,
    /// The read of each request that counts, and where its bytes end there.
    asked: BTreeSet<(u64, u64)>,
}

impl Asking {
    pub fn keep(&mut self, entry: Entry) {
        self.kept.insert((entry.header.transfer, entry.header.offset), entry);
    }

    pub fn keeps_back(&self) -> bool {
        !self.kept.is_empty()
    }

    /// The next request that may be sent; from here on it counts.
    pub fn next(&mut self) -> Option<Entry> {
        if self.asked.len() >= limits::READS_ASKED_MAX {
            return None;
        }
        let ((read, start), entry) = self.kept.pop_first()?;
        let bytes: u64 = wire::placements(&entry.placements).map(|range| u64::from(range.len)).sum();
        self.asked.insert((read, start + bytes));
        Some(entry)
    }

    /// What the bytes of a read that are here answer counts no longer.
    pub fn answered(&mut self, op: &Op) {
        self.uncount(op.id, op.moved());
    }

    /// A read has ended, or asks for no more: gives back what it has not sent.
    pub fn forget(&mut self, read: u64) -> Vec<Entry> {
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

    /// The peer is gone.
    pub fn close(&mut self) -> impl Iterator<Item = Entry> + use<> {
        self.asked.clear();
        std::mem::take(&mut self.kept).into_values()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operation::Verb;
    use crate::transfer::{Piece, Pieces};
    use crate::wire::{Header, Kind, Placement};

    fn read(id: u64, requests: u64) -> Op {
        Op::new(id, Verb::Read, Pieces::One(Piece { local: 0, remote: 0, len: 10 * requests }), None, 1)
    }

    /// Ten bytes each.
    fn keep(asking: &mut Asking, op: &Op, requests: u64) {
        for request in 0..requests {
            let header = Header { transfer: op.id, offset: 10 * request, ..Header::new(Kind::Read) };
            let mut placements = Vec::new();
            Placement { offset: 0, len: 10 }.encode_into(&mut placements);
            asking.keep(Entry { placements: placements.into(), ..Entry::bare(header) });
        }
    }

    fn sent(asking: &mut Asking) -> usize {
        std::iter::from_fn(|| asking.next()).count()
    }

    /// One read of so many would wait for its own end.
    #[test]
    fn a_read_of_more_requests_than_are_asked_at_once_goes_on_as_they_are_answered() {
        let (mut asking, many) = (Asking::default(), 3 * limits::READS_ASKED_MAX as u64);
        let op = read(1, many);
        keep(&mut asking, &op, many);
        assert_eq!(sent(&mut asking), limits::READS_ASKED_MAX);
        op.count(25);
        asking.answered(&op);
        assert_eq!(sent(&mut asking), 2);
        op.count(5);
        asking.answered(&op);
        assert_eq!(sent(&mut asking), 1);
        op.count(10 * limits::READS_ASKED_MAX as u64);
        asking.answered(&op);
        assert_eq!(sent(&mut asking), limits::READS_ASKED_MAX);
    }

    #[test]
    fn a_read_that_ends_makes_room_for_all_that_it_had_asked_for() {
        let (mut asking, many) = (Asking::default(), limits::READS_ASKED_MAX as u64 + 5);
        let [first, second] = [1, 2].map(|id| read(id, many));
        keep(&mut asking, &first, many);
        keep(&mut asking, &second, many);
        assert_eq!(sent(&mut asking), limits::READS_ASKED_MAX);
        assert_eq!(asking.forget(first.id).len(), 5);
        assert_eq!(sent(&mut asking), limits::READS_ASKED_MAX);
        assert_eq!(asking.forget(first.id).len(), 0);
        assert_eq!(sent(&mut asking), 0);
        assert_eq!(asking.forget(second.id).len(), 5);
        assert!(!asking.keeps_back() && asking.asked.is_empty());
    }
}
