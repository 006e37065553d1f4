//! Why memory cannot be had, read or written.

use super::cuda::CudaError;
use super::sim::SimGpuError;
use super::unpack::UnpackError;

/// Result of a call about memory.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call about memory failed. `PartialEq`, so that tests compare it whole.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A value given by the caller cannot be used.
    #[error("{what}: {why}")]
    Invalid {
        /// The argument or option.
        what: String,
        /// Why it cannot be used, and what would do.
        why: String,
    },
    /// Offset and length do not lie inside the region they name.
    #[error("bytes {offset}..{end} are outside the {side} region of {region_bytes} bytes", end = offset.saturating_add(*len))]
    OutOfRegion {
        /// "source" or "target".
        side: &'static str,
        /// First byte asked for.
        offset: u64,
        /// Bytes asked for.
        len: u64,
        /// Size of the region.
        region_bytes: u64,
    },
    /// A simulated GPU of this process.
    #[error("{0}")]
    SimGpu(#[from] SimGpuError),
    /// A GPU of this host, or its driver.
    #[error("{0}")]
    Cuda(#[from] CudaError),
    /// A plugin said something about a scattered receive that cannot be true.
    #[error("{0}")]
    Unpack(Box<UnpackError>),
    /// A system call on this host failed.
    #[error("{what}: {message}")]
    Io {
        /// The call and the thing it was applied to.
        what: String,
        /// The system's own words.
        message: String,
        /// The system's number (`errno`), where it gave one.
        code: Option<i32>,
    },
    /// A limit with a name was reached.
    #[error("limit {name} = {limit} reached: {why}")]
    Limit {
        /// The constant's name.
        name: &'static str,
        /// Its value.
        limit: u64,
        /// What hit it and what to try.
        why: String,
    },
    /// An invariant of ferrywire was broken.
    #[error("internal error, please report: {0}")]
    Internal(String),
}

impl Error {
    /// An [`Error::Invalid`].
    pub fn invalid(what: impl Into<String>, why: impl Into<String>) -> Error {
        Error::Invalid { what: what.into(), why: why.into() }
    }
}

impl From<UnpackError> for Error {
    fn from(error: UnpackError) -> Error {
        Error::Unpack(Box::new(error))
    }
}
