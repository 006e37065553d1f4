//! The stage of a link, with the data that only that stage has.
//!
//! Invariant: a waiting connect gets exactly one result, or none if it was withdrawn.
//! Read next: `closing.rs`.

use crate::control::accept_queue::{AcceptQueue, Permit};
use crate::core::peer::PeerHandle;
use crate::error::Error;
use std::sync::Arc;
use std::time::Duration;

/// The stages of a link: `settling -> up -> draining -> leaving -> dying -> over`. An early close skips `up`;
/// a local error leads directly to `leaving`, any other loss to `dying`.
pub(super) enum Stage {
    /// The channels are being set up.
    Settling(Settling),
    /// The peer is connected, and the user has its handle.
    Up,
    /// This end has asked the peer to finish, and waits for its answer.
    Draining { awaited: Option<Awaited>, peer_finished: bool },
    /// The last message has been sent. The session ends with `last_words` once it has arrived.
    Leaving { awaited: Option<Awaited>, farewell: Farewell, last_words: Error },
    /// The session has ended, and its channels are being closed.
    Dying { awaited: Option<Awaited> },
    /// All channels are closed. The connect may be tried again without lanes.
    Over { retry: Option<Retry> },
}

/// The last message of this end, which has not arrived as far as is known.
pub(super) struct Farewell {
    /// From this time on the connection counts as dead.
    pub until: Duration,
    /// Whether the session may be resumed for the message, up to the time of the close.
    pub resumes: bool,
    /// Whether a connection took the message. If the peer closes that connection, it has the message or is
    /// gone.
    pub sent: bool,
}

/// A link whose peer is not up yet.
pub(super) struct Settling {
    pub awaited: Awaited,
    pub since: Duration,
    /// Whether a data connection was dialled and not established.
    pub dial_failed: bool,
    /// Whether lanes are optional on both ends, as far as this end knows.
    pub lanes_optional: bool,
}

/// The user's wait for a peer that is not up yet.
pub(super) enum Awaited {
    /// The result of a connect. `without_lanes` is why a session without lanes replaces this one.
    Connect { queue: Arc<AcceptQueue>, without_lanes: Option<String> },
    /// The next peer to accept.
    Accept(Permit),
}

/// A connect that continues without lanes, for the reason that both ends logged.
pub(super) struct Retry {
    pub queue: Arc<AcceptQueue>,
    pub why: String,
}

impl Stage {
    /// Whether the last message has been sent, or the session is lost.
    pub fn is_ending(&self) -> bool {
        matches!(self, Stage::Leaving { .. } | Stage::Dying { .. } | Stage::Over { .. })
    }

    /// The user's wait, if the peer is not up yet.
    pub fn awaited(&mut self) -> Option<&mut Awaited> {
        match self {
            Stage::Settling(settling) => Some(&mut settling.awaited),
            Stage::Draining { awaited, .. } | Stage::Leaving { awaited, .. } | Stage::Dying { awaited } => {
                awaited.as_mut()
            }
            Stage::Up | Stage::Over { .. } => None,
        }
    }

    /// Drops the wait of a withdrawn connect, which gets no result.
    pub fn forget_awaited(&mut self) {
        if let Stage::Draining { awaited, .. } | Stage::Leaving { awaited, .. } | Stage::Dying { awaited } =
            self
        {
            *awaited = None;
        }
    }

    /// Changes to the stage that `next` returns for the user's wait.
    pub fn advance(&mut self, next: impl FnOnce(Option<Awaited>) -> Stage) {
        let awaited = match std::mem::replace(self, Stage::Over { retry: None }) {
            Stage::Settling(settling) => Some(settling.awaited),
            Stage::Draining { awaited, .. } | Stage::Leaving { awaited, .. } | Stage::Dying { awaited } => {
                awaited
            }
            Stage::Up | Stage::Over { .. } => None,
        };
        *self = next(awaited);
    }
}

impl Awaited {
    /// Whether this is the connect whose result goes to this queue.
    pub fn is_connect_of(&self, queue: &Arc<AcceptQueue>) -> bool {
        matches!(self, Awaited::Connect { queue: mine, .. } if Arc::ptr_eq(mine, queue))
    }

    /// Notes that the connect continues without lanes. At the accepting end there is nothing to note.
    pub fn go_without_lanes(&mut self, why: String) {
        if let Awaited::Connect { without_lanes, .. } = self {
            *without_lanes = Some(why);
        }
    }

    /// Delivers the connected peer.
    pub fn put(self, peer: PeerHandle) {
        match self {
            Awaited::Connect { queue, .. } => queue.put(Ok(peer)),
            Awaited::Accept(permit) => permit.send(peer),
        }
    }

    /// Handles a peer that has not come up. A connect gets the error, unless it is repeated without lanes; an
    /// accept waits for the next peer.
    pub fn fail(self, error: Error) -> Option<Retry> {
        match self {
            Awaited::Connect { queue, without_lanes: Some(why) } => Some(Retry { queue, why }),
            Awaited::Connect { queue, without_lanes: None } => {
                queue.put(Err(error));
                None
            }
            Awaited::Accept(_) => None,
        }
    }
}
