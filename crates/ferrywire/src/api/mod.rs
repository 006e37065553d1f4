//! What users hold: endpoints, peers, regions, transfers.
//!
//! Invariant: what users hold keeps [`running::Running`] alive, and nothing below does.
//! Files without `#![forbid(unsafe_code)]` have an `unsafe fn` of raw memory or streams (`register_raw`, `hold_raw`), or call one.
//! Read next: `endpoint.rs`, `peer/`, `transfer.rs`, `running/`.

pub mod endpoint;
pub mod orchestrator;
pub(crate) mod peer;
pub mod region;
mod releaser;
mod running;
pub(crate) mod transfer;
pub(crate) mod wakeup;
