//! Real CUDA memory, through the driver that the host process has loaded.
//!
//! The plugin loads no driver itself: without one in the host process there is no CUDA memory. Bytes between device
//! memory and sockets go through host memory, on a stream of the thread that moves them.
//! Invariant: the CPU touches no device address. After each call the caller's current context is unchanged; so is its
//! stack of contexts, except after a failed registration.
//! Read next: `gpu.rs`.

use std::collections::HashMap;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::{LazyLock, Mutex, OnceLock};

use crate::sync::locked;

const MEMORY_TYPE: c_int = 2;
const DEVICE_ORDINAL: c_int = 9;
const RANGE_START: c_int = 11;
const RANGE_BYTES: c_int = 12;
const DEVICE_MEMORY: c_uint = 2;
const PORTABLE_AND_MAPPED: c_uint = 1 | 2;
const STREAM_NON_BLOCKING: c_uint = 1;

macro_rules! driver {
    ($($name:ident $symbol:literal ($($argument:ty),*);)+) => {
        /// The functions of the driver that this crate calls.
        #[derive(Debug)]
        pub struct Driver {
            $($name: unsafe extern "C" fn($($argument),*) -> c_int,)+
        }

        impl Driver {
            /// # Safety
            /// The library is a CUDA driver, and stays loaded.
            unsafe fn of(library: *mut c_void) -> Option<Driver> {
                Some(Driver {
                    // SAFETY: functions of these names have these types in every driver since CUDA 4.
                    $($name: unsafe {
                        let found = libc::dlsym(library, $symbol.as_ptr());
                        if found.is_null() {
                            return None;
                        }
                        std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> c_int>(found)
                    },)+
                })
            }
        }
    };
}

type Out = *mut *mut c_void;

driver! {
    ctx_get_current c"cuCtxGetCurrent" (Out);
    ctx_set_current c"cuCtxSetCurrent" (*mut c_void);
    ctx_push c"cuCtxPushCurrent_v2" (*mut c_void);
    ctx_get_device c"cuCtxGetDevice" (*mut c_int);
    primary_retain c"cuDevicePrimaryCtxRetain" (Out, c_int);
    pointer_attribute c"cuPointerGetAttribute" (*mut c_void, c_int, u64);
    mem_alloc c"cuMemAlloc_v2" (*mut u64, usize);
    mem_free c"cuMemFree_v2" (u64);
    host_alloc c"cuMemHostAlloc" (Out, usize, c_uint);
    host_free c"cuMemFreeHost" (*mut c_void);
    copy_up c"cuMemcpyHtoDAsync_v2" (u64, *const c_void, usize, *mut c_void);
    copy_down c"cuMemcpyDtoHAsync_v2" (*mut c_void, u64, usize, *mut c_void);
    fill c"cuMemsetD8Async" (u64, u8, usize, *mut c_void);
    stream_create c"cuStreamCreate" (Out, c_uint);
    stream_destroy c"cuStreamDestroy_v2" (*mut c_void);
    stream_synchronize c"cuStreamSynchronize" (*mut c_void);
}

/// The driver, once the host has loaded one.
pub fn driver() -> Option<&'static Driver> {
    static FOUND: OnceLock<Driver> = OnceLock::new();
    if let Some(driver) = FOUND.get() {
        return Some(driver);
    }
    // SAFETY: a string; nothing is loaded that is not there already.
    let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY) };
    if library.is_null() {
        return None;
    }
    // SAFETY: the library of that name is the driver; it is never closed.
    let driver = unsafe { Driver::of(library) }?;
    Some(FOUND.get_or_init(|| driver))
}

fn done(code: c_int) -> Option<()> {
    (code == 0).then_some(())
}

/// Restores the caller's context on drop.
struct Entered(&'static Driver, *mut c_void);

impl Drop for Entered {
    fn drop(&mut self) {
        // SAFETY: a context that was current, or none.
        unsafe { (self.0.ctx_set_current)(self.1) };
    }
}

impl Driver {
    fn context(&self) -> Option<*mut c_void> {
        let mut context = std::ptr::null_mut();
        // SAFETY: room for a pointer.
        done(unsafe { (self.ctx_get_current)(&mut context) }).map(|()| context)
    }

    /// The device that is current on this thread.
    pub fn current(&self) -> Option<i32> {
        self.context().filter(|context| !context.is_null())?;
        let mut device = -1;
        // SAFETY: room for a number.
        done(unsafe { (self.ctx_get_device)(&mut device) }).map(|()| device)
    }

    /// Pushes the current context once more, as if it were the plugin's own, which is the primary context too.
    pub fn leave_pushed(&self) {
        if let Some(context) = self.context().filter(|context| !context.is_null()) {
            // SAFETY: a context that is current.
            unsafe { (self.ctx_push)(context) };
        }
    }

    /// Makes a device's primary context current on this thread for a while.
    fn enter(&'static self, device: i32) -> Option<Entered> {
        static PRIMARY: LazyLock<Mutex<HashMap<i32, usize>>> = LazyLock::new(Mutex::default);
        let before = self.context()?;
        let mut known = locked(&PRIMARY);
        let context = match known.get(&device) {
            Some(context) => *context as *mut c_void,
            None => {
                let mut context = std::ptr::null_mut();
                // SAFETY: room for a pointer; the context is kept for ever.
                done(unsafe { (self.primary_retain)(&mut context, device) })?;
                known.insert(device, context as usize);
                context
            }
        };
        // SAFETY: a context that is retained.
        done(unsafe { (self.ctx_set_current)(context) })?;
        Some(Entered(self, before))
    }

    /// The device that owns an address, with the surrounding allocation.
    pub fn owner(&self, address: u64) -> Option<(i32, u64, u64)> {
        let (mut kind, mut device, mut base, mut bytes) = (0 as c_uint, -1, 0u64, 0usize);
        // SAFETY: each attribute is written where there is room for its type.
        unsafe {
            let ask = |into: *mut c_void, what| done((self.pointer_attribute)(into, what, address));
            ask((&raw mut kind).cast(), MEMORY_TYPE)?;
            ask((&raw mut device).cast(), DEVICE_ORDINAL)?;
            ask((&raw mut base).cast(), RANGE_START)?;
            ask((&raw mut bytes).cast(), RANGE_BYTES)?;
        }
        (kind == DEVICE_MEMORY).then_some((device, base, bytes as u64))
    }

    /// Allocates device memory, which is not initialised.
    pub fn alloc(&'static self, device: i32, bytes: usize) -> Option<u64> {
        let _entered = self.enter(device)?;
        let mut address = 0;
        // SAFETY: room for a number.
        done(unsafe { (self.mem_alloc)(&mut address, bytes) }).map(|()| address)
    }

    /// Frees device memory.
    pub fn free(&'static self, device: i32, address: u64) {
        let _entered = self.enter(device);
        // SAFETY: what `alloc` gave; another answer than success changes nothing.
        unsafe { (self.mem_free)(address) };
    }

    /// Host memory that every device reads at the same address; zeroed.
    pub fn mapped(&'static self, device: i32, bytes: usize) -> Option<*mut u8> {
        let _entered = self.enter(device)?;
        let mut address = std::ptr::null_mut();
        // SAFETY: room for a pointer; then fresh memory of this length.
        unsafe {
            done((self.host_alloc)(&mut address, bytes, PORTABLE_AND_MAPPED))?;
            address.cast::<u8>().write_bytes(0, bytes);
        }
        Some(address.cast())
    }

    /// Frees mapped host memory.
    pub fn free_mapped(&'static self, device: i32, address: *mut u8) {
        let _entered = self.enter(device);
        // SAFETY: what `mapped` gave.
        unsafe { (self.host_free)(address.cast()) };
    }
}

/// A stream of a device, with its own order of copies.
#[derive(Debug)]
pub struct Stream {
    driver: &'static Driver,
    device: i32,
    raw: *mut c_void,
}

// SAFETY: a stream may be used from any thread, and this one has one owner.
unsafe impl Send for Stream {}

impl Stream {
    /// A new stream; `None` without a driver or without resources.
    pub fn new(device: i32) -> Option<Stream> {
        let driver = driver()?;
        let _entered = driver.enter(device)?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: room for a pointer.
        done(unsafe { (driver.stream_create)(&mut raw, STREAM_NON_BLOCKING) })?;
        Some(Stream { driver, device, raw })
    }

    /// The device.
    pub fn device(&self) -> i32 {
        self.device
    }

    /// Enqueues a copy to device memory.
    ///
    /// # Safety
    /// The bytes at `source` stay as they are until [`Stream::finish`] has returned.
    pub unsafe fn up(&self, target: u64, source: *const u8, bytes: usize) -> Option<()> {
        let _entered = self.driver.enter(self.device)?;
        // SAFETY: by the caller's promise; a wrong device address is an error of the driver's.
        done(unsafe { (self.driver.copy_up)(target, source.cast(), bytes, self.raw) })
    }

    /// Enqueues a copy to host memory.
    ///
    /// # Safety
    /// Nothing else uses the bytes at `target` until [`Stream::finish`] has returned.
    pub unsafe fn down(&self, target: *mut u8, source: u64, bytes: usize) -> Option<()> {
        let _entered = self.driver.enter(self.device)?;
        // SAFETY: as for `up`.
        done(unsafe { (self.driver.copy_down)(target.cast(), source, bytes, self.raw) })
    }

    /// Enqueues the filling of device memory.
    pub fn fill(&self, target: u64, byte: u8, bytes: usize) -> Option<()> {
        let _entered = self.driver.enter(self.device)?;
        // SAFETY: as for `up`.
        done(unsafe { (self.driver.fill)(target, byte, bytes, self.raw) })
    }

    /// Waits until all enqueued work is done.
    pub fn finish(&self) -> Option<()> {
        let _entered = self.driver.enter(self.device)?;
        // SAFETY: the stream is open.
        done(unsafe { (self.driver.stream_synchronize)(self.raw) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let _entered = self.driver.enter(self.device);
        // SAFETY: the stream is open, and nothing uses it after this.
        unsafe { (self.driver.stream_destroy)(self.raw) };
    }
}
