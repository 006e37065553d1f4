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

/// The CUDA driver, once the host process has loaded one; `None` before.
pub fn driver() -> Option<&'static Driver> {
    static FOUND: OnceLock<Driver> = OnceLock::new();
    if let Some(driver) = FOUND.get() {
        return Some(driver);
    }
    // SAFETY: the name is a string with its end; the call loads nothing that is not loaded already.
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

/// The caller's context, which is current again when the value is dropped.
struct Entered(&'static Driver, *mut c_void);

impl Drop for Entered {
    fn drop(&mut self) {
        // SAFETY: the context was current before, or is null.
        unsafe { (self.0.ctx_set_current)(self.1) };
    }
}

impl Driver {
    fn context(&self) -> Option<*mut c_void> {
        let mut context = std::ptr::null_mut();
        // SAFETY: the driver writes one pointer, for which there is room.
        done(unsafe { (self.ctx_get_current)(&mut context) }).map(|()| context)
    }

    /// Number of the device that is current on this thread; `None` without one.
    pub fn current(&self) -> Option<i32> {
        self.context().filter(|context| !context.is_null())?;
        let mut device = -1;
        // SAFETY: the driver writes one number, for which there is room.
        done(unsafe { (self.ctx_get_device)(&mut device) }).map(|()| device)
    }

    /// Pushes the current context once more, as if it were the plugin's own, which is the primary context too.
    pub fn leave_pushed(&self) {
        if let Some(context) = self.context().filter(|context| !context.is_null()) {
            // SAFETY: the context is current.
            unsafe { (self.ctx_push)(context) };
        }
    }

    /// Makes a device's primary context current on this thread until the returned value is dropped.
    fn enter(&'static self, device: i32) -> Option<Entered> {
        static PRIMARY: LazyLock<Mutex<HashMap<i32, usize>>> = LazyLock::new(Mutex::default);
        let before = self.context()?;
        let mut known = locked(&PRIMARY);
        let context = match known.get(&device) {
            Some(context) => *context as *mut c_void,
            None => {
                let mut context = std::ptr::null_mut();
                // SAFETY: the driver writes one pointer, for which there is room; the context is never
                // released.
                done(unsafe { (self.primary_retain)(&mut context, device) })?;
                known.insert(device, context as usize);
                context
            }
        };
        // SAFETY: the context is retained.
        done(unsafe { (self.ctx_set_current)(context) })?;
        Some(Entered(self, before))
    }

    /// Number of the device that owns an address, with base and length in bytes of the surrounding
    /// allocation.
    pub fn owner(&self, address: u64) -> Option<(i32, u64, u64)> {
        let (mut kind, mut device, mut base, mut bytes) = (0 as c_uint, -1, 0u64, 0usize);
        // SAFETY: each attribute is written to a variable of its type.
        unsafe {
            let ask = |into: *mut c_void, what| done((self.pointer_attribute)(into, what, address));
            ask((&raw mut kind).cast(), MEMORY_TYPE)?;
            ask((&raw mut device).cast(), DEVICE_ORDINAL)?;
            ask((&raw mut base).cast(), RANGE_START)?;
            ask((&raw mut bytes).cast(), RANGE_BYTES)?;
        }
        (kind == DEVICE_MEMORY).then_some((device, base, bytes as u64))
    }

    /// Allocates device memory, which is not initialised; `None` if the driver refuses.
    pub fn alloc(&'static self, device: i32, bytes: usize) -> Option<u64> {
        let _entered = self.enter(device)?;
        let mut address = 0;
        // SAFETY: the driver writes one number, for which there is room.
        done(unsafe { (self.mem_alloc)(&mut address, bytes) }).map(|()| address)
    }

    /// Frees device memory that `alloc` has returned.
    pub fn free(&'static self, device: i32, address: u64) {
        let _entered = self.enter(device);
        // SAFETY: the address came from `alloc`; a failure changes nothing.
        unsafe { (self.mem_free)(address) };
    }

    /// Allocates zeroed host memory that every device reads at the same address.
    pub fn mapped(&'static self, device: i32, bytes: usize) -> Option<*mut u8> {
        let _entered = self.enter(device)?;
        let mut address = std::ptr::null_mut();
        // SAFETY: the driver writes one pointer, for which there is room; the new memory has this length.
        unsafe {
            done((self.host_alloc)(&mut address, bytes, PORTABLE_AND_MAPPED))?;
            address.cast::<u8>().write_bytes(0, bytes);
        }
        Some(address.cast())
    }

    /// Frees mapped host memory that `mapped` has returned.
    pub fn free_mapped(&'static self, device: i32, address: *mut u8) {
        let _entered = self.enter(device);
        // SAFETY: the address came from `mapped`.
        unsafe { (self.host_free)(address.cast()) };
    }
}

/// A stream of a device, in which copies keep their order.
#[derive(Debug)]
pub struct Stream {
    driver: &'static Driver,
    device: i32,
    raw: *mut c_void,
}

// SAFETY: a stream may be used from any thread, and this one has one owner.
unsafe impl Send for Stream {}

impl Stream {
    /// Creates a stream of a device; `None` without a driver or without resources.
    pub fn new(device: i32) -> Option<Stream> {
        let driver = driver()?;
        let _entered = driver.enter(device)?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the driver writes one pointer, for which there is room.
        done(unsafe { (driver.stream_create)(&mut raw, STREAM_NON_BLOCKING) })?;
        Some(Stream { driver, device, raw })
    }

    /// Number of the stream's device.
    pub fn device(&self) -> i32 {
        self.device
    }

    /// Enqueues a copy to device memory.
    ///
    /// # Safety
    /// The bytes at `source` do not change until [`Stream::finish`] has returned.
    pub unsafe fn up(&self, target: u64, source: *const u8, bytes: usize) -> Option<()> {
        let _entered = self.driver.enter(self.device)?;
        // SAFETY: the caller promises that the source stays unchanged; the driver checks the device address.
        done(unsafe { (self.driver.copy_up)(target, source.cast(), bytes, self.raw) })
    }

    /// Enqueues a copy to host memory.
    ///
    /// # Safety
    /// No other code uses the bytes at `target` until [`Stream::finish`] has returned.
    pub unsafe fn down(&self, target: *mut u8, source: u64, bytes: usize) -> Option<()> {
        let _entered = self.driver.enter(self.device)?;
        // SAFETY: the caller promises that no other code uses the target; the driver checks the device
        // address.
        done(unsafe { (self.driver.copy_down)(target.cast(), source, bytes, self.raw) })
    }

    /// Enqueues a fill of device memory with `byte`.
    pub fn fill(&self, target: u64, byte: u8, bytes: usize) -> Option<()> {
        let _entered = self.driver.enter(self.device)?;
        // SAFETY: the driver checks the device address.
        done(unsafe { (self.driver.fill)(target, byte, bytes, self.raw) })
    }

    /// Waits until all enqueued work is done; `None` if the work has failed.
    pub fn finish(&self) -> Option<()> {
        let _entered = self.driver.enter(self.device)?;
        // SAFETY: the stream is open.
        done(unsafe { (self.driver.stream_synchronize)(self.raw) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let _entered = self.driver.enter(self.device);
        // SAFETY: the stream is open, and no code uses it after this.
        unsafe { (self.driver.stream_destroy)(self.raw) };
    }
}
