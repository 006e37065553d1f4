//! The shared object, loaded as a plugin.
//!
//! `over_host` uses this project's own host for plugins, in every version of the interface; `as_nccl` a driver in C,
//! which calls it as NCCL does; `several_nics` both, with devices made of several NICs.

mod as_nccl;
mod driver;
mod over_host;
mod pair;
mod several_nics;
