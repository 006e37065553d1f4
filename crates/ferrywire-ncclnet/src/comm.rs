//! Connections of a plugin: listening, being made, sending, receiving.
//!
//! What is undefined behaviour in some plugins is refused here: one more `accept` or `connect` after the
//! last answer, closing a listener whose `accept` is unfinished. Invariants: the handle and the device
//! handle of an attempt stay at one address until it is over, and are never freed while the plugin may
//! still look at them; a connection that is dropped without `close` is leaked, and said so.
//!
//! A connection may move to another thread, and is used by one at a time.
//! Read next: `request.rs`, what is done with them.

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

/// Kind of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CommKind {
    /// Waits for one peer.
    Listen,
    /// Sends.
    Send,
    /// Receives.
    Recv,
}

/// A connection's name in errors and logs; unique in the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CommId {
    /// What it does.
    pub kind: CommKind,
    /// Counts all connections of the process.
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

/// The address of a listener, in the plugin's own form. To be sent to the peer as it is; never compared,
/// never hashed: parts of it may be whatever was in memory.
#[derive(Clone, Copy)]
#[repr(C, align(16))]
pub struct Handle([u8; HANDLE_BYTES]);

impl Handle {
    /// Its bytes, for the peer.
    pub fn bytes(&self) -> &[u8; HANDLE_BYTES] {
        &self.0
    }

    /// From the peer's bytes.
    pub fn from_bytes(bytes: [u8; HANDLE_BYTES]) -> Handle {
        Handle(bytes)
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Handle(..)")
    }
}

/// Where an attempt stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attempt {
    Fresh,
    UnderWay,
    Over,
}

/// The memory of one attempt that the plugin may keep a pointer to.
struct Lent {
    handle: Handle,
    device_handle: DeviceHandle,
    /// What the device-handle argument points at: null, or `device_handle`, or what the plugin set.
    device_pointer: *mut DeviceHandle,
}

/// Owns a [`Lent`] by address. Dropping it leaks: only [`Lending::take_back`] frees.
struct Lending(NonNull<Lent>);

impl Lending {
    fn new(handle: Handle, device: Option<DeviceHandle>) -> Lending {
        let device_handle = device.unwrap_or(DeviceHandle::zeroed());
        let lent = Box::into_raw(Box::new(Lent { handle, device_handle, device_pointer: ptr::null_mut() }));
        if device.is_some() {
            // SAFETY: just made, and nobody else's.
            unsafe { (*lent).device_pointer = &raw mut (*lent).device_handle };
        }
        // SAFETY: a box is not null.
        Lending(unsafe { NonNull::new_unchecked(lent) })
    }

    fn handle(&self) -> *mut c_void {
        // SAFETY: it is alive until take_back, which consumes.
        unsafe { (&raw mut (*self.0.as_ptr()).handle).cast() }
    }

    fn device_argument(&self) -> Dh {
        // SAFETY: as above.
        unsafe { &raw mut (*self.0.as_ptr()).device_pointer }
    }

    /// What the plugin has said, if it has.
    fn device_handle(&self) -> Option<DeviceHandle> {
        // SAFETY: alive, and not being called; a pointer that the plugin set is to one of its own.
        unsafe { (*self.0.as_ptr()).device_pointer.as_ref().copied() }
    }

    fn take_back(self) {
        // SAFETY: it came from a box, and the plugin has answered for the last time.
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

    /// Begins to connect to a listener. Nothing happens before the first [`Connecting::poll`].
    pub fn connect(&self, device: i32, handle: &Handle) -> Connecting {
        let lending = Some(Lending::new(*handle, None));
        Connecting { plugin: self.clone(), device, lending, attempt: Attempt::Fresh, not_sync: PhantomData }
    }

    /// What `accept` is given: nothing, but for devices that unpack a handle with type and version set.
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

/// What every open connection has.
struct Base {
    plugin: Plugin,
    id: CommId,
    device: i32,
    raw: NonNull<c_void>,
    closed: bool,
    not_sync: NotSync,
}

impl Base {
    /// One that was counted.
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

    /// Closes once, whatever the plugin says to it.
    fn close(&mut self, call: Call, close: Close) -> Result<(), CallError> {
        self.closed = true;
        let raw = self.raw.as_ptr();
        // SAFETY: the connection is open, and nobody uses it after this.
        let answer = self.call(call, || unsafe { close(raw) });
        self.plugin.count_closed();
        answer
    }
}

impl Drop for Base {
    fn drop(&mut self) {
        if !self.closed {
            let plugin = self.plugin.name();
            tracing::warn!(plugin, device = self.device, "{} was not closed: it stays open", self.id);
        }
    }
}

impl fmt::Debug for Base {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} on device {}", self.id, self.plugin.name(), self.device)
    }
}

/// A listener: for one peer.
#[derive(Debug)]
pub struct ListenComm {
    base: Base,
    lending: Option<Lending>,
    attempt: Attempt,
}

// SAFETY: a plugin's connection is tied to no thread; it is not Sync, so one uses it at a time.
unsafe impl Send for ListenComm {}

impl ListenComm {
    /// Its name.
    pub fn id(&self) -> CommId {
        self.base.id
    }

    /// The peer, or `None`: ask again, it may take seconds.
    ///
    /// Some plugins block in here: not for a thread that has other things to do. After a peer or an error it
    /// is over, and asking again is refused.
    pub fn accept(&mut self) -> Result<Option<RecvComm>, CallError> {
        let Some(lending) = self.lending.as_ref().filter(|_| self.attempt != Attempt::Over) else {
            return Err(self.base.error(Call::Accept, Cause::Misuse("this listener has had its one answer")));
        };
        let (mut comm, base) = (ptr::null_mut(), &self.base);
        self.attempt = Attempt::UnderWay;
        // The listener is open meanwhile, which counts.
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

    /// Whether [`ListenComm::accept`] has been called and has not answered yet.
    pub fn is_accepting(&self) -> bool {
        self.attempt == Attempt::UnderWay
    }

    /// Closes it. Refused, and left open for good, while an `accept` is unfinished: a thread of the
    /// plugin's may be waiting in it.
    pub fn close(mut self) -> Result<(), CallError> {
        if self.is_accepting() {
            let why = "its accept is unfinished, so it has to stay open until the process ends";
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

/// An attempt to connect. May be abandoned at any moment by dropping it.
#[derive(Debug)]
pub struct Connecting {
    plugin: Plugin,
    device: i32,
    lending: Option<Lending>,
    attempt: Attempt,
    not_sync: NotSync,
}

// SAFETY: as for ListenComm.
unsafe impl Send for Connecting {}

impl Connecting {
    /// The connection, or `None`: ask again. After an answer it is over, and asking again is refused.
    pub fn poll(&mut self) -> Result<Option<SendComm>, CallError> {
        let Some(lending) = self.lending.as_ref().filter(|_| self.attempt != Attempt::Over) else {
            let cause = Cause::Misuse("this attempt has had its one answer");
            return Err(self.plugin.error(Call::Connect, Some(self.device), None, cause));
        };
        let (mut comm, plugin) = (ptr::null_mut(), &self.plugin);
        if self.attempt == Attempt::Fresh {
            plugin.count_opening(Call::Connect, self.device)?;
        }
        self.attempt = Attempt::UnderWay;
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
            (Some(_), Attempt::UnderWay) => {
                // It counts as open from here on: a thread of the plugin's may be in it.
                tracing::debug!(plugin = self.plugin.name(), "connect was abandoned; its handle is leaked");
            }
            // After an error a plugin has no use for it, but 200 bytes are not worth being sure.
            _ => {}
        }
    }
}

/// What sending and receiving connections share.
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

/// A connection that sends.
#[derive(Debug)]
pub struct SendComm(Comm);

/// A connection that receives.
#[derive(Debug)]
pub struct RecvComm(Comm);

// SAFETY: as for ListenComm.
unsafe impl Send for SendComm {}
// SAFETY: as for ListenComm.
unsafe impl Send for RecvComm {}

impl Comm {
    /// Its plugin.
    pub fn plugin(&self) -> &Plugin {
        &self.base.plugin
    }

    /// Its name.
    pub fn id(&self) -> CommId {
        self.base.id
    }

    /// The device it runs over.
    pub fn device(&self) -> i32 {
        self.base.device
    }

    /// What the plugin says about the GPU's part, if there is one.
    pub fn device_handle(&self) -> Option<DeviceHandle> {
        self.device_handle
    }

    pub(super) fn raw(&self) -> *mut c_void {
        self.base.raw.as_ptr()
    }

    pub(super) fn call(&self, call: Call, run: impl FnOnce() -> ResultCode) -> Result<(), CallError> {
        self.base.call(call, run)
    }

    /// An error about this connection.
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
    /// Closes it; what it sent may not have arrived. Requests in flight are gone with it.
    pub fn close(self) -> Result<(), CallError> {
        let close = self.plugin().functions().close_send;
        self.0.close(Call::CloseSend, close)
    }
}

impl RecvComm {
    /// Closes it. Requests in flight are gone with it.
    pub fn close(self) -> Result<(), CallError> {
        let close = self.plugin().functions().close_recv;
        self.0.close(Call::CloseRecv, close)
    }
}

/// The profiler that plugins of v10 and later are given: it starts nothing and is always content.
pub(super) unsafe extern "C" fn no_profiler(
    e_handle: PP,
    kind: c_int,
    _p_handle: P,
    _plugin_id: i64,
    _ext_data: P,
) -> ResultCode {
    if kind == PROFILE_START && !e_handle.is_null() {
        // SAFETY: an event that starts is given where its handle goes.
        unsafe { *e_handle = ptr::null_mut() };
    }
    ResultCode::SUCCESS
}
