//! What carries payload beside a channel's connection, where anything does.
//!
//! A channel is a byte stream ([`ferrywire_net`]), and plain TCP carries its payload there. A [`PayloadBackend`] gives each
//! channel a [`Lane`] beside it: messages posted in order, each into memory that the receiver has posted for it. The engine
//! has one backend, [`plugin`]; others are crates above, for which what is public here is made. It changes with the engine.
//!
//! Invariant: nothing here knows a peer or an operation. Read next: `lane.rs`, then `payload_backend.rs`.

mod copying;
mod counters;
pub(crate) mod lane;
pub(crate) mod payload_backend;
pub mod plugin;
pub(crate) mod terms;

pub use copying::Copiers;
pub use counters::{DevmemCounters, DevmemStats, add};
pub use lane::{
    InFlight, Lane, LaneBy, Post, Progress, Run, Setup, Step, Ticket, UNREADABLE, Ungathered, Way,
};
pub use payload_backend::{BackendConfig, Incompatible, PayloadBackend, SharedBackend, different};
pub use terms::{DEVMEM, Terms, without};
