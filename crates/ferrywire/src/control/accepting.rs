//! Arriving connections: accepted, answered, and handed to a link once they have proven the secret.
//!
//! Invariant: at most `limits::HANDSHAKES_PENDING_MAX` connections are unproven; a new one displaces the
//! oldest.
//! Read next: `admission.rs`, which decides what a proven connection may do.

use super::addresses::advertised;
use super::admission::Admitter;
use super::lanes::LANE;
use super::link::Link;
use super::{Control, LISTENER_TOKEN, read_in, write_out};
use crate::core::context::Context;
use ferrywire_net::{Conn, Listener};
use ferrywire_proto::handshake::{HandshakeError, Outcome, Refusal, RefusalCode, Responder};
use ferrywire_proto::limits;
use ferrywire_sys::poll::Interest;
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::PoisonError;
use std::time::Duration;

/// A connection that has not proven the secret.
pub(super) struct Incoming {
    conn: Box<dyn Conn>,
    responder: Responder<Admitter>,
    output: Vec<u8>,
    since: Duration,
    /// Whether the connection was refused. It is closed as soon as the refusal is written.
    over: bool,
}

/// Listeners and unproven connections of an endpoint.
pub(super) struct Accepting {
    listeners: Vec<Box<dyn Listener>>,
    /// Unproven connections, oldest first.
    incoming: VecDeque<Incoming>,
    /// No connection is accepted before this time, because the last attempt failed.
    paused_until: Option<Duration>,
    /// Time of the last log line about failing accepts.
    pause_logged_at: Option<Duration>,
    nics_seen: Duration,
    refusals: Refusals,
}

/// Counts of refused connections.
#[derive(Default)]
struct Refusals {
    /// Log lines about refusals since `minute_began`.
    logged: u64,
    minute_began: Duration,
    /// Number of connections whose other end had another secret.
    auth_failures: u64,
}

impl Accepting {
    pub fn new(listeners: Vec<Box<dyn Listener>>) -> Accepting {
        Accepting {
            listeners,
            incoming: VecDeque::new(),
            paused_until: None,
            pause_logged_at: None,
            nics_seen: Duration::ZERO,
            refusals: Refusals::default(),
        }
    }

    pub fn auth_failures(&self) -> u64 {
        self.refusals.auth_failures
    }

    /// Whether no unproven connection waits and accepting is not paused, so that the control thread need not
    /// wake at a certain time.
    pub fn is_idle(&self) -> bool {
        self.incoming.is_empty() && self.paused_until.is_none()
    }

    /// Whether a listener has no file descriptor for the poller.
    pub fn needs_polling(&self) -> bool {
        self.listeners.iter().any(|listener| listener.fd().is_none())
    }

    /// Closes the listeners and the unproven connections.
    pub fn stop(&mut self) {
        self.listeners.clear();
        self.incoming.clear();
    }
}

impl Control {
    pub(super) fn accept(&mut self, context: &Context, now: Duration) -> bool {
        if self.accepting.paused_until.is_some_and(|at| now < at) {
            return false;
        }
        if self.accepting.paused_until.take().is_some() {
            self.listen_for(Interest::READ);
        }
        let mut worked = false;
        for index in 0..self.accepting.listeners.len() {
            // Accept no more than fit, so that a flood cannot occupy this thread.
            for _ in 0..limits::HANDSHAKES_PENDING_MAX {
                match self.accepting.listeners[index].accept() {
                    Ok(Some(conn)) => {
                        self.refresh_nic_addresses(context, now);
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

    /// Pauses accepting for a while. The connection that could not be accepted still waits, and would wake
    /// this thread again and again.
    fn stop_accepting(&mut self, error: &io::Error, now: Duration) {
        const SECONDS_BETWEEN_LINES: u64 = 60;
        self.accepting.paused_until = Some(now + limits::ACCEPT_RETRY_INTERVAL);
        self.listen_for(Interest::NONE);
        if self.accepting.pause_logged_at.is_none_or(|at| (now - at).as_secs() >= SECONDS_BETWEEN_LINES) {
            self.accepting.pause_logged_at = Some(now);
            let every = limits::ACCEPT_RETRY_INTERVAL;
            tracing::warn!(
                "cannot accept connections: {error}; retrying every {every:?} (open files: see ulimit -n)"
            );
        }
    }

    fn listen_for(&self, interest: Interest) {
        for fd in self.accepting.listeners.iter().filter_map(|listener| listener.fd()) {
            if let Err(error) = self.poller.modify(fd, LISTENER_TOKEN, interest) {
                tracing::warn!(%error, "cannot change the poll interest of a listener");
            }
        }
    }

    /// Looks up the addresses at which peers can reach this endpoint, at most once per `REDIAL_INTERVAL`.
    fn refresh_nic_addresses(&mut self, context: &Context, now: Duration) {
        if now.saturating_sub(self.accepting.nics_seen) < limits::REDIAL_INTERVAL {
            return;
        }
        self.accepting.nics_seen = now;
        let listening: Vec<SocketAddr> =
            self.accepting.listeners.iter().map(|listener| listener.local()).collect();
        if let Ok(addresses) = advertised(&context.config, &*context.transport, &listening) {
            self.me.addresses = addresses.clone();
            self.session_table.lock().unwrap_or_else(PoisonError::into_inner).listens_on(addresses);
        }
    }

    fn greet(&mut self, conn: Box<dyn Conn>, now: Duration) {
        if self.accepting.incoming.len() >= limits::HANDSHAKES_PENDING_MAX {
            self.displace(now);
        }
        self.watch(&*conn, Interest::READ);
        let responder = Responder::new(Admitter::new(self.session_table.clone()));
        let output = Vec::new();
        self.accepting.incoming.push_back(Incoming { conn, responder, output, since: now, over: false });
    }

    /// Refuses the oldest unproven connection in favour of a new one.
    fn displace(&mut self, now: Duration) {
        let Some(mut oldest) = self.accepting.incoming.pop_front() else { return };
        // The limit is full for a moment only: the other end may succeed later.
        let busy = Refusal::new(RefusalCode::Busy, "HANDSHAKES_PENDING_MAX reached");
        let error = oldest.responder.refuse(busy);
        oldest.output.append(&mut oldest.responder.take_output());
        // If the other end does not read the refusal, it finds the connection closed.
        let _ = write_out(&mut *oldest.conn, &mut oldest.output);
        self.tell_refusal(oldest.conn.remote(), &error, now);
    }

    pub(super) fn advance_incoming(&mut self, context: &Context, now: Duration) -> bool {
        let mut worked = false;
        let mut rest = VecDeque::with_capacity(self.accepting.incoming.len());
        for mut incoming in std::mem::take(&mut self.accepting.incoming) {
            let was_refused = incoming.over;
            match incoming.advance(now) {
                Ok(None) => rest.push_back(incoming),
                Ok(Some(outcome)) => {
                    worked = true;
                    self.settle(context, incoming, outcome, now);
                }
                Err(error) => {
                    worked = true;
                    if !was_refused {
                        self.tell_refusal(incoming.conn.remote(), &error, now);
                    }
                    if !incoming.output.is_empty() && !incoming.over {
                        incoming.over = true;
                        rest.push_back(incoming);
                    }
                }
            }
        }
        rest.extend(std::mem::take(&mut self.accepting.incoming));
        self.accepting.incoming = rest;
        worked
    }

    /// Logs a refused connection, up to a number of lines per minute.
    fn tell_refusal(&mut self, from: SocketAddr, error: &HandshakeError, now: Duration) {
        const LINES_PER_MINUTE: u64 = 100;
        let refusals = &mut self.accepting.refusals;
        if matches!(error, HandshakeError::WrongSecret(_)) {
            refusals.auth_failures += 1;
            ferrywire_metrics::count_auth_failure();
        }
        // A peer that is refused as busy tries again for seconds, so a closing endpoint refuses it many times. A warning for
        // each time would fill the log.
        let busy = matches!(error, HandshakeError::Declined(why) if why.code == RefusalCode::Busy);
        if busy && self.endpoint_closes {
            return tracing::debug!("refused a connection from {from}: {error}");
        }
        let hung_up = matches!(error, HandshakeError::Closed(_) | HandshakeError::Late(_));
        if hung_up && self.links.values().any(|link| link.raced_from(from.ip(), now)) {
            return tracing::debug!("slower path of a session resumption from {from} closed: {error}");
        }
        if now.saturating_sub(refusals.minute_began) > Duration::from_secs(60) {
            refusals.minute_began = now;
            refusals.logged = 0;
        }
        refusals.logged += 1;
        match refusals.logged {
            0..LINES_PER_MINUTE => tracing::warn!("refused a connection from {from}: {error}"),
            LINES_PER_MINUTE => {
                tracing::warn!("many connections refused: further refusals of this minute are not logged")
            }
            _ => {}
        }
    }

    fn settle(&mut self, context: &Context, incoming: Incoming, outcome: Outcome, now: Duration) {
        self.unwatch(&*incoming.conn);
        // The link takes its own permit of the accept queue before the responder's is dropped.
        let Incoming { conn, output, responder: _responder, .. } = incoming;
        debug_assert!(output.is_empty());
        match outcome {
            Outcome::Data { session, channel, generation, secrets } => {
                self.ready_set.touch(session);
                let Some(link) = self.links.get_mut(&session) else {
                    return;
                };
                match channel & LANE {
                    0 => link.channel_accepted(context, conn, channel, generation, secrets, now),
                    _ => link.lane_connected(context, conn, channel & !LANE, generation, now),
                }
            }
            Outcome::Control(established) => {
                let session = established.session;
                let remote = conn.remote();
                self.watch(&*conn, Interest::READ);
                self.ready_set.touch(session);
                match self.links.get_mut(&session) {
                    Some(link) => link.attach(conn, *established, now),
                    // The session has ended since it was resumed.
                    None if established.resumed => self.unwatch(&*conn),
                    // The endpoint was closed during the handshake.
                    None if self.endpoint_closes => {
                        tracing::debug!(
                            "session {session:016x} from {remote} not begun: the endpoint closes"
                        );
                        self.unwatch(&*conn);
                    }
                    None => {
                        self.enter(&established, false);
                        let link = Link::accepted(
                            self.workers.clone(),
                            conn,
                            remote,
                            *established,
                            &self.accept_queue,
                            &self.me,
                            now,
                        );
                        self.links.insert(session, link);
                    }
                }
            }
        }
    }
}

impl Incoming {
    /// Continues the handshake. Returns the outcome once there is one.
    fn advance(&mut self, now: Duration) -> Result<Option<Outcome>, HandshakeError> {
        if now.saturating_sub(self.since) > limits::HANDSHAKE_TIMEOUT {
            self.over = true;
            return Err(self.responder.late());
        }
        loop {
            self.output.append(&mut self.responder.take_output());
            let flushed =
                write_out(&mut *self.conn, &mut self.output).map_err(|_| self.responder.closed())?;
            if self.over {
                return if flushed { Err(self.responder.closed()) } else { Ok(None) };
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Endpoint;
    use std::net::TcpStream;
    use std::time::Instant;

    /// When many endpoints connect at once, the first connections are displaced before they have sent
    /// anything.
    #[test]
    fn one_whose_place_is_taken_before_it_is_heard_tries_again() {
        let builder = || Endpoint::builder().threads(0).channels(1);
        let far = builder().listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
        let (near, address) = (builder().build().unwrap(), far.listen_addresses()[0]);
        // The connection sends its first bytes when its endpoint is polled.
        let connecting = near.start_connect(address).unwrap();
        let crowd = limits::HANDSHAKES_PENDING_MAX + 10;
        let _crowd: Vec<_> = (0..crowd).map(|_| TcpStream::connect(address).unwrap()).collect();
        while far.progress() {}
        let start = Instant::now();
        let peer = loop {
            near.progress();
            far.progress();
            if let Some(result) = connecting.poll() {
                break result.expect("the other end was busy for a moment");
            }
            assert!(start.elapsed() < Duration::from_secs(60), "the endpoint never connects");
        };
        assert_eq!(peer.error(), None);
    }
}
