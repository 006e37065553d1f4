//! Making every worker let go of some memory, so that it can be given back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use super::Command;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::limits;
use crate::memory::Memory;
use crate::patience::Patience;
use crate::peer::Landing;

/// A request to all workers to let go of some memory, and which of them have answered.
pub(crate) struct Abandon {
    pub(super) gone: Box<dyn Fn(&Landing) -> bool + Send + Sync>,
    pub(super) answered: Box<[AtomicBool]>,
}

impl Abandon {
    /// The first worker that has not answered.
    fn missing(&self) -> Option<usize> {
        self.answered.iter().position(|answered| !answered.load(Ordering::Acquire))
    }

    /// Whether all have.
    pub fn is_answered(&self) -> bool {
        self.missing().is_none()
    }
}

/// Makes every worker stop placing bytes where `gone` says; returns when none does any more.
///
/// # Errors
/// [`Error::HeldUp`] about `what` when a worker does not answer within `limits::ABANDON_DEADLINE`, or cannot
/// because a call of a plugin does not return.
pub(crate) fn abandon(
    engine: &Engine,
    what: impl FnOnce() -> String,
    gone: impl Fn(&Landing) -> bool + Send + Sync + 'static,
) -> Result<()> {
    let request = ask(engine, gone);
    let mut patience = Patience::new(limits::ABANDON_DEADLINE);
    let start = Instant::now();
    // Each worker answers at its next turn; whoever has no owner is turned from here.
    while let Some(missing) = request.missing() {
        let stuck = engine.workers[missing].stuck();
        if stuck || patience.is_over(start.elapsed()) {
            let why = if stuck { ", in a call of a plugin that has not returned" } else { "" };
            let (what, by) = (what(), format!("progress thread {missing}{why}"));
            return Err(Error::HeldUp { what, by, waited: patience.waited() });
        }
        for worker in &engine.workers {
            worker.turn_once(engine);
        }
        thread::yield_now();
    }
    Ok(())
}

/// Asks every worker to stop placing bytes where `gone` says.
fn ask(engine: &Engine, gone: impl Fn(&Landing) -> bool + Send + Sync + 'static) -> Arc<Abandon> {
    let answered = engine.workers.iter().map(|_| AtomicBool::new(false)).collect();
    let request = Arc::new(Abandon { gone: Box::new(gone), answered });
    for worker in &engine.workers {
        worker.command(Command::Abandon(request.clone()));
    }
    request
}

/// Asks every worker to place nothing more into a region that peers name, while operations of ours may go on
/// there; who asks looks for the answers.
pub(crate) fn ask_for_region(engine: &Engine, memory: &Arc<Memory>) -> Arc<Abandon> {
    let memory = memory.clone();
    ask(engine, move |landing| !landing.once() && landing.is_in(&memory))
}

/// Makes every worker let go of a span of memory.
pub(crate) fn abandon_memory(engine: &Engine, memory: &Arc<Memory>) -> Result<()> {
    let (what, memory) = (memory.describe(), memory.clone());
    abandon(engine, || what, move |landing| landing.is_in(&memory))
}
