//! A campaign of random scenarios: the engine over a simulated network, in virtual time, on one thread.
//!
//! Each seed draws endpoints, NICs, operations, faults and ends (`scenario.rs`). A run (`run.rs`) checks
//! repeatedly that no byte is early, late, missing or outside of its target, that no notification or message
//! comes twice or not at all, that every operation ends, and that nothing is left behind.
//!
//! Invariant: a seed repeats exactly.
//! Read next: `scenario.rs`, then `run.rs`.

mod campaign;
mod cover;
mod driver;
mod judge;
mod memory;
mod run;
mod scenario;
mod shrink;
#[cfg(test)]
mod tests;

pub use campaign::{Failure, Plan, Report, campaign, trace};
