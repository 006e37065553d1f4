//! The kernel's devmem TCP: payload goes from the NIC into GPU memory, and from there to the NIC, without a copy by the CPU.
//!
//! ```text
//!   NIC queue ── payload ──> pool (a dma-buf) ── gather ──> destination      fragments: recvmsg; given back when gathered
//!   source (a dma-buf) ── sendmsg, MSG_ZEROCOPY ──> NIC                      host memory: a plain send
//! ```
//!
//! [`DevmemConfig`] makes an endpoint use it:
//!
//! ```no_run
//! use ferrywire::{Endpoint, MemoryLocation};
//! use ferrywire_devmem::DevmemConfig;
//!
//! # fn main() -> ferrywire::Result<()> {
//! let devmem = DevmemConfig::default().gpu(MemoryLocation::Cuda(0)).optional();
//! let endpoint = Endpoint::builder().payload_backend(devmem).build()?;
//! # Ok(()) }
//! ```
//!
//! Each channel has a lane: a second TCP connection, used in both directions, that carries only payload, in the order
//! of the headers on the channel's own connection. At each end a rule of the NIC steers it to a queue that the
//! endpoint's pool is bound to. Bytes of a packet that took another way arrive as plain bytes and are copied.
//!
//! Invariant: a fragment is returned to the kernel only after its bytes were copied out of the pool.
//! Read next: `config.rs`, `backend.rs` and `device.rs` (NICs and pools), `setup.rs`, `lane.rs`, then `receiving.rs`
//! and `sending.rs`. `nic.rs` changes settings of a NIC and undoes the changes; `sys/` has the kernel's calls.

mod backend;
mod background_init;
mod bounce_buffers;
mod config;
mod device;
mod errors;
mod gather;
mod lane;
#[doc(hidden)]
pub mod nic;
mod pool;
mod receiving;
mod sending;
mod setup;
mod sources;
mod steering;
#[doc(hidden)]
pub mod sys;

pub use config::DevmemConfig;
pub use errors::{BindCause, DevmemError, Direction, SendCause};
pub use ferrywire::DevmemStats;
pub use nic::Possible;
pub use steering::release_nics;

/// The backend's name, in reports and in handshakes.
const NAME: &str = ferrywire::payload::DEVMEM;
