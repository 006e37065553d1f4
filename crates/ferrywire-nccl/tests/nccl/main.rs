//! Tests of the shared object, loaded as a plugin.
//!
//! `over_host` uses ferrywire's own host for plugins, in every version of the interface; `as_nccl` uses a driver in C
//! that calls the plugin as NCCL does; `several_nics` uses both, with devices made of several NICs; `metrics`
//! reads the counts of a process that uses the plugin.

mod as_nccl;
mod driver;
mod metrics;
mod over_host;
mod pair;
mod several_nics;
