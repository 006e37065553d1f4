//! Lost channels: closed at both ends, then each tells the other what it had placed, and the rest goes over
//! the others.

use super::{Link, Slot, Stage};
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
        self.close_generation(index, generation);
        if matches!(self.stage, Stage::Dying | Stage::Over | Stage::Leaving { .. }) {
            self.slots[usize::from(index)] = (Slot::Down { dial_at: Duration::MAX }, generation + 1);
            self.peer.drop_entries(entries.into_iter().map(|(_, entry)| entry).collect());
            return;
        }
        let path = self.path_of(index);
        // Both ends tell how far their lanes were: the errors of both have it.
        let state = remains.lane.map(|state| format!("; {state}")).unwrap_or_default();
        let why = format!("{why}{state}");
        let line = format!("channel {index} over {path}: {why}");
        tracing::warn!(peer = self.peer.name(), "lost {line}");
        let lane_failed = remains.lane_failed.then(|| line.clone());
        self.peer.note_lost(line);
        self.slots[usize::from(index)] = (Slot::Fencing, generation);
        let refused = remains.refused.iter().map(|(number, why)| (*number, *why as u8)).collect();
        let message = ControlMessage::Fence {
            channel: index,
            generation,
            placed: remains.placed,
            refused,
            reason: why,
        };
        self.say(message, now);
        let fence = self.fences.entry((index, generation)).or_default();
        (fence.ours, fence.lane_failed) = (Some(entries), lane_failed);
        self.peer.choose_home();
        // What was queued for the home before is the new one's, which may sleep.
        self.peer.home().rouse();
        self.resolve(index, generation, now);
    }

    /// A connection on which nothing was placed is over here.
    pub(in crate::control) fn fence_empty(
        &mut self,
        index: u16,
        generation: u32,
        reason: String,
        now: Duration,
    ) {
        self.close_generation(index, generation);
        self.slots[usize::from(index)] = (Slot::Fencing, generation);
        let (placed, refused) = (0, Vec::new());
        self.say(ControlMessage::Fence { channel: index, generation, placed, refused, reason }, now);
        self.fences.entry((index, generation)).or_default().ours = Some(Vec::new());
        self.resolve(index, generation, now);
    }

    /// Ends one of our channels; [`Link::channel_lost`] follows.
    pub(super) fn drop_channel(&self, index: u16, generation: u32, why: String) {
        let command = Command::Drop { session: self.session.id(), index, generation, why };
        self.workers[self.peer.engine_worker(index)].command(command);
    }

    /// No connection of this generation may come up any more.
    pub(super) fn close_generation(&mut self, index: u16, generation: u32) {
        let least = &mut self.least[usize::from(index)];
        *least = (*least).max(generation.saturating_add(1));
    }

    pub(super) fn path_of(&self, index: u16) -> String {
        let stats = self.peer.counters(index).snapshot(index);
        stats.map_or_else(String::new, |stats| format!("{} ({} to {})", stats.nic, stats.local, stats.remote))
    }

    pub(super) fn fenced_by_peer(
        &mut self,
        index: u16,
        generation: u32,
        theirs: (u64, Vec<(u64, u8)>),
        reason: &str,
        now: Duration,
    ) {
        let Some((slot, ours)) = self.slots.get(usize::from(index)).copied() else {
            return;
        };
        let fence = self.fences.entry((index, generation)).or_default();
        fence.theirs = Some(theirs);
        fence.their_reason = ferrywire_proto::handshake::clean(reason);
        let never_came = fence.ours.is_none();
        if slot == Slot::Up && ours == generation {
            let why = format!("{THE_PEER_LOST_IT}{}", ferrywire_proto::handshake::clean(reason));
            self.drop_channel(index, generation, why);
            return;
        }
        self.close_generation(index, generation);
        let under_way = matches!(slot, Slot::Announced { .. } | Slot::Expected | Slot::Dialling | Slot::Lane);
        if under_way && ours == generation {
            // What is under way comes too late: what it leads to is fenced.
            self.announced.remove(&index);
            self.lanes.drop_setup(index);
            let dial_at = now + limits::REDIAL_INTERVAL;
            self.slots[usize::from(index)] = (Slot::Down { dial_at }, generation + 1);
        }
        if never_came {
            // We never had that connection: nothing was placed from it.
            self.fences.entry((index, generation)).or_default().ours = Some(Vec::new());
            let (placed, refused, reason) = (0, Vec::new(), String::from("never came about here"));
            self.say(ControlMessage::Fence { channel: index, generation, placed, refused, reason }, now);
        }
        self.resolve(index, generation, now);
    }

    /// A lane of ours has failed: why the session ends with it, if it does.
    fn given_up_with(&mut self, index: u16, now: Duration) -> Option<String> {
        let any_is_up = self.any_is_up();
        if self.lanes.fail_for_good() {
            return (!any_is_up).then(|| "no channel is left".to_owned());
        }
        let stood = now.saturating_sub(self.up_since[usize::from(index)]);
        self.lanes.ended_in_vain(index, stood, self.peer.lanes_moved(), any_is_up)
    }

    /// Both ends have closed the connection and said what they placed: the rest travels again.
    pub(super) fn resolve(&mut self, index: u16, generation: u32, now: Duration) {
        let Some(fence) = self.fences.get_mut(&(index, generation)) else {
            return;
        };
        if fence.ours.is_none() || fence.theirs.is_none() {
            return;
        }
        let Some(fence) = self.fences.remove(&(index, generation)) else {
            return;
        };
        let (placed, refused) = fence.theirs.unwrap_or_default();
        let mut again = Vec::new();
        for (number, entry) in fence.ours.unwrap_or_default() {
            if number >= placed {
                again.push(entry);
                continue;
            }
            let refusal =
                refused.iter().find(|(each, _)| *each == number).map(|(_, why)| Refusal::parse(*why));
            self.peer.delivered(entry, refusal);
        }
        self.peer.resent.fetch_add(again.len() as u64, Ordering::Relaxed);
        let unsendable = self.peer.queue.resend(again);
        self.peer.drop_entries(unsendable);
        // What ended of the peer's memory is no lane's failure.
        if let Some(why) = fence.lane_failed
            && !fence.their_reason.contains(SENT_UNREADABLE)
            && let Some(last) = self.given_up_with(index, now)
        {
            let theirs = own_part(&fence.their_reason, &why);
            let why = format!("{why}; at the peer: {theirs}; {last}");
            return self.part_with(Error::PeerLost { peer: self.peer.name().into(), why }, now);
        }
        self.peer.rouse_for(u64::MAX);
        let slot = &mut self.slots[usize::from(index)];
        if slot.1 == generation && slot.0 == Slot::Fencing {
            // One that did not last is not dialled in a hot loop.
            let dial_at = now.max(self.up_since[usize::from(index)] + limits::REDIAL_INTERVAL);
            *slot = (Slot::Down { dial_at }, generation + 1);
        }
    }
}

/// What the peer says of a loss, less what it repeats of our own words.
fn own_part<'a>(theirs: &'a str, ours: &str) -> &'a str {
    let Some(told) = theirs.strip_prefix(THE_PEER_LOST_IT) else { return theirs };
    // Ours has the channel and its path before what the peer was told.
    let mut ends = ours.match_indices(": ").map(|(at, colon)| &ours[at + colon.len()..]);
    ends.find_map(|end| told.strip_prefix(end)).map_or(theirs, |rest| rest.trim_start_matches("; "))
}
