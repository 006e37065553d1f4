//! What an event loop watches: the engine's `Wakeup`, and the way from an awaitable method to `_aio.py`.

use std::os::fd::{AsRawFd, RawFd};

use pyo3::PyClass;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::endpoint::CLOSE_SECONDS;
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

/// A coroutine of `_aio.py` that begins something, with a method and its arguments, and waits for it.
pub fn errand<'py>(
    object: &Bound<'py, impl PyClass>,
    begin: &str,
    arguments: &[Bound<'py, PyAny>],
) -> PyResult<Bound<'py, PyAny>> {
    let py = object.py();
    let mut all = vec![object.as_any().getattr(begin)?];
    all.extend(arguments.iter().cloned());
    py.import("ferrywire._aio")?.getattr("errand")?.call1(PyTuple::new(py, all)?)
}

/// The end of an `async with` block.
pub fn leave<'py>(
    object: &Bound<'py, impl PyClass>,
    exception: &Bound<'py, PyTuple>,
) -> PyResult<Bound<'py, PyAny>> {
    let aio = object.py().import("ferrywire._aio")?;
    aio.getattr("leave")?.call1((object, CLOSE_SECONDS, value_of(exception)))
}

/// The end of a `with` block: what it raised comes out, and that closing failed after it is a note there.
pub fn left(py: Python<'_>, exception: &Bound<'_, PyTuple>, closed: PyResult<()>) -> PyResult<()> {
    let Err(failed) = closed else { return Ok(()) };
    match value_of(exception) {
        Some(raised) if failed.is_instance_of::<PyException>(py) => {
            let aio = py.import("ferrywire._aio")?;
            aio.getattr("note")?.call1((raised, failed.value(py))).map(drop)
        }
        _ => Err(failed),
    }
}

/// The exception among what the end of a block is given, if there was one.
fn value_of<'py>(exception: &Bound<'py, PyTuple>) -> Option<Bound<'py, PyAny>> {
    exception.get_item(1).ok().filter(|value| !value.is_none())
}

/// An awaitable that gives the object.
pub fn itself<'py>(object: &Bound<'py, impl PyClass>) -> PyResult<Bound<'py, PyAny>> {
    object.py().import("ferrywire._aio")?.getattr("itself")?.call1((object,))
}
