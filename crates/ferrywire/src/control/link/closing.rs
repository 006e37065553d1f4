//! The end of a session: asked for, agreed on, or forced by an error.

use super::{GAVE_UP, Link, Role, Slot, Stage, WITHOUT_LANES};
use crate::control::accept_queue::AcceptQueue;
use crate::control::dial::ConnectTarget;
use crate::error::Error;
use ferrywire_proto::limits;
use ferrywire_proto::session::ControlMessage;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

impl Link {
    /// Finishes what was posted, then closes; at the latest by then. Of several who ask, the earliest deadline counts: else
    /// an endpoint would break the session off at its own, and the other side would take that for a loss.
    pub fn close(&mut self, by: Duration) {
        self.close_by = Some(self.close_by.map_or(by, |earlier| earlier.min(by)));
        // Callers who go on posting would never let it be quiet.
        self.peer.closing.store(true, Ordering::SeqCst);
    }

    /// Likewise, for somebody who waits for this peer alone.
    pub fn close_alone(&mut self, by: Duration) {
        self.closed_alone = true;
        self.close(by);
    }

    /// Who closed this peer alone does not wait any more, and knows that it has not finished.
    pub fn note_told(&mut self) {
        self.told = true;
    }

    /// Finishes what was posted as long as it gets on, then closes.
    pub fn drain(&mut self, now: Duration) {
        self.peer.abandoned.store(true, Ordering::SeqCst);
        self.peer.closing.store(true, Ordering::SeqCst);
        if self.accept_queue.is_some() {
            self.close(now + limits::DRAIN_DEADLINE);
        }
    }

    /// When closing ends, whatever is left.
    fn close_by(&mut self, now: Duration) -> Option<Duration> {
        if self.close_by.is_some()
            || !self.peer.abandoned.load(Ordering::SeqCst)
            || self.accept_queue.is_some()
        {
            return self.close_by;
        }
        let drained = self.peer.drained();
        match self.drained {
            Some((before, since)) if before == drained => Some(since + limits::DRAIN_DEADLINE),
            _ => {
                self.drained = Some((drained, now));
                Some(now + limits::DRAIN_DEADLINE)
            }
        }
    }

    pub(super) fn quiet(&self) -> bool {
        !self.peer.in_flight() && !self.peer.queue.has_work()
    }

    pub(super) fn look_after_closing(&mut self, now: Duration) {
        if let Stage::Leaving { until } = self.stage {
            return self.leave(until, now);
        }
        if self.dying() {
            return;
        }
        if self.peer_drains && !self.drained_told && self.quiet() {
            self.drained_told = true;
            self.say(ControlMessage::Drained, now);
        }
        let Some(by) = self.close_by(now) else { return };
        match self.stage {
            Stage::Settling | Stage::Up => {
                if !self.drain_told {
                    self.drain_told = true;
                    self.say(ControlMessage::Drain, now);
                }
                self.stage = Stage::Draining;
            }
            Stage::Draining => {
                // A peer that drains too says so all the same when it has finished.
                let done = self.quiet() && self.peer_drained;
                if done || now >= by {
                    if !done {
                        self.peer.unfinished.store(true, Ordering::SeqCst);
                    }
                    let reason = if done { "closed" } else { "closed before all was finished" };
                    self.say(ControlMessage::Goodbye { reason: reason.into() }, now);
                    self.stage = Stage::Leaving { until: now + limits::HEARTBEAT_INTERVAL };
                }
            }
            Stage::Leaving { .. } | Stage::Dying | Stage::Over => {}
        }
    }

    /// The farewell is on its way: when it has arrived, or its time is up, this is the end.
    pub(super) fn leave(&mut self, until: Duration, now: Duration) {
        if self.session.unacknowledged() == 0 || self.conn.is_none() || now >= until {
            let error = self.last_words.take().unwrap_or(Error::Closed);
            self.error.get_or_insert(error);
        }
    }

    /// Ends the session with an error of ours, after telling the peer.
    pub(in crate::control) fn part_with(&mut self, error: Error, now: Duration) {
        if self.dying() {
            return;
        }
        let reason = match &error {
            Error::PeerLost { why, .. } => format!("{GAVE_UP}{why}"),
            error => format!("{GAVE_UP}{error}"),
        };
        self.leave_with(reason, error, now);
    }

    fn leave_with(&mut self, reason: String, error: Error, now: Duration) {
        // Operations may end from now on, with the channels that go while the peer is told.
        self.peer.doom(error.clone());
        self.say(ControlMessage::Goodbye { reason }, now);
        self.last_words = Some(error);
        self.stage = Stage::Leaving { until: now + limits::HEARTBEAT_INTERVAL };
    }

    /// Ends the session if it is not up and whoever waits for it in this queue has given up.
    pub(in crate::control) fn withdraw(&mut self, queue: &Arc<AcceptQueue>, now: Duration) {
        if !self.accept_queue.as_ref().is_some_and(|mine| Arc::ptr_eq(mine, queue)) {
            return;
        }
        // Nor does another take its place.
        self.accept_queue = None;
        if !self.dying() {
            self.leave_with("given up before it was up".into(), Error::Closed, now);
        }
    }

    /// Lanes do not come about, before the peer is up. Where both ends could do without them, a session without takes
    /// this one's place: the end that connects opens it, and both tell why.
    pub(in crate::control) fn part_with_lanes(&mut self, why: String, now: Duration) {
        let error = Error::PeerLost { peer: self.peer.name().into(), why: why.clone() };
        if !self.lanes_optional || self.dying() {
            return self.part_with(error, now);
        }
        let end = if self.dials() { "connects" } else { "accepts" };
        let why = format!("at the end that {end}: {why}");
        let carrier = self.lanes.carrier();
        let name = carrier.as_ref().map_or("lanes", |carrier| carrier.name());
        tracing::warn!(peer = self.peer.name(), "a session without {name} takes this one's place: {why}");
        self.leave_with(format!("{WITHOUT_LANES}{why}"), error, now);
        self.without = Some(why);
    }

    /// The peer says farewell.
    pub(super) fn peer_leaves(&mut self, reason: &str) {
        let peer = self.peer.name().into();
        let (why, again) = match reason.strip_prefix(WITHOUT_LANES) {
            Some(why) => (Some(why), self.settling() && self.lanes_optional),
            None => (reason.strip_prefix(GAVE_UP), false),
        };
        self.without = self.without.take().or(why.filter(|_| again).map(ferrywire_proto::handshake::clean));
        self.error = Some(match why {
            Some(why) => Error::PeerLost { peer, why: format!("it gave up: {why}") },
            None => Error::PeerClosed { peer },
        });
    }

    /// Where to connect to once more, for whom, and why without lanes; once.
    pub fn take_retry(&mut self) -> Option<(ConnectTarget, Arc<AcceptQueue>, String)> {
        let Role::Connector { target, .. } = &self.role else { return None };
        Some((target.clone(), self.accept_queue.take()?, self.without.take()?))
    }

    /// It has had its time, the farewell's too.
    pub fn abort(&mut self) {
        self.peer.unfinished.store(true, Ordering::SeqCst);
        self.die(Error::Closed);
    }

    /// The session is over: first the channels close, then what waits for the peer fails.
    pub fn die(&mut self, error: Error) {
        if matches!(self.stage, Stage::Dying | Stage::Over) {
            return;
        }
        match &error {
            Error::Closed | Error::PeerClosed { .. } => tracing::debug!(peer = self.peer.name(), "closed"),
            error => tracing::debug!("{error}"),
        }
        self.peer.doom(error);
        self.stage = Stage::Dying;
        self.lanes.drop_all();
        for (index, (slot, generation)) in self.slots.iter().enumerate() {
            if *slot == Slot::Up {
                self.drop_channel(index as u16, *generation, "the session is over".into());
            }
        }
    }

    pub(super) fn finish(&mut self) {
        self.stage = Stage::Over;
        self.conn = None;
        self.announced.clear();
        for (_, fence) in std::mem::take(&mut self.fences) {
            let entries = fence.ours.unwrap_or_default();
            self.peer.drop_entries(entries.into_iter().map(|(_, entry)| entry).collect());
        }
        self.peer.fail();
        self.permit = None;
        if self.without.is_some() && self.dials() {
            return;
        }
        if let Some(queue) = self.accept_queue.take() {
            // Somebody who waits for a new peer learns why it did not come about; an acceptor goes on waiting.
            if matches!(self.role, Role::Connector { .. }) {
                queue.put(Err(self.peer.failure().unwrap_or(Error::Closed)));
            }
        }
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
        // More than a socket takes: nobody drives the far end from here on, so that nothing is acknowledged.
        const BYTES: usize = 64 << 20;
        let (source, target) = (near.register_zeroed(BYTES).unwrap(), far.register_zeroed(BYTES).unwrap());
        let transfer = peer.write(&source, 0, &target.descriptor(), 0, BYTES as u64).unwrap();
        // Which of them sends is the engine's matter. A socket that nobody reads takes no more than this at first, if the
        // kernel is busy.
        let sends = || peer.stats().channels.iter().position(|channel| channel.sent_bytes >= 10_000);
        let lost = loop {
            assert!(since.elapsed() < LIMIT, "nothing is sent");
            near.progress();
            if let Some(index) = sends() {
                break index;
            }
        };
        let why = Error::PeerLost { peer: peer.name(), why: "its lanes are no good".into() };
        let running = near.running();
        let part = |control: &mut crate::control::Control| {
            let link = control.links.get_mut(&peer.state().session).unwrap();
            link.part_with(why.clone(), near.now());
            link.drop_channel(lost as u16, link.slots[lost].1, "it stalled as well".into());
        };
        running.with_control(part);
        let again = peer.write(&source, 0, &target.descriptor(), 0, 8);
        assert_eq!(again.unwrap_err(), why, "there are channels still, and nothing is accepted for them");
        assert!(peer.stats().channels[1 - lost].alive);
        // Whoever closes it, and is told that it is lost, finds nothing of it under way.
        assert_eq!(peer.close(LIMIT), Err(why.clone()));
        let outcome = transfer.poll().expect("it has ended");
        assert!(!peer.stats().channels[1 - lost].alive);
        assert_eq!((outcome, peer.error()), (Err(why.clone()), Some(why)));
        drop(accepted);
    }
}
