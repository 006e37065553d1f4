//! Registered memory that messages pass through where they are no single run at one end.
//!
//! Invariant: a slot is lent to one message at a time.

use crate::memory::{Memory, Place};
use crate::transport::lane::{Lane, Run};
use std::sync::Arc;

/// A slot that is lent out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot {
    pool: usize,
    index: usize,
}

/// As many slots as a window has requests, of each kind of memory that is needed.
pub(super) struct Slots {
    count: usize,
    bytes: usize,
    pools: Vec<Pool>,
}

struct Pool {
    /// What it is for; `None`: what is thrown away.
    place: Option<Place>,
    memory: Arc<Memory>,
    free: Vec<usize>,
}

impl Slots {
    pub fn new(lane: &dyn Lane) -> Slots {
        let bytes = lane.message_bytes_max().next_multiple_of(4096);
        Slots { count: lane.window(), bytes, pools: Vec::new() }
    }

    /// Lends a slot for memory like this, made when it is first needed. There are enough for a window.
    pub fn take(
        &mut self,
        lane: &dyn Lane,
        like: Option<&Memory>,
        bytes: usize,
    ) -> Result<(Slot, Run), String> {
        let place = like.map(Memory::place);
        let pool = match self.pools.iter().position(|pool| pool.place == place) {
            Some(pool) => pool,
            None => self.make(lane, like)?,
        };
        let from = &mut self.pools[pool];
        let index = from.free.pop().ok_or("more messages are posted than there are slots")?;
        let run = Run { memory: from.memory.clone(), offset: (index * self.bytes) as u64, bytes };
        Ok((Slot { pool, index }, run))
    }

    fn make(&mut self, lane: &dyn Lane, like: Option<&Memory>) -> Result<usize, String> {
        let memory = lane.slot_memory(like, self.count * self.bytes)?;
        let free = (0..self.count).rev().collect();
        self.pools.push(Pool { place: like.map(Memory::place), memory, free });
        Ok(self.pools.len() - 1)
    }

    /// Some of them may still be sent: a connection that is closed sends on what its kernel has.
    pub fn use_never_again(&self) {
        self.pools.iter().for_each(|pool| pool.memory.use_never_again());
    }

    /// Takes a slot back.
    pub fn give_back(&mut self, slot: Slot) {
        self.pools[slot.pool].free.push(slot.index);
    }
}
