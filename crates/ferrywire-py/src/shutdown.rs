//! The end of objects and of the interpreter: what has to wait for the network does so on a thread of its own.
//!
//! Invariant: a garbage collection never waits for a peer, and no thread of the engine wants the interpreter when it ends:
//! Python ends threads that do, in the midst of what they are at.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};
use std::{process, thread};

use ferrywire::Endpoint;
use pyo3::prelude::*;

/// Peers have this long to finish what is in flight when the program ends without having closed.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(1);
/// Threads of ours that have asked for the interpreter have this long to be done with it.
const ATTACHED_MAX: Duration = Duration::from_secs(5);

/// The interpreter is about to end.
static ENDING: AtomicBool = AtomicBool::new(false);
/// Threads of ours that want it, or have it.
static ATTACHED: Count = Count::new();
/// Threads of ours that end endpoints.
static CLOSING: Count = Count::new();

/// How many threads of this process are at something. With the number goes the process that it is of: a forked child has
/// none of its parent's threads, and nobody would count them down there.
struct Count(AtomicU64);

impl Count {
    const fn new() -> Count {
        Count(AtomicU64::new(0))
    }

    /// What the number is, in this process.
    fn number(process: u32, value: u64) -> u32 {
        if (value >> 32) as u32 == process { value as u32 } else { 0 }
    }

    /// One more, for as long as what is given lives.
    fn one(&'static self) -> Counted {
        let here = process::id();
        let more = |value| Some(u64::from(here) << 32 | u64::from(Count::number(here, value) + 1));
        let _ = self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, more);
        Counted { count: self, process: here }
    }

    /// Waits until there are none, or it is so late.
    fn wait(&self, until: Instant) {
        let here = process::id();
        while Count::number(here, self.0.load(Ordering::SeqCst)) > 0 && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// One of a [`Count`].
pub struct Counted {
    count: &'static Count,
    process: u32,
}

impl Drop for Counted {
    fn drop(&mut self) {
        // What a thread was at when it forked is its parent's.
        let less = |value| (Count::number(self.process, value) > 0).then(|| value - 1);
        let _ = self.count.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
    }
}

/// Does something with the interpreter's lock, on a thread of the engine's; nothing once the interpreter ends.
pub fn attached(work: impl FnOnce()) {
    // Counted before it looks, so that one of both sees the other.
    let _one = ATTACHED.one();
    if !ENDING.load(Ordering::SeqCst) {
        Python::try_attach(|_| work());
    }
}

/// From here on nobody attaches; waits for those who have.
fn keep_out() {
    ENDING.store(true, Ordering::SeqCst);
    ATTACHED.wait(Instant::now() + ATTACHED_MAX);
}

/// The program's end waits, for a while, as long as what is given lives: a thread ends an endpoint.
pub fn closing() -> Counted {
    CLOSING.one()
}

/// An endpoint that its peers share: it ends when the last of them is gone.
pub struct Shared {
    endpoint: Option<Endpoint>,
    /// The process that it works in.
    process: u32,
}

impl Shared {
    /// Takes an endpoint into the list of those that are closed at the program's end.
    pub fn new(endpoint: Endpoint) -> Arc<Shared> {
        let shared = Arc::new(Shared { endpoint: Some(endpoint), process: process::id() });
        let mut all = all();
        all.retain(|each| each.strong_count() > 0);
        all.push(Arc::downgrade(&shared));
        shared
    }

    /// The endpoint.
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

/// Drops something that may wait then, on a thread of its own: it does not wait for others' peers too.
pub fn drop_later(thing: impl Send + 'static) {
    let closing = closing();
    let run = move || {
        drop(thing);
        drop(closing);
    };
    // Without a thread it is dropped here.
    if let Err(error) = thread::Builder::new().name("ferrywire-end".into()).spawn(run) {
        tracing::warn!(%error, "no thread for the end of an object");
    }
}

/// Closes every endpoint of this process that is still open, and waits for those that are being ended; called when the
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
    // Their threads have ended; what is left of them goes with the process.
    endpoints.into_iter().for_each(std::mem::forget);
}
