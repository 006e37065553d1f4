//! The file descriptor that an event loop watches, and the way from an awaitable method to `_aio.py`.
//!
//! Read next: `python/ferrywire/_aio.py`.

use std::os::fd::{AsRawFd, RawFd};

use pyo3::PyClass;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::endpoint::CLOSE_SECONDS;
use crate::errors::OrRaise;

/// A file descriptor that becomes readable when an object armed with it may have a result.
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

    /// The file descriptor, which the wakeup owns.
    fn fileno(&self) -> RawFd {
        self.wakeup.as_raw_fd()
    }

    /// Makes the descriptor not readable; poll the armed objects afterwards.
    fn clear(&self) {
        self.wakeup.clear();
    }
}

/// Creates a coroutine of `_aio.py` for an object.
pub fn coroutine<'py>(
    object: &Bound<'py, impl PyClass>,
    name: &str,
    timeout: Option<f64>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = object.py();
    crate::waiting::limit(py, "timeout", timeout)?;
    py.import("ferrywire._aio")?.getattr(name)?.call1((object, timeout))
}

/// Creates a coroutine of `_aio.py` that starts a [`PendingCall`](crate::waiting::PendingCall) by a method
/// and its arguments, and awaits it.
pub fn pending_call<'py>(
    object: &Bound<'py, impl PyClass>,
    begin: &str,
    arguments: &[Bound<'py, PyAny>],
) -> PyResult<Bound<'py, PyAny>> {
    let py = object.py();
    let mut all = vec![object.as_any().getattr(begin)?];
    all.extend(arguments.iter().cloned());
    py.import("ferrywire._aio")?.getattr("pending_call")?.call1(PyTuple::new(py, all)?)
}

/// Closes an object at the end of an `async with` block.
pub fn leave<'py>(
    object: &Bound<'py, impl PyClass>,
    exception: &Bound<'py, PyTuple>,
) -> PyResult<Bound<'py, PyAny>> {
    let aio = object.py().import("ferrywire._aio")?;
    aio.getattr("leave")?.call1((object, CLOSE_SECONDS, value_of(exception)))
}

/// Handles the end of a `with` block: raises the block's exception, with a note if closing failed too.
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

/// The exception in the arguments of `__exit__`, if the block raised one.
fn value_of<'py>(exception: &Bound<'py, PyTuple>) -> Option<Bound<'py, PyAny>> {
    exception.get_item(1).ok().filter(|value| !value.is_none())
}

/// An awaitable that returns the object.
pub fn itself<'py>(object: &Bound<'py, impl PyClass>) -> PyResult<Bound<'py, PyAny>> {
    object.py().import("ferrywire._aio")?.getattr("itself")?.call1((object,))
}
