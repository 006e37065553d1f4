//! Operations in the order of a GPU's work: they start after it, and it waits for them, while no host thread waits.
//!
//! The GPU whose work takes long has no memory here: its clock is stalled, not the copies.

use crate::world::{World, assert_same, contents, on_gpu, pattern};
use ferrywire::{Block, BlockList, Peer, StreamEvent, TransferError};
use ferrywire_memory::sim::{SimEvent, SimFaults, SimGpu, SimStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const BYTES: usize = 300_000;

/// A GPU that is stalled until it is released, and streams of another GPU that wait for it.
struct Slow {
    clock: Arc<SimGpu>,
    gpu: Arc<SimGpu>,
    tick: SimStream,
    _alone: MutexGuard<'static, ()>,
}

impl Slow {
    /// Scenarios take turns, since there is one clock.
    fn open() -> Slow {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let (clock, gpu) = (SimGpu::open(11).unwrap(), SimGpu::open(12).unwrap());
        clock.set_stall(true);
        Slow { tick: clock.stream(), clock, gpu, _alone: alone }
    }

    /// A stream whose work begins when the clock is let go.
    fn stream(&self) -> SimStream {
        let (stream, event) = (self.gpu.stream(), SimEvent::new());
        self.tick.record(&event).unwrap();
        stream.wait_event(&event).unwrap();
        stream
    }

    fn go(&self) {
        self.clock.set_stall(false);
    }
}

impl Drop for Slow {
    fn drop(&mut self) {
        self.clock.set_stall(false);
        self.gpu.set_faults(SimFaults::default());
    }
}

/// Operations over several pairs of regions wait as one: written, read, and cancelled before they begin.
pub fn joined_lists_wait_for_a_kernel(world: &mut impl World) {
    let slow = Slow::open();
    let (near, far) = pair(world);
    let sources = [0, 1].map(|_| on_gpu(&world.end(0), 12, &[1; BYTES]));
    let targets = [0, 1].map(|_| world.end(1).alloc_host(BYTES).unwrap());
    let lists = [0, 1].map(|index| {
        let block = Block { local_offset: 0, remote_offset: 0, bytes: BYTES as u64 };
        BlockList::new(&sources[index], &targets[index].descriptor(), &[block]).unwrap()
    });
    let list = BlockList::join(&lists.each_ref()).unwrap();
    let kernel = slow.stream();
    sources.iter().for_each(|source| kernel.fill(source.as_ptr() as u64, 7, BYTES).unwrap());
    let after = near.on_stream(StreamEvent::after_sim(&kernel).unwrap());
    let cancelled = [
        after.write_blocks(&list, None, Some(b"never")).unwrap(),
        after.read_blocks(&list, None).unwrap(),
        after.write_blocks(&list, None, None).unwrap(),
    ];
    let write = after.write_blocks(&list, None, Some(b"all")).unwrap();
    world.linger();
    assert_eq!((write.poll(), far.poll_notification()), (None, Ok(None)));
    for each in &cancelled {
        each.cancel();
        assert_eq!(world.outcome(each), Err(TransferError::Cancelled));
    }
    slow.go();
    assert_eq!(world.notification(&far), Ok(b"all".to_vec()));
    targets.iter().for_each(|target| assert_same(&contents(target), &[7; BYTES], "what the kernel made"));
    assert_eq!(world.outcome(&write), Ok(2 * BYTES as u64));
}

fn pair(world: &mut impl World) -> (Peer, Peer) {
    let ends = [0, 1].map(|_| world.add(1, |builder| builder.channels(2)));
    world.connect(ends[0], ends[1])
}

/// A kernel that takes its time writes the source; writes and sends are posted behind it, and read what it wrote.
pub fn output_of_a_slow_kernel_is_sent_complete(world: &mut impl World) {
    let slow = Slow::open();
    let (near, far) = pair(world);
    let source = on_gpu(&world.end(0), 12, &[1; BYTES]);
    let targets: Vec<_> = (0..3).map(|_| world.end(1).alloc_host(BYTES).unwrap()).collect();
    let kernel = slow.stream();
    kernel.fill(source.as_ptr() as u64, 7, BYTES).unwrap();
    let after = near.on_stream(StreamEvent::after_sim(&kernel).unwrap());
    let len = BYTES as u64;
    let all = [
        after.write_notify(&source, 0, &targets[0].descriptor(), 0, len, b"written").unwrap(),
        after.send(1, &source, 0, len).unwrap(),
        after.send(1, &source, 0, 1000).unwrap(),
        far.recv(1, &targets[1], 0, len).unwrap(),
        far.recv(1, &targets[2], 0, len).unwrap(),
    ];
    // Transfers posted without the event do not wait; a notification behind all of them does.
    let other = world.end(0).register(pattern(BYTES, 3)).unwrap();
    let beside = world.end(1).alloc_host(BYTES).unwrap();
    let free = near.write(&other, 0, &beside.descriptor(), 0, len).unwrap();
    let reported = near.notify(b"all").unwrap();
    world.all_done(&[free]);
    world.linger();
    assert_eq!(all.iter().filter_map(|each| each.poll()).count() + usize::from(reported.poll().is_some()), 0);
    assert_eq!(far.poll_notification(), Ok(None));
    slow.go();
    world.all_done(&all);
    world.all_done(&[reported]);
    assert_eq!(world.notification(&far), Ok(b"written".to_vec()));
    assert_eq!(world.notification(&far), Ok(b"all".to_vec()));
    for (target, bytes) in targets.iter().zip([BYTES, BYTES, 1000]) {
        assert_same(&contents(target)[..bytes], &vec![7; bytes], "what the kernel wrote");
    }
}

/// Targets are left alone as long as a kernel reads them.
pub fn what_a_slow_kernel_reads_is_not_overwritten(world: &mut impl World) {
    let slow = Slow::open();
    let (near, far) = pair(world);
    let len = BYTES as u64;
    let there = world.end(1).register(pattern(BYTES, 5)).unwrap();
    let second = world.end(1).register(pattern(BYTES, 6)).unwrap();
    let targets = [(); 3].map(|()| on_gpu(&world.end(0), 12, &[1; BYTES]));
    let kept = on_gpu(&world.end(0), 12, &[0; 3 * BYTES]);
    let kernel = slow.stream();
    for (at, target) in targets.iter().enumerate() {
        let to = kept.as_ptr() as u64 + (at * BYTES) as u64;
        kernel.copy(target.as_ptr() as u64, to, BYTES).unwrap();
    }
    let after = near.on_stream(StreamEvent::after_sim(&kernel).unwrap());
    let all = [
        after.read(&targets[0], 0, &there.descriptor(), 0, len).unwrap(),
        after.recv(2, &targets[1], 0, len).unwrap(),
        after.recv(2, &targets[2], 0, len).unwrap(),
        far.send(2, &there, 0, len).unwrap(),
        far.send(2, &second, 0, len).unwrap(),
    ];
    world.linger();
    assert_eq!(all.iter().filter_map(|each| each.poll()).count(), 0);
    slow.go();
    world.all_done(&all);
    assert_same(&contents(&kept), &[1; 3 * BYTES], "what the kernel read");
    for (target, salt) in targets.iter().zip([5, 5, 6]) {
        assert_same(&contents(target), &pattern(BYTES, salt), "what came after it, in its order");
    }
}

/// A stream continues when the bytes have arrived, although no host thread waits; also after a failure.
pub fn a_stream_waits_for_what_is_received(world: &mut impl World) {
    let slow = Slow::open();
    slow.go();
    let (near, far) = pair(world);
    let len = BYTES as u64;
    let source = world.end(0).register(pattern(BYTES, 6)).unwrap();
    let (target, copy) = (on_gpu(&world.end(1), 12, &[0; BYTES]), on_gpu(&world.end(1), 12, &[0; BYTES]));
    let stream = slow.gpu.stream();
    let received = far.recv(9, &target, 0, len).unwrap();
    received.block_sim_stream(&stream).unwrap();
    stream.copy(target.as_ptr() as u64, copy.as_ptr() as u64, BYTES).unwrap();
    world.linger();
    assert_eq!(stream.query(), Ok(false), "nothing was sent yet");
    let sent = near.send(9, &source, 0, len).unwrap();
    world.until("the stream to go on", || stream.query().unwrap().then_some(()));
    assert_same(&contents(&copy), &pattern(BYTES, 6), "what the stream found");
    world.all_done(&[sent, received.clone()]);
    // The transfer has ended, so the stream does not wait.
    received.block_sim_stream(&stream).unwrap();
    world.until("a stream that need not wait", || stream.query().unwrap().then_some(()));
    let never = far.recv(10, &target, 0, len).unwrap();
    never.block_sim_stream(&stream).unwrap();
    never.cancel();
    world.until("the stream to go on", || stream.query().unwrap().then_some(()));
    assert_eq!(world.outcome(&never), Err(TransferError::Cancelled));
}

/// A waiting transfer can be cancelled, and fails with its kernel; messages behind it keep their order.
pub fn what_waits_for_a_kernel_may_end_before(world: &mut impl World) {
    let slow = Slow::open();
    let (near, far) = pair(world);
    let len = 1000;
    let source = on_gpu(&world.end(0), 12, &[1; BYTES]);
    let target = world.end(1).alloc_host(BYTES).unwrap();
    let kernel = slow.stream();
    let after = near.on_stream(StreamEvent::after_sim(&kernel).unwrap());
    let cancelled = [
        after.write(&source, 0, &target.descriptor(), 0, len).unwrap(),
        after.send(1, &source, 0, len).unwrap(),
        after.read(&source, 0, &target.descriptor(), 0, len).unwrap(),
        after.recv(4, &source, 0, len).unwrap(),
    ];
    cancelled.iter().for_each(|each| each.cancel());
    for each in &cancelled {
        assert_eq!(world.outcome(each), Err(TransferError::Cancelled), "{each:?}");
    }
    // A kernel that accesses unallocated memory.
    let wrong = slow.gpu.stream();
    wrong.fill(8, 1, 8).unwrap();
    let ready = StreamEvent::after_sim(&wrong);
    // The stream may have failed by now, or fails later.
    if let Ok(ready) = ready {
        let after = near.on_stream(ready);
        for failed in [
            after.write(&source, 0, &target.descriptor(), 0, len).unwrap(),
            after.send(1, &source, 0, len).unwrap(),
        ] {
            assert!(matches!(world.outcome(&failed), Err(TransferError::SimGpu(_))), "{failed:?}");
        }
    }
    assert_same(&contents(&target), &[0; BYTES], "nothing was written");
    let (sent, received) =
        (near.send(1, &source, 0, len).unwrap(), far.recv(1, &target, 0, BYTES as u64).unwrap());
    world.all_done(&[sent, received]);
    assert_same(&contents(&target)[..1000], &[1; 1000], "the next message");
}

/// Operations that wait are finished before an orderly close, and fail with a peer that is gone.
pub fn closing_with_operations_that_wait(world: &mut impl World) {
    let slow = Slow::open();
    let (near, _far) = pair(world);
    let source = on_gpu(&world.end(0), 12, &[3; BYTES]);
    let target = world.end(1).alloc_host(BYTES).unwrap();
    let kernel = slow.stream();
    let after = near.on_stream(StreamEvent::after_sim(&kernel).unwrap());
    let write = after.write(&source, 0, &target.descriptor(), 0, BYTES as u64).unwrap();
    world.linger();
    slow.go();
    let closed = world.blocking(|| near.close(std::time::Duration::from_secs(20)));
    assert_eq!(closed, Ok(()));
    assert_eq!(world.outcome(&write), Ok(BYTES as u64));
    assert_same(&contents(&target), &[3; BYTES], "what was written before the close");
    let late = after.write(&source, 0, &target.descriptor(), 0, 1);
    assert!(late.is_err() || world.outcome(&late.unwrap()).is_err());
}
