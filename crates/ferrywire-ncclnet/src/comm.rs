//! Connections of a plugin: listening, connecting, sending, receiving.
//!
//! This file refuses calls that are undefined behaviour in some plugins: another `accept` or `connect` after
//! the final answer, and closing a listener whose `accept` is unfinished.
//! Invariants: the handle and the device handle of an attempt stay at one address until the attempt is over,
//! and are never freed while the plugin may still read them; a connection that is dropped without `close` is
//! leaked and logged.
//!
//! A connection may move to another thread, but only one thread may use it at a time.
//! Read next: `request.rs`, which posts requests on connections.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::fmt;
use std::marker::PhantomData;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, Ordering};

use super::abi::*;
use super::clock::Call;
use super::error::{CallError, Cause};
use super::net::Plugin;

/// Role of a plugin's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CommKind {
    /// A listener, which accepts one peer.
    Listen,
    /// A connection that sends.
    Send,
    /// A connection that receives.
    Recv,
}

/// Name of a connection in errors and logs, unique in the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CommId {
    /// Role of the connection.
    pub kind: CommKind,
    /// Number of the connection, counted over the whole process.
    pub number: u32,
}

impl fmt::Display for CommId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            CommKind::Listen => "listen",
            CommKind::Send => "send",
            CommKind::Recv => "recv",
        };
        write!(f, "{kind} comm {}", self.number)
    }
}

impl CommId {
    fn next(kind: CommKind) -> CommId {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        CommId { kind, number: NUMBER.fetch_add(1, Ordering::Relaxed) }
    }
}

/// Address of a listener, in the plugin's own format. Send it to the peer unchanged. Never compare or hash
/// it: unused bytes may hold anything.
#[derive(Clone, Copy)]
#[repr(C, align(16))]
pub struct Handle([u8; HANDLE_BYTES]);

impl Handle {
    /// The bytes of the handle, to be sent to the peer.
    pub fn bytes(&self) -> &[u8; HANDLE_BYTES] {
        &self.0
    }

    /// A handle from the bytes that the peer has sent.
    pub fn from_bytes(bytes: [u8; HANDLE_BYTES]) -> Handle {
        Handle(bytes)
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Handle(..)")
    }
}

/// State of an attempt to connect or accept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attempt {
    Fresh,
    InFlight,
    Over,
}

/// Memory of one attempt to which the plugin may keep pointers.
struct Lent {
    handle: Handle,
    device_handle: DeviceHandle,
    /// Target of the device-handle argument: null, `device_handle`, or a pointer that the plugin has set.
    device_pointer: *mut DeviceHandle,
}

/// Owns a [`Lent`] by address. Dropping it leaks the memory; only [`Lending::take_back`] frees it.
struct Lending(NonNull<Lent>);

impl Lending {
    fn new(handle: Handle, device: Option<DeviceHandle>) -> Lending {
        let device_handle = device.unwrap_or(DeviceHandle::zeroed());
        let lent = Box::into_raw(Box::new(Lent { handle, device_handle, device_pointer: ptr::null_mut() }));
        if device.is_some() {
            // SAFETY: the memory was just allocated, and no other code has the pointer.
            unsafe { (*lent).device_pointer = &raw mut (*lent).device_handle };
        }
        // SAFETY: a box is not null.
        Lending(unsafe { NonNull::new_unchecked(lent) })
    }

    fn handle(&self) -> *mut c_void {
        // SAFETY: the memory lives until `take_back`, which consumes `self`.
        unsafe { (&raw mut (*self.0.as_ptr()).handle).cast() }
    }

    fn device_argument(&self) -> Dh {
        // SAFETY: the memory lives until `take_back`, which consumes `self`.
        unsafe { &raw mut (*self.0.as_ptr()).device_pointer }
    }

    /// The device handle that the plugin has provided; `None` without one.
    fn device_handle(&self) -> Option<DeviceHandle> {
        // SAFETY: the memory is alive, and no call is running; a pointer that the plugin set is to memory of
        // its own.
        unsafe { (*self.0.as_ptr()).device_pointer.as_ref().copied() }
    }

    fn take_back(self) {
        // SAFETY: the pointer came from a box, and the plugin has given its final answer.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

type NotSync = PhantomData<Cell<()>>;

impl Plugin {
    /// Listens on a device for one peer, which needs the handle to connect. Does not block.
    pub fn listen(&self, device: i32) -> Result<(ListenComm, Handle), CallError> {
        let template = self.device_template(device)?;
        let mut handle = Handle([0; HANDLE_BYTES]);
        let mut comm = ptr::null_mut();
        let at = (&raw mut handle).cast();
        self.count_opening(Call::Listen, device)?;
        // SAFETY: the handle has its 128 bytes; the context is the plugin's own.
        let answer = self.call(Call::Listen, Some(device), || unsafe {
            self.functions().listen.call(self.context(), device, at, &mut comm)
        });
        let nothing = || self.error(Call::Listen, Some(device), None, Cause::BadAnswer("gave no listener"));
        let raw = answer.and_then(|()| NonNull::new(comm).ok_or_else(nothing));
        let raw = raw.inspect_err(|_| self.count_closed())?;
        let lending = Lending::new(Handle([0; HANDLE_BYTES]), template);
        let base = Base::open(self, CommKind::Listen, device, raw);
        Ok((ListenComm { base, lending: Some(lending), attempt: Attempt::Fresh }, handle))
    }

    /// Starts to connect to a listener. The plugin is first called by [`Connecting::poll`].
    pub fn connect(&self, device: i32, handle: &Handle) -> Connecting {
        let lending = Some(Lending::new(*handle, None));
        Connecting { plugin: self.clone(), device, lending, attempt: Attempt::Fresh, not_sync: PhantomData }
    }

    /// The device handle to pass to `accept`: type and version for a device that unpacks, `None` for any
    /// other.
    fn device_template(&self, device: i32) -> Result<Option<DeviceHandle>, CallError> {
        if self.version() < Version::V7 {
            return Ok(None);
        }
        let properties = self.properties(device)?;
        Ok(properties.unpacks().then(|| DeviceHandle {
            net_device_type: properties.device_type,
            net_device_version: properties.device_version,
            ..DeviceHandle::zeroed()
        }))
    }
}

/// State that every open connection has, whatever its role.
struct Base {
    plugin: Plugin,
    id: CommId,
    device: i32,
    raw: NonNull<c_void>,
    closed: bool,
    not_sync: NotSync,
}

impl Base {
    /// Wraps a connection that `count_opening` has counted.
    fn open(plugin: &Plugin, kind: CommKind, device: i32, raw: NonNull<c_void>) -> Base {
        let id = CommId::next(kind);
        tracing::debug!(plugin = plugin.name(), device, "{id} opened");
        Base { plugin: plugin.clone(), id, device, raw, closed: false, not_sync: PhantomData }
    }

    fn call(&self, call: Call, run: impl FnOnce() -> ResultCode) -> Result<(), CallError> {
        self.plugin.note(call, Some(self.device), Some(self.id), run)
    }

    fn error(&self, call: Call, cause: Cause) -> CallError {
        self.plugin.error(call, Some(self.device), Some(self.id), cause)
    }

    /// Closes the connection. It counts as closed whatever the plugin answers.
    fn close(&mut self, call: Call, close: Close) -> Result<(), CallError> {
        self.closed = true;
        let raw = self.raw.as_ptr();
        // SAFETY: the connection is open, and this is its last use.
        let answer = self.call(call, || unsafe { close(raw) });
        self.plugin.count_closed();
        answer
    }
}

impl Drop for Base {
    fn drop(&mut self) {
        if !self.closed {
            let plugin = self.plugin.name();
            tracing::warn!(
                plugin,
                device = self.device,
                "{} stays open: it was dropped before it was closed",
                self.id
            );
        }
    }
}

impl fmt::Debug for Base {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} on device {}", self.id, self.plugin.name(), self.device)
    }
}

/// A listener of a plugin, for one peer.
#[derive(Debug)]
pub struct ListenComm {
    base: Base,
    lending: Option<Lending>,
    attempt: Attempt,
}

// SAFETY: a plugin's connection is tied to no thread; it is not `Sync`, so only one thread uses it at a time.
unsafe impl Send for ListenComm {}

impl ListenComm {
    /// Name of the listener.
    pub fn id(&self) -> CommId {
        self.base.id
    }

    /// Accepts the listener's peer; `None` means to call again, possibly for seconds.
    ///
    /// Some plugins block in `accept`, so call it on a thread of its own. After a connection or an error the
    /// attempt is over, and a further call returns [`Cause::Misuse`].
    pub fn accept(&mut self) -> Result<Option<RecvComm>, CallError> {
        let Some(lending) = self.lending.as_ref().filter(|_| self.attempt != Attempt::Over) else {
            return Err(self.base.error(
                Call::Accept,
                Cause::Misuse("accept was called after it had returned a connection or an error"),
            ));
        };
        let (mut comm, base) = (ptr::null_mut(), &self.base);
        self.attempt = Attempt::InFlight;
        // The listener is already counted as open, so the plugin cannot be finalized during this call.
        let accept = base.plugin.functions().accept;
        let (raw, device) = (base.raw.as_ptr(), lending.device_argument());
        // SAFETY: the listener is open, and the device argument is the same in each call.
        let answer = base.call(Call::Accept, || unsafe { accept.call(raw, &mut comm, device) });
        if answer.is_ok() && comm.is_null() {
            return Ok(None);
        }
        self.attempt = Attempt::Over;
        answer?;
        let Some(raw) = NonNull::new(comm) else { return Ok(None) };
        let device_handle = lending.device_handle();
        base.plugin.count_opening(Call::Accept, base.device)?;
        let base = Base::open(&base.plugin, CommKind::Recv, base.device, raw);
        Ok(Some(RecvComm(Comm { base, device_handle, lending: self.lending.take() })))
    }

    /// Whether [`ListenComm::accept`] was called and has not given its final answer.
    pub fn is_accepting(&self) -> bool {
        self.attempt == Attempt::InFlight
    }

    /// Closes the listener. While an `accept` is unfinished, returns [`Cause::Misuse`] and leaves the
    /// listener open for good: a thread of the plugin may be waiting in it.
    pub fn close(mut self) -> Result<(), CallError> {
        if self.is_accepting() {
            let why = "its accept is unfinished, so the listener stays open until the process ends";
            self.base.closed = true;
            return Err(self.base.error(Call::CloseListen, Cause::Misuse(why)));
        }
        let close = self.base.plugin.functions().close_listen;
        let outcome = self.base.close(Call::CloseListen, close);
        if let Some(lending) = self.lending.take() {
            lending.take_back();
        }
        outcome
    }
}

/// An attempt to connect. Dropping it abandons the attempt, at any moment.
#[derive(Debug)]
pub struct Connecting {
    plugin: Plugin,
    device: i32,
    lending: Option<Lending>,
    attempt: Attempt,
    not_sync: NotSync,
}

// SAFETY: an attempt is tied to no thread; it is not `Sync`, so only one thread uses it at a time.
unsafe impl Send for Connecting {}

impl Connecting {
    /// Continues to connect; `None` means to call again. After a connection or an error the attempt is over,
    /// and a further call returns [`Cause::Misuse`].
    pub fn poll(&mut self) -> Result<Option<SendComm>, CallError> {
        let Some(lending) = self.lending.as_ref().filter(|_| self.attempt != Attempt::Over) else {
            let cause = Cause::Misuse("connect was called after it had returned a connection or an error");
            return Err(self.plugin.error(Call::Connect, Some(self.device), None, cause));
        };
        let (mut comm, plugin) = (ptr::null_mut(), &self.plugin);
        if self.attempt == Attempt::Fresh {
            plugin.count_opening(Call::Connect, self.device)?;
        }
        self.attempt = Attempt::InFlight;
        let connect = plugin.functions().connect;
        let (handle, device) = (lending.handle(), lending.device_argument());
        // SAFETY: handle and device argument are the same in each call; configuration and context are the
        // plugin's own.
        let answer = plugin.call(Call::Connect, Some(self.device), || unsafe {
            connect.call(plugin.context(), self.device, plugin.config(), handle, &mut comm, device)
        });
        if answer.is_ok() && comm.is_null() {
            return Ok(None);
        }
        self.attempt = Attempt::Over;
        answer.inspect_err(|_| plugin.count_closed())?;
        let Some(raw) = NonNull::new(comm) else { return Ok(None) };
        let device_handle = lending.device_handle();
        let base = Base::open(plugin, CommKind::Send, self.device, raw);
        Ok(Some(SendComm(Comm { base, device_handle, lending: self.lending.take() })))
    }
}

impl Drop for Connecting {
    fn drop(&mut self) {
        match (self.lending.take(), self.attempt) {
            (Some(lending), Attempt::Fresh) => lending.take_back(),
            (Some(_), Attempt::InFlight) => {
                // The connection counts as open from now on: a thread of the plugin may still be in it.
                tracing::debug!(plugin = self.plugin.name(), "connect abandoned: its handle is leaked");
            }
            // After an error a plugin should not read the handle again. Leaking 200 bytes is safer than
            // relying on it.
            _ => {}
        }
    }
}

/// State and methods that sending and receiving connections share.
#[derive(Debug)]
pub struct Comm {
    base: Base,
    device_handle: Option<DeviceHandle>,
    lending: Option<Lending>,
}

impl fmt::Debug for Lending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Lending(..)")
    }
}

/// A sending connection.
#[derive(Debug)]
pub struct SendComm(Comm);

/// A receiving connection.
#[derive(Debug)]
pub struct RecvComm(Comm);

// SAFETY: a plugin's connection is tied to no thread; it is not `Sync`, so only one thread uses it at a time.
unsafe impl Send for SendComm {}
// SAFETY: a plugin's connection is tied to no thread; it is not `Sync`, so only one thread uses it at a time.
unsafe impl Send for RecvComm {}

impl Comm {
    /// The connection's plugin.
    pub fn plugin(&self) -> &Plugin {
        &self.base.plugin
    }

    /// Name of the connection in errors and logs.
    pub fn id(&self) -> CommId {
        self.base.id
    }

    /// Number of the plugin's device that carries the connection.
    pub fn device(&self) -> i32 {
        self.base.device
    }

    /// The device handle that the plugin provided, which describes the GPU's part; `None` without one.
    pub fn device_handle(&self) -> Option<DeviceHandle> {
        self.device_handle
    }

    pub(super) fn raw(&self) -> *mut c_void {
        self.base.raw.as_ptr()
    }

    pub(super) fn call(&self, call: Call, run: impl FnOnce() -> ResultCode) -> Result<(), CallError> {
        self.base.call(call, run)
    }

    /// The error of a call on this connection.
    pub fn error(&self, call: Call, cause: Cause) -> CallError {
        self.base.error(call, cause)
    }

    fn close(mut self, call: Call, close: Close) -> Result<(), CallError> {
        let outcome = self.base.close(call, close);
        if let Some(lending) = self.lending.take() {
            lending.take_back();
        }
        outcome
    }
}

impl std::ops::Deref for SendComm {
    type Target = Comm;

    fn deref(&self) -> &Comm {
        &self.0
    }
}

impl std::ops::Deref for RecvComm {
    type Target = Comm;

    fn deref(&self) -> &Comm {
        &self.0
    }
}

impl SendComm {
    /// Closes the sending connection. Sent data may not have arrived; requests in flight are lost.
    pub fn close(self) -> Result<(), CallError> {
        let close = self.plugin().functions().close_send;
        self.0.close(Call::CloseSend, close)
    }
}

impl RecvComm {
    /// Closes the receiving connection. Requests in flight are lost.
    pub fn close(self) -> Result<(), CallError> {
        let close = self.plugin().functions().close_recv;
        self.0.close(Call::CloseRecv, close)
    }
}

/// The profiler callback for plugins of v10 and later: it records nothing and always succeeds.
pub(super) unsafe extern "C" fn no_profiler(
    e_handle: PP,
    kind: c_int,
    _p_handle: P,
    _plugin_id: i64,
    _ext_data: P,
) -> ResultCode {
    if kind == PROFILE_START && !e_handle.is_null() {
        // SAFETY: for a start event, `e_handle` points at the place for the event's handle.
        unsafe { *e_handle = ptr::null_mut() };
    }
    ResultCode::SUCCESS
}
