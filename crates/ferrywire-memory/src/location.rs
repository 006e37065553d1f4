//! Memory locations: host, CUDA GPU, simulated GPU.
//!
//! Read next: `registration.rs`, for regions.

use crate::cuda::pointer;
use crate::error::Result;
use crate::sim::{SimGpu, SimGpuError};
use ferrywire_proto::limits;
use std::fmt;

/// Where the bytes of a region are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MemoryLocation {
    /// Memory of the host.
    Host,
    /// Memory of simulated GPU number N.
    SimGpu(u32),
    /// Memory of CUDA GPU number N of this process.
    Cuda(u32),
}

impl fmt::Display for MemoryLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MemoryLocation::Host => f.write_str("host memory"),
            MemoryLocation::SimGpu(index) => write!(f, "memory of simulated GPU {index}"),
            MemoryLocation::Cuda(index) => write!(f, "memory of CUDA GPU {index}"),
        }
    }
}

const HOST: u8 = 0;
const SIM_GPU: u8 = 1;
const CUDA: u8 = 2;
const _: () = assert!(limits::SIM_GPUS_MAX <= u16::MAX as usize);
const _: () = assert!(limits::CUDA_GPUS_MAX <= u16::MAX as usize);

impl MemoryLocation {
    /// The location of `bytes` bytes at an address of this process. Returns an error for a range that spans
    /// several locations, and for memory of a GPU whose driver cannot be used.
    pub fn of(base: *mut u8, bytes: u64) -> Result<MemoryLocation> {
        let address = base as u64;
        let Some((index, first, len)) = SimGpu::of(address) else {
            return Ok(
                pointer::gpu_of_range(address, bytes)?.map_or(MemoryLocation::Host, MemoryLocation::Cuda)
            );
        };
        if address - first > len || bytes > len - (address - first) {
            return Err(SimGpuError::OutOfRange { address, bytes, base: first, len }.into());
        }
        Ok(MemoryLocation::SimGpu(index))
    }

    /// Encodes the location for a region's descriptor: a kind and a number.
    pub fn encode(self) -> (u8, u16) {
        match self {
            MemoryLocation::Host => (HOST, 0),
            MemoryLocation::SimGpu(index) => (SIM_GPU, index as u16),
            MemoryLocation::Cuda(index) => (CUDA, index as u16),
        }
    }

    /// Decodes a location from [`MemoryLocation::encode`]; `None` for an unknown kind.
    pub fn parse(kind: u8, index: u16) -> Option<MemoryLocation> {
        match (kind, index) {
            (HOST, 0) => Some(MemoryLocation::Host),
            (SIM_GPU, _) if usize::from(index) < limits::SIM_GPUS_MAX => {
                Some(MemoryLocation::SimGpu(index.into()))
            }
            (CUDA, _) if usize::from(index) < limits::CUDA_GPUS_MAX => {
                Some(MemoryLocation::Cuda(index.into()))
            }
            _ => None,
        }
    }
}
