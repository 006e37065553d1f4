//! What is done with connections: registering memory, posting requests, testing them.
//!
//! Nothing is decided here. Whether a refused request means a full window, and what an error of `test`
//! means, depends on the plugin and on what the peer has agreed to: that is the transport's to say.
//! Invariant: `done` and the sizes that `test` may leave unwritten are set before each call, so that what
//! is returned is what the plugin wrote.

use std::ffi::{c_int, c_void};
use std::ptr::{self, NonNull};

use super::abi::{PointerType, ResultCode, Version};
use super::clock::{self, Call};
use super::comm::{Comm, RecvComm, SendComm};
use super::error::{CallError, Cause};
use super::functions::{Buffers, DoesNotFit};
use ferrywire_proto::limits::{GROUPED_RECEIVES_MAX, TESTED_SIZES_MAX};

/// A registration, as the plugin knows it. Some plugins have none for host memory: it may be null.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryHandle(pub *mut c_void);

// SAFETY: it is only a value to be given back to the plugin; the functions that take it are unsafe.
unsafe impl Send for MemoryHandle {}
// SAFETY: as above.
unsafe impl Sync for MemoryHandle {}

/// A posted request, as the plugin knows it. Plugins use the same addresses again: it does not identify a
/// request over time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request(NonNull<c_void>);

// SAFETY: as MemoryHandle.
unsafe impl Send for Request {}

impl Request {
    /// From a pointer that [`Request::as_ptr`] gave.
    pub fn from_ptr(pointer: NonNull<c_void>) -> Request {
        Request(pointer)
    }

    /// The plugin's own pointer.
    pub fn as_ptr(self) -> *mut c_void {
        self.0.as_ptr()
    }
}

/// What came of posting a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Posted {
    /// It is posted.
    Request(Request),
    /// Success without a request: not now, try again. For a flush: nothing to do.
    Null,
    /// Refused. From some plugins [`ResultCode::INTERNAL_ERROR`] means a full window; or it was never
    /// called, because a size does not fit or the function is missing.
    Refused(CallError),
}

/// What came of testing a request, exactly as observed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tested {
    /// What the function returned; `done` may be set beside an error.
    pub code: ResultCode,
    /// Whether the plugin wrote that it is done.
    pub done: bool,
    sizes: [c_int; GROUPED_RECEIVES_MAX],
}

impl Tested {
    /// The size of the request's n-th buffer, if the plugin wrote one. Several plugins never do.
    pub fn size(&self, n: usize) -> Option<c_int> {
        self.sizes.get(n).copied().filter(|&size| size != NOT_WRITTEN)
    }
}

/// A size that no plugin writes.
const NOT_WRITTEN: c_int = -0x7777_7777;

/// A buffer to receive into, or to flush.
#[derive(Clone, Copy, Debug)]
pub struct RecvBuffer {
    /// Where.
    pub data: *mut c_void,
    /// How much; in some plugins no limit to what the peer can write.
    pub bytes: usize,
    /// Chooses among the buffers of one grouped receive only; several plugins ignore it.
    pub tag: c_int,
    /// Its registration.
    pub memory: MemoryHandle,
}

impl Comm {
    /// Registers memory for this connection.
    ///
    /// Before v8 at most [`registration_bytes_max`](super::Plugin::registration_bytes_max). Plugins may ask
    /// for an alignment, and take the CUDA device that is current on this thread.
    ///
    /// # Safety
    /// `bytes` bytes at `data` are memory of that kind, and stay so until they are deregistered or the
    /// connection is closed.
    pub unsafe fn reg_mr(
        &self,
        data: *mut c_void,
        bytes: usize,
        kind: PointerType,
    ) -> Result<MemoryHandle, CallError> {
        let (reg_mr, raw) = (self.plugin().functions().reg_mr, self.raw());
        let mut handle = ptr::null_mut();
        self.fitting(Call::RegMr, bytes, || {
            // SAFETY: by the caller's promise.
            unsafe { reg_mr.call(raw, data, bytes, kind, &mut handle) }
        })?;
        Ok(MemoryHandle(handle))
    }

    /// Registers memory that is also known as a dma-buf. v6 and later, where the plugin can.
    ///
    /// # Safety
    /// As [`Comm::reg_mr`]; the descriptor is the dma-buf of that memory.
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
        // SAFETY: by the caller's promise.
        self.call(Call::RegMrDmaBuf, || unsafe {
            reg_mr(raw, data, bytes, kind as c_int, offset, fd, &mut handle)
        })?;
        Ok(MemoryHandle(handle))
    }

    /// Undoes a registration.
    ///
    /// # Safety
    /// It is one of this connection's, and no request uses it.
    pub unsafe fn dereg_mr(&self, handle: MemoryHandle) -> Result<(), CallError> {
        let (dereg_mr, raw) = (self.plugin().functions().dereg_mr, self.raw());
        // SAFETY: by the caller's promise.
        self.call(Call::DeregMr, || unsafe { dereg_mr(raw, handle.0) })
    }

    /// What a GPU kernel needs to use a registration; `None` if the plugin gives nothing. v7 and later.
    ///
    /// # Safety
    /// The registration is one of this connection's.
    pub unsafe fn get_device_mr(&self, handle: MemoryHandle) -> Result<Option<NonNull<c_void>>, CallError> {
        let missing = || self.error(Call::GetDeviceMr, Cause::Missing);
        let (get, raw) = (self.plugin().functions().get_device_mr.ok_or_else(missing)?, self.raw());
        let mut device_handle = ptr::null_mut();
        // SAFETY: by the caller's promise.
        self.call(Call::GetDeviceMr, || unsafe { get(raw, handle.0, &mut device_handle) })?;
        Ok(NonNull::new(device_handle))
    }

    /// Asks for a request's progress, and in many plugins makes it.
    ///
    /// In many plugins only the oldest request of a connection may be tested, and nothing moves unless it
    /// is tested often.
    ///
    /// # Safety
    /// The request is one of this connection's and has not been done yet.
    pub unsafe fn test(&self, request: Request) -> Tested {
        let mut sizes = [NOT_WRITTEN; TESTED_SIZES_MAX];
        // SAFETY: by the caller's promise.
        let (code, done) = unsafe { self.test_into(request, sizes.as_mut_ptr()) };
        let mut first = [NOT_WRITTEN; GROUPED_RECEIVES_MAX];
        first.copy_from_slice(&sizes[..GROUPED_RECEIVES_MAX]);
        Tested { code, done, sizes: first }
    }

    /// [`Comm::test`] for a flush, and for whoever wants no sizes: the plugin is given nowhere to write them.
    ///
    /// # Safety
    /// As [`Comm::test`].
    pub unsafe fn test_without_sizes(&self, request: Request) -> Tested {
        // SAFETY: by the caller's promise.
        let (code, done) = unsafe { self.test_into(request, ptr::null_mut()) };
        Tested { code, done, sizes: [NOT_WRITTEN; GROUPED_RECEIVES_MAX] }
    }

    /// # Safety
    /// As [`Comm::test`]; `sizes` is null or has room for [`TESTED_SIZES_MAX`].
    unsafe fn test_into(&self, request: Request, sizes: *mut c_int) -> (ResultCode, bool) {
        let test = self.plugin().functions().test;
        let mut done = 0;
        let noted = clock::enter(self.plugin().id(), Call::Test, Some(self.device()));
        // SAFETY: by the caller's promise.
        let code = unsafe { test(request.as_ptr(), &mut done, sizes) };
        drop(noted);
        (code, done != 0)
    }

    /// A call that may not be possible for a size.
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
    /// Posts a message. It may not move before it is tested.
    ///
    /// # Safety
    /// `bytes` bytes at `data` lie in the registered memory, and stay as they are until the request is done
    /// or the connection closed. The receiver has posted room for them: some plugins write past its end.
    pub unsafe fn isend(&self, data: *mut c_void, bytes: usize, tag: c_int, memory: MemoryHandle) -> Posted {
        let (isend, raw) = (self.plugin().functions().isend, self.raw());
        // SAFETY: by the caller's promise.
        self.posted(Call::Isend, bytes, |request| unsafe {
            isend.call(raw, data, bytes, tag, memory.0, request)
        })
    }
}

impl RecvComm {
    /// Posts a receive into one buffer, or a grouped one where the plugin's `max_recvs` allows.
    ///
    /// # Safety
    /// The buffers lie in registered memory and are nobody else's until the request is done, and consumed
    /// where the plugin asks for that, or the connection closed.
    pub unsafe fn irecv(&self, buffers: &[RecvBuffer]) -> Posted {
        if let Err(error) = self.groupable(Call::Irecv, buffers) {
            return Posted::Refused(error);
        }
        let (irecv, raw) = (self.plugin().functions().irecv, self.raw());
        let mut parts = Parts::of(buffers);
        // SAFETY: by the caller's promise, and the number of buffers is possible.
        self.posted(Call::Irecv, largest(buffers), |request| unsafe {
            irecv.call(raw, &mut parts.buffers(), request)
        })
    }

    /// Makes what was received visible to the GPU. [`Posted::Null`]: it is already.
    ///
    /// Not for plugins that unpack: TCPX takes the request slot for something else and dies.
    ///
    /// # Safety
    /// As [`RecvComm::irecv`], of which these were the buffers.
    pub unsafe fn iflush(&self, buffers: &[RecvBuffer]) -> Posted {
        let Some(iflush) = self.plugin().functions().iflush else {
            return Posted::Refused(self.error(Call::Iflush, Cause::Missing));
        };
        if let Err(error) = self.groupable(Call::Iflush, buffers) {
            return Posted::Refused(error);
        }
        let (raw, mut parts) = (self.raw(), Parts::of(buffers));
        // SAFETY: by the caller's promise, and the number of buffers is possible.
        self.posted(Call::Iflush, largest(buffers), |request| unsafe {
            iflush.call(raw, &mut parts.buffers(), request)
        })
    }

    /// Tells the plugin that the GPU has taken the data of a finished receive. v7 and later; where it
    /// exists, for every receive, in order.
    ///
    /// # Safety
    /// The request is a finished receive of this connection's, of `n` buffers, and not yet consumed.
    pub unsafe fn irecv_consumed(&self, n: usize, request: Request) -> Result<(), CallError> {
        let missing = || self.error(Call::IrecvConsumed, Cause::Missing);
        let (consumed, raw) = (self.plugin().functions().irecv_consumed.ok_or_else(missing)?, self.raw());
        // SAFETY: by the caller's promise.
        self.call(Call::IrecvConsumed, || unsafe { consumed(raw, n as c_int, request.as_ptr()) })
    }

    fn groupable(&self, call: Call, buffers: &[RecvBuffer]) -> Result<(), CallError> {
        let why = match buffers.len() {
            0 => "no buffer was given",
            1 => return Ok(()),
            _ if self.plugin().version() == Version::V4 => "v4 takes one buffer at a time",
            n if n > GROUPED_RECEIVES_MAX => "more buffers than GROUPED_RECEIVES_MAX",
            _ => return Ok(()),
        };
        Err(self.error(call, Cause::Misuse(why)))
    }
}

fn largest(buffers: &[RecvBuffer]) -> usize {
    buffers.iter().map(|buffer| buffer.bytes).max().unwrap_or(0)
}

/// Buffers as the C functions take them: one array per part.
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
