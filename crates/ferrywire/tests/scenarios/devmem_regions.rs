//! Memory that its user takes back while devmem TCP moves it, in the VM of `tests/devmem-vm`.
//!
//! The rule: bytes written to memory after its user had it back are never sent, and never overwritten by the engine.
//! Read next: `devmem.rs`, whose ends these are.

use crate::devmem::Ends;
use crate::nics::Knob;
use crate::vm::{Hosts, LIMIT};
use crate::world::{Raw, contents};
use ferrywire::{Error, Peer, RegisterError, TransferError};
use ferrywire_memory::sim::SimGpu;
use ferrywire_memory::unpack::UnpackMode;
use std::thread;
use std::time::{Duration, Instant};

/// Contents of memory before and after its user has reused it.
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
    peer.stats().channels[0].lane.as_ref().map_or(0, |lane| lane.max_outstanding_receives)
}

fn holds_reused(bytes: &[u8]) -> usize {
    bytes.iter().filter(|byte| **byte == REUSED).count()
}

/// The peer's GPU is stalled: a window of messages waits for it, and as many are begun. Half of them are of host memory, and
/// half of memory of a GPU, which the NIC reads.
#[test]
fn nothing_is_sent_of_dropped_memory_to_a_slow_peer() {
    const WINDOW: u64 = 16;
    const WRITE_BYTES: u64 = 64 << 10;
    const BYTES: usize = (2 * WINDOW * WRITE_BYTES) as usize;
    let Some(hosts) = Hosts::here() else { return };
    let gpu = SimGpu::open(1).unwrap();
    let gpus = [Some(0), Some(1)];
    let builder = |index: usize| {
        let devmem = hosts.devmem(gpus[index]).window(WINDOW as usize);
        // The small socket buffer keeps most of the data at the sender.
        hosts.plain(index).channels(1).socket_buffer_bytes(64 << 10).payload_backend(devmem)
    };
    let ends = Ends::build(&hosts, gpus, builder);
    let target = ends.region(1, &vec![0; 2 * BYTES]);
    let sources = [None, Some(0)].map(|gpu| {
        let mut memory = Raw::new(gpu, BYTES);
        memory.bytes().fill(SENT);
        // SAFETY: it stays until the end.
        let region = unsafe { ends.ends[0].register_raw(memory.base(), BYTES) }.unwrap();
        (memory, region)
    });
    gpu.set_stall(true);
    let mut writes = Vec::new();
    for offset in (0..2 * WINDOW).map(|number| number * WRITE_BYTES) {
        for ((_, region), to) in sources.iter().zip([0, BYTES as u64]) {
            let (remote, to) = (target.descriptor(), to + offset);
            writes.push((ends.near.write(region, offset, &remote, to, WRITE_BYTES).unwrap(), to));
        }
    }
    until("a window of messages", || receives_posted(&ends.far) == WINDOW);
    // Until the engine has given up waiting for them.
    let memories = thread::scope(|scope| {
        let dropping = sources.map(|(mut memory, region)| {
            scope.spawn(move || {
                drop(region);
                memory.bytes().fill(REUSED);
                memory
            })
        });
        dropping.map(|dropping| dropping.join().unwrap())
    });
    gpu.set_stall(false);
    let outcomes: Vec<_> = writes.iter().map(|(write, to)| (write.wait(LIMIT), *to as usize)).collect();
    // Others go on, behind all that was still on its way.
    ends.exchange(BYTES);
    let found = contents(&target);
    assert_eq!(holds_reused(&found), 0, "bytes were sent that were written after the drop");
    for (outcome, to) in &outcomes {
        match outcome {
            // The write had left before the drop.
            Ok(_) => assert!(found[*to..][..WRITE_BYTES as usize].iter().all(|byte| *byte == SENT)),
            Err(error) => assert!(error.to_string().contains("before the transfer had ended"), "{error}"),
        }
    }
    assert!(outcomes.iter().any(|(outcome, _)| outcome.is_err()), "nothing was under way");
    drop(memories);
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
    let ends = Ends::build(&hosts, gpus, |index| {
        hosts.plain(index).channels(1).payload_backend(hosts.devmem(gpus[index]))
    });
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
    assert!(matches!(closed, Err(Error::Stalled { .. })), "{closed:?}");
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

/// Arrived data wait for the GPU, which gathers them from the pool or copies them from memory that both reach.
#[test]
fn nothing_is_placed_into_memory_of_a_gpu_whose_region_is_taken_back() {
    /// Short writes into each region, and bytes of each: all of such a message arrives at once.
    const WRITES: u64 = 8;
    const WRITE_BYTES: u64 = 32 << 10;
    const BYTES: usize = (WRITES * WRITE_BYTES) as usize;
    let Some(hosts) = Hosts::here() else { return };
    let gpu = SimGpu::open(1).unwrap();
    for mode in [UnpackMode::Kernel, UnpackMode::Host] {
        let gpus = [None, Some(1)];
        let builder = |index: usize| {
            hosts.plain(index).channels(1).payload_backend(hosts.devmem(gpus[index]).unpack(mode))
        };
        let ends = Ends::build(&hosts, gpus, builder);
        let source = ends.region(0, &vec![SENT; BYTES]);
        ends.exchange(BYTES);
        let targets = [false, true].map(|deregisters| {
            let mut memory = Raw::new(Some(1), BYTES);
            // SAFETY: it stays until the end.
            let region = unsafe { ends.ends[1].register_raw(memory.base(), BYTES) }.unwrap();
            (memory, region, deregisters)
        });
        let received = || ends.far.stats().channels[0].received_bytes;
        let before = received();
        gpu.set_stall(true);
        let mut writes = Vec::new();
        for offset in (0..WRITES).map(|number| number * WRITE_BYTES) {
            for (_, region, _) in &targets {
                let remote = region.descriptor();
                writes.push(ends.near.write(&source, offset, &remote, offset, WRITE_BYTES).unwrap());
            }
        }
        until("some of both to wait for the GPU", || received() >= before + 4 * WRITE_BYTES);
        let taken = thread::scope(|scope| {
            let taking = targets.map(|(mut memory, region, deregisters)| {
                scope.spawn(move || {
                    if deregisters {
                        let again = region.clone();
                        let error = region.deregister().unwrap_err();
                        let RegisterError::ResourceBusy { by, .. } = &error else { panic!("{error}") };
                        assert!(by.contains("simulated GPU 1"), "{error}");
                        return (memory, Some(again));
                    }
                    drop(region);
                    memory.bytes().fill(REUSED);
                    (memory, None)
                })
            });
            taking.map(|taking| taking.join().unwrap())
        });
        gpu.set_stall(false);
        let memories = taken.map(|(mut memory, busy)| {
            if let Some(region) = busy {
                region.deregister().unwrap();
                memory.bytes().fill(REUSED);
            }
            memory
        });
        for write in writes {
            let error = write.wait(LIMIT).unwrap_err();
            assert!(matches!(error, TransferError::AccessRefused { .. }), "{error}");
        }
        // The GPU goes on, behind all that it was given before.
        ends.exchange(BYTES);
        for mut memory in memories {
            let placed = BYTES - holds_reused(memory.bytes());
            assert_eq!(placed, 0, "bytes were placed after the region was taken back, by {mode:?}");
        }
    }
}

/// All of it has arrived and waits for the GPU when its receive is cancelled.
#[test]
fn a_message_that_waits_for_a_gpu_whose_receive_is_cancelled_is_refused_to_its_sender() {
    /// Short, so that it arrives at once; from a GPU it is announced all the same.
    const BYTES: usize = 32 << 10;
    let Some(hosts) = Hosts::here() else { return };
    let gpu = SimGpu::open(1).unwrap();
    let gpus = [Some(0), Some(1)];
    let ends = Ends::build(&hosts, gpus, |index| {
        hosts.plain(index).channels(1).payload_backend(hosts.devmem(gpus[index]))
    });
    let source = ends.region(0, &vec![SENT; BYTES]);
    let target = ends.region(1, &vec![0; BYTES]);
    ends.exchange(BYTES);
    let received = || ends.far.stats().channels[0].received_bytes;
    let before = received();
    gpu.set_stall(true);
    let receive = ends.far.recv(1, &target, 0, BYTES as u64).unwrap();
    let send = ends.near.send(1, &source, 0, BYTES as u64).unwrap();
    until("the message to wait for the GPU", || received() >= before + BYTES as u64);
    thread::scope(|scope| {
        // Cancelling waits for the GPU.
        let cancelling = scope.spawn(|| receive.cancel());
        thread::sleep(Duration::from_millis(50));
        gpu.set_stall(false);
        cancelling.join().unwrap();
    });
    assert_eq!(receive.wait(LIMIT), Err(TransferError::Cancelled));
    let sent = send.wait(LIMIT);
    assert!(matches!(sent, Err(TransferError::AccessRefused { .. })), "{sent:?}");
    assert_eq!(
        [&ends.near, &ends.far].map(|peer| peer.stats().lost_channels),
        [vec![], vec![]] as [Vec<String>; 2]
    );
}
