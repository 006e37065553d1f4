//! Registered memory, as users hold it. The last clone dropped deregisters the memory.
//!
//! Invariant: once a region is deregistered, no thread, NIC or GPU touches its memory; the endpoint ensures
//! that (`RegionHome`).
//! Read next: the crate `ferrywire-memory`; `../releaser.rs`, which drops owners of memory.

pub mod pattern;
mod remote;
#[cfg(test)]
mod tests;

pub use remote::RemoteRegion;

use crate::error::{Error, RegisterError, Result};
use ferrywire_memory::{Memory, MemoryLocation, Owned, Owner, RegionTable, check_range};
use ferrywire_proto::Identity;
use ferrywire_sys::fork::Origin;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

/// The endpoint's side of a region: identity, region table, and the release of memory.
pub(crate) trait RegionHome: Send + Sync {
    fn identity(&self) -> Identity;
    fn regions(&self) -> &RegionTable;
    fn origin(&self) -> Origin;
    /// Waits until no thread, NIC or GPU of this endpoint touches the memory. With `force`, channels whose
    /// GPU makes no progress are lost for that.
    ///
    /// # Errors
    /// [`Error::ResourceBusy`] or [`Error::Invalid`] if the memory is still in use.
    fn release(&self, memory: &Arc<Memory>, force: bool) -> Result<()>;
    /// Waits until every thread of this endpoint has finished its current pass, and so sees the memory's new
    /// state. With `force`, channels whose GPU makes no progress are lost for that.
    fn interrupt(&self, memory: &Arc<Memory>, force: bool) -> Result<()>;
    /// Starts the release of the memory, and drops its owner when it is free. Does not block.
    fn release_later(&self, memory: Arc<Memory>);
}

struct Registration {
    /// Whether the memory has been released completely.
    released: AtomicBool,
    memory: Arc<Memory>,
    home: Weak<dyn RegionHome>,
    identity: Identity,
}

impl Registration {
    fn end(&self, force: bool) -> Result<()> {
        match self.home.upgrade() {
            Some(_) if self.released.load(Ordering::SeqCst) => {}
            Some(home) => {
                home.origin().check()?;
                self.memory.take_back();
                home.regions().remove(&self.memory);
                home.release(&self.memory, force)?;
                self.released.store(true, Ordering::SeqCst);
            }
            // Without an endpoint only callers touch the memory, for the duration of a copy.
            None => {
                self.memory.take_back();
                while self.memory.in_call() {
                    std::thread::yield_now();
                }
            }
        }
        drop(self.memory.take_owner());
        Ok(())
    }

    /// Starts the release when the last handle is dropped: operations in flight continue, and the memory's
    /// owner is dropped after them.
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
        // A failed deregistration has waited and reported already, and its user keeps the memory. Otherwise
        // release it now.
        let already_revoked = self.memory.revoked();
        if !already_revoked && let Err(error) = self.end(self.memory.user_owned()) {
            tracing::error!(%error, "the memory of a dropped region of {} bytes could not be released", self.memory.len());
        }
        if self.memory.user_owned() && self.memory.used() {
            self.memory.let_user_free_it();
            if let Some(Err(error)) =
                self.home.upgrade().map(|home| home.interrupt(&self.memory, !already_revoked))
            {
                tracing::error!(%error, "the memory of a dropped region of {} bytes may still be read", self.memory.len());
            }
        }
    }
}

/// Registered local memory. Clones share it; dropping the last one deregisters it. For memory that the caller
/// owns, the drop waits for operations in flight. For memory that the region owns, or that has an owner
/// ([`Endpoint::register_with`](crate::Endpoint::register_with)), the drop does not wait, and operations
/// continue.
///
/// Peers with its descriptor can read and write the memory at any time. So the bytes are accessed through
/// [`Region::read_at`] and [`Region::write_at`], or through raw pointers while the caller knows that nothing
/// is in flight.
#[derive(Clone)]
pub struct Region {
    inner: Arc<Registration>,
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({} bytes of {})", self.len(), self.location())
    }
}

impl Region {
    pub(crate) fn owned(home: &Arc<dyn RegionHome>, owned: Owned) -> Region {
        Region::of(home, home.regions().insert_owned(owned))
    }

    /// # Safety
    /// The conditions of [`RegionTable::insert_user`] hold.
    pub(crate) unsafe fn user(
        home: &Arc<dyn RegionHome>,
        base: *mut u8,
        len: u64,
        location: MemoryLocation,
        owner: Option<Owner>,
    ) -> Result<Region> {
        // SAFETY: promised by the caller of this function.
        Ok(Region::of(home, unsafe { home.regions().insert_user(base, len, location, owner) }?))
    }

    fn of(home: &Arc<dyn RegionHome>, memory: Arc<Memory>) -> Region {
        let identity = home.identity();
        let (released, home) = (AtomicBool::new(false), Arc::downgrade(home));
        Region { inner: Arc::new(Registration { released, memory, home, identity }) }
    }

    pub(crate) fn memory(&self) -> &Arc<Memory> {
        &self.inner.memory
    }

    pub(crate) fn belongs_to(&self, identity: Identity) -> Result<()> {
        if self.inner.identity != identity {
            return Err(Error::invalid("region", "the region was registered with another endpoint"));
        }
        if self.inner.memory.revoked() {
            return Err(Error::invalid("region", "the region is deregistered"));
        }
        Ok(())
    }

    /// Checks that a range lies inside the region. `side` names the region in the error.
    ///
    /// # Errors
    /// [`Error::OutOfRegion`] if the range is not inside the region.
    pub(crate) fn check(&self, side: &'static str, offset: u64, len: u64) -> Result<()> {
        Ok(check_range(side, offset, len, self.len())?)
    }

    /// Size of the region in bytes.
    pub fn len(&self) -> u64 {
        self.inner.memory.len()
    }

    /// Whether the region has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The memory location: host, or which GPU.
    pub fn location(&self) -> MemoryLocation {
        self.inner.memory.location()
    }

    /// The descriptor that a peer needs to access the region.
    pub fn descriptor(&self) -> RemoteRegion {
        let (owner, memory) = (self.inner.identity, &self.inner.memory);
        RemoteRegion { owner, key: memory.key(), len: memory.len(), location: memory.location() }
    }

    /// Copies bytes at `offset` into `into`. Bytes that a peer writes at the same time may be torn. GPU
    /// memory is read by a copy engine, and the call waits for it.
    ///
    /// # Errors
    /// [`RegisterError::OutOfRegion`]; [`RegisterError::Invalid`] if the region is deregistered; the GPU's error.
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<(), RegisterError> {
        self.check("source", offset, into.len() as u64)?;
        let memory = self.memory();
        Ok(memory.while_it_stays(|| memory.read(offset, into))?)
    }

    /// Copies `from` to `offset`. GPU memory is written by a copy engine, and the call waits for it.
    ///
    /// # Errors
    /// [`RegisterError::OutOfRegion`]; [`RegisterError::Invalid`] if the region is deregistered; the GPU's error.
    pub fn write_at(&self, offset: u64, from: &[u8]) -> Result<(), RegisterError> {
        self.check("target", offset, from.len() as u64)?;
        Ok(self.memory().while_it_stays(|| self.memory().write(offset, from))?)
    }

    /// Address of the first byte. Peers may write to host memory at any time; a device address must not be
    /// dereferenced.
    pub fn as_ptr(&self) -> *mut u8 {
        self.inner.memory.base()
    }

    /// Deregisters the region. From now on peers are refused, and when this returns no thread, NIC or GPU
    /// touches the memory. An owner of the memory is dropped before that, on this thread.
    ///
    /// # Errors
    /// [`RegisterError::Invalid`] while operations of this endpoint still use the region. [`RegisterError::ResourceBusy`] if
    /// a thread, or a GPU that still copies to it, does not release it. In both cases peers are refused, but
    /// the memory is not free: deregister a clone again. An owner is dropped later, once the memory is free.
    pub fn deregister(self) -> Result<(), RegisterError> {
        Ok(self.inner.end(false)?)
    }
}
