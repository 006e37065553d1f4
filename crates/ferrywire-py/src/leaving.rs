//! The end of objects and of the interpreter: what has to wait for the network does so on a thread of its own.
//!
//! Invariant: a garbage collection never waits for a peer, and no thread of the engine wants the interpreter when it ends:
//! Python ends threads that do, in the midst of what they are at.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use ferrywire::Endpoint;
use pyo3::prelude::*;

/// Peers have this long to finish what is in flight when the program ends without having closed.
const LEAVE_DEADLINE: Duration = Duration::from_secs(1);
/// Threads of ours that have asked for the interpreter have this long to be done with it.
const ATTACHED_MAX: Duration = Duration::from_secs(5);

/// The interpreter is about to end.
static ENDING: AtomicBool = AtomicBool::new(false);
/// Threads of ours that want it, or have it.
static ATTACHED: AtomicUsize = AtomicUsize::new(0);

/// Does something with the interpreter's lock, on a thread of the engine's; nothing once the interpreter ends.
pub fn attached(work: impl FnOnce()) {
    // Counted before it looks, so that one of both sees the other.
    ATTACHED.fetch_add(1, Ordering::SeqCst);
    if !ENDING.load(Ordering::SeqCst) {
        Python::try_attach(|_| work());
    }
    ATTACHED.fetch_sub(1, Ordering::SeqCst);
}

/// From here on nobody attaches; waits for those who have.
fn keep_out() {
    ENDING.store(true, Ordering::SeqCst);
    let since = Instant::now();
    while ATTACHED.load(Ordering::SeqCst) > 0 && since.elapsed() < ATTACHED_MAX {
        thread::sleep(Duration::from_millis(1));
    }
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
        let shared = Arc::new(Shared { endpoint: Some(endpoint), process: std::process::id() });
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
        let endpoint = self.endpoint.take();
        later(move || drop(endpoint));
    }
}

fn all() -> std::sync::MutexGuard<'static, Vec<Weak<Shared>>> {
    static ALL: Mutex<Vec<Weak<Shared>>> = Mutex::new(Vec::new());
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

type Job = Box<dyn FnOnce() + Send>;

/// Does something that may wait, soon, on a thread that may.
pub fn later(job: impl FnOnce() + Send + 'static) {
    /// The thread's queue, and the process that has the thread: a forked child has none.
    static JOBS: Mutex<Option<(u32, Sender<Job>)>> = Mutex::new(None);
    let here = std::process::id();
    let mut jobs = JOBS.lock().unwrap_or_else(PoisonError::into_inner);
    if jobs.as_ref().is_none_or(|(process, _)| *process != here) {
        *jobs = Some((here, begin()));
    }
    let sent = jobs.as_ref().map(|(_, jobs)| jobs.send(Box::new(job)));
    drop(jobs);
    // Without the thread it is done here.
    if let Some(Err(unsent)) = sent {
        (unsent.0)();
    }
}

fn begin() -> Sender<Job> {
    let (jobs, todo) = mpsc::channel::<Job>();
    let run = move || todo.into_iter().for_each(|job| job());
    if let Err(error) = thread::Builder::new().name("ferrywire-end".into()).spawn(run) {
        tracing::warn!(%error, "no thread for the end of objects");
    }
    jobs
}

/// Closes every endpoint of this process that is still open; called when the interpreter is about to end.
#[pyfunction]
pub fn leave(py: Python<'_>) {
    let endpoints: Vec<Arc<Shared>> = all().drain(..).filter_map(|each| each.upgrade()).collect();
    let here = std::process::id();
    py.detach(|| {
        thread::scope(|scope| {
            for shared in endpoints.iter().filter(|shared| shared.process == here) {
                scope.spawn(|| shared.get().close(LEAVE_DEADLINE));
            }
        });
        keep_out();
    });
    // Their threads have ended; what is left of them goes with the process.
    endpoints.into_iter().for_each(std::mem::forget);
}
