//! The lanes of a peer's channels on their way: from a standing connection to a channel that carries data.
//!
//! Each end begins to listen when the channel's connection stands, tells the other the handle over the
//! control session, and hands the channel to its worker when both directions of its own stand. The other
//! end may not be so far: what is sent until then waits in the connection.
//!
//! Invariant: a lane that does not come about costs its channel, and before the peer is up the session, with
//! the same reason at both ends.
//! Read next: `transport/plugin/setup.rs`.

use super::link::{Link, Slot};
use crate::channel::Channel;
use crate::engine::Engine;
use crate::error::Error;
use crate::limits;
use crate::nccl::abi::HANDLE_BYTES;
use crate::posted::Posted;
use crate::session::ControlMessage;
use crate::transport::Conn;
use crate::transport::plugin::{Host, Progress, Setup};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

/// A channel whose lane is being set up.
struct Waiting {
    generation: u32,
    conn: Box<dyn Conn>,
    setup: Setup,
}

/// All of one peer's.
#[derive(Default)]
pub(super) struct Lanes {
    waiting: BTreeMap<u16, Waiting>,
    /// Handles that came before our end of the connection stood.
    early: BTreeMap<u16, (u32, [u8; HANDLE_BYTES])>,
    setup_limit: Option<Duration>,
}

impl Lanes {
    /// The set-up of a channel is given up.
    pub fn drop_setup(&mut self, index: u16) {
        self.waiting.remove(&index);
        self.early.remove(&index);
    }

    pub fn drop_all(&mut self) {
        self.waiting.clear();
        self.early.clear();
    }

    /// How long channels may take until a peer is taken as it is, with some and with none of them: longer
    /// where lanes are set up.
    pub fn settle_limits(&self, some: Duration, none: Duration) -> (Duration, Duration) {
        let more = self.setup_limit.unwrap_or_default();
        (some + more, none + more)
    }
}

impl Link {
    /// The connection of a channel stands: begins to set up its lane.
    pub(super) fn start_lane(
        &mut self,
        engine: &Engine,
        conn: Box<dyn Conn>,
        index: u16,
        generation: u32,
        now: Duration,
    ) {
        let Some(host) = &engine.plugin else { return };
        self.lanes.setup_limit = Some(host.config.setup_limit);
        self.set_slot(index, Slot::Lane, generation);
        match begin(engine, host, &*conn, now) {
            Ok(setup) => {
                self.lanes.waiting.insert(index, Waiting { generation, conn, setup });
            }
            Err(why) => return self.lane_given_up(index, generation, why, now),
        }
        if let Some((of, handle)) = self.lanes.early.remove(&index).filter(|(of, _)| *of >= generation) {
            self.peer_listens(index, of, handle, now);
        }
    }

    /// The peer has told the handle for a channel.
    pub(super) fn peer_listens(
        &mut self,
        index: u16,
        generation: u32,
        handle: [u8; HANDLE_BYTES],
        now: Duration,
    ) {
        if self.slot(index).is_none() {
            return;
        }
        let result = match self.lanes.waiting.get_mut(&index) {
            Some(waiting) if waiting.generation == generation => waiting.setup.peer_listens(handle),
            // Ours is older, or does not stand yet.
            _ => {
                self.lanes.early.insert(index, (generation, handle));
                Ok(())
            }
        };
        if let Err(why) = result {
            self.lane_given_up(index, generation, why, now);
        }
    }

    /// Moves all set-ups on; true if anything happened.
    pub(super) fn advance_lanes(&mut self, engine: &Engine, now: Duration) -> bool {
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
                Progress::Ready(lane) => {
                    let Some(Waiting { conn, setup, .. }) = self.lanes.waiting.remove(&index) else {
                        continue;
                    };
                    let (peer, counters) = (self.peer().clone(), self.peer().counters(index));
                    let setup_us = setup.age(now).as_micros() as u64;
                    counters.lane.setup_us.store(setup_us, Ordering::Relaxed);
                    *counters.lane.by.lock().unwrap_or_else(PoisonError::into_inner) = Some(lane.by());
                    let limit = engine.plugin.as_ref().map(|host| host.config.stall_limit);
                    let limit = limit.unwrap_or(limits::LANE_STALL_LIMIT_DEFAULT);
                    let posted = Posted::new(peer.manner.of(lane, limit), limit, counters.lane.clone());
                    let channel = Channel::new(conn, peer, index, generation).with_lane(posted);
                    self.carries_data(engine, channel, now);
                }
                Progress::Failed(why) => self.lane_given_up(index, generation, why, now),
            }
            worked = true;
        }
        worked
    }

    /// The lane of a channel does not come about.
    pub(super) fn lane_given_up(&mut self, index: u16, generation: u32, why: String, now: Duration) {
        self.lanes.drop_setup(index);
        let why = format!("channel {index} cannot be set up: {why}");
        if self.settling() {
            return self.part_with(Error::PeerLost { peer: self.peer().name().into(), why }, now);
        }
        tracing::warn!(peer = self.peer().name(), "{why}");
        self.peer().note_lost(why.clone());
        self.fence_empty(index, generation, why, now);
    }

    /// A call of a plugin has not returned: what its worker carries is lost, and so is the peer.
    pub(super) fn worker_stuck(&mut self, worker: usize, why: &str, now: Duration) {
        let channels: Vec<String> = self.channels_of(worker).map(|index| index.to_string()).collect();
        if channels.is_empty() {
            return;
        }
        self.peer().mark_stuck();
        let why = format!("{why}; it carried channels {}", channels.join(", "));
        self.part_with(Error::PeerLost { peer: self.peer().name().into(), why }, now);
    }
}

fn begin(engine: &Engine, host: &Arc<Host>, conn: &dyn Conn, now: Duration) -> Result<Setup, String> {
    let nics = engine.transport.nics().map_err(|error| format!("listing NICs: {error}"))?;
    let device = host.device_at(conn.local().ip(), &nics)?;
    let engine = Arc::downgrade(&engine.shared());
    let wake = Box::new(move || {
        if let Some(engine) = engine.upgrade() {
            engine.wake_control();
        }
    });
    Setup::start(host, device, now, wake)
}
