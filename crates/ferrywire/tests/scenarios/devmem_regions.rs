//! Memory that its user takes back while devmem TCP moves it, in the VM of `tests/devmem-vm`.
//!
//! The rule: bytes written to memory after its user had it back are never sent, and never overwritten by the engine.
//! Read next: `devmem.rs`, whose ends these are.

use crate::devmem::Ends;
use crate::nics::Knob;
use crate::vm::{Hosts, LIMIT};
use crate::world::{Raw, contents};
use ferrywire::{Error, Peer};
use std::thread;
use std::time::{Duration, Instant};

/// What memory holds before its user has it back, and afterwards.
const SENT: u8 = 5;
const REUSED: u8 = 0xEE;

fn until(what: &str, mut poll: impl FnMut() -> bool) {
    let since = Instant::now();
    while !poll() {
        assert!(since.elapsed() < LIMIT, "waited {LIMIT:?} for {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// The most receives that the lane of a peer's first channel has had posted at once.
fn receives_posted(peer: &Peer) -> u64 {
    peer.stats().channels[0].lane.as_ref().map_or(0, |lane| lane.receives_posted_most)
}

fn holds_reused(bytes: &[u8]) -> usize {
    bytes.iter().filter(|byte| **byte == REUSED).count()
}

/// A NIC still had packets of a connection that was over, and read their payload when it sent them. Their receiver had not
/// heard that it was over.
#[test]
fn a_region_is_dropped_only_once_no_nic_holds_packets_of_it() {
    const BYTES: usize = 1 << 20;
    /// Queues of lanes, the queue of everything else, and both.
    const HELD: [&str; 3] = ["14", "1", "15"];
    let [lanes, others, all] = HELD;
    let Some(hosts) = Hosts::here() else { return };
    let gpus = [Some(0), None];
    let ends =
        Ends::build(&hosts, gpus, |index| hosts.plain(index).channels(1).devmem(hosts.devmem(gpus[index])));
    let mut memory = Raw::new(Some(0), BYTES);
    memory.bytes().fill(SENT);
    // SAFETY: it stays until the end.
    let region = unsafe { ends.ends[0].register_raw(memory.base(), BYTES) }.unwrap();
    let target = ends.region(1, &vec![0; BYTES]);
    let held = Knob::set("hold", lanes);
    let write = ends.near.write(&region, 0, &target.descriptor(), 0, BYTES as u64).unwrap();
    until("messages that the NIC has", || {
        ends.counted().device_sent_bytes > 0 && receives_posted(&ends.far) > 0
    });
    held.turn(all);
    let closed = ends.near.close(Duration::from_millis(100));
    assert!(matches!(closed, Err(Error::Deadline { .. })), "{closed:?}");
    assert!(write.wait(LIMIT).is_err());
    thread::scope(|scope| {
        scope.spawn(|| {
            // The region is dropped meanwhile, unless that waits for the NIC.
            thread::sleep(Duration::from_millis(50));
            held.turn(others);
        });
        drop(region);
        memory.bytes().fill(REUSED);
    });
    until("the end of the lane", || !ends.far.stats().lost_channels.is_empty() || ends.far.error().is_some());
    drop(held);
    until("the end of the session", || ends.far.error().is_some());
    let found = contents(&target);
    assert_eq!(holds_reused(&found), 0, "bytes were sent that were written after the drop");
    assert!(found.contains(&SENT), "nothing was under way");
    drop(memory);
}
