//! Drives the plugin by its raw table without a layer in between, so that its rules are visible.

use std::ffi::{CStr, CString, c_char, c_int, c_ulong, c_void};
use std::ptr;
use std::sync::Mutex;

use ferrywire_ncclnet::abi::{DeviceHandle, Log, NetV7, PTR_CUDA, PTR_HOST, PropertiesV7, ResultCode};

/// Success, as a number.
pub const OK: i32 = 0;

static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// The logger's arguments for the format `"%s"`: on the platforms of these tests they are passed as those of a function
/// that is not variadic.
unsafe extern "C" fn log(
    level: c_int,
    _flags: c_ulong,
    _file: *const c_char,
    _line: c_int,
    format: *const c_char,
    text: *const c_char,
) {
    // SAFETY: the plugin passes strings.
    let (format, text) = unsafe { (CStr::from_ptr(format), CStr::from_ptr(text)) };
    assert_eq!(format, c"%s", "text is never the format");
    let line = format!("{level}: {}", text.to_string_lossy());
    LINES.lock().unwrap().push(line);
}

/// How many lines the plugin has logged with this text.
pub fn logged(text: &str) -> usize {
    LINES.lock().unwrap().iter().filter(|line| line.contains(text)).count()
}

/// The last line the plugin has logged with this text.
pub fn last_logged(text: &str) -> String {
    let lines = LINES.lock().unwrap();
    lines.iter().rev().find(|line| line.contains(text)).cloned().unwrap_or_default()
}

/// The loaded plugin.
pub struct Plugin {
    table: NetV7,
}

// SAFETY: the functions may be called from any thread, on different comms.
unsafe impl Sync for Plugin {}

/// A handle of 128 bytes, aligned for the pointer that it may hold.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
pub struct Handle(pub [u8; 128]);

/// A pointer from the plugin.
pub type Ptr = *mut c_void;

/// The answer of a `test`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tested {
    pub code: i32,
    pub done: i32,
    pub size: i32,
}

/// The value of `sizes` before a `test`.
pub const SENTINEL: i32 = -7777;

/// Not done yet, no error.
pub const NOT_YET: Tested = Tested { code: OK, done: 0, size: SENTINEL };
/// Done.
pub const DONE: Tested = Tested { code: OK, done: 1, size: SENTINEL };
/// Refused.
pub const REFUSED: Tested = Tested { code: 3, done: 0, size: SENTINEL };
/// Failed.
pub const FAILED: Tested = Tested { code: 2, done: 0, size: SENTINEL };

impl Plugin {
    /// Loads the library that was built with these tests, without `init`.
    pub fn load() -> Plugin {
        let path = std::env::current_exe().unwrap().with_file_name("libferrywire_tcpx_sim.so");
        let name = CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: the library's initialisers do nothing.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!library.is_null(), "{path:?} cannot be loaded");
        // SAFETY: a live library and a string.
        let table = unsafe { libc::dlsym(library, c"ncclNetPlugin_v7".as_ptr()) };
        assert!(!table.is_null());
        // SAFETY: the symbol is a table of version 7.
        Plugin { table: unsafe { table.cast::<NetV7>().read() } }
    }

    /// Loads and initialises the plugin.
    pub fn start() -> &'static Plugin {
        let plugin: &'static Plugin = Box::leak(Box::new(Plugin::load()));
        assert_eq!(plugin.init(), OK);
        plugin
    }

    /// The table.
    pub fn table(&self) -> &NetV7 {
        &self.table
    }

    pub fn init(&self) -> i32 {
        // SAFETY: the two types differ only in being variadic; see `log`.
        let log: Log = unsafe { std::mem::transmute(log as *const c_void) };
        // SAFETY: a logger of the plugin's type.
        unsafe { self.table.init.unwrap()(log) }.0
    }

    pub fn devices(&self) -> i32 {
        let mut count = -1;
        // SAFETY: room for a number.
        let code = unsafe { self.table.devices.unwrap()(&mut count) };
        assert_eq!(code, ResultCode::SUCCESS);
        count
    }

    pub fn properties(&self, device: i32) -> Result<PropertiesV7, i32> {
        let mut properties = PropertiesV7::zeroed();
        // SAFETY: room for properties of this version.
        let code = unsafe { self.table.get_properties.unwrap()(device, &mut properties) };
        if code.is_success() { Ok(properties) } else { Err(code.0) }
    }

    pub fn listen(&self, device: i32, handle: &mut Handle) -> Result<Ptr, i32> {
        let mut comm = ptr::null_mut();
        let handle = handle.0.as_mut_ptr().cast();
        // SAFETY: a handle, and room for a pointer.
        let code = unsafe { self.table.listen.unwrap()(device, handle, &mut comm) };
        if code.is_success() { Ok(comm) } else { Err(code.0) }
    }

    /// One call of `connect`; NULL while it is not ready.
    pub fn connect(&self, device: i32, handle: &mut Handle) -> Result<Ptr, i32> {
        let (mut comm, mut device_handle) = (ptr::null_mut(), ptr::null_mut());
        let handle = handle.0.as_mut_ptr().cast();
        // SAFETY: a handle, and room for pointers.
        let code = unsafe { self.table.connect.unwrap()(device, handle, &mut comm, &mut device_handle) };
        assert!(device_handle.is_null(), "connect leaves it alone");
        if code.is_success() { Ok(comm) } else { Err(code.0) }
    }

    /// One call of `accept`; NULL while it is not ready.
    pub fn accept(&self, listen: Ptr, device_handle: Option<&mut DeviceHandle>) -> Result<Ptr, i32> {
        let mut comm = ptr::null_mut();
        let mut device_handle: *mut DeviceHandle = device_handle.map_or(ptr::null_mut(), ptr::from_mut);
        // SAFETY: a listen comm, and room for pointers.
        let code = unsafe { self.table.accept.unwrap()(listen, &mut comm, &mut device_handle) };
        if code.is_success() { Ok(comm) } else { Err(code.0) }
    }

    pub fn close_listen(&self, listen: Ptr) {
        // SAFETY: a listen comm.
        assert_eq!(unsafe { self.table.close_listen.unwrap()(listen) }.0, OK);
    }

    /// Listens, connects and accepts on device 0.
    pub fn pair(&'static self) -> Pair {
        self.pair_with(true)
    }

    /// Listens, connects and accepts on device 0, with or without a device handle.
    pub fn pair_with(&'static self, with_device_handle: bool) -> Pair {
        let mut handle = Handle([0; 128]);
        let listen = self.listen(0, &mut handle).unwrap();
        self.connect_and_accept(listen, handle, with_device_handle)
    }

    /// Connects and accepts through a listener.
    pub fn pair_over(&'static self, listen: Ptr, handle: Handle) -> Pair {
        self.connect_and_accept(listen, handle, true)
    }

    fn connect_and_accept(&'static self, listen: Ptr, mut handle: Handle, with_device_handle: bool) -> Pair {
        let mut device_handle = DeviceHandle::zeroed();
        let (mut send, mut recv): (Ptr, Ptr) = (ptr::null_mut(), ptr::null_mut());
        while send.is_null() || recv.is_null() {
            if send.is_null() {
                send = self.connect(0, &mut handle).unwrap();
            }
            if recv.is_null() {
                recv = self.accept(listen, with_device_handle.then_some(&mut device_handle)).unwrap();
            }
            std::thread::yield_now();
        }
        Pair { send: Comm::new(self, send, true), recv: Comm::new(self, recv, false), listen, device_handle }
    }
}

// SAFETY: pointers of the plugin; the plugin checks that one thread at a time is inside a comm.
unsafe impl Send for Pair {}

/// Both ends of a connection.
pub struct Pair {
    pub send: Comm,
    pub recv: Comm,
    pub listen: Ptr,
    pub device_handle: DeviceHandle,
}

impl Pair {
    /// Tests both until the receive and the send are done.
    pub fn both_done(&self, send: Ptr, recv: Ptr) {
        let (mut sent, mut received) = (false, false);
        while !sent || !received {
            sent = sent || self.send.test(send).is_done();
            received = received || self.recv.test(recv).is_done();
            std::thread::yield_now();
        }
    }

    /// Sends the bytes and receives them; returns the request of the receive, not consumed.
    pub fn transfer(&self, source: &Memory, target: &Memory, bytes: usize) -> Ptr {
        let recv = self.recv.irecv(target, bytes).unwrap();
        let send = self.send.isend(source, bytes).unwrap();
        self.both_done(send, recv);
        recv
    }
}

impl Tested {
    /// Whether the request is done; an error fails the test.
    pub fn is_done(self) -> bool {
        assert_eq!(self.code, OK);
        self.done == 1
    }
}

/// A comm.
#[derive(Clone, Copy)]
pub struct Comm {
    plugin: &'static Plugin,
    pub pointer: Ptr,
    sends: bool,
}

// SAFETY: a pointer to a comm; the plugin checks that one thread at a time is inside.
unsafe impl Send for Comm {}
// SAFETY: as above.
unsafe impl Sync for Comm {}

/// Registered memory; host or GPU.
pub struct Memory {
    pub address: u64,
    pub handle: Ptr,
    host: Option<Box<[u8]>>,
}

impl Memory {
    pub fn bytes(&self) -> &[u8] {
        self.host.as_ref().expect("host memory")
    }
}

impl Comm {
    pub fn new(plugin: &'static Plugin, pointer: Ptr, sends: bool) -> Comm {
        Comm { plugin, pointer, sends }
    }

    /// Registers host memory with these bytes.
    pub fn host(&self, bytes: impl Into<Box<[u8]>>) -> Memory {
        let mut bytes = bytes.into();
        let address = bytes.as_mut_ptr() as u64;
        let handle = self.register(address, bytes.len(), PTR_HOST).unwrap();
        Memory { address, handle, host: Some(bytes) }
    }

    /// Registers GPU memory.
    pub fn gpu(&self, address: u64, len: usize) -> Memory {
        Memory { address, handle: self.register(address, len, PTR_CUDA).unwrap(), host: None }
    }

    pub fn register(&self, address: u64, len: usize, kind: i32) -> Result<Ptr, i32> {
        let mut handle = ptr::null_mut();
        let register = self.plugin.table.reg_mr.unwrap();
        // SAFETY: a comm, and room for a pointer.
        let code = unsafe { register(self.pointer, address as Ptr, len as c_int, kind, &mut handle) };
        if code.is_success() { Ok(handle) } else { Err(code.0) }
    }

    pub fn deregister(&self, handle: Ptr) -> i32 {
        // SAFETY: a comm, and a handle or NULL.
        unsafe { self.plugin.table.dereg_mr.unwrap()(self.pointer, handle) }.0
    }

    pub fn isend(&self, memory: &Memory, bytes: usize) -> Result<Ptr, i32> {
        self.isend_raw(memory.address, bytes as i32, memory.handle)
    }

    pub fn isend_raw(&self, address: u64, bytes: i32, handle: Ptr) -> Result<Ptr, i32> {
        let mut request = ptr::null_mut();
        let isend = self.plugin.table.isend.unwrap();
        // SAFETY: the tests keep the memory until the request is done.
        let code = unsafe { isend(self.pointer, address as Ptr, bytes, 7, handle, &mut request) };
        if code.is_success() { Ok(request) } else { Err(code.0) }
    }

    pub fn irecv(&self, memory: &Memory, bytes: usize) -> Result<Ptr, i32> {
        self.irecv_n(1, memory, bytes)
    }

    pub fn irecv_n(&self, n: i32, memory: &Memory, bytes: usize) -> Result<Ptr, i32> {
        let (mut data, mut sizes, mut tags) = ([memory.address as Ptr; 2], [bytes as c_int; 2], [7; 2]);
        let (mut handles, mut request) = ([memory.handle; 2], ptr::null_mut());
        let irecv = self.plugin.table.irecv.unwrap();
        // SAFETY: the tests keep the memory until the request is done; the arrays have two elements.
        let code = unsafe {
            irecv(
                self.pointer,
                n,
                data.as_mut_ptr(),
                sizes.as_mut_ptr(),
                tags.as_mut_ptr(),
                handles.as_mut_ptr(),
                &mut request,
            )
        };
        if code.is_success() { Ok(request) } else { Err(code.0) }
    }

    pub fn test(&self, request: Ptr) -> Tested {
        let (mut done, mut size) = (-1, SENTINEL);
        // SAFETY: a request, and room for numbers.
        let code = unsafe { self.plugin.table.test.unwrap()(request, &mut done, &mut size) };
        Tested { code: code.0, done, size }
    }

    /// Tests a request until it is done or fails.
    pub fn finish(&self, request: Ptr) -> Tested {
        loop {
            let tested = self.test(request);
            if tested != NOT_YET {
                return tested;
            }
            std::thread::yield_now();
        }
    }

    pub fn consumed(&self, request: Ptr) -> i32 {
        self.consumed_n(1, request)
    }

    pub fn consumed_n(&self, n: i32, request: Ptr) -> i32 {
        // SAFETY: a comm and a request.
        unsafe { self.plugin.table.irecv_consumed.unwrap()(self.pointer, n, request) }.0
    }

    /// The size that `iflush` returns for a finished receive.
    pub fn flushed_size(&self, request: Ptr) -> i32 {
        let (mut size, mut request) = (SENTINEL, request);
        let iflush = self.plugin.table.iflush.unwrap();
        // SAFETY: a comm, a request, and room for a number.
        let code =
            unsafe { iflush(self.pointer, 1, ptr::null_mut(), &mut size, ptr::null_mut(), &mut request) };
        assert_eq!(code.0, OK);
        size
    }

    pub fn close(&self) {
        let table = &self.plugin.table;
        let close = if self.sends { table.close_send } else { table.close_recv };
        // SAFETY: a comm.
        assert_eq!(unsafe { close.unwrap()(self.pointer) }.0, OK);
    }
}

/// Bytes that depend on their position.
pub fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|k| (k as u8).wrapping_mul(31) ^ (k >> 8) as u8 ^ seed).collect()
}
