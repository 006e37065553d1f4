//! ferrywire's protocol without sockets, threads and clocks: bytes and times come in, bytes come out.
//!
//! [`wire`] defines the frames of a channel, and [`window`] counts those in flight. [`outbox`] holds what a
//! peer is to be sent, and cuts it into chunks; [`schedule`] decides which channel takes the next one.
//! [`inbox`] holds what the peer has sent. [`handshake`] opens a connection, and [`session`] is the control
//! session on it.
//! Invariant: no function here does I/O, reads a clock or accesses memory by address; a peer's bytes can
//! cause an error and nothing worse.
//! Read next: `wire.rs`, then `window.rs`.
#![forbid(unsafe_code)]

pub mod channel_assignment;
pub mod clock;
pub mod descriptor;
#[cfg(any(test, fuzzing, feature = "testing"))]
#[doc(hidden)]
pub mod fuzz_input;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
pub mod handshake;
mod identity;
pub mod inbox;
pub mod limits;
pub mod operation;
pub mod outbox;
#[cfg(test)]
mod pair;
pub mod protection;
pub mod record;
pub mod schedule;
pub mod session;
pub mod stall_timer;
mod sync;
pub mod text;
pub mod window;
pub mod wire;

pub use identity::Identity;
