//! The GPU's side of a gather: one queue of asynchronous work, and what the GPU knows about addresses.
//!
//! Everything the loop calls only enqueues or looks; nothing waits for the GPU but [`GatherDevice::read`],
//! which belongs to set-up. What a launch reads lies in mapped memory, so nothing is uploaded for it.
//!
//! Invariant: work is done in the order in which it was enqueued, and once the device is dropped, none of it
//! touches memory any more.
//! Read next: `sim.rs`, the simulated GPU's; `gather.rs`, who calls.

use super::table::Fragment;
use crate::cuda::CudaError;
use crate::error::Result;
use crate::{GpuCopy, MemoryLocation};
use std::fmt::Debug;

/// A range of memory, as its allocator knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First address.
    pub base: u64,
    /// Bytes.
    pub bytes: u64,
}

impl Extent {
    /// Bytes from an address inside to the end.
    pub fn bytes_from(&self, address: u64) -> Option<u64> {
        self.bytes.checked_sub(address.checked_sub(self.base)?)
    }

    /// Whether all of `bytes` bytes at an address are inside.
    pub fn holds(&self, address: u64, bytes: u64) -> bool {
        self.bytes_from(address).is_some_and(|left| bytes <= left)
    }
}

/// One receive's part of a kernel: fragments that it reads in place, from bases they count from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct GatherRun {
    /// Address of the first [`Fragment`], in memory that the device maps.
    pub fragments: u64,
    /// How many there are.
    pub count: u64,
    /// Device address that their sources count from.
    pub source: u64,
    /// Device address that their targets count from.
    pub target: u64,
}

/// A GPU, with a queue of its own for one connection's gathers.
///
/// # Safety
/// [`GatherDevice::mapped_memory`] gives only memory that the CPU can read, at the addresses it gives, and a
/// dropped device is done with all memory that was ever named to it.
pub unsafe trait GatherDevice: Send + Debug {
    /// Whose queue it is.
    fn location(&self) -> MemoryLocation;

    /// The device memory, of any GPU, that an address lies in. Where it consists of pieces side by side, they are
    /// followed until `bytes` bytes from the address on are inside, or no piece follows.
    fn device_memory(&self, address: u64, bytes: u64) -> Option<(MemoryLocation, Extent)>;

    /// The host memory at an address, if this GPU reaches it there too.
    fn mapped_memory(&self, address: u64) -> Option<Extent>;

    /// Copies device memory to the host, and waits. For set-up only.
    fn read(&self, address: u64, into: &mut [u8]) -> Result<()>;

    /// Zeroed host memory that this GPU reaches at the same address. For set-up only.
    fn map(&self, bytes: usize) -> Result<Mapped>;

    /// Enqueues one kernel that copies all fragments of all runs. The runs are copied; the fragments are read
    /// when the kernel runs.
    fn gather(&mut self, runs: &[GatherRun]) -> Result<()>;

    /// Enqueues copies, which may be done in any order; addresses are of device or of mapped memory.
    fn copy(&mut self, copies: &[GpuCopy]) -> Result<()>;

    /// Enqueues a mark, reached once everything before it is done. At most
    /// [`GATHER_LAUNCHES_MAX`](ferrywire_proto::limits::GATHER_LAUNCHES_MAX) are under way.
    fn mark(&mut self) -> Result<()>;

    /// How many marks have been reached since the beginning. Does not wait.
    ///
    /// # Errors
    /// The cause why the next one never will be; told only when those before it have been.
    fn reached(&mut self) -> Result<u64>;
}

/// Sees that all these bytes are in memory that a GPU's kernel reaches, which else ends the GPU's context: users free
/// theirs without a word. One question for neighbours of one allocation; a simulated GPU sees to it itself.
pub fn see_that_it_is_there(
    device: &dyn GatherDevice,
    all: impl IntoIterator<Item = (u64, u64)>,
) -> Result<()> {
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

/// Host memory that a GPU reaches at the same address, with what keeps it so.
#[derive(Debug)]
pub struct Mapped {
    base: *mut u8,
    bytes: usize,
    _keeper: Box<dyn Keeper>,
}

/// Anything that keeps memory mapped.
trait Keeper: Send + Debug {}
impl<T: Send + Debug> Keeper for T {}

// SAFETY: plain memory that nobody else touches but a GPU; the pointer is only handed out raw.
unsafe impl Send for Mapped {}

impl Mapped {
    /// # Safety
    /// `bytes` bytes at `base`, which is aligned to a page, stay readable and writable as long as the keeper
    /// lives, and no one else has a use for them.
    pub unsafe fn new(base: *mut u8, bytes: usize, keeper: impl Send + Debug + 'static) -> Mapped {
        Mapped { base, bytes, _keeper: Box::new(keeper) }
    }

    /// The address at `offset`, with at least `bytes` bytes from there.
    pub fn at(&self, offset: usize, bytes: usize) -> *mut u8 {
        assert!(offset.checked_add(bytes).is_some_and(|end| end <= self.bytes), "{offset} + {bytes}");
        // SAFETY: inside of the allocation, just checked.
        unsafe { self.base.add(offset) }
    }
}

/// The fragments that were checked, one part per slot, where the GPU reads them.
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

    /// Where the GPU finds the fragments of a slot.
    pub fn address(&self, slot: usize) -> u64 {
        self.entry(slot, 0) as u64
    }

    /// Fills a slot that no work names; returns how many fragments it has.
    pub fn fill(&mut self, slot: usize, fragments: impl Iterator<Item = Fragment>) -> usize {
        let mut count = 0;
        for fragment in fragments {
            // SAFETY: an entry of our own memory, aligned; the GPU does not read the slot now.
            unsafe { self.entry(slot, count).write(fragment) };
            count += 1;
        }
        count
    }

    /// One of a slot's fragments.
    pub fn get(&self, slot: usize, index: usize) -> Fragment {
        // SAFETY: an entry of our own memory, aligned; any bytes are a fragment.
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
