//! Causes of failures as values, for callers that decide by the cause and for hints to users.
//!
//! Invariant: each cause is set where the failure is noticed, and never parsed from a message.

use ferrywire_proto::handshake::{HandshakeError, RefusalCode};
use std::io;

/// Why a peer was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LossCause {
    /// For the peer timeout the peer sent nothing, or read nothing: it is stopped, or unreachable over every
    /// NIC.
    Silent,
    /// The peer's host has closed the connections: the peer's process ended.
    ProcessEnded,
    /// The peer does not know the session: it restarted, or gave this end up.
    Restarted,
    /// The peer reports that it gave this end up.
    GaveUp,
    /// No data connection to the peer could be made.
    NoChannel,
    /// A lane failed, or could not be set up, and no channel is left.
    LaneFailed,
    /// A message of a lane made no progress, here or at the peer, for the lane's stall limit.
    LaneStalled,
    /// A call of a plugin of this end does not return.
    CallHangs,
    /// The control session broke a rule of the protocol.
    ControlSession,
    /// The peer closed the connection before posted transfers had finished.
    Unfinished,
}

impl LossCause {
    /// The cause as one word, for programs in other languages.
    pub fn as_str(self) -> &'static str {
        match self {
            LossCause::Silent => "silent",
            LossCause::ProcessEnded => "process_ended",
            LossCause::Restarted => "restarted",
            LossCause::GaveUp => "gave_up",
            LossCause::NoChannel => "no_channel",
            LossCause::LaneFailed => "lane_failed",
            LossCause::LaneStalled => "lane_stalled",
            LossCause::CallHangs => "call_hangs",
            LossCause::ControlSession => "control_session",
            LossCause::Unfinished => "unfinished",
        }
    }
}

/// Why no connection could be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum UnreachableCause {
    /// The host answered, and no process listens on the port.
    ConnectionRefused,
    /// Nothing answered in time.
    NoAnswer,
    /// This host has no route to the address.
    NoRoute,
    /// The NIC has lost the source address of the connection.
    SourceAddressGone,
    /// This host has no free port for the connection.
    NoFreePort,
    /// This host forbids the connection.
    Forbidden,
    /// The connection was made, and closed before the handshake was done.
    Closed,
    /// The peer did not announce on the control session that it expects the connection.
    NotExpected,
    /// The payload backend cannot carry anything to that address.
    BackendCannot,
    /// The host name could not be looked up.
    NameNotResolved,
    /// Another error of the system.
    Other,
}

impl UnreachableCause {
    /// The cause of a failed system call.
    pub(crate) fn of(error: &io::Error) -> UnreachableCause {
        match error.kind() {
            io::ErrorKind::ConnectionRefused => UnreachableCause::ConnectionRefused,
            io::ErrorKind::TimedOut => UnreachableCause::NoAnswer,
            io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable => UnreachableCause::NoRoute,
            io::ErrorKind::AddrNotAvailable => UnreachableCause::SourceAddressGone,
            io::ErrorKind::AddrInUse => UnreachableCause::NoFreePort,
            io::ErrorKind::PermissionDenied => UnreachableCause::Forbidden,
            io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => UnreachableCause::Closed,
            _ => UnreachableCause::Other,
        }
    }

    /// The cause as one word, for programs in other languages.
    pub fn as_str(self) -> &'static str {
        match self {
            UnreachableCause::ConnectionRefused => "connection_refused",
            UnreachableCause::NoAnswer => "no_answer",
            UnreachableCause::NoRoute => "no_route",
            UnreachableCause::SourceAddressGone => "source_address_gone",
            UnreachableCause::NoFreePort => "no_free_port",
            UnreachableCause::Forbidden => "forbidden",
            UnreachableCause::Closed => "closed",
            UnreachableCause::NotExpected => "not_expected",
            UnreachableCause::BackendCannot => "backend_cannot",
            UnreachableCause::NameNotResolved => "name_not_resolved",
            UnreachableCause::Other => "other",
        }
    }
}

/// Why one end refused the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RefusalReason {
    /// The other end is not ferrywire.
    NotFerrywire,
    /// The ends speak different versions of the protocol.
    Version,
    /// The ends hold different secrets, or one of them holds none.
    Secret,
    /// The other end is busy; another attempt may succeed.
    Busy,
    /// A limit of the other end is reached.
    Limit,
    /// The ends use different payload backends, or one backend with different settings.
    PayloadMismatch,
    /// Both ends are on one host, and the plugin cannot move GPU memory within a host.
    SameHost,
    /// The configuration is not acceptable for another reason.
    Config,
    /// The other end does not know the session.
    UnknownSession,
    /// The endpoint at the address has another identity than the caller asked for: it restarted.
    Restarted,
    /// The handshake broke a rule, or was not authentic.
    Handshake,
    /// A reason of a later version.
    Other,
}

impl RefusalReason {
    /// The reason of a failed handshake; `None` if neither end refused the other.
    pub(crate) fn of(error: &HandshakeError) -> Option<RefusalReason> {
        Some(match error {
            HandshakeError::NotFerrywire { .. } => RefusalReason::NotFerrywire,
            HandshakeError::Version { .. } => RefusalReason::Version,
            HandshakeError::WrongSecret(_) | HandshakeError::SecretUnproven => RefusalReason::Secret,
            HandshakeError::Refused(refusal) | HandshakeError::Declined(refusal) => refusal.code.into(),
            HandshakeError::Another(_) => RefusalReason::Restarted,
            HandshakeError::UnknownKind(_)
            | HandshakeError::Unproven(_)
            | HandshakeError::Malformed { .. }
            | HandshakeError::Length { .. } => RefusalReason::Handshake,
            HandshakeError::Closed(_)
            | HandshakeError::Late(_)
            | HandshakeError::Overreach(_)
            | HandshakeError::Unusable { .. }
            | HandshakeError::Random
            | HandshakeError::Noise
            | HandshakeError::Misuse => return None,
        })
    }

    /// The reason as one word, for programs in other languages.
    pub fn as_str(self) -> &'static str {
        match self {
            RefusalReason::NotFerrywire => "not_ferrywire",
            RefusalReason::Version => "version",
            RefusalReason::Secret => "secret",
            RefusalReason::Busy => "busy",
            RefusalReason::Limit => "limit",
            RefusalReason::PayloadMismatch => "payload_mismatch",
            RefusalReason::SameHost => "same_host",
            RefusalReason::Config => "config",
            RefusalReason::UnknownSession => "unknown_session",
            RefusalReason::Restarted => "restarted",
            RefusalReason::Handshake => "handshake",
            RefusalReason::Other => "other",
        }
    }
}

impl From<RefusalCode> for RefusalReason {
    fn from(code: RefusalCode) -> RefusalReason {
        match code {
            RefusalCode::Version => RefusalReason::Version,
            RefusalCode::Secret => RefusalReason::Secret,
            RefusalCode::Busy => RefusalReason::Busy,
            RefusalCode::UnknownSession => RefusalReason::UnknownSession,
            RefusalCode::Limit => RefusalReason::Limit,
            RefusalCode::Config => RefusalReason::Config,
            RefusalCode::PayloadMismatch => RefusalReason::PayloadMismatch,
            RefusalCode::SameHost => RefusalReason::SameHost,
            RefusalCode::Malformed => RefusalReason::Handshake,
            RefusalCode::Other(_) => RefusalReason::Other,
        }
    }
}
