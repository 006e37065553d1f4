//! GPU memory over byte streams: payload passes through rings of pinned host memory.
//!
//! ```text
//!   GPU ── copy ──▶ ring ── socket ─────────▶ socket ── ring ── copy ──▶ GPU
//!       (copier)  4 slots                             4 slots  (copier)
//!         └─ mark: may be sent                          └─ mark: is placed, may be acknowledged
//! ```
//!
//! Each channel has a ring and a copier for each GPU and direction. The ring is small enough to stay in
//! cache. Copies are enqueued in batches, and no thread waits for them: behind each batch is a mark, a number
//! that the copier writes to host memory, and a pass of the progress engine checks it. So the copies of one
//! frame, the socket calls of another, and the copies at the other end run at once.
//!
//! Invariant: a byte of a ring is free or belongs to one frame. Bytes before a mark that is not reached are
//! neither sent nor counted as placed.
//! Read next: `sending.rs`, `receiving.rs`, `pipeline.rs`.

mod copier;
mod cuda;
mod kernel;
mod messages;
mod pipeline;
mod prepared;
mod receiving;
mod ring;
mod sending;
mod stopwatch;

use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use crate::core::operation::Hold;
use crate::core::peer::Landing;
use ferrywire_memory::{InUse, LateCopies, MemoryLocation};
use ferrywire_proto::limits;
pub(crate) use messages::Messages;
use pipeline::Unfinished;
pub(crate) use prepared::Prepared;
pub(crate) use receiving::Receiving;
pub(crate) use ring::Staged;
pub(crate) use sending::Sending;

/// The staging of a channel, in both directions.
#[derive(Default)]
pub(crate) struct Staging {
    pub sending: Sending,
    pub receiving: Receiving,
}

impl Staging {
    /// Lets rings use [`limits::STAGING_SHORT_RING_BYTES`] while payload goes in both directions, if
    /// `short_both_ways`, and else all their bytes.
    pub fn fit_rings(&mut self, short_both_ways: bool) {
        let is_used = |(_, used): (usize, usize)| used > 0;
        let both_ways = is_used(self.sending.ring_bytes()) && is_used(self.receiving.ring_bytes());
        let bytes = if short_both_ways && both_ways { limits::STAGING_SHORT_RING_BYTES } else { usize::MAX };
        self.sending.keep_rings_within(bytes);
        self.receiving.keep_rings_within(bytes);
    }

    /// Whether copies are in flight. Their end raises no event, so a thread has to poll.
    pub fn copying(&self) -> bool {
        self.sending.copying() || self.receiving.active()
    }

    /// Number of driver calls for copies, their marks, and queries.
    pub fn driver_calls(&self) -> u64 {
        self.sending.driver_calls() + self.receiving.driver_calls()
    }

    /// Bytes of pinned memory in use.
    pub fn pinned_bytes(&self) -> usize {
        self.sending.pinned_bytes() + self.receiving.pinned_bytes()
    }

    /// Ends all copying. After this nothing touches the memory that was staged, except where the result is not
    /// `None`.
    pub fn end(&mut self) -> Option<Hung> {
        let (receiving, landings) = self.receiving.end();
        Hung::of(receiving, self.sending.end(), landings)
    }
}

/// Copies that a GPU has not finished in time, and what they may touch. A driver that waits for a GPU may not
/// return, and no progress thread may wait with it.
pub(crate) struct Hung {
    unfinished: Vec<Unfinished>,
    /// The GPUs that may still write.
    copied_to: Vec<MemoryLocation>,
    landings: Vec<Landing>,
    ops: Vec<Hold>,
}

impl Hung {
    /// What is left of copies to GPUs and from GPUs. `None` if all have ended.
    fn of(to: Vec<Unfinished>, from: Vec<Unfinished>, landings: Vec<Landing>) -> Option<Hung> {
        let copied_to = to.iter().map(|each| each.location).collect();
        let unfinished: Vec<Unfinished> = to.into_iter().chain(from).collect();
        (!unfinished.is_empty()).then_some(Hung { unfinished, copied_to, landings, ops: Vec::new() })
    }

    /// Keeps the landing of the frame that was being received, and the operations of frames that were being copied.
    pub fn keep(&mut self, current: Option<Landing>, ops: impl Iterator<Item = Hold>) {
        self.landings.extend(current);
        self.ops.extend(ops);
    }

    /// Drops the copiers, and then what they may touch, on a thread of its own. Until then copies of other channels wait
    /// that go to regions which these copiers write to. An operation that has a landing does not end before, so its memory
    /// needs no such wait.
    pub fn leave(self) {
        let locations: Vec<String> = self.unfinished.iter().map(|each| each.location.to_string()).collect();
        // Most of these copies end a moment later.
        tracing::info!(
            "staging copies of {} have not ended yet: the memory that they use is kept until they end",
            locations.join(", ")
        );
        let users: Vec<InUse> = self.landings.iter().filter_map(Landing::memory).map(InUse::new).collect();
        let regions = self.landings.iter().filter(|landing| !landing.once()).filter_map(Landing::memory);
        let written = regions.filter(|memory| self.copied_to.contains(&memory.location()));
        let late: Vec<LateCopies> = written.map(LateCopies::new).collect();
        let parcel = Arc::new(Mutex::new(Some((self, users, late))));
        let taken = parcel.clone();
        let end = move || {
            let mut parcel = taken.lock().unwrap_or_else(PoisonError::into_inner).take();
            let mut unfinished = parcel.iter_mut().flat_map(|(hung, ..)| &mut hung.unfinished);
            if !unfinished.all(Unfinished::finish) {
                tracing::error!(
                    "the memory that staging copies may use stays in use until this process ends"
                );
                std::mem::forget(parcel);
            }
        };
        if let Err(error) = thread::Builder::new().name("ferrywire-gpu".into()).spawn(end) {
            tracing::error!(
                "cannot start a thread that waits for staging copies: {error}; the memory that they use stays in \
                 use until this process ends"
            );
            std::mem::forget(parcel);
        }
    }
}

/// For tests: the index of a GPU that some tests stall or fail, and the lock to use it.
#[cfg(test)]
const ALONE: u32 = 15;

#[cfg(test)]
fn alone() -> std::sync::MutexGuard<'static, ()> {
    static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
