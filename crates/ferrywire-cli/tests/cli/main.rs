//! Tests of the command: the real binary, run as a user runs it.

mod bench;
mod carried;
mod causes;
mod common;
#[allow(dead_code, reason = "the engine's tests of plugins use all of it")]
#[path = "../../../ferrywire-ncclnet/tests/nccl/compile.rs"]
mod compile;
mod contained;
mod deploy;
mod docs;
mod doctor;
#[path = "../../../ferrywire/tests/cuda/driver.rs"]
mod driver;
mod faults;
mod gpu;
mod guarantees;
mod hosted;
mod kills;
mod lanes;
mod launched;
mod layers;
mod matrix;
mod metrics;
mod multi_gpu;
mod nccl;
mod nixl;
mod plugin;
mod ranks;
mod refused;
mod report;
mod results;
mod runbook;
mod schema;
mod snapshots;
mod topo;
mod trace;
#[path = "../../../ferrywire-host/tests/topology/tree.rs"]
mod tree;
mod usage;
mod watch;
mod words;
