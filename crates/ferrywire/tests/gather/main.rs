//! The gather of scattered receives: every mode against what was sent, plugins that lie, a GPU that fails.
//!
//! `plugin.rs` plays the plugin: it scatters messages over a pool and writes the table. Tests that make a GPU
//! fail have one of their own, since all run in one process.

mod allocations;
mod lies;
mod modes;
mod order;
mod plugin;
