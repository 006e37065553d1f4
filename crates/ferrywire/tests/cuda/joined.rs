//! Short copies between a GPU and pinned memory that wait for earlier ones are made together.

use crate::{gpu, is_alone, of_stand_in};
use ferrywire::{Endpoint, Peer};
use std::ffi::{c_int, c_void};
use std::time::Duration;

const LONG: Duration = Duration::from_secs(60);
const WRITES: u64 = 256;
const BYTES: u64 = 4096;

/// Driver calls of all channels for copies so far.
fn driver_calls(peer: &Peer) -> u64 {
    let channels = peer.stats().channels;
    channels.iter().filter_map(|channel| channel.staging.as_ref()).map(|staging| staging.driver_calls).sum()
}

/// Each short write from a GPU used to cost three driver calls: it checked its memory, copied, and marked the end of
/// the copy for itself.
#[test]
fn short_writes_that_wait_for_a_copy_share_their_driver_calls() {
    if gpu().is_none() || !is_alone("joined::short_writes_that_wait_for_a_copy_share_their_driver_calls") {
        return;
    }
    let Some(hold) = of_stand_in(c"stand_in_hold_copies") else {
        return println!("SKIPPED: needs a stand-in for the driver");
    };
    // SAFETY: the function of this name has this type.
    let hold = unsafe { std::mem::transmute::<*mut c_void, extern "C" fn(c_int)>(hold) };
    let builder = || Endpoint::builder().channels(1);
    let far = builder().listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
    // Without threads of its own, the caller that posts starts each copy.
    let near = builder().threads(0).build().unwrap();
    let peer = near.connect(far.listen_addresses()[0], LONG).unwrap();
    let source = near.alloc_cuda(0, (2 * WRITES * BYTES) as usize).unwrap();
    let target = far.alloc_host((WRITES * BYTES) as usize).unwrap();
    let remote = target.descriptor();
    // Not adjacent, so that each is a run of its own.
    let write = |at: u64| peer.write(&source, 2 * at * BYTES, &remote, at * BYTES, BYTES).unwrap();
    for at in 0..WRITES {
        source.write_at(2 * at * BYTES, &[at as u8; BYTES as usize]).unwrap();
    }
    // The first transfer makes what the channel needs.
    assert_eq!(write(0).wait(LONG), Ok(BYTES));
    let before = driver_calls(&peer);
    hold(1);
    let writes: Vec<_> = (0..WRITES).map(write).collect();
    hold(0);
    for write in writes {
        assert_eq!(write.wait(LONG), Ok(BYTES));
    }
    let calls = driver_calls(&peer) - before;
    assert!(calls < 2 * WRITES, "{calls} driver calls for {WRITES} writes");
    let mut found = vec![0; (WRITES * BYTES) as usize];
    target.read_at(0, &mut found).unwrap();
    assert!(
        found.chunks(BYTES as usize).zip(0..).all(|(block, at)| block.iter().all(|byte| *byte == at as u8))
    );
}
