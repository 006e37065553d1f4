//! Keeps a worker's thread to one core while that saves CPU time.
//!
//! Only where the endpoint has one worker per core. With few cores that is always. With many, the rule is
//! `schedule::keeps_to_core`, for transfers within this host: the two threads of a channel find the same core. A worker
//! with lanes is pinned once and stays so, since a plugin's threads inherit the affinity of the thread that starts them.
//!
//! Invariant: a thread pins only itself, and gets back the cores that it had.
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
    /// When the core was last chosen.
    chosen: Option<Duration>,
    pinned: Option<Pinned>,
}

struct Pinned {
    core: usize,
    /// The cores that the thread may use when it is not pinned.
    cores: Vec<usize>,
}

impl Pinning {
    /// Whether it is time to choose the thread's core anew.
    pub fn is_due(&self, now: Duration) -> bool {
        self.chosen.is_none_or(|chosen| now.saturating_sub(chosen) >= schedule::CORE_CHECK_INTERVAL)
    }

    pub fn is_pinned(&self) -> bool {
        self.pinned.is_some()
    }

    /// Pins the current thread to one of the cores that it may use, the one at `place`, if there is one for each of
    /// `workers` threads.
    pub fn pin(&mut self, place: usize, workers: usize) {
        let cores = match self.pinned.take() {
            Some(pinned) => pinned.cores,
            None => affinity::allowed_cores().unwrap_or_default(),
        };
        if cores.len() != workers || workers < 2 {
            return;
        }
        let core = cores[place % workers];
        match affinity::keep_current_thread_to(&[core]) {
            Ok(()) => self.pinned = Some(Pinned { core, cores }),
            Err(error) => tracing::debug!(%error, core, "cannot pin a progress thread to its core"),
        }
    }

    /// Lets the current thread use all its cores again.
    fn unpin(&mut self) {
        let Some(pinned) = self.pinned.take() else { return };
        // Cores that a user has given the thread since are left to it.
        if affinity::allowed_cores().is_ok_and(|cores| cores == [pinned.core])
            && let Err(error) = affinity::keep_current_thread_to(&pinned.cores)
        {
            tracing::debug!(%error, "cannot give a progress thread its cores back");
        }
    }
}

impl ProgressEngine {
    /// Pins the current thread, the worker's own, or not, by what its channels have moved since the last time.
    pub(super) fn choose_core(&mut self, worker: &Worker, context: &Context, now: Duration) {
        let time = now.saturating_sub(self.pinning.chosen.replace(now).unwrap_or(now));
        if worker.polled_by == PolledBy::Thread || worker.sleeper().has_lanes() {
            return;
        }
        let workers = context.sleepers.len();
        if schedule::always_keeps_to_core(workers) {
            if !self.pinning.is_pinned() {
                self.pinning.pin(worker.index, workers);
            }
            return;
        }
        let mut all = Traffic::default();
        let mut busiest = (0, None);
        for slot in self.slots.iter_mut().flatten() {
            let moved = slot.channel.traffic();
            let recent = moved.since(mem::replace(&mut slot.moved, moved));
            all = all.plus(recent);
            if recent.bytes() > busiest.0 {
                busiest = (recent.bytes(), Some(&slot.channel.peer.info));
            }
        }
        match busiest.1 {
            Some(peer) if peer.same_host && schedule::keeps_to_core(all, time) => {
                self.pinning.pin(worker.index.wrapping_add(peer.first_core), workers);
            }
            _ => self.pinning.unpin(),
        }
    }
}
