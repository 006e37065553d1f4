//! A GPU, real or simulated, as the rest of the engine knows it.
//!
//! Invariant: whoever needs a GPU, and not one of the two kinds, asks here; what the kinds do differently is in
//! `cuda` and `sim`. Read next: `lib.rs`, for memory; `unpack/device.rs`, for queues of work.

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
    /// Where from: memory of any GPU of the same kind, or host memory that GPUs reach.
    pub source: u64,
    /// Where to.
    pub target: u64,
    /// How much.
    pub bytes: usize,
}

/// A dma-buf of `bytes` bytes of memory at `address`, in whole pages, which NICs can be bound to. It stays when the
/// memory is freed.
///
/// # Errors
/// [`Error::Invalid`] for host memory, and the GPU's reasons.
pub fn dmabuf_fd(location: MemoryLocation, address: u64, bytes: u64) -> Result<OwnedFd> {
    match location {
        MemoryLocation::SimGpu(_) => Ok(sim::dmabuf_fd(address, bytes)?),
        MemoryLocation::Cuda(_) => Ok(cuda::dmabuf_fd(address, bytes)?),
        MemoryLocation::Host => {
            let why =
                "there is none of host memory that is in use already: send it as it is, or copy it to a pool";
            Err(Error::invalid("dma-buf", why))
        }
    }
}

/// A GPU that is open, and stays so as long as this is held.
#[derive(Clone, Debug)]
pub enum Gpu {
    /// A simulated one.
    Sim(Arc<SimGpu>),
    /// A CUDA device.
    Cuda(Arc<CudaGpu>),
}

impl Gpu {
    /// The GPU of a place, opened if nobody has.
    pub fn open(location: MemoryLocation) -> Result<Gpu> {
        match location {
            MemoryLocation::SimGpu(index) => Ok(Gpu::Sim(SimGpu::open(index)?)),
            MemoryLocation::Cuda(index) => Ok(Gpu::Cuda(CudaGpu::open(index)?)),
            MemoryLocation::Host => Err(host_has_no_gpu()),
        }
    }

    /// The GPU of a place, if somebody holds it open.
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

    /// Copies its memory to the host, and waits.
    pub fn read_into_slice(&self, source: u64, target: &mut [u8]) -> Result<()> {
        match self {
            Gpu::Sim(gpu) => Ok(gpu.read_into_slice(source, target)?),
            Gpu::Cuda(gpu) => Ok(gpu.read_into_slice(source, target)?),
        }
    }

    /// Copies from the host to its memory, and waits.
    pub fn write_from_slice(&self, target: u64, source: &[u8]) -> Result<()> {
        match self {
            Gpu::Sim(gpu) => Ok(gpu.write_from_slice(target, source)?),
            Gpu::Cuda(gpu) => Ok(gpu.write_from_slice(target, source)?),
        }
    }

    /// The allocation that memory of such a GPU lies in; pieces side by side count as one.
    pub fn allocation(&self, address: u64, bytes: u64) -> Option<Extent> {
        match self {
            Gpu::Sim(_) => SimGpu::of(address).map(|(_, base, bytes)| Extent { base, bytes }),
            Gpu::Cuda(_) => {
                let found = cuda::pointer::stretch(address, bytes)?;
                Some(Extent { base: found.base, bytes: found.bytes })
            }
        }
    }

    /// Does something with the GPU current on this thread.
    pub fn with_current<T>(&self, body: impl FnOnce() -> T) -> Result<T> {
        match self {
            Gpu::Sim(gpu) => Ok(sim::with_current(gpu.index(), body)?),
            Gpu::Cuda(gpu) => Ok(gpu.with_current(body)?),
        }
    }

    /// The same for code of others that may leave more current than it found.
    pub fn with_current_alone<T>(&self, body: impl FnOnce() -> T) -> Result<T> {
        match self {
            Gpu::Sim(_) => self.with_current(body),
            Gpu::Cuda(gpu) => Ok(gpu.with_current_alone(body)?),
        }
    }

    /// Host memory that it reaches too, and that nobody else is given afterwards: something may still be sent of it when
    /// it is dropped. For set-up.
    pub fn map_once(&self, bytes: usize) -> Result<Mapped> {
        match self {
            Gpu::Sim(gpu) => SimQueue::new(gpu).map(bytes),
            Gpu::Cuda(gpu) => mapped(gpu.pinned_once(bytes)?),
        }
    }

    /// A queue of work of its own. For set-up.
    pub fn queue(&self) -> Result<Box<dyn GatherDevice>> {
        match self {
            Gpu::Sim(gpu) => Ok(Box::new(SimQueue::new(gpu))),
            Gpu::Cuda(gpu) => Ok(Box::new(CudaQueue::new(gpu)?)),
        }
    }
}
