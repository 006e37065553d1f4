//! A clock that stands still while nobody looks at it: the control side's, and each lane's; and how much silence
//! it may show.
//!
//! A process that was stopped (SIGSTOP, a suspended machine, callers that drive and did not) has heard
//! nobody, and that says nothing about its peers: what they said meanwhile is still to be read, and if they
//! were stopped too, as on one machine, they have yet to speak.
//! Invariant: between two looks at most `limits::CONTROL_TURNS_APART_MAX` passes, so that deadlines are
//! reached however rarely we get our turn.

use crate::limits;
use std::time::Duration;

/// A clock; times given to links and dials are its own.
#[derive(Debug)]
pub struct Clock {
    looked_at: Duration,
    missed: Duration,
}

impl Clock {
    /// One that begins at this time of the other clock.
    pub fn new(real: Duration) -> Clock {
        Clock { looked_at: real, missed: Duration::ZERO }
    }

    /// The time as of the last look.
    pub fn now(&self) -> Duration {
        self.looked_at.saturating_sub(self.missed)
    }

    /// The time, at this time of the transport's clock.
    pub fn look(&mut self, real: Duration) -> Duration {
        let apart = real.saturating_sub(self.looked_at);
        self.missed += apart.saturating_sub(limits::CONTROL_TURNS_APART_MAX);
        self.looked_at = self.looked_at.max(real);
        real.saturating_sub(self.missed)
    }
}

/// Silence after which a peer is given up, so that whoever waits for it is told within `limit`.
pub fn silence_max(limit: Duration) -> Duration {
    limit - limits::PEER_TIMEOUT_MARGIN.min(limit / 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_ends_a_little_before_its_limit() {
        assert_eq!(silence_max(Duration::from_secs(10)), Duration::from_secs(9));
        assert_eq!(silence_max(Duration::from_secs(60)), Duration::from_secs(59));
        assert_eq!(silence_max(Duration::from_secs(3)), Duration::from_millis(2700));
        assert!(silence_max(2 * limits::CONTROL_SUSPECT_AFTER) > limits::CONTROL_SUSPECT_AFTER);
    }

    #[test]
    fn time_without_turns_does_not_pass() {
        let second = Duration::from_secs(1);
        let mut clock = Clock::new(5 * second);
        assert_eq!(clock.look(5 * second), 5 * second);
        assert_eq!(clock.look(6 * second), 6 * second);
        assert_eq!(clock.look(66 * second), 6 * second + limits::CONTROL_TURNS_APART_MAX);
        assert_eq!(clock.look(66 * second), 6 * second + limits::CONTROL_TURNS_APART_MAX);
        assert_eq!(clock.look(67 * second), 7 * second + limits::CONTROL_TURNS_APART_MAX);
    }
}
