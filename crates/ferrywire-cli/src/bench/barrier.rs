//! The barrier at which the serving end's conversations of one run wait for each other.
//!
//! With one peer nothing waits. In an incast all peers start together, reports are sent after all peers have finished,
//! and no size ends before all peers' data were verified. If one peer fails, all waiting ones fail. If several
//! processes serve one run, the last conversation to arrive at the start and at the end of a timed part also waits for
//! the other processes.
//! Invariant: a wait ends when all peers have arrived or one has failed. Read next: `run_slot.rs`.

use std::cell::Cell;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::link::{Link, SLICE};
use super::protocol::{Message, SideReport};
use crate::exit::{Failure, Outcome};
use crate::sys;

/// How often this end reports to a waiting peer that it still waits; more often if its timeout is short.
const NOTICE_INTERVAL: Duration = Duration::from_secs(5);
/// Number of notices that are sent within the peer's timeout.
const ASKED_PER_TIMEOUT: u32 = 3;

/// A barrier across processes. It calls its argument from time to time while it waits.
pub type Beyond = Box<dyn Fn(&dyn Fn()) -> Outcome + Send + Sync>;

/// Tells a peer from time to time that this end still waits for others.
pub struct WaitNotice<'a> {
    link: &'a Link,
    interval: Duration,
    since: Cell<Instant>,
}

impl<'a> WaitNotice<'a> {
    /// Starts the interval until the first notice. The peer's timeout equals this end's.
    pub fn new(link: &'a Link) -> WaitNotice<'a> {
        WaitNotice { link, interval: interval(link.timeout()), since: Cell::new(Instant::now()) }
    }

    /// Sends a notice if one is due; to be called regularly during a wait.
    pub fn ask(&self) {
        if self.since.get().elapsed() > self.interval {
            self.since.set(Instant::now());
            // If the peer is lost, the wait itself reports the loss.
            let _ = self.link.say(&Message::Waiting);
        }
    }
}

fn interval(timeout: Duration) -> Duration {
    NOTICE_INTERVAL.min(timeout / ASKED_PER_TIMEOUT)
}

/// The peers of one run at the serving end.
pub struct Barrier {
    peers: usize,
    join_deadline: Duration,
    beyond: Option<Beyond>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    joined: usize,
    arrived: usize,
    /// Number of times that all peers have passed the barrier.
    generation: u64,
    failed: Option<String>,
    /// Moment and CPU seconds at the common start.
    started: (Instant, f64),
    /// Seconds and CPU seconds from the common start to the common end.
    spent: (f64, f64),
    reports: Vec<(SideReport, SideReport)>,
    /// Iterations of the verified pass, by peer.
    verified: Vec<u64>,
}

impl Barrier {
    /// Creates a barrier for `peers` peers, which must all join within `join_deadline`.
    pub fn new(peers: usize, join_deadline: Duration) -> Barrier {
        let reports = vec![Default::default(); peers];
        let state = State {
            joined: 0,
            arrived: 0,
            generation: 0,
            failed: None,
            started: (Instant::now(), 0.0),
            spent: (0.0, 0.0),
            reports,
            verified: vec![0; peers],
        };
        Barrier { peers, join_deadline, beyond: None, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Extends the barrier to other processes of the run, at the start and the end of a timed part.
    pub fn with_beyond(self, beyond: Beyond) -> Barrier {
        Barrier { beyond: Some(beyond), ..self }
    }

    /// Notes that a peer has joined.
    pub fn join(&self) {
        self.lock().joined += 1;
    }

    /// Fails the waits of all peers, because one of them has failed.
    pub fn fail(&self, why: &str) {
        self.lock().failed.get_or_insert_with(|| why.to_owned());
        self.changed.notify_all();
    }

    /// Waits until every peer is ready for the timed part.
    pub fn start(&self, link: &Link) -> Outcome {
        let start = |state: &mut State| state.started = (Instant::now(), sys::cpu_seconds());
        self.wait(link, self.lock(), self.beyond.as_ref(), start).map(|_| ())
    }

    /// Waits until every peer has finished the timed part.
    pub fn end(&self, link: &Link) -> Outcome {
        let end = |state: &mut State| {
            let (started, cpu_s) = state.started;
            state.spent = (started.elapsed().as_secs_f64(), sys::cpu_seconds() - cpu_s);
        };
        self.wait(link, self.lock(), self.beyond.as_ref(), end).map(|_| ())
    }

    /// Takes a peer's report and this end's report on it, waits for all peers', and returns them all by peer.
    ///
    /// Time and CPU seconds of the serving end are those of the whole process, from the common start to the common end.
    pub fn exchange(
        &self,
        link: &Link,
        member: usize,
        theirs: SideReport,
        ours: SideReport,
    ) -> Outcome<(Vec<SideReport>, Vec<SideReport>)> {
        let mut state = self.lock();
        let (wall_s, cpu_s) = state.spent;
        state.reports[member] = (theirs, SideReport { wall_s, cpu_s, ..ours });
        let state = self.wait(link, state, None, |_| {})?;
        Ok(state.reports.iter().cloned().unzip())
    }

    /// Takes the number of a peer's verified iterations, waits for all peers', and returns them by peer.
    pub fn verified(&self, link: &Link, member: usize, iterations: u64) -> Outcome<Vec<u64>> {
        let mut state = self.lock();
        state.verified[member] = iterations;
        let state = self.wait(link, state, None, |_| {})?;
        Ok(state.verified.clone())
    }

    fn wait<'a>(
        &'a self,
        link: &Link,
        mut state: MutexGuard<'a, State>,
        beyond: Option<&Beyond>,
        on_last: impl FnOnce(&mut State),
    ) -> Outcome<MutexGuard<'a, State>> {
        let notice = WaitNotice::new(link);
        state.arrived += 1;
        if state.arrived == self.peers {
            state.arrived = 0;
            if let Some(beyond) = beyond {
                drop(state);
                beyond(&|| notice.ask()).inspect_err(|failure| self.fail(&failure.first_line()))?;
                state = self.lock();
            }
            on_last(&mut state);
            state.generation += 1;
            self.changed.notify_all();
            return Ok(state);
        }
        let (generation, since) = (state.generation, Instant::now());
        while state.generation == generation {
            self.check_failure(link, &state, since)?;
            notice.ask();
            let waited = self.changed.wait_timeout(state, SLICE.min(notice.interval));
            state = waited.unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
        Ok(state)
    }

    fn check_failure(&self, link: &Link, state: &State, since: Instant) -> Outcome {
        if sys::interrupted() {
            return Err(Failure::Interrupted);
        }
        if let Some(why) = &state.failed {
            return Err(heard_of(why));
        }
        if let Some(error) = link.peer.error() {
            return Err(error.into());
        }
        if state.joined < self.peers && since.elapsed() > self.join_deadline {
            let (joined, peers) = (state.joined, self.peers);
            return Err(Failure::failed(format!("only {joined} of {peers} peers of this run have joined")));
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// The failure of a peer whose own part did not fail.
pub fn heard_of(why: &str) -> Failure {
    Failure::Hearsay(format!("another peer of this run failed: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_is_asked_to_wait_on_before_it_gives_up() {
        for timeout_s in [0.1, 1.0, 3.0, 5.0, 6.0, 30.0, 86400.0] {
            let timeout = Duration::from_secs_f64(timeout_s);
            assert!(interval(timeout) * 2 < timeout && interval(timeout) <= NOTICE_INTERVAL, "{timeout:?}");
        }
    }
}
