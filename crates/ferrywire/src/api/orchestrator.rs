//! The endpoints of a process, one per GPU, which start, connect and stop together.
//!
//! ```text
//!   start (listen) ──> connect │ accept ──> each (register, move data) ──> close
//! ```
//!
//! In each phase all endpoints work at once, so a phase takes as long as its slowest endpoint. A phase has
//! one timeout. An endpoint that fails or is late fails the phase, and the error names the endpoint.
//!
//! Invariant: a failed phase leaves nothing behind: endpoints that it started, and peers that it connected,
//! are closed.
//! Read next: `endpoint.rs`.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use crate::api::endpoint::{Builder, Connecting, Endpoint};
use crate::api::peer::Peer;
use crate::error::{ConnectError, Error, Result};
use ferrywire_proto::limits;

/// Interval between checks of connection attempts.
const POLL_INTERVAL: Duration = Duration::from_micros(200);
/// Longest time for closing the endpoints and peers of a failed phase.
const RETREAT_TIMEOUT: Duration = Duration::from_secs(1);
/// A timeout longer than any phase.
const FAR: Duration = Duration::from_secs(365 * 86400);

/// All endpoints of a process. Dropping the orchestrator closes them.
#[derive(Debug)]
pub struct Orchestrator {
    names: Vec<String>,
    endpoints: Vec<Endpoint>,
}

/// A connection to establish.
#[derive(Clone, Debug)]
pub struct Target {
    /// Index in [`Orchestrator::endpoints`] of the connecting endpoint.
    pub endpoint: usize,
    /// Remote addresses, tried in order until one answers; one that is busy has not answered. Each gets an equal share of
    /// the remaining time, but at least [`limits::NAME_SHARE_MIN`] if so much remains.
    pub addresses: Vec<std::net::SocketAddr>,
}

impl Orchestrator {
    /// Builds all endpoints. Each has a name for error messages.
    ///
    /// # Errors
    /// [`Error::Phase`] with the name of the first endpoint that failed, or was not built in time.
    pub fn start(builders: Vec<(String, Builder)>, timeout: Duration) -> Result<Orchestrator> {
        let mut all = Orchestrator { names: Vec::new(), endpoints: Vec::new() };
        all.extend(builders, timeout).map(|()| all)
    }

    /// Builds further endpoints and appends them.
    ///
    /// # Errors
    /// As for [`Orchestrator::start`]; then none of the new endpoints remains.
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

    /// The name of an endpoint, by index.
    pub fn name(&self, endpoint: usize) -> &str {
        self.names.get(endpoint).map_or("?", String::as_str)
    }

    /// Connects all targets at once. Returns the peers in the order of `targets`.
    ///
    /// # Errors
    /// [`ConnectError::Phase`] with the first endpoint that failed, or was not connected in time, and the most informative
    /// error of its remote addresses.
    pub fn connect(&self, targets: &[Target], timeout: Duration) -> Result<Vec<Peer>, ConnectError> {
        let mut dials = Vec::with_capacity(targets.len());
        let until = end_of(timeout);
        for target in targets {
            let number = dials.len();
            let dial = Dial::begin(self, target, until)
                .map_err(|error| at_target(number, self.failed("connecting", target.endpoint, error)))?;
            dials.push(dial);
        }
        let outcome = self.poll_until(timeout, || {
            let mut missing = None;
            for (number, dial) in dials.iter_mut().enumerate() {
                if let Err(error) = dial.poll() {
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
        Err(error.into())
    }

    /// Accepts `peers_of_each` peers at each endpoint. Returns them by endpoint, in the order of arrival.
    ///
    /// # Errors
    /// [`ConnectError::Phase`] with the endpoint that does not listen, or had too few peers in time, and their number.
    pub fn accept(&self, peers_of_each: usize, timeout: Duration) -> Result<Vec<Vec<Peer>>, ConnectError> {
        let deaf = self.endpoints.iter().position(|endpoint| endpoint.listen_addresses().is_empty());
        if let Some(index) = deaf.filter(|_| peers_of_each > 0) {
            let why = "this endpoint does not listen: build it with an address";
            return Err(self.failed("accepting", index, Error::invalid("accept", why)).into());
        }
        let mut accepted: Vec<Vec<Peer>> = self.endpoints.iter().map(|_| Vec::new()).collect();
        let outcome = self.poll_until(timeout, || {
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
                        let what = format!("peers: {} of {peers_of_each} have connected", came(index));
                        self.failed("accepting", index, Error::Stalled { what, peer: None, waited: timeout })
                    }
                    Err(error) => error,
                    Ok(None) => unreachable!("handled above"),
                };
                retreat(accepted.into_iter().flatten().collect());
                Err(error.into())
            }
        }
    }

    /// Runs `work` for all endpoints at once, for example to register memory. Returns the results in order.
    ///
    /// Work that exceeds the timeout continues in its thread, and its result is dropped.
    ///
    /// # Errors
    /// [`Error::Phase`] with the name of an endpoint whose work failed, or had not finished in time.
    pub fn each<T: Send + 'static, E: Into<Error> + Send + 'static>(
        &self,
        phase: &'static str,
        timeout: Duration,
        work: impl Fn(usize, &Endpoint) -> Result<T, E> + Send + Sync + 'static,
    ) -> Result<Vec<T>> {
        let work = Arc::new(work);
        let one = |(index, endpoint): (usize, &Endpoint)| {
            let (work, endpoint) = (work.clone(), endpoint.clone());
            move || work(index, &endpoint)
        };
        let all = self.endpoints.iter().enumerate().map(one).collect();
        all_at_once(phase, &self.names, all, timeout)
    }

    /// Finishes all transfers and closes all endpoints, at once.
    ///
    /// # Errors
    /// [`Error::Phase`] with the first endpoint that did not finish in time. All endpoints are closed in any
    /// case.
    pub fn close(&self, timeout: Duration) -> Result<()> {
        // Each close observes the timeout itself, and all of them are waited for.
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

    /// Calls `poll` until nothing is missing, an error occurs, or `timeout` is over. Returns the index that
    /// is missing.
    fn poll_until(
        &self,
        timeout: Duration,
        mut poll: impl FnMut() -> Result<Option<usize>>,
    ) -> Result<Option<usize>> {
        let until = end_of(timeout);
        loop {
            let missing = poll()?;
            if missing.is_none() || Instant::now() >= until {
                return Ok(missing);
            }
            // Endpoints without threads are polled here.
            let unthreaded = self.endpoints.iter().filter(|endpoint| endpoint.config().threads == 0);
            let worked = unthreaded.map(Endpoint::progress).fold(false, |some, worked| some | worked);
            if !worked {
                thread::sleep(POLL_INTERVAL);
            }
        }
    }

    fn failed(&self, phase: &'static str, endpoint: usize, error: impl Into<Error>) -> Error {
        failed(phase, self.name(endpoint), error)
    }
}

/// A connection attempt, which tries the addresses of its target in order.
struct Dial<'a> {
    all: &'a Orchestrator,
    target: &'a Target,
    next: usize,
    connecting: Option<Connecting>,
    /// When the first address was tried.
    began: Instant,
    /// The errors of the addresses that were given up, in their order.
    errors: Vec<ConnectError>,
    /// When the next address is tried, unless an endpoint has answered at this one.
    answers_until: Instant,
    /// When the phase ends.
    until: Instant,
    peer: Option<Peer>,
}

impl<'a> Dial<'a> {
    fn begin(all: &'a Orchestrator, target: &'a Target, until: Instant) -> Result<Dial<'a>> {
        let mut dial = Dial {
            all,
            target,
            next: 0,
            connecting: None,
            began: Instant::now(),
            errors: Vec::new(),
            answers_until: until,
            until,
            peer: None,
        };
        dial.dial_next()?;
        Ok(dial)
    }

    fn dial_next(&mut self) -> Result<()> {
        let endpoint = self.all.endpoints.get(self.target.endpoint);
        let endpoint = endpoint
            .ok_or_else(|| Error::invalid("target", "the orchestrator has no endpoint with this index"))?;
        let address = self.target.addresses.get(self.next);
        let address = *address
            .ok_or_else(|| Error::invalid("target", "the target has no address: give it at least one"))?;
        let now = Instant::now();
        let left = self.until.saturating_duration_since(now);
        let share = left / (self.target.addresses.len() - self.next) as u32;
        self.answers_until = now + share.max(limits::NAME_SHARE_MIN).min(left);
        self.next += 1;
        self.connecting = Some(endpoint.start_connect(address)?);
        Ok(())
    }

    /// The error of a phase that has timed out.
    fn late(&mut self, waited: Duration) -> Error {
        let error = self.unanswered(waited);
        let error = self.failed(error, waited);
        self.all.failed("connecting", self.target.endpoint, error)
    }

    /// The error of the current address if it does not answer.
    fn unanswered(&self, waited: Duration) -> ConnectError {
        let tried = self.target.addresses.get(self.next.saturating_sub(1));
        let peer = tried.map(ToString::to_string);
        let what =
            peer.as_ref().map_or_else(|| "connecting".to_owned(), |peer| format!("connecting to {peer}"));
        ConnectError::Stalled { what, peer, waited }
    }

    /// The error of all addresses; `last` is that of the last one. A timeout names them, since one endpoint may have many
    /// targets.
    fn failed(&mut self, last: ConnectError, waited: Duration) -> ConnectError {
        let errors = std::mem::take(&mut self.errors).into_iter().chain([last.clone()]);
        match ConnectError::most_informative(errors) {
            Some(ConnectError::Stalled { .. }) if self.target.addresses.len() > 1 => {
                let what = format!("connecting to any of {:?}", self.target.addresses);
                ConnectError::Stalled { what, peer: None, waited }
            }
            Some(error) => error,
            None => last,
        }
    }

    fn poll(&mut self) -> Result<()> {
        let Some(connecting) = &self.connecting else { return Ok(()) };
        let has_next = self.next < self.target.addresses.len();
        match connecting.poll() {
            None if has_next && Instant::now() >= self.answers_until => {
                if !connecting.has_answered() {
                    self.errors.push(self.unanswered(self.began.elapsed()));
                    return self.dial_next();
                }
                self.answers_until = self.until;
                Ok(())
            }
            None => Ok(()),
            Some(Ok(peer)) => {
                (self.peer, self.connecting) = (Some(peer), None);
                Ok(())
            }
            Some(Err(error)) if has_next => {
                self.errors.push(error);
                self.dial_next()
            }
            Some(Err(error)) => Err(self.failed(error, self.began.elapsed()).into()),
        }
    }
}

/// Runs all work at once, each item in its own thread. Returns the results in order. A late result has no
/// receiver and is dropped.
fn all_at_once<T: Send + 'static, E: Into<Error> + Send + 'static>(
    phase: &'static str,
    names: &[String],
    work: Vec<impl FnOnce() -> Result<T, E> + Send + 'static>,
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

/// When a timeout that starts now ends. One that overflows the clock ends very late.
fn end_of(timeout: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(timeout).unwrap_or(now + FAR)
}

/// Closes the peers of a failed phase, all at once.
fn retreat(peers: Vec<Peer>) {
    thread::scope(|scope| {
        for peer in &peers {
            scope.spawn(|| peer.close(RETREAT_TIMEOUT));
        }
    });
}

fn failed(phase: &'static str, endpoint: &str, error: impl Into<Error>) -> Error {
    Error::Phase { phase, endpoint: endpoint.to_owned(), target: None, error: Box::new(error.into()) }
}

/// Names the endpoint and the number of the target in an error.
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
        // The port of the endpoint that was built becomes free again.
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
