//! What users hold of registered memory: it deregisters the memory when it is dropped.
//!
//! Invariant: when a region is deregistered, no thread, NIC or GPU touches its memory any more; the endpoint sees to that
//! (`RegionHome`). Read next: the crate `ferrywire-memory`, the memory; `../releaser.rs`, who drops what users gave with it.

pub mod pattern;
mod remote;
#[cfg(test)]
mod tests;

pub use remote::RemoteRegion;

use crate::error::{Error, Result};
use ferrywire_memory::{Memory, MemoryLocation, Owned, Owner, RegionTable, check_range};
use ferrywire_proto::Identity;
use ferrywire_sys::fork::Origin;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

/// What a region needs from its endpoint: its name, its table, and a way to make threads let go.
pub(crate) trait RegionHome: Send + Sync {
    fn identity(&self) -> Identity;
    fn regions(&self) -> &RegionTable;
    fn origin(&self) -> Origin;
    /// Returns when no thread, NIC or GPU of this endpoint touches the memory any more. `force`: by losing channels whose
    /// GPU does not get on, too.
    fn release(&self, memory: &Arc<Memory>, force: bool) -> Result<()>;
    /// Returns when every thread of this endpoint has left what it was in the middle of, and looks at the memory anew.
    /// `force`: by losing channels whose GPU does not get on, too.
    fn interrupt(&self, memory: &Arc<Memory>, force: bool) -> Result<()>;
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
            // Without an endpoint only callers touch it, for as long as a copy takes.
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

    /// The last handle of the region is dropped: operations in flight go on, and the memory's owner stays until they have ended.
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
            self.memory.let_user_free_it();
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
        write!(f, "Region({} bytes of {})", self.len(), self.location())
    }
}

impl Region {
    pub(crate) fn owned(home: &Arc<dyn RegionHome>, owned: Owned) -> Region {
        Region::of(home, home.regions().insert_owned(owned))
    }

    /// # Safety
    /// As of [`RegionTable::insert_user`].
    pub(crate) unsafe fn user(
        home: &Arc<dyn RegionHome>,
        base: *mut u8,
        len: u64,
        location: MemoryLocation,
        owner: Option<Owner>,
    ) -> Result<Region> {
        // SAFETY: by the caller's promise.
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
            return Err(Error::invalid("region", "it was registered with another endpoint"));
        }
        if self.inner.memory.revoked() {
            return Err(Error::invalid("region", "it is deregistered"));
        }
        Ok(())
    }

    /// Checks that the range lies inside.
    pub(crate) fn check(&self, side: &'static str, offset: u64, len: u64) -> Result<()> {
        Ok(check_range(side, offset, len, self.len())?)
    }

    /// Size in bytes.
    pub fn len(&self) -> u64 {
        self.inner.memory.len()
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where its bytes live.
    pub fn location(&self) -> MemoryLocation {
        self.inner.memory.location()
    }

    /// What a peer needs to reach the region.
    pub fn descriptor(&self) -> RemoteRegion {
        let (owner, memory) = (self.inner.identity, &self.inner.memory);
        RemoteRegion { owner, key: memory.key(), len: memory.len(), location: memory.location() }
    }

    /// Copies bytes at `offset` into `into`. What peers write at the same time may show half.
    /// Memory of a GPU is read through its copy engine, and waited for.
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        self.check("source", offset, into.len() as u64)?;
        let memory = self.memory();
        Ok(memory.while_it_stays(|| memory.read(offset, into))?)
    }

    /// Copies `from` to `offset`. Memory of a GPU is written through its copy engine, and waited for.
    pub fn write_at(&self, offset: u64, from: &[u8]) -> Result<()> {
        self.check("target", offset, from.len() as u64)?;
        Ok(self.memory().while_it_stays(|| self.memory().write(offset, from))?)
    }

    /// The first byte: of host memory, where peers may write at any time; else a device address, which
    /// must not be dereferenced.
    pub fn as_ptr(&self) -> *mut u8 {
        self.inner.memory.base()
    }

    /// Deregisters: from here on peers are refused, and when this returns nothing touches the memory. An owner that
    /// was given with it is dropped before that, on this thread.
    ///
    /// # Errors
    /// [`Error::Invalid`] while operations of this endpoint still use the region, and [`Error::ResourceBusy`] when
    /// a thread, or a GPU that has still to copy to it, does not let go of it. Peers are refused all the same, but the memory
    /// is not free: a clone can be deregistered again; an owner that was given with it is dropped later, once it is free.
    pub fn deregister(self) -> Result<()> {
        self.inner.end(false)
    }
}
