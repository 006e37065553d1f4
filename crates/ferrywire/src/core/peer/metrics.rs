//! Figures about a peer's past, for metrics and reports: plain atomics, and a few lines of text behind a lock.
//!
//! Read next: `state.rs`, which counts here and gives the figures to the crate `ferrywire-metrics`.

use ferrywire_metrics::{Kind, KindSample};
use ferrywire_proto::limits;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Operations of one kind: those that began, and those that ended well or badly.
#[derive(Default)]
pub(super) struct KindCounters {
    pub started: AtomicU64,
    pub completed: AtomicU64,
    pub failed: AtomicU64,
}

/// Figures about the peer's past for reports.
#[derive(Default)]
pub(crate) struct History {
    /// The counters of each [`Kind`] of operations.
    pub(super) operations: [KindCounters; Kind::ALL.len()],
    /// Number of frames of lost channels that went back into the outbox.
    pub resent: AtomicU64,
    /// Number of failed attempts to connect a channel.
    pub failed_dials: AtomicU64,
    /// Number of connections of channels that were lost.
    lost_count: AtomicU64,
    /// Number of fences that were passed.
    pub fences: AtomicU64,
    /// The latest lost channels, one line of text each.
    pub lost: Mutex<Vec<String>>,
    /// Time until the peer's channels were connected.
    pub setup: Mutex<Duration>,
}

impl History {
    /// Counts of the kinds of operations that the peer has had.
    pub(super) fn kinds(&self) -> Vec<KindSample> {
        let kinds = Kind::ALL.into_iter().zip(&self.operations).map(|(kind, counters)| KindSample {
            kind: kind.name().into(),
            started: counters.started.load(Ordering::Relaxed),
            completed: counters.completed.load(Ordering::Relaxed),
            failed: counters.failed.load(Ordering::Relaxed),
        });
        kinds.filter(|kind| kind.started > 0).collect()
    }

    /// Number of connections of channels that were lost.
    pub(super) fn lost_count(&self) -> u64 {
        self.lost_count.load(Ordering::Relaxed)
    }

    /// Records a lost channel as a line of text. Beyond `LOST_LINES_MAX` the oldest line is dropped.
    pub fn note_lost(&self, line: String) {
        self.lost_count.fetch_add(1, Ordering::Relaxed);
        let mut lost = self.lost.lock().unwrap_or_else(PoisonError::into_inner);
        if lost.len() >= limits::LOST_LINES_MAX {
            lost.remove(0);
        }
        lost.push(line);
    }

    /// The line of text about the channel that was lost last.
    pub(super) fn last_lost(&self) -> Option<String> {
        self.lost.lock().unwrap_or_else(PoisonError::into_inner).last().cloned()
    }
}
