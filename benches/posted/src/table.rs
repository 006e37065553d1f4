//! The plugin's functions, called as they are.
//!
//! Tables of v4 to v8 are known; the newest that the library has is used.

use std::ffi::{CStr, c_char, c_int, c_ulong, c_void};
use std::io;
use std::ptr::null_mut;
use std::thread;
use std::time::Duration;

use ferrywire_ncclnet::abi::{
    AcceptV4, AcceptV7, ConnectV4, ConnectV7, DeviceHandle, HANDLE_BYTES, InitV4, IrecvConsumed, IrecvV4,
    IrecvV5, IsendV4, IsendV5, ListenV4, NetV4, NetV5, NetV6, NetV7, NetV8, PointerType, RegMrV4, RegMrV8,
    ResultCode, Test,
};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

/// The handle that a plugin passes to the other end, for `connect`.
pub type Handle = [u8; HANDLE_BYTES];

/// Pause between two attempts to connect or accept.
const RETRY: Duration = Duration::from_millis(1);

/// The functions of one table that a bare loop needs.
#[derive(Clone, Copy)]
pub struct Net {
    pub version: u32,
    listen: ListenV4,
    connect: Connect,
    accept: Accept,
    reg_mr: RegMr,
    isend: Isend,
    irecv: Irecv,
    test: Test,
    consumed: Option<IrecvConsumed>,
}

#[derive(Clone, Copy)]
enum Connect {
    V4(ConnectV4),
    V7(ConnectV7),
}

#[derive(Clone, Copy)]
enum Accept {
    V4(AcceptV4),
    V7(AcceptV7),
}

#[derive(Clone, Copy)]
enum RegMr {
    V4(RegMrV4),
    V8(RegMrV8),
}

#[derive(Clone, Copy)]
enum Isend {
    V4(IsendV4),
    V5(IsendV5),
}

#[derive(Clone, Copy)]
enum Irecv {
    V4(IrecvV4),
    V5(IrecvV5),
}

/// A connection, or a request of one: the plugin's own pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opaque(pub *mut c_void);

// SAFETY: the pointer is only passed to the plugin, which is called by one thread at a time for each
// connection.
unsafe impl Send for Opaque {}

macro_rules! taken {
    ($table:ty, $found:expr, $version:literal, $connect:path, $accept:path, $reg_mr:path, $isend:path, $irecv:path,
     $consumed:expr) => {{
        // SAFETY: the symbol of this version points to a table of this version.
        let table = unsafe { $found.cast::<$table>().read() };
        let consumed: fn(&$table) -> Option<IrecvConsumed> = $consumed;
        let net = (|| {
            Some(Net {
                version: $version,
                listen: table.listen?,
                connect: $connect(table.connect?),
                accept: $accept(table.accept?),
                reg_mr: $reg_mr(table.reg_mr?),
                isend: $isend(table.isend?),
                irecv: $irecv(table.irecv?),
                test: table.test?,
                consumed: consumed(&table),
            })
        })();
        (net, table.init)
    }};
}

impl Net {
    /// Loads a plugin and initializes it.
    pub fn load(path: &str) -> io::Result<Net> {
        let failed = |error: libloading::Error| io::Error::other(format!("{path}: {error}"));
        // SAFETY: the user named the file, whose code runs here.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.map_err(failed)?;
        let find = |symbol: &CStr| -> Option<*const c_void> {
            // SAFETY: only the symbol's address is taken.
            let found = unsafe { library.get::<*const c_void>(symbol.to_bytes_with_nul()) };
            found.ok().map(|symbol| symbol.as_raw_ptr().cast_const())
        };
        let (net, init): (Option<Net>, Option<InitV4>) = if let Some(at) = find(c"ncclNetPlugin_v8") {
            taken!(NetV8, at, 8, Connect::V7, Accept::V7, RegMr::V8, Isend::V5, Irecv::V5, |table| table
                .irecv_consumed)
        } else if let Some(at) = find(c"ncclNetPlugin_v7") {
            taken!(NetV7, at, 7, Connect::V7, Accept::V7, RegMr::V4, Isend::V5, Irecv::V5, |table| table
                .irecv_consumed)
        } else if let Some(at) = find(c"ncclNetPlugin_v6") {
            taken!(NetV6, at, 6, Connect::V4, Accept::V4, RegMr::V4, Isend::V5, Irecv::V5, |_| None)
        } else if let Some(at) = find(c"ncclNetPlugin_v5") {
            taken!(NetV5, at, 5, Connect::V4, Accept::V4, RegMr::V4, Isend::V5, Irecv::V5, |_| None)
        } else if let Some(at) = find(c"ncclNetPlugin_v4") {
            taken!(NetV4, at, 4, Connect::V4, Accept::V4, RegMr::V4, Isend::V4, Irecv::V4, |_| None)
        } else {
            return Err(io::Error::other(format!("{path} exports no plugin interface of version 4 to 8")));
        };
        // From now on the plugin's threads may run in the library, so it is never unloaded.
        std::mem::forget(library);
        let (Some(net), Some(init)) = (net, init) else {
            return Err(io::Error::other(format!("{path}: the plugin's table lacks a function")));
        };
        // SAFETY: `init` is called once, with a logger that accepts any arguments.
        check("init", unsafe { init(Some(silent())) })?;
        Ok(net)
    }

    /// Listens on a device. Returns the listener, and the handle for the other end.
    pub fn listen(&self, device: i32) -> io::Result<(Opaque, Handle)> {
        let (mut handle, mut comm) = ([0; HANDLE_BYTES], null_mut());
        // SAFETY: the handle has its 128 bytes.
        check("listen", unsafe { (self.listen)(device, handle.as_mut_ptr().cast(), &mut comm) })?;
        Ok((Opaque(comm), handle))
    }

    /// Waits for the peer to connect.
    pub fn accept(&self, listener: Opaque) -> io::Result<Opaque> {
        let mut comm = null_mut();
        // A plugin may keep the handles for as long as the connection lives.
        let device: &'static mut *mut DeviceHandle =
            Box::leak(Box::new(Box::leak(Box::new(DeviceHandle::zeroed()))));
        loop {
            // SAFETY: the listener is open, and the pointers are the same in every call.
            let code = unsafe {
                match self.accept {
                    Accept::V4(accept) => accept(listener.0, &mut comm),
                    Accept::V7(accept) => accept(listener.0, &mut comm, device),
                }
            };
            check("accept", code)?;
            if !comm.is_null() {
                return Ok(Opaque(comm));
            }
            thread::sleep(RETRY);
        }
    }

    /// Connects to the listener with this handle.
    pub fn connect(&self, device: i32, handle: Handle) -> io::Result<Opaque> {
        let mut comm = null_mut();
        let handle = Box::leak(Box::new(handle)).as_mut_ptr().cast();
        let into: &'static mut *mut DeviceHandle = Box::leak(Box::new(null_mut()));
        loop {
            // SAFETY: the handle has its 128 bytes and is the same memory in every call.
            let code = unsafe {
                match self.connect {
                    Connect::V4(connect) => connect(device, handle, &mut comm),
                    Connect::V7(connect) => connect(device, handle, &mut comm, into),
                }
            };
            check("connect", code)?;
            if !comm.is_null() {
                return Ok(Opaque(comm));
            }
            thread::sleep(RETRY);
        }
    }

    /// Registers host memory for a connection.
    pub fn register(&self, comm: Opaque, memory: &mut [u8]) -> io::Result<Opaque> {
        let (base, bytes, kind) = (memory.as_mut_ptr().cast(), memory.len(), PointerType::Host as c_int);
        let mut handle = null_mut();
        // SAFETY: the memory is never unmapped.
        let code = unsafe {
            match self.reg_mr {
                RegMr::V4(reg) => {
                    reg(comm.0, base, c_int::try_from(bytes).unwrap_or(c_int::MAX), kind, &mut handle)
                }
                RegMr::V8(reg) => reg(comm.0, base, bytes, kind, &mut handle),
            }
        };
        check("regMr", code).map(|()| Opaque(handle))
    }

    /// Posts a send. Returns `None` if the plugin has no room now.
    ///
    /// # Safety
    /// The bytes lie in registered memory and stay as they are until the request is done.
    #[inline]
    pub unsafe fn isend(
        &self,
        comm: Opaque,
        data: *mut u8,
        bytes: usize,
        memory: Opaque,
    ) -> io::Result<Option<Opaque>> {
        let (data, bytes, mut request) = (data.cast(), bytes as c_int, null_mut());
        // SAFETY: promised by the caller of this function.
        let code = unsafe {
            match self.isend {
                Isend::V4(isend) => isend(comm.0, data, bytes, memory.0, &mut request),
                Isend::V5(isend) => isend(comm.0, data, bytes, 0, memory.0, &mut request),
            }
        };
        posted("isend", code, request)
    }

    /// Posts a receive. Returns `None` if the plugin has no room now.
    ///
    /// # Safety
    /// As [`Net::isend`]; nothing else uses the memory meanwhile.
    #[inline]
    pub unsafe fn irecv(
        &self,
        comm: Opaque,
        data: *mut u8,
        bytes: usize,
        memory: Opaque,
    ) -> io::Result<Option<Opaque>> {
        let (mut data, mut bytes, mut memory): (*mut c_void, _, _) = (data.cast(), bytes as c_int, memory.0);
        let (mut tag, mut request) = (0, null_mut());
        // SAFETY: promised by the caller; each array has one entry.
        let code = unsafe {
            match self.irecv {
                Irecv::V4(irecv) => irecv(comm.0, data, bytes, memory, &mut request),
                Irecv::V5(irecv) => {
                    irecv(comm.0, 1, &mut data, &mut bytes, &mut tag, &mut memory, &mut request)
                }
            }
        };
        posted("irecv", code, request)
    }

    /// Whether the oldest request is done.
    ///
    /// # Safety
    /// The request is its connection's oldest, and was not done before.
    #[inline]
    pub unsafe fn test(&self, request: Opaque) -> io::Result<bool> {
        let (mut done, mut sizes) = (0, [0; 8]);
        // SAFETY: promised by the caller of this function.
        check("test", unsafe { (self.test)(request.0, &mut done, sizes.as_mut_ptr()) })?;
        Ok(done != 0)
    }

    /// Returns a finished receive to the plugin, if its interface has a function for that.
    ///
    /// # Safety
    /// The request is a finished receive of this connection, the oldest that was not returned.
    #[inline]
    pub unsafe fn consumed(&self, comm: Opaque, request: Opaque) -> io::Result<()> {
        match self.consumed {
            // SAFETY: promised by the caller of this function.
            Some(consumed) => check("irecvConsumed", unsafe { consumed(comm.0, 1, request.0) }),
            None => Ok(()),
        }
    }
}

fn check(call: &str, code: ResultCode) -> io::Result<()> {
    if code == ResultCode::SUCCESS {
        Ok(())
    } else {
        Err(io::Error::other(format!("the plugin's {call} returned {code}")))
    }
}

fn posted(call: &str, code: ResultCode, request: *mut c_void) -> io::Result<Option<Opaque>> {
    check(call, code).map(|()| (!request.is_null()).then_some(Opaque(request)))
}

/// Returns a logger that logs nothing.
fn silent() -> unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, ...) {
    unsafe extern "C" fn quiet(_: c_int, _: c_ulong, _: *const c_char, _: c_int, _: *const c_char) {}
    let quiet: unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char) = quiet;
    // SAFETY: on x86-64 a caller passes the fixed arguments of a variadic function as those of any other, and
    // removes all of them from the stack; none of them is read.
    unsafe { std::mem::transmute(quiet) }
}
