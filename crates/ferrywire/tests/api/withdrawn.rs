//! Messages that are withdrawn before they are received.

use crate::LIMIT;
use crate::held_up::connected;
use ferrywire::limits::{ANNOUNCED_SENDS_MAX, EAGER_BYTES_MAX};
use ferrywire::{Endpoint, Peer, Region, Transfer, TransferError};
use std::time::Instant;

/// Two ends that move only when the test polls them, a little at a time.
struct Still {
    ends: [Endpoint; 2],
    here: Peer,
    there: Peer,
}

fn still() -> Still {
    let end =
        || Endpoint::builder().threads(0).channels(1).chunk_bytes(64 << 10).socket_buffer_bytes(64 << 10);
    let ends = [end().listen("127.0.0.1:0".parse().unwrap()).build().unwrap(), end().build().unwrap()];
    let (here, there) = connected(&ends[0], &ends[1]);
    Still { ends, here, there }
}

impl Still {
    fn until(&self, mut so: impl FnMut() -> bool) {
        let begun = Instant::now();
        while !so() {
            assert!(begun.elapsed() < LIMIT);
            self.turn();
        }
    }

    fn turn(&self) {
        for end in &self.ends {
            end.progress();
        }
    }

    fn outcome(&self, transfer: &Transfer) -> Result<u64, TransferError> {
        self.until(|| transfer.poll().is_some());
        transfer.poll().unwrap()
    }

    fn memory(&self, bytes: usize) -> [Region; 2] {
        [self.ends[0].register(vec![7; bytes]).unwrap(), self.ends[1].alloc_host(bytes).unwrap()]
    }
}

/// Regression: the receive ended before a byte of its message was sent.
#[test]
fn a_receive_whose_message_is_cancelled_behind_another_is_for_the_next_one() {
    const BYTES: usize = 16 << 20;
    let still = still();
    let [source, first] = still.memory(BYTES);
    let second = still.ends[1].alloc_host(BYTES).unwrap();
    let before = still.there.recv(1, &first, 0, BYTES as u64).unwrap();
    let behind = still.there.recv(2, &second, 0, BYTES as u64).unwrap();
    let sent = still.here.send(1, &source, 0, BYTES as u64).unwrap();
    let cancelled = still.here.send(2, &source, 0, BYTES as u64).unwrap();
    still.until(|| before.bytes_moved() > 0);
    cancelled.cancel();
    assert_eq!(still.outcome(&cancelled), Err(TransferError::Cancelled));
    let next = still.here.send(2, &source, 0, 1000).unwrap();
    assert_eq!(still.outcome(&behind), Ok(1000));
    for (transfer, bytes) in [(&next, 1000), (&sent, BYTES), (&before, BYTES)] {
        assert_eq!(still.outcome(transfer), Ok(bytes as u64));
    }
    let mut found = vec![0; BYTES];
    second.read_at(0, &mut found).unwrap();
    assert!(found[..1000] == [7; 1000] && found[1000..].iter().all(|byte| *byte == 0));
}

/// They were held for ever, until no large message was taken any more.
#[test]
fn sends_that_are_cancelled_before_anybody_receives_them_are_not_held_against_others() {
    const BYTES: usize = EAGER_BYTES_MAX + 1;
    const BATCH: usize = 8192;
    let still = still();
    let [source, target] = still.memory(BYTES);
    for _ in 0..ANNOUNCED_SENDS_MAX / BATCH + 1 {
        let sent: Vec<_> =
            (0..BATCH).map(|_| still.here.send(1, &source, 0, BYTES as u64).unwrap()).collect();
        // Until they are announced.
        (0..200).for_each(|_| still.turn());
        sent.iter().for_each(Transfer::cancel);
        (0..200).for_each(|_| still.turn());
        assert!(sent.iter().all(|sent| sent.poll() == Some(Err(TransferError::Cancelled))));
    }
    let sent = still.here.send(1, &source, 0, BYTES as u64).unwrap();
    let received = still.there.recv(1, &target, 0, BYTES as u64).unwrap();
    assert_eq!(still.outcome(&received), Ok(BYTES as u64));
    assert_eq!(still.outcome(&sent), Ok(BYTES as u64));
}
