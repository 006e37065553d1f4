//! Registered memory, and the table in which incoming frames look it up.
//!
//! Invariant: only [`Memory::span`] turns an offset into an address, after its bounds check; the [`Memory`]
//! keeps the bytes behind it alive.
//! Read next: `location.rs`, `gpu.rs`.

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

/// Any value that keeps user memory alive until it is dropped.
pub type Owner = Box<dyn Any + Send + Sync>;

/// Owner of a region's bytes.
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
    /// The user owns the bytes, by a promise at registration or through a value that was handed over; for GPU
    /// memory the GPU is kept open too.
    User {
        _gpu: Option<Gpu>,
        owner: Mutex<Option<Owner>>,
    },
}

/// Registered memory, shared by handles and by transfers in flight.
pub struct Memory {
    base: *mut u8,
    len: u64,
    location: MemoryLocation,
    key: u64,
    revoked: AtomicBool,
    /// Whether the region is deregistered: nothing may be placed in it.
    taken_back: AtomicBool,
    /// Whether the user has dropped the last handle, and may have freed the bytes although operations are
    /// unfinished.
    gone: AtomicBool,
    /// Number of operations in flight that use the memory.
    users: AtomicUsize,
    /// Number of application threads that currently access the memory.
    callers: AtomicUsize,
    /// Number of lost connections whose copies to the memory have not ended.
    late_copies: AtomicUsize,
    keeper: Keeper,
}

// SAFETY: the pointer is only dereferenced in bounds-checked spans of host memory. Those bytes are plain
// memory that the network may change at any time, as every reader must expect.
unsafe impl Send for Memory {}
// SAFETY: the bytes may change at any time, as every reader must expect; all other fields are immutable or
// atomic.
unsafe impl Sync for Memory {}

impl Memory {
    /// Location of the region's bytes. Only host memory may be accessed through its address.
    pub fn location(&self) -> MemoryLocation {
        self.location
    }

    /// Address of `len` bytes at `offset`; `None` when they exceed the region.
    pub fn span(&self, offset: u64, len: u64) -> Option<*mut u8> {
        if offset.checked_add(len)? > self.len {
            return None;
        }
        // SAFETY: `offset` is within the allocation, as the bounds check has shown.
        Some(unsafe { self.base.add(offset as usize) })
    }

    /// Copies bytes at `offset` into `into`; does nothing when they exceed the region. For GPU memory, uses
    /// the copy engine and waits.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let Some(from) = self.span(offset, into.len() as u64) else {
            return Ok(());
        };
        match self.location {
            // SAFETY: the span is inside live host memory, and `into` is the caller's. `into` may be part of
            // the region, since the user has the buffer too; `copy` allows the overlap.
            MemoryLocation::Host => unsafe { std::ptr::copy(from, into.as_mut_ptr(), into.len()) },
            location => Gpu::opened(location)?.read_into_slice(from as u64, into)?,
        }
        Ok(())
    }

    /// Copies `from` to `offset`; does nothing when it exceeds the region. For GPU memory, uses the copy
    /// engine and waits.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        let Some(to) = self.span(offset, from.len() as u64) else {
            return Ok(());
        };
        match self.location {
            // SAFETY: the span is inside live host memory, and `from` is borrowed. `from` may be part of the
            // region; `copy` allows the overlap.
            MemoryLocation::Host => unsafe { std::ptr::copy(from.as_ptr(), to, from.len()) },
            location => Gpu::opened(location)?.write_from_slice(to as u64, from)?,
        }
        Ok(())
    }

    /// Offset in the region of an address that [`Memory::span`] returned.
    pub fn offset_of(&self, address: *mut u8) -> u64 {
        (address as u64).wrapping_sub(self.base as u64)
    }

    /// Size of the region in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the region has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address of the region's first byte.
    pub fn base(&self) -> *mut u8 {
        self.base
    }

    /// Key by which peers name the region; 0 for memory that no peer can name.
    pub fn key(&self) -> u64 {
        self.key
    }

    /// Allocates host memory for the engine, which no peer can name.
    pub fn private(bytes: usize) -> Result<Arc<Memory>> {
        let buffer = HostBuffer::zeroed(bytes)?;
        let (base, len) = (buffer.base(), buffer.bytes() as u64);
        Ok(Arc::new(Memory::new(base, len, MemoryLocation::Host, 0, Keeper::Owned { _buffer: buffer })))
    }

    /// Wraps host memory that a GPU can access too, for the engine; no peer can name it.
    pub fn mapped(mapped: unpack::Mapped, bytes: usize) -> Arc<Memory> {
        let base = mapped.at(0, bytes);
        Arc::new(Memory::new(base, bytes as u64, MemoryLocation::Host, 0, Keeper::Mapped { _mapped: mapped }))
    }

    /// Allocates GPU memory for the engine, which no peer can name.
    pub fn private_on(gpu: &Gpu, bytes: usize) -> Result<Arc<Memory>> {
        let (base, len, location, keeper) = match gpu {
            Gpu::Sim(gpu) => of_sim(gpu.alloc(bytes, PAGE_BYTES)?),
            Gpu::Cuda(gpu) => of_cuda(gpu.alloc_own(bytes, PAGE_BYTES)?),
        };
        Ok(Arc::new(Memory::new(base, len, location, 0, keeper)))
    }

    fn new(base: *mut u8, len: u64, location: MemoryLocation, key: u64, keeper: Keeper) -> Memory {
        let (revoked, taken_back, gone, users, callers, late_copies) = Default::default();
        Memory { base, len, location, key, revoked, taken_back, gone, users, callers, late_copies, keeper }
    }

    /// Prevents reuse of GPU memory, because a send may still read the memory when it is dropped.
    pub fn prevent_reuse(&self) {
        if let Keeper::Cuda { buffer } = &self.keeper {
            buffer.prevent_reuse();
        }
    }

    /// Ends the access of peers to the region, and of lanes that register memory.
    pub fn revoke(&self) {
        self.revoked.store(true, Ordering::SeqCst);
    }

    /// Whether peers may no longer access the region.
    pub fn revoked(&self) -> bool {
        self.revoked.load(Ordering::SeqCst)
    }

    /// Counts an operation on the memory that starts. The operation checks [`Memory::revoked`] afterwards, so
    /// either it sees the deregistration, or the deregistration sees it.
    pub fn enter(&self) {
        self.users.fetch_add(1, Ordering::SeqCst);
    }

    /// Uncounts an operation on the memory that has ended.
    pub fn leave(&self) {
        self.users.fetch_sub(1, Ordering::SeqCst);
    }

    /// The region as text for error messages.
    pub fn describe(&self) -> String {
        format!("a region of {} bytes", self.len)
    }

    /// Whether operations on the memory are in flight.
    pub fn used(&self) -> bool {
        self.users.load(Ordering::SeqCst) > 0
    }

    /// Whether the user owns the region's bytes, so they may be freed after deregistration.
    pub fn user_owned(&self) -> bool {
        matches!(self.keeper, Keeper::User { .. })
    }

    /// Whether the region is deregistered, so bytes that it waits for will not arrive.
    pub fn taken_back(&self) -> bool {
        self.taken_back.load(Ordering::SeqCst)
    }

    /// Whether the bytes belong to the user again, or soon will: unsent bytes must not be sent.
    pub fn lost_to_user(&self) -> bool {
        self.user_owned() && self.taken_back()
    }

    /// Marks the region as deregistered: nothing may be placed in it any more.
    pub fn take_back(&self) {
        self.taken_back.store(true, Ordering::SeqCst);
    }

    /// Notes that the user has dropped the last handle of the region, and may free its bytes.
    pub fn let_user_free_it(&self) {
        self.gone.store(true, Ordering::SeqCst);
    }

    /// Whether the user may have freed the region's bytes: no new call to the kernel may send them.
    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::SeqCst)
    }

    /// The value that keeps the user's bytes alive; `None` where the user only made a promise.
    fn owner(&self) -> Option<MutexGuard<'_, Option<Owner>>> {
        match &self.keeper {
            Keeper::User { owner, .. } => Some(owner.lock().unwrap_or_else(PoisonError::into_inner)),
            _ => None,
        }
    }

    /// Whether a value from the user keeps the region's bytes alive.
    pub fn has_owner(&self) -> bool {
        self.owner().is_some_and(|owner| owner.is_some())
    }

    /// Takes the value that keeps the user's bytes alive, to be dropped; call this when nothing accesses the
    /// memory any more.
    pub fn take_owner(&self) -> Option<Owner> {
        self.owner()?.take()
    }

    /// Runs `body` while the region's bytes stay valid. Returns [`Error::Invalid`] when they belong to the
    /// user again.
    pub fn while_it_stays<T>(&self, body: impl FnOnce() -> Result<T>) -> Result<T> {
        self.enter();
        // Bytes that the region owns are valid as long as a handle exists.
        let call = self.user_owned().then(|| self.call());
        let result = if self.lost_to_user() {
            Err(Error::invalid("region", "the region is deregistered"))
        } else {
            body()
        };
        drop(call);
        self.leave();
        result
    }

    /// Counts an access to the memory until the returned value is dropped. A thread that checks
    /// [`Memory::taken_back`] afterwards either sees the deregistration, or is waited for.
    pub fn call(&self) -> Call<'_> {
        self.callers.fetch_add(1, Ordering::SeqCst);
        Call(&self.callers)
    }

    /// Whether an application thread is accessing the memory; progress threads do not count.
    pub fn in_call(&self) -> bool {
        self.callers.load(Ordering::SeqCst) > 0
    }

    /// Whether a GPU may still make copies of lost connections to the memory. Copies that begin now could be
    /// overwritten by them.
    pub fn has_late_copies(&self) -> bool {
        self.late_copies.load(Ordering::Acquire) > 0
    }
}

/// An access to registered memory in progress.
pub struct Call<'a>(&'a AtomicUsize);

impl Drop for Call<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// An operation that keeps registered memory in use until this value is dropped; see [`Memory::enter`].
pub struct InUse(Arc<Memory>);

impl InUse {
    /// Counts an operation that starts on `memory`.
    pub fn new(memory: &Arc<Memory>) -> InUse {
        memory.enter();
        InUse(memory.clone())
    }

    /// The memory that the operation uses.
    pub fn memory(&self) -> &Memory {
        &self.0
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        self.0.leave();
    }
}

/// Copies of a lost connection that a GPU may still make to registered memory, until this value is dropped.
pub struct LateCopies(Arc<Memory>);

impl LateCopies {
    /// Counts the copies of a connection. Call this before the peer sends the bytes again.
    pub fn new(memory: &Arc<Memory>) -> LateCopies {
        memory.late_copies.fetch_add(1, Ordering::SeqCst);
        LateCopies(memory.clone())
    }
}

impl Drop for LateCopies {
    fn drop(&mut self) {
        self.0.late_copies.fetch_sub(1, Ordering::SeqCst);
    }
}

/// An access to registered memory in progress that may outlast the call which began it; see [`Memory::call`].
pub struct OwnedCall(Arc<Memory>);

impl OwnedCall {
    /// Counts an access to `memory`, until the value is dropped.
    pub fn new(memory: &Arc<Memory>) -> OwnedCall {
        memory.callers.fetch_add(1, Ordering::SeqCst);
        OwnedCall(memory.clone())
    }
}

impl Drop for OwnedCall {
    fn drop(&mut self) {
        self.0.callers.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Alignment in bytes of GPU memory for the engine: the page size in which NICs map GPU memory.
const PAGE_BYTES: usize = 64 << 10;

/// Memory that a region owns and frees.
pub enum Owned {
    /// Host memory that the engine allocated.
    Host(HostBuffer),
    /// A byte vector that the caller handed over.
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
    /// The region with this key; [`Refusal::NoRegion`] when there is none.
    pub fn find(&self, key: u64) -> Result<Arc<Memory>, Refusal> {
        let table = self.by_key.read().unwrap_or_else(|e| e.into_inner());
        table.get(&key).cloned().ok_or(Refusal::NoRegion)
    }

    /// Registers memory that the region owns and frees.
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

    /// Registers memory of the user. For CUDA memory, opens the GPU and keeps it open.
    ///
    /// # Safety
    /// `len` bytes at `base` are in `location`, and stay readable and writable until the memory is removed or
    /// `owner` is dropped.
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

    /// Removes a region from the table: peers can no longer access it.
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

/// The error for code that wrongly passes host memory to a GPU operation.
pub(crate) fn host_has_no_gpu() -> Error {
    Error::Internal("host memory was passed to an operation on GPU memory".into())
}

/// Checks that a range lies within a region of `region_bytes`. Returns [`Error::OutOfRegion`] otherwise.
pub fn check_range(side: &'static str, offset: u64, len: u64, region_bytes: u64) -> Result<()> {
    match offset.checked_add(len) {
        Some(end) if end <= region_bytes => Ok(()),
        _ => Err(Error::OutOfRegion { side, offset, len, region_bytes }),
    }
}
