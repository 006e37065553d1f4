//! Registered memory of this process, and descriptors of the peers' memory.
//!
//! Invariant: memory registered with a release function is released exactly once, after its last use. Read next:
//! `handles.rs`.

use std::any::Any;
use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::endpoint::Endpoint;
use crate::handles::{self, object};
use crate::status::{FERRYWIRE_OK, Failure, Out, bytes, call, copy_out};

/// Registered memory of this process. Peers that have its descriptor can read and write it.
pub struct Region {
    pub(crate) region: ferrywire::Region,
    /// Whether the caller owns the memory without a release function, so that freeing the handle must end
    /// every use of the memory.
    callers: bool,
}

/// A region of another endpoint, as its descriptor describes it.
pub struct Remote(pub(crate) ferrywire::RemoteRegion);

object!(Region, "ferrywire_region", 4);
object!(Remote, "ferrywire_remote", 5);

/// Calls the caller's release function when the engine drops the owner of the memory.
struct Release {
    release: unsafe extern "C" fn(*mut c_void),
    context: *mut c_void,
    /// Whether the registration has succeeded; before that the memory is still the caller's.
    armed: Arc<AtomicBool>,
}

// SAFETY: the caller of `ferrywire_register` has promised that any thread may call the function.
unsafe impl Send for Release {}
// SAFETY: the function is called once, in `drop`.
unsafe impl Sync for Release {}

impl Drop for Release {
    fn drop(&mut self) {
        if self.armed.load(Ordering::SeqCst) {
            // SAFETY: the caller of `ferrywire_register` has promised that the function may be called, once.
            unsafe { (self.release)(self.context) }
        }
    }
}

/// Registers `bytes` bytes at `address`, in host memory or on a CUDA GPU; the address decides which. Peers that are
/// given the region's descriptor can then read and write the memory.
///
/// With `release`, the memory has to stay valid until the library calls `release(context)`. The library calls it once,
/// when no thread, NIC, GPU or peer can touch the memory any more: after the region's handle is freed and every block
/// list and operation that uses the region has ended. A thread of the endpoint that does nothing else makes the call,
/// so the function may block. `ferrywire_deregister` makes the call on its own thread; and if the endpoint is gone
/// first, the thread that frees the last handle of the region or of its block lists makes it. If this call fails,
/// `release` is not called.
///
/// Without `release` (NULL), the memory has to stay valid until `ferrywire_deregister` or `ferrywire_region_free`,
/// which wait for operations, has returned FERRYWIRE_OK.
///
/// Errors: FERRYWIRE_ERROR_USAGE for a range that cannot be registered; FERRYWIRE_ERROR_GPU if the GPU's driver
/// refuses.
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
        // SAFETY: the caller promises room for the handle.
        let out = unsafe { handles::place(region) }?;
        let endpoint = handles::get(endpoint)?;
        let Some(release) = release else {
            // SAFETY: the caller promises that the memory stays valid until it is deregistered.
            let region = unsafe { endpoint.0.register_raw(address.cast(), bytes) }?;
            return put(&out, region, true);
        };
        let armed = Arc::new(AtomicBool::new(false));
        let owner: Box<dyn Any + Send + Sync> = Box::new(Release { release, context, armed: armed.clone() });
        // SAFETY: the caller promises that the memory stays valid until the owner is dropped.
        let region = unsafe { endpoint.0.register_with(address.cast(), bytes, owner) }?;
        let handle = handles::new(Region { region, callers: false })?;
        armed.store(true, Ordering::SeqCst);
        out.put(handle);
        Ok(FERRYWIRE_OK)
    })
}

/// Allocates and registers `bytes` zeroed bytes of host memory. The library frees them after the region's handle and
/// every operation that uses the region are gone.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_allocate(
    endpoint: *mut Endpoint,
    bytes: usize,
    region: *mut *mut Region,
) -> c_int {
    call(|| {
        // SAFETY: the caller promises room for the handle.
        let out = unsafe { handles::place(region) }?;
        put(&out, handles::get(endpoint)?.0.alloc_host(bytes)?, false)
    })
}

fn put(out: &Out<*mut Region>, region: ferrywire::Region, callers: bool) -> Result<c_int, Failure> {
    out.put(handles::new(Region { region, callers })?);
    Ok(FERRYWIRE_OK)
}

/// Returns the address of the region's first byte: host memory, which peers may change at any time, or an address on a
/// GPU. Returns NULL for a wrong handle.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_region_address(region: *const Region) -> *mut c_void {
    let mut address = std::ptr::null_mut();
    call(|| {
        address = handles::get(region)?.region.as_ptr().cast();
        Ok(FERRYWIRE_OK)
    });
    address
}

/// Returns the region's size in bytes; 0 for a wrong handle.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_region_bytes(region: *const Region) -> u64 {
    let mut bytes = 0;
    call(|| {
        bytes = handles::get(region)?.region.len();
        Ok(FERRYWIRE_OK)
    });
    bytes
}

/// Copies the name of the region's memory location ("host memory") into `location` as a NUL-terminated string. Buffer
/// and errors as in `ferrywire_endpoint_address`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_region_location(
    region: *const Region,
    location: *mut c_char,
    capacity: usize,
    bytes: *mut usize,
) -> c_int {
    call(|| {
        let words = format!("{}\0", handles::get(region)?.region.location());
        // SAFETY: the caller promises a buffer of this capacity.
        unsafe { copy_out(words.as_bytes(), location.cast(), capacity, bytes) }
    })
}

/// Size in bytes of a buffer that holds every descriptor.
pub const FERRYWIRE_DESCRIPTOR_BYTES_MAX: usize = 64;

/// Copies the region's descriptor, which lets a peer read and write the region, into the buffer of `capacity` bytes as
/// opaque bytes. Sets `*bytes`, unless `bytes` is NULL, to the descriptor's length, also if the buffer is too small
/// (FERRYWIRE_ERROR_TOO_SMALL).
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
        // SAFETY: the caller promises a buffer of this capacity.
        unsafe { copy_out(&descriptor_of, descriptor, capacity, bytes) }
    })
}

/// Ends the registration. Peers are refused from now on. Waits at most 5 seconds for operations of this process that
/// use the memory. After FERRYWIRE_OK nothing touches the memory, and `release` has been called. FERRYWIRE_ERROR_USAGE
/// means that operations still use the memory and that it is not free: end them and call again. The handle still has to
/// be freed.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_deregister(region: *mut Region) -> c_int {
    call(|| {
        handles::get(region)?.region.clone().deregister()?;
        Ok(FERRYWIRE_OK)
    })
}

/// Frees the handle; the registration ends when its last user is gone. NULL is allowed.
///
/// For memory registered without a release function the registration ends now, as with `ferrywire_deregister`, even if
/// block lists still name the region: after FERRYWIRE_OK nothing touches the memory. If operations use the memory even
/// after a wait, the call fails with FERRYWIRE_ERROR_USAGE and the handle stays valid: end them and call again.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_region_free(region: *mut Region) -> c_int {
    call(|| {
        if region.is_null() {
            return Ok(FERRYWIRE_OK);
        }
        let freed = handles::get(region)?;
        if freed.callers {
            match freed.region.clone().deregister() {
                // A forked child has no threads or connections that could touch the memory.
                Ok(()) | Err(ferrywire::RegisterError::Forked { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        drop(freed);
        Ok(handles::free(region))
    })
}

/// Makes a handle of another endpoint's region from the bytes that `ferrywire_region_descriptor` returned there.
/// FERRYWIRE_ERROR_USAGE if the bytes are not a descriptor.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_remote_open(
    descriptor: *const c_void,
    descriptor_bytes: usize,
    remote: *mut *mut Remote,
) -> c_int {
    call(|| {
        // SAFETY: the caller promises room for the handle, and as many bytes as stated.
        let (out, descriptor) =
            unsafe { (handles::place(remote)?, bytes("the descriptor", descriptor, descriptor_bytes)?) };
        out.put(handles::new(Remote(ferrywire::RemoteRegion::from_bytes(descriptor)?))?);
        Ok(FERRYWIRE_OK)
    })
}

/// Returns the remote region's size in bytes; 0 for a wrong handle.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_remote_bytes(remote: *const Remote) -> u64 {
    let mut bytes = 0;
    call(|| {
        bytes = handles::get(remote)?.0.len();
        Ok(FERRYWIRE_OK)
    });
    bytes
}

/// Frees the handle; the peer's region is not touched. NULL is allowed.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_remote_free(remote: *mut Remote) -> c_int {
    handles::free(remote)
}
