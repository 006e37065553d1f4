//! The gather of scattered receives: every mode against what was sent, plugins that lie, a GPU that fails.
//!
//! `plugin.rs` plays the plugin: it scatters messages over a pool and writes the table. Tests that make a GPU
//! fail have one of their own, since all run in one process; `device.rs` is no GPU, for what a GPU does by chance.

mod allocations;
mod device;
mod lies;
mod modes;
mod order;
mod plugin;
