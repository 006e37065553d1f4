//! ferrywire's protocol without a socket, a thread or a clock: bytes and times come in, bytes come out.
//!
//! [`wire`] is what travels on a channel, [`window`] and [`transfer`] count it at both ends, [`schedule`] says how large
//! the next chunk is and who may take it. [`outbox`] and [`inbox`] are what a peer is to be sent and what comes from it. [`handshake`] opens a connection,
//! [`session`] is the control session on it.
//! Invariant: nothing here does I/O, reads a clock or knows an address of memory; what a peer sends can only become an
//! error. Read next: `wire.rs`, then `window.rs`.
#![forbid(unsafe_code)]

pub mod channel_assignment;
pub mod clock;
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
pub mod schedule;
pub mod session;
pub mod stall_timer;
mod sync;
pub mod text;
pub mod transfer;
pub mod window;
pub mod wire;

pub use identity::Identity;
