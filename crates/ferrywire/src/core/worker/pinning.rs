//! Pins a worker's thread to a core while that saves CPU time.
//!
//! Only where the endpoint has one worker per core. With few cores the thread is pinned for good. With many, the rule is
//! `schedule::pins`, for transfers within this host: if both ends have as many workers and the same cores, the two threads
//! of a channel are on the same one. Workers with lanes are pinned once every worker has some: a plugin's threads inherit
//! the affinity of the thread that starts them.
//!
//! Invariant: a thread pins only itself. Other cores that a user gives it are left to it.
//! Read next: proto `schedule.rs`, the rule.

use super::engine::ProgressEngine;
use super::{PolledBy, Worker};
use crate::core::context::Context;
use ferrywire_proto::schedule::{self, Traffic};
use ferrywire_sys::affinity;
use std::mem;
use std::time::Duration;

/// Where the thread of a worker may run.
#[derive(Default)]
pub(super) struct Pinning {
    /// When it was last decided.
    decided: Option<Duration>,
    /// Whether no more is to be decided.
    is_final: bool,
    pinned: Option<Pinned>,
}

struct Pinned {
    /// The core, as an index of `cores`.
    index: usize,
    /// The cores that the thread may use when it is not pinned.
    cores: Vec<usize>,
}

impl Pinning {
    pub fn is_pinned(&self) -> bool {
        self.pinned.is_some()
    }

    /// Pins the current thread for good, if each of `workers` threads has a core.
    pub fn pin_for_good(&mut self, index: usize, workers: usize) {
        self.is_final = true;
        self.pin(index, workers);
    }

    /// Pins the current thread to the core with this index of those that it may use, if each of `workers` threads has one.
    fn pin(&mut self, index: usize, workers: usize) {
        let index = index % workers;
        if self.pinned.as_ref().is_some_and(|pinned| pinned.index == index) {
            return;
        }
        self.unpin();
        let cores = affinity::allowed_cores().unwrap_or_default();
        if cores.len() != workers {
            return;
        }
        match affinity::keep_current_thread_to(&[cores[index]]) {
            Ok(()) => self.pinned = Some(Pinned { index, cores }),
            Err(error) => tracing::debug!(%error, core = cores[index], "cannot pin a progress thread"),
        }
    }

    /// Lets the current thread use all its cores again.
    fn unpin(&mut self) {
        let Some(Pinned { index, cores }) = self.pinned.take() else { return };
        let is_ours = affinity::allowed_cores().is_ok_and(|now| now == [cores[index]]);
        if is_ours && let Err(error) = affinity::keep_current_thread_to(&cores) {
            tracing::debug!(%error, "cannot give a progress thread its cores back");
        }
    }
}

impl ProgressEngine {
    /// Pins the current thread, the worker's own, or not, by what its channels have moved since the last time.
    pub(super) fn pin_or_unpin(&mut self, worker: &Worker, context: &Context) {
        let (now, pinning) = (self.now, &mut self.pinning);
        let time = pinning.decided.map(|decided| now.saturating_sub(decided));
        if pinning.is_final || time.is_some_and(|time| time < schedule::PIN_INTERVAL) {
            return;
        }
        pinning.decided = Some(now);
        let workers = context.sleepers.len();
        if worker.polled_by != PolledBy::Thread && schedule::always_pins(workers) {
            return pinning.pin_for_good(worker.index, workers);
        }
        let recent = self.slots.iter_mut().flatten().map(|slot| {
            let moved = slot.channel.traffic();
            let peer = &slot.channel.peer.info;
            let index = peer.same_host.then(|| worker.index.wrapping_add(peer.core_offset) % workers);
            (moved.since(mem::replace(&mut slot.moved, moved)), index)
        });
        let current = pinning.pinned.as_ref().map(|pinned| pinned.index);
        match core_for(recent, current, time.unwrap_or_default()) {
            Some(index) if worker.polled_by != PolledBy::Thread && !worker.sleeper().has_lanes() => {
                pinning.pin(index, workers);
            }
            _ => pinning.unpin(),
        }
    }
}

/// The core to pin a thread to, given what each of its channels has moved in `time`, and the core that it would share with
/// the channel's other end if that is on this host.
fn core_for(
    recent: impl Iterator<Item = (Traffic, Option<usize>)>,
    current: Option<usize>,
    time: Duration,
) -> Option<usize> {
    let (mut here, mut elsewhere) = (Traffic::default(), 0);
    let mut bytes_by_core: Vec<(usize, u64)> = Vec::new();
    for (traffic, core) in recent {
        let Some(core) = core else {
            elsewhere += traffic.bytes();
            continue;
        };
        here = here.plus(traffic);
        match bytes_by_core.iter_mut().find(|(other, _)| *other == core) {
            Some((_, bytes)) => *bytes += traffic.bytes(),
            None => bytes_by_core.push((core, traffic.bytes())),
        }
    }
    if here.bytes() < elsewhere || !schedule::pins(here, time) {
        return None;
    }
    let (busiest, most) = bytes_by_core.iter().copied().max_by_key(|(_, bytes)| *bytes)?;
    // Among cores with about as much, a change would only cost.
    let stays = |core: &usize| bytes_by_core.iter().any(|(other, bytes)| other == core && 2 * bytes >= most);
    Some(current.filter(stays).unwrap_or(busiest))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Bulk of 1 MiB frames that a channel sends.
    fn bulk(mebibytes: u64) -> Traffic {
        Traffic { sent_bytes: mebibytes << 20, sent_frames: mebibytes, ..Traffic::default() }
    }

    #[test]
    fn a_thread_joins_the_busiest_peer_of_this_host_and_stays() {
        let choose =
            |recent: &[(Traffic, Option<usize>)], current| core_for(recent.iter().copied(), current, SECOND);
        assert_eq!(choose(&[(bulk(300), Some(3)), (bulk(500), Some(5))], None), Some(5));
        assert_eq!(choose(&[(bulk(300), Some(3)), (bulk(500), Some(5))], Some(3)), Some(3));
        assert_eq!(choose(&[(bulk(200), Some(3)), (bulk(500), Some(5))], Some(3)), Some(5));
        assert_eq!(
            choose(&[(bulk(200), Some(3)), (bulk(200), Some(3)), (bulk(500), Some(5))], Some(3)),
            Some(3)
        );
        assert_eq!(choose(&[], Some(3)), None);
    }

    #[test]
    fn other_hosts_pin_no_thread() {
        let choose = |recent: &[(Traffic, Option<usize>)]| core_for(recent.iter().copied(), None, SECOND);
        assert_eq!(choose(&[(bulk(500), None)]), None);
        assert_eq!(choose(&[(bulk(300), Some(3)), (bulk(200), None), (bulk(200), None)]), None);
        assert_eq!(choose(&[(bulk(300), Some(3)), (bulk(200), None)]), Some(3));
        assert_eq!(choose(&[(bulk(50), Some(3)), (bulk(49), None)]), None, "too little here");
    }

    #[test]
    fn a_thread_gets_its_cores_back_unless_a_user_has_given_it_others() {
        let all = affinity::allowed_cores().unwrap();
        let work = move || {
            let allowed = || affinity::allowed_cores().unwrap();
            let mut pinning = Pinning::default();
            pinning.pin(all.len(), all.len() + 1);
            assert_eq!((pinning.is_pinned(), allowed()), (false, all.clone()), "not a core for each thread");
            for index in [0, all.len() - 1] {
                pinning.pin(index + all.len(), all.len());
                assert_eq!((pinning.is_pinned(), allowed()), (true, vec![all[index]]));
            }
            pinning.unpin();
            assert_eq!((pinning.is_pinned(), allowed()), (false, all.clone()));
            if let [first, .., last] = all[..] {
                for given in [vec![first], vec![first, last]] {
                    pinning.pin(all.len() - 1, all.len());
                    affinity::keep_current_thread_to(&given).unwrap();
                    pinning.pin(all.len() - 1, all.len());
                    assert_eq!(allowed(), given);
                    pinning.unpin();
                    assert_eq!(allowed(), given);
                    affinity::keep_current_thread_to(&all).unwrap();
                }
            }
        };
        std::thread::spawn(work).join().unwrap();
    }
}
