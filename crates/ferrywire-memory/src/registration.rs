//! Registered memory, and the table that incoming frames look it up in.
//!
//! Invariant: an address is made of an offset only in [`Memory::span`], after its bounds check; what it points into is kept alive
//! by the [`Memory`]. Read next: `place.rs`, where bytes live; `gpu.rs`.

use crate::cuda::CudaBuffer;
use crate::error::{Error, Result};
use crate::gpu::Gpu;
use crate::host::HostBuffer;
use crate::location::MemoryLocation;
use crate::sim::SimBuffer;
use crate::unpack;
use ferrywire_proto::wire::Refusal;
use std::any::Any;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

/// Whatever keeps memory alive, until it is dropped.
pub type Owner = Box<dyn Any + Send + Sync>;

/// What keeps the bytes of a region alive.
enum Keeper {
    Owned {
        _buffer: HostBuffer,
    },
    Vector {
        _bytes: Vec<u8>,
    },
    Mapped {
        _mapped: unpack::Mapped,
    },
    Sim {
        _buffer: SimBuffer,
    },
    Cuda {
        buffer: CudaBuffer,
    },
    /// The user, who promised so when registering, or somebody that the user gave us; of GPU memory, with the GPU.
    User {
        _gpu: Option<Gpu>,
        owner: Mutex<Option<Owner>>,
    },
}

/// A span of registered memory, shared by handles and by transfers under way.
pub struct Memory {
    base: *mut u8,
    len: u64,
    location: MemoryLocation,
    key: u64,
    revoked: AtomicBool,
    /// Nothing may be placed into it any more, whoever waits for that.
    taken_back: AtomicBool,
    /// Its user has dropped the last handle, and may have freed it, whatever has not ended.
    gone: AtomicBool,
    /// Operations under way that name it.
    users: AtomicUsize,
    /// Callers who read or write it at this moment.
    callers: AtomicUsize,
    keeper: Keeper,
}

// SAFETY: the pointer is only dereferenced through bounds-checked spans of host memory; the bytes behind
// it are plain memory that the network may change at any time, which every reader has to expect.
unsafe impl Send for Memory {}
// SAFETY: as above; all fields but the bytes themselves are immutable or atomic.
unsafe impl Sync for Memory {}

impl Memory {
    /// Where the bytes live. Only host memory may be touched through its address.
    pub fn location(&self) -> MemoryLocation {
        self.location
    }

    /// The address of `len` bytes at `offset`, or `None` if they are not all inside.
    pub fn span(&self, offset: u64, len: u64) -> Option<*mut u8> {
        if offset.checked_add(len)? > self.len {
            return None;
        }
        // SAFETY: offset <= len of the allocation, just checked.
        Some(unsafe { self.base.add(offset as usize) })
    }

    /// Copies bytes at `offset` into `into`, if they are all inside. Memory of a GPU is read through its copy engine,
    /// and waited for.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let Some(from) = self.span(offset, into.len() as u64) else {
            return Ok(());
        };
        match self.location {
            // SAFETY: the span is inside live host memory, and `into` is the caller's. `into` may be part of the region: its
            // user has the buffer too, and `copy` allows that both overlap.
            MemoryLocation::Host => unsafe { std::ptr::copy(from, into.as_mut_ptr(), into.len()) },
            location => Gpu::opened(location)?.read_into_slice(from as u64, into)?,
        }
        Ok(())
    }

    /// Copies `from` to `offset`, if it all fits. Memory of a GPU is written through its copy engine, and
    /// waited for.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        let Some(to) = self.span(offset, from.len() as u64) else {
            return Ok(());
        };
        match self.location {
            // SAFETY: the span is inside live host memory, and `from` is borrowed. `from` may be part of the region, as above.
            MemoryLocation::Host => unsafe { std::ptr::copy(from.as_ptr(), to, from.len()) },
            location => Gpu::opened(location)?.write_from_slice(to as u64, from)?,
        }
        Ok(())
    }

    /// The offset of an address that [`Memory::span`] gave.
    pub fn offset_of(&self, address: *mut u8) -> u64 {
        (address as u64).wrapping_sub(self.base as u64)
    }

    /// Size in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The first byte.
    pub fn base(&self) -> *mut u8 {
        self.base
    }

    /// What a peer names it by; 0 of memory that no peer can name.
    pub fn key(&self) -> u64 {
        self.key
    }

    /// Host memory of the engine's own, which no peer can name.
    pub fn private(bytes: usize) -> Result<Arc<Memory>> {
        let buffer = HostBuffer::zeroed(bytes)?;
        let (base, len) = (buffer.base(), buffer.bytes() as u64);
        Ok(Arc::new(Memory::new(base, len, MemoryLocation::Host, 0, Keeper::Owned { _buffer: buffer })))
    }

    /// Host memory of the engine's own that a GPU reaches too, and that no peer can name.
    pub fn mapped(mapped: unpack::Mapped, bytes: usize) -> Arc<Memory> {
        let base = mapped.at(0, bytes);
        Arc::new(Memory::new(base, bytes as u64, MemoryLocation::Host, 0, Keeper::Mapped { _mapped: mapped }))
    }

    /// Memory of the engine's own on a GPU, which no peer can name.
    pub fn private_on(gpu: &Gpu, bytes: usize) -> Result<Arc<Memory>> {
        let (base, len, location, keeper) = match gpu {
            Gpu::Sim(gpu) => of_sim(gpu.alloc(bytes, PAGE_BYTES)?),
            Gpu::Cuda(gpu) => of_cuda(gpu.alloc_own(bytes, PAGE_BYTES)?),
        };
        Ok(Arc::new(Memory::new(base, len, location, 0, keeper)))
    }

    fn new(base: *mut u8, len: u64, location: MemoryLocation, key: u64, keeper: Keeper) -> Memory {
        let (revoked, taken_back, gone, users, callers) = Default::default();
        Memory { base, len, location, key, revoked, taken_back, gone, users, callers, keeper }
    }

    /// Something may still be sent of it when it is dropped: nobody else gets it then.
    pub fn use_never_again(&self) {
        if let Keeper::Cuda { buffer } = &self.keeper {
            buffer.use_never_again();
        }
    }

    /// Peers may not touch it any more, and lanes need not know it.
    pub fn revoke(&self) {
        self.revoked.store(true, Ordering::SeqCst);
    }

    /// Whether the region may not be touched by peers any more.
    pub fn revoked(&self) -> bool {
        self.revoked.load(Ordering::SeqCst)
    }

    /// An operation on the memory begins. It looks at [`Memory::revoked`] afterwards, so that either it
    /// sees the end of the region or the end of the region sees it.
    pub fn enter(&self) {
        self.users.fetch_add(1, Ordering::SeqCst);
    }

    /// An operation on the memory has ended.
    pub fn leave(&self) {
        self.users.fetch_sub(1, Ordering::SeqCst);
    }

    /// What it is, for messages.
    pub fn describe(&self) -> String {
        format!("a region of {} bytes", self.len)
    }

    /// Whether operations on the memory are under way.
    pub fn used(&self) -> bool {
        self.users.load(Ordering::SeqCst) > 0
    }

    /// Whether the user owns the bytes, so that they may vanish after deregistration.
    pub fn user_owned(&self) -> bool {
        matches!(self.keeper, Keeper::User { .. })
    }

    /// Whether it was deregistered, so that what it waits for does not come any more.
    pub fn taken_back(&self) -> bool {
        self.taken_back.load(Ordering::SeqCst)
    }

    /// Whether the bytes are the user's again, or are asked for: what is not sent yet must not be.
    pub fn lost_to_user(&self) -> bool {
        self.user_owned() && self.taken_back()
    }

    /// The memory is deregistered: nothing may be placed into it any more.
    pub fn take_back(&self) {
        self.taken_back.store(true, Ordering::SeqCst);
    }

    /// Its user has dropped the last handle.
    pub fn let_user_free_it(&self) {
        self.gone.store(true, Ordering::SeqCst);
    }

    /// Whether it may be freed already: what of it is in no call to the kernel yet is never sent.
    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::SeqCst)
    }

    /// What keeps the user's bytes alive, if it is still here.
    fn owner(&self) -> Option<MutexGuard<'_, Option<Owner>>> {
        match &self.keeper {
            Keeper::User { owner, .. } => Some(owner.lock().unwrap_or_else(PoisonError::into_inner)),
            _ => None,
        }
    }

    /// Whether something that the user gave keeps its bytes alive.
    pub fn has_owner(&self) -> bool {
        self.owner().is_some_and(|owner| owner.is_some())
    }

    /// To be dropped: nothing touches the memory any more.
    pub fn take_owner(&self) -> Option<Owner> {
        self.owner()?.take()
    }

    /// Runs `body` while the memory stays, unless the user has it back.
    pub fn while_it_stays<T>(&self, body: impl FnOnce() -> Result<T>) -> Result<T> {
        self.enter();
        // Our own bytes are there as long as somebody can name them.
        let call = self.user_owned().then(|| self.call());
        let result = match self.lost_to_user() {
            false => body(),
            true => Err(Error::invalid("region", "it is deregistered")),
        };
        drop(call);
        self.leave();
        result
    }

    /// The bytes are touched until it is dropped. Who looks at [`Memory::taken_back`] after this either sees that, or is
    /// waited for.
    pub fn call(&self) -> Call<'_> {
        self.callers.fetch_add(1, Ordering::SeqCst);
        Call(&self.callers)
    }

    /// Whether somebody is in the middle of touching it, beside the threads that move data.
    pub fn in_call(&self) -> bool {
        self.callers.load(Ordering::SeqCst) > 0
    }
}

/// While this lives a thread touches the memory.
pub struct Call<'a>(&'a AtomicUsize);

impl Drop for Call<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Alignment of memory for slots: the page in which NICs take memory of a GPU.
const PAGE_BYTES: usize = 64 << 10;

/// Memory that is registered together with what keeps it alive.
pub enum Owned {
    /// Host memory that was allocated for it.
    Host(HostBuffer),
    /// Bytes that the caller has given away.
    Vector(Vec<u8>),
    /// Memory of a simulated GPU.
    Sim(SimBuffer),
    /// Memory of a CUDA GPU.
    Cuda(CudaBuffer),
}

/// All regions of an endpoint, by key.
#[derive(Default)]
pub struct RegionTable {
    by_key: RwLock<HashMap<u64, Arc<Memory>>>,
}

impl RegionTable {
    /// The region with this key.
    pub fn find(&self, key: u64) -> Result<Arc<Memory>, Refusal> {
        let table = self.by_key.read().unwrap_or_else(|e| e.into_inner());
        table.get(&key).cloned().ok_or(Refusal::NoRegion)
    }

    /// Registers memory that the region itself keeps.
    pub fn insert_owned(&self, owned: Owned) -> Arc<Memory> {
        let (base, len, location, keeper) = match owned {
            Owned::Host(buffer) => (
                buffer.base(),
                buffer.bytes() as u64,
                MemoryLocation::Host,
                Keeper::Owned { _buffer: buffer },
            ),
            Owned::Vector(mut bytes) => (
                bytes.as_mut_ptr(),
                bytes.len() as u64,
                MemoryLocation::Host,
                Keeper::Vector { _bytes: bytes },
            ),
            Owned::Sim(buffer) => of_sim(buffer),
            Owned::Cuda(buffer) => of_cuda(buffer),
        };
        self.insert(base, len, location, keeper)
    }

    /// Registers memory of the user's. Opens the GPU that it is of, and keeps it.
    ///
    /// # Safety
    /// `len` bytes at `base` must live in `location` and stay readable and writable there until the memory is
    /// removed, or `owner` dropped.
    pub unsafe fn insert_user(
        &self,
        base: *mut u8,
        len: u64,
        location: MemoryLocation,
        owner: Option<Owner>,
    ) -> Result<Arc<Memory>> {
        let gpu = match location {
            MemoryLocation::Cuda(_) => Some(Gpu::open(location)?),
            _ => None,
        };
        Ok(self.insert(base, len, location, Keeper::User { _gpu: gpu, owner: Mutex::new(owner) }))
    }

    fn insert(&self, base: *mut u8, len: u64, location: MemoryLocation, keeper: Keeper) -> Arc<Memory> {
        let mut table = self.by_key.write().unwrap_or_else(|e| e.into_inner());
        let mut key = ferrywire_sys::random::random_u64();
        while key == 0 || table.contains_key(&key) {
            key = ferrywire_sys::random::random_u64();
        }
        let memory = Arc::new(Memory::new(base, len, location, key, keeper));
        table.insert(key, memory.clone());
        memory
    }

    /// Refuses peers from here on.
    pub fn remove(&self, memory: &Memory) {
        memory.revoke();
        self.by_key.write().unwrap_or_else(|e| e.into_inner()).remove(&memory.key);
    }
}

fn of_sim(buffer: SimBuffer) -> (*mut u8, u64, MemoryLocation, Keeper) {
    let location = MemoryLocation::SimGpu(buffer.gpu().index());
    (buffer.as_ptr(), buffer.len() as u64, location, Keeper::Sim { _buffer: buffer })
}

fn of_cuda(buffer: CudaBuffer) -> (*mut u8, u64, MemoryLocation, Keeper) {
    let location = MemoryLocation::Cuda(buffer.gpu().index());
    (buffer.as_ptr(), buffer.len() as u64, location, Keeper::Cuda { buffer })
}

/// Of those who would take host memory for a GPU's.
pub(crate) fn host_has_no_gpu() -> Error {
    Error::Internal("a GPU is asked for host memory".into())
}

/// Checks that a range lies inside a region of `region_bytes`.
pub fn check_range(side: &'static str, offset: u64, len: u64, region_bytes: u64) -> Result<()> {
    match offset.checked_add(len) {
        Some(end) if end <= region_bytes => Ok(()),
        _ => Err(Error::OutOfRegion { side, offset, len, region_bytes }),
    }
}
