//! Memory: registered here, and described by others.

use std::any::Any;
use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::endpoint::Endpoint;
use crate::handles::{self, object};
use crate::status::{FERRYWIRE_OK, Failure, Out, bytes, call, copy_out};

/// Registered local memory.
pub struct Region {
    pub(crate) region: ferrywire::Region,
    /// Nobody tells the caller when the memory is free, so that it is with the end of the handle.
    callers: bool,
}

/// A region of another endpoint, as its descriptor tells it.
pub struct Remote(pub(crate) ferrywire::RemoteRegion);

object!(Region, "ferrywire_region", 4);
object!(Remote, "ferrywire_remote", 5);

/// What is called once nothing touches the memory any more.
struct Release {
    release: unsafe extern "C" fn(*mut c_void),
    context: *mut c_void,
    /// Whether the memory is the library's to give back: not before it is registered.
    armed: Arc<AtomicBool>,
}

// SAFETY: the caller of `ferrywire_register` has promised that any thread may call it.
unsafe impl Send for Release {}
// SAFETY: it is used once, when it is dropped.
unsafe impl Sync for Release {}

impl Drop for Release {
    fn drop(&mut self) {
        if self.armed.load(Ordering::SeqCst) {
            // SAFETY: by the promise of whoever registered it, once.
            unsafe { (self.release)(self.context) }
        }
    }
}

/// Registers `bytes` bytes at `address`: of the host, or of a GPU (CUDA), whose addresses are recognised.
///
/// With `release` the memory has to stay until `release(context)` is called, once: when no thread, NIC, GPU or peer can
/// touch it any more. That is after the region's handle is freed, and all lists of blocks and operations with it have
/// ended; a thread of the endpoint's own calls it, or the one in `ferrywire_deregister`, or, where the endpoint is gone
/// first, the one that frees the last handle of the region or of a list with it. It may block. When this call fails, it
/// is not called.
///
/// Without (NULL) the memory has to stay until `ferrywire_deregister` or `ferrywire_region_free`, which wait for
/// operations, has returned FERRYWIRE_OK.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_register(
    endpoint: *mut Endpoint,
    address: *mut c_void,
    bytes: usize,
    release: Option<unsafe extern "C" fn(*mut c_void)>,
    context: *mut c_void,
    region: *mut *mut Region,
) -> c_int {
    call(|| {
        // SAFETY: by the caller's promise.
        let out = unsafe { handles::place(region) }?;
        let endpoint = handles::get(endpoint)?;
        let Some(release) = release else {
            // SAFETY: by the caller's promise.
            let region = unsafe { endpoint.0.register_raw(address.cast(), bytes) }?;
            return put(&out, region, true);
        };
        let armed = Arc::new(AtomicBool::new(false));
        let owner: Box<dyn Any + Send + Sync> = Box::new(Release { release, context, armed: armed.clone() });
        // SAFETY: by the caller's promise; the owner is what ends it.
        let region = unsafe { endpoint.0.register_with(address.cast(), bytes, owner) }?;
        let handle = handles::new(Region { region, callers: false })?;
        armed.store(true, Ordering::SeqCst);
        out.put(handle);
        Ok(FERRYWIRE_OK)
    })
}

/// Allocates and registers `bytes` zeroed bytes of host memory, which live as long as they are needed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_allocate(
    endpoint: *mut Endpoint,
    bytes: usize,
    region: *mut *mut Region,
) -> c_int {
    call(|| {
        // SAFETY: by the caller's promise.
        let out = unsafe { handles::place(region) }?;
        put(&out, handles::get(endpoint)?.0.alloc_host(bytes)?, false)
    })
}

fn put(out: &Out<*mut Region>, region: ferrywire::Region, callers: bool) -> Result<c_int, Failure> {
    out.put(handles::new(Region { region, callers })?);
    Ok(FERRYWIRE_OK)
}

/// Where its bytes begin: of host memory, which peers may change at any time, or an address of a GPU. NULL for a wrong
/// handle.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_region_address(region: *const Region) -> *mut c_void {
    let mut address = std::ptr::null_mut();
    call(|| {
        address = handles::get(region)?.region.as_ptr().cast();
        Ok(FERRYWIRE_OK)
    });
    address
}

/// Its size in bytes; 0 for a wrong handle.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_region_bytes(region: *const Region) -> u64 {
    let mut bytes = 0;
    call(|| {
        bytes = handles::get(region)?.region.len();
        Ok(FERRYWIRE_OK)
    });
    bytes
}

/// Where its bytes live, in words ("host memory"), as a string with its closing zero; see `ferrywire_endpoint_address`
/// for the buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_region_location(
    region: *const Region,
    location: *mut c_char,
    capacity: usize,
    bytes: *mut usize,
) -> c_int {
    call(|| {
        let words = format!("{}\0", handles::get(region)?.region.location());
        // SAFETY: by the caller's promise.
        unsafe { copy_out(words.as_bytes(), location.cast(), capacity, bytes) }
    })
}

/// Room that fits a descriptor, in bytes.
pub const FERRYWIRE_DESCRIPTOR_BYTES_MAX: usize = 64;

/// What a peer needs to reach the region, as opaque bytes. `bytes` (or NULL) is told how many there are, also when the
/// buffer is too small.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_region_descriptor(
    region: *const Region,
    descriptor: *mut c_void,
    capacity: usize,
    bytes: *mut usize,
) -> c_int {
    call(|| {
        let descriptor_of = handles::get(region)?.region.descriptor().to_bytes();
        debug_assert!(descriptor_of.len() <= FERRYWIRE_DESCRIPTOR_BYTES_MAX);
        // SAFETY: by the caller's promise.
        unsafe { copy_out(&descriptor_of, descriptor, capacity, bytes) }
    })
}

/// Ends the registration: from here on peers are refused, and when this returns FERRYWIRE_OK nothing touches the memory,
/// and it has been released. While operations of this endpoint use it that is an error, and the memory not free: try
/// again. The handle is still to be freed.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_deregister(region: *mut Region) -> c_int {
    call(|| {
        handles::get(region)?.region.clone().deregister()?;
        Ok(FERRYWIRE_OK)
    })
}

/// Frees the handle, and ends the registration with the last user of it. NULL is fine.
///
/// Of memory that was registered without a release function the registration ends now, as with `ferrywire_deregister`,
/// whatever lists of blocks there are: when this returns FERRYWIRE_OK nothing touches the memory. Where operations use it
/// even after a wait, that is the error, and the handle stays: try again.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_region_free(region: *mut Region) -> c_int {
    call(|| {
        if region.is_null() {
            return Ok(FERRYWIRE_OK);
        }
        let freed = handles::get(region)?;
        if freed.callers {
            match freed.region.clone().deregister() {
                // Nothing touches the memory of a forked child.
                Ok(()) | Err(ferrywire::Error::Forked { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        drop(freed);
        Ok(handles::free(region))
    })
}

/// Reads what `ferrywire_region_descriptor` of another endpoint gave.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_remote_open(
    descriptor: *const c_void,
    descriptor_bytes: usize,
    remote: *mut *mut Remote,
) -> c_int {
    call(|| {
        // SAFETY: by the caller's promise.
        let (out, descriptor) =
            unsafe { (handles::place(remote)?, bytes("the descriptor", descriptor, descriptor_bytes)?) };
        out.put(handles::new(Remote(ferrywire::RemoteRegion::from_bytes(descriptor)?))?);
        Ok(FERRYWIRE_OK)
    })
}

/// Its size in bytes; 0 for a wrong handle.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_remote_bytes(remote: *const Remote) -> u64 {
    let mut bytes = 0;
    call(|| {
        bytes = handles::get(remote)?.0.len();
        Ok(FERRYWIRE_OK)
    });
    bytes
}

/// Frees the handle; the region itself is not touched. NULL is fine.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_remote_free(remote: *mut Remote) -> c_int {
    handles::free(remote)
}
