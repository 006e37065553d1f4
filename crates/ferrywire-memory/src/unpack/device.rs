//! The GPU's side of a gather: a queue of asynchronous work, and lookups of addresses.
//!
//! Functions for the data path only enqueue or poll; only [`GatherDevice::read`], which is for set-up, waits
//! for the GPU. The input of a launch is in mapped memory, so nothing has to be uploaded.
//!
//! Invariant: work runs in the order in which it was enqueued, and after the device is dropped no work
//! accesses memory.
//! Read next: `sim.rs`, the simulated GPU; `gather.rs`, the caller.

use super::table::Fragment;
use crate::cuda::CudaError;
use crate::cuda::deferred_free::Launching;
use crate::error::Result;
use crate::{GpuCopy, MemoryLocation};
use std::fmt::Debug;

/// An address range of one allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First address of the range.
    pub base: u64,
    /// Length of the range in bytes.
    pub bytes: u64,
}

impl Extent {
    /// Bytes from `address` to the end of the range; `None` when the address is outside.
    pub fn bytes_from(&self, address: u64) -> Option<u64> {
        self.bytes.checked_sub(address.checked_sub(self.base)?)
    }

    /// Whether the range contains `bytes` bytes at `address`.
    pub fn holds(&self, address: u64, bytes: u64) -> bool {
        self.bytes_from(address).is_some_and(|left| bytes <= left)
    }
}

/// One receive's part of a gather kernel: fragments that the kernel reads in place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct GatherRun {
    /// Address of the first [`Fragment`], in memory mapped for the GPU.
    pub fragments: u64,
    /// Number of fragments of the run.
    pub count: u64,
    /// Device address to which the fragments' sources are relative.
    pub source: u64,
    /// Device address to which the fragments' targets are relative.
    pub target: u64,
}

/// A GPU with a queue for the gathers of one connection.
///
/// # Safety
/// [`GatherDevice::mapped_memory`] returns only memory that the CPU can read at the returned addresses, and a
/// dropped device no longer uses any memory that was ever named to it.
pub unsafe trait GatherDevice: Send + Debug {
    /// Location of the GPU's memory.
    fn location(&self) -> MemoryLocation;

    /// The device memory, of any GPU, that contains `address`. Adjacent pieces are included until the range
    /// holds `bytes` bytes from the address on, or no piece follows.
    fn device_memory(&self, address: u64, bytes: u64) -> Option<(MemoryLocation, Extent)>;

    /// The host memory at `address`, if this GPU accesses it at this address too.
    fn mapped_memory(&self, address: u64) -> Option<Extent>;

    /// Copies device memory to the host, and waits. For set-up only, because it waits for the GPU.
    fn read(&self, address: u64, into: &mut [u8]) -> Result<()>;

    /// Allocates zeroed host memory that this GPU accesses at the CPU's address. For set-up only.
    fn map(&self, bytes: usize) -> Result<Mapped>;

    /// A permit to launch a kernel. `None` while a stream waits for a transfer, because the kernel could queue
    /// behind that stream, and on a GPU without the kernel.
    fn launching(&self) -> Option<Launching>;

    /// Returns why the GPU has no kernel, if it has none: the queue then only copies.
    fn check_kernel(&self) -> Result<()> {
        Ok(())
    }

    /// Enqueues one kernel that copies all fragments of all runs. `runs` is copied; the fragments are read
    /// when the kernel runs.
    fn gather(&mut self, runs: &[GatherRun]) -> Result<()>;

    /// Enqueues copies of device or mapped memory, which may run in any order.
    fn copy(&mut self, copies: &[GpuCopy]) -> Result<()>;

    /// Enqueues a mark, which is reached when all earlier work is done. At most
    /// [`GATHER_LAUNCHES_MAX`](ferrywire_proto::limits::GATHER_LAUNCHES_MAX) marks are in flight.
    fn mark(&mut self) -> Result<()>;

    /// Number of marks reached so far. Does not wait.
    ///
    /// # Errors
    /// Why the next mark will never be reached; returned only after all marks before it were reported.
    fn reached(&mut self) -> Result<u64>;
}

/// Checks that all ranges are in memory that the GPU can access. A kernel that accesses freed memory destroys
/// the GPU's context, and users may free memory without notice. One lookup serves consecutive ranges of one
/// allocation. A simulated GPU checks by itself.
///
/// Returns [`CudaError::Freed`] for the first range that the GPU cannot access.
pub fn check_allocated(device: &dyn GatherDevice, all: impl IntoIterator<Item = (u64, u64)>) -> Result<()> {
    let MemoryLocation::Cuda(_) = device.location() else { return Ok(()) };
    let mut known = Extent { base: 0, bytes: 0 };
    for (address, bytes) in all {
        if bytes > 0 && !known.holds(address, bytes) {
            let found = device.device_memory(address, bytes).map(|(_, found)| found);
            let found = found.or_else(|| device.mapped_memory(address));
            let found = found.filter(|found| found.holds(address, bytes));
            known = found.ok_or(CudaError::Freed { address, bytes })?;
        }
    }
    Ok(())
}

/// Host memory that a GPU accesses at the CPU's address, and the value that keeps it mapped.
#[derive(Debug)]
pub struct Mapped {
    base: *mut u8,
    bytes: usize,
    _keeper: Box<dyn Keeper>,
}

/// A value that keeps mapped memory alive.
trait Keeper: Send + Debug {}
impl<T: Send + Debug> Keeper for T {}

// SAFETY: the range is plain memory that only this process and a GPU use; the pointer is only handed out raw.
unsafe impl Send for Mapped {}

impl Mapped {
    /// # Safety
    /// `bytes` bytes at `base`, which is aligned to a page, stay readable and writable while the keeper
    /// lives, and no other code uses them.
    pub unsafe fn new(base: *mut u8, bytes: usize, keeper: impl Send + Debug + 'static) -> Mapped {
        Mapped { base, bytes, _keeper: Box::new(keeper) }
    }

    /// Address at `offset` of the mapped memory, with at least `bytes` bytes behind it. Panics beyond the
    /// end.
    pub fn at(&self, offset: usize, bytes: usize) -> *mut u8 {
        assert!(offset.checked_add(bytes).is_some_and(|end| end <= self.bytes), "{offset} + {bytes}");
        // SAFETY: `offset` is inside the allocation, as the assertion has shown.
        unsafe { self.base.add(offset) }
    }
}

/// Checked fragments in memory that the GPU reads, with a section per slot.
#[derive(Debug)]
pub(super) struct FragmentTable(Mapped);

impl FragmentTable {
    pub fn new(device: &dyn GatherDevice) -> Result<FragmentTable> {
        let fragments = super::SLOTS * super::FRAGMENTS_PER_SLOT_MAX;
        device.map(fragments * size_of::<Fragment>()).map(FragmentTable)
    }

    fn entry(&self, slot: usize, index: usize) -> *mut Fragment {
        assert!(index < super::FRAGMENTS_PER_SLOT_MAX, "{index}");
        let at = (slot * super::FRAGMENTS_PER_SLOT_MAX + index) * size_of::<Fragment>();
        self.0.at(at, size_of::<Fragment>()).cast()
    }

    /// Address of a slot's fragments.
    pub fn address(&self, slot: usize) -> u64 {
        self.entry(slot, 0) as u64
    }

    /// Fills a slot of the table that no work refers to; returns its number of fragments.
    pub fn fill(&mut self, slot: usize, fragments: impl Iterator<Item = Fragment>) -> usize {
        let mut count = 0;
        for fragment in fragments {
            // SAFETY: the entry is inside this table and aligned; the GPU does not read the slot now.
            unsafe { self.entry(slot, count).write(fragment) };
            count += 1;
        }
        count
    }

    /// A fragment of a slot, by index.
    pub fn get(&self, slot: usize, index: usize) -> Fragment {
        // SAFETY: the entry is inside this table and aligned; any bytes are a fragment.
        unsafe { self.entry(slot, index).read() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_extent_holds_what_is_inside() {
        let extent = Extent { base: 1000, bytes: 100 };
        assert!(extent.holds(1000, 100) && extent.holds(1099, 1) && extent.holds(1100, 0));
        assert!(!extent.holds(1000, 101) && !extent.holds(999, 1) && !extent.holds(1101, 0));
        assert!(!extent.holds(1001, u64::MAX) && !extent.holds(u64::MAX, 1));
        assert_eq!([extent.bytes_from(1040), extent.bytes_from(999)], [Some(60), None]);
    }
}
