//! Waits without the interpreter's lock, in slices, so that Ctrl-C ends a wait.
//!
//! Invariant: an interrupted wait leaves the operation as it is.

use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ferrywire::{Error, Result};
use pyo3::prelude::*;

use crate::errors::{OrRaise, raised, usage};
use crate::shutdown::drop_later;
use crate::wakeup::Wakeup;

/// The longest delay of signals such as Ctrl-C.
const SLICE: Duration = Duration::from_millis(50);
/// The engine's timeout for `timeout=None`.
pub const FOREVER: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// Converts a `timeout` in seconds; `None` is no limit.
pub fn limit(py: Python<'_>, what: &str, seconds: Option<f64>) -> PyResult<Duration> {
    match seconds {
        None => Ok(FOREVER),
        Some(seconds) if seconds >= 0.0 => {
            Ok(Duration::try_from_secs_f64(seconds).map_or(FOREVER, |limit| limit.min(FOREVER)))
        }
        Some(seconds) => Err(usage(py, what, format!("{seconds} is not a number of seconds"))),
    }
}

/// Calls `wait` with a short timeout again and again, until it returns something else than a timeout, or `limit` has
/// passed.
pub fn sliced<T: Send, E: Into<Error>>(
    py: Python<'_>,
    limit: Duration,
    mut wait: impl FnMut(Duration) -> Result<T, E> + Send,
) -> PyResult<T> {
    let start = Instant::now();
    loop {
        let left = limit.saturating_sub(start.elapsed());
        match py.detach(|| wait(left.min(SLICE)).map_err(E::into)) {
            Err(error @ (Error::Stalled { .. } | Error::TimedOut { .. })) => {
                py.check_signals()?;
                let waited = start.elapsed();
                if waited >= limit {
                    // A caller with a zero timeout has not waited.
                    let waited = if limit.is_zero() { limit } else { waited };
                    return Err(raised(py, &after(error, waited)));
                }
            }
            other => return other.or_raise(py),
        }
    }
}

/// The timeout error with the whole time waited.
pub fn after(error: Error, waited: Duration) -> Error {
    match error {
        Error::Stalled { what, peer, .. } => Error::Stalled { what, peer, waited },
        Error::TimedOut { what, peer, .. } => Error::TimedOut { what, peer, timeout: waited },
        other => other,
    }
}

/// After a wait elsewhere (in an event loop): the result if there is one by now, or else the timeout error.
pub fn overdue<T: Send, E: Into<Error>>(
    py: Python<'_>,
    waited_s: f64,
    wait: impl FnOnce(Duration) -> Result<T, E> + Send,
) -> PyResult<T> {
    let waited = Duration::try_from_secs_f64(waited_s).unwrap_or_default();
    py.detach(|| wait(Duration::ZERO).map_err(|error| after(error.into(), waited))).or_raise(py)
}

/// Runs `work`, which blocks, on a thread of its own and waits for it. Ctrl-C abandons the thread.
pub fn aside<T: Send + 'static, E: Into<Error>>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> PyResult<T> {
    begin_aside(py, || work().map_err(E::into))?.wait(py)
}

/// The result of `work` that runs on a thread of its own.
pub struct Aside<T>(Mutex<Receiver<Result<T>>>);

/// Starts `work` on a thread of its own.
pub fn begin_aside<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> std::result::Result<Aside<T>, NotStarted> {
    let (tell, reported) = mpsc::channel();
    on_a_thread(py, move || drop(tell.send(unless_it_panics(work))))?;
    // A receiver cannot be shared between threads without a lock.
    Ok(Aside(Mutex::new(reported)))
}

impl<T: Send> Aside<T> {
    /// Waits for the result; Ctrl-C abandons the thread.
    pub fn wait(self, py: Python<'_>) -> PyResult<T> {
        loop {
            let outcome = py.detach(|| locked(&self.0).recv_timeout(SLICE));
            match outcome {
                Ok(outcome) => return outcome.or_raise(py),
                Err(RecvTimeoutError::Timeout) => py.check_signals()?,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(raised(
                        py,
                        &Error::Internal("the thread of a blocking call ended without a result".into()),
                    ));
                }
            }
        }
    }
}

/// The error of a thread that could not be started. Its work has not begun.
pub struct NotStarted(pub PyErr);

impl From<NotStarted> for PyErr {
    fn from(NotStarted(error): NotStarted) -> PyErr {
        error
    }
}

fn on_a_thread(py: Python<'_>, work: impl FnOnce() + Send + 'static) -> std::result::Result<(), NotStarted> {
    let started = thread::Builder::new().name("ferrywire-call".into()).spawn(work);
    started.map(drop).map_err(|error| NotStarted(raised(py, &Error::io("start a thread", &error))))
}

/// Turns a panic into an error, because a caller waits for the result.
fn unless_it_panics<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let words = panic.downcast_ref::<&str>().copied();
        let words = words.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
        Err(Error::Internal(format!("panicked: {}", words.unwrap_or("no message"))))
    })
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Converts an outcome to a Python object, with the interpreter's lock.
type Finish = Box<dyn FnOnce(Python<'_>) -> PyResult<Py<PyAny>> + Send>;

/// A call that runs on a thread of its own, for event loops. A caller may drop it; the thread then finishes alone.
#[pyclass(frozen, module = "ferrywire")]
pub struct PendingCall(Arc<Mutex<Progress>>);

#[derive(Default)]
struct Progress {
    outcome: Option<Finish>,
    over: bool,
    wakeups: Vec<ferrywire::Wakeup>,
}

impl PendingCall {
    /// Starts the call on a thread of its own; `finish` converts its result.
    pub fn begin<T: Send + 'static>(
        py: Python<'_>,
        work: impl FnOnce() -> Result<T> + Send + 'static,
        finish: impl FnOnce(Python<'_>, T) -> PyResult<Py<PyAny>> + Send + 'static,
    ) -> std::result::Result<PendingCall, NotStarted> {
        let progress = Arc::new(Mutex::new(Progress::default()));
        let its = Arc::downgrade(&progress);
        on_a_thread(py, move || {
            let outcome = unless_it_panics(work);
            // The caller has dropped the call: its result is dropped here.
            let Some(progress) = its.upgrade() else { return };
            let mut progress = locked(&progress);
            progress.over = true;
            progress.outcome = Some(Box::new(move |py| finish(py, outcome.or_raise(py)?)));
            progress.wakeups.drain(..).for_each(|wakeup| wakeup.wake());
        })?;
        Ok(PendingCall(progress))
    }
}

#[pymethods]
impl PendingCall {
    /// The result in a tuple, once; None while the call is in flight.
    fn poll(&self, py: Python<'_>) -> PyResult<Option<(Py<PyAny>,)>> {
        let outcome = locked(&self.0).outcome.take();
        outcome.map(|finish| finish(py).map(|given| (given,))).transpose()
    }

    /// Whether the call has ended. Its result stays available.
    fn done(&self) -> bool {
        locked(&self.0).over
    }

    fn _arm(&self, wakeup: &Wakeup) {
        let mut progress = locked(&self.0);
        let knows = |known: &ferrywire::Wakeup| known.as_raw_fd() == wakeup.wakeup.as_raw_fd();
        match progress.over {
            true => wakeup.wakeup.wake(),
            // An event loop with several calls asks each of them again whenever one has ended.
            false if progress.wakeups.iter().any(knows) => {}
            false => progress.wakeups.push(wakeup.wakeup.clone()),
        }
    }
}

impl Drop for PendingCall {
    fn drop(&mut self) {
        // The result may be a peer that has to be closed.
        let outcome = locked(&self.0).outcome.take();
        if outcome.is_some() {
            drop_later(outcome);
        }
    }
}
