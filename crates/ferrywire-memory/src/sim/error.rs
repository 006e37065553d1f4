//! What can go wrong with a simulated GPU.

use std::time::Duration;

/// Result of an operation on a simulated GPU.
pub type Result<T, E = SimGpuError> = std::result::Result<T, E>;

/// Why an operation on a simulated GPU failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SimGpuError {
    /// There is no simulated GPU with such a number.
    #[error("there is no simulated GPU {index}: use 0 to {}", ferrywire_proto::limits::SIM_GPUS_MAX - 1)]
    NoSuchGpu {
        /// The number asked for.
        index: u32,
    },
    /// The GPU exists once somebody opens it.
    #[error("simulated GPU {index} is not open: call SimGpu::open({index}) and keep it")]
    NotOpen {
        /// The GPU.
        index: u32,
    },
    /// Alignments are powers of two.
    #[error("alignment {align} is not a power of two")]
    Alignment {
        /// What was asked for.
        align: usize,
    },
    /// The system gave no memory, or no thread.
    #[error("simulated GPU: {what}: {message}")]
    System {
        /// What was asked of the system.
        what: String,
        /// Its own words.
        message: String,
    },
    /// The address is not, or not any more, memory that the GPU can reach.
    #[error("{address:#x} is not memory of a simulated GPU: freed, or never allocated there")]
    NotAllocated {
        /// The address.
        address: u64,
    },
    /// The range begins in an allocation and leaves it.
    #[error("{bytes} bytes at {address:#x} leave their allocation ({len} bytes at {base:#x})")]
    OutOfRange {
        /// First address of the range.
        address: u64,
        /// Its length.
        bytes: u64,
        /// First address of the allocation.
        base: u64,
        /// Its length.
        len: u64,
    },
    /// Memory of a GPU was given where host memory belongs.
    #[error("{address:#x} is memory of simulated GPU {gpu}, not of the host: copy from device to device")]
    NotHostMemory {
        /// The address.
        address: u64,
        /// The GPU it belongs to.
        gpu: u32,
    },
    /// Other devices cannot be given the memory.
    #[error("no dma-buf of {bytes} bytes at {address:#x} of a simulated GPU: {why}")]
    DmaBuf {
        /// First address of the range.
        address: u64,
        /// Its length.
        bytes: u64,
        /// What is missing.
        why: String,
    },
    /// A fault that was asked for.
    #[error("simulated GPU {gpu}: operation {operation} failed as asked for (SimFaults)")]
    Injected {
        /// The GPU.
        gpu: u32,
        /// Its number, counted from 0 since the faults were set.
        operation: u64,
    },
    /// What was waited for had not happened in time. It may still happen.
    #[error("simulated GPU {gpu}: {what} has not ended after {:?}", ferrywire_proto::text::rounded(*waited))]
    TimedOut {
        /// The GPU.
        gpu: u32,
        /// What was waited for.
        what: &'static str,
        /// How long.
        waited: Duration,
    },
    /// The stream was dropped before its work was done.
    #[error("simulated GPU {gpu}: the stream was dropped before it came to this")]
    StreamDropped {
        /// The GPU.
        gpu: u32,
    },
    /// The text of `FERRYWIRE_SIM_GPU_FAULTS` is wrong.
    #[error("FERRYWIRE_SIM_GPU_FAULTS: {part:?} {why}")]
    FaultsText {
        /// The part that is wrong.
        part: String,
        /// What would be right.
        why: &'static str,
    },
}
