//! Host memory through which incoming messages pass.
//!
//! Invariant: bytes stay in place until the lane that gathers them releases them. Read next: `receiving.rs`, which owns
//! the buffers.

use super::backend::Backend;
use super::background_init::BackgroundInit;
use super::gather::Gatherer;
use ferrywire_memory::host::HostBuffer;
use ferrywire_memory::unpack::Mapped;
use std::sync::Arc;
use std::task::Poll;

/// Host memory for bytes that do not land in the pool. If a GPU gathers, it reads the bytes there.
pub(super) struct Buffer {
    base: u64,
    len: usize,
    /// Offset in the buffer of the next bytes; the bytes before it are in use.
    pub at: usize,
    used: usize,
    _memory: BufferMemory,
}

enum BufferMemory {
    Host { _buffer: HostBuffer },
    Mapped { _mapped: Mapped },
}

impl Buffer {
    pub fn new(gatherer: Option<&Gatherer>, len: usize) -> Result<Buffer, String> {
        let (base, memory) = match gatherer {
            Some(gatherer) => {
                let mapped = gatherer.map(len).map_err(|error| error.to_string())?;
                (mapped.at(0, len), BufferMemory::Mapped { _mapped: mapped })
            }
            None => {
                let buffer = HostBuffer::zeroed(len).map_err(|error| error.to_string())?;
                (buffer.base(), BufferMemory::Host { _buffer: buffer })
            }
        };
        Ok(Buffer { base: base as u64, len, at: 0, used: 0, _memory: memory })
    }

    pub fn address(&self) -> u64 {
        self.base
    }

    /// Whether a whole message fits into the free part of the buffer.
    pub fn has_room_for(&mut self, bytes: usize) -> bool {
        if self.used == 0 {
            self.at = 0;
        }
        self.len - self.at >= bytes
    }

    pub fn next(&mut self, bytes: usize) -> *mut u8 {
        debug_assert!(self.at + bytes <= self.len, "room for a message is made before it begins");
        (self.address() + self.at as u64) as *mut u8
    }

    pub fn keep(&mut self, bytes: usize) {
        self.at += bytes;
        self.used += bytes;
    }

    pub fn free(&mut self, bytes: usize) {
        self.used -= bytes;
    }
}

/// Mapped host memory through which messages pass, made when it is first needed.
pub(super) struct Stages {
    backend: Arc<Backend>,
    slots: usize,
    slot_bytes: usize,
    making: Option<Arc<BackgroundInit<Mapped>>>,
    memory: Option<Mapped>,
    free: Vec<usize>,
}

impl Stages {
    pub fn new(backend: Arc<Backend>, slots: usize, slot_bytes: usize) -> Stages {
        Stages { backend, slots, slot_bytes, making: None, memory: None, free: Vec::new() }
    }

    pub fn give_back(&mut self, stage: usize) {
        self.free.push(stage);
    }

    /// Takes a free stage, once the stages are made; the error says why they cannot be made.
    pub fn take(&mut self) -> Result<Poll<usize>, String> {
        if self.memory.is_none() {
            let (backend, bytes) = (self.backend.clone(), self.slots * self.slot_bytes);
            let start =
                || BackgroundInit::start("mapping memory to receive through", move || backend.map(bytes));
            let Poll::Ready(made) = self.making.get_or_insert_with(start).take() else {
                return Ok(Poll::Pending);
            };
            self.memory = Some(made?);
            self.free = (0..self.slots).rev().collect();
        }
        let stage = self.free.pop().ok_or("more messages are posted than there are stages")?;
        Ok(Poll::Ready(stage))
    }

    pub fn address(&self, stage: usize) -> u64 {
        match &self.memory {
            Some(memory) => memory.at(stage * self.slot_bytes, self.slot_bytes) as u64,
            None => 0,
        }
    }
}
