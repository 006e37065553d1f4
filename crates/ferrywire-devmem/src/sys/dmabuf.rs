//! CPU reads of a dma-buf. The kernel is notified when they begin and end, so that a device's writes are visible.

use std::os::fd::{AsRawFd, BorrowedFd};

/// `DMA_BUF_IOCTL_SYNC` and the flags of its `struct dma_buf_sync`, from `linux/dma-buf.h`.
const DMA_BUF_IOCTL_SYNC: libc::c_ulong = 0x4008_6200;
const DMA_BUF_SYNC_READ: u64 = 1;
const DMA_BUF_SYNC_END: u64 = 1 << 2;

/// A read of a dma-buf by the CPU, through a mapping of its pages; it ends when the value is dropped.
///
/// The calls can fail only for memory that is coherent with the CPU's caches anyway, so failures are ignored.
#[derive(Debug)]
pub struct Reading<'a>(BorrowedFd<'a>);

impl Reading<'_> {
    /// Begins a read of the dma-buf by the CPU.
    pub fn begin(dmabuf: BorrowedFd<'_>) -> Reading<'_> {
        sync(dmabuf, DMA_BUF_SYNC_READ);
        Reading(dmabuf)
    }
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        sync(self.0, DMA_BUF_SYNC_READ | DMA_BUF_SYNC_END);
    }
}

fn sync(dmabuf: BorrowedFd<'_>, flags: u64) {
    // SAFETY: the kernel reads 8 bytes at the pointer, which is valid for the call.
    unsafe { libc::ioctl(dmabuf.as_raw_fd(), DMA_BUF_IOCTL_SYNC, &raw const flags) };
}
