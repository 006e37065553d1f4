//! Tests of matching and notifications at their limits.

use super::*;
use crate::operation::testing::Model;
use crate::wire::{Kind, WITHDRAWN};
use proptest::prelude::*;
use std::collections::VecDeque;

fn notify(inbox: &mut Inbox<Model>, number: u64) -> Result<(), Refusal> {
    let header = Header { transfer: number, ..Header::new(Kind::Notify) };
    inbox.notified(&header, number.to_le_bytes().to_vec())
}

/// Regression: until the loss of a connection was noticed, early notifications were refused as if unread.
#[test]
fn notifications_that_wait_for_one_before_them_are_not_held_against_their_reader() {
    let mut inbox = Inbox::default();
    let many = 2 * limits::NOTIFICATIONS_HELD_MAX as u64;
    for number in 1..many {
        notify(&mut inbox, number).unwrap();
    }
    assert!(inbox.take_notification().is_none());
    notify(&mut inbox, 0).unwrap();
    for number in 0..many {
        assert_eq!(inbox.take_notification(), Some(number.to_le_bytes().to_vec()));
    }
    // Notifications that the user could read but does not are bounded.
    let unread = limits::NOTIFICATIONS_HELD_MAX as u64;
    let outcomes: Vec<_> = (many..=many + unread).map(|number| notify(&mut inbox, number)).collect();
    assert!(outcomes[..unread as usize].iter().all(Result::is_ok));
    assert_eq!(outcomes[unread as usize], Err(Refusal::Limit));
    while inbox.take_notification().is_some() {}
    // Early notifications use up their limit in bytes.
    let next = many + unread + 1;
    let long = |inbox: &mut Inbox<Model>, number| {
        let header = Header { transfer: number, ..Header::new(Kind::Notify) };
        inbox.notified(&header, vec![7; limits::NOTIFY_BYTES_MAX])
    };
    let early = next + 1 + (limits::NOTIFICATION_BYTES_MAX / limits::NOTIFY_BYTES_MAX) as u64;
    (next + 1..early).for_each(|number| long(&mut inbox, number).unwrap());
    assert_eq!(long(&mut inbox, early), Err(Refusal::Limit));
    assert_eq!(long(&mut inbox, next), Ok(()));
    let taken = std::iter::from_fn(|| inbox.take_notification()).count() as u64;
    assert_eq!(taken, early - next);
    // The refused notification's number counts as used, and nothing stays charged.
    assert_eq!(long(&mut inbox, early + 1), Ok(()));
    assert!(inbox.take_notification().is_some());
    assert_eq!((inbox.notifications.held_bytes, inbox.notifications.early_bytes), (0, 0));
}

/// Regression: one refused notification made all those behind it ready, and gave room for as many again,
/// without end.
#[test]
fn notifications_that_were_early_still_count_once_it_is_their_turn() {
    let limits = PeerLimits { notification_bytes_max: 1000, ..PeerLimits::default() };
    let mut inbox = Inbox::<Model>::new(limits);
    let mut arrive = |number, bytes| {
        let header = Header { transfer: number, ..Header::new(Kind::Notify) };
        inbox.notified(&header, vec![7; bytes])
    };
    (0..10).for_each(|number| arrive(number, 100).unwrap());
    let mut next = 10;
    let mut accepted = 10;
    for _ in 0..5 {
        accepted += (next + 1..=next + 10).filter(|number| arrive(*number, 100).is_ok()).count();
        assert_eq!(arrive(next, 100), Err(Refusal::Limit));
        next += 11;
    }
    assert_eq!(accepted, 20, "as many bytes as may be held, and once more");
    let taken = std::iter::from_fn(|| inbox.take_notification()).count();
    assert_eq!(taken, accepted);
    // Every number counts as used, also those of refused notifications.
    let header = Header { transfer: next, ..Header::new(Kind::Notify) };
    assert_eq!(inbox.notified(&header, vec![7; 100]), Ok(()));
    assert!(inbox.take_notification().is_some());
    assert_eq!((inbox.notifications.held_bytes, inbox.notifications.early_bytes), (0, 0));
}

#[test]
fn a_message_that_is_taken_back_is_held_no_longer_wherever_it_waits() {
    let mut inbox = Inbox::<Model>::default();
    let say = |inbox: &mut Inbox<Model>, number: u64, total: u64| {
        let header =
            Header { offset: number, key: 7, transfer: number + 1, total, ..Header::new(Kind::Announce) };
        inbox.message(&header, Vec::new()).map(|replies| replies.len())
    };
    for number in [0, 1, 2, 5] {
        assert_eq!(say(&mut inbox, number, 9), Ok(0));
    }
    // Withdrawn in its turn, ahead of its turn, and before its announcement.
    for number in [1, 5, 3] {
        assert_eq!(say(&mut inbox, number, WITHDRAWN), Ok(0));
    }
    assert_eq!(say(&mut inbox, 3, 9), Err(Refusal::Other));
    assert_eq!(say(&mut inbox, 4, 9), Ok(0));
    assert_eq!((inbox.messages.next_number, inbox.messages.announced_held), (6, 3));
    for number in [0, 0, 1, 2, 4, 5] {
        assert_eq!(say(&mut inbox, number, WITHDRAWN), Ok(0));
    }
    let messages = &inbox.messages;
    assert!(messages.announced_held == 0 && messages.unexpected.is_empty() && messages.early.is_empty());
}

/// Regression: the due message was refused because of the waiting ones, so no later message was ever
/// delivered.
#[test]
fn a_number_that_is_due_is_taken_however_many_wait_for_it() {
    let mut inbox = Inbox::<Model>::default();
    let early = limits::REORDER_FRAMES_MAX as u64;
    (1..=early).for_each(|number| notify(&mut inbox, number).unwrap());
    assert_eq!(notify(&mut inbox, early + 1), Err(Refusal::Limit));
    notify(&mut inbox, 0).unwrap();
    let taken = std::iter::from_fn(|| inbox.take_notification());
    assert!(taken.eq((0..=early).map(|number| number.to_le_bytes().to_vec())));

    let mut message = |number: u64| {
        let kind = if number.is_multiple_of(16) { Kind::Send } else { Kind::Announce };
        let header =
            Header { offset: number, key: number, transfer: number + 1, total: 9, ..Header::new(kind) };
        inbox.message(&header, Vec::new()).map(|replies| replies.len())
    };
    let announced = limits::ANNOUNCED_SENDS_MAX as u64;
    (1..=announced).for_each(|number| assert_eq!(message(number), Ok(0)));
    (announced + 1..=early).for_each(|number| assert!(message(number).is_ok()));
    assert_eq!(message(early + 1), Err(Refusal::Limit));
    assert_eq!(message(0), Ok(0));
    assert_eq!(inbox.messages.next_number, early + 1);
    assert!(inbox.messages.early.is_empty());
}

/// Regression: returned messages were charged to no limit.
#[test]
fn messages_whose_receives_fail_are_charged_to_the_peers_credit() {
    const CREDIT: usize = limits::EAGER_CREDIT_BYTES;
    let mut inbox = Inbox::default();
    let bytes = vec![7; limits::EAGER_BYTES_MAX];
    let cost = bytes.len() + limits::EAGER_OVERHEAD_BYTES;
    let mut credit = CREDIT;
    // With `fail`, the receive's memory is revoked.
    let answer = |inbox: &mut Inbox<Model>, replies: Vec<Reply<Model>>, fail: bool, credit: &mut usize| {
        let mut replies = VecDeque::from(replies);
        while let Some(reply) = replies.pop_front() {
            match reply {
                Reply::Place(_, message) if fail => replies.extend(inbox.return_message(message)),
                Reply::Place(..) => {}
                Reply::Frame(header) => *credit += header.total as usize,
                other => panic!("{other:?}"),
            }
        }
    };
    let receive = || Model::receive(1, 7, bytes.len() as u64);
    let mut sent = 0;
    // The peer is honest: it sends while it has credit.
    while credit >= cost {
        let replies = inbox.post(receive());
        answer(&mut inbox, replies, true, &mut credit);
        let header = Header { offset: sent, key: 7, ..Header::new(Kind::Send) };
        credit -= cost;
        sent += 1;
        let replies = inbox.message(&header, bytes.clone()).unwrap();
        answer(&mut inbox, replies, true, &mut credit);
        assert!(sent as usize <= CREDIT / cost + 1, "more is held than there is credit for");
    }
    // All messages are received in the end, and all credit is back, except for less than one portion.
    while inbox.holds_anything() {
        let replies = inbox.post(receive());
        answer(&mut inbox, replies, false, &mut credit);
    }
    let messages = &inbox.messages;
    assert_eq!((messages.eager_held, messages.credit_owed), (0, 0));
    assert_eq!(credit + messages.consumed, CREDIT);
}

/// The inbox returns to the caller what to do for each receive, in order: the target exists before its data is
/// requested.
#[test]
fn a_receive_that_meets_its_message_is_opened_before_its_data_are_asked_for() {
    let mut inbox = Inbox::default();
    let announce = |number: u64, total: u64| Header {
        offset: number,
        key: 7,
        transfer: 50 + number,
        total,
        ..Header::new(Kind::Announce)
    };
    for id in 1..=3 {
        assert!(inbox.post(Model::receive(id, 7, 100)).is_empty());
    }
    // Messages ahead of their turn cause no action.
    assert!(inbox.message(&announce(1, 0), Vec::new()).unwrap().is_empty());
    assert!(inbox.message(&announce(2, 101), Vec::new()).unwrap().is_empty());
    let replies = inbox.message(&announce(0, 100), Vec::new()).unwrap();
    let reported: Vec<_> = replies
        .iter()
        .map(|reply| match reply {
            Reply::Open { op, bytes } => ("open", op.id(), *bytes),
            Reply::Frame(header) if header.kind == Kind::Match => ("match", header.transfer, header.key),
            Reply::Frame(header) => ("refuse", header.transfer, header.key),
            Reply::Received(op) => ("received", op.id(), 0),
            Reply::Truncated { op, message_bytes } => ("truncated", op.id(), *message_bytes),
            other => panic!("{other:?}"),
        })
        .collect();
    let too_long = Refusal::OutOfRegion as u64;
    assert_eq!(
        reported,
        [
            ("open", 1, 100),
            ("match", 50, 1),
            ("received", 2, 0),
            ("match", 51, 0),
            ("truncated", 3, 101),
            ("refuse", 52, too_long)
        ]
    );
}

/// Regression: the send succeeded, although its receive reported that it was cancelled.
#[test]
fn the_last_bytes_of_a_closed_target_are_refused_and_counted_ones_cannot_be_closed() {
    let target = Reassembly::new([(0, 100)], 100);
    assert_eq!(target.fill(60), Ok(false));
    assert_eq!(target.fill(41), Err(Refusal::OutOfRegion));
    assert!(target.close() && !target.close());
    assert_eq!(target.fill(40), Err(Refusal::NoSink));
    assert!(target.locate(60, 40).is_err_and(|refusal| refusal == Refusal::NoSink));
    let target = Reassembly::new([(0, 100)], 100);
    assert_eq!(target.fill(100), Ok(true));
    assert!(!target.close() && !target.is_closed());
}

proptest! {
    #[test]
    fn a_scatter_finds_every_range(
        ranges in prop::collection::vec((0u64..1000, 0u64..30), 0..10), position in 0u64..200, len in 0u64..200
    ) {
        let flat: Vec<u64> = ranges.iter().flat_map(|(o, l)| *o..o + l).collect();
        let scatter = Scatter::new(ranges);
        let found = scatter.locate(position, len).map(|r| r.flat_map(|(o, l)| o..o + l).collect::<Vec<_>>());
        let end = (position + len) as usize;
        prop_assert_eq!(found, (end <= flat.len()).then(|| flat[position as usize..end].to_vec()));
    }
}
