//! The shared object, loaded as a plugin.
//!
//! `over_host` uses this project's own host for plugins, in every version of the interface.

mod over_host;
mod pair;
