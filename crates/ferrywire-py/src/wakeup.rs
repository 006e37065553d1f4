//! What an event loop watches: the engine's `Wakeup`, and the way from an awaitable method to `_aio.py`.

use std::os::fd::{AsRawFd, RawFd};

use pyo3::PyClass;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::errors::OrRaise;

/// A descriptor that is readable when one of the things attached to it may have something to give.
#[pyclass(frozen, module = "ferrywire")]
pub struct Wakeup {
    pub wakeup: ferrywire::Wakeup,
}

#[pymethods]
impl Wakeup {
    #[new]
    fn new(py: Python<'_>) -> PyResult<Wakeup> {
        Ok(Wakeup { wakeup: ferrywire::Wakeup::new().or_raise(py)? })
    }

    /// The descriptor.
    fn fileno(&self) -> RawFd {
        self.wakeup.as_raw_fd()
    }

    /// Makes it not readable; look at what is attached afterwards.
    fn clear(&self) {
        self.wakeup.clear();
    }
}

/// A coroutine of `_aio.py` for an object.
pub fn coroutine<'py>(
    object: &Bound<'py, impl PyClass>,
    name: &str,
    timeout: Option<f64>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = object.py();
    crate::waiting::limit(py, "timeout", timeout)?;
    py.import("ferrywire._aio")?.getattr(name)?.call1((object, timeout))
}

/// A blocking method with its arguments, on a thread of the event loop's pool.
pub fn in_thread<'py>(
    object: &Bound<'py, impl PyClass>,
    name: &str,
    arguments: &[Bound<'py, PyAny>],
) -> PyResult<Bound<'py, PyAny>> {
    let py = object.py();
    let mut all = vec![object.as_any().getattr(name)?];
    all.extend(arguments.iter().cloned());
    py.import("asyncio")?.getattr("to_thread")?.call1(PyTuple::new(py, all)?)
}

/// An awaitable that gives the object.
pub fn itself<'py>(object: &Bound<'py, impl PyClass>) -> PyResult<Bound<'py, PyAny>> {
    object.py().import("ferrywire._aio")?.getattr("itself")?.call1((object,))
}
