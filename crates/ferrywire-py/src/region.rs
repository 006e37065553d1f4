//! Registered memory of this process and of peers: [`Region`] and [`RemoteRegion`].
//!
//! Invariant: the object whose memory is registered lives until nothing can touch the memory any more; read-only memory
//! has no descriptor, so that no peer can write to it.
//! Read next: `tensor.rs`, which finds the bytes of an object.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use ferrywire::{Error, MemoryLocation};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyBufferError, PyException};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple, PyType};

use crate::errors::{OrRaise, raised, usage};
use crate::options::{is_no, perhaps, unsigned, whole};
use crate::shutdown::Shared;
use crate::tensor::{Framework, Watch};
use crate::waiting::aside;
use crate::wakeup::left;

/// The engine's region, and the watch of a PyTorch tensor, until the region is deregistered.
struct Held {
    region: ferrywire::Region,
    watch: Option<Watch>,
}

const MOVED: &str = "the tensor's memory has been moved or freed since the registration, as share_memory_(), a \
                     torch.multiprocessing queue and resize_ do: peers are refused from here on; register the tensor \
                     again, and call share_memory_() before that";

/// Registered memory of this process, for operations and for peers that get its descriptor. An object that refers to
/// its own region is freed only after `deregister()`: the garbage collector does not see such cycles.
// The garbage collector would empty the object before the region (`tp_clear`; some, such as memoryview, release their
// memory then) while peers may write to it. No traverse and clear of this class can prevent that.
#[pyclass(frozen, weakref, module = "ferrywire")]
pub struct Region {
    /// None once the region is deregistered.
    held: Mutex<Option<Held>>,
    /// Whether PyTorch has moved the memory since it was registered.
    moved: AtomicBool,
    len_bytes: u64,
    location: MemoryLocation,
    writable: bool,
    /// Whether the engine owns the memory.
    owned: bool,
    pub framework: Framework,
    /// The engine's region, kept for exported buffers, which refer to its memory.
    shown: OnceLock<ferrywire::Region>,
    _endpoint: Arc<Shared>,
}

impl Region {
    pub fn new(
        endpoint: Arc<Shared>,
        region: ferrywire::Region,
        writable: bool,
        owned: bool,
        framework: Framework,
        watch: Option<Watch>,
    ) -> Region {
        let (len_bytes, location) = (region.len(), region.location());
        let (held, moved) = (Mutex::new(Some(Held { region, watch })), AtomicBool::new(false));
        let shown = OnceLock::new();
        Region { held, moved, len_bytes, location, writable, owned, framework, shown, _endpoint: endpoint }
    }

    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    pub fn is_at(&self) -> MemoryLocation {
        self.location
    }

    fn held(&self) -> MutexGuard<'_, Option<Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Option<ferrywire::Region> {
        self.held().as_ref().map(|held| held.region.clone())
    }

    /// The engine's region, as a source.
    ///
    /// # Errors
    /// `UsageError` if the region is deregistered or its tensor has moved; the latter deregisters it.
    pub fn source(&self, py: Python<'_>) -> PyResult<ferrywire::Region> {
        // The lock is released before Python code runs, which may call back into this region.
        let held = self
            .held()
            .as_ref()
            .map(|held| (held.region.clone(), held.watch.as_ref().map(|watch| watch.clone_ref(py))));
        let Some((region, watch)) = held else {
            let why = if self.moved.load(Ordering::SeqCst) { MOVED } else { "the region is deregistered" };
            return Err(usage(py, "region", why));
        };
        if watch.map_or(Ok(false), |watch| watch.has_moved(py))? {
            Err(self.give_up(py, region))
        } else {
            Ok(region)
        }
    }

    /// Deregisters memory that is not the tensor's any more, so that peers do not reach it either.
    fn give_up(&self, py: Python<'_>, region: ferrywire::Region) -> PyErr {
        self.moved.store(true, Ordering::SeqCst);
        let last = self.held().take();
        drop(last);
        // Operations that still use the memory make this fail; peers are refused nevertheless. Ctrl-C is not such a failure.
        match aside(py, move || region.deregister()) {
            Err(interrupt) if !interrupt.is_instance_of::<PyException>(py) => interrupt,
            _ => usage(py, "region", MOVED),
        }
    }

    /// The engine's region, as a target.
    ///
    /// # Errors
    /// As for [`source`](Region::source), and `UsageError` if its memory is read-only.
    pub fn target(&self, py: Python<'_>) -> PyResult<ferrywire::Region> {
        if self.writable {
            self.source(py)
        } else {
            Err(usage(py, "target", "the region's memory is read-only: register a writable buffer"))
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let last = self.held.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let shown = self.shown.take();
        if last.is_some() || shown.is_some() {
            // The interpreter frees objects with its lock held.
            Python::attach(|py| drop_detached(py, last, shown));
        }
    }
}

/// Drops the engine's regions without the interpreter's lock, because they may wait for threads and for a GPU's driver.
/// The watched tensor is dropped with the lock.
fn drop_detached(py: Python<'_>, held: Option<Held>, shown: Option<ferrywire::Region>) {
    let region = held.map(|Held { region, .. }| region);
    py.detach(|| drop((region, shown)));
}

/// Offset and size of a range of a region; without a size, all bytes from the offset on.
pub fn range(
    py: Python<'_>,
    what: &str,
    offset: impl Into<i128>,
    nbytes: Option<impl Into<i128>>,
    region_bytes: u64,
) -> PyResult<(u64, u64)> {
    let offset = unsigned(py, what, offset)?;
    let nbytes = match nbytes {
        Some(nbytes) => unsigned(py, "nbytes", nbytes)?,
        None => region_bytes.saturating_sub(offset),
    };
    Ok((offset, nbytes))
}

#[pymethods]
impl Region {
    /// Size of the region in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.len_bytes
    }

    fn __len__(&self) -> usize {
        self.len_bytes as usize
    }

    /// The memory location: "host", "cuda:N", or "sim:N" for a simulated GPU.
    #[getter]
    fn device(&self) -> String {
        device_name(self.location)
    }

    /// Whether the region can be the target of a transfer.
    #[getter]
    fn writable(&self) -> bool {
        self.writable
    }

    /// The bytes that a peer needs to reach the region. The application carries them to the peer.
    ///
    /// Raises `UsageError` for memory that is read-only or deregistered, or that PyTorch has moved.
    fn descriptor<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        if !self.writable {
            let why = "the region's memory is read-only, and a peer that has the descriptor could write to it: register a \
                       writable copy";
            return Err(usage(py, "region", why));
        }
        Ok(PyBytes::new(py, &self.source(py)?.descriptor().to_bytes()))
    }

    /// The region as peers see it: its `RemoteRegion`.
    ///
    /// Raises `UsageError` for memory that is read-only or deregistered, or that PyTorch has moved.
    fn remote(&self, py: Python<'_>) -> PyResult<RemoteRegion> {
        self.descriptor(py)?;
        Ok(RemoteRegion { remote: self.source(py)?.descriptor() })
    }

    /// A pickled region arrives as a [`RemoteRegion`].
    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyType>, (Bound<'py, PyBytes>,))> {
        Ok((py.get_type::<RemoteRegion>(), (self.descriptor(py)?,)))
    }

    /// Returns a copy of `nbytes` bytes at `offset`, also from a GPU; by default all bytes from the offset on. A write
    /// of a peer during the copy may be seen in part.
    ///
    /// Raises `UsageError` for a range outside of the region, or a region that is deregistered; `GpuError`.
    #[pyo3(signature = (offset=0, nbytes=None))]
    fn read_at<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = whole)] offset: i128,
        #[pyo3(from_py_with = perhaps)] nbytes: Option<i128>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let (offset, nbytes) = range(py, "offset", offset, nbytes, self.len_bytes)?;
        let region = self.source(py)?;
        if offset.checked_add(nbytes).is_none_or(|end| end > self.len_bytes) {
            let region_bytes = self.len_bytes;
            return Err(raised(
                py,
                &Error::OutOfRegion { side: "source", offset, len: nbytes, region_bytes },
            ));
        }
        PyBytes::new_with(py, nbytes as usize, |into| py.detach(|| region.read_at(offset, into)).or_raise(py))
    }

    /// Copies the bytes of `data`, an object with the buffer protocol, into the region at `offset`, also on a GPU.
    ///
    /// Raises `UsageError` for a range outside of the region, or a region that is read-only or deregistered;
    /// `GpuError`.
    fn write_at(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = whole)] offset: i128,
        data: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let offset = unsigned(py, "offset", offset)?;
        let region = self.target(py)?;
        let buffer = contiguous("data", data)?;
        let bytes = bytes_of(&buffer);
        py.detach(|| region.write_at(offset, bytes)).or_raise(py)
    }

    /// Ends the registration. Peers are refused from now on, and after this returns nothing touches the memory. A
    /// second call does nothing.
    ///
    /// Waits at most 5 seconds for operations of this process that still use the memory, and raises `UsageError` if
    /// some are left then: wait for them or cancel them, and deregister again. Peers are refused nevertheless. The wait
    /// blocks an event loop: in a coroutine, wait for the operations first, or use `asyncio.to_thread`.
    fn deregister(&self, py: Python<'_>) -> PyResult<()> {
        let Some(region) = self.now() else {
            return Ok(());
        };
        aside(py, move || region.deregister())?;
        let last = self.held().take();
        drop_detached(py, last, None);
        Ok(())
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    /// Deregisters as `deregister` does. If the block raised, its exception is raised, with a note if deregistering
    /// fails too.
    #[pyo3(signature = (*exception))]
    fn __exit__(&self, py: Python<'_>, exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        left(py, exception, self.deregister(py))
    }

    fn __repr__(&self) -> String {
        let state = match self.now() {
            Some(_) if self.writable => "",
            Some(_) => ", read-only",
            None => ", deregistered",
        };
        format!("<ferrywire.Region {} bytes, {}{state}>", self.len_bytes, device_name(self.location))
    }

    /// Exports host memory that the engine allocated as a buffer. Other memory has an object of its own.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let this = slf.get();
        if !this.owned || this.location != MemoryLocation::Host {
            let why =
                "only host memory made by allocate() is a buffer: use the registered object, or read_at()";
            return Err(PyBufferError::new_err(why));
        }
        let region = this.source(slf.py())?;
        let region = this.shown.get_or_init(|| region);
        // SAFETY: `view` is the interpreter's own struct; it keeps this object alive, and with it the memory.
        let done = unsafe {
            ffi::PyBuffer_FillInfo(
                view,
                slf.as_ptr(),
                region.as_ptr().cast(),
                this.len_bytes as isize,
                0,
                flags,
            )
        };
        if done != 0 {
            return Err(PyErr::fetch(slf.py()));
        }
        Ok(())
    }
}

/// The location as the argument `device=` takes it.
pub fn device_name(location: MemoryLocation) -> String {
    match location {
        MemoryLocation::Host => "host".into(),
        MemoryLocation::Cuda(index) => format!("cuda:{index}"),
        MemoryLocation::SimGpu(index) => format!("sim:{index}"),
        other => other.to_string(),
    }
}

/// The contiguous buffer of an object with the buffer protocol.
fn contiguous(what: &str, object: &Bound<'_, PyAny>) -> PyResult<PyUntypedBuffer> {
    let buffer = PyUntypedBuffer::get(object).map_err(|_| is_no(what, object, "bytes"))?;
    if buffer.is_c_contiguous() {
        Ok(buffer)
    } else {
        Err(usage(object.py(), what, format!("the buffer is not contiguous: pass bytes({what})")))
    }
}

/// The buffer's bytes, for as long as the buffer is held. Code that changes them meanwhile may leave a mixture to be
/// read.
fn bytes_of(buffer: &PyUntypedBuffer) -> &[u8] {
    match buffer.len_bytes() {
        // An empty buffer may have no address.
        0 => &[],
        // SAFETY: the buffer is contiguous and reports its length.
        bytes => unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast::<u8>(), bytes) },
    }
}

/// A region of another endpoint, made from the bytes of its descriptor.
#[pyclass(frozen, eq, hash, module = "ferrywire")]
#[derive(PartialEq, Eq, Hash)]
pub struct RemoteRegion {
    pub remote: ferrywire::RemoteRegion,
}

#[pymethods]
impl RemoteRegion {
    /// Makes a remote region from the bytes that `Region.descriptor()` returned, in an object with the buffer protocol.
    ///
    /// Raises `UsageError` for other bytes or objects.
    #[new]
    fn new(py: Python<'_>, descriptor: &Bound<'_, PyAny>) -> PyResult<RemoteRegion> {
        let buffer = contiguous("descriptor", descriptor)?;
        Ok(RemoteRegion { remote: ferrywire::RemoteRegion::from_bytes(bytes_of(&buffer)).or_raise(py)? })
    }

    /// Size of the region in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.remote.len()
    }

    fn __len__(&self) -> usize {
        self.remote.len() as usize
    }

    /// The memory location at the peer: "host", "cuda:N" or "sim:N".
    #[getter]
    fn device(&self) -> String {
        device_name(self.remote.location())
    }

    /// The identity of the endpoint that owns the region, as hexadecimal digits.
    #[getter]
    fn owner(&self) -> String {
        self.remote.owner().to_string()
    }

    /// The descriptor's bytes, as `Region.descriptor()` returned them.
    fn descriptor<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.remote.to_bytes())
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> (Bound<'py, PyType>, (Bound<'py, PyBytes>,)) {
        (py.get_type::<RemoteRegion>(), (self.descriptor(py),))
    }

    fn __repr__(&self) -> String {
        let RemoteRegion { remote } = self;
        format!(
            "<ferrywire.RemoteRegion {} bytes, {} of {}>",
            remote.len(),
            device_name(remote.location()),
            remote.owner()
        )
    }
}
