//! The links that a pass of the control thread polls: those that do not rest, and those whose peer has
//! sent something. With many peers nearly all links rest, and a heartbeat of one must not cost a poll of all
//! others.
//!
//! Invariant: a skipped link rests (see `Link::rests`) and has not been touched since. All links are
//! polled after every wake-up by another thread, which names no link, and after [`FULL_SCAN_INTERVAL`].

use ferrywire_sys::poll::{Event, WAKE_TOKEN};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::RawFd;
use std::time::Duration;

/// Longest time without a poll of a resting link: the resolution of heartbeats and silences.
pub(super) const FULL_SCAN_INTERVAL: Duration = Duration::from_millis(200);

/// The links of one endpoint, by session id.
#[derive(Debug, Default)]
pub(super) struct ReadySet {
    all: bool,
    last_full_scan: Duration,
    restless: BTreeSet<u64>,
    heard: BTreeSet<u64>,
    /// The session that each control connection's file descriptor carries.
    session_of: BTreeMap<RawFd, u64>,
}

/// The poller's token for a connection.
pub(super) fn token(fd: RawFd) -> u64 {
    u64::from(fd.unsigned_abs()) + 1
}

impl ReadySet {
    /// Notes the poller's events.
    pub fn reported(&mut self, ready: &[Event]) {
        for event in ready {
            if event.token == WAKE_TOKEN {
                self.all = true;
            } else if let Some(session) = fd_of(event.token).and_then(|fd| self.session_of.get(&fd)) {
                self.heard.insert(*session);
            }
        }
    }

    /// Notes that this link's state was changed.
    pub fn touch(&mut self, session: u64) {
        self.restless.insert(session);
    }

    /// Notes that the state of all links, or of an unknown one, was changed.
    pub fn touch_all(&mut self) {
        self.all = true;
    }

    /// Takes the links to poll now; `None` for all.
    pub fn take(&mut self, now: Duration) -> Option<BTreeSet<u64>> {
        let heard = std::mem::take(&mut self.heard);
        if std::mem::take(&mut self.all) || now >= self.last_full_scan + FULL_SCAN_INTERVAL {
            self.last_full_scan = now;
            return None;
        }
        Some(&heard | &self.restless)
    }

    /// Notes that a link was polled, and the file descriptor of its connection, if it has one.
    pub fn note_polled(&mut self, session: u64, rests: bool, fd: Option<RawFd>) {
        if rests {
            self.restless.remove(&session)
        } else {
            self.restless.insert(session)
        };
        if let Some(fd) = fd {
            self.session_of.insert(fd, session);
        }
    }

    /// Removes a link that is over.
    pub fn forget(&mut self, session: u64) {
        self.restless.remove(&session);
        self.heard.remove(&session);
        self.session_of.retain(|_, mine| *mine != session);
    }

    /// The links that do not rest.
    pub fn restless(&self) -> impl Iterator<Item = u64> + '_ {
        self.restless.iter().copied()
    }

    /// Time until all links are polled.
    pub fn until_all(&self, now: Duration) -> Duration {
        (self.last_full_scan + FULL_SCAN_INTERVAL).saturating_sub(now)
    }
}

fn fd_of(token: u64) -> Option<RawFd> {
    RawFd::try_from(token.checked_sub(1)?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(7);

    fn said(token: u64) -> Event {
        Event { token, readable: true, writable: false, error: false, hangup: false }
    }

    /// Sessions 1 to 3 on descriptors 11 to 13, all at rest and just polled.
    fn three_at_rest() -> ReadySet {
        let mut ready_set = ReadySet::default();
        assert_eq!(ready_set.take(NOW), None, "no link has been polled");
        for session in 1..=3 {
            ready_set.note_polled(session, true, Some(10 + session as RawFd));
        }
        ready_set
    }

    #[test]
    fn a_link_whose_peer_speaks_is_polled_alone_and_once() {
        let mut ready_set = three_at_rest();
        assert_eq!(ready_set.take(NOW), Some(BTreeSet::new()));
        ready_set.reported(&[said(token(12)), said(0), said(token(99))]);
        assert_eq!(ready_set.take(NOW), Some(BTreeSet::from([2])));
        assert_eq!(ready_set.take(NOW), Some(BTreeSet::new()));
    }

    #[test]
    fn a_restless_link_is_polled_until_it_rests() {
        let mut ready_set = three_at_rest();
        ready_set.touch(3);
        ready_set.note_polled(1, false, Some(11));
        assert_eq!(ready_set.take(NOW), Some(BTreeSet::from([1, 3])));
        ready_set.note_polled(1, true, Some(11));
        ready_set.note_polled(3, false, None);
        assert_eq!(ready_set.take(NOW), Some(BTreeSet::from([3])));
        ready_set.forget(3);
        ready_set.reported(&[said(token(13))]);
        assert_eq!(ready_set.take(NOW), Some(BTreeSet::new()));
    }

    #[test]
    fn all_are_polled_after_a_wake_and_after_a_while() {
        let mut ready_set = three_at_rest();
        ready_set.reported(&[said(WAKE_TOKEN)]);
        assert_eq!(ready_set.take(NOW), None);
        ready_set.touch_all();
        assert_eq!(ready_set.take(NOW), None);
        assert_eq!(ready_set.until_all(NOW), FULL_SCAN_INTERVAL);
        assert_eq!(ready_set.take(NOW + FULL_SCAN_INTERVAL / 2), Some(BTreeSet::new()));
        assert_eq!(ready_set.take(NOW + FULL_SCAN_INTERVAL), None);
    }

    /// The number of a closed descriptor is reused for a resumed session, and for another session.
    #[test]
    fn a_descriptor_is_the_session_s_that_had_it_last() {
        let mut ready_set = three_at_rest();
        ready_set.note_polled(1, true, Some(12));
        ready_set.reported(&[said(token(12))]);
        assert_eq!(ready_set.take(NOW), Some(BTreeSet::from([1])));
    }
}
