//! Finds the bytes of a Python object: by the buffer protocol, PyTorch's own methods, DLPack, or
//! `__cuda_array_interface__`.
//!
//! Invariant: a [`View`] keeps its memory alive, and covers one run of bytes in the order of the shape. Read next:
//! `region.rs`, which registers it; `stream.rs`, which orders operations after GPU work.

use std::ffi::CStr;

use ferrywire::{Error, MemoryLocation};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyRuntimeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict, PyMemoryView};

use crate::dlpack;
use crate::errors::usage;
use crate::shutdown::attached;

/// The framework that an object belongs to, which decides its current stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framework {
    /// A framework without streams, or none.
    Other,
    Torch,
    Cupy,
}

/// The Python objects that keep memory alive. They may only be dropped with the interpreter's lock.
pub enum Keeper {
    /// A buffer; its owner may not resize it while it is exported.
    Buffer {
        _buffer: PyUntypedBuffer,
    },
    Objects {
        _objects: Vec<Py<PyAny>>,
    },
}

/// Detects that memory has moved. PyTorch exchanges what a storage owns in place (`share_memory_()`), so no reference
/// that this crate could hold keeps the old memory.
pub struct Watch {
    /// `data_ptr` bound to a tensor of the same storage that this watch owns: one call returns the address.
    data_ptr: Py<PyAny>,
    address: usize,
}

impl Watch {
    /// Whether the memory is at another address now.
    pub fn has_moved(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.data_ptr.call0(py)?.extract::<usize>(py)? != self.address)
    }

    pub fn clone_ref(&self, py: Python<'_>) -> Watch {
        Watch { data_ptr: self.data_ptr.clone_ref(py), address: self.address }
    }
}

/// The owner that the engine drops when it is done with the memory.
struct Owner(Option<Keeper>);

impl Drop for Owner {
    fn drop(&mut self) {
        let keeper = self.0.take();
        // After the interpreter has ended, objects cannot be freed any more.
        let mut keeper = std::mem::ManuallyDrop::new(keeper);
        attached(|| drop(keeper.take()));
    }
}

/// One run of bytes on the host or a GPU.
pub struct View {
    pub address: *mut u8,
    pub len_bytes: usize,
    pub writable: bool,
    pub framework: Framework,
    pub keeper: Keeper,
    /// Detects moved memory; `None` for memory that its owner does not move.
    pub watch: Option<Watch>,
    /// Whether the library reports the address as one on a GPU, so that it is not taken for a host address.
    pub on_gpu: bool,
}

impl View {
    /// Registers the memory; the region keeps the object alive. Waits for the GPU's driver without the interpreter's
    /// lock.
    ///
    /// # Errors
    /// The errors of the engine's `register_with`, and `Invalid` if the memory is on a GPU whose driver does not know it.
    pub fn register(
        self,
        py: Python<'_>,
        endpoint: &ferrywire::Endpoint,
    ) -> ferrywire::Result<ferrywire::Region> {
        let owner = Box::new(Owner(Some(self.keeper)));
        let (address, len_bytes) = (self.address as usize, self.len_bytes);
        // SAFETY: the owner keeps the memory where it is: a buffer by the protocol, an array because its library does
        // not free memory that an object still has. PyTorch and `ctypes.resize` are exceptions: their users are told not
        // to move what is registered, and the region checks a tensor's address before each use (`Watch`), which is as
        // much as can be done. Peers may change the bytes at any time; that is the purpose.
        let region = py.detach(|| unsafe { endpoint.register_with(address as *mut u8, len_bytes, owner) })?;
        if self.on_gpu && region.location() == MemoryLocation::Host && !region.is_empty() {
            let why = "the array's library reports memory on a CUDA GPU, but the CUDA driver of this process does not know \
                       the address: keep the array alive, and let the program load the GPU's libcuda.so.1";
            return Err(Error::invalid("memory", why));
        }
        Ok(region)
    }

    /// Finds the memory of an object; `what` names the argument in errors.
    ///
    /// # Errors
    /// `UsageError` if the object has no memory, or no single run of it.
    pub fn of(what: &str, object: &Bound<'_, PyAny>) -> PyResult<View> {
        let py = object.py();
        if let Some(view) = of_torch(what, object)? {
            return Ok(view);
        }
        let buffer = match PyUntypedBuffer::get(object) {
            Ok(buffer) => return of_buffer(what, py, buffer),
            Err(error) => error,
        };
        if let Some(buffer) = completed_buffer(what, object)? {
            return of_buffer(what, py, buffer);
        }
        if object.hasattr(intern!(py, "__dlpack__"))? {
            return of_dlpack(what, object);
        }
        if object.hasattr(intern!(py, "__cuda_array_interface__"))? {
            return of_cuda_array(what, object);
        }
        let kind = object.get_type().qualname()?;
        Err(usage(
            py,
            what,
            format!(
                "{kind} has no memory that can be registered: pass an object with the buffer protocol ({buffer}), \
                 __dlpack__ or __cuda_array_interface__; of an array with an element type of its own, pass \
                 x.view('uint8')"
            ),
        ))
    }
}

/// Why arrays of Python objects are refused: peers would write numbers over references, and the interpreter
/// crashes when it follows one.
const OBJECTS: &str = "the array has elements that are Python objects, whose bytes are pointers of this process: use an \
                       element type of numbers";

/// Why elements are refused that may be such objects.
const UNKNOWN: &str = "the buffer does not say what its elements are made of, as those of unions and packed structures of \
                       ctypes, and some may be Python objects: use an element type of numbers";

/// Why elements with this format of the buffer protocol are refused.
fn refusal(format: &[u8], item_bytes: usize) -> Option<&'static str> {
    match format {
        _ if has_objects(format) => Some(OBJECTS),
        b"B" if item_bytes > 1 => Some(UNKNOWN),
        _ => None,
    }
}

/// The buffer of an object that leaves out what the protocol lets it leave out: strides, as arrays of ctypes do, or the
/// shape of a single element.
fn completed_buffer(what: &str, object: &Bound<'_, PyAny>) -> PyResult<Option<PyUntypedBuffer>> {
    let py = object.py();
    let Ok(view) = PyMemoryView::from(object) else { return Ok(None) };
    let format: String = view.getattr(intern!(py, "format"))?.extract()?;
    let item_bytes: usize = view.getattr(intern!(py, "itemsize"))?.extract()?;
    // Bytes, which a single element is seen as below, do not tell what they are made of.
    if let Some(why) = refusal(format.as_bytes(), item_bytes) {
        return Err(usage(py, what, why));
    }
    if view.getattr(intern!(py, "ndim"))?.extract::<usize>()? > 0 {
        return Ok(PyUntypedBuffer::get(&view).ok());
    }
    let bytes = view.call_method1(intern!(py, "cast"), ("B",));
    Ok(bytes.and_then(|bytes| PyUntypedBuffer::get(&bytes)).ok())
}

fn of_buffer(what: &str, py: Python<'_>, buffer: PyUntypedBuffer) -> PyResult<View> {
    if let Some(why) = refusal(buffer.format().to_bytes(), buffer.item_size()) {
        return Err(usage(py, what, why));
    }
    if !buffer.is_c_contiguous() {
        let why =
            scattered(&list(buffer.shape()), &list(buffer.strides()), "bytes", "numpy.ascontiguousarray(x)");
        return Err(usage(py, what, why));
    }
    Ok(View {
        address: buffer.buf_ptr().cast(),
        len_bytes: buffer.len_bytes(),
        writable: !buffer.readonly(),
        framework: Framework::Other,
        keeper: Keeper::Buffer { _buffer: buffer },
        watch: None,
        on_gpu: false,
    })
}

/// Finds the memory of a PyTorch tensor by its own methods, which need no export, work for every dtype and
/// wait for no stream.
fn of_torch(what: &str, object: &Bound<'_, PyAny>) -> PyResult<Option<View>> {
    let py = object.py();
    let Some(class) = loaded(py, "torch")?.and_then(|torch| torch.getattr(intern!(py, "Tensor")).ok()) else {
        return Ok(None);
    };
    if !object.is_instance(&class)? {
        return Ok(None);
    }
    let device: String = object.getattr(intern!(py, "device"))?.getattr(intern!(py, "type"))?.extract()?;
    let layout = object.getattr(intern!(py, "layout"))?.str()?;
    if !matches!(device.as_str(), "cpu" | "cuda") || layout.to_str()? != "torch.strided" {
        let why = format!(
            "a tensor of device {device} and layout {layout} has no memory that can be registered: pass a strided \
                 tensor on cpu or cuda"
        );
        return Err(usage(py, what, why));
    }
    if !object.call_method0(intern!(py, "is_contiguous"))?.is_truthy()? {
        let shape = object.getattr(intern!(py, "shape"))?.extract::<Vec<i64>>()?;
        let strides = object.call_method0(intern!(py, "stride"))?.extract::<Vec<i64>>()?;
        let why = scattered(&list(&shape), &list(&strides), "elements", "x.contiguous()");
        return Err(usage(py, what, why));
    }
    if object.call_method0(intern!(py, "is_conj"))?.is_truthy()?
        || object.call_method0(intern!(py, "is_neg"))?.is_truthy()?
    {
        let why = "the tensor has a lazy conjugation or negation, so its memory has other values: pass \
                   x.resolve_conj().resolve_neg()";
        return Err(usage(py, what, why));
    }
    // Keep a tensor of its own, so that `x.data = y` does not take the memory away.
    let kept = object.call_method0(intern!(py, "detach"))?;
    let items: usize = kept.call_method0(intern!(py, "numel"))?.extract()?;
    let item_bytes: usize = kept.call_method0(intern!(py, "element_size"))?.extract()?;
    let data_ptr = kept.getattr(intern!(py, "data_ptr"))?;
    let len_bytes = items * item_bytes;
    // A tensor that wraps others, such as a DTensor, has no storage: the call returns 0 or raises.
    let address: usize = match data_ptr.call0() {
        Ok(address) => address.extract()?,
        Err(error) if error.is_instance_of::<PyRuntimeError>(py) => 0,
        Err(error) => return Err(error),
    };
    if address == 0 && len_bytes > 0 {
        let why = format!(
            "a {} has no memory of its own: pass the tensor that it wraps, of a DTensor x.to_local()",
            object.get_type().name()?
        );
        return Err(usage(py, what, why));
    }
    Ok(Some(View {
        address: address as *mut u8,
        len_bytes,
        writable: true,
        framework: Framework::Torch,
        keeper: Keeper::Objects { _objects: vec![kept.unbind()] },
        watch: Some(Watch { data_ptr: data_ptr.unbind(), address }),
        on_gpu: device == "cuda",
    }))
}

fn of_dlpack(what: &str, object: &Bound<'_, PyAny>) -> PyResult<View> {
    let py = object.py();
    let (device, _): (i32, i32) = object.call_method0(intern!(py, "__dlpack_device__"))?.extract()?;
    // Wait for an array that is still being computed, because its library has no stream that operations could
    // follow.
    if object.hasattr(intern!(py, "block_until_ready"))? {
        object.call_method0(intern!(py, "block_until_ready"))?;
    }
    let options = PyDict::new(py);
    if device == dlpack::ON_CUDA {
        // The export waits for no stream: operations are ordered after a stream when they are posted.
        options.set_item("stream", -1)?;
    }
    options.set_item("max_version", (1, 0))?;
    let export = || object.call_method("__dlpack__", (), Some(&options));
    let capsule = match export() {
        Err(error) if error.is_instance_of::<pyo3::exceptions::PyTypeError>(py) => {
            options.del_item("max_version")?;
            export()
        }
        other => other,
    };
    let capsule = capsule
        .map_err(|error| usage(py, what, format!("the array cannot be exported through DLPack: {error}")))?;
    let described = capsule.cast::<PyCapsule>().ok().and_then(dlpack::read);
    let Some(seen) = described else {
        return Err(usage(
            py,
            what,
            "the array's __dlpack__ returns no capsule of version 1 or older: use a library with DLPack 1.x",
        ));
    };
    if seen.code == dlpack::HANDLES {
        return Err(usage(py, what, OBJECTS));
    }
    if !matches!(seen.device, dlpack::ON_HOST | dlpack::ON_CUDA | dlpack::ON_PINNED_HOST) {
        let why = format!(
            "the array is on device {} of DLPack kind {}: copy it to the host or to a CUDA GPU",
            seen.device_index, seen.device
        );
        return Err(usage(py, what, why));
    }
    if let Some(strides) = seen.strides.as_deref().filter(|strides| !in_order(&seen.shape, strides, 1)) {
        let why = scattered(&list(&seen.shape), &list(strides), "elements", "a contiguous copy");
        return Err(usage(py, what, why));
    }
    let Some(len_bits) = bytes_of(&seen.shape, seen.item_bits) else {
        let why = format!("the array has shape {}: no such array fits into memory", list(&seen.shape));
        return Err(usage(py, what, why));
    };
    let framework = framework_of(object)?;
    // A capsule without a version cannot say that an array must not change.
    let immutable = object.get_type().module()?.to_str()?.starts_with("jax");
    Ok(View {
        address: seen.address,
        len_bytes: len_bits.div_ceil(8),
        writable: !seen.read_only && !immutable,
        framework,
        keeper: Keeper::Objects { _objects: vec![capsule.unbind(), object.clone().unbind()] },
        watch: None,
        on_gpu: seen.device == dlpack::ON_CUDA,
    })
}

fn of_cuda_array(what: &str, object: &Bound<'_, PyAny>) -> PyResult<View> {
    let py = object.py();
    let interface = object.getattr(intern!(py, "__cuda_array_interface__"))?;
    let refused = |why: String| usage(py, what, format!("the array's __cuda_array_interface__ {why}"));
    let Ok(interface) = interface.cast::<PyDict>() else {
        return Err(refused("is not a dictionary".into()));
    };
    let entry = |name: &str| interface.get_item(name);
    let needed = |name: &str| entry(name)?.ok_or_else(|| refused(format!("has no {name:?}")));
    let other = |name: &str, value: &Bound<'_, PyAny>| refused(format!("has {name:?}: {value}"));
    let value = needed("shape")?;
    let shape: Vec<i64> = value.extract().map_err(|_| other("shape", &value))?;
    let value = needed("typestr")?;
    let kind: String = value.extract().map_err(|_| other("typestr", &value))?;
    let item_bytes = item_bytes(&kind).ok_or_else(|| other("typestr", &value))?;
    if kind.as_bytes()[1] == b'O' {
        return Err(usage(py, what, OBJECTS));
    }
    let value = needed("data")?;
    let (address, read_only): (usize, bool) = value.extract().map_err(|_| other("data", &value))?;
    let len_bytes = bytes_of(&shape, item_bytes).ok_or_else(|| {
        refused(format!("has shape {} of {kind:?}: no such array fits into memory", list(&shape)))
    })?;
    if let Some(value) = entry("strides")?.filter(|value| !value.is_none()) {
        let strides: Vec<i64> = value.extract().map_err(|_| other("strides", &value))?;
        if strides.len() != shape.len() {
            let why = format!("has {} strides for {} dimensions", strides.len(), shape.len());
            return Err(refused(why));
        }
        if !in_order(&shape, &strides, item_bytes as i64) {
            return Err(usage(
                py,
                what,
                scattered(&list(&shape), &list(&strides), "bytes", "a contiguous copy"),
            ));
        }
    }
    Ok(View {
        address: address as *mut u8,
        len_bytes,
        writable: !read_only,
        framework: framework_of(object)?,
        keeper: Keeper::Objects { _objects: vec![object.clone().unbind()] },
        watch: None,
        on_gpu: true,
    })
}

/// Size in bytes of an element type as numpy writes it: byte order, kind, and a size, which for text counts characters
/// of 4 bytes.
fn item_bytes(kind: &str) -> Option<usize> {
    let [b'<' | b'>' | b'=' | b'|', letter, size @ ..] = kind.as_bytes() else { return None };
    let size: u32 = std::str::from_utf8(size).ok()?.parse().ok()?;
    match letter {
        b't' => None,
        b'U' => Some(size as usize * 4),
        _ => Some(size as usize),
    }
}

fn framework_of(object: &Bound<'_, PyAny>) -> PyResult<Framework> {
    let module = object.get_type().module()?;
    Ok(if module.to_str()?.starts_with("cupy") { Framework::Cupy } else { Framework::Other })
}

/// A module, if the program has imported it; this crate never imports it.
pub fn loaded<'py>(py: Python<'py>, name: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
    let modules = py.import(intern!(py, "sys"))?.getattr(intern!(py, "modules"))?;
    let module = modules.call_method1(intern!(py, "get"), (name,))?;
    Ok((!module.is_none()).then_some(module))
}

/// Whether elements are contiguous with the last dimension innermost. Strides are in units of `item`.
fn in_order(shape: &[i64], strides: &[i64], item: i64) -> bool {
    if shape.contains(&0) {
        return true;
    }
    let mut expected = Some(item);
    shape.len() == strides.len()
        && shape.iter().zip(strides).rev().all(|(len, stride)| {
            let fits = *len == 1 || Some(*stride) == expected;
            expected = expected.and_then(|expected| expected.checked_mul(*len));
            fits
        })
}

/// Bytes of an array with items of this size; `None` if no memory could hold it.
fn bytes_of(shape: &[i64], item_bytes: usize) -> Option<usize> {
    if shape.iter().any(|len| *len < 0) {
        return None;
    }
    if shape.contains(&0) {
        return Some(0);
    }
    let bytes =
        shape.iter().try_fold(item_bytes, |bytes, len| bytes.checked_mul(usize::try_from(*len).ok()?))?;
    (bytes <= isize::MAX as usize).then_some(bytes)
}

fn scattered(shape: &str, strides: &str, unit: &str, instead: &str) -> String {
    format!(
        "the array is not contiguous (shape {shape}, strides {strides} in {unit}), and only one run of bytes can be \
         registered: pass {instead}"
    )
}

/// Formats values as Python writes a tuple.
fn list<T: ToString>(values: &[T]) -> String {
    let parts: Vec<String> = values.iter().map(ToString::to_string).collect();
    let comma = if parts.len() == 1 { "," } else { "" };
    format!("({}{comma})", parts.join(", "))
}

/// Whether a format of the buffer protocol has Python objects among its elements: an `O` outside of names, which stand
/// between colons.
fn has_objects(format: &[u8]) -> bool {
    format.split(|byte| *byte == b':').step_by(2).any(|codes| codes.contains(&b'O'))
}

/// Whether the format is a signed integer of 8 bytes on this host.
pub fn is_int64(format: &CStr, item_bytes: usize) -> bool {
    let text = format.to_bytes();
    let kind =
        text.strip_prefix(b"<").or(text.strip_prefix(b"=")).or(text.strip_prefix(b"@")).unwrap_or(text);
    item_bytes == 8 && matches!(kind, b"l" | b"q")
}
