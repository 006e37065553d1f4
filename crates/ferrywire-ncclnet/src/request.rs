//! Requests on connections: registering memory, posting, testing.
//!
//! This file makes no decisions. Whether a refused request means a full window, and how to handle an error of
//! `test`, depends on the plugin and on the agreement with the peer: the transport decides.
//! Invariant: `done` and the sizes are preset before each `test`, which may leave them unwritten, so a
//! returned value is one that the plugin wrote.

use std::ffi::{c_int, c_void};
use std::ptr::{self, NonNull};

use super::abi::{PointerType, ResultCode, Version};
use super::clock::{self, Call};
use super::comm::{Comm, RecvComm, SendComm};
use super::error::{CallError, Cause};
use super::functions::{Buffers, DoesNotFit};
use ferrywire_proto::limits::{GROUPED_RECEIVES_MAX, TESTED_SIZES_MAX};

/// The plugin's handle of a registration. May be null: some plugins have none for host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryHandle(pub *mut c_void);

// SAFETY: the pointer is only a value that is passed back to the plugin; the functions that take it are
// unsafe.
unsafe impl Send for MemoryHandle {}
// SAFETY: the pointer is only a value that is passed back to the plugin; the functions that take it are
// unsafe.
unsafe impl Sync for MemoryHandle {}

/// The plugin's handle of a posted request. Plugins reuse addresses, so it does not identify a request over
/// time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request(NonNull<c_void>);

// SAFETY: the pointer is only a value that is passed back to the plugin; the functions that take it are
// unsafe.
unsafe impl Send for Request {}

impl Request {
    /// A request from a pointer that [`Request::as_ptr`] returned.
    pub fn from_ptr(pointer: NonNull<c_void>) -> Request {
        Request(pointer)
    }

    /// The plugin's pointer of the request.
    pub fn as_ptr(self) -> *mut c_void {
        self.0.as_ptr()
    }
}

/// Outcome of posting a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Posted {
    /// The request is posted, and has this handle.
    Request(Request),
    /// The plugin returned success without a request. A send or receive must be posted again later; a flush
    /// has nothing to do.
    Null,
    /// The request was refused. From some plugins [`ResultCode::INTERNAL_ERROR`] means a full window. The
    /// plugin was not called at all if a size does not fit or the function is missing.
    Refused(CallError),
}

/// Outcome of testing a request, exactly as the plugin reported it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tested {
    /// Return value of `test`; `done` may be set beside an error.
    pub code: ResultCode,
    /// Whether the plugin reported the request as done.
    pub done: bool,
    sizes: [c_int; GROUPED_RECEIVES_MAX],
}

impl Tested {
    /// Received size of the request's n-th buffer in bytes; `None` when the plugin wrote none, as several
    /// never do.
    pub fn size(&self, n: usize) -> Option<c_int> {
        self.sizes.get(n).copied().filter(|&size| size != NOT_WRITTEN)
    }
}

/// Preset size that no plugin writes.
const NOT_WRITTEN: c_int = -0x7777_7777;

/// A buffer of a receive or of a flush.
#[derive(Clone, Copy, Debug)]
pub struct RecvBuffer {
    /// Address of the receive's or flush's buffer.
    pub data: *mut c_void,
    /// Size of the buffer in bytes. Some plugins let the peer write past it.
    pub bytes: usize,
    /// Tag that selects a buffer within a grouped receive; several plugins ignore it.
    pub tag: c_int,
    /// Registration that covers the buffer.
    pub memory: MemoryHandle,
}

impl Comm {
    /// Registers memory for this connection.
    ///
    /// Before v8 a registration covers at most
    /// [`registration_bytes_max`](super::Plugin::registration_bytes_max) bytes. A plugin may require an
    /// alignment, and uses the current thread's CUDA device.
    ///
    /// # Safety
    /// `bytes` bytes at `data` are memory of the stated kind, until they are deregistered or the connection
    /// is closed.
    pub unsafe fn reg_mr(
        &self,
        data: *mut c_void,
        bytes: usize,
        kind: PointerType,
    ) -> Result<MemoryHandle, CallError> {
        let (reg_mr, raw) = (self.plugin().functions().reg_mr, self.raw());
        let mut handle = ptr::null_mut();
        self.fitting(Call::RegMr, bytes, || {
            // SAFETY: the caller promises that the memory is of the stated kind and stays valid.
            unsafe { reg_mr.call(raw, data, bytes, kind, &mut handle) }
        })?;
        Ok(MemoryHandle(handle))
    }

    /// Registers memory by its dma-buf. Needs v6 and a plugin that supports it, else returns
    /// [`Cause::Missing`].
    ///
    /// # Safety
    /// The promise of [`Comm::reg_mr`]; the descriptor is the dma-buf of that memory.
    pub unsafe fn reg_mr_dma_buf(
        &self,
        data: *mut c_void,
        bytes: usize,
        kind: PointerType,
        offset: u64,
        fd: c_int,
    ) -> Result<MemoryHandle, CallError> {
        let missing = || self.error(Call::RegMrDmaBuf, Cause::Missing);
        let (reg_mr, raw) = (self.plugin().functions().reg_mr_dma_buf.ok_or_else(missing)?, self.raw());
        let mut handle = ptr::null_mut();
        // SAFETY: the caller promises that the memory is of the stated kind and stays valid.
        self.call(Call::RegMrDmaBuf, || unsafe {
            reg_mr(raw, data, bytes, kind as c_int, offset, fd, &mut handle)
        })?;
        Ok(MemoryHandle(handle))
    }

    /// Deregisters memory of this connection.
    ///
    /// # Safety
    /// The registration belongs to this connection, and no request uses it.
    pub unsafe fn dereg_mr(&self, handle: MemoryHandle) -> Result<(), CallError> {
        let (dereg_mr, raw) = (self.plugin().functions().dereg_mr, self.raw());
        // SAFETY: the caller promises that no request uses the registration.
        self.call(Call::DeregMr, || unsafe { dereg_mr(raw, handle.0) })
    }

    /// The registration's handle for GPU kernels; `None` if the plugin provides none. v7 and later.
    ///
    /// # Safety
    /// The registration belongs to this connection.
    pub unsafe fn get_device_mr(&self, handle: MemoryHandle) -> Result<Option<NonNull<c_void>>, CallError> {
        let missing = || self.error(Call::GetDeviceMr, Cause::Missing);
        let (get, raw) = (self.plugin().functions().get_device_mr.ok_or_else(missing)?, self.raw());
        let mut device_handle = ptr::null_mut();
        // SAFETY: the caller promises that the registration is one of this connection.
        self.call(Call::GetDeviceMr, || unsafe { get(raw, handle.0, &mut device_handle) })?;
        Ok(NonNull::new(device_handle))
    }

    /// Asks whether a request is done; in many plugins this also drives its progress.
    ///
    /// Many plugins allow only the oldest request of a connection to be tested, and make progress only if it
    /// is tested often.
    ///
    /// # Safety
    /// The request belongs to this connection and was not reported as done before.
    pub unsafe fn test(&self, request: Request) -> Tested {
        let mut sizes = [NOT_WRITTEN; TESTED_SIZES_MAX];
        // SAFETY: the caller promises an unfinished request of this connection.
        let (code, done) = unsafe { self.test_into(request, sizes.as_mut_ptr()) };
        let mut first = [NOT_WRITTEN; GROUPED_RECEIVES_MAX];
        first.copy_from_slice(&sizes[..GROUPED_RECEIVES_MAX]);
        Tested { code, done, sizes: first }
    }

    /// [`Comm::test`] without sizes, for flushes and callers that ignore them: the plugin gets a null
    /// pointer.
    ///
    /// # Safety
    /// The promise of [`Comm::test`].
    pub unsafe fn test_without_sizes(&self, request: Request) -> Tested {
        // SAFETY: the caller promises an unfinished request of this connection.
        let (code, done) = unsafe { self.test_into(request, ptr::null_mut()) };
        Tested { code, done, sizes: [NOT_WRITTEN; GROUPED_RECEIVES_MAX] }
    }

    /// # Safety
    /// The promise of [`Comm::test`]; `sizes` is null or has room for [`TESTED_SIZES_MAX`] entries.
    unsafe fn test_into(&self, request: Request, sizes: *mut c_int) -> (ResultCode, bool) {
        let test = self.plugin().functions().test;
        let mut done = 0;
        let noted = clock::enter(self.plugin().id(), Call::Test, Some(self.device()));
        // SAFETY: the caller promises an unfinished request, and room for the sizes.
        let code = unsafe { test(request.as_ptr(), &mut done, sizes) };
        drop(noted);
        (code, done != 0)
    }

    /// Makes a call with a size, which may not fit the signature.
    fn fitting(
        &self,
        call: Call,
        bytes: usize,
        run: impl FnOnce() -> Result<ResultCode, DoesNotFit>,
    ) -> Result<(), CallError> {
        let noted = clock::enter(self.plugin().id(), call, Some(self.device()));
        let answer = run();
        drop(noted);
        match answer {
            Ok(ResultCode::SUCCESS) => Ok(()),
            Ok(code) => Err(self.error(call, Cause::Result(code))),
            Err(DoesNotFit) => Err(self.error(call, Cause::TooLarge { bytes, limit: c_int::MAX as usize })),
        }
    }

    fn posted(
        &self,
        call: Call,
        bytes: usize,
        run: impl FnOnce(*mut *mut c_void) -> Result<ResultCode, DoesNotFit>,
    ) -> Posted {
        let mut request = ptr::null_mut();
        match self.fitting(call, bytes, || run(&mut request)) {
            Ok(()) => NonNull::new(request).map_or(Posted::Null, |request| Posted::Request(Request(request))),
            Err(error) => Posted::Refused(error),
        }
    }
}

impl SendComm {
    /// Posts a send. Data may not move before the request is tested.
    ///
    /// # Safety
    /// `bytes` bytes at `data` lie in the registered memory and stay unchanged until the request is done or
    /// the connection is closed. The receiver has posted enough room: some plugins write past its end.
    pub unsafe fn isend(&self, data: *mut c_void, bytes: usize, tag: c_int, memory: MemoryHandle) -> Posted {
        let (isend, raw) = (self.plugin().functions().isend, self.raw());
        // SAFETY: the caller promises registered memory that stays unchanged.
        self.posted(Call::Isend, bytes, |request| unsafe {
            isend.call(raw, data, bytes, tag, memory.0, request)
        })
    }
}

impl RecvComm {
    /// Posts a receive into one buffer, or into several as far as the plugin's `max_recvs` allows.
    ///
    /// # Safety
    /// The buffers lie in registered memory. No other code uses them until the request is done (and consumed,
    /// if the plugin requires that) or the connection is closed.
    pub unsafe fn irecv(&self, buffers: &[RecvBuffer]) -> Posted {
        if let Err(error) = self.groupable(Call::Irecv, buffers) {
            return Posted::Refused(error);
        }
        let (irecv, raw) = (self.plugin().functions().irecv, self.raw());
        let mut parts = Parts::of(buffers);
        // SAFETY: the caller promises registered buffers, and their number is possible.
        self.posted(Call::Irecv, largest(buffers), |request| unsafe {
            irecv.call(raw, &mut parts.buffers(), request)
        })
    }

    /// Makes received bytes visible to the GPU. [`Posted::Null`] means that they already are.
    ///
    /// Must not be used with plugins that unpack: TCPX misinterprets the request slot and ends the process.
    ///
    /// # Safety
    /// The promise of [`RecvComm::irecv`]; `buffers` are those of the receive.
    pub unsafe fn iflush(&self, buffers: &[RecvBuffer]) -> Posted {
        let Some(iflush) = self.plugin().functions().iflush else {
            return Posted::Refused(self.error(Call::Iflush, Cause::Missing));
        };
        if let Err(error) = self.groupable(Call::Iflush, buffers) {
            return Posted::Refused(error);
        }
        let (raw, mut parts) = (self.raw(), Parts::of(buffers));
        // SAFETY: the caller promises buffers of a receive, and their number is possible.
        self.posted(Call::Iflush, largest(buffers), |request| unsafe {
            iflush.call(raw, &mut parts.buffers(), request)
        })
    }

    /// Tells the plugin that the GPU has consumed a completed receive. v7 and later. Where the function
    /// exists, it is mandatory for every receive, in order.
    ///
    /// # Safety
    /// The request is a completed receive of this connection, of `n` buffers, and not yet consumed.
    pub unsafe fn irecv_consumed(&self, n: usize, request: Request) -> Result<(), CallError> {
        let missing = || self.error(Call::IrecvConsumed, Cause::Missing);
        let (consumed, raw) = (self.plugin().functions().irecv_consumed.ok_or_else(missing)?, self.raw());
        // SAFETY: the caller promises a completed receive that was not consumed.
        self.call(Call::IrecvConsumed, || unsafe { consumed(raw, n as c_int, request.as_ptr()) })
    }

    fn groupable(&self, call: Call, buffers: &[RecvBuffer]) -> Result<(), CallError> {
        let why = match buffers.len() {
            0 => "no buffer was given",
            1 => return Ok(()),
            _ if self.plugin().version() == Version::V4 => "v4 of the interface takes one buffer at a time",
            n if n > GROUPED_RECEIVES_MAX => "more buffers were given than GROUPED_RECEIVES_MAX",
            _ => return Ok(()),
        };
        Err(self.error(call, Cause::Misuse(why)))
    }
}

fn largest(buffers: &[RecvBuffer]) -> usize {
    buffers.iter().map(|buffer| buffer.bytes).max().unwrap_or(0)
}

/// The buffers of a request as the C functions take them: one array per property.
struct Parts {
    n: usize,
    data: [*mut c_void; GROUPED_RECEIVES_MAX],
    sizes: [usize; GROUPED_RECEIVES_MAX],
    tags: [c_int; GROUPED_RECEIVES_MAX],
    mhandles: [*mut c_void; GROUPED_RECEIVES_MAX],
}

impl Parts {
    fn of(buffers: &[RecvBuffer]) -> Parts {
        let mut parts = Parts {
            n: buffers.len(),
            data: [ptr::null_mut(); GROUPED_RECEIVES_MAX],
            sizes: [0; GROUPED_RECEIVES_MAX],
            tags: [0; GROUPED_RECEIVES_MAX],
            mhandles: [ptr::null_mut(); GROUPED_RECEIVES_MAX],
        };
        for (at, buffer) in buffers.iter().enumerate() {
            parts.data[at] = buffer.data;
            parts.sizes[at] = buffer.bytes;
            parts.tags[at] = buffer.tag;
            parts.mhandles[at] = buffer.memory.0;
        }
        parts
    }

    fn buffers(&mut self) -> Buffers<'_> {
        Buffers {
            data: &mut self.data[..self.n],
            sizes: &self.sizes[..self.n],
            tags: &mut self.tags[..self.n],
            mhandles: &mut self.mhandles[..self.n],
        }
    }
}
