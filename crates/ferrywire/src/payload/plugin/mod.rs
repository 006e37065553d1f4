//! Payload over an NCCL net plugin; headers and small messages go over TCP beside it.
//!
//! ```text
//!   Builder::plugin ── Host: environment, load, devices ── Setup: listen, accept, connect ── PluginLane
//! ```
//!
//! A plugin's calls may block or never return. During set-up, dedicated threads make them; afterwards only
//! the channel's worker thread does, never a caller. Both ends agree on plugin, sizes and environment before
//! the session is open.
//!
//! Invariant: only the user decides which file is loaded; a peer has no influence.
//! Read next: `config.rs`, `host.rs`, `setup.rs`, `lane.rs`.

mod config;
mod environment;
mod host;
mod lane;
mod registration;
mod setup;
mod setup_lock;
mod tcpx;
#[cfg(test)]
mod tests;
mod watch;

pub use config::PluginConfig;
pub use environment::{SetBy, Variable};
pub(crate) use host::{Host, environment_for};
pub(crate) use watch::CallWatch;
