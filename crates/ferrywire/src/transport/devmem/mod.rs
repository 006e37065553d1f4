//! The kernel's devmem TCP: payload between NICs and device memory, without a copy by the CPU.
//!
//! Read next: `errors.rs`, what can be in the way.

mod errors;
#[doc(hidden)]
pub mod nic;

pub use errors::{BindCause, DevmemError, Direction, SendCause};
pub use nic::Possible;
