//! Ordering of standalone notifications: each is sent once everything posted before it has ended.
//!
//! The operations posted between two standalone notifications form an *epoch*, which ends when all of them
//! have ended. A notification is sent at the end of the epoch before it and of all earlier epochs. An
//! operation holds its [`Epoch`], a counter, and leaves it at its end without the outbox's lock; only the
//! last operation of an epoch that a notification waits for has to notify the outbox.
//!
//! States of an epoch: `open -> closed -> over`. Operations join while it is open and leave at any time; a
//! notification closes it.
//! Invariant: notifications are sent in the order of posting, each after all operations of the epochs before
//! it.
//! Read next: `sequencer.rs`, which numbers them.

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bit of the counter: a notification waits for the epoch's end, and no operation may join.
const CLOSED: u64 = 1;
/// Counter step for one operation.
const OPERATION: u64 = 2;

/// Counts the operations that have left an epoch, and from its closing on those that have not, from below zero upwards. So
/// the thread that posts does not write what the threads write that end operations.
#[derive(Debug, Default)]
pub struct Epoch(AtomicU64);

impl Epoch {
    /// Removes operations that have ended. Returns true if the last was among them and a notification waits: the
    /// caller must then call [`Outbox::release_notifications`](super::Outbox::release_notifications).
    #[must_use]
    pub fn leave(&self, operations: u64) -> bool {
        let step = operations * OPERATION;
        self.0.fetch_add(step, Ordering::AcqRel).wrapping_add(step) == CLOSED
    }

    /// Marks that a notification waits. The single counter decides: either the caller finds the epoch over,
    /// or the last `leave` returns true.
    fn close(&self, joined: u64) {
        self.0.fetch_add(CLOSED.wrapping_sub(joined * OPERATION), Ordering::AcqRel);
    }

    /// Whether all operations of a closed epoch have left.
    fn is_over(&self) -> bool {
        self.0.load(Ordering::Acquire) == CLOSED
    }

    /// Whether all of `joined` operations have left an open epoch.
    fn is_empty(&self, joined: u64) -> bool {
        self.0.load(Ordering::Acquire) == joined * OPERATION
    }
}

#[derive(Debug)]
pub(super) struct Epochs<O> {
    open: Arc<Epoch>,
    /// Number of operations that have joined the open epoch.
    joined: u64,
    /// Closed epochs, oldest first, each with the notification that waits for it.
    closed: VecDeque<(Arc<Epoch>, O)>,
}

impl<O> Default for Epochs<O> {
    fn default() -> Epochs<O> {
        Epochs { open: Arc::default(), joined: 0, closed: VecDeque::new() }
    }
}

impl<O> Epochs<O> {
    /// Adds an operation to the open epoch; it must leave at its end.
    pub fn join(&mut self) -> Arc<Epoch> {
        self.joined += 1;
        self.open.clone()
    }

    /// Takes a standalone notification; returns it if it may be sent at once, else keeps it for
    /// [`Epochs::next`].
    pub fn post(&mut self, notification: O) -> Option<O> {
        if self.closed.is_empty() && self.open.is_empty(self.joined) {
            return Some(notification);
        }
        let epoch = mem::take(&mut self.open);
        epoch.close(mem::take(&mut self.joined));
        self.closed.push_back((epoch, notification));
        // The last operation may have left before `close`.
        self.next()
    }

    /// Takes the next notification that may be sent.
    pub fn next(&mut self) -> Option<O> {
        let (_, notification) = self.closed.pop_front_if(|(epoch, _)| epoch.is_over())?;
        Some(notification)
    }

    /// Returns all waiting notifications, because the peer is lost.
    pub fn close(&mut self) -> impl Iterator<Item = O> + use<O> {
        mem::take(&mut self.closed).into_iter().map(|(_, notification)| notification)
    }

    #[cfg(test)]
    pub fn is_idle(&self) -> bool {
        self.closed.is_empty() && self.open.is_empty(self.joined)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;
    use std::thread;

    /// If each side left the notification to the other, it would wait for ever.
    #[test]
    fn an_epoch_that_ends_as_it_is_closed_is_found_over_by_the_one_or_the_other() {
        const ROUNDS: usize = 20_000;
        let mut epochs = Epochs::default();
        let (joined, left) = std::sync::mpsc::channel::<Arc<Epoch>>();
        let (reported, tells) = std::sync::mpsc::channel();
        let together = Arc::new(Barrier::new(2));
        let both = together.clone();
        let leaving = thread::spawn(move || {
            for epoch in left {
                both.wait();
                reported.send(epoch.leave(1)).expect("it is heard");
            }
        });
        for round in 0..ROUNDS {
            joined.send(epochs.join()).expect("it is taken");
            together.wait();
            let at_once = epochs.post(round);
            let is_last = tells.recv().expect("it has left");
            let released = at_once.or_else(|| if is_last { epochs.next() } else { None });
            assert_eq!(released, Some(round));
            assert!(epochs.is_idle());
        }
        drop(joined);
        leaving.join().expect("it has left all");
    }

    #[test]
    fn a_notification_waits_for_its_epoch_and_for_those_before() {
        let mut epochs = Epochs::default();
        assert_eq!(epochs.post(0), Some(0), "nothing is before it");
        let first = epochs.join();
        assert_eq!(epochs.post(1), None);
        let second = epochs.join();
        assert_eq!(epochs.post(2), None);
        assert_eq!(epochs.post(3), None, "its own epoch is empty, and those before are not over");
        assert!(second.leave(1));
        assert_eq!(epochs.next(), None);
        assert!(first.leave(1));
        let released: Vec<_> = std::iter::from_fn(|| epochs.next()).collect();
        assert_eq!(released, [1, 2, 3]);
        // No notification waits for this epoch, so its last operation returns false.
        let [third, fourth] = [epochs.join(), epochs.join()];
        assert!(!third.leave(1));
        assert!(!fourth.leave(1));
        assert!(epochs.is_idle());
        // Several may leave at once.
        let last = [(); 3].map(|()| epochs.join());
        assert!(!last[0].leave(2));
        assert_eq!(epochs.post(4), None);
        assert!(last[2].leave(1));
        assert_eq!(epochs.next(), Some(4));
    }
}
