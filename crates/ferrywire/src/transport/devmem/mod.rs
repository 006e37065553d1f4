//! The kernel's devmem TCP: payload between NICs and device memory, without a copy by the CPU.
//!
//! Read next: `errors.rs`, what can be in the way.

mod errors;

pub use errors::{BindCause, DevmemError, Direction, SendCause};
