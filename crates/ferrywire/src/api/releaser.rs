//! Releases regions with an owner in the background, and drops the owner when nothing touches the memory.
//!
//! Such a region's states: `registered -> draining -> free`. It drains after its last handle is dropped:
//! peers are refused, every worker is asked to release it, and operations in flight end by themselves.
//!
//! Invariant: an owner is dropped where it may block: by the thread that deregisters, or by the thread here,
//! without a lock, and never by a progress thread.
//! Read next: `worker/quiesce.rs`, the requests to workers.
#![forbid(unsafe_code)]

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use super::running::Running;
use crate::core::worker::{self, Abandon};
use ferrywire_memory::Memory;

/// Pause between two checks of draining memory: the first, and the longest.
const POLL_MIN: Duration = Duration::from_micros(100);
const POLL_MAX: Duration = Duration::from_millis(20);

/// Sends memory to the thread that drops owners. That thread ends after [`Running`], once it has dropped all
/// owners.
pub(crate) struct Releaser(Sender<Arc<Memory>>);

impl Releaser {
    pub fn start(running: Weak<Running>) -> io::Result<Releaser> {
        let (sender, receiver) = mpsc::channel();
        let name = "ferrywire-own".into();
        thread::Builder::new().name(name).spawn(move || run(&running, &receiver))?;
        Ok(Releaser(sender))
    }

    /// Hands memory to the thread. No handle of the memory is left, and peers can no longer access it.
    pub fn give(&self, memory: Arc<Memory>) {
        // The thread outlives this handle. If it were gone, the memory would be dropped here.
        let _ = self.0.send(memory);
    }
}

fn run(running: &Weak<Running>, given: &Receiver<Arc<Memory>>) {
    let mut draining: Vec<Draining> = Vec::new();
    let mut pause = POLL_MIN;
    loop {
        let next = if draining.is_empty() {
            given.recv().map_err(|_| RecvTimeoutError::Disconnected)
        } else {
            given.recv_timeout(pause)
        };
        match next {
            Ok(memory) => {
                draining.extend([memory].into_iter().chain(given.try_iter()).map(Draining::new));
                pause = POLL_MIN;
            }
            Err(RecvTimeoutError::Timeout) => pause = POLL_MAX.min(pause * 2),
            Err(RecvTimeoutError::Disconnected) if draining.is_empty() => return,
            // The endpoint is being dropped, and no more memory comes: only wait for what is draining.
            Err(RecvTimeoutError::Disconnected) => thread::sleep(POLL_MIN),
        }
        draining.retain_mut(|each| {
            let free = running.upgrade().is_none_or(|running| each.is_free(&running));
            if free {
                drop_owner(&each.memory);
            }
            !free
        });
    }
}

struct Draining {
    memory: Arc<Memory>,
    /// Whether operations used the memory before the workers were first asked. Their connections may be lost
    /// while they drain.
    was_used: bool,
    /// The request to the workers that is not answered yet.
    asked: Option<Arc<Abandon>>,
    /// Whether the workers were asked a last time, after all operations on the memory had ended: then lanes
    /// forget the memory, and NICs finish sending it.
    last: bool,
}

impl Draining {
    fn new(memory: Arc<Memory>) -> Draining {
        Draining { was_used: memory.used(), memory, asked: None, last: false }
    }

    /// Whether nothing in the endpoint touches the memory; if not, requests its release.
    fn is_free(&mut self, running: &Running) -> bool {
        let asked = self.asked.get_or_insert_with(|| worker::ask_for_region(&running.workers, &self.memory));
        if running.context().closing.load(Ordering::SeqCst) {
            // The worker threads may have ended and would not answer the request.
            running.workers.poll_once();
        }
        if !asked.is_answered() || self.memory.used() {
            return false;
        }
        if !self.last && (self.was_used || running.may_have_lanes()) {
            (self.asked, self.last) = (None, true);
            return false;
        }
        true
    }
}

fn drop_owner(memory: &Memory) {
    let owner = memory.take_owner();
    if catch_unwind(AssertUnwindSafe(|| drop(owner))).is_err() {
        tracing::error!("the owner of a region of {} bytes panicked when it was dropped", memory.len());
    }
}
