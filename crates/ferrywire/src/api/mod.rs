//! Handles for users: endpoints, peers, regions, transfers.
//!
//! Invariant: these handles keep [`running::Running`] alive, and nothing below them does.
//! A file without `#![forbid(unsafe_code)]` has, or calls, an `unsafe fn` on raw memory or streams
//! (`register_raw`, `block_raw_stream`).
//! Read next: `endpoint.rs`, `peer/`, `transfer.rs`, `running.rs`.

pub mod endpoint;
pub mod orchestrator;
pub(crate) mod peer;
pub mod region;
mod releaser;
mod running;
pub(crate) mod transfer;
pub(crate) mod wakeup;
