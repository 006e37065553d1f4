//! A device of ordinary memory that does its work at once, counts its calls, and can be made to keep quiet about
//! marks or to fail: what a real GPU does by chance.

use ferrywire_memory::cuda::deferred_free::Launching;
use ferrywire_memory::sim::SimGpuError;
use ferrywire_memory::unpack::{
    DeviceUnpack, Extent, Fragment, Gather, GatherDevice, GatherRun, METADATA_BYTES, Mapped, UnpackMode,
};
use ferrywire_memory::{Error, Result};
use ferrywire_memory::{GpuCopy, MemoryLocation};
use ferrywire_ncclnet::abi::DeviceHandle;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

pub const FRAGMENTS: usize = 300;
pub const FRAGMENT_BYTES: usize = 700;
pub const MESSAGE_BYTES: u64 = (FRAGMENTS * FRAGMENT_BYTES) as u64;
/// Words, and then the pool, with a byte between fragments, and the target.
const POOL: usize = 32;
const POOL_BYTES: usize = FRAGMENTS * (FRAGMENT_BYTES + 1);

/// How often the device was asked, and what it shall do.
#[derive(Debug, Default)]
pub struct Knobs {
    pub reads: AtomicUsize,
    pub maps: AtomicUsize,
    /// Reached marks are not reported.
    pub quiet: AtomicBool,
    /// Whether enqueued work fails.
    pub fail: AtomicBool,
}

/// Memory of a device, and a table with the same receive in all slots.
pub struct Plain {
    memory: Vec<u8>,
    table: Vec<u128>,
    pub knobs: Arc<Knobs>,
}

impl Plain {
    pub fn new() -> Plain {
        let memory: Vec<u8> =
            (0..POOL + POOL_BYTES + MESSAGE_BYTES as usize).map(|k| (k * 7 / 3) as u8).collect();
        let mut plain = Plain { memory, table: vec![0; METADATA_BYTES.div_ceil(16)], knobs: Arc::default() };
        let words = [plain.table.as_mut_ptr() as u64, plain.base() + POOL as u64];
        words.iter().zip(plain.memory.chunks_mut(8)).for_each(|(word, to)| {
            to.copy_from_slice(&word.to_ne_bytes());
        });
        (0..16).for_each(|slot| plain.fill(slot));
        plain
    }

    /// In reverse, so that nothing is merged.
    fn fill(&mut self, slot: usize) {
        for k in 0..FRAGMENTS {
            let (source, location) = (k * (FRAGMENT_BYTES + 1), (FRAGMENTS - 1 - k) * FRAGMENT_BYTES);
            self.table[slot * 2048 + k] = (source | FRAGMENT_BYTES << 32) as u128 | (location as u128) << 64;
        }
        // SAFETY: one of the counts.
        unsafe { self.table.as_mut_ptr().cast::<u64>().add(65_536 + slot).write(FRAGMENTS as u64) };
    }

    fn base(&mut self) -> u64 {
        self.memory.as_mut_ptr() as u64
    }

    pub fn target(&mut self) -> u64 {
        self.base() + (POOL + POOL_BYTES) as u64
    }

    /// The message, put together by the rule by which [`Plain::fill`] took it apart.
    pub fn sent(&self) -> Vec<u8> {
        let piece = |k: usize| &self.memory[POOL + k * (FRAGMENT_BYTES + 1)..][..FRAGMENT_BYTES];
        (0..FRAGMENTS).rev().flat_map(piece).copied().collect()
    }

    pub fn received(&self) -> &[u8] {
        &self.memory[POOL + POOL_BYTES..]
    }

    /// To be dropped before this is.
    pub fn gather(&mut self, mode: UnpackMode) -> Gather {
        let device = Device {
            memory: Extent { base: self.base(), bytes: self.memory.len() as u64 },
            table: Extent { base: self.table.as_ptr() as u64, bytes: METADATA_BYTES as u64 },
            knobs: self.knobs.clone(),
            marks: 0,
            reported: 0,
        };
        let handle = DeviceHandle {
            net_device_type: 1,
            net_device_version: 7,
            handle: self.base() as *mut _,
            size: 24,
            needs_proxy_progress: 1,
        };
        // SAFETY: the table outlives the gather.
        let unpack = unsafe { DeviceUnpack::read(Box::new(device), &handle).unwrap() };
        Gather::new(mode, unpack).unwrap()
    }
}

#[derive(Debug)]
struct Device {
    memory: Extent,
    table: Extent,
    knobs: Arc<Knobs>,
    marks: u64,
    reported: u64,
}

impl Device {
    fn working(&self) -> Result<()> {
        match self.knobs.fail.load(Ordering::Relaxed) {
            true => Err(failure()),
            false => Ok(()),
        }
    }
}

/// The error of a failing device.
pub fn failure() -> Error {
    SimGpuError::Injected { gpu: 0, operation: 0 }.into()
}

// SAFETY: all memory it knows is ordinary memory that the test keeps; all work is done at once.
unsafe impl GatherDevice for Device {
    fn location(&self) -> MemoryLocation {
        MemoryLocation::SimGpu(0)
    }

    fn device_memory(&self, address: u64, _bytes: u64) -> Option<(MemoryLocation, Extent)> {
        self.memory.holds(address, 1).then_some((MemoryLocation::SimGpu(0), self.memory))
    }

    fn mapped_memory(&self, address: u64) -> Option<Extent> {
        self.table.holds(address, 1).then_some(self.table)
    }

    fn read(&self, address: u64, into: &mut [u8]) -> Result<()> {
        self.knobs.reads.fetch_add(1, Ordering::Relaxed);
        assert!(self.memory.holds(address, into.len() as u64));
        // SAFETY: inside the test's memory.
        unsafe { into.as_mut_ptr().copy_from_nonoverlapping(address as *const u8, into.len()) };
        Ok(())
    }

    fn map(&self, bytes: usize) -> Result<Mapped> {
        self.knobs.maps.fetch_add(1, Ordering::Relaxed);
        let mut memory = vec![0u128; bytes.div_ceil(16)];
        // SAFETY: as many bytes, which the vector keeps.
        Ok(unsafe { Mapped::new(memory.as_mut_ptr().cast(), bytes, memory) })
    }

    fn launching(&self) -> Option<Launching> {
        Some(Launching::unrestricted())
    }

    fn gather(&mut self, runs: &[GatherRun]) -> Result<()> {
        for run in runs {
            // SAFETY: the gather's own table, with so many fragments.
            let all =
                unsafe { std::slice::from_raw_parts(run.fragments as *const Fragment, run.count as usize) };
            for one in all {
                let (source, target) = (run.source + u64::from(one.source), run.target + one.target);
                self.copy(&[GpuCopy { source, target, bytes: one.bytes as usize }])?;
            }
        }
        Ok(())
    }

    fn copy(&mut self, copies: &[GpuCopy]) -> Result<()> {
        self.working()?;
        for GpuCopy { source, target, bytes } in copies {
            // SAFETY: device memory or mapped memory, as the trait says, all of it ordinary here.
            unsafe { std::ptr::copy(*source as *const u8, *target as *mut u8, *bytes) };
        }
        Ok(())
    }

    fn mark(&mut self) -> Result<()> {
        self.working()?;
        self.marks += 1;
        Ok(())
    }

    fn reached(&mut self) -> Result<u64> {
        if !self.knobs.quiet.load(Ordering::Relaxed) {
            self.reported = self.marks;
        }
        Ok(self.reported)
    }
}
