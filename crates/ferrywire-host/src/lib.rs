//! What a host is made of, which GPU is to use which NIC, and which process of a run this is.
//!
//! [`topology`] reads the kernel and the driver and makes plans; [`ranks`] reads what launchers say. The engine knows neither:
//! a plan is applied to the builder of an endpoint.
//! Invariant: plans and ranks are pure functions of what was read. Read next: `topology/mod.rs`.
#![forbid(unsafe_code)]

pub mod ranks;
pub mod topology;
