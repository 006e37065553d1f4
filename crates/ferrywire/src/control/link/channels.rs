//! The control session's record of each channel.
//!
//! Invariant: a generation number is used for one connection only. Read next: `setup.rs`, `fences.rs`.

use crate::control::dial::Announced;
use crate::core::queue::Entry;
use ferrywire_proto::limits;
use ferrywire_proto::session::FenceCause;
use std::net::SocketAddr;
use std::ops::{Index, IndexMut};
use std::time::Duration;

/// The channels of one peer, by their numbers.
pub(super) struct Channels(Vec<ChannelRecord>);

pub(super) struct ChannelRecord {
    pub state: ChannelState,
    /// Number of the channel's connection, counted from 0.
    pub generation: u32,
    /// The lowest generation that may still come up. Lower ones are fenced: nothing of their connections may
    /// be placed any more.
    least: u32,
    /// Attempts to connect that have failed since the channel was up, or since the network has changed.
    pub failures: u32,
    /// When the channel last came up.
    pub up_since: Duration,
    /// At the accepting end: the last announced generation, and its source address.
    pub source: Option<(u32, SocketAddr)>,
}

/// The states of a channel at the dialling end: `down -> announced -> expected -> dialling -> up -> fencing
/// -> down`; at the accepting end: `down -> up -> fencing -> down`. With lanes, `lane` comes before `up`.
pub(super) enum ChannelState {
    Down {
        dial_at: Duration,
    },
    /// The connection is bound and announced to the peer, which has not answered.
    Announced {
        since: Duration,
        announced: Announced,
    },
    /// The peer has answered: the connection is dialled next.
    Expected {
        announced: Announced,
    },
    Dialling,
    /// The connection is established and its lane is being set up.
    Lane,
    /// A worker has the channel. With `peer_fence`, the worker has been asked to close it because the peer
    /// has.
    Up {
        peer_fence: Option<PeerFence>,
    },
    /// Closed here. The peer has not yet reported what it had placed.
    Fencing(OwnFence),
}

/// This end's half of the fence of a lost connection.
#[derive(Default)]
pub(super) struct OwnFence {
    /// Frames that were sent, with their numbers, and may not have been placed.
    pub entries: Vec<(u64, Entry)>,
    /// How and why the lane failed, if that ended the connection.
    pub lane_failed: Option<(FenceCause, String)>,
    /// Whether the connection ended before its lane was set up.
    pub never_up: bool,
}

/// The peer's half: the number of frames it had placed before it closed its end, and why it did.
pub(super) struct PeerFence {
    pub placed: u64,
    pub refused: Vec<(u64, u8)>,
    pub cause: FenceCause,
    pub reason: String,
}

impl ChannelState {
    pub fn is_up(&self) -> bool {
        matches!(self, ChannelState::Up { .. })
    }

    pub fn is_down(&self) -> bool {
        matches!(self, ChannelState::Down { .. })
    }

    /// Whether a connection of the channel is being set up.
    pub fn is_coming(&self) -> bool {
        use ChannelState::{Announced, Dialling, Expected, Lane};
        matches!(self, Announced { .. } | Expected { .. } | Dialling | Lane)
    }
}

impl ChannelRecord {
    /// Handles the end, or the failure, of this generation's connection. The next one gets another number.
    pub fn go_down(&mut self, generation: u32, dial_at: Duration) {
        self.state = ChannelState::Down { dial_at };
        self.generation = generation + 1;
    }

    /// Handles an attempt to connect that has failed. The next one waits longer after several failures in a row.
    pub fn dial_failed(&mut self, generation: u32, now: Duration) {
        let doubled = self.failures.saturating_sub(limits::REDIALS_AT_ONCE - 1).min(u32::BITS - 1);
        let interval = limits::REDIAL_INTERVAL.saturating_mul(1 << doubled).min(limits::REDIAL_INTERVAL_MAX);
        self.failures = self.failures.saturating_add(1);
        self.go_down(generation, now + interval);
    }

    /// Handles a lane that could not be set up. While another channel is up, the next attempt waits as after a failure to
    /// connect. Without one, the session ends after a number of attempts, and must not take minutes for them.
    pub fn lane_not_set_up(&mut self, generation: u32, any_is_up: bool, now: Duration) {
        if any_is_up {
            self.dial_failed(generation, now);
        } else {
            self.go_down(generation, now + limits::REDIAL_INTERVAL);
        }
    }

    /// Whether the next attempt to connect waits longer than after a single failure.
    pub fn backs_off(&self) -> bool {
        self.state.is_down() && self.failures >= limits::REDIALS_AT_ONCE
    }

    /// Lets a channel that backs off connect at once.
    pub fn restart_backoff(&mut self, now: Duration) {
        if self.backs_off() {
            self.state = ChannelState::Down { dial_at: now };
        }
        self.failures = 0;
    }

    pub fn set(&mut self, generation: u32, state: ChannelState) {
        (self.generation, self.state) = (generation, state);
    }

    /// Takes the state; the channel is down until it gets another state.
    pub fn take(&mut self) -> ChannelState {
        std::mem::replace(&mut self.state, ChannelState::Down { dial_at: Duration::MAX })
    }

    /// Forbids connections of this generation and below.
    pub fn close_generation(&mut self, generation: u32) {
        self.least = self.least.max(generation.saturating_add(1));
    }

    pub fn may_come_up(&self, generation: u32) -> bool {
        self.state.is_down() && generation >= self.least
    }
}

impl Channels {
    pub fn new(count: usize, now: Duration) -> Channels {
        let new = || ChannelRecord {
            state: ChannelState::Down { dial_at: now },
            generation: 0,
            least: 0,
            failures: 0,
            up_since: now,
            source: None,
        };
        Channels((0..count).map(|_| new()).collect())
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn indices(&self) -> std::ops::Range<u16> {
        0..self.0.len() as u16
    }

    /// The channel with this index, which a peer may choose freely; `None` if there is none.
    pub fn get_mut(&mut self, index: u16) -> Option<&mut ChannelRecord> {
        self.0.get_mut(usize::from(index))
    }

    pub fn iter(&self) -> impl Iterator<Item = &ChannelRecord> {
        self.0.iter()
    }

    /// Whether a channel waits longer than after a single failure before it is dialled again.
    pub fn back_off(&self) -> bool {
        self.0.iter().any(ChannelRecord::backs_off)
    }

    /// Lets all channels that back off connect at once.
    pub fn restart_backoff(&mut self, now: Duration) {
        self.0.iter_mut().for_each(|record| record.restart_backoff(now));
    }

    /// Index and generation of the channels that workers have.
    pub fn up(&self) -> impl Iterator<Item = (u16, u32)> + '_ {
        let up = (0..).zip(&self.0).filter(|(_, channel)| channel.state.is_up());
        up.map(|(index, channel)| (index, channel.generation))
    }

    /// Drops connections in set-up, and takes the frames that no fence has settled.
    pub fn take_unsettled(&mut self) -> Vec<Entry> {
        let entries = self.0.iter_mut().flat_map(|channel| match channel.take() {
            ChannelState::Fencing(fence) => fence.entries,
            _ => Vec::new(),
        });
        entries.map(|(_, entry)| entry).collect()
    }
}

impl Index<u16> for Channels {
    type Output = ChannelRecord;

    fn index(&self, index: u16) -> &ChannelRecord {
        &self.0[usize::from(index)]
    }
}

impl IndexMut<u16> for Channels {
    fn index_mut(&mut self, index: u16) -> &mut ChannelRecord {
        &mut self.0[usize::from(index)]
    }
}
