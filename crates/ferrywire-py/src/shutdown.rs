//! The end of objects and of the interpreter. Work that has to wait for the network runs on a thread of its own.
//!
//! Invariant: a garbage collection never waits for a peer, and no thread of this package uses the interpreter when it
//! ends, because Python ends such threads at an arbitrary point.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};
use std::{process, thread};

use ferrywire::Endpoint;
use pyo3::prelude::*;

/// How long peers may take to finish what is in flight when the program ends without closing them.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(1);
/// How long threads that have attached to the interpreter may take to finish.
const ATTACHED_MAX: Duration = Duration::from_secs(5);

/// Set once the interpreter is about to end.
static ENDING: AtomicBool = AtomicBool::new(false);
/// Threads that attach, or are attached, to the interpreter.
static ATTACHED: Count = Count::new();
/// Threads that are ending endpoints.
static CLOSING: Count = Count::new();

/// A count of threads in this process. The upper half is the process id: a forked child has none of its parent's
/// threads, so nothing would count them down there.
struct Count(AtomicU64);

impl Count {
    const fn new() -> Count {
        Count(AtomicU64::new(0))
    }

    /// The count in `value`, or 0 if another process stored it.
    fn number(process: u32, value: u64) -> u32 {
        if (value >> 32) as u32 == process { value as u32 } else { 0 }
    }

    /// Counts one more thread until the guard is dropped.
    fn one(&'static self) -> Counted {
        let here = process::id();
        let more = |value| Some(u64::from(here) << 32 | u64::from(Count::number(here, value) + 1));
        let _ = self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, more);
        Counted { count: self, process: here }
    }

    /// Waits until the count is zero or the time is up.
    fn wait(&self, until: Instant) {
        let here = process::id();
        while Count::number(here, self.0.load(Ordering::SeqCst)) > 0 && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// The guard of a [`Count`]; counts down when it is dropped.
pub struct Counted {
    count: &'static Count,
    process: u32,
}

impl Drop for Counted {
    fn drop(&mut self) {
        // A thread that forked counts down in the parent only.
        let less = |value| (Count::number(self.process, value) > 0).then(|| value - 1);
        let _ = self.count.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
    }
}

/// Runs `work` with the interpreter's lock, on a thread of the engine; does nothing once the interpreter ends.
pub fn attached(work: impl FnOnce()) {
    // Counted before the check, so that either `keep_out` sees the count or this thread sees the flag.
    let _one = ATTACHED.one();
    if !ENDING.load(Ordering::SeqCst) {
        Python::try_attach(|_| work());
    }
}

/// Lets no further thread attach, and waits for those that are attached.
fn keep_out() {
    ENDING.store(true, Ordering::SeqCst);
    ATTACHED.wait(Instant::now() + ATTACHED_MAX);
}

/// While the guard lives, the end of the program waits, for a limited time: a thread is ending an endpoint.
pub fn closing() -> Counted {
    CLOSING.one()
}

/// The engine's endpoint, shared by its peers, regions and transfers; it ends with the last of them.
pub struct Shared {
    endpoint: Option<Endpoint>,
    /// The process that opened the endpoint.
    process: u32,
}

impl Shared {
    /// Adds an endpoint to the list of those that are closed at the program's end.
    pub fn new(endpoint: Endpoint) -> Arc<Shared> {
        let shared = Arc::new(Shared { endpoint: Some(endpoint), process: process::id() });
        let mut all = all();
        all.retain(|each| each.strong_count() > 0);
        all.push(Arc::downgrade(&shared));
        shared
    }

    pub fn get(&self) -> &Endpoint {
        self.endpoint.as_ref().expect("taken only when it is dropped")
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        drop_later(self.endpoint.take());
    }
}

fn all() -> std::sync::MutexGuard<'static, Vec<Weak<Shared>>> {
    static ALL: Mutex<Vec<Weak<Shared>>> = Mutex::new(Vec::new());
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Drops a value on a thread of its own, because the drop may wait for peers.
pub fn drop_later(thing: impl Send + 'static) {
    let closing = closing();
    let run = move || {
        drop(thing);
        drop(closing);
    };
    // If the thread cannot be started, the value is dropped by this thread.
    if let Err(error) = thread::Builder::new().name("ferrywire-end".into()).spawn(run) {
        tracing::warn!(%error, "cannot start the thread that drops an object: the current thread drops it");
    }
}

/// Closes every endpoint of this process that is still open, and waits for those that are being ended. Called when the
/// interpreter is about to end.
#[pyfunction]
pub fn shutdown(py: Python<'_>) {
    let endpoints: Vec<Arc<Shared>> = all().drain(..).filter_map(|each| each.upgrade()).collect();
    let here = process::id();
    py.detach(|| {
        let until = Instant::now() + LEAVE_TIMEOUT;
        thread::scope(|scope| {
            for shared in endpoints.iter().filter(|shared| shared.process == here) {
                scope.spawn(|| shared.get().close(LEAVE_TIMEOUT));
            }
        });
        CLOSING.wait(until);
        keep_out();
    });
    // Their threads have ended; the process frees the rest.
    endpoints.into_iter().for_each(std::mem::forget);
}
