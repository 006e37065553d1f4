//! A connected peer: its state, the frames without payload that arrive from it, and the answers it is due.
//!
//! Invariant: an operation ends exactly once, when its last hold is dropped.
//! Read next: `state.rs`; `in_flight.rs`, where operations begin and end; `../queue.rs` for frames to send,
//! `../channel/receiver.rs` for arriving ones.

mod in_flight;
mod metrics;
mod on_stream;
mod read_requests;
mod replies;
mod route;
mod serving;
mod sharing;
mod state;
mod stream_queue;

pub(crate) use state::{Landing, PeerHandle, PeerInfo, PeerState};
