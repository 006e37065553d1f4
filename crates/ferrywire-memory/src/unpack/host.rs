//! The host's counterpart of the gather kernel: fragments are copied to the host unchanged, sorted by the
//! CPU, and copied back at once.
//!
//! Only the checks are shared with the kernel, so a difference between the two reveals a defect.
//! Invariant: a stage belongs to one receive from its first copy to the host until its copy to the GPU is
//! enqueued. Copies for the next receive are queued behind that one, so they overwrite no bytes that are
//! still needed.
//! Read next: `gather.rs`.

use super::device::{FragmentTable, GatherDevice, Mapped};
use crate::error::Result;
use ferrywire_proto::limits;

const STAGES: usize = limits::GATHER_LAUNCHES_MAX;
/// Offset of the sorted message in a stage; the unsorted fragments precede it.
const IN_ORDER: usize = limits::CHUNK_BYTES_MAX;
const STAGE_BYTES: usize = 2 * limits::CHUNK_BYTES_MAX;

/// Host memory through which a receive passes in host mode.
#[derive(Debug)]
struct Stage {
    memory: Mapped,
    taken: bool,
}

/// The stages in host memory of one connection.
#[derive(Debug)]
pub(super) struct HostTwin {
    stages: [Stage; STAGES],
}

impl HostTwin {
    pub fn new(device: &dyn GatherDevice) -> Result<HostTwin> {
        let stage = || device.map(STAGE_BYTES).map(|memory| Stage { memory, taken: false });
        let stages: Vec<Stage> = (0..STAGES).map(|_| stage()).collect::<Result<_>>()?;
        let stages = stages.try_into().unwrap_or_else(|_| unreachable!("as many as were made"));
        Ok(HostTwin { stages })
    }

    /// Takes a free stage; `None` when all are in use.
    pub fn take(&mut self) -> Option<usize> {
        let free = self.stages.iter().position(|stage| !stage.taken)?;
        self.stages[free].taken = true;
        Some(free)
    }

    /// Returns a stage whose copy to the GPU is enqueued.
    pub fn give_back(&mut self, stage: usize) {
        self.stages[stage].taken = false;
    }

    /// Address in the stage for a fragment that follows `before` bytes of the receive.
    pub fn down(&self, stage: usize, before: u64, bytes: u32) -> u64 {
        self.stages[stage].memory.at(before as usize, bytes as usize) as u64
    }

    /// Sorts a slot's fragments, which have all arrived; returns the address of the message.
    pub fn put_in_order(&mut self, stage: usize, table: &FragmentTable, slot: usize, count: usize) -> u64 {
        let (memory, mut before) = (&self.stages[stage].memory, 0);
        for fragment in (0..count).map(|index| table.get(slot, index)) {
            let bytes = fragment.bytes as usize;
            let (from, to) =
                (memory.at(before, bytes), memory.at(IN_ORDER + fragment.target as usize, bytes));
            // SAFETY: both ranges are inside the stage, which no GPU work accesses now; they do not overlap,
            // since a message is no longer than one half.
            unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
            before += bytes;
        }
        memory.at(IN_ORDER, 0) as u64
    }
}
