//! The end of a session: asked for, agreed on, or forced by an error.

use super::stage::{Awaited, Retry, Settling};
use super::{ControlConnection, Link, Role, Stage};
use crate::control::accept_queue::AcceptQueue;
use crate::control::dial::ConnectTarget;
use crate::error::{Error, LossCause};
use ferrywire_proto::limits;
use ferrywire_proto::session::{ControlMessage, GoodbyeCause};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// What the two ends have asked of each other, and what the user of this one has been told.
#[derive(Default)]
pub(super) struct Closing {
    limit: CloseLimit,
    caller: Caller,
    peer: PeerDrain,
}

/// When a session that is being closed ends, whatever is left.
#[derive(Clone, Copy, Default)]
enum CloseLimit {
    /// No caller has set a time. A peer that its users have dropped is closed once it does not get on.
    #[default]
    Unset,
    /// Users have dropped the peer: `progress` has stood at that value since then.
    Quiesce {
        progress: u64,
        since: Duration,
    },
    By(Duration),
}

/// The caller that closes this peer, and not the endpoint. Its life: `none -> waits -> told`.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Caller {
    #[default]
    None,
    Waits,
    /// It has been told that the peer did not finish.
    Told,
}

/// What the peer asked: `not asked -> asked -> answered`.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum PeerDrain {
    #[default]
    NotAsked,
    Asked,
    /// This end has told the peer that it has finished.
    Answered,
}

impl Closing {
    /// Whether the peer has asked this end to finish.
    pub fn peer_has_asked(&self) -> bool {
        self.peer != PeerDrain::NotAsked
    }

    /// Whether the peer, or a caller, has asked for the end.
    pub fn is_asked_for(&self) -> bool {
        self.peer_has_asked() || matches!(self.limit, CloseLimit::By(_))
    }
}

impl Link {
    /// Finishes what was posted, then closes; at the latest by then. Of several callers the earliest deadline counts: else
    /// an endpoint would break the session off at its own, and the other side would take that for a loss.
    pub fn close(&mut self, by: Duration) {
        self.closing.limit = match self.closing.limit {
            CloseLimit::By(earlier) => CloseLimit::By(earlier.min(by)),
            CloseLimit::Unset | CloseLimit::Quiesce { .. } => CloseLimit::By(by),
        };
        // Users that go on posting would never let the peer be quiet.
        self.peer.life.closing.store(true, Ordering::SeqCst);
    }

    /// As [`Link::close`], for a caller that waits for this peer alone.
    pub fn close_alone(&mut self, by: Duration) {
        if self.closing.caller == Caller::None {
            self.closing.caller = Caller::Waits;
        }
        self.close(by);
    }

    /// The caller that closed this peer alone waits no longer, and knows that the peer has not finished.
    pub fn note_told(&mut self) {
        self.closing.caller = Caller::Told;
    }

    /// How the session ended, if it was to finish first and did not, for the caller that closes the endpoint: unless a caller that
    /// closes this peer alone has been told, or will be.
    pub fn unfinished(&self, endpoint_closes: bool) -> Option<Error> {
        let peer = &self.peer;
        let untold = match self.closing.caller {
            Caller::None => endpoint_closes || peer.life.abandoned.load(Ordering::SeqCst),
            Caller::Waits => endpoint_closes,
            Caller::Told => false,
        };
        let unfinished = untold && peer.life.unfinished.load(Ordering::SeqCst);
        unfinished.then(|| peer.failure().unwrap_or(Error::Closed))
    }

    /// Finishes what was posted as long as it gets on, then closes.
    pub fn drain(&mut self, now: Duration) {
        self.peer.life.abandoned.store(true, Ordering::SeqCst);
        self.peer.life.closing.store(true, Ordering::SeqCst);
        if self.stage.awaited().is_some() {
            self.close(now + limits::DRAIN_TIMEOUT);
        }
    }

    /// When closing ends, whatever is left; `None` where nothing has asked for the end.
    fn close_by(&mut self, now: Duration) -> Option<Duration> {
        if let CloseLimit::By(by) = self.closing.limit {
            return Some(by);
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

    /// The peer asks this end to finish.
    pub(super) fn peer_drains(&mut self) {
        if self.closing.peer == PeerDrain::NotAsked {
            self.closing.peer = PeerDrain::Asked;
        }
    }

    /// The peer has finished, as this end asked it to. Before that the word means nothing.
    pub(super) fn peer_is_drained(&mut self) {
        if let Stage::Draining { peer_finished, .. } = &mut self.stage {
            *peer_finished = true;
        }
    }

    fn quiet(&self) -> bool {
        !self.peer.in_flight() && !self.peer.queue.has_work()
    }

    pub(super) fn look_after_closing(&mut self, now: Duration) {
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
        // A peer that drains too says so all the same when it has finished.
        let done = self.quiet() && peer_finished;
        if done || now >= by {
            if !done {
                self.peer.life.unfinished.store(true, Ordering::SeqCst);
            }
            let reason = if done { "closed" } else { "closed before all was finished" };
            self.say_farewell(GoodbyeCause::Closed, reason.into(), Error::Closed, now);
        }
    }

    /// Says the last message of this end; `last_words` end the session once that has arrived, or its time is up.
    fn say_farewell(&mut self, cause: GoodbyeCause, reason: String, last_words: Error, now: Duration) {
        self.say(ControlMessage::Goodbye { cause, reason }, now);
        let until = now + limits::HEARTBEAT_INTERVAL;
        self.stage.advance(|awaited| Stage::Leaving { awaited, until, last_words });
    }

    /// The farewell is on its way: when it has arrived, or its time is up, this is the end.
    fn leave(&mut self, now: Duration) {
        let Stage::Leaving { until, last_words, .. } = &self.stage else { return };
        if self.session.unacknowledged() == 0 || self.connection.is_lost() || now >= *until {
            self.ending.get_or_insert(last_words.clone());
        }
    }

    /// Ends the session with an error of ours, after telling the peer.
    pub(in crate::control) fn part_with(&mut self, error: Error, now: Duration) {
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
        // Operations may end from now on, with the channels that go while the peer is told.
        self.peer.doom(error.clone());
        self.say_farewell(cause, reason, error, now);
    }

    /// Gives a connect up: ends the session if its result was to go to this queue and it is not up.
    pub(in crate::control) fn withdraw(&mut self, queue: &Arc<AcceptQueue>, now: Duration) {
        if !self.stage.awaited().is_some_and(|awaited| awaited.is_connect_of(queue)) {
            return;
        }
        if !self.dying() {
            self.leave_with(GoodbyeCause::Closed, "given up before it was up".into(), Error::Closed, now);
        }
        // The queue gets no result, and no other session takes the place of this one.
        self.stage.forget_awaited();
    }

    /// Lanes do not come about, before the peer is up. Where both ends could do without them, a session without takes
    /// this one's place: the end that connects opens it, and both tell why.
    pub(in crate::control) fn part_with_lanes(&mut self, why: String, now: Duration) {
        let error = self.lost(LossCause::LaneFailed, why.clone());
        let end = if self.dials() { "connects" } else { "accepts" };
        let Stage::Settling(Settling { awaited, lanes_optional: true, .. }) = &mut self.stage else {
            return self.part_with(error, now);
        };
        let why = format!("at the end that {end}: {why}");
        awaited.go_without_lanes(why.clone());
        let backend = self.lanes.backend();
        let name = backend.as_ref().map_or("lanes", |backend| backend.name());
        tracing::warn!(peer = self.peer.name(), "a session without {name} takes this one's place: {why}");
        self.leave_with(GoodbyeCause::WithoutLanes, why, error, now);
    }

    /// The peer says farewell.
    pub(super) fn peer_leaves(&mut self, cause: GoodbyeCause, reason: &str) {
        if cause == GoodbyeCause::WithoutLanes
            && let Stage::Settling(Settling { awaited, lanes_optional: true, .. }) = &mut self.stage
        {
            awaited.go_without_lanes(reason.to_owned());
        }
        let gave_up = |cause| self.lost(cause, format!("it gave up: {reason}"));
        self.ending = Some(match cause {
            GoodbyeCause::Closed => Error::PeerClosed { peer: self.peer.name().into() },
            GoodbyeCause::LaneStalled => gave_up(LossCause::LaneStalled),
            GoodbyeCause::WithoutLanes => gave_up(LossCause::LaneFailed),
            GoodbyeCause::GaveUp => gave_up(LossCause::GaveUp),
        });
    }

    /// That the peer of this link is lost.
    pub(in crate::control) fn lost(&self, cause: LossCause, why: String) -> Error {
        Error::PeerLost { peer: self.peer.name().into(), cause, why }
    }

    /// Where to connect to once more, for which queue, and why without lanes; once.
    pub fn take_retry(&mut self) -> Option<(ConnectTarget, Arc<AcceptQueue>, String)> {
        let (Role::Connector(connector), Stage::Over { retry }) = (&self.role, &mut self.stage) else {
            return None;
        };
        let Retry { queue, why } = retry.take()?;
        Some((connector.target.clone(), queue, why))
    }

    /// Its time is up, and so is the farewell's.
    pub fn abort(&mut self) {
        self.peer.life.unfinished.store(true, Ordering::SeqCst);
        self.die(Error::Closed);
    }

    /// The session is over: first the channels close, then what waits for the peer fails.
    pub fn die(&mut self, error: Error) {
        if matches!(self.stage, Stage::Dying { .. } | Stage::Over { .. }) {
            return;
        }
        match &error {
            Error::Closed | Error::PeerClosed { .. } => tracing::debug!(peer = self.peer.name(), "closed"),
            error => tracing::debug!("{error}"),
        }
        self.peer.doom(error);
        self.stage.advance(|awaited| Stage::Dying { awaited });
        self.lanes.drop_all();
        for (index, generation) in self.channels.up() {
            self.drop_channel(index, generation, "the session is over");
        }
    }

    /// The channels are closed: what waits for the peer fails.
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

    /// A channel that goes between the decision and the end has work of operations, which learn why from it.
    #[test]
    fn what_is_lost_while_the_peer_is_told_fails_for_the_reason_that_it_is_told() {
        let builder = || Endpoint::builder().threads(0).channels(2);
        let far = builder().listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
        let (near, address) = (builder().build().unwrap(), far.listen_addresses()[0]);
        let (peer, accepted) = thread::scope(|scope| {
            let accepted = scope.spawn(|| far.accept(LIMIT).unwrap());
            (near.connect(address, LIMIT).unwrap(), accepted.join().unwrap())
        });
        let since = Instant::now();
        while !peer.stats().channels.iter().all(|channel| channel.alive) {
            assert!(since.elapsed() < LIMIT, "a channel does not come about");
            near.progress();
            far.progress();
        }
        // More than a socket takes: the far end is not polled from here on, so that nothing is acknowledged.
        const BYTES: usize = 64 << 20;
        let (source, target) = (near.alloc_host(BYTES).unwrap(), far.alloc_host(BYTES).unwrap());
        let transfer = peer.write(&source, 0, &target.descriptor(), 0, BYTES as u64).unwrap();
        // Which channel sends is the engine's matter. A socket that is not read takes no more than this at first, if the
        // kernel is busy.
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
            link.part_with(why.clone(), near.now());
            link.drop_channel(lost as u16, link.channels[lost as u16].generation, "it stalled as well");
        };
        running.with_control(part);
        let again = peer.write(&source, 0, &target.descriptor(), 0, 8);
        assert_eq!(again.unwrap_err(), why, "there are channels still, and nothing is accepted for them");
        assert!(peer.stats().channels[1 - lost].alive);
        // A caller that closes the peer, and is told that it is lost, finds none of its transfers in flight.
        assert_eq!(peer.close(LIMIT), Err(why.clone()));
        let outcome = transfer.poll().expect("it has ended");
        assert!(!peer.stats().channels[1 - lost].alive);
        assert_eq!((outcome, peer.error()), (Err(why.clone()), Some(why)));
        drop(accepted);
    }
}
