//! The simulated GPU for code in another shared object: a table of C functions.
//!
//! A plugin that is loaded with `dlopen` has its own copy of this crate's statics, if it links the crate at
//! all. So the program publishes the address of its table in the environment, and the plugin calls through
//! the table.
//!
//! Invariants: no panic leaves a function of the table. [`SimGpuTable::find`] dereferences an address only
//! after it has read, through the kernel, the first bytes of a table of this version there: the variable may
//! be inherited from another process, or from this process before `exec`.
//! Read next: `allocation.rs`.

use super::allocation::{self, Kind, allocate, find, forget, resolve};
use super::{SimGpu, current, set_current};
use ferrywire_proto::limits;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Environment variable with `pid:address:version`; the address is hexadecimal.
pub const TABLE_VARIABLE: &str = "FERRYWIRE_SIM_GPU";
/// Version of [`SimGpuTable`]; changes with its layout or the meaning of a function.
pub const TABLE_VERSION: u32 = 1;

const MAGIC: u32 = 0x5349_4d47;
/// Status of a failed call through the table.
const FAILED: i32 = -1;

/// The simulated GPUs of a process, for plugins. Any thread may call the functions. A status is 0, or -1
/// after a failure. All lengths are in bytes, all addresses are device addresses unless stated otherwise.
#[repr(C)]
#[derive(Debug)]
pub struct SimGpuTable {
    /// Size of this table in bytes.
    pub size: usize,
    /// Version of the table: [`TABLE_VERSION`].
    pub version: u32,
    /// Fixed number that identifies a table.
    pub magic: u32,
    /// Returns the GPU that is current on the calling thread; -1 without one.
    pub current_device: extern "C" fn() -> i32,
    /// Makes an open GPU current on the calling thread; returns a status.
    pub set_current_device: extern "C" fn(device: i32) -> i32,
    /// Returns the GPU with the memory at `address`, or -1. Writes base and length of the allocation to
    /// non-null pointers.
    pub device_of: unsafe extern "C" fn(address: u64, base: *mut u64, len: *mut u64) -> i32,
    /// Returns a pointer to the bytes at an address, for a simulated NIC; null unless all are in one
    /// allocation. Valid until the allocation is freed.
    pub dma_view: extern "C" fn(address: u64, len: usize) -> *mut u8,
    /// Allocates zeroed device memory on an open GPU; 0 on failure. Only `free` frees it.
    pub alloc: extern "C" fn(device: i32, len: usize, align: usize) -> u64,
    /// Frees device memory from `alloc`; returns a status.
    pub free: extern "C" fn(address: u64) -> i32,
    /// Allocates zeroed host memory that GPUs access at the CPU's address; null on failure.
    pub mapped_alloc: extern "C" fn(len: usize, align: usize) -> *mut u8,
    /// Frees host memory from `mapped_alloc`; returns a status.
    pub mapped_free: extern "C" fn(pointer: *mut u8) -> i32,
    /// Copies device memory to host memory through the copy engine, and waits; returns a status.
    pub copy_to_host: unsafe extern "C" fn(target: *mut u8, address: u64, len: usize) -> i32,
    /// Copies host memory to device memory through the copy engine, and waits; returns a status.
    pub copy_from_host: unsafe extern "C" fn(address: u64, source: *const u8, len: usize) -> i32,
}

// Plugins in other languages rely on this offset.
const _: () = assert!(std::mem::offset_of!(SimGpuTable, magic) == 12);
const _: () = assert!(std::mem::offset_of!(SimGpuTable, current_device) == 16);
const _: () = assert!(std::mem::offset_of!(SimGpuTable, mapped_alloc) == 64);
const _: () = assert!(size_of::<SimGpuTable>() == 96);

static TABLE: SimGpuTable = SimGpuTable {
    size: size_of::<SimGpuTable>(),
    version: TABLE_VERSION,
    magic: MAGIC,
    current_device,
    set_current_device,
    device_of,
    dma_view,
    alloc,
    free,
    mapped_alloc,
    mapped_free,
    copy_to_host,
    copy_from_host,
};

impl SimGpuTable {
    /// The table that this process has published; `None` before that.
    pub fn find() -> Option<&'static SimGpuTable> {
        let address = parse(&std::env::var(TABLE_VARIABLE).ok()?, std::process::id())?;
        // The table is read through the kernel, so a wrong address is an error and does not crash the
        // process.
        let mut head = [0u8; 16];
        File::open("/proc/self/mem").ok()?.read_exact_at(&mut head, address).ok()?;
        if head != head_of(&TABLE) || !address.is_multiple_of(align_of::<SimGpuTable>() as u64) {
            return None;
        }
        // SAFETY: this process has published the address of a static; size, version and mark there are those
        // of a table with this layout.
        Some(unsafe { &*(address as *const SimGpuTable) })
    }
}

/// The first 16 bytes of a table: size, version, magic.
fn head_of(table: &SimGpuTable) -> [u8; 16] {
    let mut head = [0; 16];
    head[..8].copy_from_slice(&table.size.to_ne_bytes());
    head[8..12].copy_from_slice(&table.version.to_ne_bytes());
    head[12..].copy_from_slice(&table.magic.to_ne_bytes());
    head
}

/// The address in `pid:address:version`; `None` for another process or version.
pub(super) fn parse(text: &str, process: u32) -> Option<u64> {
    let mut parts = text.split(':');
    let mut next = || parts.next();
    let (pid, address, version) = (next()?, next()?, next()?);
    let ours = pid.parse() == Ok(process) && version.parse() == Ok(TABLE_VERSION) && next().is_none();
    let digits = address.strip_prefix("0x").unwrap_or(address);
    u64::from_str_radix(digits, 16).ok().filter(|_| ours)
}

/// Publishes this process's table in the environment, once.
pub(super) fn publish() {
    if SimGpuTable::find().is_some() {
        return;
    }
    let text = format!("{}:{:#x}:{TABLE_VERSION}", std::process::id(), &raw const TABLE as usize);
    // SAFETY: no other code in this crate writes the environment, and Rust code reads it under the same lock.
    // C code on another thread may read it at this moment; so this is done only once, and `SimGpu::open`
    // documents it.
    unsafe { std::env::set_var(TABLE_VARIABLE, text) };
}

/// Runs a function of the table; turns a panic into the failure value `failed`.
fn guarded<T>(failed: T, body: impl FnOnce() -> Option<T>) -> T {
    catch_unwind(AssertUnwindSafe(body)).ok().flatten().unwrap_or(failed)
}

extern "C" fn current_device() -> i32 {
    guarded(FAILED, || i32::try_from(current()?).ok())
}

extern "C" fn set_current_device(device: i32) -> i32 {
    guarded(FAILED, || set_current(u32::try_from(device).ok()?).ok().map(|()| 0))
}

unsafe extern "C" fn device_of(address: u64, base: *mut u64, len: *mut u64) -> i32 {
    guarded(FAILED, || {
        let (index, first, bytes) = SimGpu::of(address)?;
        // SAFETY: the caller passes null, or a pointer to a number that it owns.
        let (base, len) = unsafe { (base.as_mut(), len.as_mut()) };
        base.into_iter().for_each(|base| *base = first);
        len.into_iter().for_each(|len| *len = bytes);
        i32::try_from(index).ok()
    })
}

extern "C" fn dma_view(address: u64, len: usize) -> *mut u8 {
    guarded(std::ptr::null_mut(), || resolve(address, len).ok().map(|span| span.pointer))
}

extern "C" fn alloc(device: i32, len: usize, align: usize) -> u64 {
    guarded(0, || {
        let gpu = SimGpu::opened(u32::try_from(device).ok()?)?;
        allocate(Kind::Device(gpu), len, align, true).ok().map(|made| made.address())
    })
}

extern "C" fn free(address: u64) -> i32 {
    guarded(FAILED, || free_foreign(address, |allocation| allocation.gpu().is_some()))
}

extern "C" fn mapped_alloc(len: usize, align: usize) -> *mut u8 {
    guarded(std::ptr::null_mut(), || {
        allocate(Kind::Mapped, len, align, true).ok().map(|made| made.address() as *mut u8)
    })
}

extern "C" fn mapped_free(pointer: *mut u8) -> i32 {
    guarded(FAILED, || free_foreign(pointer as u64, |allocation| allocation.gpu().is_none()))
}

/// Frees an allocation that was made through the table, by its first address, if `right` accepts it.
fn free_foreign(address: u64, right: impl Fn(&allocation::Allocation) -> bool) -> Option<i32> {
    let found = find(address)?;
    let may = found.foreign && found.address() == address && right(&found);
    may.then(|| forget(&found)).map(|()| 0)
}

unsafe extern "C" fn copy_to_host(target: *mut u8, address: u64, len: usize) -> i32 {
    guarded(FAILED, || {
        let stream = find(address)?.gpu()?.stream();
        // SAFETY: the caller keeps `len` bytes at `target` writable until this returns.
        unsafe { stream.to_host(address, target, len).ok()? };
        stream.wait(limits::SIM_GPU_BLOCKING_TIMEOUT).ok().map(|()| 0)
    })
}

unsafe extern "C" fn copy_from_host(address: u64, source: *const u8, len: usize) -> i32 {
    guarded(FAILED, || {
        let stream = find(address)?.gpu()?.stream();
        // SAFETY: the caller keeps `len` bytes at `source` readable and unchanged until this returns.
        unsafe { stream.from_host(source, address, len).ok()? };
        stream.wait(limits::SIM_GPU_BLOCKING_TIMEOUT).ok().map(|()| 0)
    })
}
