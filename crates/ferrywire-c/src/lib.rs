//! The C interface of ferrywire, for C and every language that calls C: `include/ferrywire.h` and `libferrywire_c`.
//!
//! Each function of the header is thin: it looks up its handles, converts its arguments, calls the engine, and turns
//! the engine's error into a status and a message. `endpoint`, `peer`, `memory`, `blocks`, `transfer` and `wakeup` hold
//! the functions, `handles` the handle tables, `status` the return values.
//!
//! Invariant: no panic crosses the C boundary, and no handle is ever dereferenced: a null, freed or foreign
//! handle is an error. The caller is trusted only where the library cannot check: strings are NUL-terminated,
//! buffers have the stated size, and registered memory stays valid.

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
