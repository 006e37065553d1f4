//! Memory whose owner we were given: let go in the background, and its owner dropped when nothing touches it.
//!
//! Such a region's life: `registered -> draining -> free`. It drains from when its last handle is gone: peers are
//! refused, every worker is asked to let go of it, and operations under way end by themselves.
//!
//! Invariant: an owner is dropped where that may block, by whoever deregisters or by the thread here, with no lock of
//! ours held; never by a progress thread. Read next: `worker/quiesce.rs`, what workers answer.
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

/// How long the thread waits between two looks at memory that drains, at first and at most.
const LOOK_MIN: Duration = Duration::from_micros(100);
const LOOK_MAX: Duration = Duration::from_millis(20);

/// The thread that drops owners. It ends with [`Running`], once it has dropped them all.
pub(crate) struct Releaser(Sender<Arc<Memory>>);

impl Releaser {
    pub fn start(running: Weak<Running>) -> io::Result<Releaser> {
        let (sender, receiver) = mpsc::channel();
        let name = "ferrywire-own".into();
        thread::Builder::new().name(name).spawn(move || run(&running, &receiver))?;
        Ok(Releaser(sender))
    }

    /// Takes memory that nobody names any more, and that peers are refused.
    pub fn give(&self, memory: Arc<Memory>) {
        // The thread outlives this handle; were it gone, the memory would go here.
        let _ = self.0.send(memory);
    }
}

fn run(running: &Weak<Running>, given: &Receiver<Arc<Memory>>) {
    let mut draining: Vec<Draining> = Vec::new();
    let mut pause = LOOK_MIN;
    loop {
        let next = if draining.is_empty() {
            given.recv().map_err(|_| RecvTimeoutError::Disconnected)
        } else {
            given.recv_timeout(pause)
        };
        match next {
            Ok(memory) => {
                draining.extend([memory].into_iter().chain(given.try_iter()).map(Draining::new));
                pause = LOOK_MIN;
            }
            Err(RecvTimeoutError::Timeout) => pause = LOOK_MAX.min(pause * 2),
            Err(RecvTimeoutError::Disconnected) if draining.is_empty() => return,
            // The endpoint is on its way out.
            Err(RecvTimeoutError::Disconnected) => thread::sleep(LOOK_MIN),
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
    /// Operations used it before the workers were asked first: their connections may be lost while they are waited for.
    was_used: bool,
    /// What the workers are asked at present.
    asked: Option<Arc<Abandon>>,
    /// No operation uses it, and the workers were asked since whether lanes have forgotten it, and NICs have sent it.
    last: bool,
}

impl Draining {
    fn new(memory: Arc<Memory>) -> Draining {
        Draining { was_used: memory.used(), memory, asked: None, last: false }
    }

    /// Whether nothing of the endpoint touches the memory; if not, asks for it.
    fn is_free(&mut self, running: &Running) -> bool {
        let asked = self.asked.get_or_insert_with(|| worker::ask_for_region(&running.workers, &self.memory));
        if running.context().closing.load(Ordering::SeqCst) {
            // Its threads may have ended, and answer no more.
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
