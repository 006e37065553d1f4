//! Where bytes live: registered memory ("regions"), and the table that incoming frames look them up in.
//!
//! A registered `Memory` has a key of 64 random bits, which is a peer's right to it, and dies with it.
//!
//! Invariant: an address is only ever computed by `Memory::span`, after its bounds check, and the
//! `Memory` it points into is kept alive by whoever holds the pointer.
//! Read next: `registration.rs` ([`Memory`], [`RegionTable`]), `host.rs` (the allocation), the engine's `channel/` (who fills it), [`cuda`] (real GPUs), [`sim`] (a GPU to
//! try things with), [`unpack`] (receives that arrive in fragments).

pub mod cuda;
mod error;
mod gpu;
pub mod host;
mod location;
pub mod pattern;
mod registration;
pub mod sim;
pub mod unpack;

pub use error::{Error, Result};
pub use gpu::{Gpu, GpuCopy, dmabuf_fd};
pub use location::MemoryLocation;
pub use registration::{Call, Memory, Owned, Owner, RegionTable, check_range};
