//! The engine's errors as Python exceptions: one class per kind of error, and one per cause that programs
//! distinguish.
//!
//! The classes are written in Python (`python/ferrywire/_errors.py`), because some have two bases.
//! Invariant: the message is the engine's, unchanged.

use ferrywire::{Error, ErrorKind};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyModule;

/// Converts the engine's result to Python's: the value, or a raised exception.
pub trait OrRaise<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T>;
}

impl<T, E: Into<Error>> OrRaise<T> for Result<T, E> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| raised(py, &error.into()))
    }
}

/// The exception for an error of the engine.
pub fn raised(py: Python<'_>, error: &Error) -> PyErr {
    let message = error.to_string();
    let peer = match error {
        Error::PeerLost { peer, .. }
        | Error::PeerClosed { peer }
        | Error::ProtocolViolation { peer, .. }
        | Error::AccessRefused { peer, .. } => Some(peer.as_str()),
        Error::Unreachable { address, .. } | Error::Refused { address, .. } => Some(address.as_str()),
        Error::Stalled { peer, .. } | Error::TimedOut { peer, .. } => peer.as_deref(),
        _ => None,
    };
    let code = match error {
        Error::Io { code, .. } => *code,
        _ => None,
    };
    let facts = (kind_of(error), peer, reason_of(error));
    make(py, class_of(error), code, &message, facts).unwrap_or_else(|failed| failed)
}

/// The `UsageError` for an argument that is wrong, found before the engine is called.
pub fn usage(py: Python<'_>, what: &str, why: impl Into<String>) -> PyErr {
    raised(py, &Error::invalid(what, why))
}

fn class_of(error: &Error) -> &'static str {
    match error {
        Error::PeerLost { .. } => "PeerLost",
        Error::PeerClosed { .. } => "PeerClosed",
        Error::ProtocolViolation { .. } => "ProtocolViolation",
        Error::AccessRefused { .. } => "AccessRefused",
        Error::Unreachable { .. } => "Unreachable",
        Error::Refused { .. } => "Refused",
        Error::Phase { error, .. } => class_of(error),
        Error::Truncated { .. } => "Truncated",
        Error::Cancelled => "Cancelled",
        Error::Closed => "Closed",
        other => match other.kind() {
            ErrorKind::Usage => "UsageError",
            ErrorKind::Local => "LocalError",
            ErrorKind::Gpu => "GpuError",
            // Endpoints of this package have no plugin.
            ErrorKind::Plugin => "Error",
            ErrorKind::Peer | ErrorKind::Refused => "PeerError",
            ErrorKind::Timeout => "TimedOut",
            ErrorKind::Internal => "InternalError",
        },
    }
}

fn kind_of(error: &Error) -> &'static str {
    match error.kind() {
        ErrorKind::Usage => "usage",
        ErrorKind::Local => "local",
        ErrorKind::Gpu => "gpu",
        ErrorKind::Plugin => "plugin",
        ErrorKind::Peer => "peer",
        ErrorKind::Refused => "refused",
        ErrorKind::Timeout => "timeout",
        ErrorKind::Internal => "internal",
    }
}

/// The cause as one word for programs, if the engine distinguishes causes of this error.
fn reason_of(error: &Error) -> Option<&'static str> {
    match error {
        Error::Unreachable { cause, .. } => Some(cause.as_str()),
        Error::Refused { reason, .. } => Some(reason.as_str()),
        Error::PeerLost { cause, .. } => Some(cause.as_str()),
        Error::Phase { error, .. } => reason_of(error),
        _ => None,
    }
}

fn make(
    py: Python<'_>,
    class: &str,
    code: Option<i32>,
    message: &str,
    (kind, peer, reason): (&str, Option<&str>, Option<&str>),
) -> PyResult<PyErr> {
    static CLASSES: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let classes = CLASSES.get_or_try_init(py, || py.import("ferrywire._errors").map(Bound::unbind))?;
    let class = classes.bind(py).getattr(class)?;
    let exception = match code {
        // `OSError` takes its `errno` from the first of two arguments.
        Some(code) => class.call1((code, message))?,
        None => class.call1((message,))?,
    };
    exception.setattr("kind", kind)?;
    exception.setattr("peer", peer)?;
    exception.setattr("reason", reason)?;
    Ok(PyErr::from_value(exception))
}
