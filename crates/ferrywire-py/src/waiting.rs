//! How a thread waits: without the interpreter's lock, and in slices, so that Ctrl-C ends it.
//!
//! Invariant: a wait that is broken off leaves what was waited for as it is.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use ferrywire::{Error, Result};
use pyo3::prelude::*;

use crate::errors::{OrRaise, raised, usage};

/// How long signals may have to wait.
const SLICE: Duration = Duration::from_millis(50);
/// What `timeout=None` means to the engine.
pub const FOREVER: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// A `timeout` in seconds; `None` is for ever.
pub fn limit(py: Python<'_>, what: &str, seconds: Option<f64>) -> PyResult<Duration> {
    match seconds {
        None => Ok(FOREVER),
        Some(seconds) if seconds >= 0.0 => {
            Ok(Duration::try_from_secs_f64(seconds).map_or(FOREVER, |limit| limit.min(FOREVER)))
        }
        Some(seconds) => Err(usage(py, what, format!("{seconds} is not a number of seconds"))),
    }
}

/// Calls `wait` with short deadlines until it gives something else than that one was over, or the limit is.
pub fn sliced<T: Send>(
    py: Python<'_>,
    limit: Duration,
    mut wait: impl FnMut(Duration) -> Result<T> + Send,
) -> PyResult<T> {
    let start = Instant::now();
    loop {
        let left = limit.saturating_sub(start.elapsed());
        match py.detach(|| wait(left.min(SLICE))) {
            Err(error @ (Error::Deadline { .. } | Error::TimedOut { .. })) => {
                py.check_signals()?;
                let waited = start.elapsed();
                if waited >= limit {
                    return Err(raised(py, &after(error, waited)));
                }
            }
            other => return other.or_raise(py),
        }
    }
}

/// The same deadline, after all this time.
pub fn after(error: Error, waited: Duration) -> Error {
    match error {
        Error::Deadline { what, .. } => Error::Deadline { what, waited },
        Error::TimedOut { what, .. } => Error::TimedOut { what, limit: waited },
        other => other,
    }
}

/// What is there for somebody who has waited elsewhere, or else the deadline; `wait` would wait, and need not.
pub fn overdue<T: Send>(
    py: Python<'_>,
    waited_s: f64,
    wait: impl FnOnce(Duration) -> Result<T> + Send,
) -> PyResult<T> {
    let waited = Duration::try_from_secs_f64(waited_s).unwrap_or_default();
    py.detach(|| wait(Duration::ZERO)).map_err(|error| after(error, waited)).or_raise(py)
}

/// Runs something that waits by itself, on a thread of its own; the caller leaves it behind on Ctrl-C.
pub fn aside<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> PyResult<T> {
    let (tell, told) = mpsc::channel();
    let name = "ferrywire-call".to_owned();
    let started = thread::Builder::new().name(name).spawn(move || drop(tell.send(work())));
    started.map_err(|error| raised(py, &Error::io("start a thread", &error)))?;
    // Each `recv` is a wait of its own; a receiver is not shared between threads.
    let told = std::sync::Mutex::new(told);
    loop {
        let outcome = py.detach(|| told.lock().unwrap_or_else(|e| e.into_inner()).recv_timeout(SLICE));
        match outcome {
            Ok(outcome) => return outcome.or_raise(py),
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(raised(py, &Error::Bug("a thread ended without an answer".into())));
            }
        }
    }
}
