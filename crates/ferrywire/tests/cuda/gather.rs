//! The kernels on a GPU: gathers against the host's twin, patterns, and how fast they are.

use crate::recorded::{self, Recorded, message_is_gathered};
use crate::{gpu, is_alone, is_real};
use cudarc::driver::sys;
use ferrywire::MemoryLocation;
use ferrywire::limits::GATHER_LAUNCHES_MAX;
use ferrywire_memory::Error;
use ferrywire_memory::GpuCopy;
use ferrywire_memory::cuda::{
    CudaBuffer, CudaError, CudaEvent, CudaGpu, CudaPattern, CudaStream, PinnedBuffer, WordPattern,
};
use ferrywire_memory::unpack::{
    CudaQueue, DeviceUnpack, FRAGMENTS_PER_SLOT_MAX, Fragment, Gather, GatherDevice, GatherRun,
    METADATA_BYTES, UnpackMode,
};
use ferrywire_ncclnet::abi::DeviceHandle;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, RngCore, SeedableRng};
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant};

/// Far more than anything here takes.
const LONG: Duration = Duration::from_secs(60);
const GUARD: u8 = 0xA5;

/// A queue of GPU 0, or `None` and a word about it: the stand-in for the driver has no kernels.
pub fn queue() -> Option<(Arc<CudaGpu>, CudaQueue)> {
    let gpu = gpu()?;
    match CudaQueue::new(&gpu).and_then(|queue| queue.check_kernel().map(|()| queue)) {
        Ok(queue) => Some((gpu, queue)),
        Err(Error::Cuda(error)) if error.code() == Some(801) => {
            println!("SKIPPED: needs a CUDA device that runs kernels");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Waits for the newest mark.
fn finish(queue: &mut CudaQueue, marks: u64) {
    let start = Instant::now();
    while queue.reached().unwrap() < marks {
        assert!(start.elapsed() < LONG, "the mark was never reached");
        std::hint::spin_loop();
    }
}

fn write_fragments(table: &PinnedBuffer, fragments: &[Fragment]) {
    assert!(size_of_val(fragments) <= table.len());
    // SAFETY: room for them, aligned to a page; no kernel reads now.
    unsafe { std::ptr::copy_nonoverlapping(fragments.as_ptr(), table.as_ptr().cast(), fragments.len()) };
}

/// A length: some bytes, a packet, a page, many.
fn length(rng: &mut StdRng) -> u32 {
    match rng.random_range(0..8) {
        0 => rng.random_range(0..3),
        1 | 2 => rng.random_range(0..100),
        3 => 1448,
        4 => 4096,
        5 | 6 => rng.random_range(0..6000),
        _ => rng.random_range(0..60_000),
    }
}

#[test]
fn ten_thousand_random_lists_equal_the_hosts_twin() {
    let Some((gpu, mut queue)) = queue() else { return };
    const POOL: usize = 1 << 20;
    const TARGET: usize = 512 << 10;
    // A CPU that runs the kernels thread by thread takes long.
    let rounds: u64 = if is_real(&gpu) { 10_000 } else { 300 };
    let mut rng = StdRng::seed_from_u64(4);
    let mut pool_bytes = vec![0; POOL];
    rng.fill_bytes(&mut pool_bytes);
    let (pool, target) = (gpu.alloc(POOL, 4096).unwrap(), gpu.alloc(TARGET, 4096).unwrap());
    let (table, seen) = (gpu.pinned(64 << 10).unwrap(), gpu.pinned(TARGET).unwrap());
    gpu.write_from_slice(pool.address(), &pool_bytes).unwrap();
    let (mut expected, mut copied) = (vec![0u8; TARGET], 0);
    for round in 0..rounds {
        expected.fill(GUARD);
        // SAFETY: nothing else uses the memory.
        unsafe { gpu.fill(target.address(), GUARD, TARGET) }.unwrap();
        let (mut fragments, mut at) = (Vec::new(), rng.random_range(0..64));
        for _ in 0..rng.random_range(0..if round % 16 == 0 { 2000 } else { 64 }) {
            let bytes = length(&mut rng);
            if at + bytes as usize > TARGET {
                break;
            }
            let source = rng.random_range(0..=POOL as u32 - bytes);
            expected[at..][..bytes as usize]
                .copy_from_slice(&pool_bytes[source as usize..][..bytes as usize]);
            fragments.push(Fragment { source, bytes, target: at as u64 });
            copied += u64::from(bytes);
            at += bytes as usize + rng.random_range(0..40) * usize::from(rng.random_bool(0.5));
        }
        fragments.shuffle(&mut rng);
        write_fragments(&table, &fragments);
        // In one run or several, some of them empty, with bases that differ.
        let (mut runs, mut first) = (Vec::new(), 0);
        while first < fragments.len() || runs.is_empty() {
            let count = rng.random_range(0..=fragments.len() - first);
            let left = if runs.len() == 31 { fragments.len() - first } else { count };
            runs.push(GatherRun {
                fragments: table.address() + (first * size_of::<Fragment>()) as u64,
                count: left as u64,
                source: pool.address(),
                target: target.address(),
            });
            first += left;
        }
        queue.gather(&runs).unwrap();
        queue.mark().unwrap();
        finish(&mut queue, round + 1);
        let stream = gpu.stream().unwrap();
        // SAFETY: both live until the stream is done.
        unsafe { stream.copy(target.address(), seen.address(), TARGET) }.unwrap();
        stream.wait(LONG).unwrap();
        // SAFETY: memory of the buffer, with nothing under way.
        let seen = unsafe { std::slice::from_raw_parts(seen.as_ptr(), TARGET) };
        if *seen != expected {
            let wrong = (0..TARGET).find(|at| seen[*at] != expected[*at]).unwrap();
            panic!("round {round}: byte {wrong} is {:#x}, not {:#x}", seen[wrong], expected[wrong]);
        }
    }
    println!("{rounds} lists, {copied} bytes");
}

#[test]
fn fragments_scattered_by_a_kernel_are_gathered() {
    let Some((gpu, mut queue)) = queue() else { return };
    for text in recorded::LISTS {
        let recorded = Recorded::parse(text);
        let (content, bytes) = (recorded.pool(), recorded.message_bytes as usize);
        let (pool, target) = (gpu.alloc(content.len(), 4096).unwrap(), gpu.alloc(bytes + 1, 4096).unwrap());
        gpu.write_from_slice(pool.address(), &content).unwrap();
        let list = gpu.pinned(recorded.fragments.len() * size_of::<Fragment>()).unwrap();
        assert_eq!(list.address(), list.as_ptr() as u64);
        // To an odd address, as a message's own place may be.
        let to = (pool.address(), target.address() + 1);
        message_is_gathered(&mut queue, &recorded, list.as_ptr(), to);
        let mut gathered = vec![0; bytes];
        gpu.read_into_slice(target.address() + 1, &mut gathered).unwrap();
        assert!(gathered == recorded.message(&content), "{} fragments", recorded.fragments.len());
        println!("{bytes} bytes in {} fragments", recorded.fragments.len());
    }
}

#[test]
fn more_runs_than_one_launch_has_are_all_done() {
    let Some((gpu, mut queue)) = queue() else { return };
    let (pool, target) = (gpu.alloc(4096, 4096).unwrap(), gpu.alloc(4096, 4096).unwrap());
    let table = gpu.pinned(4096).unwrap();
    let bytes: Vec<u8> = (0..4096).map(|k| k as u8 ^ (k >> 8) as u8).collect();
    gpu.write_from_slice(pool.address(), &bytes).unwrap();
    write_fragments(&table, &[Fragment { source: 1, bytes: 30, target: 2 }]);
    let runs: Vec<GatherRun> = (0..100)
        .map(|k| GatherRun {
            fragments: table.address(),
            count: 1,
            source: pool.address() + k * 31,
            target: target.address() + k * 33,
        })
        .collect();
    queue.gather(&runs).unwrap();
    queue.gather(&[]).unwrap();
    queue.mark().unwrap();
    finish(&mut queue, 1);
    let seen = gpu.read_to_vec(target.address(), 4096).unwrap();
    for k in 0..100 {
        assert_eq!(seen[k * 33 + 2..][..30], bytes[k * 31 + 1..][..30], "{k}");
        assert_eq!(seen[k * 33 + 32..][..1], [0], "{k}");
    }
}

#[test]
fn marks_are_counted_in_order_and_limited() {
    let Some((gpu, mut queue)) = queue() else { return };
    assert_eq!(queue.location(), MemoryLocation::Cuda(gpu.index()));
    for round in 0..20 {
        for _ in 0..GATHER_LAUNCHES_MAX {
            queue.mark().unwrap();
        }
        assert!(matches!(queue.mark(), Err(Error::Internal(_))));
        finish(&mut queue, (round + 1) * GATHER_LAUNCHES_MAX as u64);
    }
}

/// Waits behind a kernel that takes long: nothing comes early, neither a copy nor a flag.
///
/// In a process of its own: freeing or unpinning memory waits for all of a GPU's work, and enqueueing
/// waits for him, so that beside other tests the kernel may be over before anything is behind it.
#[test]
fn work_behind_a_slow_kernel_waits_for_it() {
    let Some((gpu, _queue)) = queue() else { return };
    if !is_alone("gather::work_behind_a_slow_kernel_waits_for_it") {
        return;
    }
    const BYTES: usize = 1 << 20;
    let pattern = CudaPattern::new(&gpu).unwrap();
    let (source, target) = (gpu.alloc(BYTES, 4096).unwrap(), gpu.pinned(BYTES).unwrap());
    let flags = gpu.pinned(4096).unwrap();
    // SAFETY: zeroed memory of the buffer, aligned to a page, that lives as long as the reference.
    let flag = unsafe { &*flags.as_ptr().cast::<AtomicU32>() };
    let (producer, consumer): (CudaStream, CudaStream) = (gpu.stream().unwrap(), gpu.stream().unwrap());
    let produced = CudaEvent::new(&gpu).unwrap();
    for round in 1..=8u8 {
        pattern.hold_up(&producer, Duration::from_millis(25 << round)).unwrap();
        // SAFETY: all of it lives until the streams are done; the consumer waits for the producer.
        unsafe { producer.fill(source.address(), round, BYTES) }.unwrap();
        producer.record(&produced).unwrap();
        consumer.wait_event(&produced).unwrap();
        // SAFETY: as above.
        unsafe {
            consumer.copy(source.address(), target.address(), BYTES).unwrap();
            consumer.write_flag_u32(flags.address(), round.into()).unwrap();
        }
        let early = consumer.query().unwrap() || flag.load(Ordering::Acquire) == u32::from(round);
        // Asked last: if the kernel runs even now, it ran when the others were checked.
        let in_time = !produced.query().unwrap();
        assert!(!(in_time && early), "nobody waited for the kernel");
        consumer.wait(LONG).unwrap();
        assert!(produced.query().unwrap());
        assert_eq!(flag.load(Ordering::Acquire), u32::from(round));
        // SAFETY: memory of the buffer, with nothing under way.
        let seen = unsafe { std::slice::from_raw_parts(target.as_ptr(), BYTES) };
        assert!(seen.iter().all(|byte| *byte == round), "round {round}");
        if in_time {
            return println!("seen while the kernel ran, in round {round}");
        }
    }
    panic!("the kernel was always over before anybody looked");
}

#[test]
fn a_pattern_is_written_and_compared_as_the_host_would() {
    let Some((gpu, _queue)) = queue() else { return };
    let patterns = CudaPattern::new(&gpu).unwrap();
    let mut rng = StdRng::seed_from_u64(9);
    let buffer = gpu.alloc(200_000, 4096).unwrap();
    for round in 0..300 {
        let pattern = WordPattern {
            key: rng.random(),
            step: rng.random::<u64>() | 1,
            flip: if rng.random() { u64::MAX } else { 0 },
        };
        let (skew, bytes) = (rng.random_range(16..40), u64::from(length(&mut rng)) * 3);
        let (offset, address) = (rng.random_range(0..1 << 40), buffer.address() + skew);
        // SAFETY: all inside the buffer, which nothing else uses.
        unsafe {
            gpu.fill(buffer.address(), GUARD, buffer.len()).unwrap();
            patterns.fill(pattern, offset, address, bytes).unwrap();
            assert_eq!(patterns.first_difference(pattern, offset, address, bytes).unwrap(), None);
        }
        let mut seen = gpu.read_to_vec(buffer.address(), buffer.len()).unwrap();
        let (before, rest) = seen.split_at(skew as usize);
        let (filled, after) = rest.split_at(bytes as usize);
        assert!(before.iter().chain(after).all(|byte| *byte == GUARD), "round {round}: outside");
        for (at, byte) in filled.iter().enumerate() {
            assert_eq!(*byte, pattern.byte(offset + at as u64), "round {round}, {offset} + {at}");
        }
        if bytes > 0 {
            let wrong = [rng.random_range(0..bytes), rng.random_range(0..bytes)];
            for at in wrong {
                let byte = &mut seen[(skew + at) as usize];
                *byte = !pattern.byte(offset + at);
                gpu.write_from_slice(address + at, &[*byte]).unwrap();
            }
            // SAFETY: as above.
            let found = unsafe { patterns.first_difference(pattern, offset, address, bytes) }.unwrap();
            assert_eq!(found, wrong.into_iter().min(), "round {round}");
        }
    }
}

/// A plugin's table: host memory that it has pinned, or that the driver allocated for it.
enum Table {
    Registered(PinnedBuffer),
    Allocated(Arc<CudaGpu>, *mut u8),
}

impl Table {
    fn registered(gpu: &Arc<CudaGpu>) -> Table {
        Table::Registered(gpu.pinned(METADATA_BYTES).unwrap())
    }

    fn allocated(gpu: &Arc<CudaGpu>) -> Table {
        let mut base = std::ptr::null_mut();
        // SAFETY: room for a pointer; 3: for every context, and with an address for devices.
        let alloc = || unsafe { sys::cuMemHostAlloc(&mut base, METADATA_BYTES, 3) };
        let code = gpu.with_current(alloc).unwrap();
        assert_eq!(code as u32, 0, "{code:?}");
        Table::Allocated(gpu.clone(), base.cast())
    }

    fn base(&self) -> *mut u8 {
        match self {
            Table::Registered(buffer) => buffer.as_ptr(),
            Table::Allocated(_, base) => *base,
        }
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        if let Table::Allocated(gpu, base) = self {
            // SAFETY: allocated by the driver, freed once.
            let code = gpu.with_current(|| unsafe { sys::cuMemFreeHost(base.cast()) }).unwrap();
            assert_eq!(code as u32, 0, "{code:?}");
        }
    }
}

/// A plugin's pool, table and words, as `accept` would return them.
struct Plugin {
    gpu: Arc<CudaGpu>,
    pool: CudaBuffer,
    table: Table,
    words: CudaBuffer,
}

impl Plugin {
    fn new(gpu: &Arc<CudaGpu>, table: Table) -> Plugin {
        let (pool, words) = (gpu.alloc(16 << 20, 4096).unwrap(), gpu.alloc(24, 4096).unwrap());
        let bytes: Vec<u8> =
            [table.base() as u64, pool.address(), !0].iter().flat_map(|word| word.to_ne_bytes()).collect();
        gpu.write_from_slice(words.address(), &bytes).unwrap();
        Plugin { gpu: gpu.clone(), pool, table, words }
    }

    fn gather(&self, mode: UnpackMode) -> Gather {
        let handle = DeviceHandle {
            net_device_type: 1,
            net_device_version: 7,
            handle: self.words.address() as *mut c_void,
            size: 24,
            needs_proxy_progress: 1,
        };
        // SAFETY: the table outlives the gather.
        let unpack =
            unsafe { DeviceUnpack::read(Box::new(CudaQueue::new(&self.gpu).unwrap()), &handle) }.unwrap();
        Gather::new(mode, unpack).unwrap()
    }

    /// Lets a message arrive in fragments of the pool's pages, in mixed order.
    fn deliver(&self, rng: &mut StdRng, slot: usize, message: &[u8]) {
        let mut pages: Vec<u32> = (0..4096).collect();
        pages.shuffle(rng);
        let (mut pool, mut fragments) = (vec![0u8; 16 << 20], Vec::new());
        let mut at = 0;
        while at < message.len() {
            let bytes = rng.random_range(1..=4096.min(message.len() - at));
            let source = pages.pop().unwrap() * 4096 + rng.random_range(0..=4096 - bytes) as u32;
            pool[source as usize..][..bytes].copy_from_slice(&message[at..][..bytes]);
            fragments.push(Fragment { source, bytes: bytes as u32, target: at as u64 });
            at += bytes;
        }
        fragments.shuffle(rng);
        self.gpu.write_from_slice(self.pool.address(), &pool).unwrap();
        assert!(fragments.len() <= FRAGMENTS_PER_SLOT_MAX);
        // SAFETY: a slot and its count inside the table, aligned; no gather runs now.
        unsafe {
            let entries = self.table.base().cast::<Fragment>().add(slot * FRAGMENTS_PER_SLOT_MAX);
            std::ptr::copy_nonoverlapping(fragments.as_ptr(), entries, fragments.len());
            self.table.base().add(524_288 + slot * 8).cast::<u64>().write(fragments.len() as u64);
        }
    }
}

#[test]
fn receives_in_fragments_are_gathered_in_every_mode() {
    let Some((gpu, _queue)) = queue() else { return };
    for table in [Table::registered, Table::allocated] {
        gathers_in_every_mode(&Plugin::new(&gpu, table(&gpu)));
    }
}

fn gathers_in_every_mode(plugin: &Plugin) {
    let (gpu, mut rng) = (&plugin.gpu, StdRng::seed_from_u64(11));
    let target = gpu.alloc(600_000, 4096).unwrap();
    for mode in [UnpackMode::Kernel, UnpackMode::Copy, UnpackMode::Host] {
        let mut gather = plugin.gather(mode);
        for number in 0..20u64 {
            let mut message = vec![0; rng.random_range(1..=512 << 10)];
            rng.fill_bytes(&mut message);
            plugin.deliver(&mut rng, number as usize % 16, &message);
            let (skew, bytes) = (rng.random_range(0..300), message.len() as u64);
            gather.start(number, target.address() + skew, 600_000 - skew, bytes).unwrap();
            let start = Instant::now();
            let outcome = loop {
                if let Poll::Ready(outcome) = gather.poll(number) {
                    break outcome;
                }
                assert!(start.elapsed() < LONG, "{gather:?}");
            };
            assert_eq!(outcome, Ok(bytes), "{mode}");
            let seen = gpu.read_to_vec(target.address() + skew, message.len()).unwrap();
            assert!(seen == message, "{mode}, message {number}");
        }
    }
}

/// Copies follow the address of what was freed as kernels do: that ended the process.
#[test]
fn memory_that_is_freed_before_it_is_gathered_costs_its_message_alone() {
    let Some((gpu, _queue)) = queue() else { return };
    let (plugin, mut rng) = (Plugin::new(&gpu, Table::registered(&gpu)), StdRng::seed_from_u64(12));
    for mode in [UnpackMode::Kernel, UnpackMode::Copy, UnpackMode::Host] {
        // In one piece, and in some.
        for bytes in [1, 20_000] {
            let mut gather = plugin.gather(mode);
            let target = gpu.alloc(bytes, 4096).unwrap();
            let mut gone = 0;
            // SAFETY: room for an address.
            let code = gpu.with_current(|| unsafe { sys::cuMemAlloc_v2(&mut gone, bytes) });
            assert_eq!(code.unwrap() as u32, 0);
            let mut message = vec![0; bytes];
            rng.fill_bytes(&mut message);
            for (number, address) in [(0, gone), (1, target.address())] {
                plugin.deliver(&mut rng, number, &message);
                gather.start(number as u64, address, bytes as u64, bytes as u64).unwrap();
            }
            // SAFETY: freed once.
            let code = gpu.with_current(|| unsafe { sys::cuMemFree_v2(gone) });
            assert_eq!(code.unwrap() as u32, 0);
            let start = Instant::now();
            let outcomes = [0, 1].map(|number| {
                loop {
                    if let Poll::Ready(outcome) = gather.poll(number) {
                        break outcome;
                    }
                    assert!(start.elapsed() < LONG, "{gather:?}");
                }
            });
            let freed = CudaError::Freed { address: gone, bytes: bytes as u64 };
            assert_eq!(outcomes, [Err(Error::Cuda(freed)), Ok(bytes as u64)], "{mode}");
        }
    }
}

/// Prints figures: `cargo test --release -p ferrywire --test cuda -- --ignored --nocapture speed`.
#[test]
#[ignore = "prints a measurement"]
fn speed() {
    let Some((gpu, mut queue)) = queue() else { return };
    let mut marks = 0;
    for (bytes, fragment, skew) in [
        (512 << 10, 4096, 0),
        (64 << 20, 4096, 0),
        (64 << 20, 4096, 4),
        (64 << 20, 4096, 1),
        (64 << 20, 1448, 8),
        (1 << 30, 4096, 0),
    ] {
        let count = bytes / fragment;
        let (pool, target) = (gpu.alloc(bytes, 4096).unwrap(), gpu.alloc(bytes + 64, 4096).unwrap());
        let mut order: Vec<usize> = (0..count).collect();
        order.shuffle(&mut StdRng::seed_from_u64(1));
        let fragments: Vec<Fragment> = order
            .iter()
            .enumerate()
            .map(|(at, from)| Fragment {
                source: (from * fragment) as u32,
                bytes: fragment as u32,
                target: (at * fragment) as u64,
            })
            .collect();
        let table = gpu.pinned(size_of_val(&fragments[..])).unwrap();
        write_fragments(&table, &fragments);
        let runs = [GatherRun {
            fragments: table.address(),
            count: count as u64,
            source: pool.address(),
            target: target.address() + skew,
        }];
        let mut best = [f64::MAX; 2];
        let mut middle = [vec![], vec![]];
        for _ in 0..30 {
            for (kind, best) in best.iter_mut().enumerate() {
                let start = Instant::now();
                match kind {
                    0 => queue.gather(&runs).unwrap(),
                    _ => queue
                        .copy(&[GpuCopy { source: pool.address(), target: target.address(), bytes }])
                        .unwrap(),
                }
                queue.mark().unwrap();
                marks += 1;
                finish(&mut queue, marks);
                let us = start.elapsed().as_secs_f64() * 1e6;
                *best = best.min(us);
                middle[kind].push(us);
            }
        }
        middle.iter_mut().for_each(|list| list.sort_by(f64::total_cmp));
        let [gather, copy] = [middle[0][15], middle[1][15]];
        println!(
            "{bytes} bytes in fragments of {fragment}, skew {skew}: gather {gather:.1} us (best {:.1}), one copy {copy:.1} us \
             (best {:.1}); {:.0} and {:.0} GB/s",
            best[0],
            best[1],
            bytes as f64 / gather / 1e3,
            bytes as f64 / copy / 1e3
        );
    }
}
