//! A connected peer: its state, the frames that arrive from it, and the answers it is due.
//!
//! Invariant: an operation ends exactly once, when its last hold is dropped.
//! Read next: `state.rs`, also for arriving frames; `../queue.rs` for frames to send.

mod handle;
mod on_stream;
mod read_requests;
mod replies;
mod serving;
mod state;
mod stream_queue;

pub(crate) use handle::PeerHandle;
pub(crate) use state::{Landing, PeerInfo, PeerState};
