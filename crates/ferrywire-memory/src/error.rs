//! Errors of operations on memory: allocation, access, GPUs.

use super::cuda::CudaError;
use super::sim::SimGpuError;
use super::unpack::UnpackError;

/// Result of an operation on memory.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation on memory failed. Implements `PartialEq`, so tests compare whole errors.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// An argument is not valid.
    #[error("{what}: {why}")]
    Invalid {
        /// Name of the argument or option.
        what: String,
        /// Why the argument is not valid, and which values are.
        why: String,
    },
    /// Offset and length exceed the region.
    #[error("bytes {offset}..{end} are outside the {side} region of {region_bytes} bytes", end = offset.saturating_add(*len))]
    OutOfRegion {
        /// Which end of the transfer has the region: "source" or "target".
        side: &'static str,
        /// Offset of the range's first byte in the region.
        offset: u64,
        /// Length of the range in bytes.
        len: u64,
        /// Size of the region in bytes.
        region_bytes: u64,
    },
    /// A simulated GPU failed.
    #[error("{0}")]
    SimGpu(#[from] SimGpuError),
    /// A CUDA GPU or its driver failed.
    #[error("{0}")]
    Cuda(#[from] CudaError),
    /// A plugin described a scattered receive wrongly.
    #[error("{0}")]
    Unpack(Box<UnpackError>),
    /// A system call on this host failed.
    #[error("{what}: {message}")]
    Io {
        /// The failed call, and its object.
        what: String,
        /// The system's message about the failure.
        message: String,
        /// The system's error number (`errno`), where there is one.
        code: Option<i32>,
    },
    /// A named limit was reached.
    #[error("limit {name} = {limit} reached: {why}")]
    Limit {
        /// Name of the limit's constant.
        name: &'static str,
        /// Value of the limit's constant.
        limit: u64,
        /// Why the limit was reached, and what to try.
        why: String,
    },
    /// An invariant of ferrywire was violated.
    #[error("internal error, please report: {0}")]
    Internal(String),
}

impl Error {
    /// An [`Error::Invalid`] about the argument `what`.
    pub fn invalid(what: impl Into<String>, why: impl Into<String>) -> Error {
        Error::Invalid { what: what.into(), why: why.into() }
    }
}

impl From<UnpackError> for Error {
    fn from(error: UnpackError) -> Error {
        Error::Unpack(Box::new(error))
    }
}
