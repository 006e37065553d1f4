//! Which GPUs the plugin's tests have: simulated ones.

use crate::case::Case;
use ferrywire::MemoryLocation;

/// Bytes that are much for these GPUs.
pub const MANY: usize = 24 << 20;

/// The GPU with this number.
pub fn location(index: u32) -> MemoryLocation {
    MemoryLocation::SimGpu(index)
}

/// The case, with such GPUs.
pub fn on_gpus(case: Case) -> Case {
    case
}

/// Whether a stand-in for the driver reports what is left of it when a case ends.
pub fn have_a_stand_in() -> bool {
    false
}
