//! The `stream=` of operations: the GPU work that an operation comes after.
//!
//! `None` is the current stream of the tensor's framework, a number is a raw stream, any other value an object that has
//! a stream. Operations on memory that the engine allocated come after no stream unless one is named.
//!
//! Read next: the engine's `ordering.rs`.

use ferrywire::{MemoryLocation, StreamEvent};
use ferrywire_memory::cuda::{CudaGpu, RawStream};
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;

use crate::errors::{OrRaise, usage};
use crate::tensor::{Framework, loaded};

/// A raw stream of a GPU.
pub struct Named {
    pub gpu: u32,
    pub raw: usize,
}

impl Named {
    /// An event after the work that the stream has now. Waits for the driver without the interpreter's lock.
    pub fn ready(&self, py: Python<'_>) -> PyResult<StreamEvent> {
        py.detach(|| {
            let gpu = CudaGpu::open(self.gpu)?;
            // SAFETY: the stream's library or the caller guarantees that the stream is alive; the driver
            // reports a wrong one as an error.
            unsafe { StreamEvent::after_raw_stream(&gpu, self.raw as RawStream) }
        })
        .or_raise(py)
    }
}

/// The stream that an operation on memory of this location and framework comes after, if any.
pub fn named(
    py: Python<'_>,
    location: MemoryLocation,
    framework: Framework,
    stream: Option<&Bound<'_, PyAny>>,
) -> PyResult<Option<Named>> {
    let MemoryLocation::Cuda(gpu) = location else {
        return match stream {
            None => Ok(None),
            Some(_) => Err(usage(
                py,
                "stream",
                "the region is not memory of a CUDA GPU, so no stream orders its use",
            )),
        };
    };
    let raw = match stream {
        Some(stream) => Some(raw(stream)?),
        None => current(py, framework, gpu)?,
    };
    Ok(raw.map(|raw| Named { gpu, raw }))
}

/// The stream that has to wait for a transfer. Host memory has no current stream: only a named stream waits.
pub fn to_hold(
    py: Python<'_>,
    location: MemoryLocation,
    framework: Framework,
    stream: Option<&Bound<'_, PyAny>>,
) -> PyResult<Option<Named>> {
    match (location, stream) {
        (MemoryLocation::Cuda(_), _) => match named(py, location, framework, stream)? {
            None => {
                let why = "the stream that waits is not known, because the memory belongs to no library with a current \
                           stream, or to two: pass stream=";
                Err(usage(py, "stream", why))
            }
            found => Ok(found),
        },
        (_, None) => Ok(None),
        (_, Some(stream)) => {
            let Some(gpu) = gpu_of(stream) else {
                let why = "the memory is not of a GPU, and the stream does not tell which one it is of: give an object with \
                           device_index (torch) or device_id (cupy)";
                return Err(usage(py, "stream", why));
            };
            Ok(Some(Named { gpu, raw: raw(stream)? }))
        }
    }
}

/// The GPU of a stream, if its library reports it.
fn gpu_of(stream: &Bound<'_, PyAny>) -> Option<u32> {
    let py = stream.py();
    let names = [intern!(py, "device_index"), intern!(py, "device_id")];
    names.iter().find_map(|name| stream.getattr(*name).ok()?.extract().ok())
}

fn current(py: Python<'_>, framework: Framework, gpu: u32) -> PyResult<Option<usize>> {
    match framework {
        Framework::Other => Ok(None),
        Framework::Torch => {
            let Some(torch) = loaded(py, "torch")? else {
                return Ok(None);
            };
            let cuda = torch.getattr(intern!(py, "cuda"))?;
            raw(&cuda.call_method1(intern!(py, "current_stream"), (gpu,))?).map(Some)
        }
        Framework::Cupy => {
            let Some(cupy) = loaded(py, "cupy")? else {
                return Ok(None);
            };
            let ask = cupy.getattr(intern!(py, "cuda"))?.getattr(intern!(py, "get_current_stream"))?;
            let stream = match ask.call1((gpu,)) {
                // Older versions have one current stream for all GPUs.
                Err(error) if error.is_instance_of::<PyTypeError>(py) => ask.call0()?,
                of_gpu => of_gpu?,
            };
            raw(&stream).map(Some)
        }
    }
}

/// The raw stream of a number or an object: `cuda_stream` (PyTorch), `ptr` (CuPy), `__cuda_stream__()` (others).
fn raw(stream: &Bound<'_, PyAny>) -> PyResult<usize> {
    let py = stream.py();
    if let Ok(raw) = stream.extract() {
        return Ok(raw);
    }
    for name in [intern!(py, "cuda_stream"), intern!(py, "ptr")] {
        if let Ok(raw) = stream.getattr(name).and_then(|raw| raw.extract()) {
            return Ok(raw);
        }
    }
    if let Ok((_version, raw)) =
        stream.call_method0(intern!(py, "__cuda_stream__")).and_then(|pair| pair.extract::<(u64, usize)>())
    {
        return Ok(raw);
    }
    let kind = stream.get_type().qualname()?;
    Err(usage(
        py,
        "stream",
        format!("{kind} is not a CUDA stream: give a number, or an object with cuda_stream"),
    ))
}
