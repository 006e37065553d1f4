//! The endpoints of a process, one per GPU, that start, connect and stop together.
//!
//! ```text
//!   start (listen) ──> connect │ accept ──> each (register, move data) ──> close
//! ```
//!
//! In every phase all endpoints are at work at once, so a phase takes as long as its slowest endpoint, not as long as all
//! of them together. A phase has one timeout, and one endpoint that fails, or is late, fails the phase, by name.
//!
//! Invariant: a phase that fails leaves nothing behind: endpoints that had started are closed, and so are peers that were
//! connected in it. Read next: `endpoint.rs`.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use crate::api::endpoint::{Builder, Connecting, Endpoint};
use crate::api::peer::Peer;
use crate::error::{Error, Result};

/// How often connections on their way are looked at.
const LOOK_INTERVAL: Duration = Duration::from_micros(200);
/// Time for peers and endpoints to finish with what a failed phase leaves.
const RETREAT_TIMEOUT: Duration = Duration::from_secs(1);
/// Longer than any phase.
const FAR: Duration = Duration::from_secs(365 * 86400);

/// All endpoints of a process. Dropped, it closes them.
#[derive(Debug)]
pub struct Orchestrator {
    names: Vec<String>,
    endpoints: Vec<Endpoint>,
}

/// What an endpoint connects to.
#[derive(Clone, Debug)]
pub struct Target {
    /// Which endpoint connects, by its place in [`Orchestrator::endpoints`].
    pub endpoint: usize,
    /// Where to: the first of these that answers.
    pub addresses: Vec<std::net::SocketAddr>,
}

impl Orchestrator {
    /// Builds all endpoints, each with a name for messages.
    ///
    /// # Errors
    /// [`Error::Phase`] with the name of the first that failed, or was not there in time.
    pub fn start(builders: Vec<(String, Builder)>, timeout: Duration) -> Result<Orchestrator> {
        let mut all = Orchestrator { names: Vec::new(), endpoints: Vec::new() };
        all.extend(builders, timeout).map(|()| all)
    }

    /// Builds further endpoints, which come behind those that are there.
    ///
    /// # Errors
    /// As for [`Orchestrator::start`]; none of the new ones stays then.
    pub fn extend(&mut self, builders: Vec<(String, Builder)>, timeout: Duration) -> Result<()> {
        let builds = builders.into_iter().map(|(name, builder)| (name, move || builder.build()));
        self.extend_with(builds.collect(), timeout)
    }

    fn extend_with(
        &mut self,
        builds: Vec<(String, impl FnOnce() -> Result<Endpoint> + Send + 'static)>,
        timeout: Duration,
    ) -> Result<()> {
        let (names, builds): (Vec<String>, Vec<_>) = builds.into_iter().unzip();
        let started = all_at_once("starting", &names, builds, timeout)?;
        self.names.extend(names);
        self.endpoints.extend(started);
        Ok(())
    }

    /// The endpoints, in the order of their builders.
    pub fn endpoints(&self) -> &[Endpoint] {
        &self.endpoints
    }

    /// The name of an endpoint.
    pub fn name(&self, endpoint: usize) -> &str {
        self.names.get(endpoint).map_or("?", String::as_str)
    }

    /// Connects all targets at once; gives the peers in their order.
    ///
    /// # Errors
    /// [`Error::Phase`] with the endpoint of the first that failed, or was not connected in time, and where it was to
    /// connect to.
    pub fn connect(&self, targets: &[Target], timeout: Duration) -> Result<Vec<Peer>> {
        let mut dials = Vec::with_capacity(targets.len());
        for target in targets {
            let number = dials.len();
            let dial = Dial::begin(self, target)
                .map_err(|error| at_target(number, self.failed("connecting", target.endpoint, error)))?;
            dials.push(dial);
        }
        let outcome = self.look_until(timeout, || {
            let mut missing = None;
            for (number, dial) in dials.iter_mut().enumerate() {
                if let Err(error) = dial.look() {
                    let error = self.failed("connecting", dial.target.endpoint, error);
                    return Err(at_target(number, error));
                }
                if dial.peer.is_none() {
                    missing.get_or_insert(number);
                }
            }
            Ok(missing)
        });
        let error = match outcome {
            Ok(None) => return Ok(dials.into_iter().filter_map(|dial| dial.peer).collect()),
            Ok(Some(missing)) => at_target(missing, dials[missing].late(timeout)),
            Err(error) => error,
        };
        retreat(dials.into_iter().filter_map(|dial| dial.peer).collect());
        Err(error)
    }

    /// Takes in so many peers at each endpoint; gives them by endpoint, in the order in which they came.
    ///
    /// # Errors
    /// [`Error::Phase`] with the endpoint that had too few in time, and how many.
    pub fn accept(&self, peers_of_each: usize, timeout: Duration) -> Result<Vec<Vec<Peer>>> {
        let mut accepted: Vec<Vec<Peer>> = self.endpoints.iter().map(|_| Vec::new()).collect();
        let outcome = self.look_until(timeout, || {
            let mut missing = None;
            for (index, peers) in accepted.iter_mut().enumerate() {
                while peers.len() < peers_of_each
                    && let Some(peer) = self.endpoints[index].try_accept()
                {
                    peers.push(peer.map_err(|error| self.failed("accepting", index, error))?);
                }
                if peers.len() < peers_of_each {
                    missing.get_or_insert(index);
                }
            }
            Ok(missing)
        });
        match outcome {
            Ok(None) => Ok(accepted),
            other => {
                let came = |index: usize| accepted[index].len();
                let error = match other {
                    Ok(Some(index)) => {
                        let what = format!("peers: {} of {peers_of_each} have come", came(index));
                        self.failed("accepting", index, Error::Stalled { what, peer: None, waited: timeout })
                    }
                    Err(error) => error,
                    Ok(None) => unreachable!("handled above"),
                };
                retreat(accepted.into_iter().flatten().collect());
                Err(error)
            }
        }
    }

    /// Does the same with all endpoints at once, such as registering memory; gives what came of it, in order.
    ///
    /// Work that comes too late goes on by itself, and what comes of it is dropped.
    ///
    /// # Errors
    /// [`Error::Phase`] with the name of an endpoint with which it failed, or that had not finished in time.
    pub fn each<T: Send + 'static>(
        &self,
        phase: &'static str,
        timeout: Duration,
        work: impl Fn(usize, &Endpoint) -> Result<T> + Send + Sync + 'static,
    ) -> Result<Vec<T>> {
        let work = Arc::new(work);
        let one = |(index, endpoint): (usize, &Endpoint)| {
            let (work, endpoint) = (work.clone(), endpoint.clone());
            move || work(index, &endpoint)
        };
        let all = self.endpoints.iter().enumerate().map(one).collect();
        all_at_once(phase, &self.names, all, timeout)
    }

    /// Finishes with all peers and ends all endpoints, at once.
    ///
    /// # Errors
    /// [`Error::Phase`] with the first that did not finish in time; all are closed nevertheless.
    pub fn close(&self, timeout: Duration) -> Result<()> {
        // Each keeps to the timeout by itself, and none is left to do so behind our back.
        let results: Vec<Result<()>> = thread::scope(|scope| {
            let close = |endpoint| scope.spawn(move || Endpoint::close(endpoint, timeout));
            let threads: Vec<_> = self.endpoints.iter().map(close).collect();
            let join = |thread: thread::ScopedJoinHandle<'_, Result<()>>| {
                thread.join().unwrap_or_else(|_| Err(Error::Internal("closing panicked".into())))
            };
            threads.into_iter().map(join).collect()
        });
        let named = |(index, result): (usize, Result<()>)| {
            result.map_err(|error| self.failed("closing", index, error))
        };
        results.into_iter().enumerate().try_for_each(named)
    }

    /// Looks until nothing is missing, something fails, or the time has come; gives who is missing then.
    fn look_until(
        &self,
        timeout: Duration,
        mut look: impl FnMut() -> Result<Option<usize>>,
    ) -> Result<Option<usize>> {
        let until = end_of(timeout);
        loop {
            let missing = look()?;
            if missing.is_none() || Instant::now() >= until {
                return Ok(missing);
            }
            // Those without threads are turned here.
            let turned = self.endpoints.iter().filter(|endpoint| endpoint.config().threads == 0);
            let worked = turned.map(Endpoint::progress).fold(false, |some, worked| some | worked);
            if !worked {
                thread::sleep(LOOK_INTERVAL);
            }
        }
    }

    fn failed(&self, phase: &'static str, endpoint: usize, error: Error) -> Error {
        failed(phase, self.name(endpoint), error)
    }
}

/// A connection on its way, through the addresses of its target.
struct Dial<'a> {
    all: &'a Orchestrator,
    target: &'a Target,
    next: usize,
    connecting: Option<Connecting>,
    peer: Option<Peer>,
}

impl<'a> Dial<'a> {
    fn begin(all: &'a Orchestrator, target: &'a Target) -> Result<Dial<'a>> {
        let mut dial = Dial { all, target, next: 0, connecting: None, peer: None };
        dial.dial_next()?;
        Ok(dial)
    }

    fn dial_next(&mut self) -> Result<()> {
        let endpoint = self.all.endpoints.get(self.target.endpoint);
        let endpoint = endpoint.ok_or_else(|| Error::invalid("target", "there is no such endpoint"))?;
        let address = self.target.addresses.get(self.next);
        let address = *address.ok_or_else(|| Error::invalid("target", "it has no address"))?;
        self.next += 1;
        self.connecting = Some(endpoint.start_connect(address)?);
        Ok(())
    }

    /// Not connected in time: says to where, since one endpoint may have many targets.
    fn late(&self, waited: Duration) -> Error {
        let tried = self.target.addresses.get(self.next.saturating_sub(1));
        let peer = tried.map(ToString::to_string);
        let what =
            peer.as_ref().map_or_else(|| "connecting".to_owned(), |peer| format!("connecting to {peer}"));
        self.all.failed("connecting", self.target.endpoint, Error::Stalled { what, peer, waited })
    }

    fn look(&mut self) -> Result<()> {
        match self.connecting.as_ref().and_then(Connecting::poll) {
            None => Ok(()),
            Some(Ok(peer)) => {
                (self.peer, self.connecting) = (Some(peer), None);
                Ok(())
            }
            Some(Err(_)) if self.next < self.target.addresses.len() => self.dial_next(),
            Some(Err(error)) => Err(error),
        }
    }
}

/// Does all of it, each in a thread; gives what came of each, in order. What comes too late finds nobody who takes it, and
/// is dropped.
fn all_at_once<T: Send + 'static>(
    phase: &'static str,
    names: &[String],
    work: Vec<impl FnOnce() -> Result<T> + Send + 'static>,
    timeout: Duration,
) -> Result<Vec<T>> {
    let (done, results) = channel();
    for (index, (work, name)) in work.into_iter().zip(names).enumerate() {
        let done = done.clone();
        let body = move || drop(done.send((index, work())));
        let spawned = thread::Builder::new().name(format!("ferrywire-{phase}")).spawn(body);
        spawned.map_err(|error| failed(phase, name, Error::io("start a thread", &error)))?;
    }
    drop(done);
    let until = end_of(timeout);
    let mut came: Vec<Option<T>> = names.iter().map(|_| None).collect();
    while let Some(missing) = came.iter().position(Option::is_none) {
        match results.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok((index, Err(error))) => return Err(failed(phase, &names[index], error)),
            Ok((index, Ok(result))) => came[index] = Some(result),
            Err(RecvTimeoutError::Timeout) => return Err(late(phase, &names[missing], timeout)),
            Err(RecvTimeoutError::Disconnected) => {
                return Err(failed(phase, &names[missing], Error::Internal(format!("{phase} panicked"))));
            }
        }
    }
    Ok(came.into_iter().flatten().collect())
}

/// A timeout beyond all clocks is a far one.
fn end_of(timeout: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(timeout).unwrap_or(now + FAR)
}

/// Closes what a failed phase had connected, all at once.
fn retreat(peers: Vec<Peer>) {
    thread::scope(|scope| {
        for peer in &peers {
            scope.spawn(|| peer.close(RETREAT_TIMEOUT));
        }
    });
}

fn failed(phase: &'static str, endpoint: &str, error: Error) -> Error {
    Error::Phase { phase, endpoint: endpoint.to_owned(), target: None, error: Box::new(error) }
}

/// The same, with which of the targets it was.
fn at_target(number: usize, error: Error) -> Error {
    match error {
        Error::Phase { phase, endpoint, error, .. } => {
            Error::Phase { phase, endpoint, target: Some(number), error }
        }
        other => other,
    }
}

fn late(phase: &'static str, endpoint: &str, waited: Duration) -> Error {
    failed(phase, endpoint, Error::Stalled { what: phase.to_owned(), peer: None, waited })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::SocketAddr;

    type Build = Box<dyn FnOnce() -> Result<Endpoint> + Send>;

    fn listening(address: SocketAddr) -> Builder {
        Endpoint::builder().listen(address).threads(1).channels(1)
    }

    #[test]
    fn a_builder_that_hangs_is_named_and_the_others_let_go() {
        let mut all = Orchestrator { names: Vec::new(), endpoints: Vec::new() };
        let free: SocketAddr = ([127, 0, 0, 1], 0).into();
        let (built, port) = channel();
        let good: Build = Box::new(move || {
            let endpoint = listening(free).build()?;
            let _ = built.send(endpoint.listen_addresses()[0]);
            Ok(endpoint)
        });
        let (release, released) = channel::<()>();
        let hanging: Build = Box::new(move || {
            let _ = released.recv();
            Err(Error::Closed)
        });
        let builds = vec![("good".to_owned(), good), ("hanging".to_owned(), hanging)];
        let short = Duration::from_millis(500);
        let error = all.extend_with(builds, short).expect_err("one hangs");
        assert_eq!(error, late("starting", "hanging", short));
        assert!(all.endpoints().is_empty());
        // The port of the one that had started is free again, soon.
        let port = port.recv().expect("it has started");
        let until = Instant::now() + Duration::from_secs(60);
        while let Err(error) = listening(port).build() {
            assert!(Instant::now() < until, "{error}");
            thread::sleep(Duration::from_millis(10));
        }
        drop(release);
    }

    #[test]
    fn work_that_panics_is_a_bug_with_a_name() {
        let mut all = Orchestrator { names: Vec::new(), endpoints: Vec::new() };
        let builds: Vec<(String, Build)> = vec![("odd".to_owned(), Box::new(|| panic!("as it should")))];
        let error = all.extend_with(builds, Duration::from_secs(60)).expect_err("it panics");
        assert_eq!(error, failed("starting", "odd", Error::Internal("starting panicked".into())));
    }
}
