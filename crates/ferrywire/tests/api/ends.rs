//! What is told where an endpoint ends, does not come about, or cannot be reached.

use crate::{LIMIT, pair};
use ferrywire::{Endpoint, Error, Transfer};
use std::sync::Barrier;
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

/// With threads of its own and without: there whoever waits for a peer turns everything else meanwhile.
#[test]
fn whoever_waits_for_a_peer_is_told_when_the_endpoint_closes() {
    for threads in [0, 1] {
        let builder = || Endpoint::builder().channels(1);
        let accepting = builder().threads(threads).listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
        let connecting = builder().build().unwrap();
        let first = Barrier::new(2);
        thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                let far = accepting.accept(LIMIT).unwrap();
                first.wait();
                (accepting.accept(LIMIT).map(|_| ()), far)
            });
            let near = connecting.connect(accepting.listen_addresses()[0], LIMIT).unwrap();
            first.wait();
            // Without threads this is answered only by whoever waits.
            near.notify(b"are you there?").unwrap().wait(LIMIT).unwrap();
            thread::sleep(Duration::from_millis(50));
            assert_eq!(accepting.close(LIMIT), Ok(()));
            assert_eq!(waiting.join().unwrap().0, Err(Error::Closed));
        });
    }
}
