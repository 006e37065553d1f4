//! Lost channels: both ends close the connection and report what they had placed; the rest is resent over
//! other channels.
//!
//! A loss is reported by `lose` in `core/worker/engine.rs`, through `LostChannels` and
//! `Control::take_lost_channels`.
//! Invariant: a frame counts as placed when it is whole, and frames go back into the outbox only when both ends have
//! closed the connection. So no frame is counted twice. A frame that was not counted may have been written in part; it
//! is resent to the same bytes, which nothing else writes by then.
//! Read next: `../../core/queue.rs` (`resend`).

use super::channels::{ChannelState, OwnFence, PeerFence};
use super::{Link, Role};
use crate::core::channel::{Remains, delivered};
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
        let lasted = now.saturating_sub(record.up_since);
        let state = record.take();
        debug_assert!(state.is_up(), "a channel was lost that no worker had");
        if dying {
            // These frames' operations fail with the session. If they failed now, refusals would be sent over other
            // channels, and could arrive before the reason why the session ends.
            record.set(generation, ChannelState::Fencing(OwnFence { entries, ..OwnFence::default() }));
            if let ChannelState::Up { peer_fence: Some(theirs) } = state {
                self.resolve(index, theirs, now);
            }
            return;
        }
        if let Role::Connector(connector) = &mut self.role {
            connector.detours.channel_lost(lasted, now);
        }
        let path = self.path_of(index);
        // Each end adds the state of its lane, so that the errors of both ends contain both states.
        let lane_state = remains.lane.unwrap_or_default();
        let Loss { cause, why } = loss;
        let cause = remains.lane_fault.filter(|_| cause == FenceCause::Lost).unwrap_or(cause);
        let why = if lane_state.is_empty() { why } else { format!("{why}; {lane_state}") };
        let line = format!("channel {index} over {path}: {why}");
        tracing::warn!(peer = self.peer.name(), "lost {line}");
        // An unreadable source is not a failure of the lane.
        let is_lanes = |fault: &FenceCause| *fault != FenceCause::SourceUnreadable;
        let lane_failed = remains.lane_fault.filter(is_lanes).map(|fault| (fault, line.clone()));
        self.peer.history.note_lost(line);
        let fence = OwnFence { entries, lane_failed, never_up: false };
        self.channels[index].set(generation, ChannelState::Fencing(fence));
        let refused = remains.refused.iter().map(|(number, why)| (*number, *why as u8)).collect();
        let message = ControlMessage::Fence {
            channel: index,
            generation,
            placed: remains.placed,
            refused,
            cause,
            // The peer already knows the reason that it gave itself.
            reason: if cause == FenceCause::Answer { lane_state } else { why },
        };
        self.say(message, now);
        self.peer.choose_home();
        // The frames queued for the old home worker now belong to the new one, which may sleep.
        self.peer.home().rouse();
        if let ChannelState::Up { peer_fence: Some(theirs) } = state {
            self.resolve(index, theirs, now);
        }
    }

    /// Fences a connection on which nothing was placed.
    pub(in crate::control) fn fence_empty(
        &mut self,
        index: u16,
        generation: u32,
        reason: String,
        now: Duration,
    ) {
        self.channels[index].close_generation(generation);
        let fence = OwnFence { never_up: true, ..OwnFence::default() };
        self.channels[index].set(generation, ChannelState::Fencing(fence));
        self.say_nothing_placed(index, generation, reason, now);
    }

    fn say_nothing_placed(&mut self, channel: u16, generation: u32, reason: String, now: Duration) {
        let (placed, refused) = (0, Vec::new());
        let cause = FenceCause::NeverUp;
        self.say(ControlMessage::Fence { channel, generation, placed, refused, cause, reason }, now);
    }

    /// Asks the worker to end a channel; [`Link::channel_lost`] follows.
    pub(super) fn drop_channel(&self, index: u16, generation: u32, why: impl Into<Loss>) {
        let command = Command::Drop { session: self.session.id(), index, generation, why: why.into() };
        self.workers[self.peer.engine_worker(index)].command(command);
    }

    pub(super) fn path_of(&self, index: u16) -> String {
        let stats = self.peer.counters(index).snapshot(index);
        stats.map_or_else(String::new, |stats| format!("{} ({} to {})", stats.nic, stats.local, stats.remote))
    }

    pub(super) fn fenced_by_peer(&mut self, index: u16, generation: u32, theirs: PeerFence, now: Duration) {
        let any_is_up = self.any_is_up();
        let Some(record) = self.channels.get_mut(index) else { return };
        let is_current = record.generation == generation;
        match &mut record.state {
            ChannelState::Up { peer_fence } if is_current => {
                let why = format!("the peer lost the connection: {}", theirs.reason);
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
            // The connection that is being set up is fenced already.
            match record.state {
                ChannelState::Lane => record.lane_not_set_up(generation, any_is_up, now),
                _ => record.go_down(generation, now + limits::REDIAL_INTERVAL),
            }
            self.lanes.drop_setup(index);
        }
        // This end never had that connection, so nothing was sent or placed over it.
        self.say_nothing_placed(index, generation, "the connection never existed at this end".into(), now);
        self.peer.rouse_for(u64::MAX);
    }

    /// Handles a failed lane. Returns the reason if the session ends with it.
    fn given_up_with(&mut self, index: u16, now: Duration) -> Option<String> {
        let any_is_up = self.any_is_up();
        if self.lanes.fail_for_good() {
            return (!any_is_up).then(|| "no channel is left".to_owned());
        }
        let stood = now.saturating_sub(self.channels[index].up_since);
        self.lanes.ended_in_vain(index, stood, self.peer.lanes_moved(), any_is_up)
    }

    /// Completes a fence: both ends have closed the connection and reported what they placed. The rest is
    /// resent, or left to the end of a session that ends.
    fn resolve(&mut self, index: u16, theirs: PeerFence, now: Duration) {
        let (dying, any_is_up) = (self.dying(), self.any_is_up());
        let record = &mut self.channels[index];
        let ChannelState::Fencing(fence) = record.take() else { return };
        let generation = record.generation;
        // Wait before redialling, so that a connection that never lasts is not redialled in a loop.
        if fence.never_up {
            record.lane_not_set_up(generation, any_is_up, now);
        } else {
            record.go_down(generation, now.max(record.up_since + limits::REDIAL_INTERVAL));
        }
        let mut again = Vec::new();
        for (number, mut entry) in fence.entries {
            if number >= theirs.placed {
                again.push((number, entry));
                continue;
            }
            let refusal =
                theirs.refused.iter().find(|(each, _)| *each == number).map(|(_, why)| Refusal::parse(*why));
            delivered(&self.peer, &mut entry, refusal);
        }
        if dying {
            let rest = OwnFence { entries: again, ..OwnFence::default() };
            return self.channels[index].set(generation, ChannelState::Fencing(rest));
        }
        self.peer.history.fences.fetch_add(1, Ordering::Relaxed);
        self.peer.history.resent.fetch_add(again.len() as u64, Ordering::Relaxed);
        let unsendable = self.peer.queue.resend(again.into_iter().map(|(_, entry)| entry).collect());
        self.peer.drop_entries(unsendable);
        // A failure caused by the peer's source memory is not the lane's.
        if let Some((fault, why)) = fence.lane_failed
            && theirs.cause != FenceCause::SourceUnreadable
            && let Some(last) = self.given_up_with(index, now)
        {
            let stalled = [fault, theirs.cause].contains(&FenceCause::LaneStalled);
            let cause = if stalled { LossCause::LaneStalled } else { LossCause::LaneFailed };
            let at_peer = if theirs.reason.is_empty() {
                String::new()
            } else {
                format!("; at the peer: {}", theirs.reason)
            };
            let error = self.lost(cause, format!("{why}{at_peer}; {last}"));
            return self.end_with_error(error, now);
        }
        self.peer.rouse_for(u64::MAX);
    }
}
