//! Slots: registered memory for messages that are not one run of usable memory at this end.
//!
//! Invariant: a slot is lent to one message at a time. Read next: `sending.rs`, `receiving.rs`.

use crate::payload::lane::{Lane, Run, Way};
use ferrywire_memory::{Memory, MemoryLocation};
use std::sync::Arc;

/// A slot that is lent out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot {
    pool: usize,
    index: usize,
}

/// Slots for the messages of a lane: for each memory location in use, as many as a window has requests.
pub(super) struct Slots {
    /// Whether messages are packed for sending, or unpacked after receiving.
    way: Way,
    count: usize,
    bytes: usize,
    pools: Vec<Pool>,
}

struct Pool {
    /// The memory location of the messages; `None` for messages that are discarded.
    location: Option<MemoryLocation>,
    memory: Arc<Memory>,
    free: Vec<usize>,
}

impl Slots {
    pub fn new(lane: &dyn Lane, way: Way) -> Slots {
        let bytes = lane.message_bytes_max().next_multiple_of(4096);
        let count = match way {
            Way::Pack => lane.send_window(),
            Way::Unpack => lane.window(),
        };
        Slots { way, count, bytes, pools: Vec::new() }
    }

    /// Lends a slot for messages in memory of this location. The slots are created at first use; there are
    /// enough for a window.
    ///
    /// # Errors
    /// Why there is no memory, or no slot.
    pub fn take(
        &mut self,
        lane: &mut dyn Lane,
        like: Option<&Memory>,
        bytes: usize,
    ) -> Result<(Slot, Run), String> {
        let location = like.map(Memory::location);
        let pool = match self.pools.iter().position(|pool| pool.location == location) {
            Some(pool) => pool,
            None => self.make(lane, like)?,
        };
        let from = &mut self.pools[pool];
        let index =
            from.free.pop().ok_or("every slot is lent: more messages are posted than the window allows")?;
        let run = Run { memory: from.memory.clone(), offset: (index * self.bytes) as u64, bytes };
        Ok((Slot { pool, index }, run))
    }

    fn make(&mut self, lane: &mut dyn Lane, like: Option<&Memory>) -> Result<usize, String> {
        let bytes = self.count * self.bytes;
        let memory = match lane.slot_memory(like, bytes) {
            Ok(memory) if self.is_taken(lane, &memory) => memory,
            Ok(memory) if memory.location() == MemoryLocation::Host => memory,
            Ok(refused) => {
                // Undo the registration of the memory that is not used after all.
                refused.revoke();
                lane.forget_revoked(&|other| !Arc::ptr_eq(other, &refused));
                lane.host_slot_memory(bytes)?
            }
            Err(_) => lane.host_slot_memory(bytes)?,
        };
        let free = (0..self.count).rev().collect();
        self.pools.push(Pool { location: like.map(Memory::location), memory, free });
        Ok(self.pools.len() - 1)
    }

    /// Marks the slots' memory as not reusable: the kernel of a closed connection may still send from it.
    pub fn prevent_reuse(&self) {
        self.pools.iter().for_each(|pool| pool.memory.prevent_reuse());
    }

    fn is_taken(&self, lane: &mut dyn Lane, memory: &Arc<Memory>) -> bool {
        lane.takes(self.way, &Run { memory: memory.clone(), offset: 0, bytes: self.bytes })
    }

    /// Returns a slot.
    pub fn give_back(&mut self, slot: Slot) {
        self.pools[slot.pool].free.push(slot.index);
    }
}
