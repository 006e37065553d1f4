//! Setting up the lanes of a peer's channels: from an established connection to a channel that carries data.
//!
//! When a channel's connection is established, each end starts to listen and sends the other its handle over
//! the control session. When both directions of the lane are ready at this end, it hands the channel to its
//! worker. The other end may be behind; bytes sent until then wait in the connection.
//!
//! A lane may need a connection of its own. The end that opened the session dials it, to the port of the
//! channel and with its proof, under the channel's number with [`LANE`] set.
//!
//! Invariant: a lane that fails to be set up costs its channel, and before the peer is up its session, with
//! one reason at both ends.
//! Read next: `payload/payload_backend.rs`, `payload/plugin/setup.rs`.

use super::dial::{Announced, Dial, DialFailure, DialFor};
use super::link::Link;
use crate::core::channel::Channel;
use crate::core::context::Context;
use crate::core::posted::Posted;
use crate::error::{Error, LossCause};
use crate::payload::lane::{Progress, Setup};
use crate::payload::payload_backend::SharedBackend;
use ferrywire_ncclnet::abi::HANDLE_BYTES;
use ferrywire_net::Conn;
use ferrywire_proto::handshake::RefusalCode;
use ferrywire_proto::limits;
use ferrywire_proto::session::ControlMessage;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Flag in a channel's number: the connection is for the channel's lane.
pub(super) const LANE: u16 = 1 << 15;

const _: () = assert!(limits::CHANNELS_MAX < LANE as usize);

/// A channel whose lane is being set up.
struct Waiting {
    generation: u32,
    conn: Box<dyn Conn>,
    setup: Box<dyn Setup>,
}

/// The lanes of one peer.
pub(super) struct Lanes {
    /// The lanes' backend; without one there are no lanes.
    backend: Option<SharedBackend>,
    waiting: BTreeMap<u16, Waiting>,
    /// Handles that arrived before this end's connection was established.
    early: BTreeMap<u16, (u32, [u8; HANDLE_BYTES])>,
    /// For each channel, the lanes that have ended since payload last moved over any lane, and the count of
    /// moved messages at that time.
    in_vain: BTreeMap<u16, InVain>,
    moved: u64,
}

/// Lanes of one channel that have ended without moving payload.
#[derive(Default)]
struct InVain {
    short_lived: usize,
    stalled: usize,
}

impl Lanes {
    pub fn new(backend: Option<SharedBackend>) -> Lanes {
        Lanes {
            backend,
            waiting: BTreeMap::new(),
            early: BTreeMap::new(),
            in_vain: BTreeMap::new(),
            moved: 0,
        }
    }

    /// Whether a failed lane means that the next one would fail too. If not, lanes are set up again, as
    /// connections are.
    pub fn fail_for_good(&self) -> bool {
        self.backend.as_ref().is_some_and(|backend| backend.fails_for_good())
    }

    /// Notes a lane that failed after `lasted`, or could not be set up in that time. `moved` is the number of
    /// messages that all of the peer's lanes have moved so far. Returns a reason if a further lane would be
    /// useless.
    pub fn ended_in_vain(
        &mut self,
        index: u16,
        lasted: Duration,
        moved: u64,
        any_is_up: bool,
    ) -> Option<String> {
        if std::mem::replace(&mut self.moved, moved) != moved {
            self.in_vain.clear();
        }
        let ended = self.in_vain.entry(index).or_default();
        if lasted < limits::LANE_SHORT_LIVED {
            ended.short_lived += 1
        } else {
            ended.stalled += 1
        }
        if ended.stalled >= limits::LANES_STALLED_MAX {
            return Some(format!("{} lanes of the channel in a row have moved nothing", ended.stalled));
        }
        let gone = !any_is_up && ended.short_lived >= limits::LANES_SHORT_LIVED_MAX;
        gone.then(|| {
            format!("{} lanes of the channel in a row did not last; no channel is left", ended.short_lived)
        })
    }

    /// Age of the set-up of a channel's lane.
    fn setup_age(&self, index: u16, now: Duration) -> Duration {
        self.waiting.get(&index).map(|waiting| waiting.setup.age(now)).unwrap_or_default()
    }

    pub fn backend(&self) -> Option<SharedBackend> {
        self.backend.clone()
    }

    /// Cancels the set-up of a channel's lane.
    pub fn drop_setup(&mut self, index: u16) {
        self.waiting.remove(&index);
        self.early.remove(&index);
    }

    /// Cancels a set-up in favour of a later generation, whose handle may have arrived already.
    pub fn drop_setup_before(&mut self, index: u16, generation: u32) {
        self.waiting.remove(&index);
        if self.early.get(&index).is_some_and(|(of, _)| *of < generation) {
            self.early.remove(&index);
        }
    }

    pub fn drop_all(&mut self) {
        self.waiting.clear();
        self.early.clear();
    }

    /// Times after which a peer counts as connected with some of its channels, and as unreachable with none.
    /// With lanes these are longer by the set-up time of a lane.
    pub fn settle_limits(&self, some: Duration, none: Duration) -> (Duration, Duration) {
        let more = self.backend.as_ref().map(|backend| backend.setup_timeout()).unwrap_or_default();
        (some.saturating_add(more), none.saturating_add(more))
    }
}

impl Link {
    /// Starts to set up the lane of a channel whose connection is established.
    pub(super) fn start_lane(
        &mut self,
        backend: SharedBackend,
        context: &Context,
        conn: Box<dyn Conn>,
        index: u16,
        generation: u32,
        now: Duration,
    ) {
        self.lane_begins(index, generation);
        let (transport, waker) = (&*context.transport, context.control_waker());
        match backend.begin(transport, &*conn, self.dials(), now, waker) {
            Ok(setup) => {
                self.lanes.waiting.insert(index, Waiting { generation, conn, setup });
            }
            Err(why) => return self.lane_given_up(index, generation, why, now),
        }
        if let Some((of, handle)) = self.lanes.early.remove(&index).filter(|(of, _)| *of >= generation) {
            self.peer_listens(index, of, handle, now);
        }
    }

    /// Handles the peer's handle for the lane of a channel.
    pub(super) fn peer_listens(
        &mut self,
        index: u16,
        generation: u32,
        handle: [u8; HANDLE_BYTES],
        now: Duration,
    ) {
        if !self.has_channel(index) {
            return;
        }
        let result = match self.lanes.waiting.get_mut(&index) {
            Some(waiting) if waiting.generation == generation => waiting.setup.peer_listens(handle),
            // This end's set-up is of an older generation, or has not started.
            _ => {
                self.lanes.early.insert(index, (generation, handle));
                Ok(())
            }
        };
        if let Err(why) = result {
            self.lane_given_up(index, generation, why, now);
        }
    }

    /// Polls all set-ups. Returns whether any made progress.
    pub(super) fn advance_lanes(&mut self, context: &Context, now: Duration) -> bool {
        let mut worked = false;
        let indices: Vec<u16> = self.lanes.waiting.keys().copied().collect();
        for index in indices {
            let Some(waiting) = self.lanes.waiting.get_mut(&index) else { continue };
            let generation = waiting.generation;
            match waiting.setup.poll(now) {
                Progress::Pending => continue,
                Progress::Handle(handle) => {
                    self.say(ControlMessage::Lane { channel: index, generation, handle }, now);
                }
                Progress::Ready(lane, by) => {
                    let Some(Waiting { conn, setup, .. }) = self.lanes.waiting.remove(&index) else {
                        continue;
                    };
                    let (peer, counters) = (self.peer().clone(), self.peer().counters(index));
                    let setup_us = setup.age(now).as_micros() as u64;
                    counters.lane.setup_us.store(setup_us, Ordering::Relaxed);
                    *counters.lane.by.lock().unwrap_or_else(PoisonError::into_inner) = Some(by);
                    let limit = self.lanes.backend.as_ref().map(|backend| backend.stall_timeout());
                    let limit = limit.unwrap_or(limits::LANE_STALL_TIMEOUT_DEFAULT);
                    let posted = Posted::new(lane, limit, counters.lane.clone());
                    let channel = Channel::new(conn, peer, index, generation).with_lane(posted);
                    self.carries_data(context, channel, now);
                }
                Progress::Failed(why) => self.lane_given_up(index, generation, why, now),
            }
            worked = true;
        }
        worked
    }

    /// Takes the connections that lanes need and that have to be dialled now.
    pub(super) fn take_lane_dials(&mut self, now: Duration) -> Vec<(Dial, DialFor)> {
        let mut out = Vec::new();
        let indices: Vec<u16> = self.lanes.waiting.keys().copied().collect();
        for index in indices {
            let Some(waiting) = self.lanes.waiting.get_mut(&index) else { continue };
            if !waiting.setup.wants_connection() {
                continue;
            }
            let (generation, local, remote) =
                (waiting.generation, waiting.conn.local(), waiting.conn.remote());
            match self.dial_lane(index, generation, local, remote) {
                Ok(dial) => out.push(dial),
                Err(error) => self.lane_given_up(index, generation, error.to_string(), now),
            }
        }
        out
    }

    /// Dials a lane's connection over the NIC of the channel's connection, and to its remote port.
    fn dial_lane(
        &self,
        index: u16,
        generation: u32,
        local: SocketAddr,
        remote: SocketAddr,
    ) -> Result<(Dial, DialFor), Error> {
        let context = self.peer().context();
        let nics = context.transport.nics().map_err(|error| Error::io("list NICs", &error))?;
        let nic = nics.iter().find(|nic| nic.address == local.ip());
        let announced = Announced::new(self.peer(), nic, remote, &self.bulk_options())?;
        let (session, key) = self.keys();
        let dial = Dial::channel(announced, session, key, index | LANE, generation)?;
        Ok((dial, DialFor::Lane { session, index, generation }))
    }

    /// Handles the connection of a lane, dialled here or accepted.
    pub(super) fn lane_connected(
        &mut self,
        context: &Context,
        mut conn: Box<dyn Conn>,
        index: u16,
        generation: u32,
        now: Duration,
    ) {
        let options = self.bulk_options();
        let waiting = self.lanes.waiting.get_mut(&index).filter(|waiting| waiting.generation == generation);
        let Some(waiting) = waiting else {
            tracing::debug!(peer = self.peer().name(), channel = index, "stale lane connection dropped");
            return;
        };
        context.transport.tune(&mut *conn, &options);
        if let Err(why) = waiting.setup.connected(conn) {
            self.lane_given_up(index, generation, why, now);
        }
    }

    /// Handles a failure to dial a lane's connection. If the peer was busy for a moment, the channel is dialled again
    /// with it: a lane's connection has the generation of its channel, and a generation is used once.
    pub(super) fn lane_not_connected(
        &mut self,
        index: u16,
        generation: u32,
        failure: DialFailure,
        now: Duration,
    ) {
        if self.lanes.waiting.get(&index).is_none_or(|waiting| waiting.generation != generation) {
            return;
        }
        if failure.refused == Some(RefusalCode::Busy) {
            self.lanes.drop_setup(index);
            return self.channel_failed(index, generation, failure.error, now);
        }
        self.lane_given_up(index, generation, format!("the connection of its lane: {}", failure.error), now);
    }

    /// Handles a lane that cannot be set up.
    pub(super) fn lane_given_up(&mut self, index: u16, generation: u32, why: String, now: Duration) {
        let age = self.lanes.setup_age(index, now);
        self.lanes.drop_setup(index);
        let why = format!("channel {index} cannot be set up: {why}");
        if self.settling() {
            return self.end_without_lanes(why, now);
        }
        tracing::warn!(peer = self.peer().name(), "{why}");
        self.peer().history.note_lost(why.clone());
        // While another channel is up the peer stays connected.
        if !self.any_is_up()
            && let Some(in_vain) = self.lanes.ended_in_vain(index, age, self.peer().lanes_moved(), false)
        {
            let why = format!("{why}; {in_vain}");
            let error = self.lost(LossCause::LaneFailed, why);
            return self.end_with_error(error, now);
        }
        self.fence_empty(index, generation, why, now);
    }

    /// Handles a plugin call that has not returned: the channels of its worker are lost, and so is the peer.
    pub(super) fn worker_stuck(&mut self, worker: usize, why: &str, now: Duration) {
        let channels: Vec<String> = self.channels_of(worker).map(|index| index.to_string()).collect();
        if channels.is_empty() {
            return;
        }
        self.peer().mark_stuck();
        let why = format!("{why}; lost with it: channels {}", channels.join(", "));
        let error = self.lost(LossCause::CallHangs, why);
        self.end_with_error(error, now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STALL: Duration = Duration::from_secs(30);

    #[test]
    fn lanes_that_stall_one_after_another_end_the_session_unless_something_moved_meanwhile() {
        let mut lanes = Lanes::new(None);
        for round in 0..100 {
            for _ in 1..limits::LANES_STALLED_MAX {
                assert_eq!(lanes.ended_in_vain(0, STALL, round, true), None, "round {round}");
                assert_eq!(lanes.ended_in_vain(1, STALL, round, true), None, "round {round}");
            }
        }
        let why = lanes.ended_in_vain(1, STALL, 99, true).expect("once more is too often");
        assert!(why.contains("3 lanes of the channel in a row have moved nothing"), "{why}");
    }

    #[test]
    fn lanes_that_do_not_last_end_the_session_once_no_channel_is_left() {
        let mut lanes = Lanes::new(None);
        for _ in 0..10 * limits::LANES_SHORT_LIVED_MAX {
            assert_eq!(lanes.ended_in_vain(3, Duration::ZERO, 7, true), None);
        }
        assert!(
            lanes.ended_in_vain(3, Duration::ZERO, 7, false).is_some_and(|why| why.contains("no channel"))
        );
        assert_eq!(lanes.ended_in_vain(3, Duration::ZERO, 8, false), None, "something has moved");
    }
}
