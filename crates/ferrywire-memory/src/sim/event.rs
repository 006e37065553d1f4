//! Events of simulated streams: points that are done when all work before them is done.
//!
//! Invariant: a [`Mark`] that was recorded always completes once, also when its stream fails or is dropped,
//! so no thread waits for it for ever.
//! Read next: `engine.rs`.

use super::engine::Engine;
use super::{Result, SimGpuError};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

/// One recording of a simulated event.
pub(super) struct Mark {
    state: Mutex<MarkState>,
    changed: Condvar,
    gpu: u32,
}

#[derive(Default)]
struct MarkState {
    outcome: Option<Result<()>>,
    watchers: Vec<Weak<Engine>>,
}

impl Mark {
    pub fn new(gpu: u32) -> Mark {
        Mark { state: Mutex::default(), changed: Condvar::new(), gpu }
    }

    /// Outcome of the recording; `None` until it has completed.
    pub fn outcome(&self) -> Option<Result<()>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).outcome.clone()
    }

    /// Makes the recording wake `engine` when it completes.
    pub fn watch(&self, engine: &Arc<Engine>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.outcome.is_none() {
            state.watchers.push(Arc::downgrade(engine));
        }
    }

    /// Completes the recording, and wakes engines. Must not be called while an engine is locked.
    pub fn complete(&self, outcome: Result<()>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.outcome.get_or_insert(outcome);
        let watchers = std::mem::take(&mut state.watchers);
        drop(state);
        self.changed.notify_all();
        watchers.iter().filter_map(Weak::upgrade).for_each(|engine| engine.wake());
    }

    fn wait(&self, timeout: Duration) -> Result<()> {
        let until = Instant::now() + timeout;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(outcome) = &state.outcome {
                return outcome.clone();
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(SimGpuError::TimedOut { gpu: self.gpu, what: "an event", waited: timeout });
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// A gate in a stream, at which work waits until the host opens it.
pub struct HostGate(Arc<Mark>);

impl HostGate {
    pub(super) fn new(mark: Arc<Mark>) -> HostGate {
        HostGate(mark)
    }

    /// Lets the work behind the gate run.
    pub fn open(self) {
        self.0.complete(Ok(()));
    }
}

/// A reusable event of a simulated GPU. It stands for the point in a stream where it was recorded last.
#[derive(Default)]
pub struct SimEvent {
    last: Mutex<Option<Arc<Mark>>>,
}

impl SimEvent {
    /// An event that was never recorded, which counts as done.
    pub fn new() -> SimEvent {
        SimEvent::default()
    }

    pub(super) fn mark(&self) -> Option<Arc<Mark>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set(&self, mark: Arc<Mark>) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(mark);
    }

    /// Whether all work before the event is done. Does not block.
    ///
    /// # Errors
    /// The first failure of the stream.
    pub fn query(&self) -> Result<bool> {
        let Some(mark) = self.mark() else { return Ok(true) };
        mark.outcome().map_or(Ok(false), |outcome| outcome.map(|()| true))
    }

    /// Waits until all work before the event is done.
    ///
    /// # Errors
    /// The first failure of the stream, or [`SimGpuError::TimedOut`].
    pub fn wait(&self, timeout: Duration) -> Result<()> {
        self.mark().map_or(Ok(()), |mark| mark.wait(timeout))
    }
}

impl std::fmt::Debug for SimEvent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SimEvent({:?})", self.query())
    }
}
