//! GPU memory over byte streams: payload passes through rings of pinned host memory.
//!
//! ```text
//!   GPU ── copy ──▶ ring ── socket ─────────▶ socket ── ring ── copy ──▶ GPU
//!       (copier)  4 slots                             4 slots  (copier)
//!         └─ mark: may be sent                          └─ mark: is placed, may be acknowledged
//! ```
//!
//! Each channel has, for each GPU and direction, a ring small enough to stay in cache and a copier of its own.
//! Copies are enqueued in batches and nobody waits for them: behind each batch stands a mark, a number that
//! the copier writes into host memory, and a pass of the progress engine looks how far it is. So the copies of one frame,
//! the socket calls of another and the copies at the other end are under way at once.
//!
//! Invariant: a byte of a ring is either free, or belongs to one frame; what has a mark behind it that is not
//! reached is neither sent nor counted as placed. Read next: `sending.rs`, `receiving.rs`, `pipeline.rs`.

mod copier;
mod cuda;
mod kernel;
mod pipeline;
mod prepared;
mod receiving;
mod ring;
mod sending;
mod stopwatch;

pub(crate) use prepared::Prepared;
pub(crate) use receiving::Receiving;
pub(crate) use sending::{Sending, Staged};

/// What a channel stages, both ways.
#[derive(Default)]
pub(crate) struct Staging {
    pub sending: Sending,
    pub receiving: Receiving,
}

impl Staging {
    /// Whether copies are under way, which nobody tells of when they are done: somebody has to look.
    pub fn copying(&self) -> bool {
        self.sending.copying() || self.receiving.active()
    }

    /// Calls of the GPUs' drivers for copies, their marks, and questions after them.
    pub fn driver_calls(&self) -> u64 {
        self.sending.driver_calls() + self.receiving.driver_calls()
    }

    /// Bytes of pinned memory in use.
    pub fn pinned_bytes(&self) -> usize {
        self.sending.pinned_bytes() + self.receiving.pinned_bytes()
    }

    /// Ends all copying: when this returns, nothing touches the memory that was staged.
    pub fn end(&mut self) {
        self.sending.end();
        self.receiving.end();
    }
}

/// For tests: a GPU that stands still or fails in some of them, and the leave to use it.
#[cfg(test)]
const ALONE: u32 = 15;

#[cfg(test)]
fn alone() -> std::sync::MutexGuard<'static, ()> {
    static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
