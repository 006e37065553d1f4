//! One peer's control connection: its messages, its loss, and its resumption over another path.
//!
//! Invariant: an error found here never replaces an earlier one.
//! Read next: `role.rs`, `connection.rs`.

use super::{ControlConnection, Link, ResumeState, Role, Stage};
use crate::control::dial::DialFailure;
use crate::error::{Error, LossCause};
use ferrywire_net::Conn;
use ferrywire_proto::handshake::{Established, RefusalCode};
use ferrywire_proto::limits;
use ferrywire_proto::session::SessionError;
use std::net::IpAddr;
use std::time::Duration;

impl Link {
    pub(super) fn control_lost(&mut self, why: &str, closed_by_peer: bool, now: Duration) {
        tracing::debug!(peer = self.peer.name(), why, "control connection lost");
        self.connection.lose(closed_by_peer.then_some(now));
        self.session.detach();
    }

    /// Handles an error of the session. A failed connection is replaced by another; any other violation ends
    /// the session. The first error is kept, since an ended session reports errors for everything received
    /// later.
    pub(super) fn session_trouble(&mut self, error: &SessionError, now: Duration) {
        if error.is_resumable() {
            self.control_lost(&error.to_string(), false, now);
        } else {
            self.ending.get_or_insert(Error::of_session(error, self.peer.name()));
        }
    }

    /// Handles a successful handshake of a resumption.
    pub fn attach(&mut self, conn: Box<dyn Conn>, established: Established, now: Duration) {
        if let Role::Acceptor(acceptor) = &mut self.role {
            return acceptor.add_candidate(conn, established, now);
        }
        // The accepting end keeps the connection on which it receives something first.
        if self.adopt(conn, established, now)
            && let Err(error) = self.session.greet(now)
        {
            self.session_trouble(&error, now);
        }
    }

    /// Whether the peer has lately resumed the session from this address, among others.
    pub fn raced_from(&self, host: IpAddr, now: Duration) -> bool {
        matches!(&self.role, Role::Acceptor(acceptor) if acceptor.raced_from(host, now))
    }

    /// Continues the session over a connection; false if its handshake contradicts the session.
    pub(super) fn adopt(&mut self, conn: Box<dyn Conn>, established: Established, now: Duration) -> bool {
        let attached = self.session.attach(established.secure, established.received, now);
        if let Err(error) = attached {
            self.session_trouble(&error, now);
            return false;
        }
        tracing::info!(peer = self.peer.name(), over = %conn.local().ip(), "control session resumed");
        if let Role::Connector(connector) = &mut self.role {
            connector.note_proven(&*conn);
        }
        self.connection = ControlConnection::open(conn);
        if let Stage::Leaving { farewell, .. } = &mut self.stage {
            // The session sends the last message again.
            farewell.sent = true;
        }
        if let Role::Connector(connector) = &mut self.role {
            connector.resumption.state = ResumeState::Idle;
            // The peer can be reached again, maybe over all paths.
            self.channels.restart_backoff(now);
        }
        true
    }

    /// Handles a failed resumption over a path. Only on a path that is `proven` to lead to the peer does an unknown
    /// session mean that the peer has given it up: the peer may advertise addresses that lead to other hosts from here.
    pub fn resume_failed(&mut self, failure: DialFailure, proven: bool, now: Duration) {
        if let Role::Connector(connector) = &mut self.role {
            let resumption = &mut connector.resumption;
            if failure.refused == Some(RefusalCode::UnknownSession) && proven {
                resumption.disown(failure.error.to_string());
            }
            resumption.dial_at = resumption.dial_at.max(now + limits::REDIAL_INTERVAL / 2);
        }
        self.last_trouble = Some(failure.error);
    }

    fn resume_state(&self) -> &ResumeState {
        match &self.role {
            Role::Connector(connector) => &connector.resumption.state,
            Role::Acceptor(_) => &ResumeState::Idle,
        }
    }

    pub fn needs_resume(&self) -> bool {
        *self.resume_state() != ResumeState::Idle && (!self.dying() || self.is_leaving())
    }

    /// Whether the last message waits, and the session may be resumed for it.
    pub(super) fn is_leaving(&self) -> bool {
        matches!(&self.stage, Stage::Leaving { farewell, .. } if farewell.resumes)
    }

    /// Whether no resumption leads to the peer any more.
    pub(super) fn resumed_in_vain(&self, now: Duration) -> bool {
        matches!(self.resume_state(), ResumeState::Disowned(_))
            || self.session.silent_for(now) > self.peer_timeout
    }

    /// Whether an endpoint at a proven address of the peer does not know the session.
    pub fn disowned(&self) -> bool {
        matches!(self.resume_state(), ResumeState::Disowned(_)) && !self.dying()
    }

    /// Fails the session: no path is left that might lead to an endpoint which knows it.
    pub fn give_up(&mut self) {
        let Role::Connector(connector) = &mut self.role else { return };
        if let Some(why) = connector.resumption.take_disowned() {
            self.last_trouble = None;
            self.fail(
                LossCause::Restarted,
                format!("the peer restarted or gave the session up: {why}{}", self.plugin_note()),
            );
        }
    }

    /// Advice for a peer whose process has ended: a plugin may have ended it, and only that process printed
    /// why.
    fn plugin_note(&self) -> String {
        let plugin = self.lanes.backend().filter(|backend| backend.ends_process());
        plugin.map_or_else(String::new, |plugin| {
            let name = plugin.name();
            format!(
                "; plugin {name} ends its process after an error that it cannot handle: see the last output of the \
                 other end"
            )
        })
    }

    pub(super) fn check_session(&mut self, now: Duration) {
        if let Some(stuck) = self.farewell_is_stuck(now) {
            return self.check_path(stuck, now);
        }
        if self.dying() {
            return;
        }
        // This end does not read from a peer that leaves too much unread, so silence is no evidence then.
        let open = self.connection.as_open();
        let unread = open.and_then(|open| Some((open.unread_since?, open.output.len())));
        let unread_for = unread.map(|(since, bytes)| (now.saturating_sub(since), bytes));
        let silent = unread_for.map_or_else(|| self.session.silent_for(now), |_| Duration::ZERO);
        let closed_for = self.connection.closed_at().map(|at| now.saturating_sub(at));
        // If the process has ended, its channels are lost too.
        if !self.any_is_up() && closed_for.is_some_and(|time| time > limits::RESUME_GRACE) {
            let ended =
                "the peer's host closed the control connection and opened no other one: the process ended";
            self.fail(LossCause::ProcessEnded, format!("{ended}{}", self.plugin_note()));
        } else if let Some((_, bytes)) = unread_for.filter(|(time, _)| *time > self.peer_timeout) {
            let seconds = self.peer_timeout.as_secs_f64();
            self.fail(
                LossCause::Silent,
                format!(
                    "the peer does not read the control connection: {bytes} bytes have waited there for {seconds:.1} s"
                ),
            );
        } else if silent > self.peer_timeout {
            let silent_s = silent.as_secs_f64();
            let why = format!("no sign of life for {silent_s:.1} s: stopped, or out of reach over every NIC");
            self.fail(LossCause::Silent, why);
        } else {
            self.check_path(silent > limits::CONTROL_SUSPECT_AFTER, now);
        }
    }

    /// Resumes the session where the kernel has declared the path dead, or it is `suspect`.
    fn check_path(&mut self, suspect: bool, now: Duration) {
        let Role::Connector(connector) = &mut self.role else { return };
        let resumption = &mut connector.resumption;
        let path_dead = match self.connection.as_open_mut() {
            Some(open) => open.check_path(&mut resumption.path_checked, now),
            None => true,
        };
        resumption.set_needed(path_dead || suspect);
    }

    pub(super) fn fail(&mut self, cause: LossCause, why: String) {
        let trouble = self.last_trouble.take().map(|error| format!(" ({error})")).unwrap_or_default();
        let why = format!("{why}{trouble}; {}", self.peer.describe());
        let error = self.lost(cause, why);
        self.ending.get_or_insert(error);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Endpoint, RefusalReason};
    use std::thread;

    const LIMIT: Duration = Duration::from_secs(60);

    /// Regression: an old refusal made the session fail at the next silence, before any path was tried.
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
            let link = control.links.get_mut(&peer.state().info.session).unwrap();
            link.session.not_heard_until(heard);
            let silence = heard + limits::CONTROL_SUSPECT_AFTER + limits::HEARTBEAT_INTERVAL;
            link.check_session(silence);
            let reason = RefusalReason::UnknownSession;
            let error =
                Error::Refused { address: address.to_string(), reason, why: "never heard of it".into() };
            let unknown = || DialFailure { error: error.clone(), refused: Some(RefusalCode::UnknownSession) };
            link.resume_failed(unknown(), false, silence);
            let by_another_host = link.disowned();
            link.resume_failed(unknown(), true, silence);
            let before = link.disowned();
            link.session.not_heard_until(silence);
            link.check_session(silence);
            link.check_session(silence + limits::CONTROL_SUSPECT_AFTER + limits::HEARTBEAT_INTERVAL);
            (by_another_host, before, link.needs_resume(), link.disowned())
        });
        assert_eq!(disowned, (false, true, true, false));
    }
}
