//! Memory that its user drops while operations use it: nothing of it is sent afterwards, however the socket sends.

use crate::LIMIT;
use crate::netns::Hosts;
use ferrywire::Endpoint;
use std::time::Instant;

/// The kernel sent what was there later, and the write was told that all was well.
#[test]
fn nothing_is_sent_without_a_copy_of_memory_that_its_user_has_dropped() {
    const BYTES: usize = 512 << 10;
    let Some(hosts) = Hosts::new() else { return };
    let builder = || Endpoint::builder().secret("correct horse").channels(1);
    let near = hosts.on(0, || builder().threads(1).build()).unwrap();
    // Driven by this test alone: its kernel takes what its buffers have room for, and the rest stays with the sender's.
    let far = builder().threads(0).socket_buffer_bytes(64 << 10).listen(Hosts::listen());
    let far = hosts.on(1, || far.build()).unwrap();
    let connecting = hosts.on(0, || near.connecting(Hosts::listen())).unwrap();
    let begun = Instant::now();
    let drive = || {
        assert!(begun.elapsed() < LIMIT);
        far.progress();
    };
    let peer = loop {
        drive();
        if let Some(peer) = connecting.poll() {
            break peer.unwrap();
        }
    };
    let target = far.register_zeroed(BYTES).unwrap();
    let mut memory = vec![5_u8; BYTES];
    // SAFETY: it stays until the end.
    let region = unsafe { near.register_raw(memory.as_mut_ptr(), memory.len()) }.unwrap();
    let write = peer.write(&region, 0, &target.descriptor(), 0, BYTES as u64).unwrap();
    while peer.stats().channels[0].sent_bytes < BYTES as u64 {
        assert!(begun.elapsed() < LIMIT);
        std::thread::yield_now();
    }
    // Until the engine has given up waiting for the write.
    drop(region);
    memory.fill(0xEE);
    while write.poll().is_none() {
        drive();
    }
    assert!(write.poll().unwrap().is_err(), "not all of it had been received when it was dropped");
    // Other writes go on.
    let source = near.register(vec![7; 4096]).unwrap();
    let other = peer.write(&source, 0, &target.descriptor(), BYTES as u64 - 4096, 4096).unwrap();
    while other.poll().is_none() {
        drive();
    }
    assert_eq!(other.poll(), Some(Ok(4096)));
    let mut found = vec![0; BYTES];
    target.read_at(0, &mut found).unwrap();
    assert!(!found.contains(&0xEE), "what was written to the memory after the drop was sent");
    drop(memory);
}
