//! Pinned host memory, which GPUs can access, on the GPU's NUMA node.
//!
//! The pages are mapped here and then registered with the driver, not allocated by it. So they can be placed
//! on the GPU's NUMA node, whatever thread allocates them, and a forked child does not share them.
//! Invariant: pages are unmapped only after the driver has released them, or has lost the context.
//! Read next: `deferred_free.rs`, which decides when the pages are freed.

use super::deferred_free::{self, Idle};
use super::error::{CudaError, Result, call};
use super::gpu::CudaGpu;
use ferrywire_sys::mapping::{self, AddressRange, HUGE_PAGE_BYTES, PAGE_BYTES};
use ferrywire_sys::numa;
use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Registration flags: valid for every context, and with a device address.
const PORTABLE_AND_MAPPED: u32 = 1 | 2;

static PINNED_BYTES: AtomicU64 = AtomicU64::new(0);

/// Bytes of host memory that this library has pinned in this process, unused ones included.
pub fn pinned_bytes() -> u64 {
    PINNED_BYTES.load(Ordering::Relaxed)
}

/// Pinned host memory. All GPU work on the memory must be done when the buffer is dropped; `deferred_free.rs`
/// decides when the memory is freed.
#[derive(Debug)]
pub struct PinnedBuffer {
    /// The registered pages; `None` only while the buffer is dropped.
    pages: Option<Pages>,
    gpu: Arc<CudaGpu>,
    base: *mut u8,
    address: u64,
    len: usize,
}

// SAFETY: the buffer is ordinary memory of this process, which is touched through raw pointers alone.
unsafe impl Send for PinnedBuffer {}
// SAFETY: the buffer is ordinary memory of this process, which is touched through raw pointers alone.
unsafe impl Sync for PinnedBuffer {}

/// Pages of host memory that are registered with the driver.
#[derive(Debug)]
pub(super) struct Pages {
    pub(super) gpu: Arc<CudaGpu>,
    /// Unmapped when the pages are dropped, unless the driver may still know them.
    range: ManuallyDrop<AddressRange>,
    address: u64,
    /// Whether the pages may be reused: no work is in flight when the buffer is dropped.
    again: bool,
}

impl Pages {
    fn new(gpu: &Arc<CudaGpu>, len: usize, align: usize, again: bool) -> Result<Pages> {
        let failed = |why: String| CudaError::Pinned { bytes: len as u64, why };
        let system = |error: std::io::Error| failed(format!("the system refused: {error}"));
        let mut range = AddressRange::reserve(len, align).map_err(system)?;
        range.back().map_err(system)?;
        mapping::prefer_huge_pages(range.base() as *mut u8, range.len());
        if let Some(node) = gpu.numa_node() {
            // Best effort: memory on a remote NUMA node is slower, but works.
            let _ = numa::prefer_node(&mut range, node);
        }
        let _current = gpu.make_current()?;
        let (base, about) = (range.base() as *mut libc::c_void, gpu.about().bytes(range.len()));
        // SAFETY: the range is mapped memory of this length, which is unregistered before it is unmapped.
        let register =
            || unsafe { call!(about, cuMemHostRegister_v2(base, range.len(), PORTABLE_AND_MAPPED)) };
        register()
            .or_else(|_| {
                deferred_free::make_room(gpu.index());
                register()
            })
            .or_else(|_| {
                // Last, since work of another GPU may wait for this thread.
                deferred_free::make_room_everywhere();
                register()
            })
            .map_err(|error| failed(error.to_string()))?;
        PINNED_BYTES.fetch_add(range.len() as u64, Ordering::Relaxed);
        let mut pages = Pages { gpu: gpu.clone(), range: ManuallyDrop::new(range), address: 0, again };
        // SAFETY: the range was just registered; the driver writes one address, for which there is room.
        match unsafe { call!(about, cuMemHostGetDevicePointer_v2(&mut pages.address, base, 0)) } {
            Ok(()) => Ok(pages),
            Err(error) => {
                pages.again = false;
                deferred_free::leave(Idle::Pages(pages));
                Err(failed(error.to_string()))
            }
        }
    }

    /// Bytes of these pages if they cannot be reused and only wait to be freed, else 0.
    pub(super) fn useless_bytes(&self) -> usize {
        if self.again { 0 } else { self.range.len() }
    }

    /// Takes unused pages of this size from the deferred frees, and zeroes them.
    fn again(gpu: &CudaGpu, len: usize, align: usize) -> Option<Pages> {
        let fits = |pages: &Pages| {
            let big_enough = pages.range.len() >= len && pages.range.len() < len + align.max(PAGE_BYTES);
            pages.again
                && pages.gpu.index() == gpu.index()
                && big_enough
                && pages.range.base().is_multiple_of(align)
        };
        let fits = |idle: &Idle| matches!(idle, Idle::Pages(pages) if fits(pages));
        let pages = deferred_free::take(fits, |idle| match idle {
            Idle::Pages(pages) => Some(pages),
            _ => None,
        })?;
        // SAFETY: the range is mapped memory that no other code uses.
        unsafe { ptr::write_bytes(pages.range.base() as *mut u8, 0, pages.range.len()) };
        Some(pages)
    }
}

impl PinnedBuffer {
    pub(super) fn new(gpu: &Arc<CudaGpu>, len: usize, again: bool) -> Result<PinnedBuffer> {
        // Reading and writing a ring in one huge page is up to a quarter faster than in small pages.
        let align = if len >= HUGE_PAGE_BYTES { HUGE_PAGE_BYTES } else { 1 };
        let pages = match Pages::again(gpu, len, align) {
            Some(mut pages) => {
                pages.again = again;
                pages
            }
            None => Pages::new(gpu, len, align, again)?,
        };
        let (base, address) = (pages.range.base() as *mut u8, pages.address);
        Ok(PinnedBuffer { pages: Some(pages), gpu: gpu.clone(), base, address, len })
    }

    /// Prevents reuse of the pages: they are only freed after the buffer is dropped.
    pub fn prevent_reuse(&mut self) {
        self.pages.iter_mut().for_each(|pages| pages.again = false);
    }

    /// Address of the buffer's first byte for the CPU.
    pub fn as_ptr(&self) -> *mut u8 {
        self.base
    }

    /// Address of the buffer's first byte for GPUs. Equal to the CPU's address on all current systems.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Requested size of the buffer in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Bytes that the buffer pins: its size in whole pages.
    pub fn pinned_bytes(&self) -> usize {
        self.pages.as_ref().map_or(0, |pages| pages.range.len())
    }

    /// Whether the requested size of the buffer is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The GPU on whose NUMA node the buffer's memory is.
    pub fn gpu(&self) -> &Arc<CudaGpu> {
        &self.gpu
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        if let Some(pages) = self.pages.take() {
            deferred_free::leave(Idle::Pages(pages));
        }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        let base = self.range.base() as *mut libc::c_void;
        // SAFETY: the pages were registered by `new`, and are unregistered once.
        let freed = self.gpu.make_current().and_then(|_current| unsafe {
            call!(self.gpu.about().bytes(self.range.len()), cuMemHostUnregister(base))
        });
        if let Err(error) = freed {
            if !error.ends_work() {
                let bytes = self.range.len();
                tracing::warn!(%error, "cannot unpin {bytes} bytes of host memory: they stay pinned and mapped until this process ends");
                return;
            }
            tracing::warn!(%error, "cannot unpin host memory: its GPU is lost");
        }
        PINNED_BYTES.fetch_sub(self.range.len() as u64, Ordering::Relaxed);
        // SAFETY: the range is dropped once, and not used after this.
        unsafe { ManuallyDrop::drop(&mut self.range) };
    }
}
