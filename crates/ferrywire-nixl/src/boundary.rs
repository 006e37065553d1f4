//! The boundary to C++: the table of functions of `shim/core.h`, and the two symbols that NIXL looks up.
//!
//! Invariant: no panic unwinds out of these functions, and every pointer that comes in is checked or was made here.
//! Read next: `agent.rs`.

use std::ffi::{c_char, c_void};
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::agent::Agent;
use crate::log;
use crate::memory::Memory;
use crate::settings::OPTIONS;
use crate::status::Status;
use crate::transfer::{Descriptor, Operation, Transfer};

#[derive(Clone, Copy)]
#[repr(C)]
pub struct Bytes {
    data: *const u8,
    size: usize,
}

#[repr(C)]
pub struct Parameter {
    key: Bytes,
    value: Bytes,
}

type PutBytes = extern "C" fn(*mut c_void, Bytes) -> bool;
type PutNotification = extern "C" fn(*mut c_void, Bytes, Bytes) -> bool;

/// The table of functions, field by field as in `core.h`.
#[repr(C)]
struct Core {
    create: unsafe extern "C" fn(Bytes, Bytes, *const Parameter, usize) -> *mut c_void,
    destroy: unsafe extern "C" fn(*mut c_void),
    has_gpus: unsafe extern "C" fn(*const c_void) -> bool,
    register_memory: unsafe extern "C" fn(*const c_void, u64, usize, u64, u32, *mut *const Memory) -> Status,
    deregister_memory: unsafe extern "C" fn(*const c_void, *const Memory) -> Status,
    clone_memory: unsafe extern "C" fn(*const Memory) -> *const Memory,
    drop_memory: unsafe extern "C" fn(*const Memory),
    public_data: unsafe extern "C" fn(*const Memory, *mut c_void, PutBytes) -> Status,
    load_remote: unsafe extern "C" fn(*const c_void, Bytes, Bytes, *mut *const Memory) -> Status,
    connection_info: unsafe extern "C" fn(*const c_void, *mut c_void, PutBytes) -> Status,
    load_connection_info: unsafe extern "C" fn(*const c_void, Bytes, Bytes) -> Status,
    connect: unsafe extern "C" fn(*const c_void, Bytes) -> Status,
    disconnect: unsafe extern "C" fn(*const c_void, Bytes) -> Status,
    prepare: unsafe extern "C" fn(
        *const c_void,
        u32,
        *const Descriptor,
        usize,
        *const Descriptor,
        usize,
        Bytes,
        *mut *const Transfer,
    ) -> Status,
    post: unsafe extern "C" fn(*const c_void, *const Transfer, *const Bytes) -> Status,
    check: unsafe extern "C" fn(*const c_void, *const Transfer) -> Status,
    release: unsafe extern "C" fn(*const Transfer),
    notifications: unsafe extern "C" fn(*const c_void, *mut c_void, PutNotification) -> Status,
    notify: unsafe extern "C" fn(*const c_void, Bytes, Bytes) -> Status,
    options: unsafe extern "C" fn(*mut c_void, PutNotification),
    version: *const c_char,
}

// SAFETY: the table has functions and a string that is never written to.
unsafe impl Sync for Core {}

static CORE: Core = Core {
    create,
    destroy,
    has_gpus,
    register_memory,
    deregister_memory,
    clone_memory,
    drop_memory,
    public_data,
    load_remote,
    connection_info,
    load_connection_info,
    connect,
    disconnect,
    prepare,
    post,
    check,
    release,
    notifications,
    notify,
    options,
    version: MARK.split_at(MARK_NAME.len()).1.as_ptr().cast(),
};

/// Text that marks the file, followed by the version: `ferrywire nixl` recognizes this library by it.
const MARK_NAME: &str = "ferrywire NIXL backend ";
const MARK: &str = concat!("ferrywire NIXL backend ", env!("CARGO_PKG_VERSION"), "\0");

unsafe extern "C" {
    fn ferrywire_nixl_plugin(core: *const Core) -> *mut c_void;
}

/// Returns the plugin's record, or null. NIXL calls it first, and again after each `nixl_plugin_fini`.
#[unsafe(no_mangle)]
pub extern "C" fn nixl_plugin_init() -> *mut c_void {
    guarded(std::ptr::null_mut(), || {
        log::start();
        match library_fits() {
            // SAFETY: the table is static and has the fields of `core.h`.
            Ok(()) => unsafe { ferrywire_nixl_plugin(&CORE) },
            Err(why) => {
                log::announce_once(format_args!("the NIXL backend cannot be used: {why}"));
                std::ptr::null_mut()
            }
        }
    })
}

/// Does nothing: NIXL also calls it between asking for the backend's parameters and creating an engine.
#[unsafe(no_mangle)]
pub extern "C" fn nixl_plugin_fini() {}

/// Checks the version of NIXL's library: before 1.0 it calls other virtual functions under one API version.
fn library_fits() -> Result<(), &'static str> {
    const OF_1_0: *const c_char = c"_ZNK9nixlAgent14releaseMemViewEPv".as_ptr();
    // SAFETY: the strings end in NUL, and the library is only looked up where it is already loaded. The library
    // stays loaded, because the caller of this function is in it.
    unsafe {
        if !libc::dlsym(libc::RTLD_DEFAULT, OF_1_0).is_null() {
            return Ok(());
        }
        let library = libc::dlopen(c"libnixl.so".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
        if library.is_null() {
            return Err("libnixl.so is not loaded in this process: NIXL 1.0 or later is needed");
        }
        let found = !libc::dlsym(library, OF_1_0).is_null();
        libc::dlclose(library);
        if found { Ok(()) } else { Err("this NIXL is older than 1.0: install nixl>=1.0") }
    }
}

/// Logs a panic once and returns `failed`, so that no panic crosses the boundary.
fn guarded<T>(failed: T, body: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        let words = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let words = words.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        log::announce_once(format_args!("internal error, please report: {words}"));
        failed
    })
}

fn status(body: impl FnOnce() -> Status) -> Status {
    guarded(Status::BACKEND, body)
}

impl Bytes {
    /// # Safety
    /// The bytes are valid for as long as the slice is used, or the length is 0.
    unsafe fn slice<'a>(self) -> &'a [u8] {
        if self.data.is_null() || self.size == 0 {
            &[]
        } else {
            // SAFETY: the caller promises that the bytes are valid.
            unsafe { std::slice::from_raw_parts(self.data, self.size) }
        }
    }

    /// The bytes as text. Names of agents are text; other bytes are converted lossily.
    ///
    /// # Safety
    /// The bytes are valid for as long as the text is used, or the length is 0.
    unsafe fn text<'a>(self) -> std::borrow::Cow<'a, str> {
        // SAFETY: the caller promises that the bytes are valid.
        String::from_utf8_lossy(unsafe { self.slice() })
    }

    fn of(slice: &[u8]) -> Bytes {
        Bytes { data: slice.as_ptr(), size: slice.len() }
    }
}

/// # Safety
/// The pointer came from [`create`] and was not destroyed.
unsafe fn agent<'a>(pointer: *const c_void) -> &'a Agent {
    // SAFETY: the caller promises a pointer to a live agent.
    unsafe { &*pointer.cast::<Agent>() }
}

/// # Safety
/// `items` points to `count` items, or `count` is 0.
unsafe fn array<'a, T>(items: *const T, count: usize) -> &'a [T] {
    if items.is_null() || count == 0 {
        &[]
    } else {
        // SAFETY: the caller promises that the items exist.
        unsafe { std::slice::from_raw_parts(items, count) }
    }
}

/// # Safety
/// The arguments are those that `core.h` requires; this holds for all functions of the table.
unsafe extern "C" fn create(
    name: Bytes,
    backend: Bytes,
    parameters: *const Parameter,
    count: usize,
) -> *mut c_void {
    guarded(std::ptr::null_mut(), || {
        // SAFETY: the shim's strings live during the call.
        let (name, backend) = unsafe { (name.text(), backend.text()) };
        // SAFETY: the array and the strings in it live during the call.
        let parameters = unsafe { array(parameters, count) }.iter();
        // SAFETY: the strings in the array live during the call.
        let text = |bytes: Bytes| unsafe { bytes.text() }.into_owned();
        let parameters: Vec<_> = parameters.map(|each| (text(each.key), text(each.value))).collect();
        match Agent::new(&name, &backend, &parameters) {
            Ok(agent) => Box::into_raw(Box::new(agent)).cast(),
            Err(why) => {
                log::announce(format_args!("agent {name} cannot be created: {why}"));
                std::ptr::null_mut()
            }
        }
    })
}

unsafe extern "C" fn destroy(pointer: *mut c_void) {
    guarded((), || {
        // SAFETY: the agent was made by `create`, and this is its last use.
        drop(unsafe { Box::from_raw(pointer.cast::<Agent>()) });
    });
}

unsafe extern "C" fn has_gpus(pointer: *const c_void) -> bool {
    // SAFETY: the pointer is that of a live agent.
    guarded(false, || unsafe { agent(pointer) }.has_gpus())
}

unsafe extern "C" fn register_memory(
    pointer: *const c_void,
    address: u64,
    bytes: usize,
    _device: u64,
    kind: u32,
    memory: *mut *const Memory,
) -> Status {
    status(|| {
        // SAFETY: NIXL's user keeps the memory until it is deregistered.
        match unsafe { agent(pointer).register(address, bytes as u64, kind) } {
            Ok(registered) => {
                // SAFETY: the pointer is to a variable of the shim.
                unsafe { memory.write(Arc::into_raw(Arc::new(registered))) };
                Status::SUCCESS
            }
            Err(status) => status,
        }
    })
}

unsafe extern "C" fn deregister_memory(pointer: *const c_void, memory: *const Memory) -> Status {
    // SAFETY: the agent is live, and the shim holds a reference to the memory.
    status(|| unsafe { agent(pointer).deregister(&*memory) })
}

unsafe extern "C" fn clone_memory(memory: *const Memory) -> *const Memory {
    // SAFETY: the shim holds a reference to the memory.
    unsafe { Arc::increment_strong_count(memory) };
    memory
}

unsafe extern "C" fn drop_memory(memory: *const Memory) {
    // SAFETY: the shim gives up its reference to the memory.
    guarded((), || drop(unsafe { Arc::from_raw(memory) }));
}

unsafe extern "C" fn public_data(memory: *const Memory, into: *mut c_void, put: PutBytes) -> Status {
    status(|| {
        // SAFETY: the shim holds a reference to the memory.
        let data = unsafe { &*memory }.public_data();
        if put(into, Bytes::of(&data)) { Status::SUCCESS } else { Status::BACKEND }
    })
}

unsafe extern "C" fn load_remote(
    pointer: *const c_void,
    peer: Bytes,
    blob: Bytes,
    memory: *mut *const Memory,
) -> Status {
    status(|| {
        // SAFETY: the agent and the strings live during the call.
        match unsafe { agent(pointer).load_remote(&peer.text(), blob.slice()) } {
            Ok(loaded) => {
                // SAFETY: the pointer is to a variable of the shim.
                unsafe { memory.write(Arc::into_raw(Arc::new(loaded))) };
                Status::SUCCESS
            }
            Err(status) => status,
        }
    })
}

unsafe extern "C" fn connection_info(pointer: *const c_void, into: *mut c_void, put: PutBytes) -> Status {
    status(|| {
        // SAFETY: the pointer is that of a live agent.
        let info = unsafe { agent(pointer) }.connection_info();
        if put(into, Bytes::of(info)) { Status::SUCCESS } else { Status::BACKEND }
    })
}

unsafe extern "C" fn load_connection_info(pointer: *const c_void, peer: Bytes, info: Bytes) -> Status {
    // SAFETY: the agent and the strings live during the call.
    status(|| unsafe { agent(pointer).load_connection_info(&peer.text(), info.slice()) })
}

unsafe extern "C" fn connect(pointer: *const c_void, peer: Bytes) -> Status {
    // SAFETY: the agent and the strings live during the call.
    status(|| unsafe { agent(pointer).connect(&peer.text()) })
}

unsafe extern "C" fn disconnect(pointer: *const c_void, peer: Bytes) -> Status {
    // SAFETY: the agent and the strings live during the call.
    status(|| unsafe { agent(pointer).disconnect(&peer.text()) })
}

unsafe extern "C" fn prepare(
    pointer: *const c_void,
    operation: u32,
    local: *const Descriptor,
    local_count: usize,
    remote: *const Descriptor,
    remote_count: usize,
    peer: Bytes,
    transfer: *mut *const Transfer,
) -> Status {
    status(|| {
        let operation = match operation {
            0 => Operation::Read,
            1 => Operation::Write,
            _ => return Status::NOT_SUPPORTED,
        };
        // SAFETY: NIXL's lists live as long as the handle, and so does the metadata that they point to.
        let prepared = unsafe {
            let (local, remote) = (array(local, local_count), array(remote, remote_count));
            agent(pointer).prepare(operation, local, remote, &peer.text())
        };
        match prepared {
            Ok(prepared) => {
                // SAFETY: the pointer is to a variable of the shim.
                unsafe { transfer.write(Arc::into_raw(prepared)) };
                Status::SUCCESS
            }
            Err(status) => status,
        }
    })
}

unsafe extern "C" fn post(
    pointer: *const c_void,
    transfer: *const Transfer,
    notification: *const Bytes,
) -> Status {
    status(|| {
        // SAFETY: the pointer is null, or to a string that lives during the call.
        let message = unsafe { notification.as_ref().map(|bytes| bytes.slice().to_vec()) };
        // SAFETY: the shim keeps a reference to the transfer; the count is raised for this one.
        let transfer = unsafe {
            Arc::increment_strong_count(transfer);
            Arc::from_raw(transfer)
        };
        // SAFETY: the pointer is that of a live agent.
        unsafe { agent(pointer) }.post(&transfer, message)
    })
}

unsafe extern "C" fn check(pointer: *const c_void, transfer: *const Transfer) -> Status {
    status(|| {
        // SAFETY: the shim holds a reference to the transfer, which this one does not drop.
        let transfer = ManuallyDrop::new(unsafe { Arc::from_raw(transfer) });
        // SAFETY: the pointer is that of a live agent.
        unsafe { agent(pointer) }.check(&transfer)
    })
}

unsafe extern "C" fn release(transfer: *const Transfer) {
    guarded((), || {
        // SAFETY: the shim gives up its reference to the transfer.
        unsafe { Arc::from_raw(transfer) }.release();
    });
}

unsafe extern "C" fn notifications(
    pointer: *const c_void,
    into: *mut c_void,
    put: PutNotification,
) -> Status {
    status(|| {
        // SAFETY: the pointer is that of a live agent.
        let agent = unsafe { agent(pointer) };
        agent.notifications(|(sender, message)| put(into, Bytes::of(sender), Bytes::of(message)))
    })
}

unsafe extern "C" fn notify(pointer: *const c_void, peer: Bytes, message: Bytes) -> Status {
    // SAFETY: the agent and the strings live during the call.
    status(|| unsafe { agent(pointer).notify(&peer.text(), message.slice()) })
}

unsafe extern "C" fn options(into: *mut c_void, put: PutNotification) {
    guarded((), || {
        for (name, default) in OPTIONS {
            put(into, Bytes::of(name.as_bytes()), Bytes::of(default.as_bytes()));
        }
    });
}

// The sizes of the structures in `core.h`.
const _: () = assert!(size_of::<Descriptor>() == 32 && size_of::<Bytes>() == 16 && size_of::<Status>() == 4);
