//! The last byte of a message against a cancel: `Reassembly::fill` against `close`.

use crate::check;
use crate::reassembly::Reassembly;
use crate::wire::Refusal;
use loom::cell::UnsafeCell;
use loom::thread;
use std::sync::Arc;

const HALF: u64 = 8;

/// A message of two frames, and the memory of each.
struct Message {
    target: Reassembly,
    memory: [UnsafeCell<u64>; 2],
}

impl Message {
    // loom's threads are all on one of the system's.
    #[allow(clippy::arc_with_non_send_sync)]
    fn new() -> Arc<Message> {
        let memory = [UnsafeCell::new(0), UnsafeCell::new(0)];
        Arc::new(Message { target: Reassembly::new([(0, 2 * HALF)], 2 * HALF), memory })
    }

    /// Places one frame and counts it.
    fn fill(&self, frame: usize) -> Result<bool, Refusal> {
        // SAFETY: each thread has a frame of its own, and loom checks that no thread reads it meanwhile.
        self.memory[frame].with_mut(|bytes| unsafe { *bytes = HALF });
        let filled = self.target.fill(HALF);
        if filled == Ok(true) {
            assert_eq!(self.bytes(), 2 * HALF);
        }
        filled
    }

    /// The bytes that the user reads once the message is complete.
    fn bytes(&self) -> u64 {
        // SAFETY: loom checks that no thread writes it meanwhile.
        self.memory.iter().map(|frame| frame.with(|bytes| unsafe { *bytes })).sum()
    }
}

/// Either the message is whole, reported by its last frame alone, and the cancel is refused; or it is closed, no
/// frame is asked to be the last, and at least one is refused.
#[test]
fn a_message_is_completed_or_cancelled_and_never_both() {
    check(|| {
        let message = Message::new();
        let filling = [0, 1].map(|frame| {
            let message = message.clone();
            thread::spawn(move || message.fill(frame))
        });
        let closed = message.target.close();
        let filled = filling.map(|filling| filling.join().unwrap());
        let reported = filled.iter().filter(|filled| **filled == Ok(true)).count();
        let refused = filled.iter().filter(|filled| **filled == Err(Refusal::NoSink)).count();
        match closed {
            true => assert!(reported == 0 && refused > 0, "{filled:?}"),
            false => assert!(reported == 1 && refused == 0, "{filled:?}"),
        }
        assert_eq!(message.target.is_closed(), closed);
        assert!(!message.target.close());
    });
}

/// Of two that cancel one does, unless the message is whole; a message has no more bytes than were announced.
#[test]
fn one_cancel_of_two_counts_and_no_byte_beyond_the_message() {
    check(|| {
        let message = Message::new();
        message.fill(0).unwrap();
        let closing = {
            let message = message.clone();
            thread::spawn(move || message.target.close())
        };
        let filling = {
            let message = message.clone();
            thread::spawn(move || (message.fill(1), message.target.fill(1)))
        };
        let closed = [message.target.close(), closing.join().unwrap()];
        match filling.join().unwrap() {
            (Ok(true), beyond) => assert_eq!((closed, beyond), ([false; 2], Err(Refusal::OutOfRegion))),
            (filled, beyond) => {
                assert_eq!((filled, beyond), (Err(Refusal::NoSink), Err(Refusal::NoSink)));
                assert_ne!(closed[0], closed[1]);
            }
        }
    });
}
