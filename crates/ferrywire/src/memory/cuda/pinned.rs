//! Host memory that GPUs reach: pages that stay where they are, on the GPU's side of the machine.
//!
//! It is mapped here and then registered with the driver, rather than allocated by it, so that the pages can be
//! put on the NUMA node of the GPU, whatever thread asks for them.
//! Invariant: the driver has let go of the pages before they are unmapped.

use super::error::{CudaError, Result, call};
use super::gpu::CudaGpu;
use crate::sys::mapping::{self, AddressRange};
use crate::sys::numa;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The smaller kind, of x86-64 and most others.
const HUGE_PAGE_BYTES: usize = 2 << 20;
/// For every context, and with an address for devices.
const PORTABLE_AND_MAPPED: u32 = 1 | 2;

static PINNED_BYTES: AtomicU64 = AtomicU64::new(0);

/// Bytes of host memory that are pinned now, by all of this library in this process.
pub fn pinned_bytes() -> u64 {
    PINNED_BYTES.load(Ordering::Relaxed)
}

/// Pinned host memory; freed when dropped. Work of any GPU that names it has to be done by then.
#[derive(Debug)]
pub struct PinnedBuffer {
    gpu: Arc<CudaGpu>,
    range: AddressRange,
    address: u64,
    len: usize,
}

impl PinnedBuffer {
    pub(super) fn new(gpu: &Arc<CudaGpu>, len: usize) -> Result<PinnedBuffer> {
        let failed = |why: String| CudaError::Pinned { bytes: len as u64, why };
        let system = |error: std::io::Error| failed(format!("the system: {error}"));
        // A ring in one huge page is read and written up to a quarter faster than in small ones.
        let align = if len >= HUGE_PAGE_BYTES { HUGE_PAGE_BYTES } else { 1 };
        let mut range = AddressRange::reserve(len, align).map_err(system)?;
        range.back().map_err(system)?;
        mapping::prefer_huge_pages(range.base() as *mut u8, range.len());
        if let Some(node) = gpu.numa_node() {
            // Near is faster, far works too.
            let _ = numa::prefer_node(&mut range, node);
        }
        let _current = gpu.make_current()?;
        let (base, about) = (range.base() as *mut libc::c_void, gpu.about().bytes(range.len()));
        // SAFETY: mapped memory of this length, which is unregistered before it is unmapped.
        unsafe { call!(about, cuMemHostRegister_v2(base, range.len(), PORTABLE_AND_MAPPED)) }
            .map_err(|error| failed(error.to_string()))?;
        PINNED_BYTES.fetch_add(range.len() as u64, Ordering::Relaxed);
        let mut buffer = PinnedBuffer { gpu: gpu.clone(), range, address: 0, len };
        // SAFETY: memory that was just registered; room for an address.
        unsafe { call!(about, cuMemHostGetDevicePointer_v2(&mut buffer.address, base, 0)) }
            .map_err(|error| failed(error.to_string()))?;
        Ok(buffer)
    }

    /// The first byte, for the CPU.
    pub fn as_ptr(&self) -> *mut u8 {
        self.range.base() as *mut u8
    }

    /// The first byte, for GPUs. It is the same number on all current systems.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Size in bytes, as asked for.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The GPU it is near to.
    pub fn gpu(&self) -> &Arc<CudaGpu> {
        &self.gpu
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        let base = self.range.base() as *mut libc::c_void;
        // SAFETY: registered by `new`, and unregistered once.
        let freed = self.gpu.make_current().and_then(|_current| unsafe {
            call!(self.gpu.about().bytes(self.range.len()), cuMemHostUnregister(base))
        });
        match freed {
            Ok(()) => _ = PINNED_BYTES.fetch_sub(self.range.len() as u64, Ordering::Relaxed),
            Err(error) => tracing::warn!(%error, "pinned memory could not be given back"),
        }
    }
}
