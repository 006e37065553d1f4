//! The CUDA driver: found when it is first needed, or seen to be there already, and looked through once.
//!
//! ```text
//!   not loaded ── library(): is it there, new enough, complete? ──> found ── driver(): cuInit ──> usable
//! ```
//!
//! Invariant: no function of the driver is called before `library` has found all of [`Functions`], so that an absent
//! one is an error; and registering host memory never loads the driver, nor initialises it.
//! Read next: `functions.rs`; `gpu.rs`, the first who needs it.

use super::error::{About, CudaError, NO_DEVICE, Result, call, check};
use super::functions::Functions;
use cudarc::driver::sys;
use ferrywire_proto::limits::CUDA_DRIVER_VERSION_MIN;
use std::ffi::{CStr, c_char, c_int};
use std::sync::OnceLock;

/// `CUmemcpyAttributes`, which drivers have since CUDA 12.8.
#[repr(C)]
pub(super) struct CopyAttributes {
    pub source_access: u32,
    /// Kind and number, for managed memory only.
    pub source_hint: [u32; 2],
    pub target_hint: [u32; 2],
    pub flags: u32,
}

/// Sources are read when the stream comes to the copies.
pub(super) const SOURCE_ACCESS_STREAM: u32 = 1;

/// `cuMemcpyBatchAsync`, as CUDA 12.8 has it: targets, sources, sizes, count; attributes, from which copy on
/// each holds, how many; the first that failed; the stream.
pub(super) type CopyBatch = unsafe extern "C" fn(
    *mut u64,
    *mut u64,
    *mut usize,
    usize,
    *mut CopyAttributes,
    *mut usize,
    usize,
    *mut usize,
    sys::CUstream,
) -> u32;

/// A driver with all that is needed.
#[derive(Debug)]
pub(super) struct Library {
    pub version: u32,
    pub functions: Functions,
    /// Only newer drivers have it.
    pub copy_batch: Option<CopyBatch>,
}

/// A driver that is initialised.
#[derive(Debug)]
pub(super) struct Driver {
    /// GPUs that this process sees.
    pub devices: u32,
}

/// The driver, loaded and looked through.
pub(super) fn library() -> Result<&'static Library> {
    static LIBRARY: OnceLock<Result<Library>> = OnceLock::new();
    LIBRARY.get_or_init(find).as_ref().map_err(CudaError::clone)
}

/// The driver, ready for use.
pub(super) fn driver() -> Result<&'static Driver> {
    static DRIVER: OnceLock<Result<Driver>> = OnceLock::new();
    DRIVER.get_or_init(|| library().and_then(|_| initialise())).as_ref().map_err(CudaError::clone)
}

/// The driver, if somebody has loaded it into this process: asking does not load it.
pub(super) fn library_if_mapped() -> Option<&'static Library> {
    static MAPPED: OnceLock<Option<&'static Library>> = OnceLock::new();
    if let Some(known) = MAPPED.get() {
        return *known;
    }
    // Until it is there, the answer may change.
    is_mapped().then(|| *MAPPED.get_or_init(|| library().ok())).flatten()
}

/// Version of the driver, as it counts: 12040 is CUDA 12.4. Loads it.
pub fn driver_version() -> Result<u32> {
    library().map(|library| library.version)
}

fn is_mapped() -> bool {
    // SAFETY: a name with its end; nothing is loaded that is not there already. What is found is not kept.
    unsafe {
        let found = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY);
        !found.is_null() && libc::dlclose(found) == 0
    }
}

fn find() -> Result<Library> {
    // SAFETY: loading the driver runs its start-up code, which programs that use CUDA run anyway.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoDriver);
    }
    let version = version()?;
    if version < CUDA_DRIVER_VERSION_MIN {
        return Err(CudaError::OldDriver { found: version, needed: CUDA_DRIVER_VERSION_MIN });
    }
    // SAFETY: it is there, and is never unloaded.
    let functions = unsafe { Functions::of(version) }?;
    // SAFETY: the library is there; the function has had this type since it first appeared.
    let copy_batch = unsafe { sys::culib().get::<CopyBatch>(b"cuMemcpyBatchAsync\0") };
    Ok(Library { version, functions, copy_batch: copy_batch.ok().map(|found| *found) })
}

fn version() -> Result<u32> {
    type Version = unsafe extern "C" fn(*mut c_int) -> u32;
    let symbol = "cuDriverGetVersion";
    let mut version = 0;
    // SAFETY: the library is there; the function has had this type since it first appeared; room for a number.
    let code = unsafe {
        let asked = sys::culib().get::<Version>(symbol.as_bytes());
        asked.map_err(|_| CudaError::MissingSymbol { symbol, version: 0 })?(&mut version)
    };
    check(symbol, About::default(), code).map(|()| u32::try_from(version).unwrap_or(0))
}

fn initialise() -> Result<Driver> {
    let mut devices = 0;
    // SAFETY: the functions are there; room for a number.
    let counted = unsafe {
        call!(About::default(), cuInit(0))
            .and_then(|()| call!(About::default(), cuDeviceGetCount(&mut devices)))
    };
    match (counted, u32::try_from(devices)) {
        (Ok(()), Ok(devices)) if devices > 0 => Ok(Driver { devices }),
        (Err(error), _) if error.code() != Some(NO_DEVICE) => Err(error),
        _ => Err(CudaError::NoDevice),
    }
}

/// Name and text of a code.
pub(super) fn words(code: u32) -> (&'static str, &'static str) {
    type Words = unsafe extern "C" fn(u32, *mut *const c_char) -> u32;
    let ask = |symbol: &[u8]| {
        let mut text = std::ptr::null();
        // SAFETY: only asked for a code that the driver gave, so the library is there. The code goes in as a
        // number, since a newer driver may have one that nobody here knows; texts live as long as the driver.
        let text = unsafe {
            let words = sys::culib().get::<Words>(symbol).ok()?;
            let answer = words(code, &mut text);
            (answer == 0 && !text.is_null()).then(|| CStr::from_ptr(text))
        };
        text.and_then(|text| text.to_str().ok())
    };
    (ask(b"cuGetErrorName\0").unwrap_or("an unknown code"), ask(b"cuGetErrorString\0").unwrap_or("no text"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn asking_does_not_load_the_driver() {
        if is_mapped() {
            return println!("SKIPPED: needs a process without a CUDA driver");
        }
        assert!(library_if_mapped().is_none());
        assert!(!is_mapped());
    }
}
