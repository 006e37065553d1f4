//! The loop allocates nothing, maps nothing and reads no device memory: seen by a device that counts, and an
//! allocator that does.

use crate::plugin::GATHERING;
use ferrywire::Result;
use ferrywire::memory::Place;
use ferrywire::memory::unpack::{
    DeviceUnpack, Extent, Fragment, Gather, GatherDevice, GatherRun, METADATA_BYTES, Mapped,
};
use ferrywire::nccl::abi::DeviceHandle;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

/// The system's, counting what each thread asks for.
struct Counting;

// SAFETY: the system's allocator, called as this one is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[derive(Debug, Default)]
struct Calls {
    reads: AtomicUsize,
    maps: AtomicUsize,
}

/// A device whose memory is ordinary memory, and whose work is done when its mark is looked at.
#[derive(Debug)]
struct Device {
    memory: Extent,
    table: Extent,
    calls: Arc<Calls>,
    marks: u64,
}

// SAFETY: all memory it knows is ordinary memory that the test keeps; all work is done at once.
unsafe impl GatherDevice for Device {
    fn place(&self) -> Place {
        Place::SimGpu(0)
    }

    fn device_memory(&self, address: u64) -> Option<(Place, Extent)> {
        self.memory.holds(address, 1).then_some((Place::SimGpu(0), self.memory))
    }

    fn mapped_memory(&self, address: u64) -> Option<Extent> {
        self.table.holds(address, 1).then_some(self.table)
    }

    fn read(&self, address: u64, into: &mut [u8]) -> Result<()> {
        self.calls.reads.fetch_add(1, Ordering::Relaxed);
        assert!(self.memory.holds(address, into.len() as u64));
        // SAFETY: inside the test's memory.
        unsafe { into.as_mut_ptr().copy_from_nonoverlapping(address as *const u8, into.len()) };
        Ok(())
    }

    fn map(&self, bytes: usize) -> Result<Mapped> {
        self.calls.maps.fetch_add(1, Ordering::Relaxed);
        let mut memory = vec![0u128; bytes.div_ceil(16)];
        // SAFETY: as many bytes, which the vector keeps.
        Ok(unsafe { Mapped::new(memory.as_mut_ptr().cast(), bytes, memory) })
    }

    fn gather(&mut self, runs: &[GatherRun]) -> Result<()> {
        for run in runs {
            // SAFETY: the gather's own table, with so many fragments.
            let all =
                unsafe { std::slice::from_raw_parts(run.fragments as *const Fragment, run.count as usize) };
            for one in all {
                self.copy(run.source + u64::from(one.source), run.target + one.target, one.bytes.into())?;
            }
        }
        Ok(())
    }

    fn copy(&mut self, source: u64, target: u64, bytes: u64) -> Result<()> {
        // SAFETY: device memory or mapped memory, as the trait says, all of it ordinary here.
        unsafe { std::ptr::copy(source as *const u8, target as *mut u8, bytes as usize) };
        Ok(())
    }

    fn mark(&mut self) -> Result<()> {
        self.marks += 1;
        Ok(())
    }

    fn reached(&mut self) -> Result<u64> {
        Ok(self.marks)
    }
}

const FRAGMENTS: usize = 300;
const FRAGMENT_BYTES: usize = 700;
const MESSAGE_BYTES: usize = FRAGMENTS * FRAGMENT_BYTES;

#[test]
fn the_loop_allocates_nothing_and_reads_the_handle_once() {
    // Words, pool with gaps, target.
    let pool_bytes = FRAGMENTS * (FRAGMENT_BYTES + 1);
    let mut memory: Vec<u8> = (0..32 + pool_bytes + MESSAGE_BYTES).map(|k| (k * 7 / 3) as u8).collect();
    let mut table = vec![0u128; METADATA_BYTES.div_ceil(16)];
    let (base, pool) = (memory.as_mut_ptr() as u64, memory.as_mut_ptr() as u64 + 32);
    let target = pool + pool_bytes as u64;
    memory[..8].copy_from_slice(&(table.as_mut_ptr() as u64).to_ne_bytes());
    memory[8..16].copy_from_slice(&pool.to_ne_bytes());
    // In reverse, so that nothing is merged.
    for slot in 0..16 {
        for k in 0..FRAGMENTS {
            let (source, place) = (k * (FRAGMENT_BYTES + 1), (FRAGMENTS - 1 - k) * FRAGMENT_BYTES);
            table[slot * 2048 + k] = (source | FRAGMENT_BYTES << 32) as u128 | (place as u128) << 64;
        }
        // SAFETY: one of the counts.
        unsafe { table.as_mut_ptr().cast::<u64>().add(65_536 + slot).write(FRAGMENTS as u64) };
    }
    for mode in GATHERING {
        let calls = Arc::new(Calls::default());
        let device = Device {
            memory: Extent { base, bytes: memory.len() as u64 },
            table: Extent { base: table.as_ptr() as u64, bytes: METADATA_BYTES as u64 },
            calls: calls.clone(),
            marks: 0,
        };
        let handle = DeviceHandle {
            net_device_type: 1,
            net_device_version: 7,
            handle: base as *mut _,
            size: 24,
            needs_proxy_progress: 1,
        };
        // SAFETY: the table outlives the gather.
        let unpack = unsafe { DeviceUnpack::read(Box::new(device), &handle).unwrap() };
        let mut gather = Gather::new(mode, unpack).unwrap();
        let (maps, before) = (calls.maps.load(Ordering::Relaxed), ALLOCATIONS.get());
        for number in 0..200 {
            gather.start(number, target, MESSAGE_BYTES as u64, MESSAGE_BYTES as u64).unwrap();
            while gather.poll(number) != Poll::Ready(Ok(MESSAGE_BYTES as u64)) {}
        }
        assert_eq!(ALLOCATIONS.get() - before, 0, "{mode}");
        assert_eq!(calls.reads.load(Ordering::Relaxed), 1, "{mode}");
        assert_eq!(calls.maps.load(Ordering::Relaxed), maps, "{mode}");
        let first = FRAGMENTS - 1;
        let sent = &memory[32 + first * (FRAGMENT_BYTES + 1)..][..FRAGMENT_BYTES];
        assert_eq!(&memory[32 + pool_bytes..][..FRAGMENT_BYTES], sent, "{mode}");
    }
    // The count counts.
    let before = ALLOCATIONS.get();
    drop(std::hint::black_box(Box::new(5)));
    assert_eq!(ALLOCATIONS.get() - before, 1);
}
