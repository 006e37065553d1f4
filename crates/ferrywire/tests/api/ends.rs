//! What is told where an endpoint ends, does not come about, or cannot be reached.

use crate::{LIMIT, pair};
use ferrywire::{Error, Transfer};
use std::thread;
use std::time::{Duration, Instant};

fn eventually(what: &str, mut so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !so() {
        assert!(start.elapsed() < LIMIT, "never came about: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// An endpoint with a message under way that nobody receives: it cannot close before its deadline.
fn never_finished() -> (crate::Pair, Transfer) {
    let pair = pair();
    let source = pair.ends[0].register_zeroed(1 << 20).unwrap();
    let sent = pair.near.send(1, &source, 0, 1 << 20).unwrap();
    (pair, sent)
}

/// A second close says what the first does, and not before it.
#[test]
fn a_second_close_waits_for_the_first_and_says_the_same() {
    let (pair, sent) = never_finished();
    thread::scope(|scope| {
        let first = scope.spawn(|| pair.ends[0].close(Duration::from_secs(2)));
        eventually("it closes", || matches!(pair.near.notify(b"x"), Err(Error::Closed)));
        let early = pair.ends[0].close(Duration::ZERO);
        assert!(matches!(early, Err(Error::Deadline { waited: Duration::ZERO, .. })), "{early:?}");
        let second = pair.ends[0].close(LIMIT);
        assert!(sent.poll().is_some(), "the second close came back before the end");
        assert!(matches!(second, Err(Error::Deadline { .. })), "{second:?}");
        assert_eq!(first.join().unwrap(), second);
        assert_eq!(pair.ends[0].close(LIMIT), second, "it is closed, and did not finish");
    });
    assert_eq!((pair.ends[1].close(LIMIT), pair.ends[1].close(Duration::ZERO)), (Ok(()), Ok(())));
}
