//! Verification patterns in memory of a simulated GPU, written and compared on its own thread.

use super::allocation::resolve;
use super::work::Work;
use super::{Result, SimGpu};
use crate::unpack::PatternParameters;
use ferrywire_proto::limits;
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes of a pattern that are written or compared in one step.
const PART_BYTES: usize = 64 << 10;

/// Result of a comparison: the number of the first part that differs, and the index of its first wrong byte.
pub(super) type Found = Arc<Mutex<Option<(usize, u64)>>>;

/// Writes and compares patterns on one GPU; each call waits for its work. Each call has a stream of its own,
/// so work that timed out ends with the call, and nothing accesses the memory later.
pub struct SimPattern(Arc<SimGpu>);

impl SimGpu {
    /// Access to verification patterns in this GPU's memory.
    pub fn pattern(self: &Arc<Self>) -> SimPattern {
        SimPattern(self.clone())
    }
}

impl SimPattern {
    /// Writes the pattern of each part, and waits.
    pub fn fill(&self, parts: Vec<PatternParameters>) -> Result<()> {
        let stream = self.0.stream();
        stream.enqueue(Work::Pattern { parts })?;
        stream.wait(limits::SIM_GPU_BLOCKING_TIMEOUT)
    }

    /// The number of the first part that differs, and the index of its first wrong byte.
    pub fn first_difference(&self, parts: Vec<PatternParameters>) -> Result<Option<(usize, u64)>> {
        let (stream, found) = (self.0.stream(), Found::default());
        stream.enqueue(Work::Compare { parts, found: found.clone() })?;
        stream.wait(limits::SIM_GPU_BLOCKING_TIMEOUT)?;
        Ok(*found.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

pub(super) fn fill(parts: &[PatternParameters]) -> Result<()> {
    let mut made = vec![0u8; PART_BYTES];
    for part in parts {
        let to = resolve(part.address, part.bytes as usize)?;
        for at in (0..part.bytes as usize).step_by(PART_BYTES) {
            let made = &mut made[..PART_BYTES.min(part.bytes as usize - at)];
            part.pattern().fill(part.offset + at as u64, made);
            // SAFETY: `at` is inside the span, which keeps the memory mapped; the source belongs to this
            // function.
            unsafe { std::ptr::copy_nonoverlapping(made.as_ptr(), to.pointer.add(at), made.len()) };
        }
    }
    Ok(())
}

/// Compares memory with patterns through a private buffer: NICs may write to the memory meanwhile, so no
/// reference to it may exist.
pub(super) fn first_difference(parts: &[PatternParameters]) -> Result<Option<(usize, u64)>> {
    let mut found = vec![0u8; PART_BYTES];
    for (number, part) in parts.iter().enumerate() {
        let from = resolve(part.address, part.bytes as usize)?;
        for at in (0..part.bytes as usize).step_by(PART_BYTES) {
            let found = &mut found[..PART_BYTES.min(part.bytes as usize - at)];
            // SAFETY: `at` is inside the span, which keeps the memory mapped; the target belongs to this
            // function.
            unsafe { std::ptr::copy_nonoverlapping(from.pointer.add(at), found.as_mut_ptr(), found.len()) };
            if let Some(i) = part.pattern().first_difference(part.offset + at as u64, found) {
                return Ok(Some((number, (at + i) as u64)));
            }
        }
    }
    Ok(None)
}
