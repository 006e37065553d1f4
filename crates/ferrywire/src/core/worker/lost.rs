//! Channels that workers have lost, on their way to the control thread.
//!
//! Invariant: the control thread takes each lost channel, or the channel's operations fail.
//! Read next: `control/link/fences.rs`, which takes them.

use crate::core::channel::Remains;
use crate::core::peer::PeerState;
use crossbeam_queue::SegQueue;
use ferrywire_proto::session::FenceCause;
use ferrywire_sys::poll::Waker;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The end of a channel.
#[derive(Debug)]
pub(crate) struct Loss {
    /// The cause for the peer's control side. A cause that the lane gives replaces [`FenceCause::Lost`].
    pub cause: FenceCause,
    /// The cause as text.
    pub why: String,
}

impl<T: Into<String>> From<T> for Loss {
    fn from(why: T) -> Loss {
        Loss { cause: FenceCause::Lost, why: why.into() }
    }
}

/// A channel that has ended, with the state that its fence needs.
pub(crate) struct LostChannel {
    pub peer: Arc<PeerState>,
    pub index: u16,
    pub generation: u32,
    pub loss: Loss,
    pub remains: Box<Remains>,
}

impl LostChannel {
    /// Fails the operations of the channel's frames, because the peer's session is over and nothing is
    /// resent.
    pub fn drop_entries(self) {
        self.peer.drop_entries(self.remains.entries.into_iter().map(|(_, entry)| entry).collect());
    }
}

/// Queue of lost channels from the workers to the control thread.
pub(crate) struct LostChannels {
    queue: SegQueue<LostChannel>,
    control: Waker,
    /// Whether the control thread has ended, and with it every session.
    is_closed: AtomicBool,
}

impl LostChannels {
    /// Creates the queue. `control` wakes the thread that takes lost channels.
    pub fn new(control: Waker) -> LostChannels {
        LostChannels { queue: SegQueue::new(), control, is_closed: AtomicBool::new(false) }
    }

    pub fn push(&self, lost: LostChannel) {
        self.queue.push(lost);
        self.control.wake();
        if self.is_closed.load(Ordering::SeqCst) {
            self.drain();
        }
    }

    pub fn pop(&self) -> Option<LostChannel> {
        self.queue.pop()
    }

    /// Closes the queue. Operations of channels that are lost later fail at once.
    pub fn close(&self) {
        self.is_closed.store(true, Ordering::SeqCst);
        self.drain();
    }

    fn drain(&self) {
        while let Some(lost) = self.queue.pop() {
            lost.drop_entries();
        }
    }
}
