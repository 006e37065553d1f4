//! The latest events of a simulated network, for the message of a failed test.
//!
//! Invariant: the list is bounded; the fingerprint covers all events since the start, also those no longer in
//! the list.
//! Read next: `state.rs`, which records events here.

use std::collections::VecDeque;
use std::time::Duration;

/// Most events that the list keeps.
pub(super) const TRACE_EVENTS_MAX: usize = 200;

/// A ring of the last events and a hash over all of them.
#[derive(Debug)]
pub(super) struct Trace {
    ring: VecDeque<String>,
    fingerprint: u64,
}

impl Trace {
    pub(super) fn new() -> Trace {
        Trace { ring: VecDeque::with_capacity(TRACE_EVENTS_MAX), fingerprint: 0xcbf2_9ce4_8422_2325 }
    }

    pub(super) fn note(&mut self, at: Duration, what: std::fmt::Arguments<'_>) {
        if self.ring.len() == TRACE_EVENTS_MAX {
            self.ring.pop_front();
        }
        let line = format!("{:>12} us  {what}", at.as_nanos() as f64 / 1e3);
        for byte in line.bytes() {
            self.fingerprint = (self.fingerprint ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        self.ring.push_back(line);
    }

    pub(super) fn lines(&self) -> Vec<String> {
        self.ring.iter().cloned().collect()
    }

    pub(super) fn fingerprint(&self) -> u64 {
        self.fingerprint
    }
}
