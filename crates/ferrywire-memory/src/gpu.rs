//! A GPU, CUDA or simulated, behind one interface.
//!
//! Invariant: code that works on either kind calls this file; differences between the kinds are in `cuda` and
//! `sim`.
//! Read next: `registration.rs` for memory, `unpack/device.rs` for queues of work.

use super::MemoryLocation;
use super::cuda::{self, CudaError, CudaGpu};
use super::registration::host_has_no_gpu;
use super::sim::{self, SimGpu, SimGpuError};
use super::unpack::{CudaQueue, Extent, GatherDevice, Mapped, SimQueue, mapped};
use crate::error::{Error, Result};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// One copy of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct GpuCopy {
    /// Source address: memory of any GPU of this kind, or host memory that GPUs can access.
    pub source: u64,
    /// Target address, of the same kinds of memory.
    pub target: u64,
    /// Length of the copy in bytes.
    pub bytes: usize,
}

/// Exports `bytes` bytes of GPU memory at `address`, in whole pages, as a dma-buf to which NICs can be bound.
/// The dma-buf outlives the memory's allocation.
///
/// # Errors
/// [`Error::Invalid`] for host memory; the GPU's error otherwise.
pub fn dmabuf_fd(location: MemoryLocation, address: u64, bytes: u64) -> Result<OwnedFd> {
    match location {
        MemoryLocation::SimGpu(_) => Ok(sim::dmabuf_fd(address, bytes)?),
        MemoryLocation::Cuda(_) => Ok(cuda::dmabuf_fd(address, bytes)?),
        MemoryLocation::Host => {
            let why = "host memory has no dma-buf unless it was allocated as one: send the memory as it is, or copy it to a pool";
            Err(Error::invalid("dma-buf", why))
        }
    }
}

/// A handle of a GPU, which keeps the GPU open.
#[derive(Clone, Debug)]
pub enum Gpu {
    /// A handle of a simulated GPU.
    Sim(Arc<SimGpu>),
    /// A handle of a CUDA GPU.
    Cuda(Arc<CudaGpu>),
}

impl Gpu {
    /// The GPU of a memory location; opens the GPU at first need.
    pub fn open(location: MemoryLocation) -> Result<Gpu> {
        match location {
            MemoryLocation::SimGpu(index) => Ok(Gpu::Sim(SimGpu::open(index)?)),
            MemoryLocation::Cuda(index) => Ok(Gpu::Cuda(CudaGpu::open(index)?)),
            MemoryLocation::Host => Err(host_has_no_gpu()),
        }
    }

    /// The GPU of a memory location. Returns an error for a GPU that is not open.
    pub fn opened(location: MemoryLocation) -> Result<Gpu> {
        match location {
            MemoryLocation::SimGpu(index) => {
                Ok(Gpu::Sim(SimGpu::opened(index).ok_or(SimGpuError::NotOpen { index })?))
            }
            MemoryLocation::Cuda(index) => {
                Ok(Gpu::Cuda(CudaGpu::opened(index).ok_or(CudaError::NotOpen { index })?))
            }
            MemoryLocation::Host => Err(host_has_no_gpu()),
        }
    }

    /// Copies GPU memory to the host, and waits.
    pub fn read_into_slice(&self, source: u64, target: &mut [u8]) -> Result<()> {
        match self {
            Gpu::Sim(gpu) => Ok(gpu.read_into_slice(source, target)?),
            Gpu::Cuda(gpu) => Ok(gpu.read_into_slice(source, target)?),
        }
    }

    /// Copies host memory to the GPU, and waits.
    pub fn write_from_slice(&self, target: u64, source: &[u8]) -> Result<()> {
        match self {
            Gpu::Sim(gpu) => Ok(gpu.write_from_slice(target, source)?),
            Gpu::Cuda(gpu) => Ok(gpu.write_from_slice(target, source)?),
        }
    }

    /// The allocation that contains `address`, on any GPU of this kind; `None` for other memory. On CUDA GPUs
    /// adjacent pieces are included until the range holds `bytes` bytes.
    pub fn allocation(&self, address: u64, bytes: u64) -> Option<Extent> {
        match self {
            Gpu::Sim(_) => SimGpu::of(address).map(|(_, base, bytes)| Extent { base, bytes }),
            Gpu::Cuda(_) => {
                let found = cuda::pointer::stretch(address, bytes)?;
                Some(Extent { base: found.base, bytes: found.bytes })
            }
        }
    }

    /// Runs `body` with this GPU current on the thread.
    pub fn with_current<T>(&self, body: impl FnOnce() -> T) -> Result<T> {
        match self {
            Gpu::Sim(gpu) => Ok(sim::with_current(gpu.index(), body)?),
            Gpu::Cuda(gpu) => Ok(gpu.with_current(body)?),
        }
    }

    /// Runs foreign code with this GPU current; contexts that the code leaves on the thread are removed.
    pub fn with_current_alone<T>(&self, body: impl FnOnce() -> T) -> Result<T> {
        match self {
            Gpu::Sim(_) => self.with_current(body),
            Gpu::Cuda(gpu) => Ok(gpu.with_current_alone(body)?),
        }
    }

    /// Allocates host memory that this GPU can access and that is never reused, since a send may still read
    /// it when it is dropped. For set-up only, because the call may wait for the GPU.
    pub fn map_once(&self, bytes: usize) -> Result<Mapped> {
        match self {
            Gpu::Sim(gpu) => SimQueue::new(gpu).map(bytes),
            Gpu::Cuda(gpu) => mapped(gpu.pinned_once(bytes)?),
        }
    }

    /// Creates a queue of work on this GPU. For set-up only, because the call may wait for the GPU.
    pub fn queue(&self) -> Result<Box<dyn GatherDevice>> {
        match self {
            Gpu::Sim(gpu) => Ok(Box::new(SimQueue::new(gpu))),
            Gpu::Cuda(gpu) => Ok(Box::new(CudaQueue::new(gpu)?)),
        }
    }
}
