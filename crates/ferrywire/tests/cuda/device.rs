//! Memory, copies, flags and pointers, on a GPU or on what stands in for one.

use crate::{gpu, is_alone, is_real, other_gpu};
use cudarc::driver::sys;
use ferrywire::{Block, BlockList, Endpoint, MemoryLocation, RegisterError, StreamEvent};
use ferrywire_memory::GpuCopy;
use ferrywire_memory::cuda::{
    CudaError, CudaEvent, CudaGpu, CudaPattern, CudaStream, PinnedBuffer, dmabuf_fd, driver_version, pointer,
};
use ferrywire_memory::unpack::{Kernels, PatternParameters};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Far more than anything here takes.
const LONG: Duration = Duration::from_secs(60);

fn current_context() -> usize {
    let mut context = std::ptr::null_mut();
    // SAFETY: room for a pointer; the driver is initialised.
    assert_eq!(unsafe { sys::cuCtxGetCurrent(&mut context) } as u32, 0);
    context as usize
}

fn bytes_of(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut step = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    (0..len).map(|_| step()).collect()
}

fn of_pinned(buffer: &PinnedBuffer) -> Vec<u8> {
    // SAFETY: memory of the buffer, with no work of a GPU under way.
    unsafe { std::slice::from_raw_parts(buffer.as_ptr(), buffer.len()) }.to_vec()
}

#[test]
fn a_gpu_says_what_it_is_and_is_one_for_all() {
    let Some(gpu) = gpu() else { return };
    println!(
        "{gpu:?} {} numa {:?} {} bytes, {} multiprocessors, driver {:?}",
        gpu.uuid(),
        gpu.numa_node(),
        gpu.total_bytes(),
        gpu.multiprocessors(),
        driver_version()
    );
    assert!(std::sync::Arc::ptr_eq(&gpu, &CudaGpu::open(0).unwrap()));
    assert!(!gpu.name().is_empty() && gpu.uuid().len() == 40 && gpu.total_bytes() > 0);
    assert!(gpu.pci_address().ends_with(".0") && gpu.pci_address() == gpu.pci_address().to_lowercase());
    let count = CudaGpu::count().unwrap();
    assert_eq!(CudaGpu::open(count).unwrap_err(), CudaError::NoSuchGpu { index: count, count });
    assert!(matches!(CudaGpu::open(u32::MAX), Err(CudaError::NoSuchGpu { index: u32::MAX, .. })));
    assert!(CudaGpu::opened(count).is_none() && CudaGpu::opened(u32::MAX).is_none());
}

#[test]
fn every_call_leaves_the_threads_context_as_it_was() {
    let Some(gpu) = gpu() else { return };
    let other = other_gpu(&gpu);
    assert_eq!(current_context(), 0, "a fresh thread has none");
    let work = || {
        let (buffer, pinned, stream) =
            (gpu.alloc(100, 1).unwrap(), gpu.pinned(100).unwrap(), gpu.stream().unwrap());
        let event = CudaEvent::new(&gpu).unwrap();
        // SAFETY: both live until the wait below is over.
        unsafe { stream.copy(buffer.address(), pinned.address(), 100) }.unwrap();
        stream.record(&event).unwrap();
        stream.wait_event(&event).unwrap();
        event.wait(LONG).unwrap();
        stream.wait(LONG).unwrap();
        gpu.read_to_vec(buffer.address(), 100).unwrap();
    };
    work();
    assert_eq!(current_context(), 0);
    let in_other = || {
        let context = current_context();
        assert_ne!(context, 0);
        work();
        assert_eq!(current_context(), context);
        gpu.with_current(work).unwrap();
        assert_eq!(current_context(), context);
        let panics = || gpu.with_current(|| panic!("on purpose"));
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).unwrap_err();
        assert_eq!(current_context(), context);
    };
    other.with_current(in_other).unwrap();
    assert_eq!(current_context(), 0);
}

#[test]
fn memory_is_zeroed_aligned_and_freed() {
    let Some(gpu) = gpu() else { return };
    for (bytes, align) in
        [(0, 1), (1, 1), (5000, 4096), (4097, 64 << 10), (100_000, 64 << 10), (3 << 20, 2 << 20)]
    {
        let buffer = gpu.alloc(bytes, align).unwrap();
        assert_eq!((buffer.len(), buffer.address() % align.max(4096) as u64), (bytes, 0));
        // The last page belongs to the buffer alone, too.
        let found = pointer::of(buffer.address()).unwrap();
        let end = buffer.address() + bytes.next_multiple_of(4096) as u64;
        assert!(end <= found.base + found.bytes, "{bytes} bytes aligned to {align}: {found:x?}");
        assert!(gpu.read_to_vec(buffer.address(), bytes).unwrap().iter().all(|byte| *byte == 0));
        gpu.write_from_slice(buffer.address(), &bytes_of(7, bytes)).unwrap();
        assert_eq!(gpu.read_to_vec(buffer.address(), bytes).unwrap(), bytes_of(7, bytes));
    }
    assert_eq!(gpu.alloc(10, 48).unwrap_err(), CudaError::Alignment { align: 48 });
}

#[test]
fn copies_touch_memory_that_a_gpu_reaches_and_no_other() {
    let Some(gpu) = gpu() else { return };
    let mut host = vec![7_u8; 4096];
    let address = host.as_mut_ptr() as u64;
    let refused = CudaError::OutOfReach { address, bytes: 4096 };
    assert_eq!(gpu.write_from_slice(address, &[1; 4096]), Err(refused.clone()));
    assert_eq!(gpu.read_to_vec(address, 4096), Err(refused));
    assert!(gpu.read_to_vec(u64::MAX - 10, 20).is_err());
    assert_eq!(host, [7; 4096]);
    let pinned = gpu.pinned(4096).unwrap();
    gpu.write_from_slice(pinned.address() + 4000, &[9; 96]).unwrap();
    assert_eq!(gpu.read_to_vec(pinned.address() + 3999, 2).unwrap(), [0, 9]);
    assert!(gpu.write_from_slice(pinned.address() + 4000, &[9; 97]).is_err());
}

#[test]
fn too_much_memory_is_refused_with_what_there_is() {
    let Some(gpu) = gpu() else { return };
    let bytes = gpu.total_bytes() as usize + (1 << 30);
    let error = gpu.alloc(bytes, 4096).unwrap_err();
    let CudaError::OutOfMemory { failure, free_bytes, total_bytes } = &error else { panic!("{error}") };
    assert!(failure.gpu == Some(0) && failure.bytes >= Some(bytes as u64), "{error}");
    assert!(free_bytes <= total_bytes && *total_bytes == gpu.total_bytes(), "{error}");
    assert!(error.to_string().starts_with("cuMemAlloc on CUDA GPU 0 ("), "{error}");
    let end = Endpoint::builder().build().unwrap();
    let error = end.alloc_cuda(0, bytes).unwrap_err();
    assert!(matches!(error, RegisterError::Cuda(CudaError::OutOfMemory { .. })), "{error}");
    // More than there are addresses: a driver that is asked for all memory may take the machine with it.
    let error = gpu.pinned(1 << 62).unwrap_err();
    assert!(matches!(error, CudaError::Pinned { bytes: 0x4000_0000_0000_0000, .. }), "{error}");
    assert!(error.to_string().contains("smaller or fewer rings"), "{error}");
    // Nothing is broken by that.
    assert_eq!(gpu.read_to_vec(gpu.alloc(10, 1).unwrap().address(), 10).unwrap(), [0; 10]);
}

#[test]
fn copies_go_between_all_kinds_of_memory() {
    let Some(gpu) = gpu() else { return };
    let other = other_gpu(&gpu);
    const BYTES: usize = 300_001;
    let (first, second) = (gpu.alloc(BYTES, 4096).unwrap(), other.alloc(BYTES, 4096).unwrap());
    let (up, down) = (gpu.pinned(BYTES).unwrap(), other.pinned(BYTES).unwrap());
    let bytes = bytes_of(3, BYTES);
    // SAFETY: fresh memory of the buffer.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), up.as_ptr(), BYTES) };
    let stream = gpu.stream().unwrap();
    // SAFETY: all of it lives until the stream is done.
    unsafe {
        stream.copy(up.address(), first.address(), BYTES).unwrap();
        stream.copy(first.address(), second.address(), BYTES).unwrap();
        stream.copy(second.address(), down.address(), BYTES).unwrap();
        stream.copy(1, 1, 0).unwrap();
    }
    stream.wait(LONG).unwrap();
    assert!(stream.query().unwrap());
    assert_eq!(of_pinned(&down), bytes);
}

#[test]
fn a_batch_copies_every_piece_and_nothing_else() {
    let Some(gpu) = gpu() else { return };
    const PIECE: usize = 512;
    const PIECES: usize = 2000;
    let source = gpu.pinned(PIECE * PIECES).unwrap();
    let target = gpu.alloc(PIECE * PIECES, 4096).unwrap();
    let bytes = bytes_of(5, PIECE * PIECES);
    // SAFETY: fresh memory of the buffer.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), source.as_ptr(), bytes.len()) };
    let mut expected = vec![0; PIECE * PIECES];
    let order = bytes_of(6, 2 * PIECES);
    let copies: Vec<GpuCopy> = (0..PIECES)
        .map(|index| {
            // 7 is prime to the number of pieces; each has a ragged begin and end, some have nothing.
            let (from, to) = (index * 7 % PIECES * PIECE, index * PIECE);
            let (skip, len) = (order[index] as usize % 64, order[PIECES + index] as usize);
            expected[to + skip..][..len].copy_from_slice(&bytes[from + skip..][..len]);
            GpuCopy {
                source: source.address() + (from + skip) as u64,
                target: target.address() + (to + skip) as u64,
                bytes: len,
            }
        })
        .collect();
    let stream = gpu.stream().unwrap();
    // SAFETY: all of it lives until the stream is done, and pieces are apart.
    let calls = unsafe { stream.copy_batch(&copies) }.unwrap();
    stream.wait(LONG).unwrap();
    assert!(gpu.read_to_vec(target.address(), expected.len()).unwrap() == expected);
    let batches = driver_version().unwrap() >= 12080;
    println!("{PIECES} pieces in {calls} calls");
    assert!(if batches { calls == 1 } else { calls > PIECES / 2 && calls <= PIECES }, "{calls}");
    // SAFETY: nothing is named.
    assert_eq!(unsafe { stream.copy_batch(&[GpuCopy::default(); 9]) }.unwrap(), 0);
}

/// Work in the stream of another GPU passed with the stand-in, and failed with a driver.
#[test]
fn a_stream_of_another_gpu_takes_copies_and_refuses_fills_records_and_kernels() {
    const BYTES: usize = 4096;
    const INVALID_HANDLE: u32 = 400;
    let Some(gpu) = gpu() else { return };
    let other = other_gpu(&gpu);
    if other.index() == gpu.index() {
        return;
    }
    let code = |refused: Result<(), CudaError>| match refused {
        Err(CudaError::Call { failure }) => failure.code,
        other => panic!("{other:?}"),
    };
    let (memory, pinned) = (gpu.alloc(BYTES, 4096).unwrap(), gpu.pinned(BYTES).unwrap());
    let (stream, event) = (other.stream().unwrap(), CudaEvent::new(&gpu).unwrap());
    // SAFETY: all of it lives until the stream is done.
    unsafe {
        stream.copy(pinned.address(), memory.address(), BYTES).unwrap();
        stream.write_flag_u64(pinned.address(), 7).unwrap();
        assert_eq!(code(stream.fill(memory.address(), 1, BYTES)), 1);
    }
    assert_eq!(code(stream.record(&event)), INVALID_HANDLE);
    assert_eq!(event.query(), Ok(true));
    stream.wait_event(&event).unwrap();
    if let Ok(kernels) = Kernels::of(&gpu) {
        let pattern = PatternParameters {
            key: 0,
            step: 0,
            flip: 0,
            offset: 0,
            address: memory.address(),
            bytes: BYTES as u64,
        };
        // SAFETY: the memory lives until the stream is done.
        assert_eq!(code(unsafe { kernels.fill(&stream, pattern) }), INVALID_HANDLE);
    }
    stream.wait(LONG).unwrap();
    assert_eq!(of_pinned(&pinned)[..8], 7u64.to_ne_bytes());
}

#[test]
fn a_flag_is_written_after_what_was_copied_before_it() {
    let Some(gpu) = gpu() else { return };
    const BYTES: usize = 8 << 20;
    let (source, target) = (gpu.alloc(BYTES, 4096).unwrap(), gpu.pinned(BYTES).unwrap());
    let flags = gpu.pinned(4096).unwrap();
    // SAFETY: zeroed memory of the buffer, aligned to a page, that lives as long as the references.
    let (short, long) =
        unsafe { (&*flags.as_ptr().cast::<AtomicU32>(), &*flags.as_ptr().add(64).cast::<AtomicU64>()) };
    let stream = gpu.stream().unwrap();
    for round in 1..=20u8 {
        // SAFETY: the source is idle: the loop waits for the flags.
        unsafe { gpu.fill(source.address(), round, BYTES) }.unwrap();
        // SAFETY: all of it lives until the flags are seen.
        unsafe {
            stream.copy(source.address(), target.address(), BYTES).unwrap();
            stream.write_flag_u32(flags.address(), round.into()).unwrap();
            stream.write_flag_u64(flags.address() + 64, u64::from(round) << 40).unwrap();
        }
        let start = std::time::Instant::now();
        while short.load(Ordering::Acquire) != u32::from(round) {
            assert!(start.elapsed() < LONG, "the flag never came");
            std::hint::spin_loop();
        }
        assert!(of_pinned(&target).iter().all(|byte| *byte == round), "round {round}");
        stream.wait(LONG).unwrap();
        assert_eq!(long.load(Ordering::Acquire), u64::from(round) << 40);
    }
}

#[test]
fn an_address_gives_its_device() {
    let Some(gpu) = gpu() else { return };
    let other = other_gpu(&gpu);
    for gpu in [&gpu, &other] {
        let buffer = gpu.alloc(100_000, 4096).unwrap();
        for at in [0, 1, 99_999] {
            let found = pointer::of(buffer.address() + at).unwrap();
            assert_eq!((found.gpu, found.kind), (gpu.index(), pointer::Kind::Device));
            assert!(found.base <= buffer.address());
            assert!(found.base + found.bytes >= buffer.address() + 100_000);
        }
        assert_eq!(pointer::gpu_of_range(buffer.address(), 100_000), Ok(Some(gpu.index())));
        let found = pointer::of(buffer.address()).unwrap();
        let end = found.base + found.bytes;
        if pointer::of(end).is_none() {
            let outside = CudaError::OutOfRange { address: end - 10, bytes: 11, end };
            assert_eq!(pointer::gpu_of_range(end - 10, 11), Err(outside));
        }
    }
    let (pinned, plain) = (gpu.pinned(4096).unwrap(), [0u8; 16]);
    assert_eq!(pointer::of(pinned.address()), None);
    assert_eq!(pointer::of(plain.as_ptr() as u64), None);
    assert_eq!(pointer::of(0), None);
    assert_eq!(pointer::gpu_of_range(plain.as_ptr() as u64, u64::MAX), Ok(None));
    // No context is current on this thread.
    for at in [0, 1, 4095] {
        let (base, bytes) = pointer::pinned(&gpu, pinned.address() + at).unwrap();
        assert!(base == pinned.address() && bytes >= 4096, "{bytes} at {base:#x}");
    }
    assert_eq!(pointer::pinned(&gpu, plain.as_ptr() as u64), None);
    assert_eq!(pointer::pinned(&gpu, gpu.alloc(1, 1).unwrap().address()), None);
}

#[test]
fn regions_of_gpu_memory_are_read_and_written_through_the_gpu() {
    let Some(gpu) = gpu() else { return };
    let end = Endpoint::builder().build().unwrap();
    let region = end.alloc_cuda(0, 100_000).unwrap();
    assert_eq!((region.location(), region.len()), (MemoryLocation::Cuda(0), 100_000));
    assert_eq!(region.location().to_string(), "memory of CUDA GPU 0");
    assert_eq!(region.as_ptr() as u64 % (64 << 10), 0);
    region.write_at(99_990, &[7; 10]).unwrap();
    let mut seen = [1; 12];
    region.read_at(99_988, &mut seen).unwrap();
    assert_eq!(seen, [0, 0, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7]);
    assert!(matches!(region.write_at(99_991, &[7; 10]), Err(RegisterError::OutOfRegion { .. })));
    let reported = ferrywire::RemoteRegion::from_bytes(&region.descriptor().to_bytes()).unwrap();
    assert_eq!((reported, reported.location()), (region.descriptor(), MemoryLocation::Cuda(0)));
    // A part of an allocation of another library.
    let users = gpu.alloc(10_000, 4096).unwrap();
    // SAFETY: the buffer outlives the region.
    let part = unsafe { end.register_raw(users.as_ptr().wrapping_add(512), 1000) }.unwrap();
    assert_eq!(part.location(), MemoryLocation::Cuda(0));
    part.write_at(0, &[9; 1000]).unwrap();
    assert_eq!(gpu.read_to_vec(users.address() + 511, 2).unwrap(), [0, 9]);
    assert_eq!(gpu.read_to_vec(users.address() + 1511, 2).unwrap(), [9, 0]);
    // SAFETY: refused.
    let refused = unsafe { end.register_raw(users.as_ptr(), 1 << 45) };
    assert!(matches!(refused, Err(RegisterError::Cuda(CudaError::OutOfRange { .. }))), "{refused:?}");
    part.deregister().unwrap();
    region.deregister().unwrap();
}

#[test]
fn a_users_region_keeps_its_gpu_open() {
    let Some(gpu) = gpu() else { return };
    let last = CudaGpu::open(CudaGpu::count().unwrap() - 1).unwrap();
    if last.index() == gpu.index() {
        return println!("SKIPPED: needs two CUDA devices");
    }
    let end = Endpoint::builder().build().unwrap();
    let buffer = last.alloc(4096, 4096).unwrap();
    // SAFETY: the buffer outlives the region.
    let region = unsafe { end.register_raw(buffer.as_ptr(), 4096) }.unwrap();
    drop(last);
    region.write_at(0, b"still there").unwrap();
    let mut seen = [0; 11];
    region.read_at(0, &mut seen).unwrap();
    assert_eq!(&seen, b"still there");
    region.deregister().unwrap();
}

#[test]
fn a_dma_buf_is_made_or_the_reason_is_reported() {
    let Some(gpu) = gpu() else { return };
    let buffer = gpu.alloc(2 << 20, 2 << 20).unwrap();
    for made in [dmabuf_fd(buffer.address(), 2 << 20), gpu.alloc(5000, 4096).unwrap().dmabuf_fd()] {
        match made {
            Ok(fd) => println!("a dma-buf: {fd:?}"),
            // The errors are those of driver and kernel, not of a missing current GPU or of partial pages.
            Err(CudaError::DmaBuf { why, .. }) if !why.contains("(201)") && !why.contains("multiples") => {
                println!("{why}")
            }
            Err(error) => panic!("{error}"),
        }
    }
    let why = |address, bytes| dmabuf_fd(address, bytes).unwrap_err().to_string();
    assert!(why(buffer.address() + 1, 4096).contains("multiples of"));
    assert!(why(buffer.address(), 100).contains("multiples of"));
    assert!(why(buffer.address(), 0).contains("multiples of"));
    assert!(why(&raw const gpu as u64, 4096).contains("not in GPU memory"));
}

#[test]
fn resources_of_a_gpu_are_freed() {
    let Some(gpu) = gpu() else { return };
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let round = || {
        let (_buffer, _pinned) = (gpu.alloc(1 << 20, 64 << 10).unwrap(), gpu.pinned(1 << 20).unwrap());
        let (_stream, _event) = (gpu.stream().unwrap(), CudaEvent::new(&gpu).unwrap());
    };
    (0..10).for_each(|_| round());
    let before = descriptors();
    (0..200).for_each(|_| round());
    // Other tests open some too: a leak would leave one per round.
    assert!(descriptors() < before + 100, "{before} descriptors, then {}", descriptors());
}

/// Through rings of pinned memory at both ends, or at one.
#[test]
fn memory_of_gpus_moves_over_tcp() {
    let Some(gpu) = gpu() else { return };
    const BYTES: usize = 5 << 20;
    let accepting = Endpoint::builder().listen("127.0.0.1:0".parse().unwrap()).channels(2).build().unwrap();
    let connecting = Endpoint::builder().channels(2).crc(true).build().unwrap();
    let near = connecting.connect(accepting.listen_addresses()[0], LONG).unwrap();
    let far = accepting.accept(LONG).unwrap();
    let other = other_gpu(&gpu).index();
    for (round, (from, to)) in [(true, true), (true, false), (false, true)].into_iter().enumerate() {
        let register = |end: &Endpoint, gpu: Option<u32>| match gpu {
            Some(gpu) => end.alloc_cuda(gpu, BYTES).unwrap(),
            None => end.alloc_host(BYTES).unwrap(),
        };
        let source = register(&connecting, from.then_some(0));
        let (target, back) =
            (register(&accepting, to.then_some(other)), connecting.alloc_host(BYTES).unwrap());
        let bytes = bytes_of(round as u64 + 1, BYTES);
        source.write_at(0, &bytes).unwrap();
        let (offset, len) = (13, BYTES as u64 - 100);
        let write = near.write_notify(&source, offset, &target.descriptor(), 7, len, b"here").unwrap();
        assert_eq!(far.wait_notification(LONG).unwrap(), b"here");
        let mut seen = vec![0; BYTES];
        target.read_at(0, &mut seen).unwrap();
        assert!(seen[7..][..len as usize] == bytes[13..][..len as usize], "when told of it");
        assert_eq!(write.wait(LONG), Ok(len));
        let read = near.read(&back, 0, &target.descriptor(), 7, len).unwrap();
        assert_eq!(read.wait(LONG), Ok(len));
        let mut seen = vec![0; BYTES];
        back.read_at(0, &mut seen).unwrap();
        assert!(seen[..len as usize] == bytes[13..][..len as usize], "read back");
        // A small message, which goes at once, and a large one, which waits.
        for bytes_sent in [1000, len] {
            let sent = near.send(3, &source, offset, bytes_sent).unwrap();
            let received = far.recv(3, &target, 0, len).unwrap();
            assert_eq!((received.wait(LONG), sent.wait(LONG)), (Ok(bytes_sent), Ok(bytes_sent)));
            let mut seen = vec![0; bytes_sent as usize];
            target.read_at(0, &mut seen).unwrap();
            assert!(seen == bytes[13..][..bytes_sent as usize], "a message");
        }
    }
    near.close(LONG).unwrap();
}

/// A copy that ran on from one allocation into the next was taken for one of memory that had been freed.
#[test]
fn copies_end_where_an_allocation_does_though_another_lies_beside_it() {
    let Some(gpu) = gpu() else { return };
    const BYTES: usize = 2 << 20;
    const PART: u64 = 200 << 10;
    let allocate = || {
        let mut address = 0;
        // SAFETY: room for an address.
        let code = gpu.with_current(|| unsafe { sys::cuMemAlloc_v2(&mut address, BYTES) }).unwrap();
        assert_eq!(code as u32, 0, "{code:?}");
        address
    };
    let mut allocations: Vec<u64> = Vec::new();
    let pair = loop {
        assert!(allocations.len() < 64, "none of {allocations:x?} lies beside another");
        allocations.push(allocate());
        allocations.sort_unstable();
        let beside = |pair: &&[u64]| pair[0] + BYTES as u64 == pair[1];
        if let Some(pair) = allocations.windows(2).find(beside) {
            break [pair[0], pair[1]];
        }
    };
    let accepting = Endpoint::builder().listen("127.0.0.1:0".parse().unwrap()).channels(1).build().unwrap();
    let connecting = Endpoint::builder().channels(1).build().unwrap();
    let near = connecting.connect(accepting.listen_addresses()[0], LONG).unwrap();
    let _far = accepting.accept(LONG).unwrap();
    let region = accepting.alloc_host(2 * PART as usize).unwrap();
    let there = region.descriptor();
    // SAFETY: freed below, behind the end of both regions.
    let [low, high] = pair.map(|base| unsafe { connecting.register_raw(base as *mut u8, BYTES) }.unwrap());
    let tail = BYTES as u64 - PART;
    for round in 0..20 {
        let bytes = bytes_of(round, 2 * PART as usize);
        let (first, second) = bytes.split_at(PART as usize);
        low.write_at(tail, first).unwrap();
        high.write_at(0, second).unwrap();
        let writes = [near.write(&low, tail, &there, 0, PART), near.write(&high, 0, &there, PART, PART)];
        writes.into_iter().for_each(|write| assert_eq!(write.unwrap().wait(LONG), Ok(PART)));
        let mut seen = vec![0; bytes.len()];
        region.read_at(0, &mut seen).unwrap();
        assert!(seen == bytes, "written, round {round}");
        seen.reverse();
        region.write_at(0, &seen).unwrap();
        let reads = [near.read(&low, tail, &there, 0, PART), near.read(&high, 0, &there, PART, PART)];
        reads.into_iter().for_each(|read| assert_eq!(read.unwrap().wait(LONG), Ok(PART)));
        let mut back = vec![0; bytes.len()];
        low.read_at(tail, &mut back[..PART as usize]).unwrap();
        high.read_at(0, &mut back[PART as usize..]).unwrap();
        assert!(back == seen, "read, round {round}");
    }
    low.deregister().unwrap();
    high.deregister().unwrap();
    for address in allocations {
        // SAFETY: freed once.
        let code = gpu.with_current(|| unsafe { sys::cuMemFree_v2(address) }).unwrap();
        assert_eq!(code as u32, 0, "{code:?}");
    }
}

/// Many runs of all lengths at once, from places to other places, both ways.
#[test]
fn blocks_of_gpus_move_over_tcp() {
    let Some(gpu) = gpu() else { return };
    const BLOCKS: usize = 3000;
    const SPAN: usize = 5000;
    let accepting = Endpoint::builder().listen("127.0.0.1:0".parse().unwrap()).channels(2).build().unwrap();
    let connecting = Endpoint::builder().channels(2).build().unwrap();
    let near = connecting.connect(accepting.listen_addresses()[0], LONG).unwrap();
    let _far = accepting.accept(LONG).unwrap();
    let bytes = bytes_of(1, BLOCKS * SPAN);
    let source = connecting.alloc_cuda(0, BLOCKS * SPAN).unwrap();
    let target = accepting.alloc_cuda(other_gpu(&gpu).index(), BLOCKS * SPAN).unwrap();
    source.write_at(0, &bytes).unwrap();
    let lengths = bytes_of(2, 2 * BLOCKS);
    let blocks: Vec<Block> = (0..BLOCKS)
        .map(|k| {
            let at = |step: usize, skew: u8| (k * step % BLOCKS * SPAN + usize::from(skew) % 16) as u64;
            let bytes = match lengths[2 * k] % 4 {
                0 => u64::from(lengths[2 * k + 1] % 40),
                1 => 4096,
                _ => u64::from(lengths[2 * k + 1]) * 19,
            };
            // Steps that share no divisor with their number: every place once.
            let (local_offset, remote_offset) = (at(7, lengths[2 * k]), at(1013, lengths[2 * k + 1]));
            Block { local_offset, remote_offset, bytes }
        })
        .collect();
    let mut expected = vec![0; BLOCKS * SPAN];
    for Block { local_offset, remote_offset, bytes: len } in &blocks {
        let [from, to, len] = [*local_offset, *remote_offset, *len].map(|number| number as usize);
        expected[to..][..len].copy_from_slice(&bytes[from..][..len]);
    }
    let total: u64 = blocks.iter().map(|block| block.bytes).sum();
    let list = BlockList::new(&source, &target.descriptor(), &blocks).unwrap();
    assert_eq!(near.write_blocks(&list, None, None).unwrap().wait(LONG), Ok(total));
    let mut found = vec![1; BLOCKS * SPAN];
    target.read_at(0, &mut found).unwrap();
    assert!(found == expected, "written");
    // Back to where they came from, in memory that knows nothing of them.
    let back = connecting.alloc_cuda(0, BLOCKS * SPAN).unwrap();
    let list = BlockList::new(&back, &target.descriptor(), &blocks).unwrap();
    assert_eq!(near.read_blocks(&list, None).unwrap().wait(LONG), Ok(total));
    let mut expected = vec![0; BLOCKS * SPAN];
    for Block { local_offset, bytes: len, .. } in &blocks {
        let (from, len) = (*local_offset as usize, *len as usize);
        expected[from..][..len].copy_from_slice(&bytes[from..][..len]);
    }
    back.read_at(0, &mut found).unwrap();
    assert!(found == expected, "read");
}

/// Behind a long kernel, and before a kernel that waits on the GPU; the host waits for neither.
#[test]
fn transfers_keep_their_place_in_the_work_of_streams() {
    let Some(gpu) = gpu() else { return };
    let Ok(slow) = CudaPattern::new(&gpu) else {
        return println!("SKIPPED: needs a CUDA device that runs kernels");
    };
    const BYTES: usize = 3 << 20;
    let len = BYTES as u64;
    let accepting = Endpoint::builder().listen("127.0.0.1:0".parse().unwrap()).channels(2).build().unwrap();
    let connecting = Endpoint::builder().channels(2).build().unwrap();
    let near = connecting.connect(accepting.listen_addresses()[0], LONG).unwrap();
    let far = accepting.accept(LONG).unwrap();
    let other = other_gpu(&gpu);
    let source = connecting.alloc_cuda(0, BYTES).unwrap();
    let [target, copy] = [(); 2].map(|()| accepting.alloc_cuda(other.index(), BYTES).unwrap());
    let (producer, consumer) = (gpu.stream().unwrap(), other.stream().unwrap());
    let real = is_real(&gpu);
    let received = far.recv(1, &target, 0, len).unwrap();
    // Before anything was staged: what is made for that must not wait for this stream.
    received.block_stream(&consumer).unwrap();
    // SAFETY: two regions of so many bytes, which live.
    unsafe { consumer.copy(target.as_ptr() as u64, copy.as_ptr() as u64, BYTES) }.unwrap();
    slow.hold_up(&producer, Duration::from_millis(300)).unwrap();
    // SAFETY: a region of so many bytes, which lives.
    unsafe { producer.fill(source.as_ptr() as u64, 7, BYTES) }.unwrap();
    let after = near.on_stream(StreamEvent::after_stream(&producer).unwrap());
    let begun = Instant::now();
    let sent = after.send(1, &source, 0, len).unwrap();
    let posted = begun.elapsed();
    assert!(!real || posted < Duration::from_millis(200), "the caller waited {posted:?}");
    assert_eq!((sent.wait(LONG), received.wait(LONG)), (Ok(len), Ok(len)));
    let mut found = vec![0; BYTES];
    target.read_at(0, &mut found).unwrap();
    assert!(found.iter().all(|byte| *byte == 7), "what the slow kernel wrote");
    assert!(begun.elapsed() >= Duration::from_millis(290), "it waited for the kernel");
    consumer.wait(LONG).unwrap();
    copy.read_at(0, &mut found).unwrap();
    assert!(found.iter().all(|byte| *byte == 7), "what the waiting stream found");
    if real {
        // A stream of another library, here the default one; and an idle stream.
        // SAFETY: null is the default stream.
        let ready = unsafe { StreamEvent::after_raw_stream(&gpu, std::ptr::null_mut()) }.unwrap();
        let write = near.on_stream(ready).write(&source, 0, &target.descriptor(), 0, len).unwrap();
        write.block_stream(&consumer).unwrap();
        consumer.wait(LONG).unwrap();
        assert_eq!(write.poll(), Some(Ok(len)));
    }
}

/// The drop used to wait for the stream, however long its work took.
#[test]
fn a_stream_whose_work_does_not_end_is_dropped_in_time() {
    let Some(gpu) = gpu() else { return };
    if !is_alone("device::a_stream_whose_work_does_not_end_is_dropped_in_time") {
        return;
    }
    let word = gpu.pinned(8).unwrap();
    let waiting = gpu.stream().unwrap();
    // SAFETY: 8 aligned bytes of pinned memory, which are freed only when all work of the GPU is done.
    unsafe { CudaStream::wait_flag_raw(&gpu, waiting.raw(), word.address(), 1) }.unwrap();
    let (tell, dropped) = std::sync::mpsc::channel();
    let dropping = std::thread::spawn(move || {
        drop(waiting);
        let _ = tell.send(());
    });
    let in_time = dropped.recv_timeout(LONG);
    // SAFETY: the word of before.
    unsafe { AtomicU64::from_ptr(word.as_ptr().cast()) }.store(1, Ordering::Release);
    dropping.join().unwrap();
    assert_eq!(in_time, Ok(()), "the drop waited for the stream");
}

/// The objects that a channel creates at its first staging must not wait for streams that wait for a transfer.
#[test]
fn rings_are_made_while_a_stream_waits() {
    let Some(gpu) = gpu() else { return };
    // Memory that other tests free waits for this stream, and delays the objects created here.
    if !is_alone("device::rings_are_made_while_a_stream_waits") {
        return;
    }
    // The objects are created in time, or only when the stream continues: then the test fails and names them.
    let _kernels = CudaPattern::new(&gpu);
    let word = gpu.pinned(8).unwrap();
    let waiting = gpu.stream().unwrap();
    // SAFETY: 8 aligned bytes of pinned memory, which live as long as the stream.
    unsafe { CudaStream::wait_flag_raw(&gpu, waiting.raw(), word.address(), 1) }.unwrap();
    let (tell, reported) = std::sync::mpsc::channel();
    let maker = gpu.clone();
    let making = std::thread::spawn(move || {
        let step = |what: &str, begun: Instant| tell.send((what.to_string(), begun.elapsed())).unwrap();
        let mut begun = Instant::now();
        let _stream = maker.stream().unwrap();
        step("a stream", std::mem::replace(&mut begun, Instant::now()));
        let _pinned = maker.pinned(2 << 20).unwrap();
        step("pinned memory", std::mem::replace(&mut begun, Instant::now()));
        let _event = CudaEvent::new(&maker).unwrap();
        step("an event", std::mem::replace(&mut begun, Instant::now()));
        let _memory = maker.alloc(4, 8).unwrap();
        step("device memory", std::mem::replace(&mut begun, Instant::now()));
        step("end", begun);
    });
    let mut made = Vec::new();
    while let Ok(step) = reported.recv_timeout(Duration::from_secs(5)) {
        if step.0 == "end" {
            break;
        }
        made.push(step);
    }
    // SAFETY: the word of before.
    unsafe { AtomicU64::from_ptr(word.as_ptr().cast()) }.store(1, Ordering::Release);
    waiting.wait(LONG).unwrap();
    making.join().unwrap();
    println!("made while a stream waited: {made:?}");
    assert_eq!(made.len(), 4, "the next thing waited for the stream: {made:?}");
}
