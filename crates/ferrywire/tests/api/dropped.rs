//! Memory that its user drops while operations use it: nothing of it is sent afterwards, however the socket sends.

use crate::held_up::connected;
use crate::netns::Hosts;
use crate::{LIMIT, builder};
use ferrywire::Endpoint;
use ferrywire_net::tcp::{TcpTransport, ZeroCopyPolicy};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The kernel sent bytes that were written later, and the write reported success.
#[test]
fn nothing_is_sent_without_a_copy_of_memory_that_its_user_has_dropped() {
    const BYTES: usize = 512 << 10;
    let Some(hosts) = Hosts::new() else { return };
    let builder = || Endpoint::builder().secret("correct horse").channels(1);
    let near = hosts.on(0, || builder().threads(1).build()).unwrap();
    // Driven by this test alone: its kernel takes what its buffers have room for, and the rest stays with the sender's.
    let far = builder().threads(0).socket_buffer_bytes(64 << 10).listen(Hosts::listen());
    let far = hosts.on(1, || far.build()).unwrap();
    let connecting = hosts.on(0, || near.start_connect(Hosts::listen())).unwrap();
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
    let target = far.alloc_host(BYTES).unwrap();
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

/// Packets of a lost connection stayed in the queue of a NIC, which read the memory when it sent them, and a peer that had
/// not heard of the loss placed them.
#[test]
fn a_region_is_dropped_only_once_no_nic_holds_packets_of_a_lost_connection() {
    drop_with_packets_in_a_queue(false);
}

/// A dropped peer finishes its write even if the connection is lost while the drop waits.
#[test]
fn a_region_is_dropped_only_once_no_nic_holds_packets_of_a_connection_that_is_lost_meanwhile() {
    drop_with_packets_in_a_queue(true);
}

fn drop_with_packets_in_a_queue(lost_meanwhile: bool) {
    const BYTES: usize = 512 << 10;
    let Some(hosts) = Hosts::new() else { return };
    let tcp = || Arc::new(TcpTransport::default().zero_copy(ZeroCopyPolicy::Always));
    let builder = || Endpoint::builder().transport(tcp()).secret("correct horse").channels(1).threads(1);
    let near = hosts.on(0, || builder().build()).unwrap();
    let far = hosts.on(1, || builder().listen(Hosts::listen()).build()).unwrap();
    let peer = hosts.on(0, || near.connect(Hosts::listen(), LIMIT)).unwrap();
    let target = far.alloc_host(BYTES).unwrap();
    let mut memory = vec![5_u8; BYTES];
    // SAFETY: it stays until the end.
    let region = unsafe { near.register_raw(memory.as_mut_ptr(), memory.len()) }.unwrap();
    // As much as the connection may have under way comes into the queue at once then.
    let warm = near.register(vec![1; BYTES]).unwrap();
    for _ in 0..100 {
        peer.write(&warm, 0, &target.descriptor(), 0, BYTES as u64).unwrap().wait(LIMIT).unwrap();
    }
    let sent_before = peer.stats().channels[0].sent_bytes;
    // A NIC whose queue empties in two seconds. Who drops a region waits longer for it.
    let slow = "qdisc add dev fw0 root tbf rate 1600kbit burst 70kb limit 4mb";
    if !hosts.on(0, || run("tc", slow)) {
        return println!("SKIPPED: needs tc and a kernel with tbf");
    }
    let write = peer.write(&region, 0, &target.descriptor(), 0, BYTES as u64).unwrap();
    let begun = Instant::now();
    while peer.stats().channels[0].sent_bytes - sent_before < BYTES as u64 {
        assert!(begun.elapsed() < LIMIT);
        std::thread::yield_now();
    }
    let mut region = Some(region);
    let dropping = lost_meanwhile.then(|| {
        let region = region.take();
        std::thread::spawn(move || drop(region))
    });
    if lost_meanwhile {
        // The drop has begun, and cannot end before the write.
        std::thread::sleep(Duration::from_millis(200));
    }
    // The write ends here, and the peer hears of it behind what is in the queue.
    let closed = peer.close(Duration::ZERO);
    let outcome = write.wait(LIMIT);
    drop(region);
    dropping.into_iter().for_each(|dropping| dropping.join().unwrap());
    memory.fill(0xEE);
    println!("closed {closed:?}, the write {outcome:?}, dropped after {:?}", begun.elapsed());
    // Connections queued earlier have arrived once a later one has.
    let again = hosts.on(0, || near.connect(Hosts::listen(), LIMIT)).unwrap();
    let source = near.register(vec![7; 4096]).unwrap();
    let other = far.alloc_host(4096).unwrap();
    again.write(&source, 0, &other.descriptor(), 0, 4096).unwrap().wait(LIMIT).unwrap();
    let mut found = vec![0; BYTES];
    target.read_at(0, &mut found).unwrap();
    let wrong = found.iter().filter(|byte| **byte == 0xEE).count();
    assert_eq!(wrong, 0, "bytes that were written to the memory after the drop were sent");
    drop(memory);
}

fn run(program: &str, arguments: &str) -> bool {
    let ended = std::process::Command::new(program).args(arguments.split(' ')).output();
    ended.is_ok_and(|ended| ended.status.success())
}

/// Short messages and writes wait in the sender's queue behind a peer that receives nothing.
#[test]
fn nothing_short_is_sent_of_memory_that_its_user_has_dropped() {
    const SHORT: u64 = 4096;
    const BYTES: u64 = 60 << 10;
    let end = || builder().threads(0).channels(1).socket_buffer_bytes(64 << 10);
    let near = end().listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
    let far = end().build().unwrap();
    let (here, there) = connected(&near, &far);
    let target = far.alloc_host(4 * BYTES as usize).unwrap();
    let descriptor = target.descriptor();
    let kept = near.register(vec![7; BYTES as usize]).unwrap();
    let mut memory = vec![5_u8; SHORT as usize];
    // SAFETY: it stays until the end.
    let region = unsafe { near.register_raw(memory.as_mut_ptr(), memory.len()) }.unwrap();
    // More than there is room for on the way.
    let before: Vec<_> = (0..30).map(|_| here.write(&kept, 0, &descriptor, 0, BYTES).unwrap()).collect();
    let write = here.write(&region, 0, &descriptor, BYTES, SHORT).unwrap();
    let sends: Vec<_> = (0..4).map(|_| here.send(1, &region, 0, SHORT).unwrap()).collect();
    let last = here.send(1, &kept, 0, SHORT).unwrap();
    near.progress();
    // Until the engine has given up waiting for them.
    drop(region);
    memory.fill(0xEE);
    let received = there.recv(1, &target, 2 * BYTES, SHORT).unwrap();
    let begun = Instant::now();
    let ended = || {
        let mut ours = before.iter().chain(&sends).chain([&write, &last]);
        received.poll().is_some() && ours.all(|transfer| transfer.poll().is_some())
    };
    while !ended() {
        assert!(begun.elapsed() < LIMIT, "{received:?}, {write:?}, {sends:?}, {last:?}");
        near.progress();
        far.progress();
    }
    assert!(before.iter().all(|write| write.poll() == Some(Ok(BYTES))));
    assert!(sends.iter().chain([&write]).all(|transfer| transfer.poll().unwrap().is_err()));
    // The messages that were withdrawn had their turn, and the one behind them is received.
    assert_eq!((last.poll(), received.poll()), (Some(Ok(SHORT)), Some(Ok(SHORT))));
    let mut found = vec![0; 4 * BYTES as usize];
    target.read_at(0, &mut found).unwrap();
    assert!(!found.contains(&0xEE) && !found.contains(&5), "dropped memory was sent");
    assert!(found[2 * BYTES as usize..][..SHORT as usize] == [7; SHORT as usize]);
    assert_eq!((here.stats().lost_channels, there.stats().lost_channels), (vec![], vec![]));
    drop(memory);
}
