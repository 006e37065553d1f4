//! A GPU, simulated or real, with memory for one message.

use std::sync::Arc;

use ferrywire_memory::cuda::{CudaBuffer, CudaGpu};
use ferrywire_memory::sim::{self, SimBuffer, SimGpu};
use ferrywire_memory::unpack::{CudaQueue, GatherDevice, SimQueue};

use crate::Result;

const PAGE_BYTES: usize = 4096;

pub enum Gpu {
    Sim(Arc<SimGpu>, SimBuffer),
    Cuda(Arc<CudaGpu>, CudaBuffer),
}

impl Gpu {
    /// Opens GPU `index` and allocates whole pages for messages of `bytes` bytes.
    pub fn open(index: u32, cuda: bool, bytes: usize) -> Result<Gpu> {
        let bytes = bytes.next_multiple_of(PAGE_BYTES);
        if cuda {
            let gpu = CudaGpu::open(index)?;
            let memory = gpu.alloc(bytes, PAGE_BYTES)?;
            Ok(Gpu::Cuda(gpu, memory))
        } else {
            let gpu = SimGpu::open(index)?;
            let memory = gpu.alloc(bytes, PAGE_BYTES)?;
            Ok(Gpu::Sim(gpu, memory))
        }
    }

    /// Address and length of the memory.
    pub fn memory(&self) -> (u64, usize) {
        match self {
            Gpu::Sim(_, memory) => (memory.address(), memory.len()),
            Gpu::Cuda(_, memory) => (memory.address(), memory.len()),
        }
    }

    /// Runs `body` with this GPU current, which plugins require in listen, accept, connect and regMr.
    pub fn current<T>(&self, body: impl FnOnce() -> Result<T>) -> Result<T> {
        match self {
            Gpu::Sim(gpu, _) => sim::with_current(gpu.index(), body)?,
            Gpu::Cuda(gpu, _) => gpu.with_current(body)?,
        }
    }

    pub fn write(&self, bytes: &[u8]) -> Result<()> {
        match self {
            Gpu::Sim(gpu, memory) => Ok(gpu.write_from_slice(memory.address(), bytes)?),
            Gpu::Cuda(gpu, memory) => Ok(gpu.write_from_slice(memory.address(), bytes)?),
        }
    }

    pub fn read(&self, bytes: &mut [u8]) -> Result<()> {
        match self {
            Gpu::Sim(gpu, memory) => Ok(gpu.read_into_slice(memory.address(), bytes)?),
            Gpu::Cuda(gpu, memory) => Ok(gpu.read_into_slice(memory.address(), bytes)?),
        }
    }

    /// Creates a queue for the gathers of one channel.
    pub fn queue(&self) -> Result<Box<dyn GatherDevice>> {
        match self {
            Gpu::Sim(gpu, _) => Ok(Box::new(SimQueue::new(gpu))),
            Gpu::Cuda(gpu, _) => Ok(Box::new(CudaQueue::new(gpu)?)),
        }
    }
}
