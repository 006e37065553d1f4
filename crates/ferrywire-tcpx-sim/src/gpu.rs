//! The GPUs of the host process that the plugin uses: simulated and real ones.
//!
//! Memory of simulated GPUs is accessed only through the table that the host publishes, real memory only through the
//! CUDA driver that the host has loaded (`cuda.rs`). Without both there is only host memory, and metadata that only the
//! host reads. Real devices are numbered from [`CUDA_FIRST`].
//! Invariant: nothing here touches a device address, only views and copies made by the table or the driver.
//! Read next: `metadata.rs`.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::HashMap;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, OnceLock};
use std::thread;
use std::time::Duration;

use ferrywire_memory::sim::SimGpuTable;

use crate::cuda::{self, Driver, Stream};
use crate::log::info;
use crate::pool::{Fragment, PAGE_BYTES, PagePool};
use crate::random::Random;
use crate::switches::Switches;
use crate::sync::locked;

static POOLS: LazyLock<Mutex<HashMap<i32, Arc<GpuPool>>>> = LazyLock::new(Mutex::default);
/// The byte with which a page is filled when it is given back.
const POISON: u8 = 0xDE;
/// Number of the GPU of a thread that never selected one.
pub const DEVICE_DEFAULT: i32 = 0;

/// Number of the first real device.
const CUDA_FIRST: i32 = 1 << 16;

/// The driver's number of a real device; `None` for a simulated one.
fn cuda_of(device: i32) -> Option<i32> {
    (device >= CUDA_FIRST).then(|| device - CUDA_FIRST)
}

/// The host's table of simulated GPUs. The host may open its first GPU at any time, so only success is
/// cached.
fn table() -> Option<&'static SimGpuTable> {
    static FOUND: OnceLock<&'static SimGpuTable> = OnceLock::new();
    let found = FOUND.get().copied().or_else(SimGpuTable::find)?;
    Some(FOUND.get_or_init(|| found))
}

/// Whether the host has a GPU.
pub fn is_there() -> bool {
    table().is_some() || cuda::driver().is_some()
}

/// Number of the current device of this thread; `None` without a GPU.
pub fn current_device() -> Option<i32> {
    let simulated = table().map(|table| (table.current_device)());
    let real = || cuda::driver()?.current().map(|device| CUDA_FIRST + device);
    simulated.filter(|device| *device >= 0).or_else(real).or(simulated.map(|_| DEVICE_DEFAULT))
}

/// Leaves one more context on this thread's stack, if a real device is current.
pub fn leave_pushed() {
    if let Some(driver) = cuda::driver() {
        driver.leave_pushed();
    }
}

/// Number of the device that owns `len` bytes at an address; `None` if no allocation contains them.
pub fn device_of(address: u64, len: usize) -> Option<i32> {
    let simulated = || {
        let (mut base, mut bytes) = (0, 0);
        // SAFETY: both pointers are to local variables.
        let device = unsafe { (table()?.device_of)(address, &mut base, &mut bytes) };
        (device >= 0).then_some((device, base, bytes))
    };
    let real = || {
        let (device, base, bytes) = cuda::driver()?.owner(address)?;
        Some((CUDA_FIRST + device, base, bytes))
    };
    let (device, base, bytes) = simulated().or_else(real)?;
    (address + len as u64 <= base + bytes).then_some(device)
}

/// How a NIC reads bytes that are sent from device memory.
#[derive(Clone, Copy, Debug)]
pub enum Source {
    /// The NIC reads through this host address.
    View(*mut u8),
    /// The bytes are at a device address; the driver of this real device must copy them.
    Cuda(i32),
}

/// How a NIC reads a range of device memory.
pub fn source(address: u64, len: usize) -> Option<Source> {
    view(address, len).map(Source::View).or_else(|| cuda_of(device_of(address, len)?).map(Source::Cuda))
}

fn view(address: u64, len: usize) -> Option<*mut u8> {
    let view = (table()?.dma_view)(address, len);
    (!view.is_null()).then_some(view)
}

/// The receive pool of a GPU: the dp-manager's memory, and this process's mapping of it.
///
/// Memory of simulated GPUs has one address, so each further mapping is different memory, into which all later data go:
/// a reader of an earlier mapping sees old data.
#[derive(Debug)]
pub struct GpuPool {
    device: i32,
    /// The pool's free and taken pages.
    pub pages: Mutex<PagePool>,
    bytes: u64,
    /// Device address of the first page in the newest mapping; 0 before the first import.
    base: AtomicU64,
    /// The address to which a NIC writes: the pages themselves, or host memory in front of a real device's
    /// pages.
    view: AtomicPtr<u8>,
    /// Stream that copies to the pages of a real device, and poisons them.
    stream: Option<Mutex<Stream>>,
    poison: bool,
    /// Lock for each import if `import_race` is off.
    importing: Mutex<()>,
}

impl GpuPool {
    /// The pool of a device, which is made at first use.
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
        let (view, stream) = match cuda_of(device) {
            Some(real) => {
                let view = cuda::driver()?.mapped(real, bytes)?;
                (view, Some(Mutex::new(Stream::new(real)?)))
            }
            None => (std::ptr::null_mut(), None),
        };
        let shuffled = switches.scatter.then(|| Random::new(switches.seed, device as u64));
        Some(GpuPool {
            device,
            pages: Mutex::new(PagePool::new(switches.pool_pages as u32, shuffled)),
            bytes: bytes as u64,
            base: AtomicU64::new(0),
            view: AtomicPtr::new(view),
            stream,
            poison: switches.poison,
            importing: Mutex::new(()),
        })
    }

    /// Device address of the first page in this process's mapping, which is made if there is none.
    ///
    /// The real plugin holds no lock between the check and the import (`gpu_get_rxmem`): each of several overlapping
    /// calls imports, and each import unmaps the previous one, which comms already use.
    pub fn import(&self, switches: &Switches) -> Option<u64> {
        let _in_turn = (!switches.import_race).then(|| locked(&self.importing));
        let mapped = self.base.load(Ordering::SeqCst);
        if mapped != 0 {
            return Some(mapped);
        }
        // The dp-manager is asked twice: for the descriptor and for the size.
        thread::sleep(Duration::from_millis(switches.import_ms));
        let base = self.map()?;
        info!("GPU {}: receive pool imported", self.device);
        Some(base)
    }

    /// Makes a new mapping in place of the old one. The old memory is never freed: its readers get wrong bytes, but not
    /// those of another allocation.
    fn map(&self) -> Option<u64> {
        let bytes = self.bytes as usize;
        let base = match cuda_of(self.device) {
            Some(real) => cuda::driver()?.alloc(real, bytes)?,
            None => {
                let base = (table()?.alloc)(self.device, bytes, PAGE_BYTES);
                self.view.store(view(base, bytes)?, Ordering::SeqCst);
                base
            }
        };
        self.base.store(base, Ordering::SeqCst);
        Some(base)
    }

    /// Copies the bytes that a NIC wrote to where the host reads them; returns false if the device fails.
    pub fn settle(&self, fragments: &[Fragment]) -> bool {
        let Some(stream) = &self.stream else { return true };
        let (stream, base) = (locked(stream), self.base.load(Ordering::SeqCst));
        let mut copies = fragments.iter().map(|fragment| {
            let target = base + u64::from(fragment.pool_offset());
            // SAFETY: only this comm uses the fragment's page, and the copy is waited for below.
            unsafe { stream.up(target, self.view(fragment), fragment.len as usize) }
        });
        let enqueued = copies.all(|copied| copied.is_some());
        stream.finish().is_some() && enqueued
    }

    /// Size of the pool in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The address to which a NIC writes a fragment.
    pub fn view(&self, fragment: &Fragment) -> *mut u8 {
        self.view.load(Ordering::Relaxed).wrapping_add(fragment.pool_offset() as usize)
    }

    /// Gives back and poisons pages of a comm; returns how many of them the comm owned.
    pub fn give_back(&self, owner: u64, returned: &[u32]) -> usize {
        let mut pages = locked(&self.pages);
        returned.iter().filter(|page| self.recycle(&mut pages, owner, **page)).count()
    }

    /// Gives back all pages of a comm; returns their number.
    pub fn give_back_all(&self, owner: u64) -> usize {
        let mut pages = locked(&self.pages);
        pages.owned_by(owner).iter().filter(|page| self.recycle(&mut pages, owner, **page)).count()
    }

    fn recycle(&self, pages: &mut PagePool, owner: u64, page: u32) -> bool {
        let returned = pages.give_back(owner, page);
        if let Some(stream) = self.stream.as_ref().filter(|_| returned && self.poison) {
            // The page is poisoned before the stream copies other bytes to it.
            let base = self.base.load(Ordering::SeqCst);
            locked(stream).fill(base + u64::from(page) * PAGE_BYTES as u64, POISON, PAGE_BYTES);
        } else if returned && self.poison {
            let start = self.view.load(Ordering::Relaxed).wrapping_add(page as usize * PAGE_BYTES);
            // SAFETY: the page is in the pool and, under the lock, owned by no comm.
            unsafe { start.write_bytes(POISON, PAGE_BYTES) };
        }
        returned
    }
}

/// Page-aligned, zeroed memory that the host and a GPU access at the same address.
#[derive(Debug)]
pub struct Mapped {
    address: *mut u8,
    owner: Owner,
}

#[derive(Debug)]
enum Owner {
    Host(Layout),
    Gpu(&'static SimGpuTable),
    Cuda(&'static Driver, i32),
}

// SAFETY: the memory is plain and has one owner.
unsafe impl Send for Mapped {}

impl Mapped {
    /// Allocates memory for a GPU and the host, or for the host alone without a GPU.
    pub fn new(device: Option<i32>, bytes: usize) -> Option<Mapped> {
        if let (Some(device), Some(driver)) = (device.and_then(cuda_of), cuda::driver()) {
            let owner = Owner::Cuda(driver, device);
            return driver.mapped(device, bytes).map(|address| Mapped { address, owner });
        }
        let (Some(_), Some(table)) = (device, table()) else { return Mapped::host(bytes) };
        let address = (table.mapped_alloc)(bytes, PAGE_BYTES);
        (!address.is_null()).then_some(Mapped { address, owner: Owner::Gpu(table) })
    }

    /// Allocates memory of the host alone; `bytes` is not 0.
    pub fn host(bytes: usize) -> Option<Mapped> {
        let layout = Layout::from_size_align(bytes.max(1), PAGE_BYTES).ok()?;
        // SAFETY: the layout is not empty.
        let address = unsafe { alloc_zeroed(layout) };
        (!address.is_null()).then_some(Mapped { address, owner: Owner::Host(layout) })
    }

    /// Address of the memory.
    pub fn address(&self) -> *mut u8 {
        self.address
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        match self.owner {
            // SAFETY: the memory was allocated in `host` with this layout, and is freed only here.
            Owner::Host(layout) => unsafe { dealloc(self.address, layout) },
            Owner::Gpu(table) => drop((table.mapped_free)(self.address)),
            Owner::Cuda(driver, device) => driver.free_mapped(device, self.address),
        }
    }
}

/// A few words in device memory, or in host memory without a GPU.
#[derive(Debug)]
pub struct DeviceWords(Words);

#[derive(Debug)]
enum Words {
    Host(Mapped),
    Gpu(&'static SimGpuTable, u64),
    Cuda(&'static Driver, i32, u64),
}

impl DeviceWords {
    /// Makes words with these bytes; `None` if there is no memory.
    pub fn new(device: Option<i32>, bytes: &[u8]) -> Option<DeviceWords> {
        if let Some(device) = device.and_then(cuda_of) {
            return DeviceWords::on_cuda(device, bytes);
        }
        let (Some(device), Some(table)) = (device, table()) else {
            let words = Mapped::host(bytes.len())?;
            // SAFETY: the memory was just allocated with this length.
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

    fn on_cuda(device: i32, bytes: &[u8]) -> Option<DeviceWords> {
        let (driver, stream) = (cuda::driver()?, Stream::new(device)?);
        let address = driver.alloc(device, PAGE_BYTES)?;
        let words = DeviceWords(Words::Cuda(driver, device, address));
        // SAFETY: `bytes` is borrowed until the copy is done.
        unsafe { stream.up(address, bytes.as_ptr(), bytes.len()) }.and_then(|()| stream.finish())?;
        Some(words)
    }

    /// The device address of the words.
    pub fn address(&self) -> u64 {
        match &self.0 {
            Words::Cuda(_, _, address) => *address,
            Words::Host(words) => words.address() as u64,
            Words::Gpu(_, address) => *address,
        }
    }
}

impl Drop for DeviceWords {
    fn drop(&mut self) {
        match self.0 {
            Words::Gpu(table, address) => drop((table.free)(address)),
            Words::Cuda(driver, device, address) => driver.free(device, address),
            Words::Host(_) => {}
        }
    }
}
