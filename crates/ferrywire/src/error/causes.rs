//! Why something failed, as values: what callers decide by, and hints to users depend on.
//!
//! Invariant: each cause is set where the failure is noticed, and never read out of a message.

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
