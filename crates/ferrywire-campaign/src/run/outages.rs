//! The outages of a link, and what they excuse: a connect that fails, and a lost peer.
//!
//! Invariant: an outage excuses no connect that begins after its end, and no peer that works longer after it than an end needs to
//! notice a loss.
//! Read next: `faults.rs`, which notes outages.

use super::*;
use ferrywire::limits;

/// Total time without any path after which a peer may be lost.
pub(super) const OUTAGE_MAX: Duration = Duration::from_secs(1);
/// Time after its peer timeout in which an end notices that its peer is gone.
pub(super) const NOTICED_MAX: Duration = Duration::from_secs(5);

/// A time in which a fault may cost a link what [`Cost`] says.
pub(super) struct Outage {
    pub since: Duration,
    pub lasts: Duration,
    pub cost: Cost,
}

/// What an outage may cost.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Cost {
    /// A connect in progress: one of several NICs is cut, or connections are lost.
    Connect,
    /// Also the peer: no path may be left.
    Peer,
}

impl Outage {
    pub fn new(cost: Cost, since: Duration, lasts: Duration) -> Outage {
        Outage { since, lasts, cost }
    }

    /// Whether the outage was in force at some time from `from` to `now`.
    fn overlaps(&self, from: Duration, now: Duration) -> bool {
        self.since <= now && self.since.saturating_add(self.lasts) >= from
    }
}

impl Link {
    /// Whether faults may have cost the link that the end `side` saw working last.
    pub fn may_be_lost(&self, side: usize, now: Duration) -> bool {
        let from = self.well_at[side].saturating_sub(self.peer_timeout + NOTICED_MAX);
        let costs = |outage: &&Outage| outage.cost == Cost::Peer && outage.overlaps(from, now);
        let lasted = self.outages.iter().filter(costs).map(|outage| outage.lasts.min(OUTAGE_MAX));
        lasted.sum::<Duration>() >= OUTAGE_MAX
    }

    /// Whether the loss of the peer at this end has a reason. When one end has lost its peer, the other end loses its own too.
    pub fn loss_is_excused(&self, side: usize, now: Duration) -> bool {
        let has_ended = self.closing != [false; 2] || self.failed.is_some();
        has_ended || self.is_lost || self.may_be_lost(side, now)
    }

    /// Whether a fault may have failed a connect that began at `began`.
    pub fn may_fail_to_connect(&self, began: Duration, now: Duration) -> bool {
        self.outages.iter().any(|outage| outage.overlaps(began, now))
    }
}

impl Run<'_> {
    /// Notes an outage of the links of an endpoint, or of all.
    pub(super) fn outage(&mut self, cost: Cost, end: Option<usize>, since: Duration, lasts: Duration) {
        let of = |link: &&mut Link| end.is_none_or(|end| link.plan.0 == end || link.plan.1 == end);
        let outages = self.links.iter_mut().filter(of).map(|link| &mut link.outages);
        outages.for_each(|outages| outages.push(Outage::new(cost, since, lasts)));
    }

    /// Ends all outages, because all faults end. What is lost at once, as by a kill, stays an outage.
    pub(super) fn end_outages(&mut self) {
        let now = self.driver.now();
        for link in &mut self.links {
            link.outages.retain(|outage| outage.since <= now);
            for outage in &mut link.outages {
                outage.lasts = outage.lasts.min(OUTAGE_MAX.max(now - outage.since));
            }
        }
    }

    /// Checks that each peer which was lost since the last check was lost for a reason.
    pub(super) fn look_for_losses(&mut self) -> Check {
        let now = self.driver.now();
        for (index, side) in (0..self.links.len()).flat_map(|link| [(link, 0), (link, 1)]) {
            let Some(peer) = &self.links[index].peers[side] else { continue };
            if self.links[index].is_lost || !self.is_alive(index, side) {
                continue;
            }
            match peer.error() {
                None => self.links[index].well_at[side] = now,
                Some(_) if self.links[index].loss_is_excused(side, now) => self.links[index].is_lost = true,
                Some(error) => {
                    let plan = self.links[index].plan;
                    let what = format!("link {index}, {plan:?}, at side {side}: {error:?}");
                    return broken("a peer is lost only for a reason", what);
                }
            }
        }
        Ok(())
    }

    /// Notes an outage for the dials that a fault has failed since the last check. A dial without an answer is waited for.
    pub(super) fn note_failed_dials(&mut self) {
        let (since, now) = (std::mem::replace(&mut self.looked_at, self.driver.now()), self.driver.now());
        if !self.fails_dials {
            return;
        }
        for end in 0..self.hosts.len() {
            for nic in 0..self.hosts[end].nics.len() {
                let failed = self.driver.net.failed_dials(self.hosts[end].nics[nic]);
                if std::mem::replace(&mut self.hosts[end].failed_dials[nic], failed) != failed {
                    self.outage(Cost::Peer, Some(end), since, now - since + limits::HANDSHAKE_TIMEOUT);
                }
            }
        }
    }

    /// Whether the endpoint in this slot was closed by its user, or its process was killed.
    pub(super) fn has_ended(&self, slot: usize) -> bool {
        let host = self.hosts.iter().find(|host| host.slot == Some(slot));
        host.is_none_or(|host| host.closed)
    }

    /// Checks that a connect which failed has a reason. A wait with a timeout may end at its timeout.
    pub(super) fn connect_failed(&mut self, index: usize, error: &ConnectError, has_timeout: bool) -> Check {
        note!(self, "link {index}: {error}");
        let link = &mut self.links[index];
        link.failed = Some(error.to_string());
        let link = &self.links[index];
        let is_timeout = has_timeout && matches!(error, ConnectError::Stalled { .. });
        let is_closed = link.closing != [false; 2] || link.slots.iter().any(|slot| self.has_ended(*slot));
        let now = self.driver.now();
        if is_timeout || is_closed || link.may_fail_to_connect(link.began, now) {
            return Ok(());
        }
        broken("a connect fails only for a reason", format!("link {index}, {:?}: {error:?}", link.plan))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// A link whose ends need 15 s to notice a loss, with these outages.
    fn link(outages: impl IntoIterator<Item = (u64, Duration)>) -> Link {
        let mut link = Link::new((0, 1));
        link.peer_timeout = seconds(10);
        let outages = outages.into_iter();
        link.outages = outages.map(|(since, lasts)| Outage::new(Cost::Peer, seconds(since), lasts)).collect();
        link
    }

    #[test]
    fn a_link_may_be_lost_once_the_faults_that_may_cost_it_have_begun() {
        let link = link([(1, OUTAGE_MAX / 2), (5, OUTAGE_MAX / 2)]);
        assert_eq!([0, 1, 4, 5].map(|now| link.may_be_lost(0, seconds(now))), [false, false, false, true]);
    }

    /// Regression: such outages excused every later loss.
    #[test]
    fn a_link_that_works_after_an_outage_may_not_be_lost_for_it() {
        let mut link = link([(1, OUTAGE_MAX), (2, seconds(4)), (3, OUTAGE_MAX / 2)]);
        let now = seconds(100);
        let may_be_lost = |well_at: u64| {
            link.well_at = [seconds(well_at), now];
            [0, 1].map(|side| link.may_be_lost(side, now))
        };
        assert_eq!([20, 21, 22, 99].map(may_be_lost), [[true, false], [true, false], [false; 2], [false; 2]]);
    }

    #[test]
    fn both_ends_lose_a_link_that_was_lost_for_a_reason() {
        let mut link = link([]);
        assert!(!link.loss_is_excused(1, seconds(1)));
        link.is_lost = true;
        assert!(link.loss_is_excused(1, seconds(1)));
    }

    #[test]
    fn an_outage_excuses_the_connects_of_its_time() {
        let mut link = link([]);
        link.outages.push(Outage::new(Cost::Connect, seconds(2), seconds(1)));
        let excused = |began, now| link.may_fail_to_connect(seconds(began), seconds(now));
        assert_eq!([excused(0, 1), excused(0, 2), excused(3, 4), excused(4, 5)], [false, true, true, false]);
    }
}
