//! Matching, sinks and notifications without a network.

use super::*;
use crate::core::operation::Verb;
use ferrywire_proto::transfer::{Piece, Pieces};
use std::thread;
use std::time::Duration;

/// It ended twice: its memory was free while the next operation used it.
#[test]
fn an_operation_that_is_cancelled_as_its_bytes_come_ends_once() {
    let memory = Memory::private(4096).unwrap();
    let pieces = Pieces::One(Piece { local: 0, remote: 0, len: 4096 });
    let op = Arc::new(Op::new(1, Verb::Recv, pieces, Some(memory.clone()), 0));
    let inbound = Inbound::default();
    inbound.open_sink(op.clone(), 4096);
    let filling = inbound.hold_sink(1).unwrap();
    let cancelled = inbound.close_sink(1).unwrap();
    assert!(!cancelled.op.let_go(), "its memory is being found");
    assert!(filling.locate(0, 4096, &mut Vec::new()).is_err());
    assert!(filling.op.let_go());
    assert!(!memory.used());
    assert!(matches!(inbound.hold_sink(1), Err(Refusal::NoSink)));
}

/// The sender was told that the receive had the message, and the receive that it was cancelled.
#[test]
fn the_last_frame_of_a_cancelled_receive_is_refused_and_a_counted_one_cannot_be_cancelled() {
    let memory = Memory::private(4096).unwrap();
    let receive = |id| {
        let pieces = Pieces::One(Piece { local: 0, remote: 0, len: 4096 });
        Arc::new(Op::new(id, Verb::Recv, pieces, Some(memory.clone()), 0))
    };
    let inbound = Inbound::default();
    // Cancelled when all bytes are in their place, and before they are counted.
    inbound.open_sink(receive(1), 4096);
    let placing = inbound.hold_sink(1).unwrap();
    assert!(inbound.close_sink(1).is_some());
    assert!(matches!(inbound.filled(&placing, 4096), Err(Refusal::NoSink)));
    assert_eq!(placing.op.moved(), 0);
    // Cancelled when they are counted: too late, and the operation ends once.
    inbound.open_sink(receive(2), 4096);
    let placing = inbound.hold_sink(2).unwrap();
    assert!(matches!(inbound.filled(&placing, 4096), Ok(None)), "the frame holds the operation");
    assert!(inbound.close_sink(2).is_none());
    assert!(placing.op.let_go() && !placing.op.failed() && placing.op.moved() == 4096);
}

/// It was placed with the peer's messages and receives locked, for as long as a GPU took.
#[test]
fn a_message_is_placed_when_nothing_is_locked_any_more() {
    let memory = Memory::private(8).unwrap();
    let inbound = Inbound::default();
    let receive = |id| {
        let pieces = Pieces::One(Piece { local: 0, remote: 0, len: 8 });
        Arc::new(Op::new(id, Verb::Recv, pieces, Some(memory.clone()), 7))
    };
    let arrives = |number: u64| {
        let header = Header { offset: number, key: 7, ..Header::new(Kind::Send) };
        inbound.message(&header, vec![9; 8]).unwrap()
    };
    let [first, second] = [1, 2].map(receive);
    assert!(inbound.post(first.clone()).is_empty());
    let met_by_message = arrives(0);
    assert!(arrives(1).is_empty());
    let met_by_receive = inbound.post(second.clone());
    for (op, mut replies) in [(&first, met_by_message), (&second, met_by_receive)] {
        assert!(op.moved() == 0 && !op.ended());
        let Some(Reply::Place(placed, message)) = replies.pop() else { panic!("it is to be placed") };
        assert!(Arc::ptr_eq(&placed, op) && replies.is_empty());
        assert!(message.place(&placed));
        assert!(placed.let_go() && placed.moved() == 8);
    }
}

/// A thread for each request that waits a moment: the list grew with every one of them.
#[test]
fn who_has_waited_in_vain_for_a_notification_is_forgotten() {
    const LIMIT: Duration = Duration::from_secs(60);
    let builder = || crate::Endpoint::builder().threads(1).channels(1);
    let far = builder().listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
    let near = builder().build().unwrap();
    let peer = near.connect(far.listen_addresses()[0], LIMIT).unwrap();
    let target = near.register_zeroed(1 << 20).unwrap();
    // While so much is under way who waits sleeps.
    let _receive = peer.recv(1, &target, 0, 1 << 20).unwrap();
    thread::scope(|scope| {
        for _ in 0..20 {
            let waiting = scope.spawn(|| peer.wait_notification(Duration::from_millis(5)).is_err());
            assert!(waiting.join().unwrap());
        }
    });
    let left = peer.state().inbound.arrivals.len();
    assert!(left <= 1, "{left} of 20 threads that are gone, and of one worker, wait still");
}

fn notify(inbound: &Inbound, number: u64) -> Result<(), Refusal> {
    let header = Header { transfer: number, ..Header::new(Kind::Notify) };
    inbound.notified(&header, number.to_le_bytes().to_vec())
}

/// They were refused as if nobody had read them: for as long as it takes to notice a lost connection.
#[test]
fn notifications_that_wait_for_one_before_them_are_not_held_against_their_reader() {
    let inbound = Inbound::default();
    let many = 2 * limits::NOTIFICATIONS_HELD_MAX as u64;
    for number in 1..many {
        notify(&inbound, number).unwrap();
    }
    assert!(inbound.take_notification().is_none());
    notify(&inbound, 0).unwrap();
    for number in 0..many {
        assert_eq!(inbound.take_notification(), Some(number.to_le_bytes().to_vec()));
    }
    // Those that could be read and are not are.
    let unread = limits::NOTIFICATIONS_HELD_MAX as u64;
    let outcomes: Vec<_> = (many..=many + unread).map(|number| notify(&inbound, number)).collect();
    assert!(outcomes[..unread as usize].iter().all(Result::is_ok));
    assert_eq!(outcomes[unread as usize], Err(Refusal::Limit));
    while inbound.take_notification().is_some() {}
    // As many bytes of them as there may be.
    let next = many + unread + 1;
    let long = |number| {
        let header = Header { transfer: number, ..Header::new(Kind::Notify) };
        inbound.notified(&header, vec![7; limits::NOTIFY_BYTES_MAX])
    };
    let early = next + 1 + (limits::NOTIFICATION_BYTES_MAX / limits::NOTIFY_BYTES_MAX) as u64;
    (next + 1..early).for_each(|number| long(number).unwrap());
    assert_eq!(long(early), Err(Refusal::Limit));
    assert_eq!(long(next), Ok(()));
    let taken = std::iter::from_fn(|| inbound.take_notification()).count() as u64;
    assert_eq!(taken, early - next);
    // The one that was refused has had its turn, and nothing is charged any more.
    assert_eq!(long(early + 1), Ok(()));
    assert!(inbound.take_notification().is_some());
    let state = inbound.lock();
    assert_eq!((state.notification_bytes, state.early_bytes), (0, 0));
}

#[test]
fn a_message_that_is_taken_back_is_held_no_longer_wherever_it_waits() {
    let inbound = Inbound::default();
    let say = |number: u64, total: u64| {
        let header =
            Header { offset: number, key: 7, transfer: number + 1, total, ..Header::new(Kind::Announce) };
        inbound.message(&header, Vec::new()).map(|replies| replies.len())
    };
    for number in [0, 1, 2, 5] {
        assert_eq!(say(number, 9), Ok(0));
    }
    // In its turn, ahead of it, and before it was heard of at all.
    for number in [1, 5, 3] {
        assert_eq!(say(number, WITHDRAWN), Ok(0));
    }
    assert_eq!(say(3, 9), Err(Refusal::Other));
    assert_eq!(say(4, 9), Ok(0));
    let state = inbound.lock();
    assert_eq!((state.next_number, state.announced_held), (6, 3));
    drop(state);
    for number in [0, 0, 1, 2, 4, 5] {
        assert_eq!(say(number, WITHDRAWN), Ok(0));
    }
    let state = inbound.lock();
    assert!(state.announced_held == 0 && state.unexpected.is_empty() && state.early.is_empty());
}

/// It was refused for those that waited for it, and never had its turn: nothing behind it was heard of again.
#[test]
fn a_number_that_is_due_is_taken_however_many_wait_for_it() {
    let inbound = Inbound::default();
    let early = limits::EARLY_FRAMES_MAX as u64;
    (1..=early).for_each(|number| notify(&inbound, number).unwrap());
    assert_eq!(notify(&inbound, early + 1), Err(Refusal::Limit));
    notify(&inbound, 0).unwrap();
    let taken = std::iter::from_fn(|| inbound.take_notification());
    assert!(taken.eq((0..=early).map(|number| number.to_le_bytes().to_vec())));

    let message = |number: u64| {
        let kind = if number.is_multiple_of(16) { Kind::Send } else { Kind::Announce };
        let header =
            Header { offset: number, key: number, transfer: number + 1, total: 9, ..Header::new(kind) };
        inbound.message(&header, Vec::new()).map(|replies| replies.len())
    };
    let announced = limits::ANNOUNCED_SENDS_MAX as u64;
    (1..=announced).for_each(|number| assert_eq!(message(number), Ok(0)));
    (announced + 1..=early).for_each(|number| assert!(message(number).is_ok()));
    assert_eq!(message(early + 1), Err(Refusal::Limit));
    assert_eq!(message(0), Ok(0));
    assert_eq!(inbound.lock().next_number, early + 1);
    assert!(inbound.lock().early.is_empty());
}

/// What was held of them was charged to no limit.
#[test]
fn messages_whose_receives_fail_are_charged_to_the_peers_credit() {
    const CREDIT: usize = limits::EAGER_CREDIT_BYTES;
    let inbound = Inbound::default();
    let bytes = vec![7; limits::EAGER_BYTES_MAX];
    let cost = bytes.len() + limits::EAGER_OVERHEAD_BYTES;
    let mut credit = CREDIT;
    // With `fail`, the memory of the receive is not there any more.
    let answer = |replies: Vec<Reply>, fail: bool, credit: &mut usize| {
        let mut replies = VecDeque::from(replies);
        while let Some(reply) = replies.pop_front() {
            match reply {
                Reply::Place(op, message) => {
                    match fail {
                        true => replies.extend(inbound.return_message(message)),
                        false => assert!(message.place(&op)),
                    }
                    assert!(op.let_go());
                }
                Reply::Frame(header) => *credit += header.total as usize,
                Reply::Ended(_) => {}
            }
        }
    };
    let receive = || {
        let memory = Memory::private(bytes.len()).unwrap();
        let pieces = Pieces::One(Piece { local: 0, remote: 0, len: memory.len() });
        Arc::new(Op::new(1, Verb::Recv, pieces, Some(memory), 7))
    };
    let mut sent = 0;
    // As an honest peer sends: as long as it has credit.
    while credit >= cost {
        answer(inbound.post(receive()), true, &mut credit);
        let header = Header { offset: sent, key: 7, ..Header::new(Kind::Send) };
        credit -= cost;
        sent += 1;
        answer(inbound.message(&header, bytes.clone()).unwrap(), true, &mut credit);
        assert!(sent as usize <= CREDIT / cost + 1, "more is held than there is credit for");
    }
    // Received in the end, all of them; all credit is back, but what is too little to tell of.
    while inbound.holds_anything() {
        answer(inbound.post(receive()), false, &mut credit);
    }
    let state = inbound.lock();
    assert_eq!((state.eager_held, state.credit_owed), (0, 0));
    assert_eq!(credit + state.consumed, CREDIT);
}
