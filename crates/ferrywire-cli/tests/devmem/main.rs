//! `ferrywire bench --transport devmem` between the two hosts of a VM: what arrives, and what is left of it at their NICs,
//! however it ends.
//!
//! On the host the tests of the VM say that they were skipped, and [`runner`] runs them there when asked:
//! `FERRYWIRE_DEVMEM_VM=1 cargo test -p ferrywire-cli --test devmem -- --nocapture`.
//! Read next: [`hosts`].

#[allow(dead_code, reason = "the engine's own tests use all of it")]
#[path = "../../../ferrywire-devmem/tests/devmem/boot.rs"]
mod boot;
mod hosts;
mod kills;
mod runner;
mod runs;
