//! Payload over the simulated TCPX plugin, between endpoints: what moves, what it costs, how it fails and
//! how it closes.
//!
//! Each case runs in a process of its own, since a plugin reads its environment once and may end it.

mod affinity;
#[allow(dead_code, reason = "the plugin's own tests use all of it")]
#[path = "../../../ferrywire-tcpx-sim/tests/rules/case.rs"]
mod case;
mod closing;
#[allow(dead_code, reason = "other tests use all of it")]
#[path = "../../../ferrywire-ncclnet/tests/nccl/compile.rs"]
mod compile;
mod cores;
mod ends;
mod failures;
mod gpu;
mod gpus;
mod lines;
mod listeners;
mod protection;
mod rules;
mod transfers;
