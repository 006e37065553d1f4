//! Lost channels: closed at both ends, then each tells the other what it had placed, and the rest goes over
//! the others.
//!
//! A loss comes from `core/worker/engine.rs` (`lose`), through `LostChannels` and `Control::take_lost_channels`.
//! Invariant: frames go back into the outbox only when both ends have closed the connection, so none is placed twice.
//! Read next: `../../core/queue/mod.rs` (`resend`).

use super::Link;
use super::channels::{ChannelState, OwnFence, PeerFence};
use crate::core::channel::Remains;
use crate::core::posted::SENT_UNREADABLE;
use crate::core::worker::Command;
use crate::error::Error;
use ferrywire_proto::limits;
use ferrywire_proto::session::ControlMessage;
use ferrywire_proto::wire::Refusal;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How the reason begins of an end that only heard of a loss.
const THE_PEER_LOST_IT: &str = "the peer lost it: ";

impl Link {
    pub fn channel_lost(
        &mut self,
        index: u16,
        generation: u32,
        why: String,
        remains: Remains,
        now: Duration,
    ) {
        let entries = remains.entries;
        let dying = self.dying();
        let record = &mut self.channels[index];
        record.close_generation(generation);
        let state = record.take();
        debug_assert!(state.is_up(), "only a worker loses a channel, and it has those that are up");
        if dying {
            record.go_down(generation, Duration::MAX);
            return self.peer.drop_entries(entries.into_iter().map(|(_, entry)| entry).collect());
        }
        let path = self.path_of(index);
        // Both ends tell how far their lanes were: the errors of both have it.
        let lane_state = remains.lane.map(|state| format!("; {state}")).unwrap_or_default();
        let why = format!("{why}{lane_state}");
        let line = format!("channel {index} over {path}: {why}");
        tracing::warn!(peer = self.peer.name(), "lost {line}");
        let lane_failed = remains.lane_failed.then(|| line.clone());
        self.peer.note_lost(line);
        let fence = OwnFence { entries, lane_failed };
        self.channels[index].set(generation, ChannelState::Fencing(fence));
        let refused = remains.refused.iter().map(|(number, why)| (*number, *why as u8)).collect();
        let message = ControlMessage::Fence {
            channel: index,
            generation,
            placed: remains.placed,
            refused,
            reason: why,
        };
        self.say(message, now);
        self.peer.choose_home();
        // What was queued for the home before is the new one's, which may sleep.
        self.peer.home().rouse();
        if let ChannelState::Up { peer_fence: Some(theirs) } = state {
            self.resolve(index, theirs, now);
        }
    }

    /// A connection on which nothing was placed is over here.
    pub(in crate::control) fn fence_empty(
        &mut self,
        index: u16,
        generation: u32,
        reason: String,
        now: Duration,
    ) {
        self.channels[index].close_generation(generation);
        self.channels[index].set(generation, ChannelState::Fencing(OwnFence::default()));
        self.say_nothing_placed(index, generation, reason, now);
    }

    fn say_nothing_placed(&mut self, channel: u16, generation: u32, reason: String, now: Duration) {
        let (placed, refused) = (0, Vec::new());
        self.say(ControlMessage::Fence { channel, generation, placed, refused, reason }, now);
    }

    /// Ends one of our channels; [`Link::channel_lost`] follows.
    pub(super) fn drop_channel(&self, index: u16, generation: u32, why: String) {
        let command = Command::Drop { session: self.session.id(), index, generation, why };
        self.workers[self.peer.engine_worker(index)].command(command);
    }

    pub(super) fn path_of(&self, index: u16) -> String {
        let stats = self.peer.counters(index).snapshot(index);
        stats.map_or_else(String::new, |stats| format!("{} ({} to {})", stats.nic, stats.local, stats.remote))
    }

    pub(super) fn fenced_by_peer(
        &mut self,
        index: u16,
        generation: u32,
        (placed, refused): (u64, Vec<(u64, u8)>),
        reason: &str,
        now: Duration,
    ) {
        let Some(record) = self.channels.get_mut(index) else { return };
        let reason = ferrywire_proto::handshake::clean(reason);
        let is_current = record.generation == generation;
        match &mut record.state {
            ChannelState::Up { peer_fence } if is_current => {
                let why = format!("{THE_PEER_LOST_IT}{reason}");
                *peer_fence = Some(PeerFence { placed, refused, reason });
                return self.drop_channel(index, generation, why);
            }
            ChannelState::Fencing(_) if is_current => {
                return self.resolve(index, PeerFence { placed, refused, reason }, now);
            }
            _ => {}
        }
        record.close_generation(generation);
        if is_current && record.state.is_coming() {
            // That connection comes too late: it is fenced.
            record.go_down(generation, now + limits::REDIAL_INTERVAL);
            self.lanes.drop_setup(index);
        }
        // This end never had that connection: nothing was sent or placed over it.
        self.say_nothing_placed(index, generation, "never came about here".into(), now);
        self.peer.rouse_for(u64::MAX);
    }

    /// A lane of ours has failed: why the session ends with it, if it does.
    fn given_up_with(&mut self, index: u16, now: Duration) -> Option<String> {
        let any_is_up = self.any_is_up();
        if self.lanes.fail_for_good() {
            return (!any_is_up).then(|| "no channel is left".to_owned());
        }
        let stood = now.saturating_sub(self.channels[index].up_since);
        self.lanes.ended_in_vain(index, stood, self.peer.lanes_moved(), any_is_up)
    }

    /// Both ends have closed the connection and said what they placed: the rest travels again.
    fn resolve(&mut self, index: u16, theirs: PeerFence, now: Duration) {
        let record = &mut self.channels[index];
        let ChannelState::Fencing(fence) = record.take() else { return };
        // A connection that did not last is not dialled in a hot loop.
        record.go_down(record.generation, now.max(record.up_since + limits::REDIAL_INTERVAL));
        let mut again = Vec::new();
        for (number, entry) in fence.entries {
            if number >= theirs.placed {
                again.push(entry);
                continue;
            }
            let refusal =
                theirs.refused.iter().find(|(each, _)| *each == number).map(|(_, why)| Refusal::parse(*why));
            self.peer.delivered(entry, refusal);
        }
        self.peer.history.resent.fetch_add(again.len() as u64, Ordering::Relaxed);
        let unsendable = self.peer.queue.resend(again);
        self.peer.drop_entries(unsendable);
        // What ended of the peer's memory is no lane's failure.
        if let Some(why) = fence.lane_failed
            && !theirs.reason.contains(SENT_UNREADABLE)
            && let Some(last) = self.given_up_with(index, now)
        {
            let theirs = own_part(&theirs.reason, &why);
            let why = format!("{why}; at the peer: {theirs}; {last}");
            return self.part_with(Error::PeerLost { peer: self.peer.name().into(), why }, now);
        }
        self.peer.rouse_for(u64::MAX);
    }
}

/// What the peer says of a loss, less what it repeats of our own words.
fn own_part<'a>(theirs: &'a str, ours: &str) -> &'a str {
    let Some(told) = theirs.strip_prefix(THE_PEER_LOST_IT) else { return theirs };
    // Ours has the channel and its path before what the peer was told.
    let mut ends = ours.match_indices(": ").map(|(at, colon)| &ours[at + colon.len()..]);
    ends.find_map(|end| told.strip_prefix(end)).map_or(theirs, |rest| rest.trim_start_matches("; "))
}
