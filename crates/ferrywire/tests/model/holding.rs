//! The token that keeps an operation's memory: `Hold::clone` against `Hold::drop`.

use crate::check;
use crate::core::hold::{Held, Hold, Holds};
use loom::cell::UnsafeCell;
use loom::thread;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// An operation on memory of two bytes, each of which one thread writes.
struct Operation {
    holds: Holds,
    memory: [UnsafeCell<u8>; 2],
    ends: Arc<AtomicU32>,
}

impl Operation {
    fn hold(ends: &Arc<AtomicU32>) -> Hold<Operation> {
        let memory = [UnsafeCell::new(0), UnsafeCell::new(0)];
        Hold::new(Operation { holds: Holds::default(), memory, ends: ends.clone() })
    }

    fn write(&self, byte: usize) {
        // SAFETY: each thread has a byte of its own, and loom checks that no thread reads it meanwhile.
        self.memory[byte].with_mut(|byte| unsafe { *byte = 1 });
    }

    fn read(&self, byte: usize) -> u8 {
        // SAFETY: loom checks that no thread writes it meanwhile.
        self.memory[byte].with(|byte| unsafe { *byte })
    }
}

impl Held for Operation {
    fn holds(&self) -> &Holds {
        &self.holds
    }

    fn finish(self: &Arc<Self>) {
        assert_eq!([self.read(0), self.read(1)], [1; 2], "it ended before it was done");
        self.ends.fetch_add(1, Relaxed);
    }
}

/// An operation ends once, after the last token is dropped, and sees what was done under every one of them.
#[test]
fn the_last_of_all_tokens_ends_an_operation_that_sees_all_that_was_done() {
    check(|| {
        let ends = Arc::new(AtomicU32::new(0));
        let hold = Operation::hold(&ends);
        let writing = [0, 1].map(|byte| {
            let hold = hold.clone();
            thread::spawn(move || {
                // As a chunk that is cut of it. One thread does so: with two there are too many orders to try.
                let chunk = if byte == 0 { hold.clone() } else { return hold.write(byte) };
                drop(hold);
                chunk.write(byte);
            })
        });
        drop(hold);
        writing.into_iter().for_each(|writing| writing.join().unwrap());
        assert_eq!(ends.load(Relaxed), 1);
    });
}

/// The same if each thread drops its token with an end of its own, which is the one only for the last token.
#[test]
fn an_operation_ends_once_if_its_tokens_are_dropped_with_an_end() {
    check(|| {
        let ends = Arc::new(AtomicU32::new(0));
        let hold = Operation::hold(&ends);
        let drop_with_end = |hold: Hold<Operation>| hold.drop_with(|op| op.finish());
        let writing = {
            let hold = hold.clone();
            thread::spawn(move || {
                hold.write(0);
                drop_with_end(hold);
            })
        };
        hold.write(1);
        drop_with_end(hold);
        writing.join().unwrap();
        assert_eq!(ends.load(Relaxed), 1);
    });
}

/// A thread that holds the last token sees all writes that were made under the other tokens.
#[test]
fn the_holder_of_the_only_token_sees_what_was_done_under_the_others() {
    check(|| {
        let ends = Arc::new(AtomicU32::new(0));
        let hold = Operation::hold(&ends);
        hold.write(0);
        let writing = {
            let hold = hold.clone();
            thread::spawn(move || hold.write(1))
        };
        if hold.holds().is_one() {
            assert_eq!(hold.read(1), 1);
        }
        drop(hold);
        writing.join().unwrap();
        assert_eq!(ends.load(Relaxed), 1);
    });
}
