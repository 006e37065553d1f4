//! Waiting for whichever of several transfers ends first.

use crate::{LIMIT, pair};
use ferrywire::{Block, BlockList, Transfer, TransferError};
use std::cell::Cell;
use std::thread;
use std::time::Duration;

const SHORT: Duration = Duration::from_millis(50);

#[test]
fn the_one_that_has_ended_is_named_wherever_it_stands() {
    let pair = pair();
    let target = pair.ends[1].alloc_host(4096).unwrap();
    let source = pair.ends[0].register(vec![7u8; 4096]).unwrap();
    // Each waits for a message of its own, which come in another order.
    let mut waiting: Vec<(u64, Transfer)> =
        (0..8).map(|tag| (tag, pair.far.recv(tag, &target, tag * 512, 512).unwrap())).collect();
    for tag in [5, 0, 7, 2, 6, 1, 4, 3] {
        assert!(matches!(
            Transfer::wait_any(waiting.iter().map(|(_, one)| one), SHORT),
            Err(TransferError::Stalled { .. })
        ));
        thread::scope(|scope| {
            scope.spawn(|| pair.near.send(tag, &source, 0, 512).unwrap().wait(LIMIT).unwrap());
            let at = Transfer::wait_any(waiting.iter().map(|(_, one)| one), LIMIT).unwrap();
            let (ended, transfer) = waiting.remove(at);
            assert_eq!((ended, transfer.poll()), (tag, Some(Ok(512))));
        });
    }
}

#[test]
fn a_number_of_transfers_is_kept_in_flight() {
    let pair = pair();
    const SLOT: u64 = 300_000;
    let source =
        pair.ends[0].register((0..8 * SLOT as usize).map(|k| (k >> 7) as u8).collect::<Vec<_>>()).unwrap();
    let target = pair.ends[1].alloc_host(8 * SLOT as usize).unwrap();
    let remote = target.descriptor();
    let post = |slot: u64| pair.near.write(&source, slot * SLOT, &remote, slot * SLOT, SLOT).unwrap();
    let mut in_flight: Vec<(u64, Transfer)> = (0..8).map(|slot| (slot, post(slot))).collect();
    for _ in 0..500 {
        let at = Transfer::wait_any(in_flight.iter().map(|(_, one)| one), LIMIT).unwrap();
        let (slot, ended) = in_flight.remove(at);
        assert_eq!(ended.poll(), Some(Ok(SLOT)));
        in_flight.push((slot, post(slot)));
    }
    in_flight.iter().for_each(|(_, one)| assert_eq!(one.wait(LIMIT), Ok(SLOT)));
    let (mut sent, mut seen) = (vec![0; 8 * SLOT as usize], vec![1; 8 * SLOT as usize]);
    source.read_at(0, &mut sent).unwrap();
    target.read_at(0, &mut seen).unwrap();
    assert!(seen == sent);
}

#[test]
fn a_transfer_that_fails_has_ended_and_so_have_all_when_the_peer_goes() {
    let pair = pair();
    let target = pair.ends[1].alloc_host(64).unwrap();
    let receives: Vec<Transfer> = (0..3).map(|tag| pair.far.recv(tag, &target, 0, 64).unwrap()).collect();
    receives[1].cancel();
    assert_eq!(Transfer::wait_any(&receives, LIMIT), Ok(1));
    assert_eq!(receives[1].poll(), Some(Err(TransferError::Cancelled)));
    thread::scope(|scope| {
        scope.spawn(|| pair.near.close(LIMIT).unwrap());
        let at = Transfer::wait_any([&receives[0], &receives[2]], LIMIT).unwrap();
        assert!([&receives[0], &receives[2]][at].poll().is_some_and(|outcome| outcome.is_err()));
    });
}

#[test]
fn there_is_a_limit_in_all_and_one_without_progress() {
    let pair = pair();
    let bytes = 1 << 20;
    let source = pair.ends[0].alloc_host(bytes).unwrap();
    let target = pair.ends[1].alloc_host(bytes).unwrap();
    let receive = pair.near.recv(1, &source, 0, 1).unwrap();
    for total in [SHORT, Duration::ZERO] {
        let outcome = Transfer::wait_any_for([&receive], total, LIMIT);
        assert!(
            matches!(&outcome, Err(TransferError::TimedOut { timeout, .. }) if *timeout == total),
            "{outcome:?}"
        );
    }
    let outcome = Transfer::wait_any_for([&receive], LIMIT, SHORT);
    assert!(
        matches!(&outcome, Err(TransferError::Stalled { waited, .. }) if *waited == SHORT),
        "{outcome:?}"
    );
    // One megabyte many times, minutes of work: constant progress must not extend the total timeout.
    let blocks = vec![Block { local_offset: 0, remote_offset: 0, bytes: bytes as u64 }; 1 << 20];
    let list = BlockList::new(&source, &target.descriptor(), &blocks).unwrap();
    let both = [receive, pair.near.write_blocks(&list, None, None).unwrap()];
    while both[1].bytes_moved() == 0 {
        assert_eq!(both[1].poll(), None);
    }
    let outcome = Transfer::wait_any_for(&both, 6 * SHORT, LIMIT);
    assert!(matches!(outcome, Err(TransferError::TimedOut { .. })), "{outcome:?}");
    both[1].cancel();
    assert_eq!(Transfer::wait_any_for(&both, LIMIT, LIMIT), Ok(1));
    assert_eq!(Transfer::wait_any_for(&both, Duration::ZERO, Duration::ZERO), Ok(1));
}

/// Regression: each call compared the peers of all transfers. With 1024 writes of 4 KiB in flight on 16 cores this
/// took 40 % of their time.
#[test]
fn an_ended_transfer_is_found_without_a_look_at_those_behind_it() {
    let pair = pair();
    let target = pair.ends[1].alloc_host(64).unwrap();
    let receives: Vec<Transfer> = (0..100).map(|tag| pair.far.recv(tag, &target, 0, 64).unwrap()).collect();
    receives[3].cancel();
    assert_eq!(receives[3].wait(LIMIT), Err(TransferError::Cancelled));
    let looks = Cell::new(0);
    let counted = receives.iter().inspect(|_| looks.set(looks.get() + 1));
    assert_eq!(Transfer::wait_any(counted, LIMIT), Ok(3));
    assert!((4..10).contains(&looks.get()), "{} looks at 100 transfers", looks.get());
}

#[test]
fn an_empty_list_and_transfers_of_several_peers_are_refused() {
    let (one, other) = (pair(), pair());
    assert!(matches!(Transfer::wait_any([], LIMIT), Err(TransferError::Invalid { .. })));
    let targets = [&one, &other].map(|pair| pair.ends[0].alloc_host(64).unwrap());
    let receives = [(&one, 0), (&other, 1)].map(|(pair, at)| pair.near.recv(1, &targets[at], 0, 64).unwrap());
    assert!(matches!(Transfer::wait_any(&receives, LIMIT), Err(TransferError::Invalid { .. })));
}
