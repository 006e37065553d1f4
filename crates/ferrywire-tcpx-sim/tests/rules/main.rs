//! One named test per rule of the plugin: what a host can observe, and that each quirk can be switched off.
//!
//! Every case runs in a process of its own (`case.rs`), through the raw table (`driver.rs`).

mod case;
mod driver;

mod closing;
mod cuda;
#[allow(dead_code, reason = "other tests use all of it")]
#[path = "../../../ferrywire/tests/cuda/driver.rs"]
mod cuda_driver;
mod data;
mod faults;
mod gather;
mod gpu;
mod ring;
mod setup;
mod speed;
mod wire_peer;
