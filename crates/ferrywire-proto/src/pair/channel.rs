//! One end of one channel: its window and its receive state.
//!
//! Invariant: an end that is not up neither sends nor places anything.

use crate::operation::testing::Model;
use crate::outbox::Frame;
use crate::window::Window;
use crate::wire::Refusal;

/// Number of a refused frame, and the reason.
pub(super) type Refused = (u64, Refusal);

pub(super) struct Side {
    pub is_up: bool,
    pub window: Window<Frame<Model>>,
    /// Number of the first frame that the socket has not taken.
    pub sent: u64,
    /// Arrival time of the frame that was sent last.
    pub last_arrival: u64,
    /// Number of frames received and placed, or refused.
    pub received: u64,
    /// Refused frames that were not reported to the peer; `reported` has the reported ones.
    pub refused: Vec<Refused>,
    pub reported: Vec<Refused>,
    pub ack_is_due: bool,
    /// Content of the window when the channel was closed.
    pub ours: Option<Vec<(u64, Frame<Model>)>>,
    /// The number of frames that the peer had placed, and the frames that it had refused.
    pub theirs: Option<(u64, Vec<Refused>)>,
    pub is_resolved: bool,
}

impl Side {
    pub fn new(window_frames: usize, window_bytes: usize) -> Side {
        Side {
            is_up: true,
            window: Window::new(window_frames, window_bytes),
            sent: 0,
            last_arrival: 0,
            received: 0,
            refused: Vec::new(),
            reported: Vec::new(),
            ack_is_due: false,
            ours: None,
            theirs: None,
            is_resolved: false,
        }
    }

    /// The count of received frames that a header may carry. A refused frame is covered only once it was
    /// reported to the peer.
    pub fn acknowledges(&self) -> u32 {
        self.refused.first().map_or(self.received, |(number, _)| *number) as u32
    }

    pub fn has_unsent(&self) -> bool {
        self.sent < self.window.next()
    }
}
