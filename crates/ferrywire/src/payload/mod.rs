//! What carries payload beside a channel's connection, where anything does.
//!
//! A channel is a byte stream ([`ferrywire_net`]), and plain TCP carries its payload there. A *posted* transport ([`plugin`],
//! [`devmem`]) gives each channel a lane beside it: messages posted in order, each into memory that the receiver has posted
//! for it.
//!
//! Invariant: nothing here knows a peer or an operation. Read next: `lane.rs`, then `payload_backend.rs`.

pub(crate) mod copying;
pub mod devmem;
pub(crate) mod lane;
pub(crate) mod payload_backend;
pub mod plugin;
pub(crate) mod terms;
