//! Device memory over TCP, on a kernel and a NIC that can do it: a VM with a pair of software NICs.
//!
//! ```text
//!   host: runner ── boots ──> VM: this same program, its other tests
//!                               dm0 10.9.0.1, receives  <── wire ──  dm1 10.9.0.2, in a network namespace of its own
//! ```
//!
//! On the host the tests of the VM print that they were skipped (all but the refusals of loopback, in `bind.rs`), and
//! `runner` runs them in the VM on request: `FERRYWIRE_DEVMEM_VM=1 cargo test -p ferrywire-devmem --test devmem --
//! --nocapture`.
//! Read next: `vm.rs`, their helpers; `boot.rs`.

mod bind;
mod boot;
mod faults;
mod nic;
mod receive;
mod record;
mod recorded;
mod runner;
mod send;
mod sim;
mod vm;
