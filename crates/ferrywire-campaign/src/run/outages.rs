//! The outages of a link, and what they excuse: a connect that fails, and a lost peer.
//!
//! Invariant: an outage excuses no connect that begins after its end.
//! Read next: `faults.rs`, which notes outages.

use super::*;
use ferrywire::limits;

/// Total time without any path after which a peer may be lost.
pub(super) const OUTAGE_MAX: Duration = Duration::from_secs(1);

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
    /// Whether faults that have begun may have cost the link.
    pub fn may_be_lost(&self, now: Duration) -> bool {
        let begun = self.outages.iter().filter(|outage| outage.cost == Cost::Peer && outage.since <= now);
        begun.map(|outage| outage.lasts.min(OUTAGE_MAX)).sum::<Duration>() >= OUTAGE_MAX
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

    #[test]
    fn a_link_may_be_lost_once_the_faults_that_may_cost_it_have_begun() {
        let mut link = Link::new((0, 1));
        let seconds = Duration::from_secs;
        for since in [1, 5] {
            link.outages.push(Outage::new(Cost::Peer, seconds(since), OUTAGE_MAX / 2));
        }
        assert_eq!([0, 1, 4, 5].map(|now| link.may_be_lost(seconds(now))), [false, false, false, true]);
    }

    #[test]
    fn an_outage_excuses_the_connects_of_its_time() {
        let mut link = Link::new((0, 1));
        let seconds = Duration::from_secs;
        link.outages.push(Outage::new(Cost::Connect, seconds(2), seconds(1)));
        let excused = |began, now| link.may_fail_to_connect(seconds(began), seconds(now));
        assert_eq!([excused(0, 1), excused(0, 2), excused(3, 4), excused(4, 5)], [false, true, true, false]);
    }
}
