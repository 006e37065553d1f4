//! Byte streams between two hosts: the traits of a network, real TCP, and a simulated network.
//!
//! A [`Transport`] listens and dials; a [`Conn`] is a reliable byte stream that never blocks. [`tcp`]
//! implements both over kernel sockets, [`sim`] over memory, with seeded faults and a clock of its own. All
//! traffic of the engine, handshakes and control sessions included, goes through these traits, so every
//! scenario runs on both.
//!
//! Invariant: no call blocks, and this crate knows nothing of frames, peers and regions.
//! Read next: `stream.rs`, the traits; `tcp.rs`, then `tcp/conn.rs`, which sends and receives; `sealed.rs`, which
//! encrypts.

mod sealed;
pub mod sim;
mod stream;
pub mod tcp;

pub use ferrywire_sys::IoVec;
pub use ferrywire_sys::nics::{Nic, beyond_this_host};
pub use sealed::Sealed;
pub use stream::{Bound, Conn, ConnOptions, Listener, PathHealth, SharedTransport, Transport};
