//! Lost channels: closed at both ends, then each tells the other what it had placed, and the rest goes over
//! the others.
//!
//! A loss comes from `core/worker/engine.rs` (`lose`), through `LostChannels` and `Control::take_lost_channels`.
//! Invariant: frames go back into the outbox only when both ends have closed the connection, so none is placed twice.
//! Read next: `../../core/queue/mod.rs` (`resend`).

use super::Link;
use super::channels::{ChannelState, OwnFence, PeerFence};
use crate::core::channel::Remains;
use crate::core::worker::{Command, Loss};
use crate::error::LossCause;
use ferrywire_proto::limits;
use ferrywire_proto::session::{ControlMessage, FenceCause};
use ferrywire_proto::wire::Refusal;
use std::sync::atomic::Ordering;
use std::time::Duration;

impl Link {
    pub fn channel_lost(&mut self, index: u16, generation: u32, loss: Loss, remains: Remains, now: Duration) {
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
        let lane_state = remains.lane.unwrap_or_default();
        let Loss { cause, why } = loss;
        let cause = remains.lane_fault.filter(|_| cause == FenceCause::Lost).unwrap_or(cause);
        let why = if lane_state.is_empty() { why } else { format!("{why}; {lane_state}") };
        let line = format!("channel {index} over {path}: {why}");
        tracing::warn!(peer = self.peer.name(), "lost {line}");
        // What ended of memory is no lane's failure.
        let is_lanes = |fault: &FenceCause| *fault != FenceCause::SourceUnreadable;
        let lane_failed = remains.lane_fault.filter(is_lanes).map(|fault| (fault, line.clone()));
        self.peer.note_lost(line);
        let fence = OwnFence { entries, lane_failed };
        self.channels[index].set(generation, ChannelState::Fencing(fence));
        let refused = remains.refused.iter().map(|(number, why)| (*number, *why as u8)).collect();
        let message = ControlMessage::Fence {
            channel: index,
            generation,
            placed: remains.placed,
            refused,
            cause,
            // The peer knows its own words.
            reason: if cause == FenceCause::Answer { lane_state } else { why },
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
        let cause = FenceCause::NeverUp;
        self.say(ControlMessage::Fence { channel, generation, placed, refused, cause, reason }, now);
    }

    /// Ends one of our channels; [`Link::channel_lost`] follows.
    pub(super) fn drop_channel(&self, index: u16, generation: u32, why: impl Into<Loss>) {
        let command = Command::Drop { session: self.session.id(), index, generation, why: why.into() };
        self.workers[self.peer.engine_worker(index)].command(command);
    }

    pub(super) fn path_of(&self, index: u16) -> String {
        let stats = self.peer.counters(index).snapshot(index);
        stats.map_or_else(String::new, |stats| format!("{} ({} to {})", stats.nic, stats.local, stats.remote))
    }

    pub(super) fn fenced_by_peer(&mut self, index: u16, generation: u32, theirs: PeerFence, now: Duration) {
        let Some(record) = self.channels.get_mut(index) else { return };
        let is_current = record.generation == generation;
        match &mut record.state {
            ChannelState::Up { peer_fence } if is_current => {
                let why = format!("the peer lost it: {}", theirs.reason);
                *peer_fence = Some(theirs);
                return self.drop_channel(index, generation, Loss { cause: FenceCause::Answer, why });
            }
            ChannelState::Fencing(_) if is_current => {
                return self.resolve(index, theirs, now);
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
        if let Some((fault, why)) = fence.lane_failed
            && theirs.cause != FenceCause::SourceUnreadable
            && let Some(last) = self.given_up_with(index, now)
        {
            let stalled = [fault, theirs.cause].contains(&FenceCause::LaneStalled);
            let cause = if stalled { LossCause::LaneStalled } else { LossCause::LaneFailed };
            let at_peer = match theirs.reason.is_empty() {
                true => String::new(),
                false => format!("; at the peer: {}", theirs.reason),
            };
            let error = self.lost(cause, format!("{why}{at_peer}; {last}"));
            return self.part_with(error, now);
        }
        self.peer.rouse_for(u64::MAX);
    }
}
