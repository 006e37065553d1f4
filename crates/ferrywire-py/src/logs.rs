//! Carries the engine's log to Python's `logging`.
//!
//! Threads of the engine put records into a bounded queue; a Python thread (`_log.py`) takes them out. Records that do
//! not fit are counted.
//! Invariant: a thread that logs never waits.

use std::collections::VecDeque;
use std::fmt::{self, Write};
use std::process;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use tracing::field::{Field, Visit};
use tracing::span;
use tracing::{Event, Level, Metadata, Subscriber};

/// Records that may wait in the queue.
const RECORDS_MAX: usize = 1024;

/// The lowest level that is wanted, as `logging` counts.
static LEAST: AtomicU8 = AtomicU8::new(WARNING);
const DEBUG: u8 = 10;
const INFO: u8 = 20;
const WARNING: u8 = 30;
const ERROR: u8 = 40;

struct Queue {
    /// The process that owns the queue.
    process: OnceLock<u32>,
    waiting: Mutex<Waiting>,
    filled: Condvar,
    /// The queue of a forked child. The records in this queue belong to the parent, and a thread of the parent may hold
    /// its lock.
    of_child: OnceLock<Box<Queue>>,
}

struct Waiting {
    records: VecDeque<(u8, String)>,
    lost: u64,
    ended: bool,
}

impl Waiting {
    const NEW: Waiting = Waiting { records: VecDeque::new(), lost: 0, ended: false };
}

impl Queue {
    const fn new() -> Queue {
        Queue {
            process: OnceLock::new(),
            waiting: Mutex::new(Waiting::NEW),
            filled: Condvar::new(),
            of_child: OnceLock::new(),
        }
    }

    /// The queue of this process.
    fn here() -> &'static Queue {
        static FIRST: Queue = Queue::new();
        let here = process::id();
        let mut queue = &FIRST;
        while *queue.process.get_or_init(|| here) != here {
            queue = queue.of_child.get_or_init(|| Box::new(Queue::new()));
        }
        queue
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, level: u8, text: String) {
        let mut waiting = self.lock();
        if waiting.records.len() < RECORDS_MAX {
            waiting.records.push_back((level, text));
        } else {
            waiting.lost += 1;
        }
        drop(waiting);
        self.filled.notify_one();
    }

    /// Waits for records and takes all of them; `None` when the log has ended.
    fn take(&self) -> Option<Vec<(u8, String)>> {
        let mut waiting = self.lock();
        while waiting.records.is_empty() && !waiting.ended {
            waiting = self.filled.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
        let mut records: Vec<_> = waiting.records.drain(..).collect();
        let lost = std::mem::take(&mut waiting.lost);
        if lost > 0 {
            records.push((WARNING, format!("{lost} records were lost: the log was not read fast enough")));
        }
        (!records.is_empty()).then_some(records)
    }
}

/// Subscribes to the engine's events, unless this process has a subscriber already.
pub fn start() {
    // Assigns the first queue to this process before it can fork.
    Queue::here();
    let _ = tracing::subscriber::set_global_default(ToPython);
}

/// Waits for records of the log, as `(level, text)`; None when the log has ended.
#[pyfunction]
pub fn log_take(py: Python<'_>) -> Option<Vec<(u8, String)>> {
    py.detach(|| Queue::here().take())
}

/// Ends the log: `log_take` returns the remaining records, then None.
#[pyfunction]
pub fn log_stop() {
    let queue = Queue::here();
    queue.lock().ended = true;
    queue.filled.notify_all();
}

/// Sets the lowest level, as `logging` counts, at which records are made.
#[pyfunction]
pub fn log_level(level: i64) {
    LEAST.store(level.clamp(0, 255) as u8, Ordering::Relaxed);
}

/// Asks `logging` which level is wanted now.
pub fn refresh_level(py: Python<'_>) -> PyResult<()> {
    static REFRESH: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let refresh = REFRESH
        .get_or_try_init(py, || py.import("ferrywire._log")?.getattr("refresh_level").map(Bound::unbind))?;
    run(py, refresh).map(drop)
}

unsafe extern "C-unwind" {
    /// `PyObject_CallNoArgs`, declared with an ABI that may unwind; see [`run`].
    fn PyObject_CallNoArgs(callable: *mut ffi::PyObject) -> *mut ffi::PyObject;
}

/// Calls a Python function. When the interpreter ends, Python ends the threads that run Python code by unwinding them.
/// Unwinding through Rust frames would abort the process, so such a thread stays here for ever instead.
fn run<'py>(py: Python<'py>, function: &Py<PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let stays = Stays;
    // SAFETY: the interpreter's lock is held and the function is alive. The result is a new reference, or null with an
    // exception set. Unwinding ends at `stays`.
    let given = unsafe { Bound::from_owned_ptr_or_err(py, PyObject_CallNoArgs(function.as_ptr())) };
    std::mem::forget(stays);
    given
}

/// A guard that blocks the thread for ever when it is dropped by unwinding.
struct Stays;

impl Drop for Stays {
    fn drop(&mut self) {
        loop {
            std::thread::park();
        }
    }
}

struct ToPython;

fn level_of(metadata: &Metadata<'_>) -> u8 {
    match *metadata.level() {
        Level::ERROR => ERROR,
        Level::WARN => WARNING,
        Level::INFO => INFO,
        _ => DEBUG,
    }
}

impl Subscriber for ToPython {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && level_of(metadata) >= LEAST.load(Ordering::Relaxed)
    }

    fn register_callsite(&self, _: &'static Metadata<'static>) -> tracing::subscriber::Interest {
        // The level changes while the program runs, so events are not cached as disabled.
        tracing::subscriber::Interest::sometimes()
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut text = Text::default();
        event.record(&mut text);
        Queue::here().put(level_of(event.metadata()), text.whole());
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

/// A record's message, followed by its fields.
#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Text {
    fn whole(self) -> String {
        if self.fields.is_empty() { self.message } else { format!("{} ({})", self.message, self.fields) }
    }
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let into = if field.name() == "message" { &mut self.message } else { &mut self.fields };
        if !into.is_empty() {
            into.push_str(", ");
        }
        // Writing to a string cannot fail.
        let _ = match field.name() {
            "message" => write!(into, "{value:?}"),
            name => write!(into, "{name}={value:?}"),
        };
    }
}
