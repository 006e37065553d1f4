//! The control side of an endpoint: listening, handshakes, control sessions, lost channels, closing.
//!
//! One thread runs it; in an endpoint without threads, its callers do. It never touches payload: it hands
//! channels to workers, and workers report lost channels. An arriving connection is an
//! [`accepting::Incoming`] until it has proven the secret; a connection made here is a [`dial::Dial`]; the
//! state of one peer is a [`Link`].
//!
//! Invariant: nothing here blocks, and unproven connections number at most `limits::HANDSHAKES_PENDING_MAX`.
//! Read next: `accepting.rs`, `dialling.rs`, `ready_set.rs`, `link/`.
#![forbid(unsafe_code)]

mod accept_queue;
mod accepting;
mod addresses;
mod admission;
mod dial;
mod dialling;
mod lanes;
mod link;
mod pairs;
mod ready_set;

use crate::core::context::Context;
use crate::core::worker::Workers;
use crate::error::{Error, LossCause};
use crate::payload::plugin::CallWatch;
pub(crate) use accept_queue::AcceptQueue;
use accepting::Accepting;
pub(crate) use addresses::advertised;
use admission::SessionTable;
pub use dial::ConnectTarget;
pub(crate) use dial::check_names;
use dialling::Dialling;
use ferrywire_memory::cuda::deferred_free;
use ferrywire_net::{Conn, Listener};
use ferrywire_proto::clock::Clock;
use ferrywire_proto::handshake::{Hello, ListenAddress, Refusal, RefusalCode};
use ferrywire_proto::limits;
use ferrywire_sys::poll::{Interest, Poller};
use link::Link;
use pairs::NicWatch;
use ready_set::{FULL_SCAN_INTERVAL, ReadySet, token};
use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// Longest sleep of the control thread while something is being set up or closed.
const BUSY_SLEEP: Duration = Duration::from_millis(50);

const _: () = assert!(2 * FULL_SCAN_INTERVAL.as_millis() < limits::PEER_TIMEOUT_MARGIN.as_millis());

/// The poller's token for listeners; see [`token`] for connections.
const LISTENER_TOKEN: u64 = 0;

/// The control side's state.
pub(crate) struct Control {
    workers: Arc<Workers>,
    accepting: Accepting,
    dialling: Dialling,
    nic_watch: NicWatch,
    links: BTreeMap<u64, Link>,
    ready_set: ReadySet,
    session_table: Arc<Mutex<SessionTable>>,
    accept_queue: Arc<AcceptQueue>,
    poller: Arc<Poller>,
    clock: Clock,
    me: Hello,
    calls_seen: Duration,
    call_watch: CallWatch,
    /// Whether a caller closes the endpoint.
    endpoint_closes: bool,
    /// The first session that was closed before all its transfers had finished.
    unfinished: Option<Unfinished>,
}

/// A session that was closed before all its transfers had finished.
#[derive(Clone)]
pub(crate) struct Unfinished {
    /// The error with which it ended.
    pub how: Error,
    pub peer: String,
    /// The timeout of the close that ended it, if one did.
    pub timeout: Option<Duration>,
}

impl Control {
    pub fn new(
        workers: Arc<Workers>,
        poller: Arc<Poller>,
        listeners: Vec<Box<dyn Listener>>,
        addresses: Vec<ListenAddress>,
        boot_id: [u8; 16],
        accept_queue: Arc<AcceptQueue>,
    ) -> io::Result<Control> {
        let context = &*workers.context;
        let me = Hello {
            identity: context.identity.0,
            boot_id,
            label: context.config.label.clone(),
            addresses,
            peer_timeout_ms: context.config.peer_timeout.as_millis().min(u128::from(u32::MAX)) as u32,
        };
        let needed = listeners.iter().any(|listener| !listener.local().ip().is_loopback());
        for listener in &listeners {
            if let Some(fd) = listener.fd() {
                poller.add(fd, LISTENER_TOKEN, Interest::READ)?;
            }
        }
        let session_table =
            SessionTable::new(me.clone(), needed, workers.context.clone(), accept_queue.clone());
        let clock = Clock::new(context.transport.now());
        Ok(Control {
            workers,
            accepting: Accepting::new(listeners),
            dialling: Dialling::default(),
            nic_watch: NicWatch::default(),
            links: BTreeMap::new(),
            ready_set: ReadySet::default(),
            session_table: Arc::new(Mutex::new(session_table)),
            accept_queue,
            poller,
            clock,
            me,
            calls_seen: Duration::ZERO,
            call_watch: CallWatch::default(),
            endpoint_closes: false,
            unfinished: None,
        })
    }

    fn now(&mut self, context: &Context) -> Duration {
        self.clock.read(context.transport.now())
    }

    /// Makes one pass over everything. Returns whether there was progress.
    pub fn poll_once(&mut self) -> bool {
        self.ready_set.touch_all();
        self.poll_due()
    }

    /// The endpoint's configuration and shared parts.
    fn context(&self) -> Arc<Context> {
        self.workers.context.clone()
    }

    /// Makes one pass that skips resting links. Pass the poller's events to `ready_set` first.
    fn poll_due(&mut self) -> bool {
        let context = &*self.context();
        let _moving = deferred_free::moving();
        let now = self.now(context);
        let mut worked = self.take_lost_channels(now);
        // Advance known connections first: a newly accepted one may displace one whose bytes have arrived but
        // not been read.
        worked |= self.advance_incoming(context, now);
        worked |= self.accept(context, now);
        worked |= self.advance_incoming(context, now);
        self.redial(context, now);
        worked |= self.advance_dials(context, now);
        worked |= self.advance_links(context, now);
        self.stop_listening_if_over();
        self.watch_calls(context, now);
        self.workers.iter().for_each(|worker| worker.wake_dozing());
        worked
    }

    /// Detects plugin calls that do not return. Such a call blocks its worker for good, and the worker's
    /// peers are lost.
    fn watch_calls(&mut self, context: &Context, now: Duration) {
        let Some(backend) = context.blocking_backend() else { return };
        if now.saturating_sub(self.calls_seen) < limits::PATH_CHECK_INTERVAL {
            return;
        }
        self.calls_seen = now;
        for call in self.call_watch.overdue(backend.inflight_calls(), backend.stall_timeout(), now) {
            let worker = self.workers.iter().find(|worker| worker.thread_id() == call.thread);
            if let Some(worker) = worker.filter(|worker| worker.mark_stuck()) {
                let why = backend.describe_call(&call);
                tracing::error!("{why}; its thread is abandoned");
                self.ready_set.touch_all();
                self.links.values_mut().for_each(|link| link.worker_stuck(worker.index, &why, now));
            }
        }
    }

    /// Time until the control thread has work again, unless a connection has an event before.
    fn sleep_limit(&self) -> Duration {
        let busy = !self.accepting.is_idle() || !self.dialling.is_idle();
        let mut restless = self.ready_set.restless().filter_map(|session| self.links.get(&session));
        let busy = busy || restless.any(Link::busy);
        let polled = self.accepting.needs_polling();
        match (polled, busy) {
            (true, _) => Duration::from_millis(1),
            (_, true) => BUSY_SLEEP,
            _ => self.ready_set.until_all(self.clock.now()),
        }
    }

    pub fn idle(&self) -> bool {
        self.links.is_empty() && self.dialling.is_idle()
    }

    pub fn peer_count(&self) -> usize {
        self.links.len()
    }

    pub fn auth_failures(&self) -> u64 {
        self.accepting.auth_failures()
    }

    // ---- the poller ----

    fn watch(&self, conn: &dyn Conn, interest: Interest) {
        if let Some(fd) = conn.fd()
            && let Err(error) = self.poller.add(fd, token(fd), interest)
        {
            tracing::warn!(%error, "cannot add a new connection to the poller of the control thread");
        }
    }

    /// Changes the poller's interest in a connection.
    fn rewatch(&self, fd: RawFd, interest: Interest) {
        if let Err(error) = self.poller.modify(fd, token(fd), interest) {
            tracing::warn!(%error, "cannot change the poll interest of a control connection");
        }
    }

    fn unwatch(&self, conn: &dyn Conn) {
        if let Some(fd) = conn.fd() {
            drop(self.poller.remove(fd));
        }
    }

    fn enter(&self, established: &ferrywire_proto::handshake::Established, dialled_by_us: bool) {
        let mut table = self.session_table.lock().unwrap_or_else(PoisonError::into_inner);
        table.enter(established, dialled_by_us);
    }

    // ---- peers ----

    fn take_lost_channels(&mut self, now: Duration) -> bool {
        let mut worked = false;
        while let Some(lost) = self.workers.lost().pop() {
            worked = true;
            self.ready_set.touch(lost.peer.info.session);
            match self.links.get_mut(&lost.peer.info.session) {
                Some(link) => link.channel_lost(lost.index, lost.generation, lost.loss, *lost.remains, now),
                None => lost.drop_entries(),
            }
        }
        worked
    }

    fn advance_links(&mut self, context: &Context, now: Duration) -> bool {
        let mut worked = false;
        let due = self.ready_set.take(now);
        let due = due.unwrap_or_else(|| self.links.keys().copied().collect());
        for session in due {
            let Some(link) = self.links.get_mut(&session) else {
                self.ready_set.forget(session);
                continue;
            };
            if link.disowned() && !self.dialling.resumes(session) {
                link.give_up();
            }
            worked |= link.poll(context, now);
            if link.backs_off() {
                link.restart_backoff(self.nic_watch.changes(context, now), now);
            }
            let received = link.received();
            let mut dials = link.take_dials(context, &self.me, now);
            dials.extend(link.take_lane_dials(now));
            // Send announcements now, not after the next sleep.
            worked |= link.write(now);
            let (over, interest) = (link.over(), link.changed_interest());
            self.ready_set.note_polled(session, link.rests(), link.fd());
            self.session_table.lock().unwrap_or_else(PoisonError::into_inner).update(session, received, over);
            for (dial, what) in dials {
                self.start(dial, what, now);
            }
            if let Some((fd, interest)) = interest {
                self.rewatch(fd, interest);
            }
            if over {
                worked = true;
                let Some(mut link) = self.links.remove(&session) else { continue };
                self.ready_set.forget(session);
                let endpoint_closes = self.endpoint_closes;
                self.unfinished = self.unfinished.take().or_else(|| link.unfinished(endpoint_closes));
                if let Some((target, queue, why)) = link.take_retry() {
                    self.connect_without(context, target, queue, why, now);
                }
            }
        }
        worked
    }

    /// Asks a peer's link to finish and close.
    pub fn close(&mut self, session: u64, timeout: Duration) {
        let now = self.now(&self.context());
        self.ready_set.touch(session);
        if let Some(link) = self.links.get_mut(&session) {
            link.close_alone(now, timeout);
        }
    }

    /// Notes that the caller that closed this peer was given the error. A caller that already closes the
    /// endpoint gets the error as well.
    pub fn note_error_reported(&mut self, session: u64) {
        if !self.endpoint_closes
            && let Some(link) = self.links.get_mut(&session)
        {
            link.note_error_reported();
        }
    }

    /// Closes all peers, at the latest after `timeout`.
    pub fn close_all(&mut self, timeout: Duration) {
        let now = self.now(&self.context());
        self.take_no_more();
        self.ready_set.touch_all();
        self.links.values_mut().for_each(|link| link.close(now, timeout));
    }

    /// Closes all peers, each once its transfers make no progress.
    pub fn drain_all(&mut self) {
        let now = self.now(&self.context());
        self.take_no_more();
        self.ready_set.touch_all();
        self.links.values_mut().for_each(|link| link.drain(now));
    }

    /// A counter that grows while posted transfers make progress.
    pub fn drained(&self) -> u64 {
        self.links.values().fold(0, |sum, link| sum.wrapping_add(link.drained()))
    }

    fn take_no_more(&mut self) {
        self.endpoint_closes = true;
        self.session_table.lock().unwrap_or_else(PoisonError::into_inner).take_no_more();
        self.stop_listening_if_over();
        self.dialling.give_up_connects();
    }

    /// Stops listening once a closing endpoint has no session left. Until then a peer may have to dial again: channels and
    /// the control session can be lost while a close waits for transfers.
    fn stop_listening_if_over(&mut self) {
        if self.endpoint_closes && self.links.is_empty() {
            self.accepting.stop();
        }
    }

    /// Ends all sessions that have not finished in time, without a last message.
    pub fn abort_all(&mut self) {
        // No session is resumed any more, and one that waits for a GPU or a plugin must not keep the port.
        self.accepting.stop();
        self.ready_set.touch_all();
        self.links.values_mut().for_each(|link| link.abort());
    }

    /// Ends a session without a last message, like a killed process.
    #[cfg(test)]
    pub(crate) fn break_off(&mut self, session: u64) {
        self.links.get_mut(&session).expect("the session has a link").break_off();
    }

    /// The first session that was closed before its transfers had finished, if there was one.
    pub fn unfinished(&self) -> Option<Unfinished> {
        self.unfinished.clone()
    }
}

/// Writes as much as possible. Returns true when all is written.
fn write_out(conn: &mut dyn Conn, output: &mut Vec<u8>) -> io::Result<bool> {
    while !output.is_empty() {
        match conn.write(output) {
            Ok(count) => drop(output.drain(..count)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

/// Reads available bytes: `None` if there are none, 0 at the end of the stream.
fn read_in(conn: &mut dyn Conn, buffer: &mut [u8]) -> io::Result<Option<usize>> {
    match conn.read(buffer) {
        Ok(count) => Ok(Some(count)),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error),
    }
}

/// Number of NIC pairs to expect for a connection to this address, before the peer has listed its addresses.
fn pairs_expected(context: &Context, address: SocketAddr) -> usize {
    let nics = context.transport.nics().unwrap_or_default();
    let chosen = &context.config.nics;
    let fits = |nic: &&ferrywire_net::Nic| {
        let wanted = chosen.is_empty() || chosen.contains(&nic.name);
        nic.up && wanted && nic.loopback == address.ip().is_loopback()
    };
    nics.iter().filter(fits).count().clamp(1, 8)
}

/// A refusal because a limit is reached.
fn full(why: &str) -> Refusal {
    Refusal::new(RefusalCode::Limit, why)
}

/// Runs the control thread until the endpoint is closed.
pub(crate) fn run(workers: &Workers, control: &Mutex<Control>) {
    let _moving = deferred_free::moving();
    let mut ready = Vec::new();
    loop {
        let (poller, limit) = {
            let mut control = control.lock().unwrap_or_else(PoisonError::into_inner);
            control.ready_set.reported(&ready);
            ready.clear();
            if control.poll_due() {
                // Callers get the lock between passes, however busy the connections keep this thread.
                drop(control);
                thread::yield_now();
                continue;
            }
            if workers.context.closing.load(Ordering::SeqCst) && control.idle() {
                drop(control);
                return workers.lost().close();
            }
            (control.poller.clone(), control.sleep_limit())
        };
        if let Err(error) = poller.wait(&mut ready, Some(limit)) {
            tracing::error!(%error, "the control thread cannot poll its connections");
            thread::sleep(limit);
        }
    }
}

/// The error of a close that ended before all transfers had finished. `how` is how the session ended;
/// [`Error::Closed`] means that this end's timeout was over.
pub(crate) fn ended_early(how: Error, what: String, peer: Option<String>, timeout: Duration) -> Error {
    match how {
        Error::Closed => Error::Stalled { what, peer, waited: timeout },
        // Transfers had not finished, so the close was not orderly.
        Error::PeerClosed { peer } => {
            let why = "the peer closed the connection before the transfers posted to it had finished".into();
            Error::PeerLost { peer, cause: LossCause::Unfinished, why }
        }
        error => error,
    }
}
