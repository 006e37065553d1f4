//! The end of a session: requested, agreed on, or forced by an error.
//!
//! Invariant: everything that waits for the peer fails only after its channels are closed. Read next: `stage.rs`.

use super::stage::{Awaited, Farewell, Retry, Settling};
use super::{ControlConnection, Link, Role, Stage};
use crate::control::Unfinished;
use crate::control::accept_queue::AcceptQueue;
use crate::control::dial::ConnectTarget;
use crate::error::{Error, LossCause};
use ferrywire_proto::limits;
use ferrywire_proto::session::{ControlMessage, GoodbyeCause};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The close requests of both ends, and the outcome that this end's user has been given.
#[derive(Default)]
pub(super) struct Closing {
    limit: CloseLimit,
    caller: Caller,
    peer: PeerDrain,
}

/// When the close of a session ends at the latest.
#[derive(Clone, Copy, Default)]
enum CloseLimit {
    /// No caller has set a time. A peer without handles is closed once its transfers make no progress.
    #[default]
    Unset,
    /// All handles of the peer are dropped: `progress` has had this value since then.
    Quiesce { progress: u64, since: Duration },
    By {
        at: Duration,
        /// The caller's timeout, which is over at that time.
        timeout: Duration,
    },
}

/// The caller that closes this peer alone, not the endpoint. States: `none -> waits -> reported`.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Caller {
    #[default]
    None,
    Waits,
    /// The caller has been given the error that the peer did not finish.
    Reported,
}

/// The peer's request to finish: `not asked -> asked -> answered`.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum PeerDrain {
    #[default]
    NotAsked,
    Asked,
    /// This end has reported to the peer that it has finished.
    Answered,
}

impl Closing {
    /// Whether the peer has asked this end to finish.
    pub fn peer_has_asked(&self) -> bool {
        self.peer != PeerDrain::NotAsked
    }

    /// Whether the peer or a caller has asked to close.
    pub fn is_asked_for(&self) -> bool {
        self.peer_has_asked() || matches!(self.limit, CloseLimit::By { .. })
    }
}

impl Link {
    /// Finishes posted transfers, then closes, at the latest after `timeout`. The earliest end of several callers' timeouts
    /// counts: otherwise the endpoint would break the session off, and the peer would see a loss.
    pub fn close(&mut self, now: Duration, timeout: Duration) {
        let at = now.saturating_add(timeout);
        if !matches!(self.closing.limit, CloseLimit::By { at: earlier, .. } if earlier <= at) {
            self.closing.limit = CloseLimit::By { at, timeout };
        }
        // A user that continues to post would keep the peer busy for ever.
        self.peer.life.closing.store(true, Ordering::SeqCst);
    }

    /// As [`Link::close`], for a caller that closes this peer alone.
    pub fn close_alone(&mut self, now: Duration, timeout: Duration) {
        if self.closing.caller == Caller::None {
            self.closing.caller = Caller::Waits;
        }
        self.close(now, timeout);
    }

    /// Notes that the caller of `close_alone` has been given the error.
    pub fn note_error_reported(&mut self) {
        self.closing.caller = Caller::Reported;
    }

    /// How the session ended, if it was closed before all transfers had finished. This is for the
    /// caller that closes the endpoint; `None` if a caller that closes this peer alone has been given the error, or
    /// will be, and if the user knew of the failure and has dropped the peer.
    pub fn unfinished(&self, endpoint_closes: bool) -> Option<Unfinished> {
        let peer = &self.peer;
        let unreported = match self.closing.caller {
            Caller::None => {
                let told = peer.life.failure_told.load(Ordering::SeqCst);
                endpoint_closes || (peer.life.abandoned.load(Ordering::SeqCst) && !told)
            }
            Caller::Waits => endpoint_closes,
            Caller::Reported => false,
        };
        let unfinished = unreported && peer.life.unfinished.load(Ordering::SeqCst);
        unfinished.then(|| Unfinished {
            how: peer.failure().unwrap_or(Error::Closed),
            peer: peer.name().to_string(),
            timeout: peer.life.close_timeout.get().copied(),
        })
    }

    /// Finishes posted transfers while they make progress, then closes.
    pub fn drain(&mut self, now: Duration) {
        self.peer.life.abandoned.store(true, Ordering::SeqCst);
        self.peer.life.closing.store(true, Ordering::SeqCst);
        if self.stage.awaited().is_some() {
            self.close(now, limits::DRAIN_TIMEOUT);
        }
    }

    /// When the close ends at the latest; `None` if no close was requested.
    fn close_by(&mut self, now: Duration) -> Option<Duration> {
        if let CloseLimit::By { at, .. } = self.closing.limit {
            return Some(at);
        }
        if !self.peer.life.abandoned.load(Ordering::SeqCst) || self.stage.awaited().is_some() {
            return None;
        }
        let progress = self.peer.drained();
        let since = match self.closing.limit {
            CloseLimit::Quiesce { progress: before, since } if before == progress => since,
            _ => now,
        };
        self.closing.limit = CloseLimit::Quiesce { progress, since };
        Some(since + limits::DRAIN_TIMEOUT)
    }

    /// Handles the peer's request to finish.
    pub(super) fn peer_drains(&mut self) {
        if self.closing.peer == PeerDrain::NotAsked {
            self.closing.peer = PeerDrain::Asked;
        }
    }

    /// Handles the peer's report that it has finished. Ignored unless this end has asked for it.
    pub(super) fn peer_is_drained(&mut self) {
        if let Stage::Draining { peer_finished, .. } = &mut self.stage {
            *peer_finished = true;
        }
    }

    fn quiet(&self) -> bool {
        !self.peer.in_flight() && !self.peer.queue.has_work()
    }

    pub(super) fn check_closing(&mut self, now: Duration) {
        if self.dying() {
            return self.leave(now);
        }
        if self.closing.peer == PeerDrain::Asked && self.quiet() {
            self.closing.peer = PeerDrain::Answered;
            self.say(ControlMessage::Drained, now);
        }
        let Some(by) = self.close_by(now) else { return };
        let Stage::Draining { peer_finished, .. } = self.stage else {
            self.say(ControlMessage::Drain, now);
            return self.stage.advance(|awaited| Stage::Draining { awaited, peer_finished: false });
        };
        // A peer that closes too reports nevertheless when it has finished.
        let done = self.quiet() && peer_finished;
        if done || now >= by {
            if !done {
                self.note_unfinished();
            }
            let reason = if done { "closed" } else { "closed before all transfers had finished" };
            self.send_goodbye(GoodbyeCause::Closed, reason.into(), Error::Closed, true, now);
        }
    }

    /// Sends this end's goodbye. The session ends with the error `last_words` once the goodbye has arrived,
    /// or after a heartbeat interval. With `resumes`, a lost session is resumed to deliver the goodbye,
    /// within the time of the close.
    fn send_goodbye(
        &mut self,
        cause: GoodbyeCause,
        reason: String,
        last_words: Error,
        resumes: bool,
        now: Duration,
    ) {
        self.say(ControlMessage::Goodbye { cause, reason }, now);
        let (until, sent) = (now + limits::HEARTBEAT_INTERVAL, !self.connection.is_lost());
        let farewell = Farewell { until, resumes, sent };
        self.stage.advance(|awaited| Stage::Leaving { awaited, farewell, last_words });
    }

    /// Ends the session once the last message has arrived or its time is over.
    fn leave(&mut self, now: Duration) {
        let Stage::Leaving { farewell, last_words, .. } = &self.stage else { return };
        let arrived = self.session.unacknowledged() == 0;
        let hung_up = farewell.sent && self.connection.closed_at().is_some();
        let in_vain = match farewell.resumes {
            true => self.resumed_in_vain(now),
            false => self.connection.is_lost(),
        };
        let late = now >= farewell.until && self.farewell_by(farewell).is_none_or(|by| now >= by);
        if arrived || hung_up || in_vain || late {
            self.ending.get_or_insert(last_words.clone());
        }
    }

    /// When the attempts to deliver a goodbye over a resumed session end; `None` if the session must not be
    /// resumed for it.
    fn farewell_by(&self, farewell: &Farewell) -> Option<Duration> {
        match self.closing.limit {
            _ if !farewell.resumes => None,
            CloseLimit::By { at, .. } => Some(at),
            CloseLimit::Quiesce { since, .. } => Some(since + limits::DRAIN_TIMEOUT),
            CloseLimit::Unset => None,
        }
    }

    /// Whether the session has to be resumed to deliver the goodbye; `None` if it must not be.
    pub(super) fn farewell_is_stuck(&self, now: Duration) -> Option<bool> {
        match &self.stage {
            Stage::Leaving { farewell, .. } if farewell.resumes => {
                Some(self.connection.is_lost() || now >= farewell.until)
            }
            _ => None,
        }
    }

    /// Ends the session with a local error, and sends the peer the reason.
    pub(in crate::control) fn end_with_error(&mut self, error: Error, now: Duration) {
        if self.dying() {
            return;
        }
        let (cause, reason) = match &error {
            Error::PeerLost { cause: LossCause::LaneStalled, why, .. } => {
                (GoodbyeCause::LaneStalled, why.clone())
            }
            Error::PeerLost { why, .. } => (GoodbyeCause::GaveUp, why.clone()),
            error => (GoodbyeCause::GaveUp, error.to_string()),
        };
        self.leave_with(cause, reason, error, now);
    }

    fn leave_with(&mut self, cause: GoodbyeCause, reason: String, error: Error, now: Duration) {
        // The session's error is set first: channels may end, and operations with them, while the reason is
        // sent.
        self.peer.doom(error.clone());
        self.send_goodbye(cause, reason, error, false, now);
    }

    /// Withdraws a connect: ends the session if its result was for this queue and the peer is not up.
    pub(in crate::control) fn withdraw(&mut self, queue: &Arc<AcceptQueue>, now: Duration) {
        if !self.stage.awaited().is_some_and(|awaited| awaited.is_connect_of(queue)) {
            return;
        }
        if !self.dying() {
            self.leave_with(
                GoodbyeCause::Closed,
                "the connect was given up before it had ended".into(),
                Error::Closed,
                now,
            );
        }
        // The queue gets no result, and no session without lanes replaces this one.
        self.stage.forget_awaited();
    }

    /// Ends a session whose lanes cannot be set up before the peer is up. If lanes are optional on both ends,
    /// a session without lanes replaces it: the connecting end opens that, and both ends log why.
    pub(in crate::control) fn end_without_lanes(&mut self, why: String, now: Duration) {
        let error = self.lost(LossCause::LaneFailed, why.clone());
        let end = if self.dials() { "connects" } else { "accepts" };
        let Stage::Settling(Settling { awaited, lanes_optional: true, .. }) = &mut self.stage else {
            return self.end_with_error(error, now);
        };
        let why = format!("at the end that {end}: {why}");
        awaited.go_without_lanes(why.clone());
        let backend = self.lanes.backend();
        let name = backend.as_ref().map_or("lanes", |backend| backend.name());
        tracing::warn!(peer = self.peer.name(), "reconnecting without {name}: {why}");
        self.leave_with(GoodbyeCause::WithoutLanes, why, error, now);
    }

    /// Handles the peer's last message.
    pub(super) fn peer_leaves(&mut self, cause: GoodbyeCause, reason: &str) {
        if cause == GoodbyeCause::WithoutLanes
            && let Stage::Settling(Settling { awaited, lanes_optional: true, .. }) = &mut self.stage
        {
            awaited.go_without_lanes(reason.to_owned());
        }
        let gave_up = |cause| self.lost(cause, format!("the peer gave up: {reason}"));
        self.ending = Some(match cause {
            GoodbyeCause::Closed => Error::PeerClosed { peer: self.peer.name().into() },
            GoodbyeCause::LaneStalled => gave_up(LossCause::LaneStalled),
            GoodbyeCause::WithoutLanes => gave_up(LossCause::LaneFailed),
            GoodbyeCause::GaveUp => gave_up(LossCause::GaveUp),
        });
    }

    /// The error of the loss of this link's peer.
    pub(in crate::control) fn lost(&self, cause: LossCause, why: String) -> Error {
        Error::PeerLost { peer: self.peer.name().into(), cause, why }
    }

    /// Takes the connect to repeat without lanes: target, queue and reason. Returns it once.
    pub fn take_retry(&mut self) -> Option<(ConnectTarget, Arc<AcceptQueue>, String)> {
        let (Role::Connector(connector), Stage::Over { retry }) = (&self.role, &mut self.stage) else {
            return None;
        };
        let Retry { queue, why } = retry.take()?;
        Some((connector.target.clone(), queue, why))
    }

    /// Ends the session at once, because the timeout of the close has passed.
    pub fn abort(&mut self) {
        self.note_unfinished();
        self.die(Error::Closed);
    }

    /// Notes that the session ends although transfers have not finished, because the timeout of the close is over.
    fn note_unfinished(&self) {
        let timeout = match self.closing.limit {
            CloseLimit::By { timeout, .. } => timeout,
            CloseLimit::Quiesce { .. } | CloseLimit::Unset => limits::DRAIN_TIMEOUT,
        };
        let _ = self.peer.life.close_timeout.set(timeout);
        self.peer.life.unfinished.store(true, Ordering::SeqCst);
    }

    /// Ends the session: first the channels are closed, then everything that waits for the peer fails.
    pub fn die(&mut self, error: Error) {
        if matches!(self.stage, Stage::Dying { .. } | Stage::Over { .. }) {
            return;
        }
        match &error {
            Error::Closed | Error::PeerClosed { .. } => {
                tracing::debug!(peer = self.peer.name(), "session closed")
            }
            error => tracing::debug!("{error}"),
        }
        self.peer.doom(error);
        self.stage.advance(|awaited| Stage::Dying { awaited });
        self.lanes.drop_all();
        for (index, generation) in self.channels.up() {
            self.drop_channel(index, generation, "the session is over");
        }
    }

    /// Fails everything that waits for the peer. Its channels are closed.
    pub(super) fn finish(&mut self) {
        self.connection = ControlConnection::Lost { closed_at: None };
        self.peer.drop_entries(self.channels.take_unsettled());
        self.peer.fail();
        let error = self.peer.failure().unwrap_or(Error::Closed);
        let fail = |awaited: Awaited| awaited.fail(error);
        self.stage.advance(|awaited| Stage::Over { retry: awaited.and_then(fail) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Endpoint;
    use std::thread;
    use std::time::Instant;

    const LIMIT: Duration = Duration::from_secs(60);

    /// Regression: the other end reported a lost peer.
    #[test]
    fn a_goodbye_whose_connection_was_lost_just_before_arrives_over_another() {
        for accepting_end_closes in [false, true] {
            let builder = || Endpoint::builder().threads(0).channels(1);
            let far = builder().listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
            let (near, address) = (builder().build().unwrap(), far.listen_addresses()[0]);
            let (dialled, accepted) = thread::scope(|scope| {
                let accepted = scope.spawn(|| far.accept(LIMIT).unwrap());
                (near.connect(address, LIMIT).unwrap(), accepted.join().unwrap())
            });
            let (closes, peer, other) = match accepting_end_closes {
                false => (&near, &dialled, &accepted),
                true => (&far, &accepted, &dialled),
            };
            let running = closes.running();
            running.with_control(|control| {
                let now = control.now(running.context());
                let link = control.links.get_mut(&peer.state().info.session).unwrap();
                link.close(now, LIMIT);
                link.stage.advance(|awaited| Stage::Draining { awaited, peer_finished: true });
                link.control_lost("cut by a test", false, now);
            });
            let since = Instant::now();
            while other.error().is_none() || peer.error().is_none() {
                assert!(since.elapsed() < LIMIT, "an end does not end");
                near.progress();
                far.progress();
            }
            let errors = (peer.error().unwrap(), other.error().unwrap());
            assert!(matches!(errors, (Error::Closed, Error::PeerClosed { .. })), "{errors:?}");
        }
    }

    /// When a channel ends between the decision to end the session and the session's end, its transfers fail
    /// with the reason of that decision.
    #[test]
    fn transfers_lost_during_a_goodbye_fail_for_its_reason() {
        let builder = || Endpoint::builder().threads(0).channels(2);
        let far = builder().listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
        let (near, address) = (builder().build().unwrap(), far.listen_addresses()[0]);
        let (peer, accepted) = thread::scope(|scope| {
            let accepted = scope.spawn(|| far.accept(LIMIT).unwrap());
            (near.connect(address, LIMIT).unwrap(), accepted.join().unwrap())
        });
        let since = Instant::now();
        while !peer.stats().channels.iter().all(|channel| channel.alive) {
            assert!(since.elapsed() < LIMIT, "a channel is never set up");
            near.progress();
            far.progress();
        }
        // More than a socket takes: the far end is not polled from here on, so that nothing is acknowledged.
        const BYTES: usize = 64 << 20;
        let (source, target) = (near.alloc_host(BYTES).unwrap(), far.alloc_host(BYTES).unwrap());
        let transfer = peer.write(&source, 0, &target.descriptor(), 0, BYTES as u64).unwrap();
        // The engine chooses the channel. An unread socket may take no more than this at first, if the kernel
        // is busy.
        let sends = || peer.stats().channels.iter().position(|channel| channel.sent_bytes >= 10_000);
        let lost = loop {
            assert!(since.elapsed() < LIMIT, "nothing is sent");
            near.progress();
            if let Some(index) = sends() {
                break index;
            }
        };
        let why = Error::PeerLost {
            peer: peer.name(),
            cause: LossCause::LaneFailed,
            why: "its lanes are no good".into(),
        };
        let running = near.running();
        let part = |control: &mut crate::control::Control| {
            let link = control.links.get_mut(&peer.state().info.session).unwrap();
            link.end_with_error(why.clone(), near.now());
            link.drop_channel(lost as u16, link.channels[lost as u16].generation, "it stalled as well");
        };
        running.with_control(part);
        let again = peer.write(&source, 0, &target.descriptor(), 0, 8);
        assert_eq!(again.unwrap_err(), why.clone().into(), "channels are left that accept no operations");
        assert!(peer.stats().channels[1 - lost].alive);
        // When `close` returns that the peer is lost, none of its transfers is in flight.
        assert_eq!(peer.close(LIMIT), Err(why.clone()));
        let outcome = transfer.poll().expect("it has ended");
        assert!(!peer.stats().channels[1 - lost].alive);
        assert_eq!((outcome, peer.error()), (Err(why.clone().into()), Some(why)));
        drop(accepted);
    }
}
