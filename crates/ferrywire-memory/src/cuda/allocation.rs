//! Memory of a GPU that we allocate ourselves.

use super::deferred_free::{self, Idle};
use super::dmabuf::dmabuf_fd;
use super::error::{CudaError, OUT_OF_MEMORY, Result, call};
use super::gpu::{CudaGpu, ZEROES_BYTES};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What the driver aligns every allocation to.
const DRIVER_ALIGN_BYTES: usize = 256;
const PAGE_BYTES: usize = 4096;

/// Memory of a GPU, in pages of its own. Dropping it waits for the GPU's work and frees it, unless that could hold up
/// a transfer: then it is freed later.
///
/// The CPU may not touch it.
pub struct CudaBuffer {
    /// Until it is dropped.
    block: Option<Block>,
    gpu: Arc<CudaGpu>,
    /// The first address in it that is aligned as asked for.
    address: u64,
    len: usize,
}

/// What the driver gave.
pub(super) struct Block {
    gpu: Arc<CudaGpu>,
    raw: u64,
    bytes: usize,
    /// Nobody but us names it, so that nothing of it is under way once it is dropped.
    own: AtomicBool,
}

impl Block {
    fn new(gpu: &Arc<CudaGpu>, bytes: usize, own: bool) -> Result<Block> {
        let _current = gpu.make_current()?;
        let mut raw = 0;
        // SAFETY: room for an address.
        let mut alloc = || unsafe { call!(gpu.about().bytes(bytes), cuMemAlloc_v2(&mut raw, bytes)) };
        alloc().or_else(|_| {
            deferred_free::make_room();
            alloc().map_err(|error| with_what_is_free(gpu, error))
        })?;
        Ok(Block { gpu: gpu.clone(), raw, bytes, own: own.into() })
    }

    /// Bytes that nobody is given again.
    pub(super) fn useless_bytes(&self) -> usize {
        if self.is_own() { 0 } else { self.bytes }
    }

    fn is_own(&self) -> bool {
        self.own.load(Ordering::SeqCst)
    }

    /// One that nobody uses any more.
    fn again(gpu: &CudaGpu, bytes: usize) -> Option<Block> {
        let fits = |block: &Block| block.is_own() && block.gpu.index() == gpu.index() && block.bytes == bytes;
        let fits = |idle: &Idle| matches!(idle, Idle::Block(block) if fits(block));
        deferred_free::take(fits, |idle| match idle {
            Idle::Block(block) => Some(block),
            _ => None,
        })
    }
}

impl CudaBuffer {
    /// One that only transfers name (`own`) may be an old one.
    pub(super) fn new(gpu: &Arc<CudaGpu>, len: usize, align: usize, own: bool) -> Result<CudaBuffer> {
        if !align.is_power_of_two() {
            return Err(CudaError::Alignment { align });
        }
        let align = align.max(PAGE_BYTES);
        // Whole pages, which a NIC can be given.
        let pages = len.max(1).checked_next_multiple_of(PAGE_BYTES).unwrap_or(usize::MAX);
        // Not less than can be zeroed while a stream waits for a transfer.
        let padded = pages.saturating_add(align - DRIVER_ALIGN_BYTES).max(ZEROES_BYTES);
        let block = match own.then(|| Block::again(gpu, padded)).flatten() {
            Some(block) => block,
            None => Block::new(gpu, padded, own)?,
        };
        // SAFETY: memory of this length that nobody else uses.
        unsafe { gpu.zero(block.raw, block.bytes) }?;
        let address = block.raw.next_multiple_of(align as u64);
        Ok(CudaBuffer { block: Some(block), gpu: gpu.clone(), address, len })
    }

    /// The device address of the first byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The same as a pointer, which must not be dereferenced.
    pub fn as_ptr(&self) -> *mut u8 {
        self.address as *mut u8
    }

    /// Size in bytes, as asked for.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The whole of it, in pages of 4096 bytes, as a dma-buf.
    ///
    /// # Errors
    /// As for [`dmabuf_fd`].
    pub fn dmabuf_fd(&self) -> Result<OwnedFd> {
        dmabuf_fd(self.address, self.len.max(1).next_multiple_of(PAGE_BYTES) as u64)
    }

    /// Something may still be sent of it when it is dropped: it goes back to the driver, and is nobody's before.
    pub fn use_never_again(&self) {
        self.block.iter().for_each(|block| block.own.store(false, Ordering::SeqCst));
    }

    /// The GPU it belongs to.
    pub fn gpu(&self) -> &Arc<CudaGpu> {
        &self.gpu
    }
}

fn with_what_is_free(gpu: &CudaGpu, error: CudaError) -> CudaError {
    match error {
        CudaError::Call { failure } if failure.code == OUT_OF_MEMORY => CudaError::OutOfMemory {
            failure,
            free_bytes: gpu.free_bytes().unwrap_or(0),
            total_bytes: gpu.total_bytes(),
        },
        other => other,
    }
}

impl Drop for CudaBuffer {
    fn drop(&mut self) {
        if let Some(block) = self.block.take() {
            deferred_free::leave(Idle::Block(block));
        }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`, freed once, with its context current.
        let freed = self.gpu.make_current().and_then(|_current| unsafe {
            call!(self.gpu.about().bytes(self.bytes), cuMemFree_v2(self.raw))
        });
        if let Err(error) = freed {
            tracing::warn!(%error, "memory of a GPU could not be freed");
        }
    }
}

impl std::fmt::Debug for CudaBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CudaBuffer({} bytes at {:#x} of GPU {})", self.len, self.address, self.gpu.index())
    }
}
