//! Registered memory ("regions") on hosts and GPUs, and the table in which incoming frames look it up.
//!
//! A registered [`Memory`] has a key of 64 random bits. The key gives a peer access, and becomes void when
//! the region is deregistered.
//!
//! Invariant: only [`Memory::span`] computes an address, after its bounds check, and the holder of the
//! pointer keeps the [`Memory`] alive.
//! Read next: `registration.rs` ([`Memory`], [`RegionTable`]), `host.rs` (allocation), the engine's
//! `channel/` (which fills memory), [`cuda`] (CUDA GPUs), [`sim`] (simulated GPUs), [`unpack`] (receives that
//! arrive in fragments).

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
pub use registration::{Call, InUse, LateCopies, Memory, Owned, OwnedCall, Owner, RegionTable, check_range};
