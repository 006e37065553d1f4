//! The sources of sends from GPU memory: regions that a NIC reads itself, if driver and NIC support it, or the reason
//! why not.
//!
//! A region is bound to a NIC as a whole when a message of it is first sent over the NIC, and stays bound as long as a
//! lane may send from it. Lanes of one NIC share its bindings and wait for them while they are made.
//!
//! Invariant: a binding lives as long as its netlink socket, and the socket as long as a lane holds it.
//! Read next: `sending.rs`.

use super::background_init::BackgroundInit;
use super::device::Device;
use super::errors::DevmemError;
use crate::sys::netdev::Netdev;
use ferrywire_memory::{Gpu, InUse, Memory, dmabuf_fd};
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::Poll;

const PAGE_BYTES: u64 = 4096;
/// Most reasons that are logged for one NIC.
const TOLD_MAX: usize = 16;

/// GPU memory that a NIC can read, bound as a dma-buf.
pub(super) struct Binding {
    pub id: u32,
    /// Address of the binding's first byte.
    base: u64,
    /// Whether the kernel does not know the binding any more: the NIC's driver may end it.
    lost: AtomicBool,
    /// Netlink socket of the binding; closing it ends the binding.
    _netdev: Netdev,
}

impl Binding {
    /// Offset of an address in the binding's dma-buf.
    pub fn offset_of(&self, address: u64) -> u64 {
        address - self.base
    }

    /// Marks the binding as lost; the next send from the region binds it again.
    pub fn lose(&self) {
        self.lost.store(true, Ordering::Relaxed);
    }

    /// Binds whole pages around a region, inside of its allocation.
    fn make(nic: &str, index: u32, memory: &Memory) -> Result<Binding, String> {
        let gpu = Gpu::opened(memory.location()).map_err(|error| error.to_string())?;
        gpu.with_current(|| Binding::make_on(&gpu, nic, index, memory)).map_err(|error| error.to_string())?
    }

    fn make_on(gpu: &Gpu, nic: &str, index: u32, memory: &Memory) -> Result<Binding, String> {
        let (location, start) = (memory.location(), memory.span(0, 0).map_or(0, |base| base as u64));
        let base = start / PAGE_BYTES * PAGE_BYTES;
        let bytes = (start + memory.len()).next_multiple_of(PAGE_BYTES) - base;
        let queue = gpu.queue().map_err(|error| error.to_string())?;
        let inside =
            queue.device_memory(start, memory.len()).is_some_and(|(_, found)| found.holds(base, bytes));
        if !inside {
            return Err("a page at an end of the region belongs to another allocation too: align the region to whole pages".into());
        }
        let dmabuf = dmabuf_fd(location, base, bytes).map_err(|error| error.to_string())?;
        let mut netdev = Netdev::open().map_err(|error| error.to_string())?;
        let id = netdev
            .bind_tx(index, dmabuf.as_fd())
            .map_err(|error| DevmemError::bind_tx(nic, &error).to_string())?;
        tracing::debug!(nic, id, bytes, "region of {location} bound to the NIC for sending");
        Ok(Binding { id, base, lost: AtomicBool::new(false), _netdev: netdev })
    }
}

type Bound = BackgroundInit<Arc<Binding>>;
/// While the weak reference exists, no other region has the same address.
type OfRegion = (Weak<Memory>, Weak<Bound>);

/// The bindings of one NIC, by region.
#[derive(Default)]
pub(super) struct Bindings {
    bound: Mutex<HashMap<usize, OfRegion>>,
    /// Logged reasons why the NIC cannot read GPU memory.
    reported: Mutex<Told>,
}

/// Logged reasons, by their text without addresses and sizes, which differ between regions.
#[derive(Default)]
struct Told(HashSet<String>);

impl Told {
    /// Whether a reason should be logged: once, and only a limited number of reasons.
    fn is_new(&mut self, why: &str) -> bool {
        let differs = |word: &&str| word.contains(|c: char| c.is_ascii_digit());
        let words: Vec<&str> = why.split_whitespace().filter(|word| !differs(word)).collect();
        self.0.len() < TOLD_MAX && self.0.insert(words.join(" "))
    }
}

impl fmt::Debug for Bindings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Bindings")
    }
}

impl Bindings {
    /// The binding of a region, which a thread may still be making.
    fn of(&self, device: &Device, memory: &Arc<Memory>) -> Arc<Bound> {
        let mut bound = self.bound.lock().unwrap_or_else(PoisonError::into_inner);
        bound.retain(|_, (_, binding)| binding.strong_count() > 0);
        let key = Arc::as_ptr(memory) as usize;
        let lost = |bound: &Arc<Bound>| matches!(bound.get(), Poll::Ready(Ok(binding)) if binding.lost.load(Ordering::Relaxed));
        let known = bound.get(&key).and_then(|(_, binding)| binding.upgrade());
        if let Some(binding) = known.filter(|bound| !lost(bound)) {
            return binding;
        }
        let region = Arc::downgrade(memory);
        let (nic, index, memory) = (device.name().to_owned(), device.index(), InUse::new(memory));
        let binding = BackgroundInit::start("binding a region", move || {
            let made = Binding::make(&nic, index, memory.memory());
            drop(memory);
            made.map(Arc::new)
        });
        bound.insert(key, (region, Arc::downgrade(&binding)));
        binding
    }

    /// Logs, once per reason, that payload is copied to host memory before it is sent.
    fn tell(&self, device: &Device, why: &str) {
        if self.reported.lock().unwrap_or_else(PoisonError::into_inner).is_new(why) {
            tracing::warn!(
                nic = device.name(),
                "NIC cannot read GPU memory, payload is copied to host memory first: {why}"
            );
        }
    }
}

/// The bindings that one lane uses.
#[derive(Default)]
pub(super) struct Sources {
    known: Vec<Known>,
}

struct Known {
    memory: Arc<Memory>,
    bound: Arc<Bound>,
    /// Whether the region cannot be bound; the reason has been logged.
    failed: bool,
}

impl Sources {
    /// The binding of a GPU region once it is made; `None` if it cannot be bound.
    pub fn of(&mut self, device: &Device, memory: &Arc<Memory>) -> Poll<Option<Arc<Binding>>> {
        let at = match self.known.iter().position(|known| Arc::ptr_eq(&known.memory, memory)) {
            Some(at) => at,
            None => {
                let bound = device.bindings().of(device, memory);
                self.known.push(Known { memory: memory.clone(), bound, failed: false });
                self.known.len() - 1
            }
        };
        let known = &mut self.known[at];
        if known.failed {
            return Poll::Ready(None);
        }
        known.bound.get().map(|made| match made {
            Ok(binding) => Some(binding),
            Err(why) => {
                known.failed = true;
                device.bindings().tell(device, &why);
                None
            }
        })
    }

    /// Drops regions that were deregistered, unless they are busy.
    pub fn forget_revoked(&mut self, busy: &dyn Fn(&Arc<Memory>) -> bool) {
        self.known.retain(|known| !known.memory.revoked() || busy(&known.memory));
    }

    pub fn clear(&mut self) {
        self.known.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::{TOLD_MAX, Told};

    #[test]
    fn a_reason_is_reported_once_for_any_number_of_regions() {
        let no_buffer = |at: usize| format!("binding a region: no dma-buf of {} bytes at {at:#x}", at / 2);
        let no_pages = "a page at an end of the region belongs to another allocation too: align the region to whole pages";
        let mut reported = Told::default();
        assert_eq!([no_buffer(0x7000).as_str(), no_pages].map(|why| reported.is_new(why)), [true, true]);
        for at in [0x7000, 0xab_c000, 0x9000] {
            assert_eq!([no_buffer(at).as_str(), no_pages].map(|why| reported.is_new(why)), [false, false]);
        }
    }

    #[test]
    fn the_number_of_reported_reasons_is_bounded() {
        let mut reported = Told::default();
        let new = (0..100).filter(|number| reported.is_new(&"why ".repeat(*number))).count();
        assert_eq!(new, TOLD_MAX);
    }
}
