//! Memory of simulated GPUs: the owner of each address, and the only access to the bytes behind it.
//!
//! Each allocation maps one memory twice: at its *address*, without access rights, and at its *view*, which
//! only the copy engine and simulated NICs know. Mapped host memory has one address for both. Freed ranges
//! stay reserved for a while, so a late access faults instead of reaching another allocation.
//!
//! Invariant: only [`resolve`] makes a pointer into a view, after its bounds check, and the returned [`Span`]
//! keeps the memory mapped.
//! Read next: `work.rs`, which copies between spans.

use super::{Result, SimGpu, SimGpuError};
use ferrywire_proto::limits;
use ferrywire_sys::mapping::{Access, AddressRange, PAGE_BYTES, anonymous_file};
use ferrywire_sys::udmabuf;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

static ALLOCATIONS: RwLock<BTreeMap<u64, Arc<Allocation>>> = RwLock::new(BTreeMap::new());
static FREED: Mutex<VecDeque<AddressRange>> = Mutex::new(VecDeque::new());

/// Kind of an allocation of the simulated GPUs.
pub(super) enum Kind {
    /// Memory of a simulated GPU, which the CPU must not access.
    Device(Arc<SimGpu>),
    /// Host memory, which GPUs access at the CPU's address.
    Mapped,
}

pub(super) struct Allocation {
    pub kind: Kind,
    pub len: usize,
    /// Whether the memory was allocated through the C table, and is freed only through it.
    pub foreign: bool,
    address: u64,
    view: usize,
    ranges: Vec<AddressRange>,
    /// The memory file behind device memory, from which dma-bufs are made.
    file: Option<OwnedFd>,
}

impl Allocation {
    fn new(kind: Kind, len: usize, align: usize, foreign: bool) -> io::Result<Allocation> {
        let pages = len.max(1).checked_next_multiple_of(PAGE_BYTES).ok_or(io::ErrorKind::InvalidInput)?;
        let file = anonymous_file(pages)?;
        let mut address = AddressRange::reserve(len, align)?;
        let (at, mut view, mut ranges) = (address.base() as u64, address.base(), Vec::new());
        match kind {
            Kind::Mapped => address.show(&file, Access::ReadWrite)?,
            Kind::Device(_) => {
                address.show(&file, Access::None)?;
                let mut second = AddressRange::reserve(len, align)?;
                second.show(&file, Access::ReadWrite)?;
                view = second.base();
                ranges.push(second);
            }
        }
        ranges.push(address);
        let file = matches!(kind, Kind::Device(_)).then_some(file);
        Ok(Allocation { kind, len, foreign, address: at, view, ranges, file })
    }

    pub fn address(&self) -> u64 {
        self.address
    }

    /// The GPU that has the memory; `None` for mapped host memory.
    pub fn gpu(&self) -> Option<&Arc<SimGpu>> {
        match &self.kind {
            Kind::Device(gpu) => Some(gpu),
            Kind::Mapped => None,
        }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let mut freed = FREED.lock().unwrap_or_else(PoisonError::into_inner);
        for mut range in self.ranges.drain(..) {
            // If the kernel cannot keep the range reserved, the range is only unmapped.
            if range.withdraw().is_ok() {
                freed.push_back(range);
            }
        }
        while freed.len() > limits::SIM_FREED_RANGES_KEPT {
            freed.pop_front();
        }
    }
}

/// Makes an allocation, which [`find`] finds until [`forget`].
pub(super) fn allocate(kind: Kind, len: usize, align: usize, foreign: bool) -> Result<Arc<Allocation>> {
    if !align.is_power_of_two() {
        return Err(SimGpuError::Alignment { align });
    }
    let failed = |error: io::Error| SimGpuError::System {
        what: format!("cannot allocate {len} bytes"),
        message: error.to_string(),
    };
    let allocation = Arc::new(Allocation::new(kind, len, align, foreign).map_err(failed)?);
    let mut all = ALLOCATIONS.write().unwrap_or_else(PoisonError::into_inner);
    all.insert(allocation.address, allocation.clone());
    Ok(allocation)
}

/// Makes an allocation unreachable by address. Copies in flight keep its memory until they end.
pub(super) fn forget(allocation: &Allocation) {
    let mut all = ALLOCATIONS.write().unwrap_or_else(PoisonError::into_inner);
    let last = all.remove(&allocation.address);
    // The drop may be of the last reference to the GPU, and must not happen with the table locked.
    drop(all);
    drop(last);
}

/// The allocation that contains an address, of any simulated GPU.
pub(super) fn find(address: u64) -> Option<Arc<Allocation>> {
    let all = ALLOCATIONS.read().unwrap_or_else(PoisonError::into_inner);
    let (base, allocation) = all.range(..=address).next_back()?;
    (address - base < allocation.len.max(1) as u64).then(|| allocation.clone())
}

/// Access to bytes of an allocation, through its view; keeps the memory mapped.
pub(super) struct Span {
    pub pointer: *mut u8,
    _keeper: Arc<Allocation>,
}

/// Checks `bytes` bytes at a device or mapped address, and returns access to them; an error for a range that
/// is not in one allocation.
pub(super) fn resolve(address: u64, bytes: usize) -> Result<Span> {
    // An empty range may also start at the end of an allocation.
    let before = || find(address.checked_sub(1).filter(|_| bytes == 0)?);
    let allocation = find(address).or_else(before).ok_or(SimGpuError::NotAllocated { address })?;
    let offset = (address - allocation.address) as usize;
    if offset.checked_add(bytes).is_none_or(|end| end > allocation.len) {
        let (base, len) = (allocation.address, allocation.len as u64);
        return Err(SimGpuError::OutOfRange { address, bytes: bytes as u64, base, len });
    }
    // SAFETY: the view maps `len` bytes, and `offset` is not beyond them.
    let pointer = unsafe { (allocation.view as *mut u8).add(offset) };
    Ok(Span { pointer, _keeper: allocation })
}

/// Exports `bytes` bytes of a simulated GPU's memory at `address` as a dma-buf, in whole pages; the last page
/// of an allocation counts as whole. The dma-buf outlives the allocation.
///
/// # Errors
/// [`SimGpuError::DmaBuf`] with the reason: mapped host memory, not whole pages, or no kernel support. Also
/// the errors for an address outside of an allocation.
pub fn dmabuf_fd(address: u64, bytes: u64) -> Result<OwnedFd> {
    let refused = |why: String| SimGpuError::DmaBuf { address, bytes, why };
    let allocation = find(address).ok_or(SimGpuError::NotAllocated { address })?;
    let file = allocation.file.as_ref().ok_or_else(|| refused("the address is not in GPU memory".into()))?;
    let (base, len, page) = (allocation.address, allocation.len as u64, PAGE_BYTES as u64);
    let offset = address - base;
    if offset.checked_add(bytes).is_none_or(|end| end > len.next_multiple_of(page)) {
        return Err(SimGpuError::OutOfRange { address, bytes, base, len });
    }
    if bytes == 0 || !address.is_multiple_of(page) || !bytes.is_multiple_of(page) {
        return Err(refused(format!("address and length must be multiples of {page}, and not 0")));
    }
    udmabuf::from_memfd(file.as_fd(), offset, bytes).map_err(|error| refused(error.to_string()))
}

/// Returns an error for GPU memory where host memory is needed.
pub(super) fn check_host(address: *const u8, bytes: usize) -> Result<()> {
    let (first, last) = (address as u64, (address as u64).saturating_add(bytes.saturating_sub(1) as u64));
    for address in [first, last] {
        if let Some(gpu) = find(address).as_ref().and_then(|found| found.gpu()) {
            return Err(SimGpuError::NotHostMemory { address, gpu: gpu.index() });
        }
    }
    Ok(())
}

/// Number of freed address ranges that stay reserved.
#[cfg(test)]
pub(super) fn freed_ranges() -> usize {
    FREED.lock().unwrap_or_else(PoisonError::into_inner).len()
}

/// Memory of a simulated GPU, which is freed when the buffer is dropped.
///
/// The CPU must not access it: a load or store raises `SIGSEGV`, a system call returns `EFAULT`.
pub struct SimBuffer {
    allocation: Arc<Allocation>,
    gpu: Arc<SimGpu>,
}

impl SimBuffer {
    pub(super) fn new(gpu: &Arc<SimGpu>, bytes: usize, align: usize) -> Result<SimBuffer> {
        let allocation = allocate(Kind::Device(gpu.clone()), bytes, align, false)?;
        Ok(SimBuffer { allocation, gpu: gpu.clone() })
    }

    /// Device address of the buffer's first byte.
    pub fn address(&self) -> u64 {
        self.allocation.address
    }

    /// Device address of the buffer as a pointer, which must not be dereferenced.
    pub fn as_ptr(&self) -> *mut u8 {
        self.allocation.address as *mut u8
    }

    /// Requested size of the buffer in bytes.
    pub fn len(&self) -> usize {
        self.allocation.len
    }

    /// Whether the requested size of the buffer is 0.
    pub fn is_empty(&self) -> bool {
        self.allocation.len == 0
    }

    /// The GPU that has the buffer's memory.
    pub fn gpu(&self) -> &Arc<SimGpu> {
        &self.gpu
    }
}

impl Drop for SimBuffer {
    fn drop(&mut self) {
        forget(&self.allocation);
    }
}

impl std::fmt::Debug for SimBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SimBuffer({} bytes at {:#x} of GPU {})", self.len(), self.address(), self.gpu.index())
    }
}

/// Host memory that every simulated GPU accesses at the CPU's address; freed when the buffer is dropped.
#[derive(Debug)]
pub struct MappedBuffer {
    base: *mut u8,
    len: usize,
}

// SAFETY: the buffer is plain memory; the pointer is only handed out raw.
unsafe impl Send for MappedBuffer {}
// SAFETY: the buffer is plain memory; its address and length do not change.
unsafe impl Sync for MappedBuffer {}

impl MappedBuffer {
    /// Allocates `bytes` zeroed bytes, aligned at least to a page.
    pub fn new(bytes: usize, align: usize) -> Result<MappedBuffer> {
        let allocation = allocate(Kind::Mapped, bytes, align, false)?;
        Ok(MappedBuffer { base: allocation.view as *mut u8, len: bytes })
    }

    /// Address of the buffer's first byte, for the CPU and for GPUs.
    pub fn as_ptr(&self) -> *mut u8 {
        self.base
    }

    /// Device address of the buffer's first byte.
    pub fn address(&self) -> u64 {
        self.base as u64
    }

    /// Size of the buffer in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the buffer has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for MappedBuffer {
    fn drop(&mut self) {
        if let Some(allocation) = find(self.address()) {
            forget(&allocation);
        }
    }
}
