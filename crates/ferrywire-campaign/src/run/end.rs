//! The end of a run: faults end, operations end, peers are closed, and nothing is left.
//!
//! Invariant: after `check_nothing_left` no endpoint, region or reference of the run exists.
//! Read next: `judge.rs`, which outcomes are allowed.

use super::outages::NOTICED_MAX;
use super::*;
use crate::judge::is_gone;
use ferrywire::{limits, metrics};

/// Numbers of the messages at the end of a run, behind those of all steps, and their tag.
const PROBES_FROM: OpId = 1 << 20;
const PROBE_TAG: u64 = 10;

impl Run<'_> {
    /// Ends all faults, and waits until all operations that can end have ended.
    pub(super) fn settle(&mut self) -> Check {
        note!(self, "all faults end");
        self.driver.end_faults();
        let now = self.driver.now();
        self.end_outages();
        let has_begun = |since: &Duration| *since <= now;
        self.hosts.iter_mut().for_each(|host| host.gpu_faulty = host.gpu_faulty.filter(has_begun));
        let net = self.driver.net.clone();
        net.set_faults(Faults::default());
        net.allow_dials();
        for host in &self.hosts {
            for nic in host.nics.iter().filter(|nic| !self.driver.is_deleted(**nic)) {
                net.heal(*nic);
                net.set_bandwidth(*nic, None);
                net.set_nic_latency(*nic, Duration::ZERO);
            }
        }
        self.links.iter_mut().for_each(|link| link.reading = [true; 2]);
        if !self.until(SETTLE_MAX, |run| run.is_settled())? {
            let open: Vec<String> =
                self.open().map(|op| format!("{:?}: {:?}", op.post, op.transfer)).collect();
            let links: Vec<_> =
                self.links.iter().map(|link| format!("{:?} {:?}", link.plan, link.peers)).collect();
            return broken("every operation ends", format!("{open:?} over {links:?}"));
        }
        self.pass_time(Duration::from_millis(300))?;
        self.check_areas(true)?;
        self.check_messages()?;
        self.check_notifications()?;
        let left: Vec<OpId> = self.open().map(|op| op.post.id).collect();
        left.iter().for_each(|op| self.cancel(*op));
        if !self.until(END_MAX, |run| run.open().next().is_none())? {
            let open: Vec<String> =
                self.open().map(|op| format!("{:?}: {:?}", op.post, op.transfer)).collect();
            return broken("a cancelled operation ends", open.join(", "));
        }
        let late = self.ops.iter().filter(|op| self.may_still_land(op)).flat_map(|op| op.targets.clone());
        let late: Vec<usize> = late.collect();
        self.freeze_areas((0..self.areas.len()).filter(|area| !late.contains(area)))?;
        if !late.is_empty() {
            let longest = self.scenario.ends.iter().map(|end| end.peer_timeout_ms).max().unwrap_or(0);
            self.pass_time(Duration::from_millis(longest) + NOTICED_MAX)?;
            self.freeze_areas(late.into_iter())?;
        }
        self.pass_time(Duration::from_millis(300))?;
        self.check_areas(true)?;
        self.check_credit()?;
        self.check_counters()
    }

    fn freeze_areas(&mut self, areas: impl Iterator<Item = usize>) -> Check {
        for index in areas {
            if let Err(why) = self.areas[index].freeze() {
                return broken("no byte is written late, or outside", why);
            }
        }
        Ok(())
    }

    /// Whether bytes of a write whose peer was lost may still land: the peer's end is closing, so that nobody sees whether it
    /// has noticed the loss.
    fn may_still_land(&self, op: &Op) -> bool {
        let far_is_closing = self.links[op.post.link].closing[1 - op.post.side];
        op.post.verb == Verb::Write
            && far_is_closing
            && matches!(&op.outcome, Some(Err(error)) if is_gone(error))
    }

    /// A short message needs no receive while its peer has room for it. It does if credit for messages is not returned.
    fn check_credit(&mut self) -> Check {
        let mut probes = Vec::new();
        for (link, side) in (0..self.links.len()).flat_map(|link| [(link, 0), (link, 1)]) {
            if !self.is_well(link) || !self.has_credit(link, side) {
                continue;
            }
            let id = PROBES_FROM + 2 * link + side;
            self.post(&Post::plain(id, link, side, Verb::Send { tag: PROBE_TAG }, limits::EAGER_BYTES_MAX))?;
            probes.extend(self.find(id));
        }
        // A link whose dials were unanswered waits for up to `REDIAL_INTERVAL_MAX` before the next one.
        if !self.until(END_MAX, |run| probes.iter().all(|probe| run.ops[*probe].outcome.is_some()))? {
            let open = probes.iter().map(|probe| &self.ops[*probe]).filter(|op| op.outcome.is_none());
            let open: Vec<String> = open.map(|op| format!("{:?}: {:?}", op.post, op.transfer)).collect();
            return broken("credit for short messages comes back", open.join(", "));
        }
        Ok(())
    }

    /// Whether the peer has room for one more message, of those that were sent without a receive. It returns credit in quarters.
    fn has_credit(&self, link: usize, side: usize) -> bool {
        let cost = |bytes: usize| bytes + limits::EAGER_OVERHEAD_BYTES;
        let held = self.ops.iter().filter(|op| {
            (op.post.link, op.post.side) == (link, side)
                && matches!(op.post.verb, Verb::Send { .. })
                && op.post.bytes <= limits::EAGER_BYTES_MAX
                && op.met.is_none()
        });
        let held: usize = held.map(|op| cost(op.post.bytes)).sum();
        held + limits::EAGER_CREDIT_BYTES / 4 + cost(limits::EAGER_BYTES_MAX) <= limits::EAGER_CREDIT_BYTES
    }

    /// What has begun has ended, and nothing is in flight. An answer may wait for its acknowledgement until a dead path is noticed.
    fn check_counters(&mut self) -> Check {
        let until = self.driver.now() + END_MAX;
        while let Err(left) = self.counters_are_even() {
            if self.driver.now() >= until {
                return Err(left);
            }
            self.pass_time(Duration::from_millis(200))?;
        }
        Ok(())
    }

    fn counters_are_even(&self) -> Check {
        let ends = self.hosts.iter().filter_map(|host| self.driver.endpoint(host.slot?));
        let identities: Vec<String> = ends.map(|end| end.identity().to_string()).collect();
        let peers = metrics::process().peers;
        for peer in peers.iter().filter(|peer| identities.contains(&peer.endpoint)) {
            let begun = |kind: &&metrics::KindSample| kind.started != kind.completed + kind.failed;
            if let Some(kind) = peer.operations.iter().find(begun) {
                let what = format!("{kind:?} with {}", peer.peer);
                return broken("each operation that was counted has ended", what);
            }
            let busy = |channel: &&metrics::ChannelSample| channel.alive && channel.in_flight_bytes > 0;
            if let Some(channel) = peer.channels.iter().find(busy) {
                let what = format!("{channel:?} to {}", peer.peer);
                return broken("nothing is in flight at the end", what);
            }
        }
        Ok(())
    }

    /// Operations of running processes that have not ended.
    pub(super) fn open(&self) -> impl Iterator<Item = &Op> {
        self.ops.iter().filter(|op| {
            let slot = self.links[op.post.link].slots[op.post.side];
            op.outcome.is_none() && self.driver.endpoint(slot).is_some()
        })
    }

    /// Whether the only open operations are messages whose other end is not posted.
    pub(super) fn is_settled(&self) -> bool {
        let connecting = self.links.iter().any(|link| link.connecting.is_some());
        !connecting && self.open().all(|op| self.waits_for_partner(op))
    }

    pub(super) fn waits_for_partner(&self, op: &Op) -> bool {
        // One that was received waits for its acknowledgement alone.
        if op.met.is_some() {
            return false;
        }
        let partner = match op.post.verb {
            Verb::Send { tag } => Verb::Recv { tag },
            Verb::Recv { tag } => Verb::Send { tag },
            // A notification is sent after the messages that were posted before it.
            Verb::Notify => {
                let same = |other: &&Op| (other.post.link, other.post.side) == (op.post.link, op.post.side);
                let before = self.ops.iter().take_while(|other| other.post.id != op.post.id).filter(same);
                let mut waiting = before.filter(|other| other.outcome.is_none());
                return waiting.any(|other| {
                    matches!(other.post.verb, Verb::Send { .. }) && self.waits_for_partner(other)
                });
            }
            _ => return false,
        };
        let (link, side) = (op.post.link, op.post.side);
        let dead = self.links[link].slots.iter().any(|slot| self.driver.endpoint(*slot).is_none());
        !dead
            && !self.is_over(link)
            && self.links[link].closing == [false; 2]
            && !self
                .open()
                .any(|other| (other.post.link, other.post.side, other.post.verb) == (link, 1 - side, partner))
    }

    /// Closes all peers and endpoints, and checks that nothing is left.
    pub(super) fn close(&mut self) -> Check {
        note!(self, "everything is closed");
        for index in (0..self.areas.len()).step_by(2) {
            let area = &self.areas[index];
            let slot = area.slot;
            if self.driver.endpoint(slot).is_none() || area.taken {
                continue;
            }
            let Some(region) = area.region.clone() else { continue };
            if let Err(error) = self.wait_in(slot, || region.deregister())? {
                return broken("memory without operations is deregistered", error.to_string());
            }
            let area = &mut self.areas[index];
            if area.owner.take().is_some_and(|owner| owner.strong_count() > 0) {
                return broken("the owner of memory goes with its region", format!("area {index}"));
            }
            area.poison();
        }
        self.ops.iter_mut().for_each(|op| op.transfer = None);
        self.links.iter_mut().for_each(|link| {
            link.connecting = None;
            link.peers = [None, None];
        });
        let slots: Vec<usize> = self.hosts.iter().filter_map(|host| host.slot).collect();
        let ends: Vec<Endpoint> = slots.iter().filter_map(|slot| self.driver.endpoint(*slot)).collect();
        if !self.until(END_MAX, |_| ends.iter().all(|end| end.peer_count() == 0))? {
            let counts: Vec<usize> = ends.iter().map(Endpoint::peer_count).collect();
            return broken("no peer is left", format!("{counts:?}"));
        }
        self.check_areas(true)?;
        drop(ends);
        for slot in slots {
            let endpoint = self.driver.take(slot);
            self.wait_in(slot, || drop(endpoint))?;
        }
        for (slot, endpoint) in std::mem::take(&mut self.killed) {
            self.wait_in(slot, || drop(endpoint))?;
        }
        self.check_areas(true)?;
        let owners: Vec<Weak<()>> = self.areas.iter().filter_map(|area| area.owner.clone()).collect();
        self.areas.clear();
        let kept = owners.iter().filter(|owner| owner.strong_count() > 0).count();
        if kept > 0 {
            return broken(
                "the owner of memory goes with its region",
                format!("{kept} of {} are left", owners.len()),
            );
        }
        self.check_nothing_left()
    }

    pub(super) fn check_nothing_left(&mut self) -> Check {
        let mut held = usize::MAX;
        // Another process may read this one's counters, and then keeps references to the peers meanwhile.
        for _ in 0..HELD_LOOKS {
            held = self.transports.iter().filter(|transport| transport.strong_count() > 0).count();
            if held == 0 {
                break;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        if held > 0 {
            return broken(
                "an endpoint leaves nothing behind",
                format!("{held} endpoints are not freed after they were dropped"),
            );
        }
        let open = self.driver.net.connections();
        if !open.is_empty() {
            return broken("an endpoint leaves nothing behind", format!("connections: {open:?}"));
        }
        Ok(())
    }
}
