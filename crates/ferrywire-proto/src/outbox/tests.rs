//! Tests of the order in which frames leave, and of the handles in them.

use super::*;
use crate::operation::testing::Model;
use crate::operation::{Pieces, merge};
use proptest::prelude::*;

fn pull() -> Pull {
    Pull {
        bytes: u64::MAX,
        channels: 1,
        chunk_bytes: limits::CHUNK_BYTES_MIN,
        staged_bytes: (limits::STAGING_CHUNK_BYTES_MIN, limits::STAGING_SLOT_BYTES),
        ordered_bytes: 0,
        whole_bytes: 0,
        small: u64::MAX,
        bulk: true,
        bulk_in_turn: false,
        messages: None,
    }
}

fn outbox() -> Outbox<Model> {
    Outbox::new(PeerLimits::default())
}

/// All frames that can be pulled; no operation is dropped.
fn frames(outbox: &mut Outbox<Model>) -> Vec<Frame<Model>> {
    let mut dropped = Vec::new();
    let frames = std::iter::from_fn(|| outbox.next(pull(), true, &mut dropped)).collect();
    assert!(dropped.is_empty());
    frames
}

fn kinds(frames: &[Frame<Model>]) -> Vec<(Kind, u64, u64)> {
    frames.iter().map(|frame| (frame.header.kind, frame.header.transfer, frame.header.total)).collect()
}

fn notify(id: u64) -> Model {
    Model::new(id, Verb::Notify, 0, 0).with(|facts| facts.message = vec![1])
}

fn write(id: u64, bytes: u64) -> Model {
    Model::new(id, Verb::Write, 9, bytes)
}

/// Ends an operation.
fn leave(outbox: &mut Outbox<Model>, op: &Model) {
    if op.0.epoch.borrow().as_ref().expect("it has joined one").leave(1) {
        outbox.release_notifications();
    }
}

/// Regression: while many notifications were released, an answer to the peer was dropped as if the peer read
/// none.
#[test]
fn notifications_that_go_out_late_are_no_answers() {
    let mut outbox = outbox();
    let sent =
        (0..=limits::REORDER_FRAMES_MAX).filter_map(|id| outbox.notifications.number(notify(id as u64)));
    assert_eq!(sent.count(), limits::REORDER_FRAMES_MAX);
    assert!(outbox.had(&Header::new(Kind::Notify)));
    assert_eq!((outbox.len(), outbox.answers_len()), (1, 0));
    assert_eq!(outbox.len() - outbox.bulk_len(), 1);
    assert_eq!(outbox.close().len(), 1);
}

/// docs/guarantees.md: `notify` is delivered after everything that was posted to the peer before it.
#[test]
fn a_standalone_notification_waits_for_all_that_was_posted_before_it_and_for_nothing_else() {
    let mut outbox = outbox();
    let [first, second, third] = [1, 2, 3].map(|id| write(id, 10));
    let copies = [first.retain(), second.retain(), third.retain()];
    outbox.post(first).unwrap();
    outbox.post(second).unwrap();
    outbox.post(notify(10)).unwrap();
    outbox.post(third).unwrap();
    outbox.post(notify(11)).unwrap();
    outbox.post(notify(12)).unwrap();
    assert_eq!(kinds(&frames(&mut outbox)), [(Kind::Data, 1, 10), (Kind::Data, 2, 10), (Kind::Data, 3, 10)]);
    // The last write is delivered, but the first two are not.
    leave(&mut outbox, &copies[2]);
    leave(&mut outbox, &copies[1]);
    assert!(frames(&mut outbox).is_empty());
    leave(&mut outbox, &copies[0]);
    let ids: Vec<_> = frames(&mut outbox).iter().map(|frame| frame.op.as_ref().unwrap().id()).collect();
    assert_eq!(ids, [10, 11, 12]);
    // With no operation before it the notification is sent at once; a served read does not count.
    outbox.post(Model::new(4, Verb::Serve, 5, 10)).unwrap();
    outbox.post(notify(13)).unwrap();
    assert_eq!(kinds(&frames(&mut outbox)), [(Kind::Data, 4, 10), (Kind::Notify, 3, 0)]);
}

#[test]
fn undelivered_frames_of_a_lost_channel_go_first_in_their_order() {
    let mut outbox = outbox();
    for id in 1..=4 {
        outbox.post(write(id, 10)).unwrap();
    }
    let mut sent = frames(&mut outbox);
    let later = sent.split_off(2);
    outbox.post(write(5, 10)).unwrap();
    outbox.push_own(Frame::bare(Header::new(Kind::Credit))).unwrap();
    outbox.resend(later.into_iter());
    outbox.resend(sent.into_iter());
    let order: Vec<_> = frames(&mut outbox).iter().map(|frame| frame.header.transfer).collect();
    assert_eq!(order, [1, 2, 3, 4, 0, 5]);
}

/// The write's target may hold newer bytes by now.
#[test]
fn of_a_cancelled_write_nothing_is_sent_again_and_a_failed_message_keeps_its_turn() {
    let mut outbox = outbox();
    let op = write(1, 10);
    let cancelled = op.retain();
    outbox.post(op).unwrap();
    let send =
        outbox.number_send(|number| Some(Model::new(2, Verb::Send, 7, 10).with(|f| f.number = number)));
    let send = send.unwrap();
    let failed = send.retain();
    outbox.post_joined(send).unwrap();
    let credit = outbox.eager_credit_bytes();
    let sent = frames(&mut outbox);
    assert_eq!(kinds(&sent), [(Kind::Data, 1, 10), (Kind::Send, 2, 10)]);
    assert!(outbox.eager_credit_bytes() < credit);
    cancelled.0.cancelled.set(true);
    failed.0.fail("its memory is gone");
    outbox.resend(sent.into_iter());
    let again = frames(&mut outbox);
    assert_eq!(kinds(&again), [(Kind::Credit, 0, 0), (Kind::Announce, 2, WITHDRAWN)]);
    assert_eq!(outbox.eager_credit_bytes(), credit);
    assert!(again.iter().all(|frame| frame.header.len == 0 && matches!(frame.body, Body::None)));
    assert!(cancelled.0.has_failed());
}

/// Regression: the bytes of a short send that the peer had matched waited behind half a megabyte of sends posted later, so its
/// receive, and all behind it, ended milliseconds late. Later all such sends went before a short write that was posted meanwhile.
#[test]
fn short_sends_that_were_matched_are_sent_in_turn_with_what_was_posted_later() {
    let mut outbox = Outbox::new(PeerLimits { eager_credit_bytes: 0, ..PeerLimits::default() });
    outbox.post(write(1, 5 * limits::CHUNK_BYTES_MIN as u64)).unwrap();
    let send = |id| Model::new(id, Verb::Send, 9, 10).with(|facts| facts.on_gpu = id == 8);
    let sends: Vec<_> = (2..=8).map(send).collect();
    for send in &sends {
        let send = outbox.number_send(|_| Some(send.retain())).unwrap();
        outbox.post_joined(send).unwrap();
    }
    let mut dropped = Vec::new();
    let first: Vec<_> = (0..7).map(|_| outbox.next(pull(), true, &mut dropped).unwrap()).collect();
    assert!(first.iter().all(|frame| frame.header.kind == Kind::Announce));
    (9..=10).for_each(|id| outbox.post(write(id, 10)).unwrap());
    for id in 2..=8 {
        assert!(matches!(outbox.matched(id, 70 + id), Matched::Queued(10)));
    }
    assert_eq!((outbox.small_len(), outbox.bulk_len()), (9, 1));
    let taken = outbox.take_out(Verb::Send, |op| op.id() == 3).unwrap();
    assert!(taken.0.uncut.get());
    sends[2].0.cancelled.set(true);
    let sent: Vec<_> = (0..6).map(|_| outbox.next(pull(), true, &mut dropped).unwrap()).collect();
    let key = |frame: &Frame<Model>| (frame.header.transfer, frame.header.key);
    let keys: Vec<_> = sent.iter().map(key).collect();
    assert_eq!(keys, [(2, 72), (9, 9), (5, 75), (10, 9), (6, 76), (7, 77)], "and nothing of bulk");
    // The last one is on a GPU. A pull that finds nothing is no turn of the others.
    assert!(outbox.next(Pull { bulk: false, ..pull() }, false, &mut dropped).is_none());
    outbox.post(write(11, 10)).unwrap();
    let next = outbox.next(pull(), true, &mut dropped).unwrap();
    assert_eq!(key(&next), (11, 9), "a matched one has just gone");
    assert_eq!(dropped.iter().map(Operation::id).collect::<Vec<_>>(), [4]);
    assert!(dropped[0].0.uncut.get());
    assert_eq!(outbox.close().iter().map(Operation::id).collect::<Vec<_>>(), [8, 1]);
}

/// Regression: a channel with as much bulk in flight as it may have went on with small operations only, as long as there
/// were some.
#[test]
fn bulk_has_its_turn_among_small_operations_although_no_more_of_it_should_be_in_flight() {
    const SMALL: u64 = 64 << 10;
    let taken = |bulk_in_turn| {
        let mut outbox = outbox();
        (1..=40).for_each(|id| outbox.post(write(id, SMALL)).unwrap());
        outbox.post(write(41, 1 << 30)).unwrap();
        let mut taken = String::new();
        // Each pull of a channel has a share of a few small operations.
        for number in 0..40 {
            let small = if number % 4 == 3 { 0 } else { SMALL };
            let pull = Pull { small, bulk: false, bulk_in_turn: bulk_in_turn && small > 0, ..pull() };
            let frame = outbox.next(pull, true, &mut Vec::new());
            taken.extend(frame.map(|frame| if frame.header.transfer == 41 { 'b' } else { 's' }));
        }
        taken
    };
    assert_eq!(taken(true), "ssssssssbssssssssbssssssssbsss");
    assert_eq!(taken(false), "s".repeat(30));
}

#[test]
fn an_operation_is_cut_into_as_few_equal_parts_as_possible() {
    let parts = |mut bytes: u64, most: u64| {
        let mut parts = Vec::new();
        while bytes > 0 {
            let part = equal_part(bytes, most).min(bytes);
            parts.push(part);
            bytes -= part;
        }
        parts
    };
    const K: u64 = 1 << 10;
    assert_eq!(parts(513 * K, 512 * K), [260 * K, 253 * K]);
    assert_eq!(parts(512 * K, 512 * K), [512 * K]);
    assert_eq!(parts(1536 * K + 1, 512 * K), [388 * K, 384 * K, 384 * K, 380 * K + 1]);
    assert_eq!(parts(1, 512 * K), [1]);
    assert_eq!(parts(9_000, 5_000), [5_000, 4_000], "a bound that is no whole number of pages");
}

#[test]
fn a_bulk_operation_that_channels_take_in_order_is_cut_beyond_the_bytes_that_travel_whole() {
    const CHUNK: u64 = limits::CHUNK_BYTES_MIN as u64;
    const WHOLE: u64 = 4 * CHUNK;
    const MOST: u64 = 6 * CHUNK;
    let pull = Pull { ordered_bytes: MOST, whole_bytes: WHOLE, ..pull() };
    let pieces = |count: usize| {
        let piece = |at| Piece { local: 2 * at, remote: 2 * at, len: 1 };
        let last = Piece { local: 1 << 20, remote: 1 << 20, len: CHUNK };
        Pieces::joined((1..count as u64).map(piece).chain([last]))
    };
    let over = |count| Model::over(1, Verb::Write, 9, pieces(count));
    let most = limits::SEGMENTS_PER_CHUNK_MAX;
    for (op, ordered, first) in [
        (write(1, WHOLE), Some(WHOLE), WHOLE),
        (write(1, MOST), Some(MOST), MOST / 2),
        (write(1, MOST + 1), Some(MOST + 1), CHUNK),
        (write(1, WHOLE).with(|facts| facts.on_gpu = true), Some(WHOLE), CHUNK),
        (over(most), Some(CHUNK + most as u64 - 1), CHUNK + most as u64 - 1),
        (over(most + 1), None, most as u64),
    ] {
        let mut outbox = outbox();
        let total = op.total();
        outbox.post(op).unwrap();
        assert_eq!(outbox.next_ordered_bytes(), ordered);
        let frame = outbox.next(pull, true, &mut Vec::new()).unwrap();
        assert_eq!((u64::from(frame.header.len), outbox.bulk_bytes()), (first, total - first));
        assert_eq!(outbox.next_ordered_bytes(), ordered.filter(|_| first < total), "the rest has its place");
    }
    // A notification that is left is one frame too.
    let mut outbox = outbox();
    outbox.post(write(1, WHOLE).with(|facts| facts.message = vec![1])).unwrap();
    let mut next =
        || (outbox.next_ordered_bytes(), outbox.next(pull, true, &mut Vec::new()).unwrap().header.kind);
    assert_eq!([next(), next()], [(Some(WHOLE), Kind::Data), (Some(1), Kind::Notify)]);
    assert!(outbox.is_empty() && outbox.next_ordered_bytes().is_none());
}

/// Each chunk has a token of its own; the last one has the operation's.
#[test]
fn every_handle_that_comes_in_leaves_once() {
    let mut outbox = outbox();
    let bytes = 5 * limits::CHUNK_BYTES_MIN as u64;
    let pieces = Pieces::One(Piece { local: 0, remote: 0, len: bytes });
    let op = Model::over(1, Verb::Write, 9, pieces).with(|facts| facts.message = vec![1]);
    let facts = op.0.clone();
    outbox.post(op).unwrap();
    assert_eq!((facts.tokens.get(), outbox.bulk_bytes()), (1, bytes));
    let sent = frames(&mut outbox);
    assert_eq!((sent.len(), outbox.bulk_bytes()), (6, 0));
    assert_eq!(kinds(&sent)[5], (Kind::Notify, 1, bytes));
    assert_eq!(facts.tokens.get(), 6);
    drop(sent);
    assert_eq!(facts.tokens.get(), 0);
    // One operation is taken out, and one returned by the closed outbox.
    let [first, second] = [2, 3].map(|id| write(id, bytes));
    let copies = [first.retain(), second.retain()];
    outbox.post(first).unwrap();
    outbox.post(second).unwrap();
    let mut dropped = Vec::new();
    drop(outbox.next(pull(), true, &mut dropped));
    let taken = outbox.take_out(Verb::Write, |op| op.id() == 3).unwrap();
    assert!(taken.0.uncut.get() && outbox.bulk_bytes() == bytes - limits::CHUNK_BYTES_MIN as u64);
    drop(taken);
    assert_eq!(outbox.close().iter().map(Operation::id).collect::<Vec<_>>(), [2]);
    assert!(!copies[0].0.uncut.get() && dropped.is_empty());
    assert_eq!(copies.map(|op| op.0.tokens.get()), [1, 1]);
    assert!(outbox.post(write(4, 1)).is_err());
}

fn bytes_of(pieces: &[Piece]) -> Vec<(u64, u64)> {
    pieces.iter().flat_map(|p| (0..p.len).map(move |i| (p.local + i, p.remote + i))).collect()
}

fn any_pieces() -> impl Strategy<Value = Vec<Piece>> {
    prop::collection::vec((0u64..500, 0u64..500, 0u64..40), 0..12)
        .prop_map(|list| list.into_iter().map(|(local, remote, len)| Piece { local, remote, len }).collect())
}

proptest! {
    #[test]
    fn chunks_cover_each_byte_once_and_in_order(
        pieces in any_pieces(), sizes in prop::collection::vec((1u64..64, 1usize..5), 1..20)
    ) {
        let merged = merge(pieces.clone());
        prop_assert_eq!(bytes_of(&merged), bytes_of(&pieces));
        let mut cutter = Cutter::default();
        let mut seen = Vec::new();
        let mut position = 0;
        for turn in 0.. {
            let (bytes, segments) = sizes[turn % sizes.len()];
            let Some(chunk) = cutter.next(&merged, ChunkLimits { bytes, segments }) else { break };
            prop_assert!(u64::from(chunk.bytes) <= bytes && chunk.bytes > 0);
            prop_assert_eq!(chunk.position, position);
            position += u64::from(chunk.bytes);
            let locals: Vec<u64> = chunk.locals(&merged).flat_map(|(o, l)| o..o + l).collect();
            let places = chunk.placements(&merged);
            prop_assert!(places.len() <= segments);
            let remotes: Vec<u64> =
                places.iter().flat_map(|p| p.offset..p.offset + u64::from(p.len)).collect();
            prop_assert_eq!(locals.len(), chunk.bytes as usize);
            if let Some(single) = chunk.single(&merged) {
                prop_assert_eq!(single, remotes[0]);
                prop_assert_eq!(places.len(), 1);
            }
            seen.extend(locals.into_iter().zip(remotes));
        }
        prop_assert_eq!(seen, bytes_of(&merged));
    }

    #[test]
    fn a_chunk_is_within_bounds(rest: u64, channels in 0usize..300, max in 1usize..limits::CHUNK_BYTES_MAX) {
        let bytes = chunk_bytes(rest / 2, channels, limits::CHUNK_BYTES_MIN, max);
        prop_assert!(bytes >= 1 && bytes <= max as u64);
    }

    #[test]
    fn chunks_do_not_grow_towards_the_end(rest in 0u64..1 << 40, less in 0u64..1 << 40, channels in 1usize..64) {
        let (small, large) = (rest.min(less), rest.max(less));
        let bytes = |rest| chunk_bytes(rest, channels, limits::CHUNK_BYTES_MIN, 1 << 20);
        prop_assert!(bytes(small) <= bytes(large));
    }
}
