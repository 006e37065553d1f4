//! Errors of CUDA GPUs and their driver: each failed call with device, size and the driver's message.

use super::driver;
use std::fmt;

/// Result of an operation on a GPU.
pub type Result<T, E = CudaError> = std::result::Result<T, E>;

/// Why an operation on a GPU failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// The driver library cannot be loaded.
    #[error(
        "no CUDA driver: libcuda.so.1 cannot be loaded; install the NVIDIA driver, or give the container its \
         libraries (--gpus all)"
    )]
    NoDriver,
    /// The driver is older than required.
    #[error(
        "the CUDA driver is too old: it is for CUDA {}, and CUDA {} is needed; update the NVIDIA driver",
        version_text(*found),
        version_text(*needed)
    )]
    OldDriver {
        /// Version of the driver, in the driver's notation: 12040 is CUDA 12.4.
        found: u32,
        /// Oldest supported version, in the driver's notation.
        needed: u32,
    },
    /// The driver lacks a function that its version should have.
    #[error("the CUDA driver (for CUDA {}) has no {symbol}: the driver is incomplete; install it again", version_text(*version))]
    MissingSymbol {
        /// Name of the missing function.
        symbol: &'static str,
        /// Version of the driver in its notation; 0 where unknown.
        version: u32,
    },
    /// The driver finds no GPU.
    #[error("the CUDA driver finds no GPU: is CUDA_VISIBLE_DEVICES empty, or no device in the container?")]
    NoDevice,
    /// No GPU has this number.
    #[error("there is no CUDA GPU {index}: this process sees {count}, counted from 0")]
    NoSuchGpu {
        /// The requested number of a GPU.
        index: u32,
        /// Number of GPUs that this process sees.
        count: u32,
    },
    /// The GPU must be opened before it is used.
    #[error("CUDA GPU {index} is not open: call CudaGpu::open({index}) and keep it")]
    NotOpen {
        /// Number of the GPU that is not open.
        index: u32,
    },
    /// GPU memory was freed after it was registered.
    #[error(
        "there is no GPU memory of {bytes} bytes at {address:#x} any more: deregister a region before its memory is \
         freed"
    )]
    Freed {
        /// First address of the freed range.
        address: u64,
        /// Length of the freed range in bytes.
        bytes: u64,
    },
    /// The alignment is not a power of two.
    #[error("alignment {align} is not a power of two")]
    Alignment {
        /// The requested alignment in bytes.
        align: usize,
    },
    /// A call of the driver failed.
    #[error("{failure}")]
    Call {
        /// The failed call, and the driver's message.
        failure: Failure,
    },
    /// The GPU has not enough free memory.
    #[error("{failure}; {free_bytes} of the GPU's {total_bytes} bytes are free")]
    OutOfMemory {
        /// The failed allocation, and the driver's message.
        failure: Failure,
        /// Free bytes on the GPU, measured right after the failure.
        free_bytes: u64,
        /// Size of the GPU's memory in bytes.
        total_bytes: u64,
    },
    /// Host memory could not be pinned.
    #[error(
        "cannot allocate {bytes} bytes of pinned host memory: {why}; try smaller or fewer rings, or more locked memory \
         (ulimit -l, or the container's memlock)"
    )]
    Pinned {
        /// Requested size of the pinned memory in bytes.
        bytes: u64,
        /// The failed call, with the driver's or the system's message.
        why: String,
    },
    /// The range starts in device memory, but leaves it or continues on another GPU.
    #[error("{bytes} bytes at {address:#x} exceed the GPU memory at that address, which ends at {end:#x}")]
    OutOfRange {
        /// First address of the range.
        address: u64,
        /// Length of the range in bytes.
        bytes: u64,
        /// End address of the memory in which the range starts.
        end: u64,
    },
    /// No GPU can access the range of a copy.
    #[error("the {bytes} bytes at {address:#x} are neither GPU memory nor pinned memory")]
    OutOfReach {
        /// First address of the range.
        address: u64,
        /// Length of the range in bytes.
        bytes: u64,
    },
    /// The memory cannot be exported as a dma-buf.
    #[error("cannot export the {bytes} bytes at {address:#x} as a dma-buf: {why}")]
    DmaBuf {
        /// First address of the range.
        address: u64,
        /// Length of the range in bytes.
        bytes: u64,
        /// Why the memory cannot be exported.
        why: String,
    },
    /// The stream captures a graph, so it cannot be ordered with a transfer: replays of the graph would not be.
    #[error(
        "cannot order a transfer with stream {stream:#x} of CUDA GPU {gpu}, which is capturing a graph: replays of the \
         graph would not be ordered with the transfer; order it before or after the capture"
    )]
    StreamCapturing {
        /// Number of the GPU of the stream.
        gpu: u32,
        /// The driver's handle of the stream; 0 for the default stream.
        stream: u64,
    },
    /// An event or a stream did not finish in time. It may still finish.
    #[error("CUDA GPU {gpu}: {what} has not ended after {:?}", ferrywire_proto::text::rounded(*waited))]
    TimedOut {
        /// Number of the GPU with the event or stream.
        gpu: u32,
        /// The event or stream that was waited for.
        what: &'static str,
        /// Time for which the caller waited.
        waited: std::time::Duration,
    },
}

/// A failed call of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Name of the driver's function.
    pub call: &'static str,
    /// The GPU of the call; `None` for a call that concerns no GPU.
    pub gpu: Option<u32>,
    /// Size in bytes that the call concerns; `None` where it concerns no size.
    pub bytes: Option<u64>,
    /// The driver's error code.
    pub code: u32,
    /// Name of the error code.
    pub name: &'static str,
    /// The driver's message for the code.
    pub text: &'static str,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Failure { call, gpu, bytes, code, name, text } = self;
        f.write_str(call.trim_end_matches("_v2"))?;
        if let Some(gpu) = gpu {
            write!(f, " on CUDA GPU {gpu}")?;
        }
        if let Some(bytes) = bytes {
            write!(f, " ({bytes} bytes)")?;
        }
        write!(f, ": {name} ({code}): {text}")
    }
}

pub(super) const INVALID_VALUE: u32 = 1;
pub(super) const OUT_OF_MEMORY: u32 = 2;
const NOT_INITIALIZED: u32 = 3;
const DEINITIALIZED: u32 = 4;
const STUB_LIBRARY: u32 = 34;
pub(super) const NO_DEVICE: u32 = 100;
/// The answer to a push of the GPU's own context once another library has destroyed that context.
const INVALID_CONTEXT: u32 = 201;
pub(super) const NOT_READY: u32 = 600;
pub(super) const NOT_SUPPORTED: u32 = 801;
/// Codes with which a driver answers for an address that is not of a GPU: some refuse addresses that they do not know, and a
/// driver that is not in use has no memory.
pub(super) const NO_GPU_MEMORY: [u32; 4] = [INVALID_VALUE, NOT_INITIALIZED, DEINITIALIZED, STUB_LIBRARY];
/// Error codes of the driver after which a context is lost: uncorrectable errors of memory and NVLink, a
/// destroyed context, and kernels that failed: at an illegal, misaligned or foreign address, by a time limit,
/// an assertion, an illegal instruction or program counter, or the hardware's stack; a contained error, leaked
/// tensor memory, an ended MPS client and a failed external device.
const LOSES_CONTEXT: [u32; 16] =
    [214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911];

impl CudaError {
    /// The driver's error code; `None` when no driver call failed.
    pub fn code(&self) -> Option<u32> {
        match self {
            CudaError::Call { failure } | CudaError::OutOfMemory { failure, .. } => Some(failure.code),
            _ => None,
        }
    }

    /// Whether every later call in the GPU's context fails with this error, until the process ends.
    pub fn loses_context(&self) -> bool {
        self.code().is_some_and(|code| LOSES_CONTEXT.contains(&code))
    }

    /// Whether the GPU's work has ended, in whatever way: its context is lost, or there is none any more. After any
    /// other error of a query the work may still run.
    pub fn ends_work(&self) -> bool {
        self.loses_context() || matches!(self.code(), Some(DEINITIALIZED | INVALID_CONTEXT))
    }
}

/// GPU and size that a driver call concerns, for the error of the call.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct About {
    pub gpu: Option<u32>,
    pub bytes: Option<u64>,
}

impl About {
    pub fn gpu(index: u32) -> About {
        About { gpu: Some(index), bytes: None }
    }

    pub fn bytes(self, bytes: usize) -> About {
        About { bytes: Some(bytes as u64), ..self }
    }
}

/// Converts the code that a driver call returned to a `Result`.
pub(super) fn check(call: &'static str, about: About, code: u32) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    let (name, text) = driver::words(code);
    let About { gpu, bytes } = about;
    Err(CudaError::Call { failure: Failure { call, gpu, bytes, code, name, text } })
}

/// Calls a driver function; evaluates to the function's return code.
macro_rules! ask {
    ($function:ident($($argument:expr),* $(,)?)) => {
        match $crate::cuda::driver::library() {
            Ok(library) => Ok((library.functions.$function)($($argument),*)),
            Err(missing) => Err(missing),
        }
    };
}
pub(super) use ask;

/// Calls a driver function; evaluates to a [`Result`], an error for every code but success.
macro_rules! call {
    ($about:expr, $function:ident($($argument:expr),* $(,)?)) => {
        $crate::cuda::error::ask!($function($($argument),*))
            .and_then(|code| $crate::cuda::error::check(stringify!($function), $about, code))
    };
}
pub(super) use call;

fn version_text(version: u32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_call_is_reported_with_device_size_and_the_drivers_words() {
        let failure = Failure {
            call: "cuMemAlloc_v2",
            gpu: Some(3),
            bytes: Some(4096),
            code: 2,
            name: "CUDA_ERROR_OUT_OF_MEMORY",
            text: "out of memory",
        };
        let words = "cuMemAlloc on CUDA GPU 3 (4096 bytes): CUDA_ERROR_OUT_OF_MEMORY (2): out of memory";
        assert_eq!(CudaError::Call { failure: failure.clone() }.to_string(), words);
        let full = CudaError::OutOfMemory { failure: failure.clone(), free_bytes: 7, total_bytes: 9 };
        assert_eq!(full.to_string(), format!("{words}; 7 of the GPU's 9 bytes are free"));
        let plain = Failure { gpu: None, bytes: None, call: "cuInit", ..failure };
        assert_eq!(plain.to_string(), "cuInit: CUDA_ERROR_OUT_OF_MEMORY (2): out of memory");
    }

    #[test]
    fn an_invalid_value_leaves_the_context_and_an_illegal_address_does_not() {
        let failure = |code| Failure {
            call: "cuStreamQuery",
            gpu: None,
            bytes: None,
            code,
            name: "CUDA_ERROR",
            text: "an error",
        };
        let failed = |code| CudaError::Call { failure: failure(code) }.loses_context();
        assert_eq!([1, 2, 600, 700, 719].map(failed), [false, false, false, true, true]);
        assert!(!CudaError::Freed { address: 1, bytes: 1 }.loses_context());
        let ended = |code| CudaError::Call { failure: failure(code) }.ends_work();
        assert_eq!([1, 4, 201, 719, 900, 999].map(ended), [false, true, true, true, false, false]);
    }

    #[test]
    fn an_old_driver_is_reported_with_both_versions() {
        let old = CudaError::OldDriver { found: 11040, needed: 12000 }.to_string();
        assert!(old.contains("for CUDA 11.4, and CUDA 12.0 is needed"), "{old}");
    }
}
