//! Memory registrations of one plugin connection.
//!
//! A region is registered when a message first needs it. The registration covers the whole pages around the
//! region. If the plugin's sizes are `int`, it is made in overlapping parts, so that each message lies within
//! one. It lasts until the region is dropped. Of GPU memory, only pages inside the allocation are registered:
//! drivers export no others. A message outside these pages, or in memory that the plugin refuses, goes
//! through a slot.
//!
//! Invariant: a registration keeps its memory alive.

use super::host::Host;
use crate::payload::lane::Run;
use ferrywire_memory::cuda::CudaError;
use ferrywire_memory::unpack::Extent;
use ferrywire_memory::{Memory, MemoryLocation};
use ferrywire_ncclnet::abi::PointerType;
use ferrywire_ncclnet::{Comm, MemoryHandle};
use ferrywire_proto::limits;
use std::ffi::c_void;
use std::sync::Arc;

const PAGE_BYTES: u64 = 4096;
/// Distance between parts of a region that cannot be registered as one.
const PART_BYTES: u64 = 1 << 30;

const _: () = assert!(PART_BYTES + limits::CHUNK_BYTES_MAX as u64 + 2 * PAGE_BYTES < 1 << 31);

/// The registrations of one connection.
#[derive(Default)]
pub(super) struct Registrations {
    list: Vec<Registered>,
    /// Whether a warning about unusable memory was logged.
    warned: bool,
}

struct Registered {
    memory: Arc<Memory>,
    parts: Vec<Option<Result<Part, String>>>,
}

/// One registration of a region, or of a part of it.
#[derive(Clone, Copy)]
struct Part {
    handle: MemoryHandle,
    /// Address and length of the part, in bytes.
    begin: u64,
    bytes: usize,
}

/// The pages of a region, or of one part of it: address and length in bytes.
fn pages(base: u64, len: u64, part: Option<u64>) -> (u64, usize) {
    let begin = base / PAGE_BYTES * PAGE_BYTES + part.unwrap_or(0) * PART_BYTES;
    let rest = (base + len).next_multiple_of(PAGE_BYTES) - begin;
    // A message may begin at the part's last byte, and the part begins up to a page before its offset.
    let most = PART_BYTES + limits::CHUNK_BYTES_MAX as u64 + PAGE_BYTES;
    (begin, if part.is_some() { rest.min(most) } else { rest } as usize)
}

/// The pages among these that lie inside the allocation.
fn whole_pages((begin, bytes): (u64, usize), allocation: Extent) -> Option<(u64, usize)> {
    let end = (allocation.base + allocation.bytes) / PAGE_BYTES * PAGE_BYTES;
    let first = begin.max(allocation.base.next_multiple_of(PAGE_BYTES));
    let last = end.min(begin + bytes as u64);
    (first < last).then(|| (first, (last - first) as usize))
}

impl Registrations {
    /// The registration that contains a message; created if there is none.
    ///
    /// # Errors
    /// Why the message's memory cannot be registered. The result is final.
    pub fn of(&mut self, comm: &Comm, run: &Run, host: &Host) -> Result<MemoryHandle, String> {
        match self.part_of(comm, run, host) {
            Ok(part) if part.holds(run) => Ok(part.handle),
            Err(why) => Err(why.clone()),
            Ok(_) => Err(format!(
                "the first or last page of the message also holds bytes outside of its allocation ({})",
                run.memory.describe()
            )),
        }
    }

    /// Whether the memory of the run is registered or can be.
    pub fn has(&mut self, comm: &Comm, run: &Run, host: &Host) -> bool {
        self.part_of(comm, run, host).is_ok_and(|part| part.holds(run))
    }

    fn part_of(&mut self, comm: &Comm, run: &Run, host: &Host) -> Result<&Part, &String> {
        let in_parts = comm.plugin().registration_bytes_max() < usize::MAX;
        let part = in_parts.then_some(run.offset / PART_BYTES);
        let at = self.position(&run.memory);
        let slot = part.unwrap_or(0) as usize;
        if self.list[at].parts[slot].is_none() {
            let made = register(comm, &run.memory, part, host);
            if let Err(why) = &made {
                self.tell(comm, &run.memory, why);
            }
            self.list[at].parts[slot] = Some(made);
        }
        let made = || Err("not registered".into());
        self.list[at].parts[slot].get_or_insert_with(made).as_ref()
    }

    /// Logs once as a warning that payload of this memory is copied.
    fn tell(&mut self, comm: &Comm, memory: &Memory, why: &str) {
        let (comm, location) = (comm.id(), memory.location());
        if std::mem::replace(&mut self.warned, true) {
            tracing::debug!(%comm, "payload in {location} is copied, because its memory cannot be registered: {why}")
        } else {
            tracing::warn!(%comm, "payload in {location} is copied, because its memory cannot be registered: {why}")
        }
    }

    fn position(&mut self, memory: &Arc<Memory>) -> usize {
        if let Some(at) = self.list.iter().position(|each| Arc::ptr_eq(&each.memory, memory)) {
            // Move used entries towards the front.
            self.list.swap(at, at / 2);
            return at / 2;
        }
        let parts = memory.len().div_ceil(PART_BYTES).max(1) as usize;
        self.list.push(Registered { memory: memory.clone(), parts: vec![None; parts] });
        self.list.len() - 1
    }

    /// Undoes registrations of dropped regions that are not in use.
    pub fn forget_revoked(&mut self, comm: &Comm, busy: &dyn Fn(&Arc<Memory>) -> bool) {
        let mut at = 0;
        while at < self.list.len() {
            let memory = &self.list[at].memory;
            if memory.revoked() && !busy(memory) {
                let gone = self.list.swap_remove(at);
                gone.undo(comm);
            } else {
                at += 1;
            }
        }
    }

    /// Number of registrations at the plugin.
    pub fn count(&self) -> usize {
        let parts = self.list.iter().flat_map(|each| &each.parts);
        parts.filter(|part| matches!(part, Some(Ok(_)))).count()
    }

    /// Undoes all registrations. The caller has no request in flight.
    pub fn undo_all(&mut self, comm: &Comm) {
        self.list.drain(..).for_each(|each| each.undo(comm));
    }
}

fn register(comm: &Comm, memory: &Memory, part: Option<u64>, host: &Host) -> Result<Part, String> {
    let base = memory.span(0, 0).map_or(0, |base| base as u64);
    let around = pages(base, memory.len(), part);
    let ((begin, bytes), kind) = match memory.location() {
        MemoryLocation::Host => (around, PointerType::Host),
        _ => {
            let allocation = host.allocation(base, memory.len());
            let allocation = allocation.ok_or_else(|| freed(base, memory.len()))?;
            let whole = whole_pages(around, allocation);
            (whole.ok_or("the region holds no whole page of its allocation")?, PointerType::Cuda)
        }
    };
    tracing::debug!(comm = %comm.id(), begin, bytes, "memory registered with the plugin");
    // A failing call of TCPX leaves a context on the thread's stack.
    let handle = host.with_gpu_current_alone(|| {
        // SAFETY: these pages hold the region, or the usable part of it, which the registration keeps. The
        // other bytes of the first and last page are mapped, and no message touches them.
        let handle = unsafe { comm.reg_mr(begin as *mut c_void, bytes, kind) };
        handle.map_err(|error| error.to_string())
    })?;
    Ok(Part { handle, begin, bytes })
}

fn freed(address: u64, bytes: u64) -> String {
    CudaError::Freed { address, bytes }.to_string()
}

impl Part {
    fn holds(&self, run: &Run) -> bool {
        let registered = Extent { base: self.begin, bytes: self.bytes as u64 };
        registered.holds(run.base() as u64, run.bytes as u64)
    }
}

impl Registered {
    fn undo(self, comm: &Comm) {
        for part in self.parts.into_iter().flatten().flatten() {
            // SAFETY: the registration is this connection's, and no request uses it.
            if let Err(error) = unsafe { comm.dereg_mr(part.handle) } {
                tracing::warn!(%error, "cannot deregister memory from a plugin: it stays registered");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_pages_are_registered_around_a_region() {
        assert_eq!(pages(0x10_0010, 100, None), (0x10_0000, 4096));
        assert_eq!(pages(0x10_0ff0, 100, None), (0x10_0000, 8192));
        assert_eq!(pages(0x10_0000, 0, None), (0x10_0000, 0));
    }

    #[test]
    fn only_pages_that_an_allocation_has_whole_are_registered_of_it() {
        let whole = |begin, bytes, base, len| whole_pages((begin, bytes), Extent { base, bytes: len });
        assert_eq!(whole(0x10_0000, 0x2000, 0x10_0000, 0x2000), Some((0x10_0000, 0x2000)));
        assert_eq!(whole(0x10_0000, 0x2000, 0x10_0000, 0x1fff), Some((0x10_0000, 0x1000)));
        assert_eq!(whole(0x10_0000, 0x2000, 0x10_0200, 0x8000), Some((0x10_1000, 0x1000)));
        assert_eq!(whole(0x10_0000, 0x1000, 0x10_0200, 0x8000), None);
        assert_eq!(whole(0x10_0000, 0x1000, 0x10_0000, 777), None);
    }

    #[test]
    fn every_message_lies_within_the_part_that_its_offset_names() {
        let (base, len) = (0x7000_0000_0123u64, 5u64 << 30);
        for offset in [0, 1, PART_BYTES - 1, PART_BYTES, 3 * PART_BYTES - 1, len - 1] {
            let (begin, bytes) = pages(base, len, Some(offset / PART_BYTES));
            let message = (limits::CHUNK_BYTES_MAX as u64).min(len - offset);
            assert_eq!(begin % PAGE_BYTES, 0);
            assert!(bytes < 1 << 31);
            assert!(begin <= base + offset, "{offset}");
            assert!(base + offset + message <= begin + bytes as u64, "{offset}");
        }
    }
}
