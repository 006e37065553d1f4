//! ferrywire for C and everything that calls C: `include/ferrywire.h` and `libferrywire_c`.
//!
//! Each function of the header is a thin one here, which looks up its handles, turns its arguments into those of the
//! engine, and the engine's error into a status and a text. `endpoint`, `peer`, `memory`, `blocks`, `transfer` and
//! `wakeup` hold the functions, `handles` what a handle is, `status` what comes back.
//!
//! Invariant: no panic crosses the border, and no handle is ever dereferenced: a handle that is null, freed or of
//! another kind is an error. What is believed of the caller is what C cannot show: that strings end, that buffers
//! have the size that is said, and that memory that was registered stays.

#![allow(
    clippy::missing_safety_doc,
    reason = "one set of rules holds for all functions: the invariant above"
)]

pub mod blocks;
pub mod endpoint;
mod forks;
mod handles;
pub mod memory;
pub mod options;
pub mod peer;
pub mod status;
pub mod transfer;
pub mod wakeup;
