//! Why something failed, as values: what callers decide by, and hints to users depend on.
//!
//! Invariant: each cause is set where the failure is noticed, and never read out of a message.

use ferrywire_proto::handshake::{HandshakeError, RefusalCode};
use std::io;

/// Why a peer was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LossCause {
    /// Nothing was heard from it for the peer timeout, or it has not read for as long: stopped, or unreachable over every NIC.
    Silent,
    /// Its host has closed its connections: its process ended.
    ProcessEnded,
    /// It does not know the session: it restarted, or gave this end up.
    Restarted,
    /// It says that it gave this end up.
    GaveUp,
    /// No data connection to it could be made.
    NoChannel,
    /// A lane failed, or could not be set up, and no channel is left.
    LaneFailed,
    /// A message of a lane made no progress, here or at the peer, for the lane's stall limit.
    LaneStalled,
    /// A call of a plugin of this end does not return.
    CallHangs,
    /// The control session broke a rule of the protocol.
    ControlSession,
    /// It closed the connection before what was posted to it had finished.
    Unfinished,
}

impl LossCause {
    /// The cause as one word, as programs outside of Rust are told it.
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
    /// The host is there, and no process listens on the port.
    ConnectionRefused,
    /// Nothing answered in time.
    NoAnswer,
    /// This host has no route to the address.
    NoRoute,
    /// The NIC no longer has the address from which the connection was to come.
    SourceAddressGone,
    /// This host has no free port for the connection.
    NoFreePort,
    /// This host forbids the connection.
    Forbidden,
    /// The connection was made, and closed before the handshake was done.
    Closed,
    /// The peer did not say on the control session that it expects the connection.
    NotExpected,
    /// The payload backend cannot carry anything to that address.
    BackendCannot,
    /// The host name could not be looked up.
    NameNotResolved,
    /// Another error of the system.
    Other,
}

impl UnreachableCause {
    /// What a failed call of the system means.
    pub(crate) fn of(error: &io::Error) -> UnreachableCause {
        match error.kind() {
            io::ErrorKind::ConnectionRefused => UnreachableCause::ConnectionRefused,
            io::ErrorKind::TimedOut => UnreachableCause::NoAnswer,
            io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable => UnreachableCause::NoRoute,
            io::ErrorKind::AddrNotAvailable => UnreachableCause::SourceAddressGone,
            io::ErrorKind::AddrInUse => UnreachableCause::NoFreePort,
            io::ErrorKind::PermissionDenied => UnreachableCause::Forbidden,
            io::ErrorKind::ConnectionReset => UnreachableCause::Closed,
            _ => UnreachableCause::Other,
        }
    }

    /// The cause as one word, as programs outside of Rust are told it.
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
    /// The ends move payload over different things, or over the same with different settings.
    PayloadMismatch,
    /// Both ends are on one host, and the plugin cannot move GPU memory within one.
    SameHost,
    /// The configuration is not acceptable for another reason.
    Config,
    /// The other end does not know the session.
    UnknownSession,
    /// Another endpoint than the one asked for answers there: it restarted.
    Restarted,
    /// The handshake broke a rule, or was not authentic.
    Handshake,
    /// A reason of a later version.
    Other,
}

impl RefusalReason {
    /// What a handshake's failure means; `None` where neither end refused the other.
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

    /// The reason as one word, as programs outside of Rust are told it.
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
