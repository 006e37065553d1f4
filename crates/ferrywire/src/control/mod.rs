//! The slow side of an endpoint: listening, handshakes, control sessions, lost channels, closing.
//!
//! One thread turns it (or, in an endpoint without threads, its callers). It never touches payload;
//! workers send it [`Event`]s, and it sends them channels. A connection that arrives is an [`Incoming`]
//! until it has proven itself; one that we make is a [`Dial`]; what belongs to one peer is a [`Link`].
//!
//! Invariant: nothing here blocks, and what strangers hold is bounded by `limits::HANDSHAKES_PENDING_MAX`.
//! Read next: `link.rs`.

mod admission;
pub(crate) mod clock;
mod dial;
mod lanes;
mod link;
mod lobby;
mod pairs;

use crate::bootstrap::{HandshakeError, Hello, ListenAddress, Outcome, Refusal, RefusalCode, Responder};
use crate::endpoint::advertised;
use crate::engine::{Engine, Event};
use crate::error::{Error, Result};
use crate::limits;
use crate::memory::cuda::idle;
use crate::peer::PeerState;
use crate::sys::poll::{Interest, Poller};
use crate::transport::plugin::CallWatch;
use crate::transport::{Conn, IoVec, Listener};
use admission::{Admitter, Book};
use clock::Clock;
use dial::{Dial, DialFailure, DialFor};
use lanes::LANE;
use link::Link;
pub(crate) use lobby::Lobby;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// Longest the control thread sleeps while anything is under way, and while nothing is.
const BUSY_SLEEP: Duration = Duration::from_millis(50);
const QUIET_SLEEP: Duration = Duration::from_millis(200);

const _: () = assert!(2 * QUIET_SLEEP.as_millis() < limits::HEARTBEAT_LIMIT_MARGIN.as_millis());

/// What the poller calls every listener; connections count from there.
const LISTENER_TOKEN: u64 = 0;

/// A connection that has not proven anything yet.
struct Incoming {
    conn: Box<dyn Conn>,
    responder: Responder<Admitter>,
    output: Vec<u8>,
    since: Duration,
    /// Refused: closed as soon as the refusal is written.
    over: bool,
}

/// The control side's state.
pub(crate) struct Control {
    listeners: Vec<Box<dyn Listener>>,
    incoming: VecDeque<Incoming>,
    dials: Vec<Dial>,
    /// Connects whose other end was busy, and when to dial again.
    redials: Vec<(Duration, DialFor)>,
    links: BTreeMap<u64, Link>,
    book: Arc<Mutex<Book>>,
    lobby: Arc<Lobby>,
    poller: Arc<Poller>,
    clock: Clock,
    next_token: u64,
    me: Hello,
    nics_seen: Duration,
    calls_seen: Duration,
    call_watch: CallWatch,
    refusals_told: u64,
    /// Strangers that held another secret.
    wrong_secrets: u64,
    refusals_since: Duration,
    /// Nothing is accepted before then, because the last attempt failed.
    accept_at: Option<Duration>,
    /// When it was last told that nothing can be accepted.
    accept_told: Option<Duration>,
    unfinished: bool,
}

impl Control {
    pub fn new(
        engine: &Engine,
        listeners: Vec<Box<dyn Listener>>,
        addresses: Vec<ListenAddress>,
        boot_id: [u8; 16],
        lobby: Arc<Lobby>,
    ) -> io::Result<Control> {
        let me = Hello {
            identity: engine.identity.0,
            boot_id,
            label: engine.config.label.clone(),
            addresses,
            heartbeat_limit_ms: engine.config.heartbeat_limit.as_millis().min(u128::from(u32::MAX)) as u32,
        };
        let secret = engine.config.secret.clone();
        let needed = listeners.iter().any(|listener| !listener.local().ip().is_loopback());
        let poller = Arc::new(Poller::new()?);
        for listener in &listeners {
            if let Some(fd) = listener.fd() {
                poller.add(fd, LISTENER_TOKEN, Interest::READ)?;
            }
        }
        let (carrier, none) = (engine.carrier.clone(), engine.no_carrier.clone());
        let book = Book::new(me.clone(), secret, needed, carrier, none, lobby.clone());
        Ok(Control {
            listeners,
            incoming: VecDeque::new(),
            dials: Vec::new(),
            redials: Vec::new(),
            links: BTreeMap::new(),
            book: Arc::new(Mutex::new(book)),
            lobby,
            poller,
            clock: Clock::new(engine.transport.now()),
            next_token: LISTENER_TOKEN + 1,
            me,
            nics_seen: Duration::ZERO,
            calls_seen: Duration::ZERO,
            call_watch: CallWatch::default(),
            refusals_told: 0,
            wrong_secrets: 0,
            refusals_since: Duration::ZERO,
            accept_at: None,
            accept_told: None,
            unfinished: false,
        })
    }

    pub fn waker(&self) -> crate::sys::poll::Waker {
        self.poller.waker()
    }

    fn now(&mut self, engine: &Engine) -> Duration {
        self.clock.look(engine.transport.now())
    }

    /// One turn; true if anything happened.
    pub fn turn(&mut self, engine: &Engine) -> bool {
        let _moving = idle::moving();
        let now = self.now(engine);
        let mut worked = self.take_events(engine, now);
        worked |= self.accept(engine, now);
        worked |= self.advance_incoming(engine, now);
        self.redial(engine, now);
        worked |= self.advance_dials(engine, now);
        worked |= self.advance_links(engine, now);
        self.watch_calls(engine, now);
        engine.workers.iter().for_each(|worker| worker.look_after());
        worked
    }

    /// A call of a plugin that does not return holds its worker for good: the peers behind it are lost.
    fn watch_calls(&mut self, engine: &Engine, now: Duration) {
        let Some(host) = engine.plugin() else { return };
        if now.saturating_sub(self.calls_seen) < limits::PATH_CHECK_INTERVAL {
            return;
        }
        self.calls_seen = now;
        for call in self.call_watch.overdue(host.calls_under_way(), host.config.stall_limit, now) {
            let worker = engine.workers.iter().find(|worker| worker.thread_id() == call.thread);
            if let Some(worker) = worker.filter(|worker| worker.mark_stuck()) {
                let why = host.describe_call(&call);
                tracing::error!("{why}; its thread is left behind");
                self.links.values_mut().for_each(|link| link.worker_stuck(worker.index, &why, now));
            }
        }
    }

    /// How long nothing has to be done, unless a connection says so.
    fn sleep_limit(&self) -> Duration {
        let busy = !self.incoming.is_empty() || !self.dials.is_empty() || !self.redials.is_empty();
        let busy = busy || self.links.values().any(Link::busy);
        let polled = self.listeners.iter().any(|listener| listener.fd().is_none());
        match (polled, busy || self.accept_at.is_some()) {
            (true, _) => Duration::from_millis(1),
            (_, true) => BUSY_SLEEP,
            _ => QUIET_SLEEP,
        }
    }

    pub fn idle(&self) -> bool {
        self.links.is_empty() && self.dials.is_empty() && self.redials.is_empty()
    }

    pub fn peer_count(&self) -> usize {
        self.links.len()
    }

    pub fn wrong_secrets(&self) -> u64 {
        self.wrong_secrets
    }

    // ---- listening ----

    fn accept(&mut self, engine: &Engine, now: Duration) -> bool {
        if self.accept_at.is_some_and(|at| now < at) {
            return false;
        }
        if self.accept_at.take().is_some() {
            self.listen_for(Interest::READ);
        }
        let mut worked = false;
        for index in 0..self.listeners.len() {
            // As many as fit, so that a flood cannot keep us here.
            for _ in 0..limits::HANDSHAKES_PENDING_MAX {
                match self.listeners[index].accept() {
                    Ok(Some(conn)) => {
                        self.look_at_nics(engine, now);
                        self.greet(conn, now);
                    }
                    Ok(None) => break,
                    Err(error) => {
                        self.stop_accepting(&error, now);
                        return worked;
                    }
                }
                worked = true;
            }
        }
        worked
    }

    /// Whoever knocks is still there, and would wake us without end: nothing is accepted for a while.
    fn stop_accepting(&mut self, error: &io::Error, now: Duration) {
        const SECONDS_BETWEEN_LINES: u64 = 60;
        self.accept_at = Some(now + limits::ACCEPT_RETRY_INTERVAL);
        self.listen_for(Interest::NONE);
        if self.accept_told.is_none_or(|at| (now - at).as_secs() >= SECONDS_BETWEEN_LINES) {
            self.accept_told = Some(now);
            let every = limits::ACCEPT_RETRY_INTERVAL;
            tracing::warn!(
                "nobody can be accepted: {error}; tried again every {every:?} (open files: see ulimit -n)"
            );
        }
    }

    fn listen_for(&self, interest: Interest) {
        for fd in self.listeners.iter().filter_map(|listener| listener.fd()) {
            if let Err(error) = self.poller.modify(fd, LISTENER_TOKEN, interest) {
                tracing::warn!(%error, "changing what a listener waits for failed");
            }
        }
    }

    /// Finds out again under which addresses peers can reach us, but not for each stranger.
    fn look_at_nics(&mut self, engine: &Engine, now: Duration) {
        if now.saturating_sub(self.nics_seen) < limits::REDIAL_INTERVAL {
            return;
        }
        self.nics_seen = now;
        let listening: Vec<SocketAddr> = self.listeners.iter().map(|listener| listener.local()).collect();
        if let Ok(addresses) = advertised(&engine.config, &*engine.transport, &listening) {
            self.me.addresses = addresses.clone();
            self.book.lock().unwrap_or_else(PoisonError::into_inner).listens_on(addresses);
        }
    }

    fn greet(&mut self, conn: Box<dyn Conn>, now: Duration) {
        if self.incoming.len() >= limits::HANDSHAKES_PENDING_MAX {
            self.displace(now);
        }
        self.watch(&*conn, Interest::READ);
        let responder = Responder::new(Admitter::new(self.book.clone()));
        let output = Vec::new();
        self.incoming.push_back(Incoming { conn, responder, output, since: now, over: false });
    }

    /// The connection that has waited longest gives its place to a new one.
    fn displace(&mut self, now: Duration) {
        let Some(mut oldest) = self.incoming.pop_front() else { return };
        // Another try may find room: the limit is full for a moment.
        let busy = Refusal::new(RefusalCode::Busy, "HANDSHAKES_PENDING_MAX reached");
        let error = oldest.responder.refuse(busy);
        oldest.output.append(&mut oldest.responder.take_output());
        // Whoever does not read it has nothing to learn from it.
        let _ = write_out(&mut *oldest.conn, &mut oldest.output);
        self.tell_refusal(oldest.conn.remote(), &error, now);
    }

    fn watch(&mut self, conn: &dyn Conn, interest: Interest) {
        let token = self.next_token;
        self.next_token += 1;
        if let Some(fd) = conn.fd()
            && let Err(error) = self.poller.add(fd, token, interest)
        {
            tracing::warn!(%error, "a connection cannot be waited for");
        }
    }

    fn advance_incoming(&mut self, engine: &Engine, now: Duration) -> bool {
        let mut worked = false;
        let mut rest = VecDeque::with_capacity(self.incoming.len());
        for mut incoming in std::mem::take(&mut self.incoming) {
            let told = incoming.over;
            match incoming.advance(now) {
                Ok(None) => rest.push_back(incoming),
                Ok(Some(outcome)) => {
                    worked = true;
                    self.settle(engine, incoming, outcome, now);
                }
                Err(error) => {
                    worked = true;
                    if !told {
                        self.tell_refusal(incoming.conn.remote(), &error, now);
                    }
                    if !incoming.output.is_empty() && !incoming.over {
                        incoming.over = true;
                        rest.push_back(incoming);
                    }
                }
            }
        }
        rest.extend(std::mem::take(&mut self.incoming));
        self.incoming = rest;
        worked
    }

    /// One log line for each refused stranger, until there are too many to read.
    fn tell_refusal(&mut self, from: SocketAddr, error: &HandshakeError, now: Duration) {
        const LINES_PER_MINUTE: u64 = 100;
        self.wrong_secrets += u64::from(matches!(error, HandshakeError::WrongSecret(_)));
        let hung_up = matches!(error, HandshakeError::Closed(_) | HandshakeError::Late(_));
        if hung_up && self.links.values().any(|link| link.raced_from(from.ip(), now)) {
            return tracing::debug!("a slower path of a resumption from {from} was given up: {error}");
        }
        if now.saturating_sub(self.refusals_since) > Duration::from_secs(60) {
            self.refusals_since = now;
            self.refusals_told = 0;
        }
        self.refusals_told += 1;
        match self.refusals_told {
            0..LINES_PER_MINUTE => tracing::warn!("refused a connection from {from}: {error}"),
            LINES_PER_MINUTE => {
                tracing::warn!("many connections are refused; the rest of this minute is not told")
            }
            _ => {}
        }
    }

    fn settle(&mut self, engine: &Engine, incoming: Incoming, outcome: Outcome, now: Duration) {
        self.unwatch(&*incoming.conn);
        // Its seat in the lobby goes with the responder, when the link has taken its own.
        let Incoming { conn, output, responder: _responder, .. } = incoming;
        debug_assert!(output.is_empty());
        match outcome {
            Outcome::Data { session, channel, generation } => {
                let Some(link) = self.links.get_mut(&session) else {
                    return;
                };
                match channel & LANE {
                    0 => link.channel_accepted(engine, conn, channel, generation, now),
                    _ => link.lane_connected(engine, conn, channel & !LANE, generation, now),
                }
            }
            Outcome::Control(established) => {
                let session = established.session;
                let remote = conn.remote();
                self.watch(&*conn, Interest::READ);
                match self.links.get_mut(&session) {
                    Some(link) => link.attach(conn, *established, now),
                    None => {
                        self.enter(&established);
                        let link = Link::accepted(
                            engine,
                            conn,
                            remote,
                            *established,
                            self.lobby.clone(),
                            &self.me,
                            now,
                        );
                        self.links.insert(session, link);
                    }
                }
            }
        }
    }

    /// Waits for something else on a connection than before.
    fn rewatch(&mut self, fd: RawFd, interest: Interest) {
        let token = self.next_token;
        self.next_token += 1;
        if let Err(error) = self.poller.modify(fd, token, interest) {
            tracing::warn!(%error, "changing what a control connection waits for failed");
        }
    }

    fn unwatch(&self, conn: &dyn Conn) {
        if let Some(fd) = conn.fd() {
            drop(self.poller.remove(fd));
        }
    }

    fn enter(&self, established: &crate::bootstrap::Established) {
        let mut book = self.book.lock().unwrap_or_else(PoisonError::into_inner);
        book.enter(established);
    }

    // ---- dialling ----

    /// Starts to connect; the result comes to the lobby.
    pub fn connect(&mut self, engine: &Engine, address: SocketAddr, lobby: Arc<Lobby>) {
        if self.links.len() >= limits::PEERS_MAX {
            let (name, limit) = ("PEERS_MAX", limits::PEERS_MAX as u64);
            lobby.put(Err(Error::Limit { name, limit, why: "close a peer first".into() }));
            return;
        }
        let now = self.now(engine);
        let until = now.saturating_add(limits::HANDSHAKE_DEADLINE);
        self.dial_new(engine, DialFor::New { address, lobby, until, without: None }, now);
    }

    /// Connects once more, over the connections alone: the lanes of the session before did not come about.
    fn connect_without(
        &mut self,
        engine: &Engine,
        address: SocketAddr,
        lobby: Arc<Lobby>,
        why: String,
        now: Duration,
    ) {
        if engine.closing.load(std::sync::atomic::Ordering::SeqCst) {
            return lobby.put(Err(Error::Closed));
        }
        let until = now.saturating_add(limits::HANDSHAKE_DEADLINE);
        self.dial_new(engine, DialFor::New { address, lobby, until, without: Some(why) }, now);
    }

    fn dial_new(&mut self, engine: &Engine, what: DialFor, now: Duration) {
        let DialFor::New { address, lobby, without, .. } = &what else { return };
        match Dial::control(engine, &self.me, *address, without.as_deref()) {
            Ok(dial) => self.start(dial, what, now),
            Err(error) => lobby.put(Err(error)),
        }
    }

    fn redial(&mut self, engine: &Engine, now: Duration) {
        let due = self.redials.extract_if(.., |(at, _)| *at <= now);
        for (_, what) in due.collect::<Vec<_>>() {
            self.dial_new(engine, what, now);
        }
    }

    fn start(&mut self, mut dial: Dial, what: DialFor, now: Duration) {
        dial.begin(what, now);
        self.watch(dial.conn(), Interest::READ);
        self.dials.push(dial);
    }

    fn advance_dials(&mut self, engine: &Engine, now: Duration) -> bool {
        let mut worked = false;
        let mut rest = Vec::new();
        for mut dial in std::mem::take(&mut self.dials) {
            if dial.pointless(&self.links) {
                continue;
            }
            match dial.advance(now) {
                None => rest.push(dial),
                Some(result) => {
                    worked = true;
                    self.dialled(engine, dial, result, now);
                }
            }
        }
        rest.append(&mut self.dials);
        self.dials = rest;
        worked
    }

    fn dialled(&mut self, engine: &Engine, dial: Dial, result: Result<Outcome, DialFailure>, now: Duration) {
        let Dial { conn, what, .. } = dial;
        match (what, result) {
            (DialFor::New { address, lobby, .. }, Ok(Outcome::Control(established))) => {
                let session = established.session;
                if self.links.contains_key(&session) {
                    let why = "it gave the session a number that another peer's session has".into();
                    return lobby.put(Err(Error::Refused { address: address.to_string(), why }));
                }
                self.enter(&established);
                let link = Link::connected(engine, conn, address, *established, lobby, &self.me, now);
                self.links.insert(session, link);
            }
            (what @ DialFor::New { until, .. }, Err(failure))
                if failure.refused == Some(RefusalCode::Busy) && now < until =>
            {
                self.redials.push((now + limits::REDIAL_INTERVAL, what));
            }
            (DialFor::New { lobby, .. }, Err(failure)) => lobby.put(Err(failure.error)),
            (DialFor::New { .. }, Ok(Outcome::Data { .. })) => {}
            (DialFor::Resume { session }, result) => {
                let Some(link) = self.links.get_mut(&session) else {
                    return;
                };
                match result {
                    Ok(Outcome::Control(established)) => link.attach(conn, *established, now),
                    Ok(Outcome::Data { .. }) => {}
                    Err(failure) => link.resume_failed(failure, now),
                }
            }
            (DialFor::Lane { session, index, generation }, result) => {
                let Some(link) = self.links.get_mut(&session) else {
                    return;
                };
                match result {
                    Ok(_) => {
                        drop(conn.fd().map(|fd| self.poller.remove(fd)));
                        link.lane_connected(engine, conn, index, generation, now);
                    }
                    Err(failure) => link.lane_not_connected(index, generation, &failure.error, now),
                }
            }
            (DialFor::Channel { session, index, generation }, result) => {
                let Some(link) = self.links.get_mut(&session) else {
                    return;
                };
                match result {
                    Ok(_) => {
                        drop(conn.fd().map(|fd| self.poller.remove(fd)));
                        link.channel_dialled(engine, conn, index, generation, now);
                    }
                    Err(failure) => link.channel_failed(index, generation, failure.error, now),
                }
            }
        }
    }

    // ---- peers ----

    fn take_events(&mut self, engine: &Engine, now: Duration) -> bool {
        let mut worked = false;
        while let Some(event) = engine.events.pop() {
            worked = true;
            let Event::Lost { peer, index, generation, why, remains } = event;
            match self.links.get_mut(&peer.session) {
                Some(link) => link.channel_lost(index, generation, why, *remains, now),
                None => peer.drop_entries(remains.entries.into_iter().map(|(_, entry)| entry).collect()),
            }
        }
        worked
    }

    fn advance_links(&mut self, engine: &Engine, now: Duration) -> bool {
        let mut worked = false;
        let sessions: Vec<u64> = self.links.keys().copied().collect();
        for session in sessions {
            let Some(link) = self.links.get_mut(&session) else {
                continue;
            };
            if link.disowned() && !self.dials.iter().any(|dial| dial.resumes(session)) {
                link.give_up();
            }
            worked |= link.turn(engine, now);
            let received = link.received();
            let mut dials = link.take_dials(engine, &self.me, now);
            dials.extend(link.take_lane_dials(now));
            // What was announced is to be heard now, not after the next sleep.
            worked |= link.write(now);
            let (over, interest) = (link.over(), link.changed_interest());
            self.book.lock().unwrap_or_else(PoisonError::into_inner).update(session, received, over);
            for (dial, what) in dials {
                self.start(dial, what, now);
            }
            if let Some((fd, interest)) = interest {
                self.rewatch(fd, interest);
            }
            if over {
                worked = true;
                let Some(mut link) = self.links.remove(&session) else { continue };
                self.unfinished |= link.unfinished();
                if let Some((address, lobby, why)) = link.take_retry() {
                    self.connect_without(engine, address, lobby, why, now);
                }
            }
        }
        worked
    }

    /// Asks a peer's link to finish and close.
    pub fn close(&mut self, engine: &Engine, session: u64, deadline: Duration) {
        let now = self.now(engine);
        if let Some(link) = self.links.get_mut(&session) {
            link.close(now.saturating_add(deadline));
        }
    }

    /// Closes all peers, at the latest after so long.
    pub fn close_all(&mut self, engine: &Engine, deadline: Duration) {
        let now = self.now(engine);
        self.take_no_more();
        self.links.values_mut().for_each(|link| link.close(now.saturating_add(deadline)));
    }

    /// Closes all peers, each once what was posted to it does not get on any more.
    pub fn drain_all(&mut self, engine: &Engine) {
        let now = self.now(engine);
        self.take_no_more();
        self.links.values_mut().for_each(|link| link.drain(now));
    }

    /// Changes as long as what was posted gets on.
    pub fn drained(&self) -> u64 {
        self.links.values().fold(0, |sum, link| sum.wrapping_add(link.drained()))
    }

    fn take_no_more(&mut self) {
        self.listeners.clear();
        self.incoming.clear();
        // Peers that are not there yet do not come any more.
        let comes = |what: &DialFor| match what {
            DialFor::New { lobby, .. } => {
                lobby.put(Err(Error::Closed));
                false
            }
            _ => true,
        };
        self.dials.retain(|dial| comes(&dial.what));
        self.redials.retain(|(_, what)| comes(what));
    }

    /// Ends what has not finished in time, without a farewell.
    pub fn abort_all(&mut self, engine: &Engine) {
        self.unfinished |= !self.links.is_empty();
        self.links.values_mut().for_each(|link| link.die(engine, Error::Closed));
    }

    /// Whether a peer was closed before all was finished.
    pub fn unfinished(&self) -> bool {
        self.unfinished
    }
}

impl Incoming {
    /// Moves the handshake on.
    fn advance(&mut self, now: Duration) -> Result<Option<Outcome>, HandshakeError> {
        if now.saturating_sub(self.since) > limits::HANDSHAKE_DEADLINE {
            self.over = true;
            return Err(self.responder.late());
        }
        loop {
            self.output.append(&mut self.responder.take_output());
            let flushed =
                write_out(&mut *self.conn, &mut self.output).map_err(|_| self.responder.closed())?;
            if self.over {
                return match flushed {
                    true => Err(self.responder.closed()),
                    false => Ok(None),
                };
            }
            if flushed && let Some(outcome) = self.responder.finished() {
                return Ok(Some(outcome));
            }
            let mut buffer = [0u8; limits::HANDSHAKE_BYTES_MAX];
            let want = self.responder.want().min(buffer.len());
            if want == 0 {
                return Ok(None);
            }
            match read_in(&mut *self.conn, &mut buffer[..want]) {
                Ok(None) => return Ok(None),
                Ok(Some(0)) | Err(_) => return Err(self.responder.closed()),
                Ok(Some(count)) => {
                    if let Err(error) = self.responder.feed(&buffer[..count]) {
                        self.output.append(&mut self.responder.take_output());
                        let _ = write_out(&mut *self.conn, &mut self.output);
                        return Err(error);
                    }
                }
            }
        }
    }
}

/// Writes what it can; true when all is written.
fn write_out(conn: &mut dyn Conn, output: &mut Vec<u8>) -> io::Result<bool> {
    while !output.is_empty() {
        // SAFETY: the piece is the vector's own bytes.
        match unsafe { conn.send(&[IoVec::new(output.as_mut_ptr(), output.len())]) } {
            Ok(count) => drop(output.drain(..count)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

/// Reads what is there: `None` when nothing is, 0 at the end of the stream.
fn read_in(conn: &mut dyn Conn, buffer: &mut [u8]) -> io::Result<Option<usize>> {
    // SAFETY: the piece is the buffer's own bytes.
    match unsafe { conn.recv(&[IoVec::new(buffer.as_mut_ptr(), buffer.len())]) } {
        Ok(count) => Ok(Some(count)),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error),
    }
}

/// NIC pairs that a connection to this address can be expected to have, before the peer has said more.
fn pairs_expected(engine: &Engine, address: SocketAddr) -> usize {
    let nics = engine.transport.nics().unwrap_or_default();
    let chosen = &engine.config.nics;
    let fits = |nic: &&crate::transport::Nic| {
        let wanted = chosen.is_empty() || chosen.contains(&nic.name);
        nic.up && wanted && nic.loopback == address.ip().is_loopback()
    };
    nics.iter().filter(fits).count().clamp(1, 8)
}

/// A refusal because there is no room.
fn full(why: &str) -> Refusal {
    Refusal::new(RefusalCode::Limit, why)
}

/// The control thread's whole life.
pub(crate) fn run(engine: &Engine, control: &Mutex<Control>) {
    let _moving = idle::moving();
    let mut ready = Vec::new();
    loop {
        let (poller, limit) = {
            let mut control = control.lock().unwrap_or_else(PoisonError::into_inner);
            if control.turn(engine) {
                // Callers get in between turns, however many strangers keep us busy.
                drop(control);
                thread::yield_now();
                continue;
            }
            if engine.closing.load(std::sync::atomic::Ordering::SeqCst) && control.idle() {
                return;
            }
            (control.poller.clone(), control.sleep_limit())
        };
        if let Err(error) = poller.wait(&mut ready, Some(limit)) {
            tracing::error!(%error, "waiting for control connections failed");
            thread::sleep(limit);
        }
    }
}

/// Closes a peer in an orderly way; see [`Peer::close`].
pub(crate) fn close_peer(peer: &Arc<PeerState>, deadline: Duration) -> Result<()> {
    let engine = peer.engine();
    let now = engine.transport.now();
    engine.with_control(|control| control.close(engine, peer.session, deadline));
    let until = now.saturating_add(deadline).saturating_add(limits::HEARTBEAT_INTERVAL);
    while peer.failure().is_none() && engine.transport.now() < until {
        if engine.caller_driven() {
            engine.progress();
        } else {
            thread::sleep(Duration::from_micros(200));
        }
    }
    match peer.failure() {
        Some(Error::Closed | Error::PeerClosed { .. }) if !peer.unfinished.load(Ordering::SeqCst) => Ok(()),
        Some(error) if !matches!(error, Error::Closed | Error::PeerClosed { .. }) => Err(error),
        _ => Err(Error::Deadline { what: format!("closing {}", peer.name()), waited: deadline }),
    }
}
