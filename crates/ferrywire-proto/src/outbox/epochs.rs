//! Fences of standalone notifications: each goes out when everything posted before it has ended.
//!
//! Operations posted between two standalone notifications are an *epoch*. The fence behind an epoch opens when the
//! operations of that epoch, and of all epochs before it, have ended.
//!
//! Invariant: fences open in the order in which they were posted. Read next: `sequencer.rs`, which numbers what they let out.

use std::collections::VecDeque;

/// Operations posted between two standalone notifications.
#[derive(Debug)]
struct Epoch<O> {
    outstanding: u64,
    then: Option<O>,
}

#[derive(Debug)]
pub(super) struct Epochs<O> {
    epochs: VecDeque<Epoch<O>>,
    first: u64,
}

impl<O> Default for Epochs<O> {
    fn default() -> Epochs<O> {
        Epochs { epochs: VecDeque::from([Epoch { outstanding: 0, then: None }]), first: 0 }
    }
}

impl<O> Epochs<O> {
    /// An operation begins; the next fence waits for it. Returns what [`Epochs::leave`] has to be told at its end.
    pub fn join(&mut self) -> u64 {
        let last = self.epochs.len() - 1;
        self.epochs[last].outstanding += 1;
        self.first + last as u64
    }

    /// An operation of this epoch has ended.
    pub fn leave(&mut self, epoch: u64) {
        let index = epoch.checked_sub(self.first).and_then(|index| usize::try_from(index).ok());
        if let Some(epoch) = index.and_then(|index| self.epochs.get_mut(index)) {
            epoch.outstanding -= 1;
        }
    }

    /// A standalone notification is posted behind what has begun.
    pub fn fence(&mut self, op: O) {
        if let Some(last) = self.epochs.back_mut() {
            last.then = Some(op);
        }
        self.epochs.push_back(Epoch { outstanding: 0, then: None });
    }

    /// The next notification whose fence is open.
    pub fn next(&mut self) -> Option<O> {
        let op = self.epochs.front_mut().filter(|epoch| epoch.outstanding == 0)?.then.take()?;
        self.epochs.pop_front();
        self.first += 1;
        Some(op)
    }

    /// The peer is gone: gives all notifications back. What ends later belongs to no epoch.
    pub fn close(&mut self) -> impl Iterator<Item = O> {
        let closed = std::mem::take(self);
        self.first = closed.first + closed.epochs.len() as u64;
        closed.epochs.into_iter().filter_map(|epoch| epoch.then)
    }

    #[cfg(test)]
    pub fn is_idle(&self) -> bool {
        self.epochs.len() == 1 && self.epochs.iter().all(|epoch| epoch.outstanding == 0)
    }
}
