//! Memory of GPUs, staged: any mix of places, copies that take long or fail, and memory that goes away.
//!
//! Each scenario has GPUs of its own, so that a failed GPU does not affect other scenarios.

use crate::load::Load;
use crate::world::{World, assert_same, contents, on_gpu, pattern};
use ferrywire::{Block, BlockList, MemoryLocation, Peer, Region, RemoteRegion, Transfer, TransferError};
use ferrywire_memory::sim::{SimFaults, SimGpu};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

const BYTES: usize = 100_000;

/// GPUs of one scenario, which runs once at a time.
struct Own {
    gpus: Vec<Arc<SimGpu>>,
    _alone: MutexGuard<'static, ()>,
}

impl Own {
    fn open(alone: &'static Mutex<()>, numbers: &[u32]) -> Own {
        let alone = alone.lock().unwrap_or_else(PoisonError::into_inner);
        let gpus: Vec<_> = numbers.iter().map(|number| SimGpu::open(*number).unwrap()).collect();
        gpus.iter().for_each(|gpu| gpu.set_faults(slow()));
        Own { gpus, _alone: alone }
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        self.gpus.iter().for_each(|gpu| gpu.set_faults(SimFaults::default()));
    }
}

/// Copies that take their time.
fn slow() -> SimFaults {
    SimFaults { copy_delay: Duration::ZERO..=Duration::from_micros(100), ..SimFaults::default() }
}

/// Waits until a ring of this peer is full; within a host less than a ring is under way at a time, and then until
/// most of one is taken.
fn until_full(world: &mut impl World, peer: &Peer) {
    let enough = if peer.stats().transport == "sim" { u64::MAX } else { 1 << 20 };
    let full = || {
        let mut staged = peer.stats().channels.into_iter().filter_map(|each| each.staging);
        staged.any(|each| each.ring_full_events > 0 || each.received_bytes >= enough)
    };
    world.until("a full ring", || full().then_some(()));
}

/// Two ends with chunks that are worth a slot.
fn pair(world: &mut impl World) -> (Peer, Peer) {
    let ends = [0, 1].map(|_| world.add(1, |builder| builder.channels(2).chunk_bytes(256 << 10).crc(true)));
    world.connect(ends[0], ends[1])
}

/// Checks that a pair still works, with memory of the host and of a GPU.
fn still_works(world: &mut impl World, near: &Peer, gpu: u32) {
    for (here, there) in [(None, None), (Some(gpu), None), (None, Some(gpu)), (Some(gpu), Some(gpu))] {
        let register = |end: usize, gpu: Option<u32>, bytes: &[u8]| match gpu {
            Some(gpu) => on_gpu(&world.end(end), gpu, bytes),
            None => world.end(end).register(bytes).unwrap(),
        };
        let source = register(0, here, &pattern(BYTES, 9));
        let target = register(1, there, &[0; BYTES]);
        let write = near.write(&source, 0, &target.descriptor(), 0, BYTES as u64).unwrap();
        world.all_done(&[write]);
        assert_same(&contents(&target), &pattern(BYTES, 9), "a write after failed ones");
    }
}

/// Several GPUs and the host at both ends, everything at once over few channels.
pub fn many_places_at_once(world: &mut impl World) {
    static ALONE: Mutex<()> = Mutex::new(());
    let _own = Own::open(&ALONE, &[2, 3, 4]);
    let (near, far) = world.pair();
    let places = [None, Some(2), Some(3), Some(4)];
    let mut all: Vec<(Transfer, Region, Region, u64)> = Vec::new();
    for round in 0..24u64 {
        let (mine, theirs, peer, other) = [(0, 1, &near, &far), (1, 0, &far, &near)][world.below(2)];
        let bytes = [1, 700, 65_536, 200_001][world.below(4)];
        let (from, to) = (places[world.below(4)], places[world.below(4)]);
        let register = |end: usize, gpu: Option<u32>, bytes: &[u8]| match gpu {
            Some(gpu) => on_gpu(&world.end(end), gpu, bytes),
            None => world.end(end).register(bytes).unwrap(),
        };
        let (what, salt) = (round % 3, 100 + round);
        let (source_end, target_end) = if what == 1 { (theirs, mine) } else { (mine, theirs) };
        let source = register(source_end, from, &pattern(bytes, salt));
        let target = register(target_end, to, &vec![0; bytes]);
        let transfer = match what {
            0 => peer.write(&source, 0, &target.descriptor(), 0, bytes as u64),
            1 => peer.read(&target, 0, &source.descriptor(), 0, bytes as u64),
            _ => {
                let received = other.recv(salt, &target, 0, bytes as u64).unwrap();
                let sent = peer.send(salt, &source, 0, bytes as u64).unwrap();
                all.push((sent, source.clone(), target.clone(), salt));
                Ok(received)
            }
        };
        all.push((transfer.unwrap(), source, target, salt));
    }
    for (transfer, _source, target, salt) in &all {
        world.all_done(std::slice::from_ref(transfer));
        if !format!("{transfer:?}").contains("send") {
            let expected = pattern(target.len() as usize, *salt);
            assert_same(&contents(target), &expected, &format!("{transfer:?}"));
        }
    }
    let mut load = Load::default();
    load.post(world, [(0, &near), (1, &far)], 1, BYTES);
    load.finish_well(world, [(0, &near), (1, &far)]);
}

/// Where memory is, is for its owner to know.
pub fn descriptors_that_name_another_place(world: &mut impl World) {
    static ALONE: Mutex<()> = Mutex::new(());
    let _own = Own::open(&ALONE, &[5]);
    let (near, _far) = world.pair();
    let (host, gpu) =
        (world.end(0).register(pattern(BYTES, 1)).unwrap(), on_gpu(&world.end(1), 5, &[0; BYTES]));
    let mut descriptor = gpu.descriptor().to_bytes();
    let location = descriptor.len() - 3;
    descriptor[location..].fill(0);
    let wrong = RemoteRegion::from_bytes(&descriptor).unwrap();
    assert_eq!((gpu.location(), wrong.location()), (MemoryLocation::SimGpu(5), MemoryLocation::Host));
    let blocks = [(0, 10), (50, 20), (99, 30_000)];
    let blocks = blocks.map(|(offset, bytes)| Block { local_offset: offset, remote_offset: offset, bytes });
    let list = BlockList::new(&host, &wrong, &blocks).unwrap();
    let write = near.write_blocks(&list, None, None).unwrap();
    world.all_done(&[write]);
    let mut expected = vec![0; BYTES];
    for Block { local_offset, bytes, .. } in blocks {
        let range = local_offset as usize..(local_offset + bytes) as usize;
        expected[range.clone()].copy_from_slice(&pattern(BYTES, 1)[range]);
    }
    assert_same(&contents(&gpu), &expected, "blocks written to a GPU");
}

/// A stalled GPU: no data are lost, nothing counts as placed, and the rest follows when the GPU continues.
pub fn full_rings_wait_for_the_gpu(world: &mut impl World) {
    static ALONE: Mutex<()> = Mutex::new(());
    let own = Own::open(&ALONE, &[6]);
    let (near, far) = pair(world);
    let bytes = 12 << 20;
    let source = world.end(0).register(pattern(bytes, 1)).unwrap();
    let target = world.end(1).alloc_sim(6, bytes).unwrap();
    own.gpus[0].set_stall(true);
    let write = near.write_notify(&source, 0, &target.descriptor(), 0, bytes as u64, b"all").unwrap();
    until_full(world, &far);
    assert_eq!((write.bytes_moved(), write.poll()), (0, None), "nothing is in the GPU's memory yet");
    own.gpus[0].set_stall(false);
    assert_eq!(world.outcome(&write), Ok(bytes as u64));
    assert_eq!(world.notification(&far), Ok(b"all".to_vec()));
    assert_same(&contents(&target), &pattern(bytes, 1), "a write through full rings");
    // The other way round: what cannot be copied out is not sent.
    own.gpus[0].set_stall(true);
    let back = far.write(&target, 0, &source.descriptor(), 0, bytes as u64).unwrap();
    world.linger();
    assert_eq!((back.bytes_moved(), back.poll()), (0, None));
    own.gpus[0].set_stall(false);
    world.all_done(&[back]);
    let staged: Vec<_> = far.stats().channels.into_iter().filter_map(|each| each.staging).collect();
    assert!(staged.iter().any(|each| each.sent_bytes > 0 && each.received_bytes > 0), "{staged:?}");
    assert!(staged.iter().all(|each| each.pinned_bytes <= 8 << 20), "{staged:?}");
}

/// The notification has no bytes of its own, and with one channel no chunk is left to carry it.
pub fn a_notification_behind_all_that_is_staged_goes_too(world: &mut impl World) {
    static ALONE: Mutex<()> = Mutex::new(());
    let _own = Own::open(&ALONE, &[10]);
    let ends = [0, 1].map(|_| world.add(1, |builder| builder.channels(1)));
    let (near, far) = world.connect(ends[0], ends[1]);
    let bytes = 1 << 20;
    for (from, to) in [(None, Some(10)), (Some(10), None), (Some(10), Some(10)), (Some(10), None)] {
        let register = |end: usize, gpu: Option<u32>, bytes: &[u8]| match gpu {
            Some(gpu) => on_gpu(&world.end(end), gpu, bytes),
            None => world.end(end).register(bytes).unwrap(),
        };
        let source = register(0, from, &pattern(bytes, 1));
        let targets = [0, 1].map(|_| register(1, to, &vec![0; bytes]));
        let (first, len) = (targets[0].descriptor(), bytes as u64);
        let whole = near.write_notify(&source, 0, &first, 0, len, b"whole").unwrap();
        assert_eq!((world.outcome(&whole), world.notification(&far)), (Ok(len), Ok(b"whole".to_vec())));
        let block = [Block { local_offset: 0, remote_offset: 0, bytes: len }];
        let lists = targets.each_ref().map(|to| BlockList::new(&source, &to.descriptor(), &block).unwrap());
        let joined = BlockList::join(&lists.each_ref()).unwrap();
        let parts = near.write_blocks(&joined, None, Some(b"parts")).unwrap();
        assert_eq!((world.outcome(&parts), world.notification(&far)), (Ok(2 * len), Ok(b"parts".to_vec())));
        assert_same(&contents(&targets[1]), &pattern(bytes, 1), "a joined list before its notification");
    }
}

/// Each operation whose bytes cannot be had ends with the GPU's error, and nothing else does.
pub fn copies_that_fail_to_be_sent(world: &mut impl World) {
    static ALONE: Mutex<()> = Mutex::new(());
    let own = Own::open(&ALONE, &[7]);
    let (near, far) = pair(world);
    let bytes = 1 << 20;
    let source = on_gpu(&world.end(0), 7, &pattern(bytes, 1));
    for round in 0..6u64 {
        let target = world.end(1).register(vec![0; bytes]).unwrap();
        own.gpus[0].set_faults(SimFaults { fail_after: Some(round), ..slow() });
        let write = near.write_notify(&source, 0, &target.descriptor(), 0, bytes as u64, b"never").unwrap();
        let small = near.write(&source, 0, &target.descriptor(), 0, 100).unwrap();
        let read = far.read(&target, 0, &source.descriptor(), 0, bytes as u64).unwrap();
        let (received, sent) =
            (far.recv(1, &target, 0, bytes as u64).unwrap(), near.send(1, &source, 0, bytes as u64).unwrap());
        let eager = near.send(2, &source, 0, 5000).unwrap();
        for transfer in [&write, &small, &sent, &eager] {
            match world.outcome(transfer) {
                Err(TransferError::SimGpu(_)) => {}
                Ok(_) => assert!(round > 0, "{transfer:?} went well"),
                Err(error) => panic!("{transfer:?}: {error}"),
            }
        }
        for transfer in [read, received] {
            let outcome = world.outcome(&transfer);
            let reported = matches!(&outcome, Err(TransferError::AccessRefused { why, .. }) if why.contains("the peer ended the transfer"));
            assert!(reported || (outcome.is_ok() && round > 0), "{transfer:?}: {outcome:?}");
        }
        own.gpus[0].set_faults(slow());
        still_works(world, &near, 7);
        // A message that was taken back has had its turn: the next one is received instead.
        let next = near.send(2, &source, 7, 600).unwrap();
        let location = far.recv(2, &target, 0, 5000).unwrap();
        let first = world.outcome(&location).unwrap();
        if first == 5000 {
            let location = far.recv(2, &target, 0, 5000).unwrap();
            assert_eq!(world.outcome(&location), Ok(600));
        }
        assert_eq!((first == 5000, world.outcome(&next)), (eager.poll() == Some(Ok(5000)), Ok(600)));
        assert_same(&contents(&target)[..600], &pattern(bytes, 1)[7..607], "a message behind one taken back");
        let reported = std::iter::from_fn(|| far.poll_notification().unwrap()).count();
        assert!(reported == usize::from(matches!(write.poll(), Some(Ok(_)))), "{reported} notifications");
    }
    assert!(near.stats().lost_channels.is_empty() && far.stats().lost_channels.is_empty());
}

/// A copy that fails is refused to the peer; a local operation ends with the GPU's error.
pub fn copies_that_fail_to_land(world: &mut impl World) {
    static ALONE: Mutex<()> = Mutex::new(());
    let own = Own::open(&ALONE, &[8]);
    let (near, far) = pair(world);
    let bytes = 1 << 20;
    let source = world.end(0).register(pattern(bytes, 1)).unwrap();
    let target = world.end(1).alloc_sim(8, bytes).unwrap();
    for round in 0..6u64 {
        own.gpus[0].set_faults(SimFaults { fail_after: Some(round), ..slow() });
        let write = near.write_notify(&source, 0, &target.descriptor(), 0, bytes as u64, b"never").unwrap();
        let read = far.read(&target, 0, &source.descriptor(), 0, bytes as u64).unwrap();
        let outcome = world.outcome(&write);
        let refused = matches!(&outcome, Err(TransferError::AccessRefused { why, .. }) if why.contains("copy to GPU memory failed"));
        assert!(refused || (outcome.is_ok() && round > 3), "{outcome:?}");
        let outcome = world.outcome(&read);
        assert!(
            matches!(outcome, Err(TransferError::SimGpu(_))) || (outcome.is_ok() && round > 3),
            "{outcome:?}"
        );
        own.gpus[0].set_faults(slow());
        still_works(world, &near, 8);
        let reported = std::iter::from_fn(|| far.poll_notification().unwrap()).count();
        assert!(reported == usize::from(matches!(write.poll(), Some(Ok(_)))), "{reported} notifications");
    }
    assert!(near.stats().lost_channels.is_empty() && far.stats().lost_channels.is_empty());
}

/// When deregistration returns, no copy of the engine's touches the memory any more.
pub fn memory_taken_back_while_it_is_copied(world: &mut impl World) {
    static ALONE: Mutex<()> = Mutex::new(());
    let own = Own::open(&ALONE, &[9]);
    let (near, far) = pair(world);
    let bytes = 2 << 20;
    let source = world.end(0).register(pattern(bytes, 1)).unwrap();
    for round in 0..4 {
        let buffer = own.gpus[0].alloc(bytes, 4096).unwrap();
        // SAFETY: the buffer outlives the region, which is deregistered below.
        let target = unsafe { world.end(1).register_raw(buffer.as_ptr(), bytes) }.unwrap();
        assert_eq!(target.location(), MemoryLocation::SimGpu(9));
        let write = match round % 2 {
            0 => near.write(&source, 0, &target.descriptor(), 0, bytes as u64),
            // As a source: what is being copied out of it is waited for.
            _ => far.write(&target, 0, &source.descriptor(), 0, bytes as u64),
        };
        let write = write.unwrap();
        let enough = (world.below(4) * bytes / 4) as u64;
        world.until("some bytes", || (write.bytes_moved() >= enough || write.poll().is_some()).then_some(()));
        world.blocking(|| target.deregister()).unwrap();
        let poison = vec![0xEE; bytes];
        own.gpus[0].write_from_slice(buffer.address(), &poison).unwrap();
        match world.outcome(&write) {
            Ok(moved) => assert_eq!(moved, bytes as u64),
            Err(TransferError::AccessRefused { .. } | TransferError::Invalid { .. }) => {}
            Err(error) => panic!("{error}"),
        }
        world.linger();
        let left = own.gpus[0].read_to_vec(buffer.address(), bytes).unwrap();
        assert_same(&left, &poison, "memory that is the caller's again");
        source.write_at(0, &pattern(bytes, 1)).unwrap();
    }
    still_works(world, &near, 9);
}

/// Against the rules, and yet an error of the operation alone.
pub fn memory_freed_in_mid_transfer(world: &mut impl World) {
    static ALONE: Mutex<()> = Mutex::new(());
    let own = Own::open(&ALONE, &[10]);
    let (near, far) = pair(world);
    let bytes = 4 << 20;
    let host = world.end(0).register(pattern(bytes, 1)).unwrap();
    for from_gpu in [false, true] {
        let buffer = own.gpus[0].alloc(bytes, 4096).unwrap();
        // SAFETY: the simulated GPU refuses addresses that are freed.
        let region = unsafe { world.end(1).register_raw(buffer.as_ptr(), bytes) }.unwrap();
        own.gpus[0].set_stall(true);
        let write = match from_gpu {
            false => near.write(&host, 0, &region.descriptor(), 0, bytes as u64),
            true => far.write(&region, 0, &host.descriptor(), 0, bytes as u64),
        };
        let write = write.unwrap();
        world.linger();
        drop(buffer);
        own.gpus[0].set_stall(false);
        match world.outcome(&write) {
            Err(TransferError::AccessRefused { why, .. }) if !from_gpu => {
                assert!(why.contains("GPU"), "{why}")
            }
            Err(TransferError::SimGpu(_)) if from_gpu => {}
            outcome => panic!("{outcome:?}"),
        }
        world.blocking(|| region.deregister()).unwrap();
    }
    still_works(world, &near, 10);
    assert!(near.stats().lost_channels.is_empty() && far.stats().lost_channels.is_empty());
}

/// Operations whose copies are one batch, or follow each other, used to fail together.
pub fn memory_freed_in_mid_transfer_costs_no_other_operation(world: &mut impl World) {
    static ALONE: Mutex<()> = Mutex::new(());
    let own = Own::open(&ALONE, &[14]);
    let ends = [0, 1].map(|_| world.add(1, |builder| builder.channels(1)));
    let (near, far) = world.connect(ends[0], ends[1]);
    let (bytes, all) = (3_000, 9);
    for freed in [0, 4, 8] {
        let host = world.end(0).register(pattern(all * bytes, 1)).unwrap();
        let back = world.end(0).register(vec![0; all * bytes]).unwrap();
        let buffers: Vec<_> = (0..all).map(|_| own.gpus[0].alloc(bytes, 4096).unwrap()).collect();
        let regions: Vec<Region> = buffers
            .iter()
            // SAFETY: the simulated GPU refuses addresses that are freed.
            .map(|buffer| unsafe { world.end(1).register_raw(buffer.as_ptr(), bytes) }.unwrap())
            .collect();
        let at = |index: usize| ((index * bytes) as u64, bytes as u64);
        let mut buffers: Vec<_> = buffers.into_iter().map(Some).collect();
        for to_gpu in [true, false] {
            own.gpus[0].set_stall(true);
            let writes: Vec<Transfer> = regions
                .iter()
                .enumerate()
                .map(|(index, region)| {
                    let (offset, len) = at(index);
                    match to_gpu {
                        true => near.write(&host, offset, &region.descriptor(), 0, len).unwrap(),
                        false => far.write(region, 0, &back.descriptor(), offset, len).unwrap(),
                    }
                })
                .collect();
            world.linger();
            drop(buffers[freed].take());
            own.gpus[0].set_stall(false);
            for (index, write) in writes.iter().enumerate() {
                match world.outcome(write) {
                    Ok(moved) if index != freed => assert_eq!(moved, bytes as u64),
                    Err(TransferError::AccessRefused { why, .. }) if index == freed && to_gpu => {
                        assert!(why.contains("GPU"), "{why}")
                    }
                    Err(TransferError::SimGpu(_)) if index == freed && !to_gpu => {}
                    outcome => panic!("{index} of {freed}, {to_gpu}: {outcome:?}"),
                }
            }
        }
        let (sent, found) = (contents(&host), contents(&back));
        for index in (0..all).filter(|index| *index != freed) {
            let range = index * bytes..(index + 1) * bytes;
            assert_same(&found[range.clone()], &sent[range], "what was written to a GPU and back");
        }
        regions.into_iter().for_each(|region| world.blocking(|| region.deregister()).unwrap());
    }
    still_works(world, &near, 14);
    assert!(near.stats().lost_channels.is_empty() && far.stats().lost_channels.is_empty());
}
