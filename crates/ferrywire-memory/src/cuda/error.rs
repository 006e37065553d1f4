//! What can go wrong with a GPU and its driver: each failed call with its device, size and the driver's words.

use super::driver;
use std::fmt;

/// Result of an operation on a GPU.
pub type Result<T, E = CudaError> = std::result::Result<T, E>;

/// Why an operation on a GPU failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// The driver's library is not there.
    #[error(
        "no CUDA driver: libcuda.so.1 cannot be loaded; install the NVIDIA driver, or give the container its \
         libraries (--gpus all)"
    )]
    NoDriver,
    /// The driver is older than what is needed.
    #[error(
        "the CUDA driver is too old: it is for CUDA {}, and CUDA {} is needed; update the NVIDIA driver",
        version_text(*found),
        version_text(*needed)
    )]
    OldDriver {
        /// The version found, as the driver counts: 12040 is 12.4.
        found: u32,
        /// The oldest that will do.
        needed: u32,
    },
    /// The driver lacks a function that its version should have.
    #[error("the CUDA driver (for CUDA {}) has no {symbol}: is it complete?", version_text(*version))]
    MissingSymbol {
        /// The function.
        symbol: &'static str,
        /// The driver's version, as it counts; 0 where it does not tell.
        version: u32,
    },
    /// There is a driver, and no GPU for it.
    #[error("the CUDA driver finds no GPU: is CUDA_VISIBLE_DEVICES empty, or no device in the container?")]
    NoDevice,
    /// There is no GPU with such a number.
    #[error("there is no CUDA GPU {index}: this process sees {count}, counted from 0")]
    NoSuchGpu {
        /// The number asked for.
        index: u32,
        /// How many there are.
        count: u32,
    },
    /// The GPU can be used once somebody opens it.
    #[error("CUDA GPU {index} is not open: call CudaGpu::open({index}) and keep it")]
    NotOpen {
        /// The GPU.
        index: u32,
    },
    /// Memory is used that was there when it was registered.
    #[error(
        "there is no GPU memory of {bytes} bytes at {address:#x} any more: deregister a region before its memory is \
         freed"
    )]
    Freed {
        /// First address.
        address: u64,
        /// How many.
        bytes: u64,
    },
    /// Alignments are powers of two.
    #[error("alignment {align} is not a power of two")]
    Alignment {
        /// What was asked for.
        align: usize,
    },
    /// A call of the driver failed.
    #[error("{failure}")]
    Call {
        /// What failed, and the driver's words.
        failure: Failure,
    },
    /// The GPU has no memory left.
    #[error("{failure}; {free_bytes} of the GPU's {total_bytes} bytes are free")]
    OutOfMemory {
        /// What failed, and the driver's words.
        failure: Failure,
        /// Bytes that are free on the GPU, as told right afterwards.
        free_bytes: u64,
        /// All it has.
        total_bytes: u64,
    },
    /// Host memory could not be pinned.
    #[error(
        "{bytes} bytes of pinned host memory: {why}; try smaller or fewer rings, or more locked memory \
         (ulimit -l, or the container's memlock)"
    )]
    Pinned {
        /// What was asked for.
        bytes: u64,
        /// The call that failed, with the driver's or the system's words.
        why: String,
    },
    /// A range begins in device memory and leaves it, or changes GPU.
    #[error("{bytes} bytes at {address:#x} leave the GPU memory there, which ends at {end:#x}")]
    OutOfRange {
        /// First address of the range.
        address: u64,
        /// Its length.
        bytes: u64,
        /// Where the memory of its first GPU ends.
        end: u64,
    },
    /// A copy was asked for that no GPU can make.
    #[error("no memory of a GPU, and no pinned memory, has {bytes} bytes at {address:#x}")]
    OutOfReach {
        /// First address of the range.
        address: u64,
        /// Its length.
        bytes: u64,
    },
    /// Memory of a GPU cannot be handed to other devices as a dma-buf.
    #[error("no dma-buf of {bytes} bytes at {address:#x}: {why}")]
    DmaBuf {
        /// First address.
        address: u64,
        /// Length.
        bytes: u64,
        /// The reason.
        why: String,
    },
    /// What was waited for had not happened in time. It may still happen.
    #[error("CUDA GPU {gpu}: {what} has not ended after {:?}", ferrywire_proto::text::rounded(*waited))]
    TimedOut {
        /// The GPU.
        gpu: u32,
        /// What was waited for.
        what: &'static str,
        /// How long.
        waited: std::time::Duration,
    },
}

/// A failed call of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The function.
    pub call: &'static str,
    /// The GPU it was for, where it was for one.
    pub gpu: Option<u32>,
    /// Bytes it was about, where it was about some.
    pub bytes: Option<u64>,
    /// The driver's code.
    pub code: u32,
    /// The code's name.
    pub name: &'static str,
    /// The driver's words.
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

pub(super) const OUT_OF_MEMORY: u32 = 2;
pub(super) const NO_DEVICE: u32 = 100;
pub(super) const NOT_READY: u32 = 600;
pub(super) const NOT_SUPPORTED: u32 = 801;

impl CudaError {
    /// The driver's code, where a call of it failed.
    pub fn code(&self) -> Option<u32> {
        match self {
            CudaError::Call { failure } | CudaError::OutOfMemory { failure, .. } => Some(failure.code),
            _ => None,
        }
    }
}

/// What a call is about, for the message when it fails.
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

/// The error of a call that gave `code`, if it is one.
pub(super) fn check(call: &'static str, about: About, code: u32) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    let (name, text) = driver::words(code);
    let About { gpu, bytes } = about;
    Err(CudaError::Call { failure: Failure { call, gpu, bytes, code, name, text } })
}

/// Calls the driver, once it is found; the number that it answers with.
macro_rules! ask {
    ($function:ident($($argument:expr),* $(,)?)) => {
        match $crate::cuda::driver::library() {
            Ok(library) => Ok((library.functions.$function)($($argument),*)),
            Err(missing) => Err(missing),
        }
    };
}
pub(super) use ask;

/// Calls the driver, and makes an error of what it answers.
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
    fn a_failed_call_is_told_with_device_size_and_the_drivers_words() {
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
    fn an_old_driver_is_told_with_both_versions() {
        let old = CudaError::OldDriver { found: 11040, needed: 12000 }.to_string();
        assert!(old.contains("for CUDA 11.4, and CUDA 12.0 is needed"), "{old}");
    }
}
