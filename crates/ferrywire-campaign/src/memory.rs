//! Memory of operations, and the bytes that it must contain.
//!
//! Each area is a region with guard bytes around the bytes that an operation may touch. The thread of the run
//! reads the area directly, without the engine, whenever the engine does not run.
//! Invariant: outside of the blocks no byte ever changes; inside each byte is the old or the new one, and does
//! not change once the area is *frozen*.

use std::sync::{Arc, Weak};

use ferrywire::{Endpoint, Region, RegisterError};
pub use ferrywire_memory::pattern::without_zeroes as pattern;
use ferrywire_memory::sim::{SimBuffer, SimGpu};

/// Number of guard bytes before, between and after the blocks of an area.
const GUARD: usize = 48;

/// The state of an area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The engine only reads the area.
    Source,
    /// The area is being written; each byte is old or new.
    Open,
    /// A message arrives in the area; it is not known yet which one.
    OpenForMessage,
    /// The area never changes any more.
    Frozen,
    /// The memory of the area was freed or its process has ended.
    Gone,
}

/// Whether the caller owns the memory, and keeps it or gives the region an owner.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Raw {
    No,
    Kept,
    WithOwner,
}

/// A registered piece of memory.
pub struct Area {
    /// Slot of the endpoint with which it is registered.
    pub slot: usize,
    pub region: Option<Region>,
    pub phase: Phase,
    /// Bytes that must be in the area when the operation is done.
    expected: Vec<u8>,
    /// Bytes that were in the area at the last check, or when it was frozen.
    pub known: Vec<u8>,
    /// Offset and length of each block in the area, in bytes.
    pub blocks: Vec<(usize, usize)>,
    /// Whether the user has freed or deregistered the area.
    pub taken: bool,
    /// Whether bytes of the operation were missing when the user freed or deregistered the area.
    pub was_incomplete: bool,
    /// Whether the user has written other bytes into the area.
    pub reused: bool,
    /// Whether wrong bytes may be in the blocks before the operation is done.
    pub loose: bool,
    /// The owner that the region has: it goes when nothing touches the memory any more.
    pub owner: Option<Weak<()>>,
    view: *mut u8,
    buffer: Option<SimBuffer>,
    _own: Option<Box<[u8]>>,
}

/// Splits a number of bytes into `blocks` blocks, with gaps between them.
pub fn split(bytes: usize, blocks: usize, gap: usize) -> Vec<(usize, usize)> {
    let each = bytes / blocks.max(1);
    let mut at = GUARD;
    let mut all = Vec::with_capacity(blocks);
    for block in 0..blocks {
        let len = if block + 1 == blocks { bytes - each * block } else { each };
        all.push((at, len));
        at += len + gap;
    }
    all
}

impl Area {
    /// Registers memory with these blocks. `salt` gives the bytes of a source; a target is zero first.
    ///
    /// # Errors
    /// The engine's error if the memory cannot be registered.
    pub fn new(
        slot: usize,
        endpoint: &Endpoint,
        gpu: Option<&Arc<SimGpu>>,
        raw: Raw,
        blocks: Vec<(usize, usize)>,
        salt: Option<u64>,
    ) -> Result<Area, RegisterError> {
        let len = blocks.iter().map(|(at, len)| at + len).max().unwrap_or(0) + GUARD;
        let mut known = vec![0xA5; len];
        for (at, len) in &blocks {
            known[*at..at + len].fill(0);
        }
        let phase = if salt.is_some() { Phase::Source } else { Phase::Open };
        if let Some(salt) = salt {
            fill(&mut known, &blocks, &pattern(blocks.iter().map(|(_, len)| len).sum(), salt));
        }
        let (mut buffer, mut own, mut owner) = (None, None, None);
        let is_raw = raw != Raw::No;
        let (region, view) = match gpu {
            Some(gpu) if is_raw => {
                let memory = gpu.alloc(len, 4096)?;
                // SAFETY: the area keeps the buffer until its region is dropped, or the simulated GPU refuses
                // the access.
                let region = unsafe { endpoint.register_raw(memory.as_ptr(), len) }?;
                let view = view_of(memory.address(), len);
                buffer = Some(memory);
                (region, view)
            }
            Some(gpu) => {
                let region = endpoint.alloc_sim(gpu.index(), len)?;
                let view = view_of(region.as_ptr() as u64, len);
                (region, view)
            }
            None if is_raw => {
                let mut memory = vec![0u8; len].into_boxed_slice();
                let base = memory.as_mut_ptr();
                let token = (raw == Raw::WithOwner).then(Arc::default);
                owner = token.as_ref().map(Arc::downgrade);
                // SAFETY: the area keeps the memory for longer than its region, with an owner or without.
                let region = unsafe {
                    match token {
                        Some(token) => endpoint.register_with(base, len, Box::<Arc<()>>::new(token)),
                        None => endpoint.register_raw(base, len),
                    }
                }?;
                own = Some(memory);
                (region, base)
            }
            None => {
                let region = endpoint.register(vec![0u8; len])?;
                let base = region.as_ptr();
                (region, base)
            }
        };
        // SAFETY: the memory has `len` bytes, and neither other threads nor operations use it yet.
        unsafe { std::ptr::copy_nonoverlapping(known.as_ptr(), view, len) };
        let expected = known.clone();
        let region = Some(region);
        Ok(Area {
            slot,
            region,
            phase,
            expected,
            known,
            blocks,
            taken: false,
            was_incomplete: false,
            reused: false,
            loose: false,
            owner,
            view,
            buffer,
            _own: own,
        })
    }

    /// Sets the bytes that must be in the blocks when the operation is done.
    pub fn expect(&mut self, bytes: &[u8]) {
        self.expected = self.known.clone();
        fill(&mut self.expected, &self.blocks, bytes);
    }

    /// The bytes that are in the area now.
    pub fn now(&self) -> &[u8] {
        // SAFETY: the memory is this area's, and the engine, which writes on this thread alone, does not run.
        unsafe { std::slice::from_raw_parts(self.view, self.known.len()) }
    }

    /// The first `bytes` bytes of the blocks, joined.
    pub fn joined(&self, bytes: usize) -> Vec<u8> {
        let now = self.now();
        let mut all = Vec::with_capacity(bytes);
        for (at, len) in &self.blocks {
            all.extend_from_slice(&now[*at..at + (*len).min(bytes - all.len())]);
        }
        all
    }

    /// Checks that the operation's bytes are in the area, and no others.
    ///
    /// # Errors
    /// A text about the first byte that is wrong.
    pub fn check_done(&self) -> Result<(), String> {
        if self.phase == Phase::Gone {
            return Ok(());
        }
        compare(self.now(), &self.expected, "a finished operation")
    }

    /// Checks what must hold at any time, and stores the present bytes for the next check.
    ///
    /// # Errors
    /// A text about the first byte that is wrong.
    pub fn check(&mut self) -> Result<(), String> {
        let is_registered = self.region.is_some() && !self.taken && self.phase != Phase::Gone;
        if is_registered && self.owner.as_ref().is_some_and(|owner| owner.strong_count() == 0) {
            return Err("the owner of registered memory is gone".into());
        }
        // SAFETY: the memory is this area's, and the engine does not run; the borrow is apart from the other
        // fields.
        let now = unsafe { std::slice::from_raw_parts(self.view, self.known.len()) };
        match self.phase {
            Phase::Gone => {}
            Phase::Source => compare(now, &self.known, "memory that is only read")?,
            Phase::Frozen => compare(now, &self.known, "memory of an operation that has ended")?,
            Phase::Open if !self.loose => {
                if now == self.known.as_slice() {
                    return Ok(());
                }
                let wrong = |at: &usize| now[*at] != self.known[*at] && now[*at] != self.expected[*at];
                if let Some(at) = (0..now.len()).find(wrong) {
                    let bytes = (now[at], self.known[at], self.expected[at]);
                    return Err(format!(
                        "byte {at} of a target is neither the old nor the new one: {bytes:02x?}"
                    ));
                }
                self.known.copy_from_slice(now);
            }
            Phase::Open | Phase::OpenForMessage => {
                let mut at = 0;
                for (begin, len) in self.blocks.iter().chain([&(self.known.len(), 0)]) {
                    compare(&now[at..*begin], &self.known[at..*begin], "memory beside a receive")?;
                    at = begin + len;
                }
                self.known.copy_from_slice(now);
            }
        }
        Ok(())
    }

    /// Freezes the area: from now on no byte of it may change.
    ///
    /// # Errors
    /// A text about the first byte that is wrong.
    pub fn freeze(&mut self) -> Result<(), String> {
        if matches!(self.phase, Phase::Open | Phase::OpenForMessage) {
            self.check()?;
            self.phase = Phase::Frozen;
        }
        Ok(())
    }

    /// Frees GPU memory that the area owns. Returns whether there was any.
    pub fn free(&mut self) -> bool {
        let freed = self.buffer.take().is_some();
        if freed {
            self.phase = Phase::Gone;
            self.taken = true;
        }
        freed
    }

    /// Writes other bytes into memory of an operation that has ended, as its user may do.
    pub fn reuse(&mut self) {
        match self.phase {
            Phase::Source => {
                self.poison();
                self.phase = Phase::Source;
            }
            Phase::Frozen if !self.taken => self.poison(),
            _ => {}
        }
    }

    /// Fills memory that belongs to its user again with other bytes, which must not change any more.
    pub fn poison(&mut self) {
        if self.phase == Phase::Gone {
            return;
        }
        self.reused = true;
        self.known.fill(0xEE);
        // SAFETY: the memory is this area's, and the engine has released it.
        unsafe { std::ptr::copy_nonoverlapping(self.known.as_ptr(), self.view, self.known.len()) };
        self.phase = Phase::Frozen;
    }
}

fn view_of(address: u64, len: usize) -> *mut u8 {
    // SAFETY: the allocation has this length, and lives as long as the area that reads it.
    unsafe { SimGpu::dma_view(address, len) }.expect("memory of a GPU")
}

fn fill(memory: &mut [u8], blocks: &[(usize, usize)], bytes: &[u8]) {
    let mut from = 0;
    for (at, len) in blocks {
        let now = (*len).min(bytes.len() - from);
        memory[*at..at + now].copy_from_slice(&bytes[from..from + now]);
        from += now;
    }
}

fn compare(found: &[u8], expected: &[u8], what: &str) -> Result<(), String> {
    if found == expected {
        return Ok(());
    }
    let wrong = found.iter().zip(expected).filter(|(a, b)| a != b).count();
    let at = found.iter().zip(expected).position(|(a, b)| a != b).unwrap_or_default();
    let here = |bytes: &[u8]| bytes[at..bytes.len().min(at + 8)].to_vec();
    Err(format!(
        "{what}: {wrong} of {} bytes are wrong, the first at {at}: {:02x?} instead of {:02x?}",
        found.len(),
        here(found),
        here(expected)
    ))
}
