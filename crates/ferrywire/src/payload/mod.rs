//! Backends that carry payload beside a channel's connection.
//!
//! A channel is a byte stream ([`ferrywire_net`]), which carries the payload of plain TCP too. A
//! [`PayloadBackend`] gives each channel a [`Lane`] beside it: messages in order, each into memory that the
//! receiver has posted for it. The engine includes one backend, [`plugin`]; crates above provide others
//! through the public items here. These items change with the engine, without notice.
//!
//! Invariant: this folder knows no peers and no operations. Read next: `lane.rs`, then `payload_backend.rs`.

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
