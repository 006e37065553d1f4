//! Device memory of CUDA GPUs that this library allocates.

use super::deferred_free::{self, Idle};
use super::dmabuf::dmabuf_fd;
use super::error::{CudaError, OUT_OF_MEMORY, Result, call};
use super::gpu::{CudaGpu, ZEROES_BYTES};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Alignment of the driver's allocations, in bytes.
const DRIVER_ALIGN_BYTES: usize = 256;
const PAGE_BYTES: usize = 4096;

/// Memory of a CUDA GPU, in whole pages. The CPU must not access it.
///
/// Dropping it frees the memory, which waits for the GPU's work. Where that could block a transfer, the
/// memory is freed later (`deferred_free.rs`).
pub struct CudaBuffer {
    /// The driver's allocation; `None` only while the buffer is dropped.
    block: Option<Block>,
    gpu: Arc<CudaGpu>,
    /// First address in the allocation with the requested alignment.
    address: u64,
    len: usize,
}

/// One allocation of GPU memory by the driver.
pub(super) struct Block {
    pub(super) gpu: Arc<CudaGpu>,
    raw: u64,
    bytes: usize,
    /// Whether the block may be reused: only transfers use the memory, and none does when the buffer is
    /// dropped.
    own: AtomicBool,
}

impl Block {
    fn new(gpu: &Arc<CudaGpu>, bytes: usize, own: bool) -> Result<Block> {
        let _current = gpu.make_current()?;
        let mut raw = 0;
        // SAFETY: the driver writes one address, for which there is room.
        let mut alloc = || unsafe { call!(gpu.about().bytes(bytes), cuMemAlloc_v2(&mut raw, bytes)) };
        alloc().or_else(|_| {
            deferred_free::make_room(gpu.index());
            alloc().map_err(|error| with_what_is_free(gpu, error))
        })?;
        Ok(Block { gpu: gpu.clone(), raw, bytes, own: own.into() })
    }

    /// Bytes of the block if it cannot be reused and only waits to be freed, else 0.
    pub(super) fn useless_bytes(&self) -> usize {
        if self.is_own() { 0 } else { self.bytes }
    }

    fn is_own(&self) -> bool {
        self.own.load(Ordering::SeqCst)
    }

    /// Takes an unused block of this size from the deferred frees.
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
    /// Allocates a buffer. With `own`, only transfers will use it, and it may be a reused block.
    pub(super) fn new(gpu: &Arc<CudaGpu>, len: usize, align: usize, own: bool) -> Result<CudaBuffer> {
        if !align.is_power_of_two() {
            return Err(CudaError::Alignment { align });
        }
        let align = align.max(PAGE_BYTES);
        // The size is rounded up to whole pages, so that the memory can be bound to a NIC.
        let pages = len.max(1).checked_next_multiple_of(PAGE_BYTES).unwrap_or(usize::MAX);
        // The block has at least the size that [`CudaGpu::zero`] can zero while a stream waits for a
        // transfer.
        let padded = pages.saturating_add(align - DRIVER_ALIGN_BYTES).max(ZEROES_BYTES);
        let block = match own.then(|| Block::again(gpu, padded)).flatten() {
            Some(block) => block,
            None => Block::new(gpu, padded, own)?,
        };
        let (raw, bytes, address) = (block.raw, block.bytes, block.raw.next_multiple_of(align as u64));
        // From here on the buffer drops the block, which is freed later while a stream waits for a transfer; after an error too.
        let buffer = CudaBuffer { block: Some(block), gpu: gpu.clone(), address, len };
        // SAFETY: the block has this length, and no other code uses it yet.
        unsafe { gpu.zero(raw, bytes) }?;
        Ok(buffer)
    }

    /// Device address of the buffer's first byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Device address of the buffer as a pointer, which must not be dereferenced.
    pub fn as_ptr(&self) -> *mut u8 {
        self.address as *mut u8
    }

    /// Requested size of the buffer in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the requested size of the buffer is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Exports the whole buffer, in pages of 4096 bytes, as a dma-buf.
    ///
    /// # Errors
    /// The same as those of [`dmabuf_fd`].
    pub fn dmabuf_fd(&self) -> Result<OwnedFd> {
        dmabuf_fd(self.address, self.len.max(1).next_multiple_of(PAGE_BYTES) as u64)
    }

    /// Prevents reuse of the buffer's memory, because a send may still read it when the buffer is dropped.
    /// The memory then goes back to the driver only.
    pub fn prevent_reuse(&self) {
        self.block.iter().for_each(|block| block.own.store(false, Ordering::SeqCst));
    }

    /// The GPU that has the buffer's memory.
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
        // SAFETY: the block was allocated by `new`, is freed once, and its context is current.
        let freed = self.gpu.make_current().and_then(|_current| unsafe {
            call!(self.gpu.about().bytes(self.bytes), cuMemFree_v2(self.raw))
        });
        if let Err(error) = freed {
            tracing::warn!(%error, "cannot free GPU memory");
        }
    }
}

impl std::fmt::Debug for CudaBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CudaBuffer({} bytes at {:#x} of GPU {})", self.len, self.address, self.gpu.index())
    }
}
