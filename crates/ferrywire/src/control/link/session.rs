//! One peer's control connection: what it says, its loss, and how it is resumed over another path.

use super::{CANDIDATES_MAX, Link, Role, Slot};
use crate::control::dial::DialFailure;
use crate::error::Error;
use ferrywire_net::Conn;
use ferrywire_proto::handshake::{Established, RefusalCode};
use ferrywire_proto::limits;
use ferrywire_proto::session::SessionError;
use ferrywire_sys::poll::Interest;
use std::net::IpAddr;
use std::os::fd::RawFd;
use std::time::Duration;

impl Link {
    pub(super) fn control_lost(&mut self, why: &str, closed_by_peer: bool, now: Duration) {
        tracing::debug!(peer = self.peer.name(), why, "control connection lost");
        self.conn = None;
        self.begin_output();
        self.session.detach();
        if closed_by_peer {
            self.closed_at.get_or_insert(now);
        }
    }

    /// Nothing of it has been written, and the peer is heard.
    fn begin_output(&mut self) {
        self.output.clear();
        self.unread_since = None;
        self.listens = true;
    }

    /// Whoever makes us answer and does not read the answers is not heard until it has. What is kept for it does
    /// not count, however much that is: an honest peer acknowledges no more than it has read, and two that stopped
    /// hearing each other for what they have to say themselves would wait for ever.
    pub(super) fn heed_unread(&mut self, now: Duration) {
        let unread = self.output.len().saturating_sub(self.session.unacknowledged_bytes());
        if unread > limits::CONTROL_UNREAD_BYTES_MAX {
            self.unread_since.get_or_insert(now);
        } else if unread <= limits::CONTROL_UNREAD_BYTES_MAX / 2 && self.unread_since.take().is_some() {
            self.session.not_heard_until(now);
        }
    }

    /// What the control connection has to be waited for from now on, if that has changed: a peer that is not
    /// heard would wake us without end.
    pub fn changed_interest(&mut self) -> Option<(RawFd, Interest)> {
        let listens = self.unread_since.is_none();
        let fd = self.conn.as_ref()?.fd()?;
        let changed = std::mem::replace(&mut self.listens, listens) != listens;
        changed.then_some((fd, Interest { read: listens, write: !listens }))
    }

    /// A connection that fails is replaced by another; what else the peer does wrong ends the session. What came first
    /// is the cause: a session that has ended finds fault with whatever is heard after.
    pub(super) fn session_trouble(&mut self, error: &SessionError, now: Duration) {
        match error.is_resumable() {
            true => self.control_lost(&error.to_string(), false, now),
            false => {
                self.error.get_or_insert(Error::of_session(error, self.peer.name()));
            }
        }
    }

    /// A resumption has succeeded, as far as its handshake goes.
    pub fn attach(&mut self, conn: Box<dyn Conn>, established: Established, now: Duration) {
        if matches!(self.role, Role::Connector { .. }) {
            // The other end takes the connection on which it hears something.
            if self.adopt(conn, established, now)
                && let Err(error) = self.session.greet(now)
            {
                self.session_trouble(&error, now);
            }
            return;
        }
        self.resumed_at = Some(now);
        self.note_host(conn.remote().ip());
        if self.candidates.len() >= CANDIDATES_MAX {
            self.candidates.remove(0);
        }
        self.candidates.push((conn, Box::new(established)));
    }

    pub(super) fn note_host(&mut self, host: IpAddr) {
        if !self.hosts.contains(&host) && self.hosts.len() < limits::ADDRESSES_MAX {
            self.hosts.push(host);
        }
    }

    /// Whether the peer has just resumed the session: then it has dialled all paths at once, and hangs up
    /// on those that were slower.
    pub fn raced_from(&self, host: IpAddr, now: Duration) -> bool {
        let lately = |at| now.saturating_sub(at) <= 2 * limits::HANDSHAKE_DEADLINE;
        self.resumed_at.is_some_and(lately) && self.hosts.contains(&host)
    }

    /// Goes on over a connection; false when what its handshake said is no good.
    pub(super) fn adopt(&mut self, conn: Box<dyn Conn>, established: Established, now: Duration) -> bool {
        let attached = self.session.attach(established.secure, established.received, now);
        if let Err(error) = attached {
            self.session_trouble(&error, now);
            return false;
        }
        tracing::info!(peer = self.peer.name(), over = %conn.local().ip(), "control session resumed");
        self.conn = Some(conn);
        self.begin_output();
        self.closed_at = None;
        self.resuming = false;
        self.path_dead = false;
        self.disowned = None;
        true
    }

    pub fn resume_failed(&mut self, failure: DialFailure, now: Duration) {
        if failure.refused == Some(RefusalCode::UnknownSession) {
            self.disowned.get_or_insert(failure.error.to_string());
        }
        self.last_trouble = Some(failure.error);
        self.resume_at = self.resume_at.max(now + limits::REDIAL_INTERVAL / 2);
    }

    /// Whether somebody at an address of the peer does not know the session. Another path may still lead
    /// to somebody who does: an address can have moved to another host.
    pub fn disowned(&self) -> bool {
        self.disowned.is_some() && self.needs_resume()
    }

    /// No path is left that might lead to somebody who knows the session.
    pub fn give_up(&mut self) {
        if let Some(why) = self.disowned.take() {
            self.last_trouble = None;
            self.fail(format!("it restarted, or gave us up: {why}{}", self.plugin_note()));
        }
    }

    /// What is to be said of a process that has ended: a plugin does that in its own, and tells nobody here.
    fn plugin_note(&self) -> String {
        let plugin = self.lanes.carrier().filter(|carrier| carrier.ends_process());
        plugin.map_or_else(String::new, |plugin| {
            let name = plugin.name();
            format!(
                "; {name} ends its process where it cannot go on: what that end, or what supervises it, printed last says \
                 why"
            )
        })
    }

    pub(super) fn look_after_session(&mut self, now: Duration) {
        if self.dying() {
            return;
        }
        // Nobody is heard who does not read, which is no silence of theirs.
        let unread_for = self.unread_since.map(|since| now.saturating_sub(since));
        let silent = unread_for.map_or_else(|| self.session.silent_for(now), |_| Duration::ZERO);
        let closed_for = self.closed_at.map(|at| now.saturating_sub(at));
        // A process that ended has lost its channels too.
        let all_closed = !self.slots.iter().any(|(slot, _)| *slot == Slot::Up);
        if all_closed && closed_for.is_some_and(|time| time > limits::RESUME_GRACE) {
            let ended = "its host closed the control connection, and it did not come back: the process ended";
            self.fail(format!("{ended}{}", self.plugin_note()));
        } else if unread_for.is_some_and(|time| time > self.limit) {
            let (bytes, seconds) = (self.output.len(), self.limit.as_secs_f64());
            self.fail(format!(
                "it does not read its control connection: {bytes} bytes have waited there for {seconds:.1} s"
            ));
        } else if silent > self.limit {
            self.fail(format!(
                "no sign of life for {:.1} s: stopped, or out of reach over every NIC",
                silent.as_secs_f64()
            ));
        } else if matches!(self.role, Role::Connector { .. }) {
            self.check_path(now);
            let suspect = silent > limits::CONTROL_SUSPECT_AFTER || self.path_dead;
            self.resuming = self.conn.is_none() || suspect;
            if !self.resuming {
                // It is heard again: what somebody said of it before is no reason to give it up the next time.
                self.disowned = None;
            }
        }
    }

    /// A path can die in one direction only: then we hear the peer, and it does not hear us.
    pub(super) fn check_path(&mut self, now: Duration) {
        let Some(conn) = self.conn.as_ref() else { return };
        if now.saturating_sub(self.path_checked) >= limits::PATH_CHECK_INTERVAL {
            self.path_checked = now;
            self.path_dead = conn.health().is_dead();
        }
    }

    pub(super) fn fail(&mut self, why: String) {
        let trouble = self.last_trouble.take().map(|error| format!(" ({error})")).unwrap_or_default();
        let why = format!("{why}{trouble}; {}", self.peer.describe());
        self.error.get_or_insert(Error::PeerLost { peer: self.peer.name().into(), why });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Endpoint;
    use std::thread;

    const LIMIT: Duration = Duration::from_secs(60);

    /// At that silence no path would be tried: the session was given up at once.
    #[test]
    fn a_refused_resumption_says_nothing_once_the_peer_is_heard_again() {
        let builder = || Endpoint::builder().threads(0).channels(1);
        let far = builder().listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
        let (near, address) = (builder().build().unwrap(), far.listen_addresses()[0]);
        let (peer, _accepted) = thread::scope(|scope| {
            let accepted = scope.spawn(|| far.accept(LIMIT).unwrap());
            (near.connect(address, LIMIT).unwrap(), accepted.join().unwrap())
        });
        let running = near.running();
        let disowned = running.with_control(|control| {
            let heard = control.now(running.context());
            let link = control.links.get_mut(&peer.state().session).unwrap();
            link.session.not_heard_until(heard);
            let silence = heard + limits::CONTROL_SUSPECT_AFTER + limits::HEARTBEAT_INTERVAL;
            link.look_after_session(silence);
            let error = Error::Refused { address: address.to_string(), why: "never heard of it".into() };
            link.resume_failed(DialFailure { error, refused: Some(RefusalCode::UnknownSession) }, silence);
            let before = link.disowned();
            link.session.not_heard_until(silence);
            link.look_after_session(silence);
            link.look_after_session(silence + limits::CONTROL_SUSPECT_AFTER + limits::HEARTBEAT_INTERVAL);
            (before, link.needs_resume(), link.disowned())
        });
        assert_eq!(disowned, (true, true, false));
    }
}
