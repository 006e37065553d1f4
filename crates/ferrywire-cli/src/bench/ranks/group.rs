//! The group of ranks: every rank has one conversation with rank 0, besides those in which it moves data.
//!
//! A thread for each conversation receives messages; other threads wait here for their effects. If the run fails, the
//! endpoints that move data are closed, so that no thread waits in them for long.
//! Invariant: a wait here ends when the run is over, on Ctrl-C, or when rank 0 is lost; a rank reports its failure only
//! once.
//! Read next: [`super::coordinator`], which decides; [`super::join`], how a rank reaches rank 0.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ferrywire::{ConnectError, Endpoint, Peer};

use super::super::barrier::Barrier;
use super::super::link::{CLOSE_TIMEOUT, Link, SLICE};
use super::super::protocol::Message;
use super::coordinator::Coordinator;
use super::join;
use super::messages::{Card, Fault, PairReport, Place, RankMessage, Table};
use crate::exit::{self, Failure, Outcome};
use crate::plan::RanksPlan;
use crate::sanitize;
use crate::sys;
use crate::units::rounded;

/// How often rank 0 checks whether other ranks have left.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// How long a rank that has failed waits for the cause of the run's end.
const VERDICT_WAIT: Duration = Duration::from_secs(5);
/// Time beyond the timeout in which all ranks must end: each closes its endpoints after its last message,
/// which takes longer than a short timeout.
const FAREWELL_GRACE: Duration = Duration::from_secs(5);
/// How long endpoints of a failed run may take to finish.
const RETREAT: Duration = Duration::from_millis(500);

/// One rank's view of the group.
pub struct Group {
    card: Card,
    timeout: Duration,
    endpoint: Endpoint,
    state: Mutex<State>,
    changed: Condvar,
    /// At rank 0 the links to all ranks, otherwise the link to rank 0.
    links: Mutex<Vec<Option<Arc<Link>>>>,
    arrivals: AtomicU64,
    since: Instant,
}

#[derive(Default)]
struct State {
    /// The coordinator of the run; `None` except at rank 0.
    coordinator: Option<Coordinator>,
    table: Option<Arc<Table>>,
    passed: u64,
    over: Option<Option<Fault>>,
    /// Why this rank failed, and the rank that it blames.
    own: Option<(Option<u32>, Failure)>,
    /// Endpoints to close if the run fails.
    at_work: Vec<Endpoint>,
    barrier: Option<Arc<Barrier>>,
}

impl Group {
    /// Opens the group at rank 0, or joins it.
    pub fn begin(plan: &RanksPlan) -> Outcome<Arc<Group>> {
        let card = plan.card();
        let me = named(&card);
        match card.rank {
            0 => Group::open(plan, card),
            _ => Group::come(plan, card),
        }
        .map_err(|failure| prefixed(&me, failure))
    }

    fn open(plan: &RanksPlan, card: Card) -> Outcome<Arc<Group>> {
        let endpoint = join::endpoint(plan, &card, true)?;
        let mut coordinator =
            Coordinator::new(card.clone(), plan.bench.run_id.clone(), plan.bench.run.clone());
        coordinator.admit(card.clone());
        let links = (0..card.world_size).map(|_| None).collect();
        let group = Arc::new(Group::new(plan, card, endpoint, Some(coordinator), links));
        group.spawn("rank-door", Group::let_in)?;
        Ok(group)
    }

    fn come(plan: &RanksPlan, card: Card) -> Outcome<Arc<Group>> {
        let endpoint = join::endpoint(plan, &card, false)?;
        let link = Link::new(join::dial(&endpoint, plan)?, plan.bench.timeout);
        link.tell(&Message::Rank(Box::new(RankMessage::Join(Box::new(card.clone())))))?;
        let link = Arc::new(link.with_listener());
        let group = Arc::new(Group::new(plan, card, endpoint, None, vec![Some(link.clone())]));
        group.spawn("rank-0", move |group| group.listen_to_rank_0(&link))?;
        Ok(group)
    }

    fn new(
        plan: &RanksPlan,
        card: Card,
        endpoint: Endpoint,
        coordinator: Option<Coordinator>,
        links: Vec<Option<Arc<Link>>>,
    ) -> Group {
        Group {
            card,
            timeout: plan.bench.timeout,
            endpoint,
            state: Mutex::new(State { coordinator, ..State::default() }),
            changed: Condvar::new(),
            links: Mutex::new(links),
            arrivals: AtomicU64::new(0),
            since: Instant::now(),
        }
    }

    /// Reports the place of this rank; returns the table once all ranks have reported.
    pub fn table(&self, place: Place) -> Outcome<Arc<Table>> {
        self.say(RankMessage::Here(Box::new(place)))?;
        let is_hub = self.card.rank == 0;
        // Rank 0 may have started late, and then waits for its full timeout.
        let limit = if is_hub { self.timeout } else { self.timeout.saturating_mul(2) + VERDICT_WAIT };
        if let Some(table) = self.wait(Some(limit), &|| {}, |state| state.table.clone())? {
            return Ok(table);
        }
        if is_hub {
            let strangers = self.endpoint.auth_failures();
            let word = self
                .lock()
                .coordinator
                .as_mut()
                .and_then(|coordinator| coordinator.late(limit.as_secs_f64(), strangers));
            self.tell_all(word);
        }
        let table = self.wait(Some(Duration::ZERO), &|| {}, |state| state.table.clone())?;
        table.ok_or_else(|| {
            Failure::failed(format!("rank 0 has not started the run within {:?}", rounded(limit)))
        })
    }

    /// Sets the endpoints to close and the barrier to fail if the run fails.
    pub fn watch_over(&self, at_work: Vec<Endpoint>, barrier: Option<Arc<Barrier>>) -> Outcome {
        let mut state = self.lock();
        (state.at_work, state.barrier) = (at_work, barrier);
        drop(state);
        self.check()
    }

    /// Fails if the run has failed.
    pub fn check(&self) -> Outcome {
        self.wait(Some(Duration::ZERO), &|| {}, |_| Some(())).map(drop)
    }

    /// Waits until every serving rank has arrived; calls `tick` from time to time.
    pub fn pass(&self, tick: &dyn Fn()) -> Outcome {
        let turn = self.arrivals.fetch_add(1, Ordering::Relaxed) + 1;
        self.say(RankMessage::Arrived)?;
        self.wait(None, tick, |state| (state.passed >= turn).then_some(())).map(drop)
    }

    /// Reports a pair's measurements.
    pub fn report(&self, report: PairReport) -> Outcome {
        self.say(RankMessage::Step(Box::new(report)))
    }

    /// The measurements of all pairs for a size, at rank 0. Calls `tick` from time to time.
    pub fn reports(&self, step: usize, tick: &dyn Fn()) -> Outcome<Vec<PairReport>> {
        let found = self.wait(None, tick, |state| state.coordinator.as_mut()?.step(step))?;
        found.ok_or_else(|| Failure::failed("internal error, please report: an unlimited wait has ended"))
    }

    /// Reports to all, once, that this rank cannot continue, and waits until they have received the report:
    /// if this rank ended its conversations earlier, that would look like the cause.
    pub fn fail(&self, blamed: Option<u32>, failure: &Failure) {
        let mut state = self.lock();
        if state.own.is_some() || state.over.is_some() {
            return;
        }
        state.own = Some((blamed, failure.clone()));
        drop(state);
        let word = RankMessage::Failed { blamed, why: failure.first_line() };
        match self.card.rank {
            0 => self.hear(0, word),
            // Rank 0 may be lost, and then receives no report.
            _ => drop(self.link_to_rank_0().and_then(|link| link.say(&Message::Rank(Box::new(word))))),
        }
        self.await_verdict();
    }

    /// Waits for the end of the run and leaves; returns the run's outcome.
    pub fn finish(&self, outcome: Outcome) -> Outcome {
        let outcome = outcome.and_then(|()| self.await_end());
        let outcome = outcome.map_err(|failure| {
            self.fail(None, &failure);
            self.verdict(failure)
        });
        let mut state = self.lock();
        (state.at_work, state.barrier) = Default::default();
        drop(state);
        if self.card.rank == 0 {
            self.see_all_off();
        }
        let _ = self.endpoint.close(CLOSE_TIMEOUT);
        outcome
    }

    /// Reports that this rank is done, and waits until all are. At rank 0 all reports have arrived by then; only
    /// closing messages are missing.
    fn await_end(&self) -> Outcome {
        self.say(RankMessage::Done)?;
        let is_over = |state: &mut State| state.over.clone();
        let limit = (self.card.rank == 0).then(|| self.timeout.saturating_add(FAREWELL_GRACE));
        if self.wait(limit, &|| {}, is_over)?.is_some() {
            return Ok(());
        }
        let waited_s = limit.unwrap_or_default().as_secs_f64();
        let word = self.lock().coordinator.as_mut().and_then(|coordinator| coordinator.unended(waited_s));
        self.tell_all(word);
        self.wait(None, &|| {}, is_over).map(drop)
    }

    /// Rank 0 leaves last, so that all ranks learn the outcome, late ones included.
    fn see_all_off(&self) {
        let mut all_came = None;
        loop {
            let links = self.links.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let others = &links[1..];
            if others.iter().all(Option::is_some) || self.since.elapsed() > self.timeout || sys::interrupted()
            {
                all_came.get_or_insert(Instant::now());
            }
            let left = others.iter().flatten().all(|link| link.peer.error().is_some());
            if all_came.is_some_and(|since| left || since.elapsed() > VERDICT_WAIT) {
                return;
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Waits for the outcome, also after Ctrl-C.
    fn await_verdict(&self) {
        let until = Instant::now() + VERDICT_WAIT;
        let mut state = self.lock();
        while state.over.is_none() && Instant::now() < until {
            state = self.changed.wait_timeout(state, SLICE).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// This rank's error for a failed run.
    fn verdict(&self, failure: Failure) -> Failure {
        if failure == Failure::Interrupted {
            return failure;
        }
        let state = self.lock();
        let blamed =
            state.own.as_ref().and_then(|(blamed, _)| *blamed).filter(|rank| *rank != self.card.rank);
        match (&state.over, blamed) {
            (Some(Some(fault)), _) if fault.rank != self.card.rank => Failure::failed(fault.to_string()),
            (None, Some(rank)) => {
                let host = state.table.as_ref().map(|table| table.ranks[rank as usize].host.clone());
                Failure::failed(Fault { rank, host, why: failure.message() }.to_string())
            }
            // This rank's own failure ended the run; its message has the details.
            (over, _) => match (&state.own, over) {
                (Some((_, own)), _) => prefixed(&named(&self.card), own.clone()),
                (None, Some(Some(fault))) => Failure::failed(fault.to_string()),
                (None, _) => prefixed(&named(&self.card), failure),
            },
        }
    }

    /// Sends a message to rank 0; it is delivered when this returns.
    fn say(&self, word: RankMessage) -> Outcome {
        if self.card.rank == 0 {
            self.hear(0, word);
            return Ok(());
        }
        let link = self.link_to_rank_0()?;
        link.tell(&Message::Rank(Box::new(word))).map_err(|failure| {
            if failure != Failure::Interrupted && link.peer.error().is_some() {
                // The thread that listens may not have read the cause yet, or not have noticed the loss.
                self.await_verdict();
            }
            self.check().err().unwrap_or(failure)
        })
    }

    fn link_to_rank_0(&self) -> Outcome<Arc<Link>> {
        let link = self.links.lock().unwrap_or_else(PoisonError::into_inner)[0].clone();
        link.ok_or_else(|| Failure::failed("internal error, please report: no link to rank 0"))
    }

    /// Lets rank 0 print notes about this rank.
    pub fn tell_notes(&self, notes: Vec<String>) -> Outcome {
        notes.into_iter().try_for_each(|note| self.say(RankMessage::Note(note)))
    }

    /// Handles a message of rank `from`, at rank 0.
    fn hear(&self, from: u32, word: RankMessage) {
        if let RankMessage::Note(note) = &word {
            exit::note(&format!("note: rank {from}: {}", sanitize::line(note)));
        }
        let to_all = self.lock().coordinator.as_mut().and_then(|coordinator| coordinator.take(from, word));
        self.tell_all(to_all);
    }

    /// Sends a decision of rank 0 to all ranks, itself included.
    fn tell_all(&self, word: Option<RankMessage>) {
        let Some(word) = word else { return };
        let links = self.links.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let message = Message::Rank(Box::new(word.clone()));
        // The listener of a lost rank notices the loss.
        links.iter().flatten().for_each(|link| drop(link.say(&message)));
        // Rank 0 applies its decision last, because it leaves once the run is over.
        self.apply(word);
    }

    /// Applies a decision of rank 0.
    fn apply(&self, word: RankMessage) {
        let mut state = self.lock();
        match word {
            RankMessage::Table(table) => state.table = Some(Arc::from(table)),
            RankMessage::Pass(passed) => state.passed = state.passed.max(passed),
            RankMessage::Over(fault) => {
                state.over.get_or_insert(fault);
            }
            _ => {}
        }
        let failed = state.over.clone().flatten();
        let (at_work, barrier) = match failed {
            Some(_) => (std::mem::take(&mut state.at_work), state.barrier.take()),
            None => Default::default(),
        };
        drop(state);
        self.changed.notify_all();
        if let (Some(barrier), Some(fault)) = (barrier, &failed) {
            barrier.fail(&fault.to_string());
        }
        if !at_work.is_empty() {
            // Threads that wait in the endpoints get an error.
            thread::spawn(move || at_work.iter().for_each(|endpoint| drop(endpoint.close(RETREAT))));
        }
    }

    fn wait<T>(
        &self,
        limit: Option<Duration>,
        tick: &dyn Fn(),
        mut poll: impl FnMut(&mut State) -> Option<T>,
    ) -> Outcome<Option<T>> {
        let since = Instant::now();
        let mut state = self.lock();
        loop {
            if let Some(Some(fault)) = &state.over {
                return Err(Failure::failed(fault.to_string()));
            }
            if let Some(found) = poll(&mut state) {
                return Ok(Some(found));
            }
            if sys::interrupted() {
                return Err(Failure::Interrupted);
            }
            if limit.is_some_and(|limit| since.elapsed() >= limit) {
                return Ok(None);
            }
            state = self.changed.wait_timeout(state, SLICE).unwrap_or_else(PoisonError::into_inner).0;
            tick();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The threads of a group, which receive messages and apply them.
impl Group {
    /// Starts a thread for whose effects other threads wait. A panic of the thread ends the run.
    fn spawn(self: &Arc<Group>, name: &str, body: impl FnOnce(&Arc<Group>) + Send + 'static) -> Outcome {
        let group = self.clone();
        let guarded = move || {
            let guarded = exit::guarded(|| {
                body(&group);
                Ok(())
            });
            if let Err(failure) = guarded {
                group.fail(None, &failure);
                // Rank 0's answer may no longer be received: the thread that receives it may be the one that panicked.
                let (rank, host) = (group.card.rank, Some(group.card.host.clone()));
                group.apply(RankMessage::Over(Some(Fault { rank, host, why: failure.first_line() })));
            }
        };
        let spawned = thread::Builder::new().name(name.to_owned()).spawn(guarded);
        spawned.map(drop).map_err(|error| Failure::failed(format!("cannot start a thread: {error}")))
    }

    fn listen_to_rank_0(&self, link: &Link) {
        loop {
            match link.hear_soon() {
                Ok(None) => {}
                Ok(Some(Message::Rank(word))) => self.apply(*word),
                Ok(Some(other)) => {
                    return self.rank_0_is_gone(&link.unexpected(&other, "a message of rank 0"));
                }
                Err(failure) => return self.rank_0_is_gone(&failure),
            }
            if self.lock().over.is_some() {
                return;
            }
        }
    }

    fn rank_0_is_gone(&self, failure: &Failure) {
        let host = self.lock().table.as_ref().map(|table| table.ranks[0].host.clone());
        self.apply(RankMessage::Over(Some(Fault { rank: 0, host, why: failure.first_line() })));
    }

    /// Rank 0 accepts connections of ranks until its endpoint is closed.
    fn let_in(self: &Arc<Group>) {
        loop {
            match self.endpoint.accept(SLICE) {
                Ok(peer) => {
                    if let Err(failure) = self.spawn("rank", |group| group.receive(peer)) {
                        exit::complain(&failure.message());
                    }
                }
                Err(ConnectError::Closed) => return,
                Err(_) => {}
            }
        }
    }

    fn receive(&self, peer: Peer) {
        let link = Link::with_stranger(peer, self.timeout);
        let card = match link.hear() {
            Ok(Message::Rank(word)) => match *word {
                RankMessage::Join(card) => card,
                _ => {
                    return link
                        .tell_last(&Message::Refused { why: "the first message is not that of a rank that joins: install one version on all hosts".to_owned() });
                }
            },
            Ok(_) => {
                let why =
                    "this port is the rendezvous of ranks, not of 'bench serve': connect to another port"
                        .to_owned();
                return link.tell_last(&Message::Refused { why });
            }
            Err(failure) => return link.tell_last(&Message::Refused { why: failure.first_line() }),
        };
        let rank = card.rank;
        let to_all = match self.join(card) {
            Ok(to_all) => to_all,
            Err(why) => return link.tell_last(&Message::Refused { why }),
        };
        let link = Arc::new(link.with_member().with_listener());
        self.links.lock().unwrap_or_else(PoisonError::into_inner)[rank as usize] = Some(link.clone());
        self.tell_all(to_all);
        // The thread that has decided the end may have listed the ranks before this one came.
        let over = self.lock().coordinator.as_ref().and_then(|coordinator| coordinator.over().cloned());
        if let Some(over) = over {
            let _ = link.say(&Message::Rank(Box::new(over)));
        }
        self.listen_to(rank, &link);
    }

    fn join(&self, card: Box<Card>) -> Result<Option<RankMessage>, String> {
        let mut state = self.lock();
        let Some(coordinator) = state.coordinator.as_mut() else { return Ok(None) };
        match coordinator.refuses(&card) {
            Some(why) => Err(why),
            None => Ok(coordinator.admit(*card)),
        }
    }

    fn listen_to(&self, rank: u32, link: &Link) {
        loop {
            match link.hear_soon() {
                Ok(None) => {}
                Ok(Some(Message::Rank(word))) => self.hear(rank, *word),
                Ok(Some(other)) => {
                    return self.is_gone(rank, &link.unexpected(&other, "a message of a rank"));
                }
                Err(failure) => return self.is_gone(rank, &failure),
            }
        }
    }

    fn is_gone(&self, rank: u32, failure: &Failure) {
        let word = self
            .lock()
            .coordinator
            .as_mut()
            .and_then(|coordinator| coordinator.lost(rank, &failure.first_line()));
        self.tell_all(word);
    }
}

/// A rank and its host, as text.
fn named(card: &Card) -> String {
    format!("rank {} ({})", card.rank, card.host)
}

fn prefixed(name: &str, failure: Failure) -> Failure {
    failure.map_message(|why| format!("{name}: {why}"))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use clap::FromArgMatches;

    use super::*;
    use crate::args::{self, Cli};
    use crate::plan::{self, Plan};

    const LIMIT: Duration = Duration::from_secs(120);

    fn rank(rank: u32, port: u16) -> RanksPlan {
        let line = format!(
            "ferrywire bench --rank {rank} --world-size 2 --rendezvous 127.0.0.1:{port} --memory host"
        );
        let typed = args::command().get_matches_from(line.split(' '));
        match plan::plan(Cli::from_arg_matches(&typed).expect("it parses")) {
            Ok(Plan::Ranks(plan)) => *plan,
            other => panic!("{other:?} is no rank"),
        }
    }

    /// A free port below the kernel's ephemeral ports, in the range of one test.
    fn port(from: u16) -> u16 {
        let free = |port: &u16| std::net::TcpListener::bind(("127.0.0.1", *port)).is_ok();
        (from..from + 2_000).find(free).expect("a free port")
    }

    fn finished(group: &Arc<Group>) -> mpsc::Receiver<Outcome> {
        let (group, (ended, outcome)) = (group.clone(), mpsc::channel());
        thread::spawn(move || ended.send(group.finish(Ok(()))));
        outcome
    }

    /// Regression: the other threads of the rank, and all other ranks, waited for ever.
    #[test]
    fn a_thread_of_a_rank_that_panics_ends_the_run_by_name() {
        let port = port(29_000);
        let groups = [0, 1].map(|index| Group::begin(&rank(index, port)).expect("a group"));
        groups[1].spawn("rank-0", |_| panic!("as a test asked for")).expect("a thread");
        let since = Instant::now();
        while groups.iter().any(|group| group.check().is_ok()) {
            assert!(since.elapsed() < LIMIT, "a rank does not learn of it");
            thread::sleep(POLL_INTERVAL);
        }
        for outcome in groups.each_ref().map(finished) {
            let outcome = outcome.recv_timeout(LIMIT).expect("the wait ends");
            let said = outcome.expect_err("a thread has panicked").message();
            assert!(
                said.starts_with("rank 1 (") && said.contains("a thread of the bench panicked"),
                "{said}"
            );
        }
    }

    /// Regression: a rank that joined after the end was decided, but before rank 0 had told it to the others, was not
    /// told, and took the end of the connection for the cause.
    #[test]
    fn a_rank_that_joins_while_the_end_is_told_learns_the_cause() {
        let port = port(10_000);
        let first = Group::begin(&rank(0, port)).expect("a group");
        let decided = first.lock().coordinator.as_mut().and_then(|each| each.lost(1, "as a test asked for"));
        let second = Group::begin(&rank(1, port)).expect("it comes");
        let since = Instant::now();
        while second.check().is_ok() {
            assert!(since.elapsed() < LIMIT, "the rank is not told");
            thread::sleep(POLL_INTERVAL);
        }
        first.tell_all(decided);
        for outcome in [&first, &second].map(finished) {
            let outcome = outcome.recv_timeout(LIMIT).expect("the wait ends");
            let said = outcome.expect_err("the run has failed").message();
            assert!(said.starts_with("rank 1") && said.contains("as a test asked for"), "{said}");
        }
    }

    #[test]
    fn a_rank_that_does_not_end_ends_the_run_by_name() {
        let port = port(27_000);
        let mut plan = rank(0, port);
        plan.bench.timeout = Duration::from_secs(3);
        let first = Group::begin(&plan).expect("a group");
        let _second = Group::begin(&rank(1, port)).expect("it comes");
        let outcome = finished(&first).recv_timeout(LIMIT).expect("the wait ends");
        let said = outcome.expect_err("a rank has not ended").message();
        assert!(said.starts_with("rank 1 (") && said.contains("not ended within"), "{said}");
    }
}
