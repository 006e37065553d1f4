//! What is sent from GPU memory: regions that a NIC reads itself, where driver and NIC can, and the reason where not.
//!
//! A region is bound to a NIC as a whole, when a message of it is first sent over one, and as long as a lane may send
//! from it. Lanes of one NIC share its bindings.
//!
//! Invariant: a binding lives as long as its netlink socket, and that as long as a lane holds it.
//! Read next: `sending.rs`.

use super::host::Device;
use crate::memory::{Gpu, Memory, dmabuf_fd};
use crate::sys::netdev::Netdev;
use std::collections::HashMap;
use std::fmt;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError, Weak};

const PAGE_BYTES: u64 = 4096;

/// GPU memory that a NIC reads.
pub(super) struct Binding {
    pub id: u32,
    /// Address of its first byte.
    base: u64,
    /// Closed, the binding ends.
    _netdev: Netdev,
}

impl Binding {
    /// Where an address is in the dma-buf.
    pub fn offset_of(&self, address: u64) -> u64 {
        address - self.base
    }

    /// Binds whole pages around a region, which stay inside of its allocation.
    fn make(device: &Device, memory: &Memory) -> Result<Binding, String> {
        let (place, start) = (memory.place(), memory.span(0, 0).map_or(0, |base| base as u64));
        let gpu = Gpu::opened(place).map_err(|error| error.to_string())?;
        let base = start / PAGE_BYTES * PAGE_BYTES;
        let bytes = (start + memory.len()).next_multiple_of(PAGE_BYTES) - base;
        let queue = gpu.queue().map_err(|error| error.to_string())?;
        let inside =
            queue.device_memory(start, memory.len()).is_some_and(|(_, found)| found.holds(base, bytes));
        if !inside {
            return Err("the region's first or last page is not all of its allocation".into());
        }
        let dmabuf = dmabuf_fd(place, base, bytes).map_err(|error| error.to_string())?;
        let mut netdev = Netdev::open().map_err(|error| error.to_string())?;
        let id = netdev.bind_tx(device.index(), dmabuf.as_fd()).map_err(|error| error.to_string())?;
        tracing::debug!(nic = device.name(), id, bytes, "a region of {place} is bound to be sent from");
        Ok(Binding { id, base, _netdev: netdev })
    }
}

/// The bindings of one NIC, by region.
#[derive(Default)]
pub(super) struct Bindings {
    bound: Mutex<HashMap<usize, Weak<Binding>>>,
    /// Why the NIC reads no memory of GPUs, once that is known.
    told: Mutex<Option<String>>,
}

impl fmt::Debug for Bindings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Bindings")
    }
}

impl Bindings {
    fn of(&self, device: &Device, memory: &Arc<Memory>) -> Option<Arc<Binding>> {
        let mut bound = self.bound.lock().unwrap_or_else(PoisonError::into_inner);
        bound.retain(|_, binding| binding.strong_count() > 0);
        let key = Arc::as_ptr(memory) as usize;
        if let Some(binding) = bound.get(&key).and_then(Weak::upgrade) {
            return Some(binding);
        }
        match Binding::make(device, memory) {
            Ok(binding) => {
                let binding = Arc::new(binding);
                bound.insert(key, Arc::downgrade(&binding));
                Some(binding)
            }
            Err(why) => {
                self.tell(device, why);
                None
            }
        }
    }

    /// Says once per reason that payload takes the longer way.
    fn tell(&self, device: &Device, why: String) {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if told.as_ref() != Some(&why) {
            tracing::warn!(
                nic = device.name(),
                "what is sent from GPU memory is copied to host memory first, since the NIC cannot read it there: {why}"
            );
            *told = Some(why);
        }
    }
}

/// One lane's.
#[derive(Default)]
pub(super) struct Sources {
    known: Vec<(Arc<Memory>, Option<Arc<Binding>>)>,
}

impl Sources {
    /// The binding of a region of GPU memory; `None` where there can be none.
    pub fn of(&mut self, device: &Device, memory: &Arc<Memory>) -> Option<Arc<Binding>> {
        if let Some((_, binding)) = self.known.iter().find(|(known, _)| Arc::ptr_eq(known, memory)) {
            return binding.clone();
        }
        let binding = device.bindings().of(device, memory);
        self.known.push((memory.clone(), binding.clone()));
        binding
    }

    /// Lets go of regions that are gone.
    pub fn forget_revoked(&mut self, busy: &dyn Fn(&Arc<Memory>) -> bool) {
        self.known.retain(|(memory, _)| !memory.revoked() || busy(memory));
    }

    pub fn clear(&mut self) {
        self.known.clear();
    }
}
