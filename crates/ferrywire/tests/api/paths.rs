//! Memory that is given back, and operations that are cancelled, while bytes take the paths of short transfers: frames that
//! share a call to the kernel, lists of short blocks on a simulated GPU, and reads.
//!
//! The rule: bytes written to memory after its user had it back are never sent, and never overwritten by the engine.

use crate::outcomes::{contents, pattern};
use crate::{LIMIT, builder};
use ferrywire::{
    Block, BlockList, Endpoint, Peer, Region, RegisterError, RemoteRegion, Transfer, TransferError, limits,
};
use ferrywire_memory::sim::{SimFaults, SimGpu};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::time::{Duration, Instant};

/// The simulated GPU of the lists of short blocks.
const BLOCKS_GPU: u32 = 15;
/// Another simulated GPU, since one whose copies are delayed would delay the test beside it.
const DELAYED_GPU: u32 = 13;
/// Blocks of a list, and bytes of each.
const BLOCKS: usize = 20_000;
const BLOCK_BYTES: usize = 16;
/// Content of memory that its user has back. [`pattern`] never contains this byte.
const REUSED: u8 = 0xEE;

/// Random numbers of a test, from `FERRYWIRE_SEED` where that variable is set.
fn rng() -> StdRng {
    let seed = std::env::var("FERRYWIRE_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(rand::random);
    println!("FERRYWIRE_SEED={seed}");
    StdRng::seed_from_u64(seed)
}

/// Two endpoints with some channels between them; the first one connects.
fn connected(channels: usize) -> ([Endpoint; 2], [Peer; 2]) {
    let far = builder().listen("127.0.0.1:0".parse().unwrap()).channels(channels).build().unwrap();
    let near = builder().channels(channels).build().unwrap();
    let peer = near.connect(far.listen_addresses()[0], LIMIT).unwrap();
    let peers = [peer, far.accept(LIMIT).unwrap()];
    ([near, far], peers)
}

/// Spins until a random moment of a transfer.
fn pause(rng: &mut StdRng, most_us: u64) {
    let pause = Duration::from_micros(rng.random_range(0..=most_us));
    let since = Instant::now();
    while since.elapsed() < pause {
        std::hint::spin_loop();
    }
}

/// The memory that [`short_writes`] gives back while writes are in flight.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Dropped {
    Source,
    Target,
}

/// A short write: whether its source and its target are the raw regions, and its range of both targets.
struct ShortWrite {
    from_raw: bool,
    to_raw: bool,
    source_offset: usize,
    target_offset: usize,
    bytes: usize,
    transfer: Transfer,
}

/// Many short writes over one channel, between kept regions and raw regions, one of which is dropped among them. Paced
/// writes leave the channel time to send some before the drop. Returns how many writes failed.
fn short_writes(rng: &mut StdRng, dropped: Dropped, paced: bool) -> usize {
    const WRITES: usize = 5000;
    const SOURCE_BYTES: usize = 1 << 20;
    let ([near, far], [peer, far_peer]) = connected(1);
    let bytes: Vec<usize> = (0..WRITES).map(|_| rng.random_range(100..=8 << 10)).collect();
    let target_bytes = bytes.iter().sum();
    let expected = pattern(SOURCE_BYTES, 5);
    let (mut raw_source, mut raw_target) = (expected.clone(), vec![0_u8; target_bytes]);
    let kept_source = near.register(expected.clone()).unwrap();
    let kept_target = far.alloc_host(target_bytes).unwrap();
    // SAFETY: the memory stays until the end.
    let mut source = Some(unsafe { near.register_raw(raw_source.as_mut_ptr(), SOURCE_BYTES) }.unwrap());
    // SAFETY: as above.
    let mut target = Some(unsafe { far.register_raw(raw_target.as_mut_ptr(), target_bytes) }.unwrap());
    let descriptors = [kept_target.descriptor(), target.as_ref().unwrap().descriptor()];
    let drop_before = rng.random_range(1..WRITES);
    let (mut writes, mut target_offset) = (Vec::new(), 0);
    for (index, bytes) in bytes.into_iter().enumerate() {
        if index == drop_before && dropped == Dropped::Source {
            source = None;
            raw_source.fill(REUSED);
        } else if index == drop_before {
            target = None;
            raw_target.fill(REUSED);
        }
        if paced && index % 64 == 0 {
            pause(rng, 400);
        }
        let (from_raw, to_raw) = (index % 2 == 1 && source.is_some(), index / 2 % 2 == 1);
        let source_offset = rng.random_range(0..=SOURCE_BYTES - bytes);
        let from = source.as_ref().filter(|_| from_raw).unwrap_or(&kept_source);
        let remote = &descriptors[usize::from(to_raw)];
        let transfer =
            peer.write(from, source_offset as u64, remote, target_offset as u64, bytes as u64).unwrap();
        writes.push(ShortWrite { from_raw, to_raw, source_offset, target_offset, bytes, transfer });
        target_offset += bytes;
    }
    let outcomes: Vec<_> = writes.iter().map(|write| write.transfer.wait(LIMIT)).collect();
    let kept = contents(&kept_target);
    for (write, outcome) in writes.iter().zip(&outcomes) {
        let may_fail = match dropped {
            Dropped::Source => write.from_raw,
            Dropped::Target => write.to_raw,
        };
        assert!(outcome.is_ok() || may_fail, "{dropped:?} dropped before write {drop_before}: {outcome:?}");
        let placed = if write.to_raw { &raw_target } else { &kept };
        let placed = &placed[write.target_offset..][..write.bytes];
        if write.to_raw && dropped == Dropped::Target {
            assert!(placed.iter().all(|byte| *byte == REUSED), "{outcome:?}: bytes placed after the drop");
        } else {
            assert!(!placed.contains(&REUSED), "{outcome:?}: bytes of reused memory were sent");
            let right = placed == &expected[write.source_offset..][..write.bytes];
            assert!(right || outcome.is_err(), "{outcome:?}: wrong bytes at the target");
        }
    }
    if dropped == Dropped::Target {
        let lost = [peer, far_peer].map(|peer| peer.stats().lost_channels);
        assert!(lost.iter().all(Vec::is_empty), "{lost:?}");
    }
    drop((source, target));
    outcomes.iter().filter(|outcome| outcome.is_err()).count()
}

/// Frames of several short writes share a call to the kernel; the writes beside those of the dropped region go on.
#[test]
fn short_writes_beside_a_dropped_region_are_whole_and_its_memory_is_left_alone() {
    let mut rng = rng();
    for round in 0..16 {
        let dropped = if round % 2 == 0 { Dropped::Source } else { Dropped::Target };
        let failed = short_writes(&mut rng, dropped, round % 4 > 1);
        println!("{dropped:?} dropped: {failed} writes failed");
    }
}

/// Blocks that are contiguous at neither end: local block `i * 7919 % BLOCKS` of twice its size goes to remote block `i * 3 %
/// BLOCKS`.
fn scattered(local: &Region, remote: &RemoteRegion) -> BlockList {
    let blocks: Vec<_> = (0..BLOCKS)
        .map(|index| Block {
            local_offset: (index * 7919 % BLOCKS * 2 * BLOCK_BYTES) as u64,
            remote_offset: (index * 3 % BLOCKS * 2 * BLOCK_BYTES) as u64,
            bytes: BLOCK_BYTES as u64,
        })
        .collect();
    BlockList::new(local, remote, &blocks).unwrap()
}

/// Bytes of a region that [`scattered`] names blocks of.
const SPREAD_BYTES: usize = 2 * BLOCKS * BLOCK_BYTES;

/// Overwrites memory of a GPU past its streams, as another device does.
fn reuse(address: u64, bytes: usize) {
    // SAFETY: memory of the test's own allocation, which the test keeps.
    unsafe { SimGpu::dma_view(address, bytes).unwrap().write_bytes(REUSED, bytes) };
}

/// The blocks are gathered by the GPU; a dropped source's blocks that the GPU has not gathered yet are never sent.
#[test]
fn short_blocks_of_a_gpu_are_not_sent_once_their_region_is_dropped() {
    let mut rng = rng();
    let ([near, far], [peer, _far_peer]) = connected(2);
    let gpu = SimGpu::open(BLOCKS_GPU).unwrap();
    let buffer = gpu.alloc(SPREAD_BYTES, 4096).unwrap();
    // Each drop while the GPU stands still takes until the engine gives up waiting: one such round is enough.
    for stalled in (0..20).map(|round| round == 0) {
        gpu.write_from_slice(buffer.address(), &[5; SPREAD_BYTES]).unwrap();
        // SAFETY: the buffer stays until the end.
        let source = unsafe { near.register_raw(buffer.as_ptr(), SPREAD_BYTES) }.unwrap();
        let target = far.alloc_host(SPREAD_BYTES).unwrap();
        let list = scattered(&source, &target.descriptor());
        let staged = || {
            let staging = peer.stats().channels.into_iter().filter_map(|channel| channel.staging);
            staging.map(|staging| staging.sent_bytes).sum::<u64>()
        };
        let before = staged();
        gpu.set_stall(stalled);
        let write = peer.write_blocks(&list, None, None).unwrap();
        drop(list);
        let begun = Instant::now();
        while stalled && staged() == before {
            assert!(begun.elapsed() < LIMIT);
            std::thread::yield_now();
        }
        pause(&mut rng, 8000);
        drop(source);
        reuse(buffer.address(), SPREAD_BYTES);
        gpu.set_stall(false);
        let written = write.wait(LIMIT);
        println!("stalled: {stalled}, written whole: {}", written.is_ok());
        assert!(!stalled || written.is_err(), "{written:?}: the GPU had gathered nothing before the drop");
        let found = contents(&target);
        assert!(!found.contains(&REUSED), "{written:?}: bytes of reused memory were sent");
        let placed = found.iter().filter(|byte| **byte == 5).count();
        assert!(written.is_err() || placed == BLOCKS * BLOCK_BYTES, "{placed} bytes placed");
    }
    // Other writes go on.
    let source = near.alloc_sim(BLOCKS_GPU, SPREAD_BYTES).unwrap();
    source.write_at(0, &[7; SPREAD_BYTES]).unwrap();
    let target = far.alloc_host(SPREAD_BYTES).unwrap();
    let write = peer.write_blocks(&scattered(&source, &target.descriptor()), None, None).unwrap();
    assert_eq!(write.wait(LIMIT), Ok((BLOCKS * BLOCK_BYTES) as u64));
}

/// The GPU scatters the blocks; blocks that it has not scattered yet when the region is deregistered are never placed.
#[test]
fn short_blocks_are_not_placed_into_a_gpu_once_their_region_is_deregistered() {
    let mut rng = rng();
    let ([near, far], [peer, far_peer]) = connected(2);
    let gpu = SimGpu::open(DELAYED_GPU).unwrap();
    let buffer = gpu.alloc(SPREAD_BYTES, 4096).unwrap();
    let source = near.register(vec![5; SPREAD_BYTES]).unwrap();
    let all = Ok((BLOCKS * BLOCK_BYTES) as u64);
    for round in 0..20 {
        gpu.fill(buffer.address(), 0, SPREAD_BYTES).unwrap();
        // Each block is an operation of its own, so the least delay slows a list by a second.
        let copy_delay = Duration::ZERO..=Duration::from_micros(u64::from(round == 0));
        gpu.set_faults(SimFaults { copy_delay, ..SimFaults::default() });
        let begun = Instant::now();
        // SAFETY: the buffer stays until the end.
        let target = unsafe { far.register_raw(buffer.as_ptr(), SPREAD_BYTES) }.unwrap();
        let list = scattered(&source, &target.descriptor());
        let write = peer.write_blocks(&list, None, None).unwrap();
        pause(&mut rng, 20_000);
        // A busy machine may be slower than the engine waits; the region is free once a call returns `Ok`.
        while let Err(error) = target.clone().deregister() {
            assert!(
                matches!(error, RegisterError::ResourceBusy { .. }) && begun.elapsed() < LIMIT,
                "{error}"
            );
        }
        let placed = gpu.read_to_vec(buffer.address(), SPREAD_BYTES).unwrap();
        let placed = placed.iter().filter(|byte| **byte == 5).count();
        reuse(buffer.address(), SPREAD_BYTES);
        let written = write.wait(LIMIT);
        println!("{placed} bytes placed in {:?}, written whole: {}", begun.elapsed(), written.is_ok());
        assert!(written == all || matches!(written, Err(TransferError::AccessRefused { .. })), "{written:?}");
        assert!(written.is_err() || placed == BLOCKS * BLOCK_BYTES, "{placed} bytes placed of a whole write");
        // The GPU reads in order, so after all scattering that is still queued.
        let found = gpu.read_to_vec(buffer.address(), SPREAD_BYTES).unwrap();
        assert!(
            found.iter().all(|byte| *byte == REUSED),
            "{written:?}: bytes placed after the deregistration"
        );
    }
    // Other writes go on, and the last round's memory stays as it is.
    let target = far.alloc_sim(DELAYED_GPU, SPREAD_BYTES).unwrap();
    let list = scattered(&source, &target.descriptor());
    assert_eq!(peer.write_blocks(&list, None, None).unwrap().wait(LIMIT), all);
    let found = gpu.read_to_vec(buffer.address(), SPREAD_BYTES).unwrap();
    assert!(found.iter().all(|byte| *byte == REUSED));
    assert_eq!([peer, far_peer].map(|peer| peer.stats().lost_channels), [const { Vec::<String>::new() }; 2]);
}

/// Each message is received by one receive at most, and the send reports whether a receive had it.
#[test]
fn a_message_of_short_blocks_is_received_once_when_its_receive_is_cancelled() {
    let mut rng = rng();
    let ([near, far], [peer, far_peer]) = connected(2);
    let mut counts = [0; 3];
    for tag in 0..80 {
        // Some messages are short enough to be sent before a receive has met them.
        let blocks = if rng.random_range(0..3) == 0 { BLOCKS / 10 } else { BLOCKS };
        let bytes = (blocks * BLOCK_BYTES) as u64;
        let message = pattern(blocks * BLOCK_BYTES, tag);
        let places: Vec<_> = (0..blocks).map(|index| index * 7919 % blocks * 2 * BLOCK_BYTES).collect();
        let pieces: Vec<_> = places.iter().map(|place| (*place as u64, BLOCK_BYTES as u64)).collect();
        let source = near.register(message.clone()).unwrap();
        let targets = [(); 2].map(|()| far.alloc_sim(DELAYED_GPU, 2 * blocks * BLOCK_BYTES).unwrap());
        let receive_into = |target: &Region| far_peer.recv_blocks(tag, target, &pieces).unwrap();
        let mut receive = rng.random::<bool>().then(|| receive_into(&targets[0]));
        let send = peer.send(tag, &source, 0, bytes).unwrap();
        pause(&mut rng, 1000);
        let receive = receive.take().unwrap_or_else(|| receive_into(&targets[0]));
        pause(&mut rng, 15_000);
        receive.cancel();
        let first = receive.wait(LIMIT);
        // After a receive was cancelled nothing more is placed into its memory.
        if first.is_err() {
            targets[0].write_at(0, &vec![REUSED; 2 * blocks * BLOCK_BYTES]).unwrap();
        }
        // A message that the first receive did not take is the second one's, unless it was refused to its sender.
        let again = receive_into(&targets[1]);
        let sent = send.wait(LIMIT);
        if first.is_ok() || sent.is_err() {
            again.cancel();
        }
        let second = again.wait(LIMIT);
        let takers = usize::from(first.is_ok()) + usize::from(second.is_ok());
        assert_eq!(takers, usize::from(sent.is_ok()), "{blocks} blocks: {sent:?}, {first:?}, {second:?}");
        counts[if first.is_ok() { 0 } else { 1 + usize::from(second.is_err()) }] += 1;
        for (target, outcome) in targets.iter().zip([&first, &second]) {
            let found = contents(target);
            let right = |(index, place): (usize, &usize)| {
                found[*place..][..BLOCK_BYTES] == message[index * BLOCK_BYTES..][..BLOCK_BYTES]
            };
            assert!(outcome.is_err() || places.iter().enumerate().all(right), "{outcome:?}: other bytes");
        }
        let reused = contents(&targets[0]).iter().all(|byte| *byte == REUSED);
        assert!(first.is_ok() || reused, "{first:?}: bytes placed after the cancellation");
    }
    let [first, second, refused] = counts;
    println!("{first} received at first, {second} by the second receive, {refused} refused");
}

/// Reads into slots of one region, some of them cancelled, and the region's contents when all reads had ended.
struct CancelledReads {
    target: Region,
    left: Vec<u8>,
    failed: usize,
}

/// Reads the same bytes into several slots of a region, and cancels all reads but the last at a random moment, or
/// short reads as soon as each is posted. Checks the slots
/// of successful reads, and fills those of the others.
fn cancelled_reads(
    rng: &mut StdRng,
    peer: &Peer,
    source: &Region,
    target: Region,
    slot: usize,
) -> CancelledReads {
    let slots = target.len() as usize / slot;
    let from = rng.random_range(0..=source.len() as usize - slot);
    let descriptor = source.descriptor();
    let mut expected = vec![0; slot];
    source.read_at(from as u64, &mut expected).unwrap();
    let post =
        |index: usize| peer.read(&target, (index * slot) as u64, &descriptor, from as u64, slot as u64);
    let at_once = slot <= 64 && rng.random_range(0..4) > 0;
    let reads: Vec<_> = (0..slots)
        .map(|index| {
            let read = post(index).unwrap();
            if at_once && index + 1 < slots {
                read.cancel();
            }
            read
        })
        .collect();
    if !at_once {
        pause(rng, (100 + slot as u64 / 500).min(slot as u64));
    }
    let (last, cancelled) = reads.split_last().unwrap();
    cancelled.iter().for_each(Transfer::cancel);
    let outcomes: Vec<_> = cancelled.iter().map(|read| read.wait(LIMIT)).collect();
    // The last read has the same channels to itself now; what it waits for must not touch the slots of the others.
    // Adjacent slots are filled in one call, since each call waits for the thread of the simulated GPU.
    let mut offset = 0;
    for adjacent in outcomes.chunk_by(|one, other| one.is_err() == other.is_err()) {
        let bytes = adjacent.len() * slot;
        if adjacent[0].is_err() {
            target.write_at(offset as u64, &vec![REUSED; bytes]).unwrap();
        }
        offset += bytes;
    }
    assert_eq!(last.wait(LIMIT), Ok(slot as u64), "the read behind cancelled ones");
    let left = contents(&target);
    for (index, outcome) in outcomes.iter().chain([&Ok(slot as u64)]).enumerate() {
        let found = &left[index * slot..][..slot];
        match outcome {
            Ok(_) => assert!(found == expected, "a read of {slot} bytes is not complete"),
            Err(TransferError::Cancelled) => {
                assert!(
                    found.iter().all(|byte| *byte == REUSED),
                    "{slot} bytes: placed after the read had ended"
                );
            }
            Err(error) => panic!("{error}"),
        }
    }
    CancelledReads { target, left, failed: outcomes.iter().filter(|outcome| outcome.is_err()).count() }
}

/// Cancels reads into memory that `allocate` makes at an endpoint.
fn cancel_reads_into(allocate: impl Fn(&Endpoint, usize) -> Region) {
    const SHORT: usize = limits::INBOUND_READS_MAX + limits::READS_WAITING_MAX;
    const BATCH: usize = 100;
    let mut rng = rng();
    let ([near, far], [peer, far_peer]) = connected(2);
    let source = far.register(pattern(4 << 20, 3)).unwrap();
    let mut all = Vec::new();
    for _ in 0..40 {
        let slot = rng.random_range(1..=1 << 20);
        all.push(cancelled_reads(&mut rng, &peer, &source, allocate(&near, 2 * slot), slot));
    }
    let failed: usize = all.iter().map(|reads| reads.failed).sum();
    println!("{failed} of {} reads cancelled", all.len());
    // More than the peer answers at once: each cancelled read must give its place back.
    let (mut posted, mut failed) = (0, 0);
    while failed < SHORT {
        let slot = rng.random_range(1..=64);
        let reads = cancelled_reads(&mut rng, &peer, &source, allocate(&near, BATCH * slot), slot);
        (posted, failed) = (posted + BATCH - 1, failed + reads.failed);
        all.push(reads);
        assert!(posted < 10 * SHORT, "only {failed} of {posted} reads were cancelled before their end");
    }
    println!("{failed} of {posted} short reads cancelled");
    let target = allocate(&near, source.len() as usize);
    let read = peer.read(&target, 0, &source.descriptor(), 0, source.len()).unwrap();
    assert_eq!(read.wait(LIMIT), Ok(source.len()));
    assert!(contents(&target) == contents(&source), "the read after all cancelled ones is not complete");
    for reads in &all {
        assert!(contents(&reads.target) == reads.left, "a read changed memory after it had ended");
    }
    assert_eq!([peer, far_peer].map(|peer| peer.stats().lost_channels), [const { Vec::<String>::new() }; 2]);
}

#[test]
fn cancelled_reads_of_the_host_are_complete_or_leave_the_memory_alone() {
    cancel_reads_into(|end, bytes| end.alloc_host(bytes).unwrap());
}

#[test]
fn cancelled_reads_of_a_gpu_are_complete_or_leave_the_memory_alone() {
    cancel_reads_into(|end, bytes| end.alloc_sim(DELAYED_GPU, bytes).unwrap());
}
