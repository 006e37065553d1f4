//! A stalled GPU, a long queue or dropped memory must not delay unrelated work.

use crate::{LIMIT, builder, busy_time, listening, pair, sockets_copy};
use ferrywire::{Endpoint, Peer, Region, RegisterError, TransferError, limits};
use ferrywire_memory::sim::SimGpu;
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The acknowledgement waited behind bytes that the GPU had not given yet.
#[test]
fn a_stalled_gpu_does_not_delay_acknowledgements() {
    let accepting = builder().listen("127.0.0.1:0".parse().unwrap()).channels(1).build().unwrap();
    let connecting = builder().channels(1).build().unwrap();
    let near = connecting.connect(accepting.listen_addresses()[0], LIMIT).unwrap();
    let far = accepting.accept(LIMIT).unwrap();
    // No other test's.
    let gpu = SimGpu::open(7).unwrap();
    let ours = accepting.alloc_sim(7, 4096).unwrap();
    let [here, there] = [accepting.alloc_host(4096).unwrap(), connecting.alloc_host(4096).unwrap()];
    far.write(&ours, 0, &there.descriptor(), 0, 4096).unwrap().wait(LIMIT).unwrap();
    gpu.set_stall(true);
    let stands = far.write(&ours, 0, &there.descriptor(), 0, 4096).unwrap();
    there.write_at(0, &[9; 64]).unwrap();
    near.write(&there, 0, &here.descriptor(), 0, 64).unwrap().wait(LIMIT).unwrap();
    assert_eq!(stands.poll(), None);
    gpu.set_stall(false);
    assert_eq!(stands.wait(LIMIT), Ok(4096));
}

/// Regression: in a ping-pong between GPUs each answer cost two socket calls, and the first one delayed the look whether the
/// copy of the second was done.
#[test]
fn an_acknowledgement_goes_with_a_short_frame_that_is_being_copied() {
    let _only = crate::only_user_of_gpu(3);
    let end = || builder().threads(0).channels(1);
    let near = end().listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
    let far = end().build().unwrap();
    let (here, there) = connected(&near, &far);
    let gpu = SimGpu::open(3).unwrap();
    let ours = near.alloc_sim(3, 4096).unwrap();
    let [to, from] = [near.alloc_host(64).unwrap(), far.alloc_host(4096).unwrap()];
    let until = |so: &dyn Fn() -> bool| {
        let begun = Instant::now();
        while !so() {
            assert!(begun.elapsed() < LIMIT);
        }
    };
    let warm = here.write(&ours, 0, &from.descriptor(), 0, 4096).unwrap();
    until(&|| (near.progress() | far.progress()) & warm.poll().is_some());
    until(&|| !(near.progress() | far.progress()));

    let channel = || here.stats().channels[0].clone();
    // The bytes that `near` sends for a message and its answer. The answer's copy stands still until the bytes sent are `so`.
    let sent_until = |so: &dyn Fn(u64) -> bool| {
        gpu.set_stall(true);
        let answer = here.write(&ours, 0, &from.descriptor(), 0, 4096).unwrap();
        let asked = there.write(&from, 0, &to.descriptor(), 0, 64).unwrap();
        far.progress();
        let before = channel();
        let sent = || channel().sent_bytes - before.sent_bytes;
        until(&|| {
            near.progress();
            channel().received_bytes >= before.received_bytes + 64
        });
        until(&|| {
            near.progress();
            so(sent())
        });
        gpu.set_stall(false);
        // The GPU finishes its other work before this.
        ours.read_at(0, &mut [0]).unwrap();
        until(&|| (near.progress() | far.progress()) & asked.poll().is_some() & answer.poll().is_some());
        assert_eq!((asked.poll(), answer.poll()), (Some(Ok(64)), Some(Ok(4096))));
        sent()
    };
    // One of 64 passes sends it in any case.
    assert!((0..5).any(|_| sent_until(&|_| true) == 64 + 4096), "the acknowledgement went alone");
    // A copy may take long, and the peer waits for the acknowledgement meanwhile: at most 16 passes without other work keep it
    // back.
    for _ in 0..5 {
        let passes = Cell::new(0);
        sent_until(&|sent| {
            passes.set(passes.get() + 1);
            sent > 0
        });
        assert!(passes.get() <= 20, "the acknowledgement went after {} passes", passes.get());
    }
}

/// Regression: the bytes were in their target, and the write never completed.
#[test]
fn a_read_ends_that_had_arrived_behind_a_gpu_when_its_region_was_deregistered() {
    const BYTES: u64 = 1 << 20;
    let accepting = builder().listen("127.0.0.1:0".parse().unwrap()).channels(1).build().unwrap();
    let connecting = builder().channels(1).build().unwrap();
    let near = connecting.connect(accepting.listen_addresses()[0], LIMIT).unwrap();
    let far = accepting.accept(LIMIT).unwrap();
    // No other test's.
    let gpu = SimGpu::open(4).unwrap();
    let on_gpu = accepting.alloc_sim(4, 4096).unwrap();
    let target = accepting.alloc_host(BYTES as usize).unwrap();
    let source = connecting.register(vec![7; BYTES as usize]).unwrap();
    gpu.set_stall(true);
    let write = near.write(&source, 0, &on_gpu.descriptor(), 0, 4096).unwrap();
    let read = far.read(&target, 0, &source.descriptor(), 0, BYTES).unwrap();
    let begun = Instant::now();
    let all = |sent: u64| sent > 4096 + BYTES && far.stats().channels[0].received_bytes == sent;
    while !all(near.stats().channels[0].sent_bytes) {
        assert!(begun.elapsed() < LIMIT);
        std::thread::yield_now();
    }
    target.deregister().unwrap();
    gpu.set_stall(false);
    assert_eq!(write.wait(LIMIT), Ok(4096));
    assert_eq!(read.wait(LIMIT), Ok(BYTES));
}

/// The frame that carried nothing of it had no checksum, and the peer took the stream for broken.
#[test]
fn with_checksums_a_frame_of_dropped_memory_costs_no_connection() {
    const BYTES: u64 = 60 << 10;
    let end = || builder().threads(0).channels(1).socket_buffer_bytes(64 << 10).crc(true);
    let near = end().listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
    let far = end().build().unwrap();
    let (here, there) = connected(&near, &far);
    let target = far.alloc_host(BYTES as usize).unwrap();
    let source = near.register(vec![7; BYTES as usize]).unwrap();
    let mut memory = vec![5_u8; 4096];
    // SAFETY: it stays until the end.
    let region = unsafe { near.register_raw(memory.as_mut_ptr(), memory.len()) }.unwrap();
    // More than there is room for on the way, and one more. Once there is some room all of them are in the channel's hands.
    let before: Vec<_> =
        (0..6).map(|_| here.write(&source, 0, &target.descriptor(), 0, BYTES).unwrap()).collect();
    let write = here.write(&region, 0, &target.descriptor(), 0, 4096).unwrap();
    far.progress();
    near.progress();
    // Until the engine has given up waiting.
    drop(region);
    let begun = Instant::now();
    while write.poll().is_none() || before.iter().any(|write| write.poll().is_none()) {
        assert!(begun.elapsed() < LIMIT);
        near.progress();
        far.progress();
    }
    assert!(write.poll().unwrap().is_err());
    assert!(before.iter().all(|write| write.poll() == Some(Ok(BYTES))));
    assert_eq!((here.stats().lost_channels, there.stats().lost_channels), (vec![], vec![]));
    drop(memory);
}

/// The send reported success, and no receive ever had the message.
#[test]
fn a_message_behind_a_gpu_whose_receive_is_cancelled_is_refused_to_its_sender() {
    const BYTES: u64 = 200_000;
    let end = || builder().threads(0).channels(1);
    let accepting = end().listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
    let connecting = end().build().unwrap();
    let (far, near) = connected(&accepting, &connecting);
    // No other test's.
    let gpu = SimGpu::open(12).unwrap();
    let on_gpu = accepting.alloc_sim(12, 4096).unwrap();
    let target = accepting.alloc_host(BYTES as usize).unwrap();
    let source = connecting.register(vec![7; BYTES as usize]).unwrap();
    let receive = far.recv(1, &target, 0, BYTES).unwrap();
    let send = near.send(1, &source, 0, BYTES).unwrap();
    let moved = |peer: &Peer| peer.stats().channels[0].clone();
    let begun = Instant::now();
    let driven = |enough: &dyn Fn() -> bool, ends: &[&Endpoint]| {
        while !enough() {
            assert!(begun.elapsed() < LIMIT);
            for end in ends {
                end.progress();
            }
        }
    };
    // The announcement is met. Its sender has not heard of that, and sends the write first.
    driven(&|| moved(&near).sent_bytes > 0, &[&connecting]);
    driven(&|| moved(&far).sent_bytes > 0, &[&accepting]);
    gpu.set_stall(true);
    let write = near.write(&source, 0, &on_gpu.descriptor(), 0, 4096).unwrap();
    // All of it is here, and waits behind the write.
    let all_is_here = || {
        let sent = moved(&near).sent_bytes;
        sent > 4096 + BYTES && moved(&far).received_bytes == sent
    };
    driven(&all_is_here, &[&connecting, &accepting]);
    receive.cancel();
    gpu.set_stall(false);
    let ended = || write.poll().is_some() && receive.poll().is_some() && send.poll().is_some();
    driven(&ended, &[&connecting, &accepting]);
    assert_eq!(write.poll(), Some(Ok(4096)));
    assert_eq!(receive.poll(), Some(Err(TransferError::Cancelled)));
    let sent = send.poll();
    assert!(matches!(sent, Some(Err(TransferError::AccessRefused { .. }))), "{sent:?}");
}

/// The caller makes the progress of both ends.
pub fn connected(near: &Endpoint, far: &Endpoint) -> (Peer, Peer) {
    let connecting = far.start_connect(near.listen_addresses()[0]).unwrap();
    let (mut there, mut here, begun) = (None, None, Instant::now());
    while there.is_none() || here.is_none() {
        assert!(begun.elapsed() < LIMIT);
        near.progress();
        far.progress();
        here = here.or_else(|| near.try_accept().map(Result::unwrap));
        there = there.or_else(|| connecting.poll().map(Result::unwrap));
    }
    (here.unwrap(), there.unwrap())
}

/// The answer was dropped, as if the peer were flooding us with what can only be refused.
#[test]
fn a_long_queue_of_our_own_drops_no_answer() {
    let [near, far] = [(); 2].map(|()| builder().threads(0).channels(1));
    let near = near.listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
    let far = far.build().unwrap();
    let (here, there) = connected(&near, &far);
    let (ours, theirs) = (near.alloc_host(100).unwrap(), far.alloc_host(1 << 20).unwrap());
    let receive = here.recv(1, &ours, 0, 100).unwrap();
    let target = theirs.descriptor();
    let writes: Vec<_> = (0..150_000).map(|_| here.write(&ours, 0, &target, 0, 8).unwrap()).collect();
    let send = there.send(1, &theirs, 0, 1 << 20).unwrap();
    let (begun, mut ended) = (Instant::now(), 0);
    while receive.poll().is_none() || send.poll().is_none() || ended < writes.len() {
        assert!(begun.elapsed() < LIMIT, "{:?}, {:?}", receive.poll(), send.poll());
        for _ in 0..100 {
            near.progress();
            far.progress();
        }
        ended += writes[ended..].iter().take_while(|write| write.poll().is_some()).count();
    }
    assert!(matches!(receive.poll(), Some(Err(TransferError::Truncated { .. }))));
    assert!(matches!(send.poll(), Some(Err(_))));
}

/// They were given up half-way, though the bytes are the engine's own.
#[test]
fn operations_on_memory_that_the_engine_owns_go_on_without_a_handle() {
    const BYTES: usize = 64 << 20;
    let pair = pair();
    let far = pair.ends[1].register(vec![5; BYTES]).unwrap();
    for _ in 0..3 {
        let near = pair.ends[0].alloc_host(BYTES).unwrap();
        let read = pair.near.read(&near, 0, &far.descriptor(), 0, BYTES as u64).unwrap();
        drop(near);
        assert_eq!(read.wait(LIMIT), Ok(BYTES as u64));
        let near = pair.ends[0].alloc_host(BYTES).unwrap();
        let receive = pair.near.recv(1, &near, 0, BYTES as u64).unwrap();
        drop(near);
        assert_eq!(pair.far.send(1, &far, 0, BYTES as u64).unwrap().wait(LIMIT), Ok(BYTES as u64));
        assert_eq!(receive.wait(LIMIT), Ok(BYTES as u64));
    }
}

/// The thread that received the message waited for the GPU, and moved nothing else.
#[test]
fn a_short_message_for_a_gpu_that_stands_still_holds_up_nothing_else() {
    let end = || builder().channels(1).threads(1);
    let accepting = end().listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
    let connecting = end().build().unwrap();
    let near = connecting.connect(accepting.listen_addresses()[0], LIMIT).unwrap();
    let far = accepting.accept(LIMIT).unwrap();
    // No other test's.
    let gpu = SimGpu::open(0).unwrap();
    let on_gpu = accepting.alloc_sim(0, 8192).unwrap();
    let [source, target] = [connecting.register(vec![5; 8192]).unwrap(), accepting.alloc_host(4096).unwrap()];
    let pieces = [(4096, 1000), (0, 1000)];
    let receives =
        [far.recv(1, &on_gpu, 2000, 2000), far.recv_blocks(2, &on_gpu, &pieces)].map(Result::unwrap);
    gpu.set_stall(true);
    for tag in [1, 2] {
        near.send(tag, &source, 0, 1500).unwrap().wait(LIMIT).unwrap();
    }
    near.write(&source, 0, &target.descriptor(), 0, 4096).unwrap().wait(LIMIT).unwrap();
    assert!(receives.iter().all(|receive| receive.poll().is_none()));
    gpu.set_stall(false);
    assert!(receives.iter().all(|receive| receive.wait(LIMIT) == Ok(1500)));
    let mut found = vec![0; 8192];
    on_gpu.read_at(0, &mut found).unwrap();
    let mut expected = vec![0; 8192];
    [2000..3500, 4096..5096, 0..500].into_iter().for_each(|range| expected[range].fill(5));
    assert_eq!(found, expected);
}

/// The message is for another receive, and its memory is not touched.
#[test]
fn a_short_message_for_memory_of_a_gpu_that_is_freed_fails_its_receive_alone() {
    let pair = pair();
    // No other test's.
    let gpu = SimGpu::open(1).unwrap();
    let buffers = [0, 1].map(|_| gpu.alloc(4096, 4096).unwrap());
    // SAFETY: the simulated GPU refuses addresses that are freed.
    let region = |index: usize| unsafe { pair.ends[0].register_raw(buffers[index].as_ptr(), 4096) }.unwrap();
    let regions = [region(0), region(1)];
    let source = pair.ends[1].register((0..64).collect::<Vec<u8>>()).unwrap();
    let receives = [pair.near.recv(1, &regions[0], 0, 64), pair.near.recv(2, &regions[1], 0, 64)];
    let [freed, stays] = receives.map(Result::unwrap);
    gpu.set_stall(true);
    let sends = [1, 2].map(|tag| pair.far.send(tag, &source, 0, 64).unwrap());
    sends.iter().for_each(|send| assert_eq!(send.wait(LIMIT), Ok(64)));
    let [gone, kept] = buffers;
    drop(gone);
    gpu.set_stall(false);
    assert!(matches!(freed.wait(LIMIT), Err(TransferError::SimGpu(_))), "{:?}", freed.poll());
    assert_eq!(stays.wait(LIMIT), Ok(64));
    let target = pair.ends[0].alloc_host(64).unwrap();
    assert_eq!(pair.near.recv(1, &target, 0, 64).unwrap().wait(LIMIT), Ok(64));
    let mut found = [0; 64];
    target.read_at(0, &mut found).unwrap();
    assert!(found.iter().copied().eq(0..64));
    assert_eq!(gpu.read_to_vec(kept.address(), 64).unwrap(), found);
}

/// Only long messages were refused.
#[test]
fn a_short_message_is_not_placed_into_a_region_that_was_deregistered() {
    let pair = pair();
    let source = pair.ends[1].register(vec![5; 4096]).unwrap();
    let target = pair.ends[0].alloc_host(4096).unwrap();
    let receive = pair.near.recv(2, &target, 0, 4096).unwrap();
    let clone = target.clone();
    target.deregister().unwrap();
    pair.far.send(2, &source, 0, 4096).unwrap().wait(LIMIT).unwrap();
    let error = receive.wait(LIMIT).unwrap_err();
    assert!(error.to_string().contains("deregistered"), "{error}");
    let mut found = [0; 4096];
    clone.read_at(0, &mut found).unwrap();
    assert_eq!(found, [0; 4096]);
}

/// Regression: the memory was released while the receiver still wrote to it.
#[test]
fn a_region_is_not_deregistered_while_a_message_is_placed_into_it() {
    let pair = pair();
    // No other test's.
    let gpu = SimGpu::open(6).unwrap();
    let target = pair.ends[0].alloc_sim(6, 4096).unwrap();
    let source = pair.ends[1].register(vec![5; 64]).unwrap();
    pair.far.send(3, &source, 0, 64).unwrap().wait(LIMIT).unwrap();
    gpu.set_stall(true);
    let (clone, goes_on) = (target.clone(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| pair.near.recv(3, &clone, 0, 64).unwrap().wait(LIMIT));
        let begun = Instant::now();
        while !gpu.has_work() {
            assert!(begun.elapsed() < LIMIT, "the message is not written");
            std::thread::yield_now();
        }
        let deregistering = scope.spawn(|| {
            target.deregister().unwrap();
            assert!(goes_on.load(Ordering::SeqCst), "the GPU has still to write");
        });
        // A deregistration that does not wait returns within this time.
        std::thread::sleep(Duration::from_millis(300));
        goes_on.store(true, Ordering::SeqCst);
        gpu.set_stall(false);
        deregistering.join().unwrap();
    });
}

/// They were placed into it, though it was the user's again.
#[test]
fn a_short_message_is_not_placed_into_memory_that_its_user_has_back() {
    let near = listening();
    let far = builder().channels(2).build().unwrap();
    let there = far.connect(near.listen_addresses()[0], LIMIT).unwrap();
    let here = near.accept(LIMIT).unwrap();
    let mut room = vec![0_u8; 4096];
    // SAFETY: it stays until the end.
    let region = unsafe { near.register_raw(room.as_mut_ptr(), room.len()) }.unwrap();
    let receive = here.recv(7, &region, 0, 4096).unwrap();
    // Until the engine has given up waiting for it.
    drop(region);
    let source = far.register(vec![5; 4096]).unwrap();
    there.send(7, &source, 0, 4096).unwrap().wait(LIMIT).unwrap();
    assert!(receive.wait(LIMIT).is_err());
    near.close(LIMIT).unwrap();
    assert!(room.iter().all(|byte| *byte == 0));
}

/// Regression: a channel read the unsent rest of the memory later, after its reuse.
#[test]
fn nothing_is_sent_of_dropped_memory_to_a_slow_peer() {
    const BYTES: usize = 64 << 20;
    // The small socket buffer makes a chunk go out in parts.
    let end = || builder().channels(1).socket_buffer_bytes(64 << 10);
    let near = end().listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
    let far = end().threads(0).build().unwrap();
    let connecting = far.start_connect(near.listen_addresses()[0]).unwrap();
    let (mut there, begun) = (None, Instant::now());
    while there.is_none() {
        assert!(begun.elapsed() < LIMIT);
        far.progress();
        there = connecting.poll().map(Result::unwrap);
    }
    let here = near.accept(LIMIT).unwrap();
    let target = far.alloc_host(BYTES).unwrap();
    let mut memory = vec![5_u8; BYTES];
    // SAFETY: it stays until the end.
    let region = unsafe { near.register_raw(memory.as_mut_ptr(), memory.len()) }.unwrap();
    let write = here.write(&region, 0, &target.descriptor(), 0, BYTES as u64).unwrap();
    // The peer's kernel takes some of it, and the peer nothing, until the engine has given up waiting.
    while here.stats().channels.iter().all(|channel| channel.sent_bytes < 64 << 10) {
        assert!(begun.elapsed() < LIMIT);
        std::thread::yield_now();
    }
    drop(region);
    memory.fill(0xEE);
    let begun = Instant::now();
    while write.poll().is_none() {
        assert!(begun.elapsed() < LIMIT);
        far.progress();
    }
    assert!(write.poll().unwrap().is_err());
    // Others go on.
    let source = near.register(vec![7; 4096]).unwrap();
    let write = here.write(&source, 0, &target.descriptor(), 0, 4096).unwrap();
    while write.poll().is_none() {
        assert!(begun.elapsed() < LIMIT);
        far.progress();
    }
    assert_eq!(write.poll(), Some(Ok(4096)));
    let mut found = vec![0; BYTES];
    target.read_at(0, &mut found).unwrap();
    assert!(found.iter().all(|byte| *byte != 0xEE));
    // A connection that is aborted, since it does not copy, may end before the peer has read anything of it.
    assert!(found.contains(&5) || !sockets_copy(), "nothing was under way");
    drop(memory);
}

/// The bytes were in no ring yet when it was dropped, and what had come there since was sent.
#[test]
fn nothing_is_sent_of_memory_of_a_gpu_that_its_user_has_dropped_though_the_gpu_was_slow() {
    const BYTES: usize = 1 << 20;
    let pair = pair();
    // No other test's.
    let gpu = SimGpu::open(8).unwrap();
    let buffer = gpu.alloc(BYTES, 4096).unwrap();
    gpu.write_from_slice(buffer.address(), &[5; BYTES]).unwrap();
    // SAFETY: the buffer stays until the end.
    let region = unsafe { pair.ends[0].register_raw(buffer.as_ptr(), BYTES) }.unwrap();
    let target = pair.ends[1].alloc_host(BYTES).unwrap();
    gpu.set_stall(true);
    let write = pair.near.write(&region, 0, &target.descriptor(), 0, BYTES as u64).unwrap();
    let begun = Instant::now();
    let is_staged = || {
        let staged = pair.near.stats().channels.into_iter().filter_map(|channel| channel.staging);
        staged.map(|staging| staging.sent_bytes).sum::<u64>() >= BYTES as u64
    };
    while !is_staged() {
        assert!(begun.elapsed() < LIMIT);
        std::thread::yield_now();
    }
    // Until the engine has given up waiting.
    drop(region);
    assert_eq!(write.poll(), None);
    // SAFETY: memory of this test, which no copy touches while the GPU is stalled.
    unsafe { SimGpu::dma_view(buffer.address(), BYTES).unwrap().write_bytes(0xEE, BYTES) };
    gpu.set_stall(false);
    let error = write.wait(LIMIT).unwrap_err();
    assert!(error.to_string().contains("the region was dropped before the transfer had ended"), "{error}");
    let mut found = vec![0; BYTES];
    target.read_at(0, &mut found).unwrap();
    assert!(found.iter().all(|byte| *byte != 0xEE));
    // Others go on.
    let source = pair.ends[0].alloc_sim(8, 4096).unwrap();
    let write = pair.near.write(&source, 0, &target.descriptor(), 0, 4096).unwrap();
    assert_eq!(write.wait(LIMIT), Ok(4096));
}

/// Until so many bytes of this peer's wait for a GPU, or have.
fn until_staged(peer: &Peer, bytes: u64) {
    let begun = Instant::now();
    let staged = || peer.stats().channels.into_iter().filter_map(|channel| channel.staging);
    while staged().map(|staging| staging.received_bytes).sum::<u64>() < bytes {
        assert!(begun.elapsed() < LIMIT);
        std::thread::yield_now();
    }
}

/// After a second the channel was lost.
#[test]
fn memory_of_a_gpu_that_is_slow_is_taken_back_later_and_costs_no_channel() {
    const BYTES: usize = 100_000;
    let pair = pair();
    // No other test's.
    let gpu = SimGpu::open(9).unwrap();
    let buffer = Arc::new(gpu.alloc(BYTES, 4096).unwrap());
    let source = pair.ends[0].register(vec![7; BYTES]).unwrap();
    let write = |target: &Region| pair.near.write(&source, 0, &target.descriptor(), 0, BYTES as u64).unwrap();
    // With an owner, which goes when the GPU has done its work.
    // SAFETY: the owner keeps the allocation.
    let owned = unsafe { pair.ends[1].register_with(buffer.as_ptr(), BYTES, Box::new(buffer.clone())) };
    let owned = owned.unwrap();
    gpu.set_stall(true);
    let first = write(&owned);
    until_staged(&pair.far, BYTES as u64);
    drop(owned);
    std::thread::sleep(2 * limits::LANE_ABANDON_TIMEOUT);
    assert_eq!((first.poll(), Arc::strong_count(&buffer)), (None, 2));
    gpu.set_stall(false);
    first.wait(LIMIT).unwrap();
    let begun = Instant::now();
    while Arc::strong_count(&buffer) > 1 {
        assert!(begun.elapsed() < LIMIT);
        std::thread::yield_now();
    }
    // Without an owner, the caller of `deregister` gets the error.
    // SAFETY: the buffer stays until the end.
    let ours = unsafe { pair.ends[1].register_raw(buffer.as_ptr(), BYTES) }.unwrap();
    gpu.set_stall(true);
    let second = write(&ours);
    until_staged(&pair.far, 2 * BYTES as u64);
    let error = ours.clone().deregister().unwrap_err();
    assert!(
        matches!(&error, RegisterError::ResourceBusy { by, .. } if by.contains("simulated GPU 9")),
        "{error}"
    );
    gpu.set_stall(false);
    ours.deregister().unwrap();
    let ended = second.wait(LIMIT);
    assert!(matches!(ended, Ok(_) | Err(TransferError::AccessRefused { .. })), "{ended:?}");
    assert_eq!(pair.far.stats().lost_channels, [""; 0]);
}

/// Regression: the error was reported, but the channel was lost when the handle was dropped.
#[test]
fn memory_of_a_gpu_whose_last_handle_could_not_be_deregistered_costs_no_channel() {
    const BYTES: usize = 100_000;
    let pair = pair();
    // No other test's.
    let gpu = SimGpu::open(11).unwrap();
    let buffer = gpu.alloc(BYTES, 4096).unwrap();
    // SAFETY: the buffer stays until the end.
    let target = unsafe { pair.ends[1].register_raw(buffer.as_ptr(), BYTES) }.unwrap();
    let source = pair.ends[0].register(vec![7; BYTES]).unwrap();
    gpu.set_stall(true);
    // One of ours, which keeps the memory in use.
    let read = pair.far.read(&target, 0, &source.descriptor(), 0, BYTES as u64).unwrap();
    until_staged(&pair.far, BYTES as u64);
    let (begun, busy) = (Instant::now(), busy_time());
    let error = target.deregister().unwrap_err();
    // Regression: the caller polled without a pause, and kept a core busy.
    let (took, busy) = (begun.elapsed(), busy_time() - busy);
    assert!(busy < took / 2, "busy for {busy:?} of {took:?}");
    assert!(
        matches!(&error, RegisterError::ResourceBusy { by, .. } if by.contains("simulated GPU 11")),
        "{error}"
    );
    assert_eq!(read.poll(), None);
    gpu.set_stall(false);
    assert_eq!(read.wait(LIMIT), Ok(BYTES as u64));
    assert_eq!(gpu.read_to_vec(buffer.address(), BYTES).unwrap(), [7; BYTES]);
    assert_eq!(pair.far.stats().lost_channels, [""; 0]);
}

/// No caller waits that could get the error that the memory is still in use.
#[test]
fn memory_of_a_stalled_gpu_is_not_touched_when_its_region_is_dropped() {
    const BYTES: usize = 100_000;
    let pair = pair();
    // No other test's.
    let gpu = SimGpu::open(10).unwrap();
    let buffer = gpu.alloc(BYTES, 4096).unwrap();
    // SAFETY: the buffer stays until the end.
    let target = unsafe { pair.ends[1].register_raw(buffer.as_ptr(), BYTES) }.unwrap();
    let source = pair.ends[0].register(vec![7; BYTES]).unwrap();
    gpu.set_stall(true);
    let write = pair.near.write(&source, 0, &target.descriptor(), 0, BYTES as u64).unwrap();
    until_staged(&pair.far, BYTES as u64);
    drop(target);
    // The peer reports the loss a little later.
    let begun = Instant::now();
    while pair.far.stats().lost_channels.is_empty() {
        assert!(begun.elapsed() < LIMIT);
        std::thread::sleep(Duration::from_millis(1));
    }
    gpu.set_stall(false);
    assert!(write.wait(LIMIT).is_err());
    assert_eq!(gpu.read_to_vec(buffer.address(), BYTES).unwrap(), [0; BYTES]);
}

/// Regression: the copy was stopped, and the channel was lost although it did not touch the memory.
#[test]
fn memory_of_a_stalled_gpu_into_which_only_a_short_message_is_copied_costs_no_channel() {
    let _only = crate::only_user_of_gpu(3);
    let pair = pair();
    let gpu = SimGpu::open(3).unwrap();
    let buffer = gpu.alloc(4096, 4096).unwrap();
    // SAFETY: the buffer stays until the end.
    let target = unsafe { pair.ends[1].register_raw(buffer.as_ptr(), 4096) }.unwrap();
    let source = pair.ends[0].register(vec![7; 4096]).unwrap();
    gpu.set_stall(true);
    let receive = pair.far.recv(1, &target, 0, 4096).unwrap();
    pair.near.send(1, &source, 0, 4096).unwrap().wait(LIMIT).unwrap();
    drop(target);
    assert!(matches!(receive.wait(LIMIT), Err(TransferError::Invalid { .. })), "{:?}", receive.poll());
    gpu.set_stall(false);
    let other = pair.ends[1].alloc_host(4096).unwrap();
    assert_eq!(pair.far.recv(1, &other, 0, 4096).unwrap().wait(LIMIT), Ok(4096));
    pair.near.write(&source, 0, &other.descriptor(), 0, 4096).unwrap().wait(LIMIT).unwrap();
    assert_eq!(gpu.read_to_vec(buffer.address(), 4096).unwrap(), [0; 4096]);
    assert_eq!(pair.far.stats().lost_channels, [""; 0]);
}

/// Regression: each receive of the message's tag failed in turn, as if its memory had been deregistered.
#[test]
fn receives_of_a_peer_that_ends_beside_a_stalled_gpu_fail_with_the_peers_error() {
    let _only = crate::only_user_of_gpu(14);
    let pair = pair();
    let gpu = SimGpu::open(14).unwrap();
    let [on_gpu, host] = [pair.ends[0].alloc_sim(14, 4096).unwrap(), pair.ends[0].alloc_host(4096).unwrap()];
    let source = pair.ends[1].register(vec![7; 4096]).unwrap();
    gpu.set_stall(true);
    let receives = [(); 3].map(|()| pair.near.recv(1, &on_gpu, 0, 4096).unwrap());
    pair.far.send(1, &source, 0, 4096).unwrap().wait(LIMIT).unwrap();
    pair.ends[1].close(LIMIT).unwrap();
    for receive in receives {
        let ended = receive.wait(LIMIT);
        assert!(matches!(ended, Err(TransferError::PeerClosed { .. })), "{ended:?}");
    }
    // The message has arrived, so it can be received.
    assert_eq!(pair.near.recv(1, &host, 0, 4096).unwrap().wait(LIMIT), Ok(4096));
    gpu.set_stall(false);
}
