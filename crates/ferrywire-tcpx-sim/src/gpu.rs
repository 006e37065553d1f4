//! The simulated GPUs of the host process, as far as the plugin needs them.
//!
//! GPU memory is reached only through the table that the host publishes; without one there is host memory
//! alone, and metadata that only the host reads.
//! Invariant: nothing here touches a device address; only views and copies that the table gives.
//! Read next: `metadata.rs`.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, OnceLock};

use ferrywire::memory::sim::SimGpuTable;

use crate::pool::{Fragment, PAGE_BYTES, PagePool};
use crate::random::Random;
use crate::switches::Switches;
use crate::sync::locked;

static POOLS: LazyLock<Mutex<HashMap<i32, Arc<GpuPool>>>> = LazyLock::new(Mutex::default);
/// What a page that was given back is filled with.
const POISON: u8 = 0xDE;
/// The GPU of a thread that never chose one.
pub const DEVICE_DEFAULT: i32 = 0;

/// The host's GPUs. The host may open its first one at any time, so only a find is remembered.
fn table() -> Option<&'static SimGpuTable> {
    static FOUND: OnceLock<&'static SimGpuTable> = OnceLock::new();
    let found = FOUND.get().copied().or_else(SimGpuTable::find)?;
    Some(FOUND.get_or_init(|| found))
}

/// Whether there is a GPU at all.
pub fn is_there() -> bool {
    table().is_some()
}

/// The device current on this thread; `None` without a GPU.
pub fn current_device() -> Option<i32> {
    let device = (table()?.current_device)();
    Some(if device < 0 { DEVICE_DEFAULT } else { device })
}

/// The device that has `len` bytes at an address, counted in whole pages; `None` where no device has all.
pub fn device_of(address: u64, len: usize) -> Option<i32> {
    let (mut base, mut bytes) = (0, 0);
    // SAFETY: both point at numbers of ours.
    let device = unsafe { (table()?.device_of)(address, &mut base, &mut bytes) };
    let end = base + bytes.next_multiple_of(PAGE_BYTES as u64);
    (device >= 0 && address + len as u64 <= end).then_some(device)
}

/// Where the bytes of device memory can be reached by a NIC.
pub fn view(address: u64, len: usize) -> Option<*mut u8> {
    let view = (table()?.dma_view)(address, len);
    (!view.is_null()).then_some(view)
}

/// The receive pool of a GPU.
#[derive(Debug)]
pub struct GpuPool {
    /// Device address of the first page.
    pub base: u64,
    /// Free and taken pages.
    pub pages: Mutex<PagePool>,
    bytes: u64,
    view: *mut u8,
    poison: bool,
}

// SAFETY: the view is a mapping that lives as long as the process; who writes where in it is decided by the
// owners of pages, under a lock.
unsafe impl Send for GpuPool {}
// SAFETY: as above.
unsafe impl Sync for GpuPool {}

impl GpuPool {
    /// The pool of a device, made at first use.
    pub fn of(device: i32, switches: &Switches) -> Option<Arc<GpuPool>> {
        let mut pools = locked(&POOLS);
        if let Some(pool) = pools.get(&device) {
            return Some(pool.clone());
        }
        let pool = Arc::new(GpuPool::new(device, switches)?);
        pools.insert(device, pool.clone());
        Some(pool)
    }

    fn new(device: i32, switches: &Switches) -> Option<GpuPool> {
        let bytes = switches.pool_pages as usize * PAGE_BYTES;
        let base = (table()?.alloc)(device, bytes, PAGE_BYTES);
        let view = view(base, bytes)?;
        let shuffled = switches.scatter.then(|| Random::new(switches.seed, device as u64));
        let pages = Mutex::new(PagePool::new(switches.pool_pages as u32, shuffled));
        Some(GpuPool { base, bytes: bytes as u64, pages, view, poison: switches.poison })
    }

    /// Bytes in the pool.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Where a NIC writes a fragment.
    pub fn view(&self, fragment: &Fragment) -> *mut u8 {
        self.view.wrapping_add(fragment.pool_offset() as usize)
    }

    /// Gives pages back, spoiled; returns how many the comm really had.
    pub fn give_back(&self, owner: u64, returned: &[u32]) -> usize {
        let mut pages = locked(&self.pages);
        returned.iter().filter(|page| self.recycle(&mut pages, owner, **page)).count()
    }

    /// Gives back whatever a comm still has; returns how many pages those were.
    pub fn give_back_all(&self, owner: u64) -> usize {
        let mut pages = locked(&self.pages);
        pages.owned_by(owner).iter().filter(|page| self.recycle(&mut pages, owner, **page)).count()
    }

    fn recycle(&self, pages: &mut PagePool, owner: u64, page: u32) -> bool {
        let returned = pages.give_back(owner, page);
        if returned && self.poison {
            let start = self.view.wrapping_add(page as usize * PAGE_BYTES);
            // SAFETY: the page is one of the pool's and, under the lock, nobody's.
            unsafe { start.write_bytes(POISON, PAGE_BYTES) };
        }
        returned
    }
}

/// Memory that the host and a GPU read at the same address, aligned to a page; zeroed.
#[derive(Debug)]
pub struct Mapped {
    address: *mut u8,
    owner: Owner,
}

#[derive(Debug)]
enum Owner {
    Host(Layout),
    Gpu(&'static SimGpuTable),
}

// SAFETY: plain memory with one owner.
unsafe impl Send for Mapped {}

impl Mapped {
    /// Memory for a GPU, or for the host alone where there is none.
    pub fn new(device: Option<i32>, bytes: usize) -> Option<Mapped> {
        let (Some(_), Some(table)) = (device, table()) else { return Mapped::host(bytes) };
        let address = (table.mapped_alloc)(bytes, PAGE_BYTES);
        (!address.is_null()).then_some(Mapped { address, owner: Owner::Gpu(table) })
    }

    /// Memory of the host alone; `bytes` is not 0.
    pub fn host(bytes: usize) -> Option<Mapped> {
        let layout = Layout::from_size_align(bytes.max(1), PAGE_BYTES).ok()?;
        // SAFETY: the layout is not empty.
        let address = unsafe { alloc_zeroed(layout) };
        (!address.is_null()).then_some(Mapped { address, owner: Owner::Host(layout) })
    }

    /// Where it lies.
    pub fn address(&self) -> *mut u8 {
        self.address
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        match self.owner {
            // SAFETY: made in `host` with this layout, and freed here alone.
            Owner::Host(layout) => unsafe { dealloc(self.address, layout) },
            Owner::Gpu(table) => drop((table.mapped_free)(self.address)),
        }
    }
}

/// A few words in device memory; in host memory where there is no GPU.
#[derive(Debug)]
pub struct DeviceWords(Words);

#[derive(Debug)]
enum Words {
    Host(Mapped),
    Gpu(&'static SimGpuTable, u64),
}

impl DeviceWords {
    /// Words of these bytes; `None` when memory is short.
    pub fn new(device: Option<i32>, bytes: &[u8]) -> Option<DeviceWords> {
        let (Some(device), Some(table)) = (device, table()) else {
            let words = Mapped::host(bytes.len())?;
            // SAFETY: fresh memory of this length.
            unsafe { words.address().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
            return Some(DeviceWords(Words::Host(words)));
        };
        let address = (table.alloc)(device, PAGE_BYTES, PAGE_BYTES);
        // SAFETY: `bytes` is borrowed, and the call copies it before it returns.
        let copied =
            address != 0 && unsafe { (table.copy_from_host)(address, bytes.as_ptr(), bytes.len()) } == 0;
        let words = DeviceWords(Words::Gpu(table, address));
        copied.then_some(words)
    }

    /// Their device address.
    pub fn address(&self) -> u64 {
        match &self.0 {
            Words::Host(words) => words.address() as u64,
            Words::Gpu(_, address) => *address,
        }
    }
}

impl Drop for DeviceWords {
    fn drop(&mut self) {
        if let Words::Gpu(table, address) = self.0 {
            (table.free)(address);
        }
    }
}
