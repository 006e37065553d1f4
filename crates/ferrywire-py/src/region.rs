//! Registered memory, and the peer's: [`Region`] and [`RemoteRegion`].
//!
//! Invariant: the object whose memory is registered lives until nothing can touch the memory any more; read-only
//! memory has no descriptor, so that no peer can write to it.
//! Read next: `tensor.rs`, for where an object's bytes lie.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use ferrywire::{Error, MemoryLocation};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple, PyType};

use crate::errors::{OrRaise, raised, usage};
use crate::options::{is_no, perhaps, unsigned, whole};
use crate::shutdown::Shared;
use crate::tensor::{Framework, Watch};
use crate::waiting::aside;
use crate::wakeup::left;

/// What a region has until it is deregistered.
struct Held {
    region: ferrywire::Region,
    watch: Option<Watch>,
}

const MOVED: &str = "its tensor's memory has been moved or freed since it was registered, as share_memory_(), a \
                     torch.multiprocessing queue and resize_ do: peers are refused from here on; register the tensor \
                     again, and call share_memory_() before that";

/// Memory of this process that operations can name, and peers too. An object that refers to its own region is freed only
/// after `deregister()`: the garbage collector does not look for such cycles.
// It would empty the object before the region (`tp_clear`; some, such as memoryview, let go of their memory then), and
// peers may write to it at any moment: no traverse and clear of ours can rule that out.
#[pyclass(frozen, weakref, module = "ferrywire")]
pub struct Region {
    /// Nothing once it is deregistered.
    held: Mutex<Option<Held>>,
    /// Its memory is not where it was any more.
    moved: AtomicBool,
    len_bytes: u64,
    location: MemoryLocation,
    writable: bool,
    /// Whether the engine owns the memory.
    owned: bool,
    pub framework: Framework,
    /// Kept for those who look at the memory, as long as they do.
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

    /// The engine's region, to be read.
    pub fn source(&self, py: Python<'_>) -> PyResult<ferrywire::Region> {
        // Let go before Python runs, which may come back here.
        let held = self
            .held()
            .as_ref()
            .map(|held| (held.region.clone(), held.watch.as_ref().map(|watch| watch.clone_ref(py))));
        let Some((region, watch)) = held else {
            let why = if self.moved.load(Ordering::SeqCst) { MOVED } else { "it is deregistered" };
            return Err(usage(py, "region", why));
        };
        match watch.map_or(Ok(false), |watch| watch.has_moved(py))? {
            false => Ok(region),
            true => Err(self.give_up(py, region)),
        }
    }

    /// The memory is not the tensor's any more: peers must not reach it either.
    fn give_up(&self, py: Python<'_>, region: ferrywire::Region) -> PyErr {
        self.moved.store(true, Ordering::SeqCst);
        let last = self.held().take();
        drop(last);
        // What still uses it cannot be helped; peers are refused all the same.
        let _ = aside(py, move || region.deregister());
        usage(py, "region", MOVED)
    }

    /// The engine's region, to be written to.
    pub fn target(&self, py: Python<'_>) -> PyResult<ferrywire::Region> {
        match self.writable {
            true => self.source(py),
            false => Err(usage(py, "target", "its memory is read-only: register a writable buffer")),
        }
    }
}

/// The rest of a region behind an offset, unless a size is given.
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
    /// Size in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.len_bytes
    }

    fn __len__(&self) -> usize {
        self.len_bytes as usize
    }

    /// Where its bytes live: "host", "cuda:N", or "sim:N" for a simulated GPU.
    #[getter]
    fn device(&self) -> String {
        device_name(self.location)
    }

    /// Whether it can be a target.
    #[getter]
    fn writable(&self) -> bool {
        self.writable
    }

    /// What a peer needs to reach the region, as bytes for any store or message.
    ///
    /// Raises `UsageError` for memory that is read-only or deregistered, or that PyTorch has moved.
    fn descriptor<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        if !self.writable {
            let why = "its memory is read-only, and a peer that has the descriptor could write to it: register a \
                       writable copy";
            return Err(usage(py, "region", why));
        }
        Ok(PyBytes::new(py, &self.source(py)?.descriptor().to_bytes()))
    }

    /// The region as peers see it.
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

    /// Copies `nbytes` bytes at `offset` out, of a GPU too. What peers write meanwhile may be seen by half.
    ///
    /// Raises `UsageError` for a range outside of the region, or one that is deregistered; `GpuError`.
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

    /// Copies the bytes of `data`, an object with the buffer protocol, to `offset`, on a GPU too.
    ///
    /// Raises `UsageError` for a range outside of the region, or one that is read-only or deregistered; `GpuError`.
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

    /// Ends it: peers are refused from here on, and when this returns nothing touches the memory. A second call
    /// does nothing.
    ///
    /// Waits for operations of this process that still use the memory, at most 5 seconds, and raises `UsageError` where
    /// some do even then: wait for them, or cancel them, and deregister again. Peers are refused all the same. In a
    /// coroutine wait for the operations before, or call it by `asyncio.to_thread`: the event loop waits too.
    fn deregister(&self, py: Python<'_>) -> PyResult<()> {
        let Some(region) = self.now() else {
            return Ok(());
        };
        aside(py, move || region.deregister())?;
        let last = self.held().take();
        // The tensor that is watched goes with the interpreter's lock.
        let last = last.map(|Held { region, .. }| region);
        py.detach(|| drop(last));
        Ok(())
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    /// Deregisters, and waits as `deregister` does. What the block raised comes out, with a note where this fails after
    /// it.
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

    /// Host memory that the engine allocated shows itself as a buffer; other memory has its own object.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let this = slf.get();
        if !this.owned || this.location != MemoryLocation::Host {
            let why =
                "only host memory made by allocate() is a buffer: use the registered object, or read_at()";
            return Err(PyBufferError::new_err(why));
        }
        let region = this.source(slf.py())?;
        let region = this.shown.get_or_init(|| region);
        // SAFETY: the interpreter's own struct; the view keeps our object, and that the memory.
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

/// As `device=` takes it.
pub fn device_name(location: MemoryLocation) -> String {
    match location {
        MemoryLocation::Host => "host".into(),
        MemoryLocation::Cuda(index) => format!("cuda:{index}"),
        MemoryLocation::SimGpu(index) => format!("sim:{index}"),
        other => other.to_string(),
    }
}

/// The bytes of an object with the buffer protocol, side by side.
fn contiguous(what: &str, object: &Bound<'_, PyAny>) -> PyResult<PyUntypedBuffer> {
    let buffer = PyUntypedBuffer::get(object).map_err(|_| is_no(what, object, "bytes"))?;
    match buffer.is_c_contiguous() {
        true => Ok(buffer),
        false => Err(usage(object.py(), what, format!("not contiguous: try bytes({what})"))),
    }
}

/// For as long as the buffer is held; whoever changes its bytes meanwhile may see some of both.
fn bytes_of(buffer: &PyUntypedBuffer) -> &[u8] {
    match buffer.len_bytes() {
        // It may be nowhere.
        0 => &[],
        // SAFETY: contiguous bytes, of which the buffer knows how many.
        bytes => unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast::<u8>(), bytes) },
    }
}

/// A region of another endpoint, as its descriptor tells it.
#[pyclass(frozen, eq, hash, module = "ferrywire")]
#[derive(PartialEq, Eq, Hash)]
pub struct RemoteRegion {
    pub remote: ferrywire::RemoteRegion,
}

#[pymethods]
impl RemoteRegion {
    /// Reads what `Region.descriptor()` gave, from an object with the buffer protocol.
    ///
    /// Raises `UsageError` for anything else.
    #[new]
    fn new(py: Python<'_>, descriptor: &Bound<'_, PyAny>) -> PyResult<RemoteRegion> {
        let buffer = contiguous("descriptor", descriptor)?;
        Ok(RemoteRegion { remote: ferrywire::RemoteRegion::from_bytes(bytes_of(&buffer)).or_raise(py)? })
    }

    /// Size in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.remote.len()
    }

    fn __len__(&self) -> usize {
        self.remote.len() as usize
    }

    /// Where its bytes live, at the peer.
    #[getter]
    fn device(&self) -> String {
        device_name(self.remote.location())
    }

    /// The identity of the endpoint that holds it, as hexadecimal digits.
    #[getter]
    fn owner(&self) -> String {
        self.remote.owner().to_string()
    }

    /// As bytes again.
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
