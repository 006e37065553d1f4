//! Wake-ups between threads when several callers or several progress threads share a peer. These
//! run on TCP alone, since the simulated network has one thread.

use ferrywire::{Endpoint, Peer, Region, Transfer, TransferError, limits};
use std::thread;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);

struct Ends {
    here: Endpoint,
    there: Endpoint,
    peer: Peer,
    far: Peer,
}

/// Two endpoints, each with this many threads and as many channels.
fn ends(threads: usize) -> Ends {
    let builder = || Endpoint::builder().threads(threads).channels(threads);
    let there = builder().listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
    let here = builder().build().unwrap();
    let peer = here.connect(there.listen_addresses()[0], LIMIT).unwrap();
    let far = there.accept(LIMIT).unwrap();
    Ends { here, there, peer, far }
}

/// A size that is announced, and too small to be left to the threads.
const HELD_BYTES: u64 = 256 << 10;

fn done(transfer: &Transfer) -> bool {
    !matches!(transfer.wait(LIMIT / 4), Err(TransferError::Stalled { .. }))
}

#[test]
fn a_small_write_does_not_wait_for_a_caller_that_sleeps() {
    let Ends { here, there, peer, far } = ends(1);
    let (source, target) = (here.alloc_host(HELD_BYTES as usize).unwrap(), there.alloc_host(64).unwrap());
    // In flight without a frame that could be answered: the message has no receive.
    let unmatched = peer.send(1, &source, 0, HELD_BYTES).unwrap();
    let listen = || while peer.wait_notification(LIMIT).unwrap() != b"end" {};
    thread::scope(|scope| {
        scope.spawn(listen);
        let rounds = (0..3).all(|_| {
            // The listener takes the crank over and falls asleep with it, in the end without a limit.
            let reported: Vec<Transfer> = (0..200).map(|_| far.notify(b"more").unwrap()).collect();
            assert!(reported.iter().all(done));
            thread::sleep(3 * limits::PATH_CHECK_INTERVAL);
            done(&peer.write(&source, 0, &target.descriptor(), 0, 64).unwrap())
        });
        far.notify(b"end").unwrap().wait(LIMIT).unwrap();
        assert!(rounds, "a write waited for somebody who sleeps");
    });
    unmatched.cancel();
}

/// Moves so many bytes a few times. There has to be a time to which the channels of all threads contributed.
fn all_channels_carry(sender: &Peer, mut moves: impl FnMut()) {
    let sent = || sender.stats().channels.iter().map(|channel| channel.sent_bytes).collect::<Vec<_>>();
    let mut seen = Vec::new();
    for _ in 0..20 {
        // All threads fall asleep.
        thread::sleep(Duration::from_millis(20));
        let before = sent();
        moves();
        let moved: Vec<u64> = sent().iter().zip(before).map(|(now, before)| now - before).collect();
        if moved.iter().all(|bytes| *bytes > CARRIED_BYTES) {
            return;
        }
        seen.push(moved);
    }
    panic!("some thread sleeps: {seen:?}");
}

const THREADS: usize = 4;
/// More than a request or an acknowledgement.
const CARRIED_BYTES: u64 = 64 << 10;
const BYTES: u64 = 64 << 20;

#[test]
fn a_large_read_is_answered_by_all_threads() {
    let Ends { here, there, peer, far } = ends(THREADS);
    let (target, source) = (region(&here), region(&there));
    all_channels_carry(&far, || {
        let read = peer.read(&target, 0, &source.descriptor(), 0, BYTES).unwrap();
        assert_eq!(read.wait(LIMIT), Ok(BYTES));
    });
}

#[test]
fn a_large_message_that_was_waited_for_is_sent_by_all_threads() {
    let Ends { here, there, peer, far } = ends(THREADS);
    let (source, target) = (region(&here), region(&there));
    all_channels_carry(&peer, || {
        let sent = peer.send(1, &source, 0, BYTES).unwrap();
        thread::sleep(Duration::from_millis(20));
        assert_eq!(far.recv(1, &target, 0, BYTES).unwrap().wait(LIMIT), Ok(BYTES));
        assert_eq!(sent.wait(LIMIT), Ok(BYTES));
    });
}

fn region(end: &Endpoint) -> Region {
    end.alloc_host(BYTES as usize).unwrap()
}
