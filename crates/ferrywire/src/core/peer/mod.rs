//! What is known of a connected peer: its state, the frames that arrive from it, and what it is owed.
//!
//! Invariant: an operation ends once, when its last token comes back.
//! Read next: `state.rs`; `frames.rs`, for what arrives; `../queue/`, for what leaves.

mod frames;
mod handle;
mod read_requests;
mod serving;
mod state;
mod stream_queue;

pub(crate) use handle::PeerHandle;
pub(crate) use state::{Landing, PeerInfo, PeerState};
