//! Connections that this end makes: for new peers, for channels and lanes of known ones, and to resume
//! sessions.
//!
//! Invariant: every [`Dial`] has a timeout, and its queue or link gets the result, unless the result has
//! become useless because the session is gone or has been resumed by another path.
//! Read next: `dial.rs`, one dial.

use super::dial::{ConnectTarget, Dial, DialFailure, DialFor};
use super::link::Link;
use super::{AcceptQueue, Control};
use crate::core::context::Context;
use crate::error::{Error, RefusalReason};
use ferrywire_proto::handshake::{Outcome, RefusalCode};
use ferrywire_proto::limits;
use ferrywire_sys::poll::Interest;
use std::sync::Arc;
use std::time::Duration;

/// Connection attempts of an endpoint.
#[derive(Default)]
pub(super) struct Dialling {
    dials: Vec<Dial>,
    /// Connects whose other end was busy, with the time to dial again.
    redials: Vec<(Duration, DialFor)>,
    /// Number of peers that were connected, and the port of the first one.
    connected: usize,
    first_port: Option<u16>,
}

impl Dialling {
    pub fn is_idle(&self) -> bool {
        self.dials.is_empty() && self.redials.is_empty()
    }

    /// Whether a dial is to resume this session.
    pub fn resumes(&self, session: u64) -> bool {
        self.dials.iter().any(|dial| dial.resumes(session))
    }

    /// Number of connects that have not led to a session.
    fn connects(&self) -> usize {
        let dialled = self.dials.iter().filter(|dial| matches!(dial.what, DialFor::New { .. })).count();
        dialled + self.redials.len()
    }

    /// Fails all connects in progress, since the endpoint closes.
    pub fn give_up_connects(&mut self) {
        let comes = |what: &DialFor| match what {
            DialFor::New { queue, .. } => {
                queue.put(Err(Error::Closed));
                false
            }
            _ => true,
        };
        self.dials.retain(|dial| comes(&dial.what));
        self.redials.retain(|(_, what)| comes(what));
    }

    /// Number by which the NICs are chosen, so that first channels are on different NICs: the peers connected
    /// before this one, plus an offset from the port. The offset differs between endpoints of one process
    /// that connect one peer each.
    fn count_connected(&mut self, port: u16) -> usize {
        let first = *self.first_port.get_or_insert(port);
        self.connected += 1;
        usize::from(first) + self.connected - 1
    }
}

impl Control {
    /// Starts to connect. The result goes to `queue`.
    pub fn connect(&mut self, target: ConnectTarget, queue: Arc<AcceptQueue>) {
        let context = &*self.context();
        // The closing endpoint has failed all dials already and would miss this one.
        if context.closing.load(std::sync::atomic::Ordering::SeqCst) {
            return queue.put(Err(Error::Closed));
        }
        if self.links.len() + self.dialling.connects() >= limits::PEERS_MAX {
            let (name, limit) = ("PEERS_MAX", limits::PEERS_MAX as u64);
            let why = "close a peer, or wait for other connects, first".into();
            queue.put(Err(Error::Limit { name, limit, why }));
            return;
        }
        let now = self.now(context);
        let until = now.saturating_add(limits::HANDSHAKE_TIMEOUT);
        self.dial_new(context, DialFor::New { target, queue, until, without: None }, now);
    }

    /// Connects again without lanes, since the lanes of the last session could not be set up.
    pub(super) fn connect_without(
        &mut self,
        context: &Context,
        target: ConnectTarget,
        queue: Arc<AcceptQueue>,
        why: String,
        now: Duration,
    ) {
        if context.closing.load(std::sync::atomic::Ordering::SeqCst) {
            return queue.put(Err(Error::Closed));
        }
        let until = now.saturating_add(limits::HANDSHAKE_TIMEOUT);
        self.dial_new(context, DialFor::New { target, queue, until, without: Some(why) }, now);
    }

    /// Withdraws a connect that has not been answered; false if there is none.
    pub fn withdraw_dial(&mut self, queue: &Arc<AcceptQueue>) -> bool {
        let theirs =
            |what: &DialFor| matches!(what, DialFor::New { queue: one, .. } if Arc::ptr_eq(one, queue));
        let before = self.dialling.dials.len() + self.dialling.redials.len();
        self.dialling.dials.retain(|dial| !theirs(&dial.what));
        self.dialling.redials.retain(|(_, what)| !theirs(what));
        self.dialling.dials.len() + self.dialling.redials.len() < before
    }

    /// Withdraws a connect in any state.
    pub fn withdraw(&mut self, queue: &Arc<AcceptQueue>) {
        let now = self.now(&self.context());
        if !self.withdraw_dial(queue) {
            self.ready_set.touch_all();
            self.links.values_mut().for_each(|link| link.withdraw(queue, now));
        }
    }

    fn dial_new(&mut self, context: &Context, what: DialFor, now: Duration) {
        let DialFor::New { target, queue, without, .. } = &what else { return };
        match Dial::control(context, &self.me, target, without.as_deref()) {
            Ok(dial) => self.start(dial, what, now),
            Err(error) => queue.put(Err(error)),
        }
    }

    pub(super) fn redial(&mut self, context: &Context, now: Duration) {
        let due = self.dialling.redials.extract_if(.., |(at, _)| *at <= now);
        for (_, what) in due.collect::<Vec<_>>() {
            self.dial_new(context, what, now);
        }
    }

    pub(super) fn start(&mut self, mut dial: Dial, what: DialFor, now: Duration) {
        dial.begin(what, now);
        self.watch(dial.conn(), Interest::BOTH);
        self.dialling.dials.push(dial);
    }

    pub(super) fn advance_dials(&mut self, context: &Context, now: Duration) -> bool {
        let mut worked = false;
        let mut rest = Vec::new();
        for mut dial in std::mem::take(&mut self.dialling.dials) {
            if dial.pointless(&self.links) {
                continue;
            }
            let result = dial.advance(now);
            if let Some((fd, interest)) = dial.changed_interest() {
                self.rewatch(fd, interest);
            }
            match result {
                None => rest.push(dial),
                Some(result) => {
                    worked = true;
                    self.dialled(context, dial, result, now);
                }
            }
        }
        rest.append(&mut self.dialling.dials);
        self.dialling.dials = rest;
        worked
    }

    fn dialled(
        &mut self,
        context: &Context,
        dial: Dial,
        result: Result<Outcome, DialFailure>,
        now: Duration,
    ) {
        let Dial { conn, what, .. } = dial;
        match (what, result) {
            (DialFor::New { target, queue, .. }, Ok(Outcome::Control(established))) => {
                let session = established.session;
                if self.links.contains_key(&session) {
                    let why = "the peer gave the session a number that another peer's session has".into();
                    return queue.put(Err(Error::Refused {
                        address: target.address.to_string(),
                        reason: RefusalReason::Handshake,
                        why,
                    }));
                }
                self.enter(&established, true);
                let before = self.dialling.count_connected(target.address.port());
                let link = Link::connected(
                    self.workers.clone(),
                    before,
                    conn,
                    target,
                    *established,
                    queue,
                    &self.me,
                    now,
                );
                self.ready_set.touch(session);
                self.links.insert(session, link);
            }
            (what @ DialFor::New { until, .. }, Err(failure))
                if failure.refused == Some(RefusalCode::Busy) && now < until =>
            {
                self.dialling.redials.push((now + limits::REDIAL_INTERVAL, what));
            }
            (DialFor::New { queue, .. }, Err(failure)) => queue.put(Err(failure.error)),
            (DialFor::New { target, queue, .. }, Ok(Outcome::Data { .. })) => {
                let why = "the peer answered as if a data connection had been asked for".into();
                queue.put(Err(Error::Refused {
                    address: target.address.to_string(),
                    reason: RefusalReason::Handshake,
                    why,
                }));
            }
            (DialFor::Resume { session, proven }, result) => {
                self.ready_set.touch(session);
                let Some(link) = self.links.get_mut(&session) else {
                    return;
                };
                match result {
                    Ok(Outcome::Control(established)) => link.attach(conn, *established, now),
                    Ok(Outcome::Data { .. }) => {}
                    Err(failure) => link.resume_failed(failure, proven, now),
                }
            }
            (DialFor::Lane { session, index, generation }, result) => {
                self.ready_set.touch(session);
                let Some(link) = self.links.get_mut(&session) else {
                    return;
                };
                match result {
                    Ok(_) => {
                        drop(conn.fd().map(|fd| self.poller.remove(fd)));
                        link.lane_connected(context, conn, index, generation, now);
                    }
                    Err(failure) => link.lane_not_connected(index, generation, failure, now),
                }
            }
            (DialFor::Channel { session, index, generation }, result) => {
                self.ready_set.touch(session);
                let Some(link) = self.links.get_mut(&session) else {
                    return;
                };
                match result {
                    Ok(Outcome::Data { secrets, .. }) => {
                        drop(conn.fd().map(|fd| self.poller.remove(fd)));
                        link.channel_dialled(context, conn, index, generation, secrets, now);
                    }
                    Ok(Outcome::Control(_)) => {}
                    Err(failure) => link.channel_failed(index, generation, failure.error, now),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Endpoint;
    use ferrywire_sys::poll::WAKE_TOKEN;
    use socket2::SockRef;
    use std::net::{TcpListener, TcpStream};

    const LIMIT: Duration = Duration::from_secs(60);

    /// A network with latency: the kernel has no room in the socket at first. Regression: the control side
    /// missed the event of new room.
    #[test]
    fn a_late_connection_is_reported_once() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        SockRef::from(&listener).listen(0).unwrap();
        let address = listener.local_addr().unwrap();
        let _first = TcpStream::connect(address).unwrap();
        let near = Endpoint::builder().threads(0).build().unwrap();
        let connecting = near.start_connect(address).unwrap();
        let poller = near.running().with_control(|control| control.poller.clone());
        let reported = |limit| {
            let mut ready = Vec::new();
            poller.wait(&mut ready, Some(limit)).unwrap();
            ready.retain(|event| event.token != WAKE_TOKEN);
            ready
        };
        near.progress();
        assert_eq!(reported(Duration::ZERO), [], "the socket has room already");
        listener.accept().unwrap();
        let ready = reported(LIMIT);
        assert!(
            ready.iter().any(|event| event.writable),
            "no event reports the established connection: {ready:?}"
        );
        near.progress();
        let (_second, from) = listener.accept().unwrap();
        assert!(from.ip().is_loopback());
        assert_eq!(reported(Duration::ZERO), [], "the event is reported again");
        assert!(connecting.poll().is_none());
    }
}
