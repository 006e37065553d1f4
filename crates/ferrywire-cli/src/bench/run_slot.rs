//! The slot for runs at the serving end: one run at a time, with all its peers; other peers are refused as busy.
//!
//! Read next: [`super::serve`], which admits peers; [`super::barrier`], where admitted peers wait for each other.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::barrier::Barrier;
use super::protocol::{Hello, Run};
use crate::args::Verify;
use crate::exit::{Failure, Outcome};
use crate::memory::Memory;
use crate::sys;

/// How long a new run waits for one that is about to end, unless its peer's timeout is shorter.
const BUSY_GRACE: Duration = Duration::from_secs(1);
/// Most refused runs that are reported during one run.
const TURNED_AWAY_MAX: usize = 16;

/// The run that occupies the slot.
pub struct ActiveRun {
    run_id: String,
    run: Run,
    name: String,
    /// The barrier of the run's peers.
    pub barrier: Barrier,
    members: Mutex<Vec<bool>>,
    goodbyes: Mutex<Goodbyes>,
    /// The memories in which room for all peers was checked, see [`Home::store`](crate::memory::Home::store).
    checked: Mutex<BTreeSet<Option<u32>>>,
}

/// Peers that have not yet received the end of the run.
#[derive(Default)]
struct Goodbyes {
    owed: usize,
    ended: Option<Ended>,
}

/// A run that has ended.
pub struct Ended {
    /// The name of the run's first peer.
    pub name: String,
    /// A description of the run.
    pub what: String,
    /// The run's outcome.
    pub outcome: Outcome,
}

/// The run that is about to begin.
struct Expected {
    /// Longest time without progress in that run.
    timeout: Duration,
    /// When the first peer of that run must have greeted.
    until: Instant,
}

/// The slot for one run at a time.
#[derive(Default)]
pub struct RunSlot {
    active: Mutex<Option<(Arc<ActiveRun>, usize, Outcome)>>,
    /// The run that is about to begin.
    expected: Mutex<Option<Expected>>,
    /// Runs that were refused during the active run.
    turned_away: Mutex<BTreeSet<String>>,
}

impl RunSlot {
    /// Announces a run with this timeout. Further peers may connect before its first peer greets, which it does within
    /// `to_greet`.
    pub fn expect(&self, timeout: Duration, to_greet: Duration) {
        let expected = Expected { timeout, until: Instant::now() + to_greet };
        *self.expected.lock().unwrap_or_else(PoisonError::into_inner) = Some(expected);
    }

    /// How long a connected peer may take to greet; `own` is this end's own limit.
    pub fn join_timeout(&self, own: Duration) -> Duration {
        let expected = self.expected.lock().unwrap_or_else(PoisonError::into_inner);
        // A peer that asked and never came does not change the limit for others.
        expected.as_ref().filter(|run| Instant::now() < run.until).map_or(own, |run| run.timeout)
    }

    /// Waits briefly until the slot is free, because a run that is about to end may be followed by the next.
    pub fn wait_for_room(&self, hello: &Hello) -> Outcome {
        let (since, grace) = (Instant::now(), grace(Duration::from_secs_f64(hello.run.timeout_s)));
        while let Some(name) = self.occupied(&hello.run_id) {
            if since.elapsed() > grace || sys::interrupted() {
                return Err(busy(&name));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Waits until the slot is free, at most `limit`.
    pub fn wait_until_empty(&self, limit: Duration) {
        let since = Instant::now();
        while self.lock().is_some() && since.elapsed() < limit {
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Whether a refused run should be reported: only once per run.
    pub fn is_news(&self, run_id: &str) -> bool {
        let mut turned_away = self.turned_away.lock().unwrap_or_else(PoisonError::into_inner);
        turned_away.len() < TURNED_AWAY_MAX && turned_away.insert(run_id.to_owned())
    }

    /// Admits a peer, or returns the refusal. The first peer of a run in each memory checks the room for all
    /// peers of the run: when others come, it may already have used its part.
    pub fn enter(
        &self,
        hello: &Hello,
        name: &str,
        store: Option<u32>,
        check_room: &dyn Fn() -> Outcome,
    ) -> Outcome<Arc<ActiveRun>> {
        let mut active = self.lock();
        if let Some((run, inside, _)) = active.as_mut() {
            if run.run_id != hello.run_id {
                return Err(busy(&run.name));
            }
            run.check_once(store, check_room)?;
            run.admit(hello).map_err(Failure::Failed)?;
            *inside += 1;
            return Ok(run.clone());
        }
        let run = Arc::new(ActiveRun::new(hello, name));
        run.check_once(store, check_room)?;
        run.admit(hello).map_err(Failure::Failed)?;
        *active = Some((run.clone(), 1, Ok(())));
        Ok(run)
    }

    /// The name of the active run, if the peer does not belong to it.
    pub fn occupied(&self, run_id: &str) -> Option<String> {
        let active = self.lock();
        active.as_ref().filter(|(run, ..)| run.run_id != run_id).map(|(run, ..)| run.name.clone())
    }

    /// Notes that a peer has left. Returns the run if it was the last peer.
    pub fn leave(&self, outcome: Outcome) -> Option<Ended> {
        let mut active = self.lock();
        let (run, inside, so_far) = active.as_mut()?;
        *inside -= 1;
        if let (Ok(()), Err(failure)) = (&so_far, &outcome) {
            run.barrier.fail(&failure.first_line());
            *so_far = outcome;
        }
        let everybody_came =
            run.members.lock().unwrap_or_else(PoisonError::into_inner).iter().all(|came| *came);
        if *inside > 0 || (so_far.is_ok() && !everybody_came) {
            return None;
        }
        let (run, _, outcome) = active.take()?;
        *self.expected.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.turned_away.lock().unwrap_or_else(PoisonError::into_inner).clear();
        Some(Ended { name: run.name.clone(), what: describe(&run.run), outcome })
    }

    fn lock(&self) -> MutexGuard<'_, Option<(Arc<ActiveRun>, usize, Outcome)>> {
        self.active.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ActiveRun {
    fn new(hello: &Hello, name: &str) -> ActiveRun {
        let barrier = Barrier::new(hello.run.peers, Duration::from_secs_f64(hello.run.timeout_s));
        let members = Mutex::new(vec![false; hello.run.peers]);
        ActiveRun {
            run_id: hello.run_id.clone(),
            run: hello.run.clone(),
            name: name.to_owned(),
            barrier,
            members,
            goodbyes: Mutex::default(),
            checked: Mutex::default(),
        }
    }

    fn check_once(&self, store: Option<u32>, check_room: &dyn Fn() -> Outcome) -> Outcome {
        let mut checked = self.checked.lock().unwrap_or_else(PoisonError::into_inner);
        if !checked.contains(&store) {
            check_room()?;
            checked.insert(store);
        }
        Ok(())
    }

    /// Notes that a peer that has left knows the end of the run. Returns the ended run once all its peers
    /// know it, so that a process that ends with the run can exit.
    pub fn goodbye_sent(&self, ended: Option<Ended>) -> Option<Ended> {
        let mut goodbyes = self.goodbyes.lock().unwrap_or_else(PoisonError::into_inner);
        goodbyes.owed -= 1;
        goodbyes.ended = ended.or(goodbyes.ended.take());
        if goodbyes.owed > 0 { None } else { goodbyes.ended.take() }
    }

    fn admit(&self, hello: &Hello) -> Result<(), String> {
        if (Run { seed: self.run.seed, ..hello.run.clone() }) != self.run {
            return Err("the peers of this run have different options: give all of them one set of options"
                .to_owned());
        }
        let mut members = self.members.lock().unwrap_or_else(PoisonError::into_inner);
        match members.get_mut(hello.member) {
            Some(came) if !*came => *came = true,
            _ => return Err(format!("peer {} of this run is connected already", hello.member)),
        }
        self.barrier.join();
        self.goodbyes.lock().unwrap_or_else(PoisonError::into_inner).owed += 1;
        Ok(())
    }
}

/// How long a peer with this timeout waits for the slot: it must receive a refusal before it gives up.
fn grace(timeout: Duration) -> Duration {
    BUSY_GRACE.min(timeout / 2)
}

/// The refusal of a peer during another run.
fn busy(name: &str) -> Failure {
    Failure::Busy(format!("busy with a run of {name}; try again when it has ended"))
}

/// Whether a peer was refused only because of another active run.
pub fn is_busy(failure: &Failure) -> bool {
    matches!(failure, Failure::Busy(_))
}

fn describe(run: &Run) -> String {
    let sizes = run.sizes.len();
    let checked = if run.verify == Verify::Off { "not verified" } else { "verified" };
    let memory = run.peer_memory.unwrap_or(Memory::Host);
    let plural = if sizes == 1 { "" } else { "s" };
    format!("{:?} {:?}, {sizes} size{plural}, {memory} here, {checked}", run.pattern, run.op).to_lowercase()
}

#[cfg(test)]
mod tests {
    use super::super::protocol::VERSION;
    use super::*;
    use crate::args::{Op, Pattern};

    fn hello(member: usize) -> Hello {
        let run = Run {
            op: Op::Write,
            pattern: Pattern::Incast,
            memory: Memory::Host,
            peer_memory: Some(Memory::Host),
            unpack: None,
            sizes: vec![8],
            depth: None,
            blocks: None,
            peers: 2,
            multi_gpu: false,
            iters: Some(1),
            seconds: None,
            warmup: None,
            verify: Verify::All,
            timeout_s: 1.0,
            seed: 1,
        };
        Hello { version: VERSION, run_id: "r".to_owned(), member, boot_id: String::new(), run }
    }

    /// Regression: the second peer found too little room because the first had already used its part.
    #[test]
    fn memory_is_checked_once_for_all_peers_of_a_run() {
        let run_slot = RunSlot::default();
        let full = || Err(Failure::failed("too little"));
        assert!(run_slot.enter(&hello(0), "a", None, &full).is_err());
        run_slot.enter(&hello(0), "a", None, &|| Ok(())).expect("room");
        assert!(
            run_slot.enter(&hello(1), "b", Some(3), &full).is_err(),
            "the room in this memory was not checked before"
        );
        run_slot.enter(&hello(1), "b", None, &full).expect("the room was checked before");
    }

    #[test]
    fn a_peer_that_asked_for_a_run_and_never_came_delays_no_other() {
        let (own, asked) = (Duration::from_secs(30), Duration::from_millis(1));
        let run_slot = RunSlot::default();
        run_slot.expect(asked, own);
        assert_eq!(run_slot.join_timeout(own), asked, "the peers of the expected run come now");
        run_slot.expect(asked, Duration::ZERO);
        assert_eq!(run_slot.join_timeout(own), own, "the time of the expected run is over");
    }

    #[test]
    fn a_peer_hears_that_there_is_no_room_before_it_gives_up() {
        for timeout_s in [0.01, 0.5, 1.0, 30.0] {
            let timeout = Duration::from_secs_f64(timeout_s);
            assert!(grace(timeout) < timeout && grace(timeout) <= BUSY_GRACE, "{timeout:?}");
        }
    }

    #[test]
    fn a_run_has_ended_when_all_peers_have_heard_so() {
        let run_slot = RunSlot::default();
        let run = run_slot.enter(&hello(0), "a", None, &|| Ok(())).expect("room");
        run_slot.enter(&hello(1), "b", None, &|| Ok(())).expect("room");
        assert!(run_slot.leave(Ok(())).is_none());
        let ended = run_slot.leave(Ok(())).expect("the last has left");
        assert!(run.goodbye_sent(Some(ended)).is_none(), "the first peer does not know the end yet");
        assert!(run.goodbye_sent(None).is_some_and(|ended| ended.outcome.is_ok()));
    }
}
