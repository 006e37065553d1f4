//! The pool into which payload is received: GPU or host memory that the NIC knows as a dma-buf.
//!
//! Invariant: a pool consists of whole pages and lives until no queue is bound to it any more. Read next:
//! `device.rs`.

use ferrywire::{Error, Result};
use ferrywire_memory::{Gpu, Memory, MemoryLocation, dmabuf_fd};
use ferrywire_sys::mapping::{Access, AddressRange, anonymous_file};
use ferrywire_sys::udmabuf;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Alignment of the pool in bytes, which drivers of GPUs and NICs accept.
const ALIGN_BYTES: usize = 2 << 20;

/// A receive pool and its dma-buf.
pub(super) struct Pool {
    location: MemoryLocation,
    base: u64,
    bytes: usize,
    dmabuf: OwnedFd,
    _keeper: Keeper,
}

enum Keeper {
    Gpu { _memory: Arc<Memory> },
    Host { _range: AddressRange },
}

impl Pool {
    /// Allocates a pool in this GPU's memory, or in host memory.
    pub fn new(gpu: Option<&Gpu>, bytes: usize) -> Result<Pool> {
        let bytes = bytes.next_multiple_of(ALIGN_BYTES);
        match gpu {
            Some(gpu) => Pool::on(gpu, bytes),
            None => Pool::of_host(bytes).map_err(|error| {
                let what = format!("cannot make a pool of {} MiB of host memory for devmem TCP", bytes >> 20);
                Error::io(what, &error)
            }),
        }
    }

    fn on(gpu: &Gpu, bytes: usize) -> Result<Pool> {
        let memory = Memory::private_on(gpu, bytes)?;
        let base = memory.span(0, bytes as u64).map_or(0, |base| base as u64);
        let dmabuf = dmabuf_fd(memory.location(), base, bytes as u64)?;
        Ok(Pool {
            location: memory.location(),
            base,
            bytes,
            dmabuf,
            _keeper: Keeper::Gpu { _memory: memory },
        })
    }

    fn of_host(bytes: usize) -> std::io::Result<Pool> {
        let file = anonymous_file(bytes)?;
        let mut range = AddressRange::reserve(bytes, ALIGN_BYTES)?;
        range.show(&file, Access::ReadWrite)?;
        let dmabuf = udmabuf::from_memfd(file.as_fd(), 0, bytes as u64)?;
        Ok(Pool {
            location: MemoryLocation::Host,
            base: range.base() as u64,
            bytes,
            dmabuf,
            _keeper: Keeper::Host { _range: range },
        })
    }

    /// A pool of host memory whose dma-buf is only a file.
    #[cfg(test)]
    pub fn simulated() -> Pool {
        let file = anonymous_file(ALIGN_BYTES).expect("memory");
        let range = AddressRange::reserve(ALIGN_BYTES, ALIGN_BYTES).expect("addresses");
        Pool {
            location: MemoryLocation::Host,
            base: range.base() as u64,
            bytes: ALIGN_BYTES,
            dmabuf: file,
            _keeper: Keeper::Host { _range: range },
        }
    }

    pub fn location(&self) -> MemoryLocation {
        self.location
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn dmabuf(&self) -> BorrowedFd<'_> {
        self.dmabuf.as_fd()
    }

    /// The pool's address, to which fragments are relative, on the GPU or the host.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Whether a fragment is inside the pool.
    pub fn holds(&self, offset: u64, bytes: u32) -> bool {
        offset.checked_add(bytes.into()).is_some_and(|end| end <= self.bytes as u64)
    }
}
