//! A connected peer: its state, the frames that arrive from it, and the answers it is due.
//!
//! Invariant: an operation ends exactly once, when its last hold is dropped.
//! Read next: `state.rs`; `frames.rs` for arriving frames; `../queue.rs` for frames to send.

mod frames;
mod handle;
mod read_requests;
mod serving;
mod state;
mod stream_queue;

pub(crate) use handle::PeerHandle;
pub(crate) use state::{Landing, PeerInfo, PeerState};
