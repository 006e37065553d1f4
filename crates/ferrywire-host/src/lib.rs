//! The host's hardware, the NICs for each GPU, and the rank of this process.
//!
//! [`topology`] reads the kernel and the CUDA driver and makes plans; [`ranks`] reads the variables of launchers. The
//! engine uses neither: a plan is applied to the builder of an endpoint.
//! Invariant: plans and ranks are pure functions of the files, facts and variables that were read.
//! Read next: `topology/mod.rs`.
#![forbid(unsafe_code)]

pub mod ranks;
pub mod topology;
