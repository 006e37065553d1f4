//! Memory handles: made by `regMr`, checked by `isend` and `irecv`.
//!
//! Host memory is only recorded. GPU memory must be whole, aligned pages of the calling thread's current GPU, on a NIC
//! that has a PCI path.
//! Invariant: a handle is known from `regMr` to `deregMr`. Any other pointer ends the process, and so does a `deregMr`
//! while a request uses the handle.
//! Read next: `table.rs`.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{LazyLock, Mutex};

use ferrywire_ncclnet::abi::{PTR_CUDA, PTR_HOST, ResultCode};

use crate::comm::Outcome;
use crate::gpu;
use crate::log::{misuse, segfault, warning};
use crate::plugin::plugin;
use crate::pool::PAGE_BYTES;
use crate::sync::locked;

static HANDLES: LazyLock<Mutex<HashMap<usize, Registration>>> = LazyLock::new(Mutex::default);
/// The next handle. Handles look like pointers and are never dereferenced.
static NEXT: AtomicUsize = AtomicUsize::new(0x7463_7000);
const STEP: usize = 0x40;

/// A registration of memory.
#[derive(Clone, Copy, Debug)]
pub struct Registration {
    /// Number of posted and not released requests that use the registration.
    uses: usize,
    address: usize,
    bytes: usize,
    /// Whether the memory is on a GPU.
    pub gpu: bool,
}

/// `regMr`: registers memory on a comm of this NIC; a send comm is tied to one GPU.
pub fn register(
    device: usize,
    gpu_of_comm: Option<i32>,
    data: *mut c_void,
    size: i32,
    kind: i32,
) -> Outcome<*mut c_void> {
    let Ok(bytes) = usize::try_from(size) else {
        warning!("regMr: the size of {size} bytes is negative");
        return Err(ResultCode::INTERNAL_ERROR);
    };
    let address = data as usize;
    match kind {
        PTR_HOST => Ok(note(Registration { uses: 0, address, bytes, gpu: false })),
        PTR_CUDA => {
            check_gpu(device, gpu_of_comm, address, bytes)?;
            Ok(note(Registration { uses: 0, address, bytes, gpu: true }))
        }
        kind => {
            warning!("regMr: memory of unknown kind {kind}");
            Err(ResultCode::INTERNAL_ERROR)
        }
    }
}

/// `deregMr`: ends a registration; NULL is allowed.
pub fn deregister(handle: *mut c_void) {
    let known = locked(&HANDLES).remove(&(handle as usize));
    match known {
        Some(known) if known.uses > 0 => {
            misuse(format_args!("deregMr of memory that {} requests still use", known.uses));
        }
        None if !handle.is_null() => {
            misuse(format_args!("deregMr of something that is no memory handle: {handle:?}"));
        }
        _ => {}
    }
}

/// Counts a request that was posted with a handle.
pub fn hold(handle: usize) {
    if let Some(known) = locked(&HANDLES).get_mut(&handle) {
        known.uses += 1;
    }
}

/// Uncounts a request that was posted with a handle and is released.
pub fn release(handle: usize) {
    if let Some(known) = locked(&HANDLES).get_mut(&handle) {
        known.uses -= 1;
    }
}

/// Number of handles that were made and not deregistered, over all comms.
pub fn live() -> usize {
    locked(&HANDLES).len()
}

/// The registration of a handle; NULL is an internal error.
pub fn find(handle: *mut c_void, call: &str) -> Outcome<Registration> {
    if handle.is_null() {
        warning!("{call} was called without a memory handle");
        return Err(ResultCode::INTERNAL_ERROR);
    }
    let known = locked(&HANDLES).get(&(handle as usize)).copied();
    Ok(known.unwrap_or_else(|| misuse(format_args!("{call} with a memory handle that is not registered"))))
}

impl Registration {
    /// Whether the range is inside the registration. Host memory is not checked, as in the real plugin.
    pub fn covers(&self, data: *mut c_void, bytes: usize) -> bool {
        let start = data as usize;
        !self.gpu || (start >= self.address && start.saturating_add(bytes) <= self.address + self.bytes)
    }
}

fn note(registration: Registration) -> *mut c_void {
    let handle = NEXT.fetch_add(STEP, Ordering::Relaxed);
    locked(&HANDLES).insert(handle, registration);
    handle as *mut c_void
}

fn check_gpu(device: usize, gpu_of_comm: Option<i32>, address: usize, bytes: usize) -> Outcome<()> {
    let plugin = plugin()?;
    let nic = &plugin.devices[device];
    if nic.pci_path.is_none() {
        segfault(format_args!("regMr of GPU memory on {:?}, which has no PCI path", nic.name));
    }
    let refuse = |why: &str| {
        warning!("regMr of {bytes} bytes of GPU memory at {address:#x}: {why}");
        if plugin.switches.push_left {
            gpu::leave_pushed();
        }
        Err(ResultCode::UNHANDLED_CUDA_ERROR)
    };
    if !plugin.settings.dma_buf {
        return refuse("NCCL_USE_DMA_BUF=0");
    }
    if plugin.switches.alignment && !address.is_multiple_of(PAGE_BYTES) {
        return refuse("not aligned to 4096");
    }
    if plugin.switches.alignment && !bytes.is_multiple_of(PAGE_BYTES) {
        return refuse("not whole pages");
    }
    match gpu::device_of(address as u64, bytes) {
        None => refuse("no GPU has it"),
        owner if gpu_of_comm.is_some() && owner != gpu_of_comm => refuse(&format!(
            "the comm belongs to GPU {gpu_of_comm:?}, which was current at its first connect"
        )),
        owner if owner == gpu::current_device() => Ok(()),
        Some(owner) => refuse(&format!("the memory is on GPU {owner}, which is not current on this thread")),
    }
}
