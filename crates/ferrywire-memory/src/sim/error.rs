//! Errors of simulated GPUs.

use std::time::Duration;

/// Result of an operation on a simulated GPU.
pub type Result<T, E = SimGpuError> = std::result::Result<T, E>;

/// Why an operation on a simulated GPU failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SimGpuError {
    /// No simulated GPU has this number.
    #[error("there is no simulated GPU {index}: use 0 to {}", ferrywire_proto::limits::SIM_GPUS_MAX - 1)]
    NoSuchGpu {
        /// The requested number of a GPU.
        index: u32,
    },
    /// The GPU must be opened before it is used.
    #[error("simulated GPU {index} is not open: call SimGpu::open({index}) and keep it")]
    NotOpen {
        /// Number of the GPU that is not open.
        index: u32,
    },
    /// The alignment is not a power of two.
    #[error("alignment {align} is not a power of two")]
    Alignment {
        /// The requested alignment in bytes.
        align: usize,
    },
    /// The system could not allocate memory or start a thread.
    #[error("simulated GPU: {what}: {message}")]
    System {
        /// The operation that the system refused.
        what: String,
        /// The system's message about the failure.
        message: String,
    },
    /// The address is in no memory that the GPU can access, or not any more.
    #[error("{address:#x} is not memory of a simulated GPU: freed, or never allocated there")]
    NotAllocated {
        /// The address that the GPU cannot access.
        address: u64,
    },
    /// The range starts in an allocation, but exceeds it.
    #[error("{bytes} bytes at {address:#x} leave their allocation ({len} bytes at {base:#x})")]
    OutOfRange {
        /// First address of the range.
        address: u64,
        /// Length of the range in bytes.
        bytes: u64,
        /// First address of the allocation.
        base: u64,
        /// Length of the allocation in bytes.
        len: u64,
    },
    /// GPU memory was passed where host memory is needed.
    #[error("{address:#x} is memory of simulated GPU {gpu}, not of the host: copy from device to device")]
    NotHostMemory {
        /// The address of the GPU memory.
        address: u64,
        /// Number of the GPU that has the memory.
        gpu: u32,
    },
    /// The memory cannot be exported as a dma-buf.
    #[error("cannot export the {bytes} bytes at {address:#x} of a simulated GPU as a dma-buf: {why}")]
    DmaBuf {
        /// First address of the range.
        address: u64,
        /// Length of the range in bytes.
        bytes: u64,
        /// Why the memory cannot be exported.
        why: String,
    },
    /// An operation failed because of an injected fault.
    #[error("simulated GPU {gpu}: operation {operation} failed because SimFaults asked for it")]
    Injected {
        /// Number of the GPU with the injected fault.
        gpu: u32,
        /// Number of the operation, counted from 0 since the faults were set.
        operation: u64,
    },
    /// An event or a stream did not finish in time. It may still finish.
    #[error("simulated GPU {gpu}: {what} has not ended after {:?}", ferrywire_proto::text::rounded(*waited))]
    TimedOut {
        /// Number of the GPU with the event or stream.
        gpu: u32,
        /// The event or stream that was waited for.
        what: &'static str,
        /// Time for which the caller waited.
        waited: Duration,
    },
    /// The stream was dropped before its work was done.
    #[error("simulated GPU {gpu}: the stream was dropped before this work started")]
    StreamDropped {
        /// Number of the GPU of the stream.
        gpu: u32,
    },
    /// The value of `FERRYWIRE_SIM_GPU_FAULTS` is not valid.
    #[error("FERRYWIRE_SIM_GPU_FAULTS: {part:?} {why}")]
    FaultsText {
        /// The invalid part of the value.
        part: String,
        /// Why the part is invalid, or its valid form.
        why: &'static str,
    },
}
