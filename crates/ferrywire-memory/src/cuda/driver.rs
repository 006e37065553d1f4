//! The CUDA driver library: loaded at first need, or found in the process, and checked once.
//!
//! ```text
//!   not loaded ── library(): is it there, new enough, complete? ──> found ── driver(): cuInit ──> usable
//! ```
//!
//! Invariants: no function of the driver is called before `library` has found all of [`Functions`], so a
//! missing one is an error, except those that [`memory_type`] and error texts need; registering host memory
//! neither loads nor initialises the driver.
//! Read next: `functions.rs`; `gpu.rs`, its first user.

use super::error::{About, CudaError, NO_DEVICE, NO_GPU_MEMORY, Result, call, check};
use super::functions::Functions;
use cudarc::driver::sys;
use ferrywire_proto::limits::CUDA_DRIVER_VERSION_MIN;
use libloading::Library as File;
use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::sync::OnceLock;

/// Name of the library file. The toolkit's stub, which has no driver, is `libcuda.so`.
const FILE_NAME: &CStr = c"libcuda.so.1";

/// `CUmemcpyAttributes`, available since CUDA 12.8.
#[repr(C)]
pub(super) struct CopyAttributes {
    pub source_access: u32,
    /// Location kind and number of the sources; the driver uses it for managed memory only.
    pub source_hint: [u32; 2],
    pub target_hint: [u32; 2],
    pub flags: u32,
}

/// Flag: the sources are read when the stream reaches the copies, not at the call.
pub(super) const SOURCE_ACCESS_STREAM: u32 = 1;

/// `cuMemcpyBatchAsync` as of CUDA 12.8. Arguments: targets, sources, sizes, count; attributes, the index of
/// the first copy that each applies to, their number; the index of the first failed copy; the stream.
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

/// A driver library with every required function.
#[derive(Debug)]
pub(super) struct Library {
    pub version: u32,
    pub functions: Functions,
    /// `cuMemcpyBatchAsync`, which only newer drivers have.
    pub copy_batch: Option<CopyBatch>,
}

/// The CUDA driver after its initialisation.
#[derive(Debug)]
pub(super) struct Driver {
    /// Number of GPUs that this process sees.
    pub devices: u32,
}

/// The driver library, loaded and checked.
pub(super) fn library() -> Result<&'static Library> {
    static LIBRARY: OnceLock<Result<Library>> = OnceLock::new();
    LIBRARY.get_or_init(find).as_ref().map_err(CudaError::clone)
}

/// The driver, loaded and initialised.
pub(super) fn driver() -> Result<&'static Driver> {
    static DRIVER: OnceLock<Result<Driver>> = OnceLock::new();
    DRIVER.get_or_init(|| library().and_then(|_| initialise())).as_ref().map_err(CudaError::clone)
}

/// The driver library if this process has loaded it already; this call never loads it. An error when it cannot
/// be used.
pub(super) fn library_if_mapped() -> Option<Result<&'static Library>> {
    static MAPPED: OnceLock<Result<&'static Library>> = OnceLock::new();
    if let Some(known) = MAPPED.get() {
        return Some(known.clone());
    }
    // While the library is absent it may still be loaded later, so the answer is not cached.
    is_mapped().then(|| MAPPED.get_or_init(library).clone())
}

/// Asks a driver library that may lack functions for the type of the memory at an address: a value of
/// `CUmemorytype`, and 0 for memory that it does not know. `None` when the library cannot answer.
pub(super) fn memory_type(address: u64) -> Option<u32> {
    type Ask = unsafe extern "C" fn(*mut c_void, u32, u64) -> u32;
    let kind = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE as u32;
    let mut answer = 0u32;
    // SAFETY: the function has had this type since it first appeared, and writes one number, for which there is
    // room.
    let code = unsafe {
        let ask = file()?.get::<Ask>(b"cuPointerGetAttribute\0").ok()?;
        ask((&raw mut answer).cast(), kind, address)
    };
    match code {
        0 => Some(answer),
        code if NO_GPU_MEMORY.contains(&code) => Some(0),
        _ => None,
    }
}

/// Version of the driver in its own notation: 12040 is CUDA 12.4. Loads the driver.
pub fn driver_version() -> Result<u32> {
    library().map(|library| library.version)
}

fn is_mapped() -> bool {
    // SAFETY: the name is a terminated text; the call loads nothing that is not loaded already, and the
    // handle is not kept.
    unsafe {
        let found = libc::dlopen(FILE_NAME.as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY);
        !found.is_null() && libc::dlclose(found) == 0
    }
}

/// The library file, loaded at first need and never unloaded; `None` when it cannot be loaded.
fn file() -> Option<&'static File> {
    static FILE: OnceLock<File> = OnceLock::new();
    if let Some(file) = FILE.get() {
        return Some(file);
    }
    // SAFETY: loading the driver runs its start-up code, which programs that use CUDA run anyway.
    let file = unsafe { File::new(OsStr::from_bytes(FILE_NAME.to_bytes())) }.ok()?;
    Some(FILE.get_or_init(|| file))
}

fn find() -> Result<Library> {
    let file = file().ok_or(CudaError::NoDriver)?;
    let version = version(file)?;
    if version < CUDA_DRIVER_VERSION_MIN {
        return Err(CudaError::OldDriver { found: version, needed: CUDA_DRIVER_VERSION_MIN });
    }
    // SAFETY: the file is the driver's, and is never unloaded.
    let functions = unsafe { Functions::of(file, version) }?;
    // SAFETY: the function has had this type since it first appeared.
    let copy_batch = unsafe { file.get::<CopyBatch>(b"cuMemcpyBatchAsync\0") };
    Ok(Library { version, functions, copy_batch: copy_batch.ok().map(|found| *found) })
}

fn version(file: &File) -> Result<u32> {
    type Version = unsafe extern "C" fn(*mut c_int) -> u32;
    let symbol = "cuDriverGetVersion";
    let mut version = 0;
    // SAFETY: the function has had this type since it first appeared, and writes one number, for which there is
    // room.
    let code = unsafe {
        let asked = file.get::<Version>(symbol.as_bytes());
        asked.map_err(|_| CudaError::MissingSymbol { symbol, version: 0 })?(&mut version)
    };
    check(symbol, About::default(), code).map(|()| u32::try_from(version).unwrap_or(0))
}

fn initialise() -> Result<Driver> {
    let mut devices = 0;
    // SAFETY: the functions are present; they write one number, for which there is room.
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

/// Name and message of a driver's error code.
pub(super) fn words(code: u32) -> (&'static str, &'static str) {
    type Words = unsafe extern "C" fn(u32, *mut *const c_char) -> u32;
    let ask = |symbol: &[u8]| {
        let mut text = std::ptr::null();
        // SAFETY: the code is passed as a number, since a newer driver may have codes unknown here; the texts
        // live as long as the driver.
        let text = unsafe {
            let words = file()?.get::<Words>(symbol).ok()?;
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
