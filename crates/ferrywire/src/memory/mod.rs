//! Where bytes live: registered memory ("regions"), and the table that incoming frames look them up in.
//!
//! A [`Region`] is local memory that operations may name; its [`RemoteRegion`] descriptor can be sent
//! anywhere as bytes and lets a peer write to it and read from it. The key is 64 random bits and is the
//! right to the region; it dies with the region.
//!
//! Invariant: an address is only ever computed by `Memory::span`, after its bounds check, and the
//! `Memory` it points into is kept alive by whoever holds the pointer.
//! Read next: `host.rs` (the allocation), `channel/` (who fills it), [`cuda`] (real GPUs), [`sim`] (a GPU to
//! try things with), [`unpack`] (receives that arrive in fragments).

pub mod cuda;
mod gpu;
pub(crate) mod host;
pub(crate) mod owner;
pub mod pattern;
mod place;
mod remote;
pub mod sim;
#[cfg(test)]
mod tests;
pub mod unpack;

pub(crate) use gpu::Gpu;
pub use gpu::{GpuCopy, dmabuf_fd};
pub use place::Place;
pub use remote::RemoteRegion;

use crate::error::{Error, Result};
use cuda::CudaBuffer;
use ferrywire_proto::Identity;
use ferrywire_proto::wire::Refusal;
use ferrywire_sys::fork::Origin;
use host::HostBuffer;
use owner::Owner;
use sim::SimBuffer;
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};

/// Who keeps the bytes of a region alive.
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
pub(crate) struct Memory {
    base: *mut u8,
    len: u64,
    place: Place,
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
    pub fn place(&self) -> Place {
        self.place
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
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let Some(from) = self.span(offset, into.len() as u64) else {
            return Ok(());
        };
        match self.place {
            // SAFETY: the span is inside live host memory, and `into` is the caller's. `into` may be part of the region: its
            // user has the buffer too, and `copy` allows that both overlap.
            Place::Host => unsafe { std::ptr::copy(from, into.as_mut_ptr(), into.len()) },
            place => Gpu::opened(place)?.read_into_slice(from as u64, into)?,
        }
        Ok(())
    }

    /// Copies `from` to `offset`, if it all fits. Memory of a GPU is written through its copy engine, and
    /// waited for.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        let Some(to) = self.span(offset, from.len() as u64) else {
            return Ok(());
        };
        match self.place {
            // SAFETY: the span is inside live host memory, and `from` is borrowed. `from` may be part of the region, as above.
            Place::Host => unsafe { std::ptr::copy(from.as_ptr(), to, from.len()) },
            place => Gpu::opened(place)?.write_from_slice(to as u64, from)?,
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

    /// Host memory of the engine's own, which no peer can name.
    pub fn private(bytes: usize) -> Result<Arc<Memory>> {
        let buffer = HostBuffer::zeroed(bytes)?;
        let (base, len) = (buffer.base(), buffer.len() as u64);
        Ok(Arc::new(Memory::new(base, len, Place::Host, 0, Keeper::Owned { _buffer: buffer })))
    }

    /// Likewise of the host, where a GPU reaches it too.
    pub fn mapped(mapped: unpack::Mapped, bytes: usize) -> Arc<Memory> {
        let base = mapped.at(0, bytes);
        Arc::new(Memory::new(base, bytes as u64, Place::Host, 0, Keeper::Mapped { _mapped: mapped }))
    }

    /// Likewise on a GPU.
    pub fn private_on(gpu: &Gpu, bytes: usize) -> Result<Arc<Memory>> {
        let (base, len, place, keeper) = match gpu {
            Gpu::Sim(gpu) => of_sim(gpu.alloc(bytes, PAGE_BYTES)?),
            Gpu::Cuda(gpu) => of_cuda(gpu.alloc_own(bytes, PAGE_BYTES)?),
        };
        Ok(Arc::new(Memory::new(base, len, place, 0, keeper)))
    }

    fn new(base: *mut u8, len: u64, place: Place, key: u64, keeper: Keeper) -> Memory {
        let (revoked, taken_back, gone, users, callers) = Default::default();
        Memory { base, len, place, key, revoked, taken_back, gone, users, callers, keeper }
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

    fn has_owner(&self) -> bool {
        self.owner().is_some_and(|owner| owner.is_some())
    }

    /// To be dropped: nothing touches the memory any more.
    pub fn take_owner(&self) -> Option<Owner> {
        self.owner()?.take()
    }

    /// Runs `body` while the memory stays, unless the user has it back.
    fn while_it_stays<T>(&self, body: impl FnOnce() -> Result<T>) -> Result<T> {
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

/// Somebody touches memory at this moment.
pub(crate) struct Call<'a>(&'a AtomicUsize);

impl Drop for Call<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Alignment of memory for slots: the page in which NICs take memory of a GPU.
const PAGE_BYTES: usize = 64 << 10;

/// All regions of an endpoint, by key.
#[derive(Default)]
pub(crate) struct RegionTable {
    by_key: RwLock<HashMap<u64, Arc<Memory>>>,
}

impl RegionTable {
    /// The region with this key.
    pub fn find(&self, key: u64) -> Result<Arc<Memory>, Refusal> {
        let table = self.by_key.read().unwrap_or_else(|e| e.into_inner());
        table.get(&key).cloned().ok_or(Refusal::NoRegion)
    }

    fn insert(&self, base: *mut u8, len: u64, place: Place, keeper: Keeper) -> Arc<Memory> {
        let mut table = self.by_key.write().unwrap_or_else(|e| e.into_inner());
        let mut key = ferrywire_sys::random::random_u64();
        while key == 0 || table.contains_key(&key) {
            key = ferrywire_sys::random::random_u64();
        }
        let memory = Arc::new(Memory::new(base, len, place, key, keeper));
        table.insert(key, memory.clone());
        memory
    }

    fn remove(&self, memory: &Memory) {
        memory.revoke();
        self.by_key.write().unwrap_or_else(|e| e.into_inner()).remove(&memory.key);
    }
}

/// What a region needs from its endpoint: its name, its table, and a way to make threads let go.
pub(crate) trait RegionHome: Send + Sync {
    fn identity(&self) -> Identity;
    fn regions(&self) -> &RegionTable;
    fn origin(&self) -> Origin;
    /// Returns when no thread, NIC or GPU of this endpoint touches the memory any more. `at_any_cost`: by losing channels whose
    /// GPU does not get on, too.
    fn release(&self, memory: &Arc<Memory>, at_any_cost: bool) -> Result<()>;
    /// Returns when every thread of this endpoint has left what it was in the middle of, and looks at the memory anew.
    /// `at_any_cost` as above.
    fn interrupt(&self, memory: &Arc<Memory>, at_any_cost: bool) -> Result<()>;
    /// Sees to it that its owner is dropped when that is so, and returns at once.
    fn release_later(&self, memory: Arc<Memory>);
}

struct Registration {
    /// Nothing touches the memory any more.
    released: AtomicBool,
    memory: Arc<Memory>,
    home: Weak<dyn RegionHome>,
    identity: Identity,
}

impl Registration {
    fn end(&self, at_any_cost: bool) -> Result<()> {
        match self.home.upgrade() {
            Some(_) if self.released.load(Ordering::SeqCst) => {}
            Some(home) => {
                home.origin().check()?;
                self.memory.taken_back.store(true, Ordering::SeqCst);
                home.regions().remove(&self.memory);
                home.release(&self.memory, at_any_cost)?;
                self.released.store(true, Ordering::SeqCst);
            }
            // Without an endpoint only callers touch it, for as long as a copy takes.
            None => {
                self.memory.taken_back.store(true, Ordering::SeqCst);
                while self.memory.in_call() {
                    std::thread::yield_now();
                }
            }
        }
        drop(self.memory.take_owner());
        Ok(())
    }

    /// Nobody names the region any more: operations under way go on, and its owner stays until they have ended.
    fn end_later(&self) {
        match self.home.upgrade() {
            Some(home) => {
                home.regions().remove(&self.memory);
                home.release_later(self.memory.clone());
            }
            None => drop(self.memory.take_owner()),
        }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if self.home.upgrade().is_some_and(|home| home.origin().is_elsewhere()) {
            return;
        }
        let goes_on = !self.memory.user_owned() && self.memory.used() && !self.memory.taken_back();
        if self.memory.has_owner() || goes_on {
            return self.end_later();
        }
        // One that failed to end has been waited for, and told of, already: its user keeps the memory. Else nobody is asked to.
        let told = self.memory.revoked();
        if !told && let Err(error) = self.end(self.memory.user_owned()) {
            tracing::error!(%error, "a dropped region could not be released");
        }
        if self.memory.user_owned() && self.memory.used() {
            self.memory.gone.store(true, Ordering::SeqCst);
            if let Some(Err(error)) = self.home.upgrade().map(|home| home.interrupt(&self.memory, !told)) {
                tracing::error!(%error, "a dropped region may still be read");
            }
        }
    }
}

/// Registered local memory. Clones share it; the last one dropped deregisters it. Of memory that the caller keeps
/// that waits for operations under way; with an owner ([`Endpoint::register_with`](crate::Endpoint::register_with)),
/// and of memory that the region owns, they go on, and nobody waits for them.
///
/// Peers that hold its descriptor can write to it and read from it at any time, so its bytes are read
/// and written through [`Region::read_at`] and [`Region::write_at`], or through raw pointers by callers
/// who know that nothing is in flight.
#[derive(Clone)]
pub struct Region {
    inner: Arc<Registration>,
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({} bytes of {})", self.len(), self.place())
    }
}

impl Region {
    pub(crate) fn owned(home: &Arc<dyn RegionHome>, buffer: HostBuffer) -> Region {
        let (base, len) = (buffer.base(), buffer.len() as u64);
        Region::new(home, base, len, Place::Host, Keeper::Owned { _buffer: buffer })
    }

    pub(crate) fn vector(home: &Arc<dyn RegionHome>, mut bytes: Vec<u8>) -> Region {
        let (base, len) = (bytes.as_mut_ptr(), bytes.len() as u64);
        Region::new(home, base, len, Place::Host, Keeper::Vector { _bytes: bytes })
    }

    pub(crate) fn sim(home: &Arc<dyn RegionHome>, buffer: SimBuffer) -> Region {
        let (base, len, place, keeper) = of_sim(buffer);
        Region::new(home, base, len, place, keeper)
    }

    pub(crate) fn cuda(home: &Arc<dyn RegionHome>, buffer: CudaBuffer) -> Region {
        let (base, len, place, keeper) = of_cuda(buffer);
        Region::new(home, base, len, place, keeper)
    }

    /// Opens the GPU that the memory is of, and keeps it.
    ///
    /// # Safety
    /// `len` bytes at `base` must live in `place` and stay readable and writable there until the region is
    /// deregistered, or `owner` dropped.
    pub(crate) unsafe fn user(
        home: &Arc<dyn RegionHome>,
        base: *mut u8,
        len: u64,
        place: Place,
        owner: Option<Owner>,
    ) -> Result<Region> {
        let gpu = match place {
            Place::Cuda(_) => Some(Gpu::open(place)?),
            _ => None,
        };
        let keeper = Keeper::User { _gpu: gpu, owner: Mutex::new(owner) };
        Ok(Region::new(home, base, len, place, keeper))
    }

    fn new(home: &Arc<dyn RegionHome>, base: *mut u8, len: u64, place: Place, keeper: Keeper) -> Region {
        let memory = home.regions().insert(base, len, place, keeper);
        let identity = home.identity();
        let (released, home) = (AtomicBool::new(false), Arc::downgrade(home));
        Region { inner: Arc::new(Registration { released, memory, home, identity }) }
    }

    pub(crate) fn memory(&self) -> &Arc<Memory> {
        &self.inner.memory
    }

    pub(crate) fn belongs_to(&self, identity: Identity) -> Result<()> {
        if self.inner.identity != identity {
            return Err(Error::invalid("region", "it was registered with another endpoint"));
        }
        if self.inner.memory.revoked() {
            return Err(Error::invalid("region", "it is deregistered"));
        }
        Ok(())
    }

    /// Checks that the range lies inside.
    pub(crate) fn check(&self, side: &'static str, offset: u64, len: u64) -> Result<()> {
        check_range(side, offset, len, self.len())
    }

    /// Size in bytes.
    pub fn len(&self) -> u64 {
        self.inner.memory.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where its bytes live.
    pub fn place(&self) -> Place {
        self.inner.memory.place
    }

    /// What a peer needs to reach the region.
    pub fn descriptor(&self) -> RemoteRegion {
        let Memory { key, len, place, .. } = *self.inner.memory;
        RemoteRegion { owner: self.inner.identity, key, len, place }
    }

    /// Copies bytes at `offset` into `into`. What peers write at the same time may show half.
    /// Memory of a GPU is read through its copy engine, and waited for.
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        self.check("source", offset, into.len() as u64)?;
        let memory = self.memory();
        memory.while_it_stays(|| memory.read(offset, into))
    }

    /// Copies `from` to `offset`. Memory of a GPU is written through its copy engine, and waited for.
    pub fn write_at(&self, offset: u64, from: &[u8]) -> Result<()> {
        self.check("target", offset, from.len() as u64)?;
        self.memory().while_it_stays(|| self.memory().write(offset, from))
    }

    /// The first byte: of host memory, where peers may write at any time; else a device address, which
    /// must not be dereferenced.
    pub fn as_ptr(&self) -> *mut u8 {
        self.inner.memory.base
    }

    /// Deregisters: from here on peers are refused, and when this returns nothing touches the memory. An owner that
    /// was given with it is dropped before that, on this thread.
    ///
    /// # Errors
    /// [`Error::Invalid`] while operations of this endpoint still use the region, and [`Error::HeldUp`] when
    /// a thread, or a GPU that has still to copy to it, does not let go of it. Peers are refused all the same, but the memory
    /// is not free: a clone can be deregistered again; an owner that was given with it is dropped later, once it is free.
    pub fn deregister(self) -> Result<()> {
        self.inner.end(false)
    }
}

fn of_sim(buffer: SimBuffer) -> (*mut u8, u64, Place, Keeper) {
    let place = Place::SimGpu(buffer.gpu().index());
    (buffer.as_ptr(), buffer.len() as u64, place, Keeper::Sim { _buffer: buffer })
}

fn of_cuda(buffer: CudaBuffer) -> (*mut u8, u64, Place, Keeper) {
    let place = Place::Cuda(buffer.gpu().index());
    (buffer.as_ptr(), buffer.len() as u64, place, Keeper::Cuda { buffer })
}

/// Of those who would take host memory for a GPU's.
fn host_has_no_gpu() -> Error {
    Error::Bug("a GPU is asked for host memory".into())
}

/// Checks that a range lies inside a region of `region_bytes`.
pub(crate) fn check_range(side: &'static str, offset: u64, len: u64, region_bytes: u64) -> Result<()> {
    match offset.checked_add(len) {
        Some(end) if end <= region_bytes => Ok(()),
        _ => Err(Error::OutOfRegion { side, offset, len, region_bytes }),
    }
}
