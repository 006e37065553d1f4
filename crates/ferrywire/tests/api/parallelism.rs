//! How many channels carry a load: more of it keeps more of them busy.

use crate::{LIMIT, builder};
use ferrywire::Transfer;
use std::collections::VecDeque;

/// Every channel used to take some of the messages. Their threads then took the cores from each other: on 32
/// cores, 16 channels moved messages of 64 KiB at a third of the rate of 8.
#[test]
fn a_few_small_messages_keep_few_channels_busy() {
    const CHANNELS: usize = 8;
    const BYTES: usize = 64 << 10;
    // A channel that has room, of at least 128 KiB, takes what those after it would.
    const DEPTH: usize = 12;
    let builder = || builder().channels(CHANNELS).threads(CHANNELS);
    let far = builder().listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
    let near = builder().build().unwrap();
    let peer = near.connect(far.listen_addresses()[0], LIMIT).unwrap();
    let sent = || peer.stats().channels.iter().map(|channel| channel.sent_bytes).collect::<Vec<u64>>();
    // A channel that its worker has not taken over yet leaves its share to the next.
    const BULK: usize = 32 << 20;
    let (source, target) = (near.alloc_host(BULK).unwrap(), far.alloc_host(BULK).unwrap());
    for _ in 0..1000 {
        if sent().iter().all(|bytes| *bytes > BYTES as u64) {
            break;
        }
        let bulk = peer.write(&source, 0, &target.descriptor(), 0, BULK as u64).unwrap();
        assert_eq!(bulk.wait(LIMIT), Ok(BULK as u64));
    }
    let before = sent();
    assert!(before.len() == CHANNELS && before.iter().all(|bytes| *bytes > BYTES as u64), "{before:?}");
    let mut writes: VecDeque<Transfer> = VecDeque::new();
    for _ in 0..2000 {
        if writes.len() == DEPTH {
            assert_eq!(writes.pop_front().unwrap().wait(LIMIT), Ok(BYTES as u64));
        }
        writes.push_back(peer.write(&source, 0, &target.descriptor(), 0, BYTES as u64).unwrap());
    }
    writes.iter().for_each(|write| assert_eq!(write.wait(LIMIT), Ok(BYTES as u64)));
    let after = sent();
    // Acknowledgements only.
    assert!(after[CHANNELS - 1] - before[CHANNELS - 1] < BYTES as u64, "before {before:?}, after {after:?}");
    assert!(after.iter().sum::<u64>() - before.iter().sum::<u64>() > 2000 * BYTES as u64);
}
