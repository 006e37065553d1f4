//! Byte streams between two ends: the traits of a network, real TCP, and a simulated one.
//!
//! A [`Transport`] listens and dials, a [`Conn`] is a reliable byte stream that never blocks. [`tcp`] is the real one;
//! [`sim`] is an in-memory network with seeded faults and a clock of its own. Everything, handshakes and the control session
//! included, goes through these traits, so that every scenario runs on both.
//!
//! Invariant: nothing here blocks, and nothing here knows a frame, a peer or a region.
//! Read next: `stream.rs`, the traits; `tcp.rs`, then `tcp/conn.rs`, which sends and receives.

pub mod sim;
mod stream;
pub mod tcp;

pub use ferrywire_sys::IoVec;
pub use ferrywire_sys::nics::Nic;
pub use stream::{Bound, Conn, ConnOptions, Listener, PathHealth, SharedTransport, Transport};
