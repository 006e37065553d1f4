//! The host's twin of the gather kernel: fragments down as they are, put in order by the CPU, up in one copy.
//!
//! It shares no code with the kernel but the checks, so that a difference between the two is a defect.
//! Invariant: a stage belongs to one receive from its first copy down until its copy up is enqueued. What comes
//! down for the next one is behind that in the queue, so it overwrites nothing that is still needed.
//! Read next: `gather.rs`.

use super::device::{FragmentTable, GatherDevice, Mapped};
use crate::error::Result;
use ferrywire_proto::limits;

const STAGES: usize = limits::GATHER_LAUNCHES_MAX;
/// A stage holds a message twice: as its fragments came, and in order.
const IN_ORDER: usize = limits::CHUNK_BYTES_MAX;
const STAGE_BYTES: usize = 2 * limits::CHUNK_BYTES_MAX;

/// Host memory that a receive passes through.
#[derive(Debug)]
struct Stage {
    memory: Mapped,
    taken: bool,
}

/// The stages of one connection.
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

    /// Takes a stage, if one is free.
    pub fn take(&mut self) -> Option<usize> {
        let free = self.stages.iter().position(|stage| !stage.taken)?;
        self.stages[free].taken = true;
        Some(free)
    }

    /// The copy up from a stage is enqueued.
    pub fn give_back(&mut self, stage: usize) {
        self.stages[stage].taken = false;
    }

    /// Where a fragment comes down to: `before` bytes of the receive lie before it.
    pub fn down(&self, stage: usize, before: u64, bytes: u32) -> u64 {
        self.stages[stage].memory.at(before as usize, bytes as usize) as u64
    }

    /// Puts the fragments of a slot in order, all of which have come down; returns where the message is.
    pub fn put_in_order(&mut self, stage: usize, table: &FragmentTable, slot: usize, count: usize) -> u64 {
        let (memory, mut before) = (&self.stages[stage].memory, 0);
        for fragment in (0..count).map(|index| table.get(slot, index)) {
            let bytes = fragment.bytes as usize;
            let (from, to) =
                (memory.at(before, bytes), memory.at(IN_ORDER + fragment.target as usize, bytes));
            // SAFETY: both are inside the stage, which no GPU work touches now; the halves are apart, since
            // a message is no longer than one.
            unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
            before += bytes;
        }
        memory.at(IN_ORDER, 0) as u64
    }
}
