//! GPU memory as a dma-buf, which other devices can read and write.

use super::driver::driver;
use super::error::{About, CudaError, Result, call};
use super::gpu::{self, CudaGpu};
use super::pointer;
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

/// Exports `bytes` bytes of GPU memory at `address` as a dma-buf.
///
/// # Errors
/// [`CudaError::DmaBuf`] with the reason: not GPU memory, not whole pages, no support by driver or kernel, or
/// the driver's message.
pub fn dmabuf_fd(address: u64, bytes: u64) -> Result<OwnedFd> {
    let refused = |why: String| CudaError::DmaBuf { address, bytes, why };
    driver()?;
    let gpu = pointer::gpu_of_range(address, bytes)?
        .ok_or_else(|| refused("the address is not in GPU memory".into()))?;
    let page_bytes = page_bytes();
    if bytes == 0 || !address.is_multiple_of(page_bytes) || !bytes.is_multiple_of(page_bytes) {
        return Err(refused(format!("address and length must be multiples of {page_bytes}, and not 0")));
    }
    if !supported(gpu)? {
        let why = format!("CUDA GPU {gpu} or its driver has no dma-buf: the open kernel modules are needed");
        return Err(refused(why));
    }
    let opened = CudaGpu::open(gpu)?;
    // The driver requires a current context of the GPU.
    let _current = opened.make_current()?;
    let mut fd: RawFd = -1;
    let kind = sys::CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
    let about = About::gpu(gpu).bytes(bytes as usize);
    // SAFETY: the driver writes one descriptor, for which there is room; the range was just found to be
    // memory of a GPU.
    unsafe {
        let into = (&raw mut fd).cast();
        call!(about, cuMemGetHandleForAddressRange(into, address, bytes as usize, kind, 0))
    }
    .map_err(|error| refused(error.to_string()))?;
    // SAFETY: the driver has just made this descriptor, and no other code owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn supported(index: u32) -> Result<bool> {
    let (mut device, about) = (0, About::gpu(index));
    // SAFETY: the driver is initialised, and writes one number, for which there is room.
    unsafe { call!(about, cuDeviceGet(&mut device, index as i32)) }?;
    gpu::attribute_of(device, about, Attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED).map(|value| value != 0)
}

fn page_bytes() -> u64 {
    // SAFETY: no memory is passed.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(bytes).unwrap_or(4096)
}
