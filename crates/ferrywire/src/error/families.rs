//! One error type per family of operations, so that a caller sees what a call can return.
//!
//! The engine uses [`Error`] throughout, since one failure ends operations of several families. Public calls
//! convert it.
//! Invariant: both conversions keep every field, so the kind and the words of an error never change. An error
//! outside of its family becomes `Other`, which holds the [`Error`] itself.

use super::{Error, ErrorKind, LossCause, RefusalReason, UnreachableCause};
use ferrywire_memory::cuda::CudaError;
use ferrywire_memory::sim::SimGpuError;
use ferrywire_memory::unpack::UnpackError;
use ferrywire_memory::{self as memory, MemoryLocation};
use ferrywire_sys::fork::Forked;
use std::fmt;
use std::time::Duration;

/// Declares an enum with some variants of [`Error`], and the conversions between both. The compiler checks the
/// fields against those of [`Error`].
macro_rules! family {
    (
        $(#[$about:meta])*
        $family:ident {
            $(
                $(#[$doc:meta])*
                $variant:ident $({ $($field:ident: $type:ty),+ })? $(($inner:ident: $payload:ty))?,
            )+
        }
    ) => {
        $(#[$about])*
        #[derive(Clone, Debug, PartialEq, Eq)]
        #[non_exhaustive]
        pub enum $family {
            $(
                $(#[$doc])*
                $variant
                $({ $(
                    #[doc = concat!("As in [`Error::", stringify!($variant), "`].")]
                    $field: $type,
                )+ })?
                $(($payload))?,
            )+
            /// An error that the other variants do not describe, such as one of a custom payload backend. Handle
            /// the error by its kind.
            Other(Box<Error>),
        }

        impl From<Error> for $family {
            fn from(error: Error) -> $family {
                match error {
                    $(
                        Error::$variant $({ $($field),+ })? $(($inner))? => {
                            $family::$variant $({ $($field: $field.convert()),+ })? $(($inner))?
                        }
                    )+
                    other => $family::Other(Box::new(other)),
                }
            }
        }

        impl $family {
            /// The origin of the error, and so who can act on it.
            pub fn kind(&self) -> ErrorKind {
                Error::from(self.clone()).kind()
            }
        }

        impl From<$family> for Error {
            fn from(error: $family) -> Error {
                match error {
                    $(
                        $family::$variant $({ $($field),+ })? $(($inner))? => {
                            Error::$variant $({ $($field: $field.convert()),+ })? $(($inner))?
                        }
                    )+
                    $family::Other(error) => *error,
                }
            }
        }

        impl fmt::Display for $family {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                Error::from(self.clone()).fmt(f)
            }
        }

        impl std::error::Error for $family {}
    };
}

family! {
    /// Why no peer was connected: the error of [`Endpoint::connect`](crate::Endpoint::connect) and
    /// [`Endpoint::accept`](crate::Endpoint::accept), their variants, and the same calls of an
    /// [`Orchestrator`](crate::Orchestrator).
    ConnectError {
        /// An argument cannot be used: an address, a secret, metadata, or the name of a NIC. Correct the
        /// argument.
        Invalid { what: String, why: String },
        /// None of the endpoint's NICs has an address of the target's address family. Give another NIC or
        /// address.
        NoUsableNic { nics: String, address: String },
        /// No connection could be established. Whether another attempt can succeed depends on `cause`: the
        /// peer may not have started yet.
        Unreachable { address: String, cause: UnreachableCause, why: String },
        /// One end refused the other. After [`RefusalReason::Busy`] and [`RefusalReason::Limit`] another
        /// attempt may succeed. For other reasons the ends have to agree first.
        Refused { address: String, reason: RefusalReason, why: String },
        /// The peer was lost before its channels were set up. Connect again.
        PeerLost { peer: String, cause: LossCause, why: String },
        /// The peer closed the connection before its channels were set up. Connect again if the peer still
        /// runs.
        PeerClosed { peer: String },
        /// The other end has the secret and violates the protocol. Install one version on both ends.
        ProtocolViolation { peer: String, why: String },
        /// No peer was connected within the timeout. Call again, or check that the other end runs.
        Stalled { what: String, peer: Option<String>, waited: Duration },
        /// The endpoint belongs to the parent of this process. Build an endpoint in this process.
        Forked { built_in: u32, here: u32 },
        /// This process closed the endpoint.
        Closed,
        /// A named limit was reached, such as the number of peers. Close a peer first.
        Limit { name: &'static str, limit: u64, why: String },
        /// A system call on this host failed. Check the limits of the process.
        Io { what: String, message: String, code: Option<i32> },
        /// An endpoint of an orchestrator was not connected. `target` names the connection, `error` the
        /// reason.
        Phase { phase: &'static str, endpoint: String, target: Option<usize>, error: Box<ConnectError> },
        /// An invariant of ferrywire was broken. Please report the message.
        Internal(why: String),
    }
}

family! {
    /// Why a transfer was not posted, failed or is not done, and why a notification was not received: the
    /// error of [`Peer`](crate::Peer)'s transfers and notifications, of [`Transfer`](crate::Transfer) and of
    /// [`BlockList`](crate::BlockList).
    TransferError {
        /// An argument cannot be used, or its region is deregistered or of another endpoint. Correct the
        /// argument.
        Invalid { what: String, why: String },
        /// The bytes are not inside the region. Nothing was moved. Correct the offset or the length.
        OutOfRegion { side: &'static str, offset: u64, len: u64, region_bytes: u64 },
        /// The transport cannot move bytes from or to this memory. Nothing was moved. Use other memory or
        /// another transport.
        UnsupportedMemory { side: &'static str, location: MemoryLocation, transport: &'static str },
        /// The message is longer than the buffer posted for it. Post a larger buffer.
        Truncated { tag: u64, message_bytes: u64, buffer_bytes: u64 },
        /// The transfer made no progress for the stall timeout, or no notification came in time. The transfer
        /// continues: wait again, or cancel it.
        Stalled { what: String, peer: Option<String>, waited: Duration },
        /// The transfer did not end within the timeout. The transfer continues: wait again, or cancel it.
        TimedOut { what: String, peer: Option<String>, timeout: Duration },
        /// The peer is gone. Its other transfers fail with the same error. Connect again.
        PeerLost { peer: String, cause: LossCause, why: String },
        /// The peer closed the connection in an orderly way. Connect again for further transfers.
        PeerClosed { peer: String },
        /// The peer violates the protocol. Install one version on both ends.
        ProtocolViolation { peer: String, why: String },
        /// The peer refused the access. Get a descriptor of a region that is still registered, or let the peer
        /// read its notifications.
        AccessRefused { peer: String, why: String },
        /// The caller cancelled the transfer. Its memory is free.
        Cancelled,
        /// This process closed the endpoint or the peer.
        Closed,
        /// The endpoint belongs to the parent of this process. Build an endpoint in this process.
        Forked { built_in: u32, here: u32 },
        /// A CUDA GPU of this host, or its driver, failed. The error says whether the GPU is still usable.
        Cuda(error: CudaError),
        /// A simulated GPU of this process failed.
        SimGpu(error: SimGpuError),
        /// A plugin reported an impossible fragment of a scattered receive. Check the plugin's version.
        Unpack(error: Box<UnpackError>),
        /// A system call on this host failed. Check the limits of the process.
        Io { what: String, message: String, code: Option<i32> },
        /// A named limit was reached. `why` says what to try.
        Limit { name: &'static str, limit: u64, why: String },
        /// An invariant of ferrywire was broken. Please report the message.
        Internal(why: String),
    }
}

family! {
    /// Why memory was not allocated, registered, accessed or deregistered: the error of
    /// [`Endpoint::register`](crate::Endpoint::register) and its variants, of
    /// [`Endpoint::alloc_host`](crate::Endpoint::alloc_host) and its variants, and of
    /// [`Region`](crate::Region).
    RegisterError {
        /// An argument cannot be used, or the region is deregistered or still in use. Correct the argument, or
        /// wait for the transfers first.
        Invalid { what: String, why: String },
        /// The bytes are not inside the region. Nothing was copied. Correct the offset or the length.
        OutOfRegion { side: &'static str, offset: u64, len: u64, region_bytes: u64 },
        /// A CUDA GPU of this host, or its driver, failed, or the GPU has too little memory.
        Cuda(error: CudaError),
        /// A simulated GPU of this process failed, or has too little memory.
        SimGpu(error: SimGpuError),
        /// The system has too little memory, or a system call failed. Check the limits of the process.
        Io { what: String, message: String, code: Option<i32> },
        /// A thread or GPU still uses the memory of a region to deregister. Deregister a clone again later.
        ResourceBusy { what: String, by: String, waited: Duration },
        /// The endpoint belongs to the parent of this process. Build an endpoint in this process.
        Forked { built_in: u32, here: u32 },
        /// An invariant of ferrywire was broken. Please report the message.
        Internal(why: String),
    }
}

impl ConnectError {
    /// The most informative of the errors of an endpoint's addresses, in the order of the addresses; the first of those
    /// that are equally informative. An address where something listens is more informative than one where nothing does,
    /// or that no NIC reaches.
    pub fn most_informative(
        errors: impl IntoIterator<Item = ConnectError, IntoIter: DoubleEndedIterator>,
    ) -> Option<ConnectError> {
        let rank = |error: &ConnectError| match error {
            ConnectError::NoUsableNic { .. } => 0,
            ConnectError::Unreachable { .. } => 1,
            ConnectError::Invalid { .. } => 2,
            ConnectError::Stalled { .. } => 3,
            _ => 4,
        };
        // The last maximum is taken, and the first address is preferred.
        errors.into_iter().rev().max_by_key(rank)
    }
}

/// Conversion of a field of [`Error`] to that of a family, and back. Only [`Error::Phase`] has a field with
/// another type.
trait Convert<T> {
    fn convert(self) -> T;
}

impl<T> Convert<T> for T {
    fn convert(self) -> T {
        self
    }
}

impl Convert<Box<ConnectError>> for Box<Error> {
    fn convert(self) -> Box<ConnectError> {
        Box::new(ConnectError::from(*self))
    }
}

impl Convert<Box<Error>> for Box<ConnectError> {
    fn convert(self) -> Box<Error> {
        Box::new(Error::from(*self))
    }
}

/// Errors of the crates below, for `?` in public calls.
macro_rules! causes {
    ($($family:ident: $($cause:ty),+;)+) => {$($(
        impl From<$cause> for $family {
            fn from(error: $cause) -> $family {
                Error::from(error).into()
            }
        }
    )+)+};
}

causes! {
    ConnectError: Forked;
    TransferError: Forked, CudaError, SimGpuError, memory::Error;
    RegisterError: Forked, CudaError, SimGpuError, memory::Error;
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrywire_ncclnet::abi::Version;
    use ferrywire_ncclnet::{Call, CallError, Cause, LoadError};

    /// One error of each variant, with its name. The match has no wildcard, so a new variant must be added here.
    fn all() -> Vec<(&'static str, Error)> {
        let text = || "text".to_owned();
        let time = Duration::from_secs(3);
        let refused = Error::Refused { address: text(), reason: RefusalReason::Secret, why: text() };
        let call = CallError {
            plugin: "net".into(),
            version: Version::V7,
            call: Call::Test,
            device: Some(0),
            nic: None,
            comm: None,
            cause: Cause::Missing,
        };
        let unpack = UnpackError::Form { kind: 2, version: 8, size_bytes: 16 };
        let all = vec![
            Error::invalid("argument", "no"),
            Error::OutOfRegion { side: "source", offset: 1, len: 2, region_bytes: 2 },
            Error::UnsupportedMemory { side: "local", location: MemoryLocation::Cuda(1), transport: "tcp" },
            Error::SimGpu(SimGpuError::NoSuchGpu { index: 99 }),
            Error::Cuda(CudaError::NoDevice),
            Error::from(LoadError::Missing { path: text() }),
            Error::from(call),
            Error::from(unpack),
            Error::Io { what: text(), message: text(), code: Some(12) },
            Error::Unreachable { address: text(), cause: UnreachableCause::NoRoute, why: text() },
            Error::NoUsableNic { nics: text(), address: text() },
            refused.clone(),
            Error::PeerLost { peer: text(), cause: LossCause::Silent, why: text() },
            Error::PeerClosed { peer: text() },
            Error::ProtocolViolation { peer: text(), why: text() },
            Error::AccessRefused { peer: text(), why: text() },
            Error::Truncated { tag: 1, message_bytes: 2, buffer_bytes: 1 },
            Error::Stalled { what: text(), peer: Some(text()), waited: time },
            Error::TimedOut { what: text(), peer: None, timeout: time },
            Error::Forked { built_in: 1, here: 2 },
            Error::ResourceBusy { what: text(), by: text(), waited: time },
            Error::Phase { phase: "connecting", endpoint: text(), target: Some(1), error: Box::new(refused) },
            Error::Cancelled,
            Error::Closed,
            Error::Limit { name: "PEERS_MAX", limit: 1, why: text() },
            Error::Internal(text()),
        ];
        let name = |error: &Error| match error {
            Error::Invalid { .. } => "Invalid",
            Error::OutOfRegion { .. } => "OutOfRegion",
            Error::UnsupportedMemory { .. } => "UnsupportedMemory",
            Error::SimGpu(_) => "SimGpu",
            Error::Cuda(_) => "Cuda",
            Error::PluginLoad(_) => "PluginLoad",
            Error::PluginCall(_) => "PluginCall",
            Error::Unpack(_) => "Unpack",
            Error::Io { .. } => "Io",
            Error::Unreachable { .. } => "Unreachable",
            Error::NoUsableNic { .. } => "NoUsableNic",
            Error::Refused { .. } => "Refused",
            Error::PeerLost { .. } => "PeerLost",
            Error::PeerClosed { .. } => "PeerClosed",
            Error::ProtocolViolation { .. } => "ProtocolViolation",
            Error::AccessRefused { .. } => "AccessRefused",
            Error::Truncated { .. } => "Truncated",
            Error::Stalled { .. } => "Stalled",
            Error::TimedOut { .. } => "TimedOut",
            Error::Forked { .. } => "Forked",
            Error::ResourceBusy { .. } => "ResourceBusy",
            Error::Phase { .. } => "Phase",
            Error::Cancelled => "Cancelled",
            Error::Closed => "Closed",
            Error::Limit { .. } => "Limit",
            Error::Internal(_) => "Internal",
        };
        let named: Vec<_> = all.into_iter().map(|error| (name(&error), error)).collect();
        assert!((1..named.len()).all(|at| named[..at].iter().all(|(name, _)| *name != named[at].0)));
        named
    }

    /// Converts each error to a family and back. Returns the names of those that are not of the family.
    fn outside<F>(is_other: impl Fn(&F) -> bool, kind: impl Fn(&F) -> ErrorKind) -> Vec<&'static str>
    where
        F: From<Error> + Into<Error> + Clone + fmt::Display + fmt::Debug,
    {
        let mut outside = Vec::new();
        for (name, error) in all() {
            let one = F::from(error.clone());
            assert_eq!((kind(&one), one.to_string()), (error.kind(), error.to_string()));
            let variant = format!("{one:?}");
            if is_other(&one) {
                outside.push(name);
            } else {
                assert!(variant.starts_with(name), "{name} became {variant}");
            }
            assert_eq!(one.into(), error);
        }
        outside
    }

    #[test]
    fn each_family_keeps_every_error_and_holds_those_of_others_whole() {
        let connect = outside(|one| matches!(one, ConnectError::Other(_)), ConnectError::kind);
        let (memory, plugin) = (["SimGpu", "Cuda"], ["PluginLoad", "PluginCall", "Unpack"]);
        let access = ["OutOfRegion", "UnsupportedMemory"];
        let transfer = ["AccessRefused", "Truncated", "TimedOut", "ResourceBusy", "Cancelled"];
        assert_eq!(connect, [&access[..], &memory, &plugin, &transfer].concat());
        let transfer = outside(|one| matches!(one, TransferError::Other(_)), TransferError::kind);
        let connect = ["Unreachable", "NoUsableNic", "Refused", "ResourceBusy", "Phase"];
        assert_eq!(transfer, [&plugin[..2], &connect].concat());
        let register = outside(|one| matches!(one, RegisterError::Other(_)), RegisterError::kind);
        let peer = ["Unreachable", "NoUsableNic", "Refused", "PeerLost", "PeerClosed", "ProtocolViolation"];
        let transfer = ["AccessRefused", "Truncated", "Stalled", "TimedOut"];
        let ends = ["Phase", "Cancelled", "Closed", "Limit"];
        assert_eq!(register, [&access[1..], &plugin, &peer, &transfer, &ends].concat());
    }

    #[test]
    fn a_failed_connection_of_an_orchestrator_holds_an_error_of_the_family() {
        let inner =
            Error::Unreachable { address: "a".into(), cause: UnreachableCause::NoRoute, why: "b".into() };
        let (phase, endpoint) = ("connecting", "gpu 1".to_owned());
        let error = Error::Phase { phase, endpoint, target: None, error: Box::new(inner) };
        let ConnectError::Phase { error, .. } = ConnectError::from(error) else { panic!("another variant") };
        assert!(matches!(*error, ConnectError::Unreachable { .. }), "{error}");
    }
}
