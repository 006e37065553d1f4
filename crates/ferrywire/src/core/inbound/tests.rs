//! Sinks and inbound messages without a network.

use super::*;
use crate::core::operation::{Task, no_owner};
use ferrywire_proto::operation::{Piece, Pieces};
use ferrywire_proto::wire::Kind;
use std::thread;
use std::time::Duration;

/// Regression: the operation ended twice, so its memory was free while the next operation used it.
#[test]
fn an_operation_that_is_cancelled_as_its_bytes_come_ends_once() {
    let memory = Memory::private(4096).unwrap();
    let pieces = Pieces::One(Piece { local: 0, remote: 0, len: 4096 });
    let op = Hold::new(Op::new(no_owner(), 1, Task::Recv { tag: 0 }, pieces, Some(memory.clone())));
    let inbound = Inbound::default();
    let shared = Arc::clone(&op);
    inbound.open_sink(op, 4096);
    let filling = inbound.sink(1).unwrap();
    drop(inbound.close_sink(1).unwrap());
    assert!(!shared.ended() && memory.used(), "a frame is finding its memory");
    assert!(filling.locate(0, 4096, &mut Vec::new()).is_err());
    drop(filling);
    assert!(shared.ended() && !memory.used());
    assert!(matches!(inbound.sink(1), Err(Refusal::NoSink)));
}

/// Regression: the send succeeded, although its receive reported that it was cancelled.
#[test]
fn the_last_frame_of_a_cancelled_receive_is_refused_and_a_counted_one_cannot_be_cancelled() {
    let memory = Memory::private(4096).unwrap();
    let receive = |id| {
        let pieces = Pieces::One(Piece { local: 0, remote: 0, len: 4096 });
        Hold::new(Op::new(no_owner(), id, Task::Recv { tag: 0 }, pieces, Some(memory.clone())))
    };
    let inbound = Inbound::default();
    // The receive is cancelled when all bytes are placed but not counted.
    inbound.open_sink(receive(1), 4096);
    let placing = inbound.sink(1).unwrap();
    assert!(inbound.close_sink(1).is_some());
    assert!(matches!(inbound.filled(&placing, 4096), Err(Refusal::NoSink)));
    assert_eq!(placing.op.moved(), 0);
    // The receive is cancelled after the bytes are counted: too late, and the operation ends once.
    inbound.open_sink(receive(2), 4096);
    let placing = inbound.sink(2).unwrap();
    assert!(matches!(inbound.filled(&placing, 4096), Ok(true)));
    assert!(inbound.close_sink(2).is_none());
    let shared = Arc::clone(&placing.op);
    assert!(!shared.ended(), "the frame holds the operation");
    drop(placing);
    assert!(shared.ended() && !shared.failed() && shared.moved() == 4096);
}

/// Regression: the message was placed with the peer's inbox locked, for as long as a GPU copy took.
#[test]
fn a_message_is_placed_when_nothing_is_locked_any_more() {
    let memory = Memory::private(8).unwrap();
    let inbound = Inbound::default();
    let receive = |id| {
        let pieces = Pieces::One(Piece { local: 0, remote: 0, len: 8 });
        Hold::new(Op::new(no_owner(), id, Task::Recv { tag: 7 }, pieces, Some(memory.clone())))
    };
    let arrives = |number: u64| {
        let header = Header { offset: number, key: 7, ..Header::new(Kind::Send) };
        inbound.message(&header, vec![9; 8]).unwrap()
    };
    let receives = [1, 2].map(receive);
    let shared = receives.each_ref().map(|op| Arc::clone(op));
    let [first, second] = receives;
    assert!(inbound.post(first).is_empty());
    let met_by_message = arrives(0);
    assert!(arrives(1).is_empty());
    let met_by_receive = inbound.post(second);
    for (op, mut replies) in shared.iter().zip([met_by_message, met_by_receive]) {
        assert!(op.moved() == 0 && !op.ended());
        let Some(Reply::Place(placed, message)) = replies.pop() else {
            panic!("the message should be placed")
        };
        assert!(Arc::ptr_eq(&placed, op) && replies.is_empty());
        assert!(place(&message, &placed));
        drop(placed);
        assert!(op.ended() && op.moved() == 8);
    }
}

/// Regression: each thread that waited a moment left an entry in the list.
#[test]
fn a_waiter_whose_wait_timed_out_is_forgotten() {
    const LIMIT: Duration = Duration::from_secs(60);
    let builder = || crate::Endpoint::builder().threads(1).channels(1);
    let far = builder().listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
    let near = builder().build().unwrap();
    let peer = near.connect(far.listen_addresses()[0], LIMIT).unwrap();
    let target = near.alloc_host(1 << 20).unwrap();
    // With so many bytes in flight a waiting caller sleeps.
    let _receive = peer.recv(1, &target, 0, 1 << 20).unwrap();
    thread::scope(|scope| {
        for _ in 0..20 {
            let waiting = scope.spawn(|| peer.wait_notification(Duration::from_millis(5)).is_err());
            assert!(waiting.join().unwrap());
        }
    });
    let left = peer.state().inbound.arrivals.len();
    assert!(left <= 1, "{left} waiters are left of 20 ended threads and one worker");
}

/// Regression: a receive that was posted while its peer ended was neither refused nor failed for a moment.
#[test]
fn a_receive_that_the_end_of_the_peer_has_taken_has_failed() {
    for id in 0..2000 {
        let inbound = Arc::new(Inbound::default());
        let pieces = Pieces::One(Piece { local: 0, remote: 0, len: 8 });
        let receive = Hold::new(Op::new(no_owner(), id, Task::Recv { tag: 0 }, pieces, None));
        let shared = Arc::clone(&receive);
        assert!(inbound.post(receive).is_empty());
        let closing = inbound.clone();
        let closer = thread::spawn(move || drop(closing.close(&Error::Closed)));
        loop {
            let Some(unposted) = inbound.unpost(&shared) else {
                assert!(shared.failed(), "it is nowhere, and has not failed");
                break;
            };
            if closer.is_finished() {
                break;
            }
            assert!(inbound.post(unposted).is_empty());
        }
        closer.join().unwrap();
    }
}
