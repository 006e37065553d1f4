//! The posted transport: payload over an NCCL net plugin, everything else over TCP beside it.
//!
//! ```text
//!   Builder::plugin ── Host: environment, load, devices ── Setup: listen, accept, connect ── PluginLane
//! ```
//!
//! A plugin's calls may block, or never return: they are made by threads of their own while a lane is set
//! up, and by the channel's worker afterwards, which no caller turns. Both ends agree on plugin, sizes and
//! environment before a session stands.
//!
//! Invariant: which file is loaded is the user's word alone; nothing of it comes from a peer.
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
