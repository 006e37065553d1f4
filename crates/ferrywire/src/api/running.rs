//! The running parts of an endpoint: its workers, its control side, and the thread that drops owners of
//! memory.
//!
//! Ownership is a tree: users' handles hold [`Running`], which owns workers and control; workers own
//! channels; channels refer to their peer's state and to the [`Context`].
//!
//! Invariant: no part refers to its owner, so a dropped part is freed.
//! Read next: `../core/worker/`, `../control/`.
#![forbid(unsafe_code)]

use super::region::RegionHome;
use super::releaser::Releaser;
use crate::control::{AcceptQueue, Control, ended_early};
use crate::core::context::Context;
use crate::core::peer::{PeerHandle, PeerState};
use crate::core::waiting::WakeHandle;
use crate::core::worker::{self, Pass, Pauses, Workers};
use crate::error::{Error, Result};
use ferrywire_memory::{Memory, RegionTable};
use ferrywire_proto::Identity;
use ferrywire_proto::limits;
use ferrywire_proto::stall_timer::StallTimer;
use ferrywire_sys::fork::Origin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, TryLockError, Weak};
use std::thread;
use std::time::Duration;

/// The workers and the control side of one endpoint.
pub(crate) struct Running {
    pub workers: Arc<Workers>,
    control: Arc<Mutex<Control>>,
    /// Drops owners of memory; started when the first owner is given.
    releaser: OnceLock<Releaser>,
    this: Weak<Running>,
}

impl Running {
    pub fn new(workers: Arc<Workers>, control: Arc<Mutex<Control>>) -> Arc<Running> {
        Arc::new_cyclic(|this| Running { workers, control, releaser: OnceLock::new(), this: this.clone() })
    }

    /// The endpoint's configuration and shared parts.
    pub fn context(&self) -> &Context {
        &self.workers.context
    }

    /// Runs `body` with the control side locked, and wakes the control thread.
    pub fn with_control<T>(&self, body: impl FnOnce(&mut Control) -> T) -> T {
        let result = body(&mut self.control.lock().unwrap_or_else(PoisonError::into_inner));
        self.context().wake_control();
        result
    }

    /// Polls everything that no other thread polls, once. Returns what the pass has done.
    pub fn poll_once(&self) -> Pass {
        let control = match self.control.try_lock() {
            Ok(control) => Some(control),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        let worked = control.is_some_and(|mut control| control.poll_once());
        let pass = self.workers.poll_once();
        if worked { Pass::Worked } else { pass }
    }

    /// Starts the thread that drops owners, unless it runs.
    pub fn start_releaser(&self) -> Result<()> {
        if self.releaser.get().is_none() {
            let started = Releaser::start(self.this.clone());
            // If two callers start the thread at the same time, the second thread ends immediately.
            drop(self.releaser.set(started.map_err(|error| Error::io("start a thread", &error))?));
        }
        Ok(())
    }

    /// Whether a worker may have channels with lanes.
    pub fn may_have_lanes(&self) -> bool {
        self.workers.iter().any(|worker| worker.may_have_lanes())
    }

    /// Waits for the next peer in this queue; `None` after `limit`.
    pub fn next_of(&self, queue: &AcceptQueue, limit: Duration) -> Option<Result<PeerHandle>> {
        let result = self.next_listed(queue, limit);
        // A caller whose wait timed out was not woken, and is still on the wait list.
        queue.forget_waiter(&WakeHandle::Thread(thread::current()));
        result
    }

    fn next_listed(&self, queue: &AcceptQueue, limit: Duration) -> Option<Result<PeerHandle>> {
        let context = self.context();
        let until = context.transport.now().saturating_add(limit);
        // A caller that polls with a timeout that is over at once may be the only thread that polls.
        let mut has_polled = !context.is_caller_driven();
        loop {
            if let Some(result) = queue.take_or_closed() {
                return Some(result);
            }
            let rest = until.saturating_sub(context.transport.now());
            if rest.is_zero() && has_polled {
                return None;
            }
            if context.is_caller_driven() {
                has_polled = true;
                if !self.poll_once().goes_on() && !rest.is_zero() {
                    thread::sleep(Duration::from_micros(100));
                }
                continue;
            }
            queue.wake_at_arrival(WakeHandle::Thread(thread::current()));
            if let Some(result) = queue.take_or_closed() {
                return Some(result);
            }
            thread::park_timeout(rest.min(Duration::from_millis(100)));
        }
    }

    /// Finishes the transfers with a peer, on both ends, and closes it.
    ///
    /// # Errors
    /// As for [`Peer::close`](crate::Peer::close).
    pub fn close_peer(&self, peer: &PeerState, timeout: Duration) -> Result<()> {
        let transport = &self.context().transport;
        let now = transport.now();
        self.with_control(|control| control.close(peer.info.session, timeout));
        // The link waits for one interval after its goodbye, and the goodbye may follow the timeout.
        let until = now.saturating_add(timeout).saturating_add(2 * limits::HEARTBEAT_INTERVAL);
        let mut pauses = Pauses::default();
        while !peer.is_over() && transport.now() < until {
            if self.context().is_caller_driven() {
                pauses.after(self.poll_once() == Pass::Worked);
            } else {
                thread::sleep(Duration::from_micros(200));
            }
        }
        let (over, name) = (peer.is_over(), peer.name());
        let unfinished = peer.life.unfinished.load(Ordering::SeqCst);
        // Another close of the peer or of the endpoint may have ended it, with a shorter timeout.
        let timeout = peer.life.close_timeout.get().copied().filter(|_| over).unwrap_or(timeout);
        let failure = match peer.failure() {
            Some(Error::Closed | Error::PeerClosed { .. }) if over && !unfinished => return Ok(()),
            // It is not known yet whether posted operations will finish.
            Some(Error::PeerClosed { .. }) | None if !over => Error::Closed,
            failure => failure.unwrap_or(Error::Closed),
        };
        self.with_control(|control| control.note_error_reported(peer.info.session));
        Err(ended_early(failure, format!("closing {name}"), Some(name.to_string()), timeout))
    }
}

impl RegionHome for Running {
    fn identity(&self) -> Identity {
        self.context().identity
    }

    fn regions(&self) -> &RegionTable {
        &self.context().regions
    }

    fn release(&self, memory: &Arc<Memory>, force: bool) -> Result<()> {
        // Operations in flight may lose their connections while this waits for them.
        let was_used = memory.user_owned() && memory.used();
        worker::abandon_memory(&self.workers, memory, force)?;
        // Operations that read from user-owned memory also use it; queued ones will not be sent any more.
        let in_use = || if memory.user_owned() { memory.used() } else { memory.in_call() };
        let mut stall_timer = StallTimer::new(limits::DRAIN_TIMEOUT);
        while in_use() {
            if stall_timer.is_over(self.context().transport.now()) {
                let why = if memory.user_owned() {
                    "operations still use it: wait for them, or cancel them, first"
                } else {
                    "a message is still being placed into it, because its GPU is stalled"
                };
                return Err(Error::invalid("region", why));
            }
            // In an endpoint without threads, this thread has to poll the copies.
            if !self.context().is_caller_driven() || !self.poll_once().goes_on() {
                thread::sleep(Duration::from_micros(100));
            }
        }
        // Now the lanes have no message of the memory, so their registrations can be undone, and sends over
        // lost connections are waited for.
        if was_used || (memory.user_owned() && self.may_have_lanes()) {
            worker::abandon_memory(&self.workers, memory, force)
        } else {
            Ok(())
        }
    }

    fn interrupt(&self, memory: &Arc<Memory>, force: bool) -> Result<()> {
        worker::abandon_memory(&self.workers, memory, force)
    }

    fn origin(&self) -> Origin {
        self.context().origin
    }

    fn release_later(&self, memory: Arc<Memory>) {
        // A lane undoes its registration only when nothing uses the memory, so a thread has to wait for that.
        let has_lanes = self.may_have_lanes();
        if has_lanes && let Err(error) = self.start_releaser() {
            tracing::warn!(%error, "cannot start the thread that releases memory: memory stays registered until its lanes end");
        }
        // Other memory without an owner needs no thread, which may be blocked by the drop of another owner.
        match self.releaser.get().filter(|_| has_lanes || memory.has_owner()) {
            Some(releaser) => releaser.give(memory),
            None => drop(worker::ask_for_region(&self.workers, &memory)),
        }
    }
}
