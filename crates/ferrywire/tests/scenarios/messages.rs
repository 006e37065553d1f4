//! Tagged messages and standalone notifications: order, credit, truncation, withdrawal.

use crate::world::{World, assert_same, contents, pattern};
use ferrywire::{Block, BlockList, Region, Transfer, TransferError};
use rand::Rng;

/// Posts a receive into fresh memory.
fn receive(world: &mut impl World, peer: &ferrywire::Peer, tag: u64, bytes: usize) -> (Transfer, Region) {
    let target = world.zeroed(1, bytes);
    (peer.recv(tag, &target, 0, bytes as u64).unwrap(), target)
}

pub fn messages_of_every_size(world: &mut impl World) {
    let (peer, far) = world.pair();
    let eager = 64 << 10;
    for (salt, bytes) in [0, 1, 777, eager - 1, eager, eager + 1, world.bytes_max()].into_iter().enumerate() {
        let (salt, tag) = (salt as u64, salt as u64 % 3);
        let source = world.patterned(0, bytes, salt);
        let expected = world.below(2) == 0;
        let early = expected.then(|| receive(world, &far, tag, bytes + 10));
        let sent = peer.send(tag, &source, 0, bytes as u64).unwrap();
        if !expected {
            world.linger();
        }
        let (received, target) = early.unwrap_or_else(|| receive(world, &far, tag, bytes + 10));
        assert_eq!(world.outcome(&received), Ok(bytes as u64));
        assert_eq!(world.outcome(&sent), Ok(bytes as u64));
        let mut whole = pattern(bytes, salt);
        whole.extend([0; 10]);
        assert_same(&contents(&target), &whole, "a message");
    }
}

pub fn messages_scatter_and_gather(world: &mut impl World) {
    let (peer, far) = world.pair();
    for blocks in [3u64, 600] {
        let bytes = (blocks * 200) as usize;
        let source = world.patterned(0, bytes, blocks);
        let target = world.zeroed(1, bytes);
        // Gathered backwards, scattered every other block first.
        let from: Vec<(u64, u64)> = (0..blocks).rev().map(|block| (block * 200, 150)).collect();
        let to: Vec<(u64, u64)> = (0..blocks)
            .step_by(2)
            .chain((1..blocks).step_by(2))
            .map(|block| (block * 200 + 50, 150))
            .collect();
        let received = far.recv_blocks(9, &target, &to).unwrap();
        let sent = peer.send_blocks(9, &source, &from).unwrap();
        world.all_done(&[received, sent]);
        let (whole, mut expected) = (pattern(bytes, blocks), vec![0; bytes]);
        for ((from, len), (to, _)) in from.iter().zip(&to) {
            let (from, to, len) = (*from as usize, *to as usize, *len as usize);
            expected[to..to + len].copy_from_slice(&whole[from..from + len]);
        }
        assert_same(&contents(&target), &expected, "a scattered message");
    }
}

pub fn messages_of_a_tag_keep_their_order(world: &mut impl World) {
    const TAGS: u64 = 3;
    let (peer, far) = world.pair();
    let room = 150_000;
    let mut sent = Vec::new();
    let mut received: Vec<Vec<(Transfer, Region)>> = (0..TAGS).map(|_| Vec::new()).collect();
    let mut posted: Vec<Vec<(usize, u64)>> = (0..TAGS).map(|_| Vec::new()).collect();
    for salt in 0..40u64 {
        let tag = world.below(TAGS as usize) as u64;
        let bytes = [0, 5, 3000, 65_536, 65_537, room][world.below(6)];
        let source = world.patterned(0, bytes, salt);
        sent.push(peer.send(tag, &source, 0, bytes as u64).unwrap());
        posted[tag as usize].push((bytes, salt));
        if world.below(2) == 0 {
            let list = &mut received[tag as usize];
            list.push(receive(world, &far, tag, room));
        }
    }
    for tag in 0..TAGS as usize {
        while received[tag].len() < posted[tag].len() {
            received[tag].push(receive(world, &far, tag as u64, room));
        }
    }
    world.all_done(&sent);
    for (tag, list) in posted.iter().enumerate() {
        for ((bytes, salt), (transfer, target)) in list.iter().zip(&received[tag]) {
            assert_eq!(world.outcome(transfer), Ok(*bytes as u64), "tag {tag}");
            assert_same(&contents(target)[..*bytes], &pattern(*bytes, *salt), "a message in its turn");
        }
    }
    for (tag, list) in received.iter().enumerate() {
        for (transfer, _) in &list[posted[tag].len()..] {
            transfer.cancel();
            assert_eq!(world.outcome(transfer), Err(TransferError::Cancelled));
        }
    }
}

/// Unexpected messages past the eager credit are held at the sender; empty ones are no exception.
pub fn more_than_the_eager_credit(world: &mut impl World) {
    let (peer, far) = world.pair();
    // 63 large ones, and one that leaves no credit at all for those behind it.
    let mut sizes = vec![65_536; 63];
    sizes.extend([57_344, 0, 1, 0, 65_536, 70_000, 0]);
    let source = world.patterned(0, 70_000, 5);
    let sent: Vec<Transfer> =
        sizes.iter().map(|bytes| peer.send(1, &source, 0, *bytes as u64).unwrap()).collect();
    world.linger();
    let target = world.zeroed(1, 70_000);
    for bytes in &sizes {
        let received = far.recv(1, &target, 0, 70_000).unwrap();
        assert_eq!(world.outcome(&received), Ok(*bytes as u64));
        assert_same(&contents(&target)[..*bytes], &pattern(70_000, 5)[..*bytes], "a message");
    }
    world.all_done(&sent);
    assert_eq!(far.poll_notification(), Ok(None), "nothing was notified");
}

pub fn messages_too_long_for_their_receive(world: &mut impl World) {
    let (peer, far) = world.pair();
    for bytes in [100, 200_000] {
        let source = world.patterned(0, bytes, 1);
        let sent = peer.send(4, &source, 0, bytes as u64).unwrap();
        let (received, target) = receive(world, &far, 4, bytes - 1);
        let truncated =
            TransferError::Truncated { tag: 4, message_bytes: bytes as u64, buffer_bytes: bytes as u64 - 1 };
        assert_eq!(world.outcome(&received), Err(truncated));
        assert_same(&contents(&target), &vec![0; bytes - 1], "a refused message's target");
        // An eager message had left before its withdrawal.
        let eager = bytes == 100 && world.sends_eagerly(0);
        match world.outcome(&sent) {
            Ok(moved) => assert!(eager && moved == 100, "{moved} bytes"),
            Err(error) => {
                assert!(!eager && matches!(error, TransferError::AccessRefused { .. }), "{error}");
                let words = format!("longer than the receive that it matched: receive into {bytes} bytes");
                assert!(error.to_string().contains(&words), "{error}");
            }
        }
        // The next message is not affected.
        let sent = peer.send(4, &source, 0, 50).unwrap();
        let (received, _target) = receive(world, &far, 4, 50);
        world.all_done(&[sent, received]);
    }
}

/// A message that is withdrawn before it was received: the receive that was posted for it waits
/// for the next one.
pub fn withdrawn_sends_reach_no_receive(world: &mut impl World) {
    let (peer, far) = world.pair();
    let source = world.patterned(0, 200_000, 1);
    let sent = peer.send(4, &source, 0, 200_000).unwrap();
    if world.below(2) == 0 {
        world.linger();
    }
    sent.cancel();
    assert_eq!(world.outcome(&sent), Err(TransferError::Cancelled));
    source.write_at(0, &[0; 200_000]).unwrap();
    let next = world.patterned(0, 300, 2);
    let second = peer.send(4, &next, 0, 300).unwrap();
    let (received, target) = receive(world, &far, 4, 200_000);
    assert_eq!(world.outcome(&received), Ok(300));
    assert_same(&contents(&target)[..300], &pattern(300, 2), "the message behind a withdrawn one");
    world.all_done(&[second]);
}

/// A send that is cancelled once its receive has taken it on: both sides end.
pub fn send_cancelled_in_mid_transfer_ends_the_receive(world: &mut impl World) {
    let (peer, far) = world.pair();
    let bytes = world.bytes_max();
    let source = world.patterned(0, bytes, 1);
    let (received, target) = receive(world, &far, 4, bytes);
    let sent = peer.send(4, &source, 0, bytes as u64).unwrap();
    let moved = world.below(2) * bytes / 3;
    world.until("the message to be under way", || {
        (received.bytes_moved() >= moved as u64 || received.poll().is_some()).then_some(())
    });
    let begun = received.bytes_moved() > 0;
    sent.cancel();
    match world.outcome(&sent) {
        Ok(all) => {
            assert_eq!(all, bytes as u64);
            assert_eq!(world.outcome(&received), Ok(all));
            assert_same(&contents(&target), &pattern(bytes, 1), "a message whose cancellation came too late");
        }
        Err(error) => {
            assert_eq!(error, TransferError::Cancelled);
            // If it was not under way yet, the receive is for the next message.
            let next = peer.send(4, &source, 0, 10).unwrap();
            match world.outcome(&received) {
                Ok(bytes) => assert!(bytes == 10 && !begun, "{bytes}"),
                Err(error) => {
                    assert!(matches!(error, TransferError::AccessRefused { .. }), "{error}");
                    let (received, _target) = receive(world, &far, 4, 10);
                    world.all_done(&[received]);
                }
            }
            world.all_done(&[next]);
        }
    }
    untouched_from_now_on(world, &target);
}

/// Nothing may change a memory any more.
fn untouched_from_now_on(world: &mut impl World, target: &Region) {
    let poison = vec![0xEE; target.len() as usize];
    target.write_at(0, &poison).unwrap();
    world.linger();
    assert_same(&contents(target), &poison, "memory of an operation that has ended");
}

pub fn cancelled_receives_leave_their_memory_alone(world: &mut impl World) {
    let (peer, far) = world.pair();
    // Not met yet.
    let (received, target) = receive(world, &far, 4, 500);
    received.cancel();
    assert_eq!(world.outcome(&received), Err(TransferError::Cancelled));
    let source = world.patterned(0, world.bytes_max(), 1);
    let sent = peer.send(4, &source, 0, 500).unwrap();
    untouched_from_now_on(world, &target);
    let (received, _target) = receive(world, &far, 4, 500);
    world.all_done(&[received, sent]);

    // Being filled, and the last time nearly full.
    let bytes = world.bytes_max() / 3;
    let some = [1, world.below(bytes / 4), world.below(bytes), bytes - 1];
    for enough in some.map(|bytes| bytes.max(1) as u64) {
        let (received, target) = receive(world, &far, 4, bytes);
        let sent = peer.send(4, &source, 0, bytes as u64).unwrap();
        world.until("some bytes", || {
            (received.bytes_moved() >= enough || received.poll().is_some()).then_some(())
        });
        received.cancel();
        let outcome = world.outcome(&received);
        match &outcome {
            Ok(moved) => {
                assert_eq!(*moved, bytes as u64);
                let expected = &pattern(bytes, 1);
                assert_same(&contents(&target), expected, "a message that was received after all");
            }
            Err(error) => assert_eq!(*error, TransferError::Cancelled),
        }
        untouched_from_now_on(world, &target);
        match (world.outcome(&sent), outcome.is_ok()) {
            (Ok(moved), true) => assert_eq!(moved, bytes as u64),
            (Err(TransferError::AccessRefused { .. }), false) => {}
            (sent, _) => panic!("of {enough} bytes: {sent:?} at the sender, and {outcome:?} at the receiver"),
        }
    }
}

pub fn cancelled_reads_leave_their_memory_alone(world: &mut impl World) {
    let (peer, _far) = world.pair();
    let bytes = world.bytes_max();
    let source = world.patterned(1, bytes, 1);
    for later in [false, true] {
        let target = world.zeroed(0, bytes);
        let read = peer.read(&target, 0, &source.descriptor(), 0, bytes as u64).unwrap();
        if later {
            world.until("some bytes", || (read.bytes_moved() > 0).then_some(()));
        }
        read.cancel();
        match world.outcome(&read) {
            Ok(moved) => assert_eq!(moved, bytes as u64),
            Err(error) => assert_eq!(error, TransferError::Cancelled),
        }
        untouched_from_now_on(world, &target);
    }
    let target = world.zeroed(0, bytes);
    let read = peer.read(&target, 0, &source.descriptor(), 0, bytes as u64).unwrap();
    world.all_done(&[read]);
    assert_same(&contents(&target), &pattern(bytes, 1), "a read after cancelled ones");
}

pub fn cancelled_writes_change_nothing_later(world: &mut impl World) {
    let (peer, far) = world.pair();
    let bytes = world.bytes_max();
    let mut cancelled = 0;
    for _ in 0..3 {
        let source = world.patterned(0, bytes, 1);
        let target = world.zeroed(1, bytes);
        let write = peer.write_notify(&source, 0, &target.descriptor(), 0, bytes as u64, b"x").unwrap();
        let enough = world.below(bytes) as u64;
        world.until("some bytes", || {
            (write.bytes_moved() >= enough / 4 || write.poll().is_some()).then_some(())
        });
        write.cancel();
        match world.outcome(&write) {
            Ok(moved) => {
                assert_eq!(moved, bytes as u64);
                assert_eq!(world.notification(&far), Ok(b"x".to_vec()));
            }
            Err(error) => {
                assert_eq!(error, TransferError::Cancelled);
                cancelled += 1;
            }
        }
        untouched_from_now_on(world, &target);
    }
    assert_eq!(far.poll_notification(), Ok(None), "{cancelled} cancelled writes do not notify");
    let notify = peer.notify(b"after").unwrap();
    assert_eq!(world.notification(&far), Ok(b"after".to_vec()));
    world.all_done(&[notify]);
}

/// A cancelled operation over several pairs of regions ends in all of them.
pub fn cancelled_joined_lists_end_in_every_part(world: &mut impl World) {
    let (peer, far) = world.pair();
    let bytes = world.bytes_max() / 3;
    for round in 0..4 {
        let here = [1, 2, 3].map(|salt| world.patterned(0, bytes, salt));
        let there = [4, 5, 6].map(|salt| world.patterned(1, bytes, salt));
        let lists = [0, 1, 2].map(|index| {
            let block = Block { local_offset: 0, remote_offset: 0, bytes: bytes as u64 };
            BlockList::new(&here[index], &there[index].descriptor(), &[block]).unwrap()
        });
        let list = BlockList::join(&lists.each_ref()).unwrap();
        let write = round % 2 == 0;
        let transfer = match write {
            true => peer.write_blocks(&list, None, Some(b"x")).unwrap(),
            false => peer.read_blocks(&list, None).unwrap(),
        };
        let enough = world.below(3 * bytes) as u64;
        world.until("some bytes", || {
            (transfer.bytes_moved() >= enough / 4 || transfer.poll().is_some()).then_some(())
        });
        transfer.cancel();
        match world.outcome(&transfer) {
            Ok(moved) => {
                assert_eq!(moved, 3 * bytes as u64);
                if write {
                    assert_eq!(world.notification(&far), Ok(b"x".to_vec()));
                }
            }
            Err(error) => assert_eq!(error, TransferError::Cancelled),
        }
        for target in if write { &there } else { &here } {
            untouched_from_now_on(world, target);
        }
    }
    assert_eq!(far.poll_notification(), Ok(None), "cancelled writes do not notify");
    let notify = peer.notify(b"after").unwrap();
    assert_eq!(world.notification(&far), Ok(b"after".to_vec()));
    world.all_done(&[notify]);
}

/// A notification comes after all that was posted before it, whichever channels carried what.
pub fn notifications_keep_their_place(world: &mut impl World) {
    let (peer, far) = world.pair();
    let bytes = world.bytes_max() / 3;
    let mut transfers = Vec::new();
    let mut targets = Vec::new();
    for round in 0..5u64 {
        let len = world.rng().random_range(0..bytes);
        let source = world.patterned(0, len, round);
        let target = world.zeroed(1, len);
        transfers.push(peer.write(&source, 0, &target.descriptor(), 0, len as u64).unwrap());
        for half in 0..2 {
            transfers.push(peer.notify(format!("{round}.{half}").as_bytes()).unwrap());
        }
        targets.push((target, len, round));
    }
    for (target, len, round) in &targets {
        for half in 0..2 {
            assert_eq!(world.notification(&far), Ok(format!("{round}.{half}").into_bytes()));
            assert_same(&contents(target), &pattern(*len, *round), "when told of it");
        }
    }
    world.all_done(&transfers);
}

/// The engine's answer to a peer's read was counted as posted before the notification, and never off.
pub fn notification_after_serving_a_read(world: &mut impl World) {
    let (peer, far) = world.pair();
    for bytes in [10, world.bytes_max()] {
        let source = world.patterned(1, bytes, 3);
        let target = world.zeroed(0, bytes);
        let read = peer.read(&target, 0, &source.descriptor(), 0, bytes as u64).unwrap();
        world.all_done(&[read]);
        let notify = far.notify(b"served").unwrap();
        assert_eq!(world.notification(&peer), Ok(b"served".to_vec()));
        world.all_done(&[notify]);
    }
}

/// No caller waits at the far end, so an answer must wake the worker that sends it.
pub fn answers_of_an_idle_end(world: &mut impl World) {
    let (peer, far) = world.pair();
    let source = world.patterned(1, 64, 3);
    let target = world.zeroed(0, 64);
    for round in 0..100 {
        let read = peer.read(&target, 0, &source.descriptor(), 0, 64).unwrap();
        world.all_done(&[read]);
        if round % 10 == 0 {
            // All threads fall asleep.
            world.linger();
        }
        let after = [far.notify(b"before").unwrap(), far.notify(b"after").unwrap()];
        for reported in [&b"before"[..], b"after"] {
            assert_eq!(world.notification(&peer), Ok(reported.to_vec()));
        }
        world.all_done(&after);
    }
}

pub fn many_notifications_keep_their_order(world: &mut impl World) {
    let (peer, far) = world.pair();
    let reported: Vec<Transfer> = (0..200u32).map(|n| peer.notify(&n.to_le_bytes()).unwrap()).collect();
    for n in 0..200u32 {
        assert_eq!(world.notification(&far), Ok(n.to_le_bytes().to_vec()));
    }
    world.all_done(&reported);
}
