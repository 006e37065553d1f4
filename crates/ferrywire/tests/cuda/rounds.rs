//! Endpoints return all resources of GPUs and driver, and report failures on the way.

use crate::held::{Unended, ends};
use crate::{ALONE, gpu, is_alone, is_real, moves, of_stand_in, other_gpu, passes, still_moves};
use cudarc::driver::sys;
use ferrywire::{Endpoint, Peer, Region, TransferError};
use ferrywire_memory::cuda::{CudaError, CudaGpu, CudaStream, PinnedBuffer, pinned_bytes};
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

/// Far more than anything here takes.
const LONG: Duration = Duration::from_secs(60);
const BYTES: usize = 3 << 20;
/// Time that a close is given which could take for ever.
const LIMIT: Duration = Duration::from_secs(1);

/// Two endpoints over TCP, and the peer that one of them is to the other.
fn connected() -> (Endpoint, Endpoint, Peer) {
    let accepting = Endpoint::builder().listen("127.0.0.1:0".parse().unwrap()).channels(2).build().unwrap();
    let connecting = Endpoint::builder().channels(2).build().unwrap();
    let near = connecting.connect(accepting.listen_addresses()[0], LONG).unwrap();
    (accepting, connecting, near)
}

/// Two endpoints over TCP whose caller polls them, and the peers that they are to each other.
struct Polled {
    accepting: Endpoint,
    connecting: Endpoint,
    near: Peer,
    far: Peer,
}

impl Polled {
    fn connected() -> Polled {
        let builder = || Endpoint::builder().threads(0).channels(1);
        let accepting = builder().listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
        let connecting = builder().build().unwrap();
        let pending = connecting.start_connect(accepting.listen_addresses()[0]).unwrap();
        let (mut near, mut far) = (None, None);
        let start = Instant::now();
        while near.is_none() || far.is_none() {
            assert!(start.elapsed() < LONG, "they do not connect");
            accepting.progress();
            connecting.progress();
            near = near.or_else(|| pending.poll().map(Result::unwrap));
            far = far.or_else(|| accepting.try_accept().map(Result::unwrap));
        }
        Polled { near: near.unwrap(), far: far.unwrap(), accepting, connecting }
    }

    /// Polls both until `done` returns true.
    fn until(&self, done: &mut dyn FnMut() -> bool) {
        let start = Instant::now();
        while !done() {
            assert!(start.elapsed() < LONG, "it does not end");
            self.accepting.progress();
            self.connecting.progress();
        }
    }

    /// Closes both at once: each waits for the other.
    fn close(&self) {
        std::thread::scope(|scope| {
            scope.spawn(|| self.accepting.close(LONG).unwrap());
            self.connecting.close(LONG).unwrap();
        });
    }
}

/// Opens, registers, connects, transfers, closes.
fn round(salt: u8, other: u32) {
    let (accepting, connecting, near) = connected();
    let source = connecting.alloc_cuda(0, BYTES).unwrap();
    let target = accepting.alloc_cuda(other, BYTES).unwrap();
    moves(&near, &source, &target, salt);
    near.close(LONG).unwrap();
    connecting.close(LONG).unwrap();
    accepting.close(LONG).unwrap();
}

/// Resources that are held while no GPU is open.
#[derive(Debug, PartialEq)]
struct Held {
    /// Whether each GPU's primary context exists.
    contexts: Vec<bool>,
    pinned_bytes: u64,
}

fn held() -> Held {
    let is_active = |device: u32| {
        let (mut flags, mut active) = (0, 0);
        // SAFETY: room for two numbers; the driver is initialised.
        let code = unsafe { sys::cuDevicePrimaryCtxGetState(device as i32, &mut flags, &mut active) };
        assert_eq!(code as u32, 0, "{code:?}");
        active != 0
    };
    Held { contexts: (0..CudaGpu::count().unwrap()).map(is_active).collect(), pinned_bytes: pinned_bytes() }
}

/// Waits until no more is held than that: threads that were asked to end may take a moment.
fn until_held(before: &Held) {
    let start = Instant::now();
    while held() != *before {
        assert!(start.elapsed() < LONG, "{before:?}, then {:?}", held());
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn free_bytes() -> Vec<u64> {
    let free = |index| CudaGpu::open(index).unwrap().free_bytes().unwrap();
    (0..CudaGpu::count().unwrap()).map(free).collect()
}

/// In a process of its own, where nothing else takes resources.
#[test]
fn a_thousand_rounds_leave_nothing_behind() {
    let Some(gpu) = gpu() else { return };
    if !is_alone("rounds::a_thousand_rounds_leave_nothing_behind") {
        return;
    }
    let (real, other) = (is_real(&gpu), other_gpu(&gpu).index());
    let rounds = if real { 1000 } else { 60 };
    drop(gpu);
    // Contexts are made a few times only: that takes longer than all the rest.
    let some_rounds = |count: usize| {
        let _open = [CudaGpu::open(0).unwrap(), CudaGpu::open(other).unwrap()];
        (0..count).for_each(|salt| round(salt as u8, other));
    };
    some_rounds(3);
    let (before, free, open) = (held(), free_bytes(), descriptors());
    assert_eq!(before.contexts, vec![false; before.contexts.len()]);
    assert_eq!(before.pinned_bytes, 0);
    for _ in 0..10 {
        some_rounds(rounds / 10);
        until_held(&before);
    }
    // A real driver may keep a little for itself; a leak would be some of it for each round.
    let (bytes, files) = if real { (64 << 20, 8) } else { (0, 0) };
    let after = free_bytes();
    assert!(
        after.iter().zip(&free).all(|(after, before)| after + bytes >= *before),
        "{free:?}, then {after:?}"
    );
    // A process that starts may ask this one for its counters meanwhile, over a descriptor.
    let since = Instant::now();
    while descriptors() > open + files {
        assert!(since.elapsed() < LONG, "{open} descriptors, then {}", descriptors());
        std::thread::sleep(Duration::from_millis(1));
    }
    until_held(&before);
    println!("{rounds} rounds; {free:?} bytes were free, then {after:?}");
}

/// Connects a peer, and loses it in the middle of transfers to it. Its rings are given up with frames in them.
pub fn lose_a_peer(connecting: &Endpoint, accepting: &Endpoint, source: &Region, target: &Region) {
    let near = connecting.connect(accepting.listen_addresses()[0], LONG).unwrap();
    let far = accepting.accept(LONG).unwrap();
    let write = || near.write(source, 0, &target.descriptor(), 0, source.len());
    let start = Instant::now();
    std::thread::scope(|scope| {
        let mut writes: Vec<_> = (0..8).map(|_| write().unwrap()).collect();
        let _ = writes[0].wait(LONG);
        scope.spawn(|| far.close(Duration::ZERO));
        let mut ends = false;
        while !ends {
            assert!(start.elapsed() < LONG, "it does not go");
            writes.retain(|write| {
                let outcome = write.poll();
                ends |= outcome.as_ref().is_some_and(Result::is_err);
                outcome.is_none()
            });
            // There are always some under way.
            match write() {
                Ok(write) if writes.len() < 8 => writes.push(write),
                Ok(write) => ends |= write.wait(LONG).is_err(),
                Err(_) => ends = true,
            }
        }
        writes.iter().for_each(|write| drop(write.wait(LONG)));
    });
}

const LOST_BYTES: usize = 16 << 20;

/// Waits until no more is pinned than that: it may be a thread that frees.
fn until_pinned(bytes_max: u64) {
    let start = Instant::now();
    while pinned_bytes() > bytes_max {
        assert!(start.elapsed() < LONG / 4, "{} bytes are pinned", pinned_bytes());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A socket may still read what was lent to it, so such rings are not reused. They stayed pinned until the user dropped
/// something: those who lose a channel move data, and free nothing.
#[test]
fn rings_of_lost_peers_do_not_pile_up() {
    if gpu().is_none() || !is_alone("rounds::rings_of_lost_peers_do_not_pile_up") {
        return;
    }
    let (accepting, connecting, near) = connected();
    drop((accepting.accept(LONG).unwrap(), near));
    let source = connecting.alloc_cuda(0, LOST_BYTES).unwrap();
    let target = accepting.alloc_host(LOST_BYTES).unwrap();
    for _ in 0..40 {
        lose_a_peer(&connecting, &accepting, &source, &target);
    }
    println!("{} bytes are pinned", pinned_bytes());
    until_pinned(160 << 20);
}

/// Receive rings are never lent to a socket, so the next peer reuses them.
#[test]
fn rings_of_lost_peers_are_used_again() {
    if gpu().is_none() || !is_alone("rounds::rings_of_lost_peers_are_used_again") {
        return;
    }
    let (accepting, connecting, near) = connected();
    drop((accepting.accept(LONG).unwrap(), near));
    let source = connecting.alloc_host(LOST_BYTES).unwrap();
    let target = accepting.alloc_cuda(0, LOST_BYTES).unwrap();
    for _ in 0..12 {
        lose_a_peer(&connecting, &accepting, &source, &target);
    }
    println!("{} bytes are pinned", pinned_bytes());
    until_pinned(48 << 20);
}

/// Memory that a user has registered, and frees while it is being sent: an error of those transfers, and the
/// connection goes on. In a process of its own, since a driver could also follow the address.
#[test]
fn memory_that_its_owner_frees_during_transfers_ends_them_with_an_error() {
    let Some(gpu) = gpu() else { return };
    if !is_alone("rounds::memory_that_its_owner_frees_during_transfers_ends_them_with_an_error") {
        return;
    }
    const LARGE: usize = 64 << 20;
    let mut address = 0;
    // SAFETY: room for an address.
    let code = gpu.with_current(|| unsafe { sys::cuMemAlloc_v2(&mut address, LARGE) }).unwrap();
    assert_eq!(code as u32, 0, "{code:?}");
    let (accepting, connecting, near) = connected();
    // SAFETY: it is not: that is the test. Only copies of the GPU access the memory.
    let source = unsafe { connecting.register_raw(address as *mut u8, LARGE) }.unwrap();
    let target = accepting.alloc_host(LARGE).unwrap();
    let write = || near.write(&source, 0, &target.descriptor(), 0, LARGE as u64).unwrap();
    let writes: Vec<_> = (0..20).map(|_| write()).collect();
    assert_eq!(writes[0].wait(LONG), Ok(LARGE as u64));
    // SAFETY: freed once.
    let code = gpu.with_current(|| unsafe { sys::cuMemFree_v2(address) }).unwrap();
    assert_eq!(code as u32, 0, "{code:?}");
    let outcomes: Vec<_> = writes[1..].iter().map(|write| write.wait(LONG)).collect();
    let last = outcomes.last().unwrap();
    println!(
        "{} of {} ended well; then {last:?}",
        outcomes.iter().filter(|one| one.is_ok()).count(),
        outcomes.len()
    );
    let freed = |one: &_| matches!(one, Err(TransferError::Cuda(CudaError::Freed { .. })));
    assert!(freed(last), "{last:?}");
    assert!(outcomes.iter().all(|one| one.is_ok() || freed(one)), "{outcomes:?}");
    still_moves(&connecting, &near, &target, BYTES);
}

/// Short copies of several transfers are one batch, which used to fail as a whole, at either end.
#[test]
fn memory_that_its_owner_frees_costs_no_transfer_of_the_same_batch() {
    let Some(gpu) = gpu() else { return };
    if !is_alone("rounds::memory_that_its_owner_frees_costs_no_transfer_of_the_same_batch") {
        return;
    }
    const SHORT: usize = 3000;
    const ALL: usize = 9;
    let ends = Polled::connected();
    let Polled { accepting, connecting, near, far } = &ends;
    let allocated = || {
        let mut address = 0;
        // SAFETY: room for an address.
        let code = gpu.with_current(|| unsafe { sys::cuMemAlloc_v2(&mut address, SHORT) }).unwrap();
        assert_eq!(code as u32, 0, "{code:?}");
        // SAFETY: it is not: that is the test. Only copies of the GPU access the memory.
        (address, unsafe { accepting.register_raw(address as *mut u8, SHORT) }.unwrap())
    };
    let host = connecting.register(vec![7; SHORT]).unwrap();
    let back = connecting.alloc_host(ALL * SHORT).unwrap();
    for freed in [0, ALL / 2, ALL - 1] {
        let places: Vec<_> = (0..ALL).map(|_| allocated()).collect();
        // SAFETY: freed once.
        let code = gpu.with_current(|| unsafe { sys::cuMemFree_v2(places[freed].0) }).unwrap();
        assert_eq!(code as u32, 0, "{code:?}");
        for to_gpu in [true, false] {
            let write = |(index, (_, region)): (usize, &(u64, Region))| match to_gpu {
                true => near.write(&host, 0, &region.descriptor(), 0, SHORT as u64).unwrap(),
                false => {
                    far.write(region, 0, &back.descriptor(), (index * SHORT) as u64, SHORT as u64).unwrap()
                }
            };
            let writes: Vec<_> = places.iter().enumerate().map(write).collect();
            ends.until(&mut || writes.iter().all(|write| write.poll().is_some()));
            for (index, outcome) in writes.iter().map(|write| write.poll().unwrap()).enumerate() {
                match outcome {
                    Ok(moved) => assert_eq!((moved, index != freed), (SHORT as u64, true)),
                    Err(error) => assert!(index == freed, "{index}, {to_gpu}: {error}"),
                }
            }
        }
        let mut found = vec![0; ALL * SHORT];
        back.read_at(0, &mut found).unwrap();
        let moved = |index: usize| found[index * SHORT..][..SHORT].iter().all(|byte| *byte == 7);
        assert!((0..ALL).all(|index| index == freed || moved(index)));
        back.write_at(0, &vec![0; ALL * SHORT]).unwrap();
    }
    assert_eq!((near.stats().lost_channels, far.stats().lost_channels), (vec![], vec![]));
    ends.close();
}

/// Streams for transfers are shared. Copies of others that were enqueued later, and do not end, kept a transfer waiting whose
/// own copies had ended in part and failed in part.
#[test]
fn a_copier_that_fails_in_a_shared_stream_waits_for_its_own_copies_alone() {
    const TEST: &str = "rounds::a_copier_that_fails_in_a_shared_stream_waits_for_its_own_copies_alone";
    const LARGE: usize = 300_000;
    let Some(gpu) = gpu() else { return };
    if std::env::var_os(ALONE).is_none() {
        // Copies by copy engines alone: a kernel would wait beside the stream.
        return passes(TEST, &[("CUDA_LAUNCH_BLOCKING", "1")]);
    }
    let ends = Polled::connected();
    let Polled { accepting, connecting, near, far } = &ends;
    let source = connecting.register((0..LARGE).map(|at| (at % 251) as u8).collect::<Vec<u8>>()).unwrap();
    let target = accepting.alloc_cuda(0, LARGE).unwrap();
    let mut address = 0;
    // SAFETY: room for an address.
    let code = gpu.with_current(|| unsafe { sys::cuMemAlloc_v2(&mut address, LARGE) }).unwrap();
    assert_eq!(code as u32, 0, "{code:?}");
    // SAFETY: it is not: that is the test. Only copies of the GPU access the memory.
    let gone = unsafe { accepting.register_raw(address as *mut u8, LARGE) }.unwrap();
    // SAFETY: freed once.
    let code = gpu.with_current(|| unsafe { sys::cuMemFree_v2(address) }).unwrap();
    assert_eq!(code as u32, 0, "{code:?}");
    let write = |to: &Region| near.write(&source, 0, &to.descriptor(), 0, LARGE as u64).unwrap();
    let moves = || {
        let write = write(&target);
        ends.until(&mut || write.poll().is_some());
        assert_eq!(write.poll(), Some(Ok(LARGE as u64)));
    };
    moves();

    // Another user of the copier's stream, whose work waits for two flags. A new copier takes a stream without users.
    let mut free = Vec::new();
    let other = loop {
        match gpu.urgent_stream(true).unwrap() {
            stream if stream.has_others() => break stream,
            stream => free.push(stream),
        }
        assert!(free.len() < 64, "no stream is shared");
    };
    drop(free);
    let waited_for = Flags(gpu.pinned(2 * size_of::<u64>()).unwrap());
    let wait_for = |index: usize| {
        let flag = waited_for.0.address() + (index * size_of::<u64>()) as u64;
        // SAFETY: stream and flags live to the end of this test, where no work is left in the stream.
        unsafe { CudaStream::wait_flag_raw(&gpu, other.raw(), flag, 1) }.unwrap();
    };
    let received = || far.stats().channels.iter().map(|channel| channel.received_bytes).sum::<u64>();
    wait_for(0);
    let before = received();
    let (fine, fails) = (write(&target), write(&gone));
    ends.until(&mut || received() >= before + 2 * LARGE as u64);
    for _ in 0..1000 {
        accepting.progress();
        connecting.progress();
    }
    assert_eq!((fine.poll(), fails.poll()), (None, None), "copies behind others ended before them");
    wait_for(1);
    waited_for.raise(0);
    ends.until(&mut || fine.poll().is_some() && fails.poll().is_some());
    assert_eq!(fine.poll(), Some(Ok(LARGE as u64)));
    let error = fails.poll().unwrap().unwrap_err();
    assert!(error.to_string().contains("the peer's copy to GPU memory failed"), "{error}");
    waited_for.raise(1);
    target.write_at(0, &vec![0; LARGE]).unwrap();
    moves();
    let mut found = vec![0; LARGE];
    target.read_at(0, &mut found).unwrap();
    assert!(found.iter().enumerate().all(|(at, byte)| *byte == (at % 251) as u8));
    assert_eq!((near.stats().lost_channels, far.stats().lost_channels), (vec![], vec![]));
    other.finish().unwrap();
    ends.close();
}

/// The thread that lost the connection waited for the GPU, and moved nothing for other peers.
#[test]
fn a_gpu_that_does_not_finish_holds_up_no_other_peer_when_one_is_lost() {
    const TEST: &str = "rounds::a_gpu_that_does_not_finish_holds_up_no_other_peer_when_one_is_lost";
    let Some(gpu) = gpu() else { return };
    if is_real(&gpu) {
        return println!("SKIPPED: needs a stand-in, whose copies can be held");
    }
    if std::env::var_os(ALONE).is_none() {
        return passes(TEST, &[("CUDA_LAUNCH_BLOCKING", "1")]);
    }
    let hold = of_stand_in(c"stand_in_hold_copies").expect("the stand-in holds copies");
    // SAFETY: the function of this name has this type.
    let hold = unsafe { std::mem::transmute::<*mut c_void, extern "C" fn(c_int)>(hold) };
    let accepting =
        Endpoint::builder().listen("127.0.0.1:0".parse().unwrap()).channels(1).threads(1).build().unwrap();
    let [lost, stays] = [0, 1].map(|_| Endpoint::builder().channels(1).build().unwrap());
    let connect = |end: &Endpoint| {
        let near = end.connect(accepting.listen_addresses()[0], LONG).unwrap();
        (near, accepting.accept(LONG).unwrap())
    };
    let ((to_gpu, first), (to_host, _second)) = (connect(&lost), connect(&stays));
    let on_gpu = accepting.alloc_cuda(0, BYTES).unwrap();
    let on_host = accepting.alloc_host(BYTES).unwrap();
    let [source, other] = [&lost, &stays].map(|end| end.register(vec![3; BYTES]).unwrap());
    let write = |near: &Peer, from: &Region, to: &Region| {
        near.write(from, 0, &to.descriptor(), 0, BYTES as u64).unwrap()
    };
    assert_eq!(write(&to_gpu, &source, &on_gpu).wait(LONG), Ok(BYTES as u64));
    /// Lets the copies go on, also where the test fails: endpoints with held copies do not end.
    struct Release(extern "C" fn(c_int));
    impl Drop for Release {
        fn drop(&mut self) {
            self.0(0);
        }
    }
    let release = Release(hold);
    hold(1);
    let held = write(&to_gpu, &source, &on_gpu);
    let received = || first.stats().channels.iter().map(|channel| channel.received_bytes).sum::<u64>();
    let start = Instant::now();
    while received() < BYTES as u64 + BYTES as u64 / 4 {
        assert!(start.elapsed() < LONG, "nothing is received");
        std::thread::sleep(Duration::from_millis(1));
    }
    let _ = lost.close(Duration::ZERO);
    assert!(held.wait(LONG).is_err());
    while first.error().is_none() {
        assert!(start.elapsed() < LONG, "the loss is not noticed");
        std::thread::sleep(Duration::from_millis(1));
    }
    for _ in 0..3 {
        assert_eq!(write(&to_host, &other, &on_host).wait(LONG), Ok(BYTES as u64));
    }
    drop(release);
    assert_eq!(stays.close(LONG), Ok(()));
    assert_eq!(accepting.close(LONG), Ok(()));
}

/// Regression: the copier of short messages stayed until the last reference to its peer was dropped, and then waited for its
/// stream, in which there may be copies of other peers that do not end.
#[test]
fn a_peer_with_short_messages_goes_though_copies_of_other_peers_do_not_end() {
    const TEST: &str = "rounds::a_peer_with_short_messages_goes_though_copies_of_other_peers_do_not_end";
    const SHORT: u64 = 1000;
    /// More than there are streams for copies to a GPU.
    const STREAMS: usize = 64;
    let Some(gpu) = gpu() else { return };
    if std::env::var_os(ALONE).is_none() {
        // Copies by copy engines alone: a kernel would wait beside the stream.
        return passes(TEST, &[("CUDA_LAUNCH_BLOCKING", "1")]);
    }
    let (accepting, connecting, near) = connected();
    let far = accepting.accept(LONG).unwrap();
    let source = connecting.register(vec![3; SHORT as usize]).unwrap();
    let target = accepting.alloc_cuda(0, SHORT as usize).unwrap();
    for tag in 0..8 {
        let sent = near.send(tag, &source, 0, SHORT).unwrap();
        assert_eq!(far.recv(tag, &target, 0, SHORT).unwrap().wait(LONG), Ok(SHORT));
        assert_eq!(sent.wait(LONG), Ok(SHORT));
    }
    // The work of others, in all streams that peers share.
    let streams: Vec<_> = (0..STREAMS).map(|_| gpu.urgent_stream(true).unwrap()).collect();
    let flag = Flags(gpu.pinned(size_of::<u64>()).unwrap());
    for stream in &streams {
        // SAFETY: stream and flag live until the work has ended.
        unsafe { CudaStream::wait_flag_raw(&gpu, stream.raw(), flag.0.address(), 1) }.unwrap();
    }
    drop(near);
    assert_eq!(connecting.close(LONG), Ok(()));
    let start = Instant::now();
    while far.error().is_none() {
        assert!(start.elapsed() < LONG, "the peer does not go");
        std::thread::sleep(Duration::from_millis(1));
    }
    let dropped = ends(move || drop(far));
    // The thread that accepts peers may have been the last one with a reference.
    let next = Endpoint::builder().channels(1).build().unwrap();
    let connected = next.connect(accepting.listen_addresses()[0], LONG / 4).map(drop);
    flag.raise(0);
    streams.iter().for_each(|stream| stream.finish().unwrap());
    assert_eq!((dropped, connected), (Some(()), Ok(())));
}

/// Numbers in pinned memory for which streams wait. All are raised also where a test fails: what waits for them would not end.
struct Flags(PinnedBuffer);

impl Flags {
    fn raise(&self, index: usize) {
        // SAFETY: an aligned number of the buffer, to which only these stores write.
        unsafe { AtomicU64::from_ptr(self.0.as_ptr().cast::<u64>().add(index)) }.store(1, SeqCst);
    }
}

impl Drop for Flags {
    fn drop(&mut self) {
        (0..self.0.len() / size_of::<u64>()).for_each(|index| self.raise(index));
    }
}

/// Regression: a close freed the rings of its peers itself, and a driver frees only when all work of the GPU is done.
#[test]
fn a_close_with_a_limit_returns_though_work_of_a_gpu_does_not_end() {
    const TEST: &str = "rounds::a_close_with_a_limit_returns_though_work_of_a_gpu_does_not_end";
    let Some(gpu) = gpu() else { return };
    if !is_alone(TEST) {
        return;
    }
    let (accepting, connecting, near) = connected();
    let source = connecting.alloc_cuda(0, BYTES).unwrap();
    let target = accepting.alloc_cuda(0, BYTES).unwrap();
    moves(&near, &source, &target, 1);
    drop(near);
    let kernel = Unended::new(&gpu);
    let outcome = ends(move || {
        // A close that is late fails, and does not wait for the GPU either.
        [connecting, accepting].map(|end| (end.close(LIMIT).is_ok(), end))
    });
    let returned = outcome.is_some();
    drop(kernel);
    drop((outcome, source, target));
    assert!(returned, "it waited for the GPU");
    until_pinned(0);
}

/// Beside the rings there are the lists and marks of copiers, which were left out.
#[test]
fn all_that_is_pinned_for_staging_is_counted() {
    if gpu().is_none() || !is_alone("rounds::all_that_is_pinned_for_staging_is_counted") {
        return;
    }
    let (accepting, connecting, near) = connected();
    let far = accepting.accept(LONG).unwrap();
    let source = connecting.alloc_cuda(0, BYTES).unwrap();
    let target = accepting.alloc_cuda(0, BYTES).unwrap();
    let before = pinned_bytes();
    moves(&near, &source, &target, 1);
    let staged = |peer: &Peer| -> u64 {
        let channels = peer.stats().channels.into_iter();
        channels.filter_map(|channel| channel.staging).map(|staging| staging.pinned_bytes).sum()
    };
    let (counted, pinned) = (staged(&near) + staged(&far), pinned_bytes() - before);
    println!("{counted} bytes are counted, of {pinned}");
    assert_eq!(counted, pinned);
}
