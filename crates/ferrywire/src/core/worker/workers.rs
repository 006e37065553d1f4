//! The workers of an endpoint, and the channels that they have lost.
//!
//! Invariant: workers own channels, channels refer to their peer's state, and that to the [`Context`]: nothing refers back.
//! Read next: `mod.rs`, one worker.

use crate::core::channel::Remains;
use crate::core::context::Context;
use crate::core::peer::PeerState;
use crate::core::worker::Worker;
use crossbeam_queue::SegQueue;
use ferrywire_proto::session::FenceCause;
use ferrywire_sys::poll::Waker;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// All workers of one endpoint.
pub(crate) struct Workers {
    pub context: Arc<Context>,
    list: Box<[Arc<Worker>]>,
    lost: Arc<LostChannels>,
}

impl Workers {
    /// `lost` is what each of them tells of its lost channels.
    pub fn new(context: Arc<Context>, list: Box<[Arc<Worker>]>, lost: Arc<LostChannels>) -> Workers {
        Workers { context, list, lost }
    }

    /// Channels that were lost and not fenced yet.
    pub fn lost(&self) -> &LostChannels {
        &self.lost
    }

    /// Polls every worker once that no other thread polls; true if anything happened.
    pub fn poll_once(&self) -> bool {
        // Each of them, whatever the others have done.
        self.list.iter().fold(false, |worked, worker| worker.poll_once(&self.context) | worked)
    }
}

impl Deref for Workers {
    type Target = [Arc<Worker>];

    fn deref(&self) -> &[Arc<Worker>] {
        &self.list
    }
}

/// Why a channel has ended.
#[derive(Debug)]
pub(crate) struct Loss {
    /// Why, for the peer's control side; what its lane says goes before [`FenceCause::Lost`].
    pub cause: FenceCause,
    /// Why, for people.
    pub why: String,
}

impl<T: Into<String>> From<T> for Loss {
    fn from(why: T) -> Loss {
        Loss { cause: FenceCause::Lost, why: why.into() }
    }
}

/// A channel that has ended, with what the fence needs of it.
pub(crate) struct LostChannel {
    pub peer: Arc<PeerState>,
    pub index: u16,
    pub generation: u32,
    pub loss: Loss,
    pub remains: Box<Remains>,
}

impl LostChannel {
    /// Ends what was on its way, of a peer that is over.
    pub fn drop_entries(self) {
        self.peer.drop_entries(self.remains.entries.into_iter().map(|(_, entry)| entry).collect());
    }
}

/// Lost channels on their way from the workers to the control side.
pub(crate) struct LostChannels {
    queue: SegQueue<LostChannel>,
    control: Waker,
    /// The control thread has ended, and with it every session.
    is_closed: AtomicBool,
}

impl LostChannels {
    /// `control` wakes the side that takes them.
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

    /// None is taken any more: operations of those that come end at once.
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
