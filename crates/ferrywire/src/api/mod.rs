//! What users hold: endpoints, peers, regions, transfers.
//!
//! Read next: `endpoint.rs`, `peer/`, `region/`.

pub mod endpoint;
pub mod orchestrator;
pub(crate) mod peer;
pub mod region;
pub(crate) mod releaser;
pub(crate) mod wakeup;
