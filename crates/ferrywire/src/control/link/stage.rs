//! How far a link is, with the data that only that stage has.

use crate::control::accept_queue::{AcceptQueue, Permit};
use crate::core::peer::PeerHandle;
use crate::error::Error;
use std::sync::Arc;
use std::time::Duration;

/// A link's life: `settling -> up -> draining -> leaving -> dying -> over`. A close that comes early skips `up`, an error of this
/// end leads to `leaving` at once, and any other loss to `dying`.
pub(super) enum Stage {
    /// The channels are being set up.
    Settling(Settling),
    /// The user has the peer.
    Up,
    /// This end has asked the peer to finish, and waits for its answer.
    Draining { awaited: Option<Awaited>, peer_finished: bool },
    /// The farewell is on its way, until then at the latest; the session ends with `last_words`.
    Leaving { awaited: Option<Awaited>, until: Duration, last_words: Error },
    /// The session has ended, and its channels are being closed.
    Dying { awaited: Option<Awaited> },
    /// All channels are closed. The connect may be tried again without lanes.
    Over { retry: Option<Retry> },
}

/// A link whose peer has not been up.
pub(super) struct Settling {
    pub awaited: Awaited,
    pub since: Duration,
    /// A data connection was dialled, and did not come about.
    pub dial_failed: bool,
    /// Both ends, as far as this one knows, could do without lanes.
    pub lanes_optional: bool,
}

/// Where the user waits for a peer that has not been up.
pub(super) enum Awaited {
    /// The result of a connect; `without_lanes`: why a session without lanes takes the place of this one.
    Connect { queue: Arc<AcceptQueue>, without_lanes: Option<String> },
    /// The next peer to accept.
    Accept(Permit),
}

/// A connect that goes on without lanes, for the reason that both ends were told.
pub(super) struct Retry {
    pub queue: Arc<AcceptQueue>,
    pub why: String,
}

impl Stage {
    /// The farewell has been said, or the session is lost.
    pub fn is_ending(&self) -> bool {
        matches!(self, Stage::Leaving { .. } | Stage::Dying { .. } | Stage::Over { .. })
    }

    /// Where the user waits, if the peer has not been up.
    pub fn awaited(&mut self) -> Option<&mut Awaited> {
        match self {
            Stage::Settling(settling) => Some(&mut settling.awaited),
            Stage::Draining { awaited, .. } | Stage::Leaving { awaited, .. } | Stage::Dying { awaited } => {
                awaited.as_mut()
            }
            Stage::Up | Stage::Over { .. } => None,
        }
    }

    /// The user has given the connect up: it gets no result.
    pub fn forget_awaited(&mut self) {
        if let Stage::Draining { awaited, .. } | Stage::Leaving { awaited, .. } | Stage::Dying { awaited } =
            self
        {
            *awaited = None;
        }
    }

    /// Goes on to the stage that `next` makes of where the user waits.
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
    /// Whether it is the connect whose result goes to this queue.
    pub fn is_connect_of(&self, queue: &Arc<AcceptQueue>) -> bool {
        matches!(self, Awaited::Connect { queue: mine, .. } if Arc::ptr_eq(mine, queue))
    }

    /// Lanes do not come about, and the connect goes on without. The accepting end only waits for that.
    pub fn go_without_lanes(&mut self, why: String) {
        if let Awaited::Connect { without_lanes, .. } = self {
            *without_lanes = Some(why);
        }
    }

    /// The peer is up.
    pub fn put(self, peer: PeerHandle) {
        match self {
            Awaited::Connect { queue, .. } => queue.put(Ok(peer)),
            Awaited::Accept(permit) => permit.send(peer),
        }
    }

    /// The peer has not come up. A caller of connect learns why, unless the connect is tried again; a caller of accept waits on.
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
