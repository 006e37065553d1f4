//! Numbering of frames that a peer takes in order, and the limit on how far they run ahead of a missing one.
//!
//! With several channels a frame may be late until the loss of its connection is noticed. The peer can hold
//! only a bounded amount behind it and would refuse the rest, so the rest is not sent before the missing
//! frame has arrived.
//!
//! Invariant: beyond the first number whose arrival is not confirmed, no more is sent than the peer can hold.
//! Read next: `inbox/`, which holds the frames.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::limits::PeerLimits;
use crate::operation::Operation;

/// The numbers of one kind of frame, from 0.
#[derive(Debug)]
pub(super) struct Sequencer<O> {
    /// The first number whose arrival is not confirmed; `had` has the later numbers whose arrival is.
    first: u64,
    had: BTreeSet<u64>,
    /// Sizes in bytes from number `first` on, where sizes count; `begin` and `end` are the sums up to `first`
    /// and up to `next`.
    sizes: VecDeque<usize>,
    begin: u64,
    end: u64,
    next: u64,
    /// Operations that are too far ahead, by number, each with the sum of sizes up to its end.
    late: BTreeMap<u64, (u64, O)>,
    limits: PeerLimits,
}

impl<O> Sequencer<O> {
    pub fn new(limits: PeerLimits) -> Sequencer<O> {
        Sequencer {
            first: 0,
            had: BTreeSet::new(),
            sizes: VecDeque::new(),
            begin: 0,
            end: 0,
            next: 0,
            late: BTreeMap::new(),
            limits,
        }
    }
}

impl<O: Operation> Sequencer<O> {
    /// Numbers an operation; returns the operation if it may be sent now, else keeps it.
    pub fn number(&mut self, op: O) -> Option<(u64, O)> {
        let number = self.next;
        self.next += 1;
        self.sizes.push_back(op.message_bytes());
        self.end += op.message_bytes() as u64;
        self.admit(number, self.end, op).map(|op| (number, op))
    }

    /// Returns an operation that already has a number if it may be sent now, else keeps it.
    pub fn admit_numbered(&mut self, op: O) -> Option<O> {
        self.admit(op.number(), 0, op)
    }

    fn admit(&mut self, number: u64, end: u64, op: O) -> Option<O> {
        if self.fits(number, end) {
            return Some(op);
        }
        self.late.insert(number, (end, op));
        None
    }

    fn fits(&self, number: u64, end: u64) -> bool {
        number <= self.first
            || (number - self.first < self.limits.early_frames_max as u64
                && end.saturating_sub(self.begin) <= self.limits.notification_bytes_max as u64)
    }

    /// Notes that the peer has a number; returns the operations that may be sent now.
    pub fn had(&mut self, number: u64) -> Vec<(u64, O)> {
        if number == self.first {
            self.pass();
        } else if number > self.first {
            self.had.insert(number);
        }
        while self.had.remove(&self.first) {
            self.pass();
        }
        let mut admitted = Vec::new();
        while let Some(late) = self.late.first_entry() {
            let (number, end) = (*late.key(), late.get().0);
            if !self.fits(number, end) {
                break;
            }
            admitted.extend(self.late.pop_first().map(|(number, (_, op))| (number, op)));
        }
        admitted
    }

    fn pass(&mut self) {
        self.first += 1;
        self.begin += self.sizes.pop_front().unwrap_or(0) as u64;
    }

    #[cfg(test)]
    pub fn is_idle(&self) -> bool {
        self.late.is_empty() && self.had.is_empty() && self.begin == self.end
    }

    /// Returns all kept operations, because the peer is lost.
    pub fn close(&mut self) -> impl Iterator<Item = O> + use<O> {
        std::mem::take(&mut self.late).into_values().map(|(_, op)| op)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits;
    use crate::operation::Verb;
    use crate::operation::testing::Model;

    fn note(bytes: usize) -> Model {
        Model::new(1, Verb::Notify, 0, 0).with(|facts| facts.message = vec![0; bytes])
    }

    #[test]
    fn no_more_bytes_go_ahead_of_a_missing_one_than_a_peer_holds() {
        let mut sequencer = Sequencer::new(PeerLimits::default());
        let fit = (limits::NOTIFICATION_BYTES_MAX / limits::NOTIFY_BYTES_MAX) as u64;
        for number in 0..fit + 10 {
            let goes_out = sequencer.number(note(limits::NOTIFY_BYTES_MAX)).is_some();
            assert_eq!(goes_out, number < fit, "{number}");
        }
        // Confirming numbers behind the missing one makes no room.
        assert!((1..5).all(|number| sequencer.had(number).is_empty()));
        let numbers = |admitted: Vec<(u64, Model)>| -> Vec<u64> {
            admitted.into_iter().map(|(number, _)| number).collect()
        };
        assert_eq!(numbers(sequencer.had(0)), [0, 1, 2, 3, 4].map(|at| fit + at));
        // Confirming a number twice changes nothing.
        assert!(sequencer.had(0).is_empty() && sequencer.had(4).is_empty());
        assert_eq!(numbers(sequencer.had(5)), [fit + 5]);
        assert_eq!(sequencer.close().count(), 4);
    }

    #[test]
    fn one_that_is_due_goes_out_however_many_are_behind_it() {
        let mut sequencer = Sequencer::new(PeerLimits::default());
        let sent = |number| Model::new(1, Verb::Send, 0, 0).with(|facts| facts.number = number);
        let far = limits::REORDER_FRAMES_MAX as u64;
        assert!(sequencer.admit_numbered(sent(far)).is_none());
        assert!(sequencer.admit_numbered(sent(far - 1)).is_some());
        assert!(sequencer.admit_numbered(sent(0)).is_some());
        assert_eq!(sequencer.had(0).len(), 1);
    }
}
