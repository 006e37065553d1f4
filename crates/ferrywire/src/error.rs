//! The errors of the engine, sorted by their origin.
//!
//! A failed operation returns an [`Error`], or the part of it that its family of operations can return
//! (`families.rs`): what failed, on what object, why, and what to try. The [`ErrorKind`] says who has to act. Errors are plain values (`Clone`, `PartialEq`): tests compare them, and
//! one failure ends any number of transfers.

mod causes;
mod families;

pub use causes::{LossCause, RefusalReason, UnreachableCause};
pub use families::{ConnectError, RegisterError, TransferError};

use ferrywire_memory::cuda::CudaError;
use ferrywire_memory::sim::SimGpuError;
use ferrywire_memory::unpack::UnpackError;
use ferrywire_memory::{self as memory, MemoryLocation};
use ferrywire_ncclnet::{CallError, LoadError};
use ferrywire_proto::handshake::HandshakeError;
use ferrywire_proto::limits::{CONTROL_UNACKED_BYTES_MAX, CONTROL_UNACKED_MAX};
use ferrywire_proto::session::SessionError;
use ferrywire_proto::text::rounded;
use ferrywire_sys::fork::Forked;
use std::fmt;
use std::time::Duration;

/// Result of an engine operation.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The origin of an [`Error`], and so who can act on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The caller used the API or the configuration incorrectly.
    Usage,
    /// This host: its sockets, memory or limits.
    Local,
    /// A GPU of this host, or its driver.
    Gpu,
    /// An NCCL net plugin, or its file.
    Plugin,
    /// The peer or the network to it.
    Peer,
    /// One end refused the other, for example because of its version, secret or configuration.
    Refused,
    /// The caller's timeout or stall timeout passed. A transfer continues.
    Timeout,
    /// A defect of ferrywire; please report it.
    Internal,
}

/// Why an operation failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A value that the caller gave cannot be used.
    #[error("{what}: {why}")]
    Invalid {
        /// Name of the argument or option.
        what: String,
        /// Why it cannot be used, and which values can.
        why: String,
    },
    /// Offset and length do not lie inside the region they name.
    #[error("bytes {offset}..{end} are outside the {side} region of {region_bytes} bytes", end = offset.saturating_add(*len))]
    OutOfRegion {
        /// Which region of the transfer: "source" or "target"; for lists of blocks "local" or "remote".
        side: &'static str,
        /// Offset of the range in the region, in bytes.
        offset: u64,
        /// Length of the range in bytes.
        len: u64,
        /// Size of the region in bytes.
        region_bytes: u64,
    },
    /// The transport cannot move bytes from or to this kind of memory. No byte was moved.
    #[error("the {side} region is {location}, {}", way_out(transport))]
    UnsupportedMemory {
        /// Which region: "local" or "remote".
        side: &'static str,
        /// The memory location of the region.
        location: MemoryLocation,
        /// The transport in use.
        transport: &'static str,
    },
    /// A simulated GPU of this process failed.
    #[error("{0}")]
    SimGpu(#[from] SimGpuError),
    /// A GPU of this host, or its driver, failed.
    #[error("{0}")]
    Cuda(#[from] CudaError),
    /// A plugin could not be loaded.
    #[error("{0}")]
    PluginLoad(Box<LoadError>),
    /// A call of a plugin failed.
    #[error("{0}")]
    PluginCall(Box<CallError>),
    /// A plugin reported an impossible fragment of a scattered receive.
    #[error("{0}")]
    Unpack(Box<UnpackError>),
    /// A system call on this host failed.
    #[error("{what}: {message}")]
    Io {
        /// The call that failed, and the object it was applied to.
        what: String,
        /// The system's error message.
        message: String,
        /// The system's error number (`errno`), if there is one.
        code: Option<i32>,
    },
    /// No connection could be established.
    #[error("cannot reach {address}: {why}")]
    Unreachable {
        /// The remote address.
        address: String,
        /// The cause as a value, for programs.
        cause: UnreachableCause,
        /// The system's error message and the likely cause.
        why: String,
    },
    /// None of the NICs that the user named has an address of the address family of the target.
    #[error("NIC: none of {nics} has an address that could reach {address}")]
    NoUsableNic {
        /// Names of the NICs, separated by commas.
        nics: String,
        /// The target's address.
        address: String,
    },
    /// One end refused the other: the other end is not ferrywire, or has another version, secret, identity or
    /// configuration.
    #[error("{address} refused: {why}")]
    Refused {
        /// The remote address.
        address: String,
        /// The reason as a value, for programs.
        reason: RefusalReason,
        /// The answer of the other end, or what it failed to prove, and what to check.
        why: String,
    },
    /// The peer is gone: killed, stopped, or unreachable over every NIC.
    #[error("lost peer {peer}: {why}")]
    PeerLost {
        /// The peer's name: its address and, if given, its label.
        peer: String,
        /// The cause as a value, for programs.
        cause: LossCause,
        /// What this end observed, on which NICs and channels.
        why: String,
    },
    /// The peer closed the connection in an orderly way.
    #[error("peer {peer} closed the connection")]
    PeerClosed {
        /// The peer's name.
        peer: String,
    },
    /// The peer has the secret and violates the protocol of this version.
    #[error("peer {peer} violates the protocol: {why}; check that both ends run one version")]
    ProtocolViolation {
        /// The peer's address.
        peer: String,
        /// The rule that the peer broke.
        why: String,
    },
    /// The peer refused an access: its region is deregistered, of another endpoint or too small, or the peer
    /// holds too many unread notifications.
    #[error("peer {peer} refused the access: {why}")]
    AccessRefused {
        /// The peer's name.
        peer: String,
        /// The reason the peer gave.
        why: String,
    },
    /// A received message is longer than the buffer posted for it.
    #[error("a message of {message_bytes} bytes with tag {tag} arrived for a buffer of {buffer_bytes}")]
    Truncated {
        /// The message's tag.
        tag: u64,
        /// Length of the message in bytes.
        message_bytes: u64,
        /// Size of the posted buffer in bytes.
        buffer_bytes: u64,
    },
    /// A transfer made no progress for the caller's stall timeout, and continues; or the timeout of a call
    /// passed, such as `connect`, `accept`, `wait_notification` or `close`.
    #[error("{}{what}", stalled(waited))]
    Stalled {
        /// The operation that waits, and its state.
        what: String,
        /// The peer's name, or the address to connect to, if there is one.
        peer: Option<String>,
        /// Time without progress.
        waited: Duration,
    },
    /// A transfer did not end within the caller's total timeout. The transfer continues.
    #[error("{}: {what}", unfinished(timeout))]
    TimedOut {
        /// The operation that did not end, and its state.
        what: String,
        /// The peer's name, or the address to connect to, if there is one.
        peer: Option<String>,
        /// The caller's timeout.
        timeout: Duration,
    },
    /// The endpoint belongs to the process from which this process was forked.
    #[error(
        "the endpoint was built in process {built_in}, and this is process {here}, forked from it: threads and \
         connections stayed there; build an endpoint here, or start processes afresh (\"spawn\") instead of forking"
    )]
    Forked {
        /// Id of the process with the endpoint.
        built_in: u32,
        /// Id of this process.
        here: u32,
    },
    /// A thread or device of this host still uses a resource that should be free.
    #[error(
        "{what} is still held by {by} after {waited:.1?}: it may be stuck in the kernel or a driver, so do not reuse the memory"
    )]
    ResourceBusy {
        /// The resource that is still in use.
        what: String,
        /// The thread or device that uses it.
        by: String,
        /// Time that was waited for the resource.
        waited: Duration,
    },
    /// One of several endpoints that work together failed, which fails all of them.
    #[error("{phase} {endpoint}: {error}")]
    Phase {
        /// What the endpoints did at the time, such as "connecting".
        phase: &'static str,
        /// The name of the endpoint.
        endpoint: String,
        /// Index, among the targets, of the target that was not reached; `None` for other phases.
        target: Option<usize>,
        /// The endpoint's error.
        error: Box<Error>,
    },
    /// The caller cancelled the operation.
    #[error("cancelled")]
    Cancelled,
    /// This process closed the endpoint or the peer.
    #[error("closed by this process: the endpoint, or its connection to this peer")]
    Closed,
    /// A named limit was reached.
    #[error("limit {name} = {limit} reached: {why}")]
    Limit {
        /// The constant's name.
        name: &'static str,
        /// The value of that limit.
        limit: u64,
        /// The object that reached the limit, and the fix.
        why: String,
    },
    /// An invariant of ferrywire was broken.
    #[error("internal error, please report: {0}")]
    Internal(String),
}

/// Formats the time without progress. A zero timeout polls without waiting.
fn stalled(waited: &Duration) -> String {
    if waited.is_zero() { "not yet: ".into() } else { format!("no progress for {:?} on ", rounded(*waited)) }
}

fn unfinished(limit: &Duration) -> String {
    if limit.is_zero() { "not done yet".into() } else { format!("not done within {:?}", rounded(*limit)) }
}

/// The end of the message about memory that a transport cannot reach.
fn way_out(transport: &str) -> String {
    match transport {
        "plugin" => "which is not the GPU that the plugin is configured for (PluginConfig::gpu)".into(),
        _ => format!("which is not open in this process, so that {transport} cannot stage it"),
    }
}

impl Error {
    /// The origin of the error, and so who can act on it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::Invalid { .. } | Error::NoUsableNic { .. } => ErrorKind::Usage,
            Error::OutOfRegion { .. } | Error::Truncated { .. } => ErrorKind::Usage,
            Error::Cancelled | Error::Closed | Error::UnsupportedMemory { .. } | Error::Forked { .. } => {
                ErrorKind::Usage
            }
            Error::Cuda(CudaError::StreamCapturing { .. }) => ErrorKind::Usage,
            Error::SimGpu(_) | Error::Cuda(_) => ErrorKind::Gpu,
            Error::PluginLoad(_) | Error::PluginCall(_) | Error::Unpack(_) => ErrorKind::Plugin,
            Error::Io { .. } | Error::Limit { .. } | Error::ResourceBusy { .. } => ErrorKind::Local,
            Error::Unreachable { .. } | Error::PeerLost { .. } | Error::PeerClosed { .. } => ErrorKind::Peer,
            Error::ProtocolViolation { .. } | Error::AccessRefused { .. } => ErrorKind::Peer,
            Error::Stalled { .. } | Error::TimedOut { .. } => ErrorKind::Timeout,
            Error::Refused { .. } => ErrorKind::Refused,
            Error::Phase { error, .. } => error.kind(),
            Error::Internal(_) => ErrorKind::Internal,
        }
    }

    /// Creates an [`Error::Invalid`].
    pub fn invalid(what: impl Into<String>, why: impl Into<String>) -> Error {
        Error::Invalid { what: what.into(), why: why.into() }
    }

    /// Creates an [`Error::Io`] for a failed call.
    pub fn io(what: impl Into<String>, cause: &std::io::Error) -> Error {
        Error::Io { what: what.into(), message: cause.to_string(), code: cause.raw_os_error() }
    }
}

impl Error {
    /// The error of a failed handshake with `address`.
    pub(crate) fn of_handshake(error: &HandshakeError, address: impl fmt::Display) -> Error {
        let (address, why) = (address.to_string(), error.to_string());
        match error {
            HandshakeError::Closed(_) => Error::Unreachable { address, cause: UnreachableCause::Closed, why },
            HandshakeError::Late(_) => Error::Unreachable { address, cause: UnreachableCause::NoAnswer, why },
            HandshakeError::Unusable { what, why } => Error::invalid(*what, why),
            HandshakeError::Random | HandshakeError::Noise => {
                Error::Io { what: format!("handshake with {address}"), message: why, code: None }
            }
            HandshakeError::Overreach(_) => Error::ProtocolViolation { peer: address, why },
            HandshakeError::Misuse => Error::Internal(format!("handshake with {address}: {why}")),
            refused => {
                let reason = RefusalReason::of(refused).unwrap_or(RefusalReason::Other);
                Error::Refused { address, reason, why }
            }
        }
    }

    /// The error of a failed control session with `peer`.
    pub(crate) fn of_session(error: &SessionError, peer: &str) -> Error {
        match error {
            SessionError::Full => Error::Limit {
                name: "CONTROL_UNACKED_MAX",
                limit: CONTROL_UNACKED_MAX as u64,
                why: format!("peer {peer} acknowledges no control messages"),
            },
            SessionError::FullOfBytes => Error::Limit {
                name: "CONTROL_UNACKED_BYTES_MAX",
                limit: CONTROL_UNACKED_BYTES_MAX as u64,
                why: format!("peer {peer} acknowledges no control messages"),
            },
            SessionError::Unusable(_) | SessionError::Detached => {
                Error::Internal(format!("control session with {peer}: {error}"))
            }
            _ => Error::PeerLost {
                peer: String::from(peer),
                cause: LossCause::ControlSession,
                why: format!("control session: {error}"),
            },
        }
    }
}

impl From<memory::Error> for Error {
    fn from(error: memory::Error) -> Error {
        match error {
            memory::Error::Invalid { what, why } => Error::Invalid { what, why },
            memory::Error::OutOfRegion { side, offset, len, region_bytes } => {
                Error::OutOfRegion { side, offset, len, region_bytes }
            }
            memory::Error::SimGpu(error) => Error::SimGpu(error),
            memory::Error::Cuda(error) => Error::Cuda(error),
            memory::Error::Unpack(error) => Error::Unpack(error),
            memory::Error::Io { what, message, code } => Error::Io { what, message, code },
            memory::Error::Limit { name, limit, why } => Error::Limit { name, limit, why },
            memory::Error::Internal(why) => Error::Internal(why),
        }
    }
}

impl From<Forked> for Error {
    fn from(Forked { built_in, here }: Forked) -> Error {
        Error::Forked { built_in, here }
    }
}

impl From<LoadError> for Error {
    fn from(error: LoadError) -> Error {
        Error::PluginLoad(Box::new(error))
    }
}

impl From<CallError> for Error {
    fn from(error: CallError) -> Error {
        Error::PluginCall(Box::new(error))
    }
}

impl From<UnpackError> for Error {
    fn from(error: UnpackError) -> Error {
        Error::Unpack(Box::new(error))
    }
}

#[cfg(test)]
mod tests {
    use ferrywire_proto::handshake::{Refusal, RefusalCode};

    use super::*;

    #[test]
    fn errors_of_a_handshake_say_what_to_check() {
        let at = "10.0.0.1:7471";
        let error = |error: HandshakeError| Error::of_handshake(&error, at).to_string();
        assert_eq!(
            error(HandshakeError::Version { theirs: 2, ours: 1 }),
            "10.0.0.1:7471 refused: the other end speaks protocol version 2, this end 1: install one version of ferrywire on both"
        );
        let refusal = Refusal::new(RefusalCode::Secret, "the two ends have different ones");
        assert_eq!(
            error(HandshakeError::Refused(refusal)),
            "10.0.0.1:7471 refused: wrong secret: the other end says \"the two ends have different ones\""
        );
        assert_eq!(
            error(HandshakeError::foreign_answer(b"HTTP/1.1 400 Bad")),
            "10.0.0.1:7471 refused: not ferrywire: it answered with \"HTTP/1.1 400 Bad\" (HTTP?)"
        );
        assert_eq!(
            error(HandshakeError::Closed("the answer")),
            "cannot reach 10.0.0.1:7471: the connection was closed while waiting for the answer"
        );
        let overreach = Error::of_handshake(&HandshakeError::Overreach("channels = 17".into()), at);
        assert!(matches!(overreach, Error::ProtocolViolation { peer, .. } if peer == at));
        assert!(matches!(Error::of_handshake(&HandshakeError::Misuse, at), Error::Internal(_)));
    }

    #[test]
    fn errors_of_a_session_name_the_limit_or_the_loss() {
        let error = |error| Error::of_session(&error, "gpu1");
        let full = error(SessionError::Full);
        assert!(matches!(full, Error::Limit { name: "CONTROL_UNACKED_MAX", .. }), "{full}");
        let full = error(SessionError::FullOfBytes);
        assert!(matches!(full, Error::Limit { name: "CONTROL_UNACKED_BYTES_MAX", .. }), "{full}");
        let lost = error(SessionError::Gap { expected: 1, got: 0 });
        assert!(matches!(lost, Error::PeerLost { .. }), "{lost}");
    }

    #[test]
    fn durations_are_rounded_for_messages() {
        let said = |waited| Error::Stalled { what: "a write".into(), peer: None, waited }.to_string();
        let expected =
            [(29_999_999_960, "30s"), (2_500_400_000, "2.5s"), (12_000, "12µs"), (61_234_567_891, "61.2s")];
        for (waited_ns, text) in expected {
            let said = said(Duration::from_nanos(waited_ns));
            assert!(said.contains(&format!("no progress for {text} on")), "{said}");
        }
    }
}
