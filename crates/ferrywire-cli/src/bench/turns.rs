//! One GPU after another: with `--as-seed` the pairs of a process move a message each in turn, as the original's one loop
//! over its GPUs did.
//!
//! Invariant: whoever does not take part, or ends, is passed over; nobody has two turns before another who waits has one.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::link::SLICE;
use crate::exit::{Failure, Outcome};
use crate::sys;

/// The pairs of a process, in a ring.
#[derive(Debug)]
pub struct Turns {
    ring: Mutex<Ring>,
    passed: Condvar,
}

#[derive(Debug)]
struct Ring {
    here: Vec<bool>,
    next: usize,
    taken: bool,
}

impl Turns {
    /// A ring of so many pairs, of which none takes part yet.
    pub fn new(pairs: usize) -> Turns {
        let ring = Ring { here: vec![false; pairs], next: 0, taken: false };
        Turns { ring: Mutex::new(ring), passed: Condvar::new() }
    }

    /// Takes part until the result is dropped.
    pub fn join(&self, pair: usize) -> Place<'_> {
        self.lock().here[pair] = true;
        Place { turns: self, pair }
    }

    fn lock(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ring {
    /// Whose turn it is: the next one that takes part.
    fn of(&self) -> Option<usize> {
        let all = self.here.len();
        (self.next..self.next + all).map(|at| at % all).find(|pair| self.here[*pair])
    }
}

/// A pair's place in the ring.
#[derive(Debug)]
pub struct Place<'a> {
    turns: &'a Turns,
    pair: usize,
}

impl Place<'_> {
    /// Waits for the pair's turn, which lasts until the result is dropped.
    pub fn turn(&self) -> Outcome<Turn<'_>> {
        let mut ring = self.turns.lock();
        while ring.taken || ring.of() != Some(self.pair) {
            if sys::interrupted() {
                return Err(Failure::Interrupted);
            }
            let waited = self.turns.passed.wait_timeout(ring, SLICE);
            ring = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        ring.taken = true;
        Ok(Turn(self))
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.turns.lock().here[self.pair] = false;
        self.turns.passed.notify_all();
    }
}

/// A pair's turn.
#[derive(Debug)]
pub struct Turn<'a>(&'a Place<'a>);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut ring = self.0.turns.lock();
        (ring.taken, ring.next) = (false, self.0.pair + 1);
        self.0.turns.passed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_move_one_after_another_and_those_that_end_are_passed_over() {
        let (turns, moved) = (Turns::new(3), Mutex::new(Vec::new()));
        // Pair 1 never comes.
        let places = [(0, 4), (2, 2)].map(|(pair, messages)| (turns.join(pair), messages));
        std::thread::scope(|scope| {
            for (place, messages) in places {
                let moved = &moved;
                scope.spawn(move || {
                    for _ in 0..messages {
                        let _turn = place.turn().expect("a turn");
                        moved.try_lock().expect("nobody else has the turn").push(place.pair);
                    }
                });
            }
        });
        assert_eq!(*moved.lock().expect("all have ended"), [0, 2, 0, 2, 0, 0]);
    }
}
