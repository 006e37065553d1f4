//! More at once than a peer takes.

use crate::held_up::connected;
use crate::{LIMIT, pair};
use ferrywire::limits::INBOUND_READS_MAX;
use ferrywire::{Endpoint, Transfer, TransferError};
use std::time::{Duration, Instant};

/// The peer serves so many at once and refused the others, where it takes any number of writes.
#[test]
fn more_reads_than_a_peer_serves_at_once_end_well() {
    const BYTES: usize = 16 << 10;
    let pair = pair();
    let bytes: Vec<u8> = (0..BYTES).map(|at| (at % 251) as u8).collect();
    let source = pair.ends[1].register(bytes.clone()).unwrap();
    let target = pair.ends[0].alloc_host(BYTES).unwrap();
    let read = |_| pair.near.read(&target, 0, &source.descriptor(), 0, BYTES as u64).unwrap();
    let reads: Vec<Transfer> = (0..40_000).map(read).collect();
    for (number, read) in reads.iter().enumerate() {
        assert_eq!(read.wait(LIMIT), Ok(BYTES as u64), "read {number}");
    }
    let mut found = vec![0; BYTES];
    target.read_at(0, &mut found).unwrap();
    assert!(found == bytes);
}

/// Two ends that move only when the test polls them.
fn still() -> [Endpoint; 2] {
    let [near, far] = [(); 2].map(|()| Endpoint::builder().threads(0).channels(1));
    [near.listen("127.0.0.1:0".parse().unwrap()).build().unwrap(), far.build().unwrap()]
}

fn outcomes(ends: &[Endpoint], reads: &[Transfer]) -> Vec<Result<u64, TransferError>> {
    let begun = Instant::now();
    while reads.iter().any(|read| read.poll().is_none()) {
        assert!(begun.elapsed() < LIMIT);
        for _ in 0..100 {
            for end in ends {
                end.progress();
            }
        }
    }
    reads.iter().map(|read| read.poll().unwrap()).collect()
}

/// Reads that were not requested from the peer yet end without it.
#[test]
fn reads_that_are_kept_back_are_cancelled_at_once_and_leave_their_room_to_others() {
    let ends = still();
    let (here, _there) = connected(&ends[0], &ends[1]);
    let (ours, theirs) = (ends[0].alloc_host(8).unwrap(), ends[1].alloc_host(8).unwrap());
    let read = |_| here.read(&ours, 0, &theirs.descriptor(), 0, 8).unwrap();
    let many = INBOUND_READS_MAX;
    // Each round would use up what there is, if it left anything behind.
    for round in 0..3 {
        let reads: Vec<Transfer> = (0..many).map(read).collect();
        for read in &reads[many - 100..] {
            read.cancel();
            assert_eq!(read.poll(), Some(Err(TransferError::Cancelled)), "round {round}");
        }
        reads.iter().step_by(3).for_each(Transfer::cancel);
        for (number, outcome) in outcomes(&ends, &reads).into_iter().enumerate() {
            let cancelled = number % 3 == 0 || number >= many - 100;
            assert!(
                outcome == Ok(8) || (cancelled && outcome == Err(TransferError::Cancelled)),
                "{outcome:?}"
            );
        }
    }
    // Refused ones leave their room too.
    let gone = ends[1].alloc_host(8).unwrap();
    let descriptor = gone.descriptor();
    gone.deregister().unwrap();
    let refused: Vec<_> = (0..many).map(|_| here.read(&ours, 0, &descriptor, 0, 8).unwrap()).collect();
    let refused = outcomes(&ends, &refused);
    assert!(refused.iter().all(|outcome| matches!(outcome, Err(TransferError::AccessRefused { .. }))));
    let reads: Vec<Transfer> = (0..many).map(read).collect();
    assert!(outcomes(&ends, &reads).iter().all(Result::is_ok));
}

#[test]
fn reads_that_are_kept_back_end_with_their_peer() {
    let [near, far] = still();
    let (here, there) = connected(&near, &far);
    let (ours, theirs) = (near.alloc_host(8).unwrap(), far.alloc_host(8).unwrap());
    let reads: Vec<Transfer> =
        (0..INBOUND_READS_MAX).map(|_| here.read(&ours, 0, &theirs.descriptor(), 0, 8).unwrap()).collect();
    let _ = there.close(Duration::ZERO);
    let outcomes = outcomes(&[near, far], &reads);
    assert!(matches!(
        outcomes.last(),
        Some(Err(TransferError::PeerClosed { .. } | TransferError::PeerLost { .. }))
    ));
}
