//! Memory of NVIDIA GPUs, through the CUDA driver, which is loaded at run time.
//!
//! Neither building nor running without a GPU needs any part of CUDA. The driver is loaded when the first GPU
//! is opened; a missing library, version or device is an error that names it.
//!
//! ```text
//!   CudaGpu 0    one primary context, shared with all other CUDA code of this process
//!     |  \  \
//!     |   \  CudaBuffer      device memory             pointer::of: whose is an address?
//!     |    PinnedBuffer      host memory, near, that every GPU reaches
//!     |
//!   CudaStream ── copy, copy_batch, write_flag, launch ── CudaEvent
//! ```
//!
//! ```no_run
//! use ferrywire_memory::cuda::CudaGpu;
//!
//! # fn main() -> Result<(), ferrywire_memory::cuda::CudaError> {
//! let gpu = CudaGpu::open(0)?;
//! let buffer = gpu.alloc(1 << 20, 4096)?;
//! gpu.write_from_slice(buffer.address(), b"hello")?;
//! assert_eq!(gpu.read_to_vec(buffer.address(), 5)?, b"hello");
//! # Ok(()) }
//! ```
//!
//! Invariants: after every call the thread's current context and graph capture mode are those from before;
//! streams, events and memory keep their GPU open; a stream whose work goes on is not destroyed.
//! Read next: `gpu.rs`, then `stream.rs`; `driver.rs` for how the driver is found.

mod allocation;
mod capture;
pub mod deferred_free;
mod dmabuf;
mod driver;
mod error;
mod event;
mod functions;
mod gpu;
mod module;
mod pattern;
mod pinned;
pub mod pointer;
mod stack;
mod stream;

pub use allocation::CudaBuffer;
pub use dmabuf::dmabuf_fd;
pub use driver::driver_version;
pub use error::{CudaError, Failure, Result};
pub use event::CudaEvent;
pub use gpu::CudaGpu;
pub use module::{CudaFunction, CudaModule};
pub use pattern::CudaPattern;
pub use pinned::{PinnedBuffer, pinned_bytes};
pub use stream::CudaStream;

pub use crate::pattern::WordPattern;

/// A CUDA stream of another library (`CUstream`, `cudaStream_t`).
pub type RawStream = cudarc::driver::sys::CUstream;
/// A CUDA event of another library (`CUevent`, `cudaEvent_t`).
pub type RawEvent = cudarc::driver::sys::CUevent;
