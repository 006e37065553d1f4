//! ferrywire moves GPU and host memory between machines over ordinary TCP NICs, at the speed of the network.
//!
//! ```text
//!   Endpoint ── register ──> Region ── descriptor ──> (file, socket, store) ──> RemoteRegion
//!      │
//!   connect / accept
//!      │
//!    Peer ── write, read, send, recv, notify ──> Transfer ── wait
//!      │
//!      ├── channel 0 ── eth1 ──┐
//!      ├── channel 1 ── eth2 ──┼──  the peer
//!      └── channel 2 ── eth3 ──┘
//! ```
//!
//! # A first transfer
//!
//! ```
//! use ferrywire::{Endpoint, RemoteRegion};
//! use std::time::Duration;
//!
//! # fn main() -> ferrywire::Result<()> {
//! let timeout = Duration::from_secs(5);
//! let receiver = Endpoint::builder().listen("127.0.0.1:0".parse().unwrap()).build()?;
//! let address = receiver.listen_addresses()[0];
//! let target = receiver.alloc_host(1 << 20)?;
//! let descriptor = target.descriptor().to_bytes(); // to the sender, by a file, a socket or a store
//!
//! let sender = Endpoint::builder().build()?;
//! let peer = sender.connect(address, timeout)?;
//! let source = sender.register(vec![7u8; 1 << 20])?;
//! let remote = RemoteRegion::from_bytes(&descriptor)?;
//! let transfer = peer.write_notify(&source, 0, &remote, 0, 1 << 20, b"here it is")?;
//! transfer.wait(timeout)?;
//!
//! let from = receiver.accept(timeout)?;
//! assert_eq!(from.wait_notification(timeout)?, b"here it is");
//! # Ok(()) }
//! ```
//!
//! # Errors
//!
//! | type | returned by |
//! |---|---|
//! | [`ConnectError`] | connecting and accepting |
//! | [`TransferError`] | posting and waiting for transfers, notifications, block lists |
//! | [`RegisterError`] | allocating, registering, reading and writing memory |
//! | [`Error`] | everything else; `?` converts the other three to it |
//!
//! Each has `kind()`, the [`ErrorKind`] that says who has to act.
//!
//! # Layers
//!
//! | folder | holds |
//! |---|---|
//! | `api` | handles for users, and `Running`, which owns workers and the control side |
//! | `control` | listening, handshakes, sessions, lost channels, closing |
//! | `core` | operations, the send queue, channels, workers |
//! | [`payload`] | backends that carry payload beside a channel's connection |
//!
//! Each folder imports only those below it. `ARCHITECTURE.md` names the files on the path of a transfer. The
//! crate `ferrywire-proto` has the parts without I/O: frames, chunking, windows, the outbox and the inbox.

#[cfg(test)]
mod adversarial_tests;
mod api;
#[cfg(test)]
#[allow(dead_code, reason = "the simulated plugin's own tests use all of it")]
#[path = "../../ferrywire-tcpx-sim/tests/rules/case.rs"]
mod case;
mod config;
mod control;
mod core;
mod error;
pub mod payload;

pub use api::endpoint::{Builder, Connecting, Endpoint};
pub use api::orchestrator::{self, Orchestrator};
pub use api::peer::{Block, BlockList, Lengths, Peer};
pub use api::region::{self, Region, RemoteRegion};
pub use api::transfer::Transfer;
pub use api::wakeup::Wakeup;
pub use config::Config;
pub use control::ConnectTarget;
pub use core::ordering::StreamEvent;
pub use core::stats::{ChannelStats, LaneStats, PeerStats, StagingStats};
pub use error::{
    ConnectError, Error, ErrorKind, LossCause, RefusalReason, RegisterError, Result, TransferError,
    UnreachableCause,
};
pub use ferrywire_memory::{self as memory, MemoryLocation};
pub use ferrywire_metrics as metrics;
pub use ferrywire_net as net;
pub use ferrywire_proto::Identity;
pub use ferrywire_proto::limits;
pub use ferrywire_proto::protection::{Algorithm, Encryption, Protection};
pub use payload::DevmemStats;
pub use payload::plugin::PluginConfig;

/// The examples of these pages run as tests.
#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../../../docs/rust.md")]
    struct Rust;
    #[doc = include_str!("../../../README.md")]
    struct Readme;
}
