//! The kernel's devmem TCP: payload goes from the NIC into GPU memory, and from there to the NIC, without a copy by the CPU.
//!
//! ```text
//!   NIC queue ── payload ──> pool (a dma-buf) ── gather ──> destination      fragments: recvmsg; given back when gathered
//!   source (a dma-buf) ── sendmsg, MSG_ZEROCOPY ──> NIC                      host memory: a plain send
//! ```
//!
//! Each channel has a lane: one TCP connection more, used both ways, that carries nothing but payload, in the order of the
//! heads that travel on the channel's own connection. At each end a rule of the NIC steers it to a queue that the
//! endpoint's pool is bound to. Where a packet went another way its bytes arrive as plain ones, and are copied.
//!
//! Invariant: a fragment is given back to the kernel only after what it holds was copied out of the pool.
//! Read next: `config.rs`, `host.rs` (NICs and pools), `setup.rs`, `lane.rs`, then `receiving.rs` and `sending.rs`.

mod config;
mod errors;
mod gather;
mod host;
mod lane;
mod making;
#[doc(hidden)]
pub mod nic;
mod pool;
mod receiving;
mod rooms;
mod sending;
mod setup;
mod sources;
mod steering;

pub use config::DevmemConfig;
pub use errors::{BindCause, DevmemError, Direction, SendCause};
pub use nic::Possible;
#[doc(hidden)]
pub use steering::let_go_of_nics;

/// What it is called, in reports and between the ends.
const NAME: &str = crate::payload::DEVMEM;
