//! A clock that stops while the process does not read it, for the control thread and for lanes.
//!
//! A process that was stopped (SIGSTOP, a suspended machine, an application that did not drive progress) has
//! received nothing in that time. Its peers may be alive all the same: their messages are still unread, and
//! peers on the same machine may have been stopped too.
//! Invariant: one reading advances the clock by at most `limits::CONTROL_TURNS_APART_MAX`. A process that
//! runs rarely reaches its timeouts later, but it reaches them.

use crate::limits;
use std::time::Duration;

/// The clock with which the control thread measures the times of links and dials.
#[derive(Debug)]
pub struct Clock {
    last_read: Duration,
    missed: Duration,
}

impl Clock {
    /// A clock that starts at the time `real` of the transport's clock.
    pub fn new(real: Duration) -> Clock {
        Clock { last_read: real, missed: Duration::ZERO }
    }

    /// The clock's time at its last reading.
    pub fn now(&self) -> Duration {
        self.last_read.saturating_sub(self.missed)
    }

    /// Reads the clock, and returns its time; `real` is the current time of the transport's clock.
    pub fn read(&mut self, real: Duration) -> Duration {
        let apart = real.saturating_sub(self.last_read);
        self.missed += apart.saturating_sub(limits::CONTROL_TURNS_APART_MAX);
        self.last_read = self.last_read.max(real);
        real.saturating_sub(self.missed)
    }
}

/// Silence after which a peer is declared lost, so that its users learn of the loss within `limit`, the peer
/// timeout.
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
        assert_eq!(clock.read(5 * second), 5 * second);
        assert_eq!(clock.read(6 * second), 6 * second);
        assert_eq!(clock.read(66 * second), 6 * second + limits::CONTROL_TURNS_APART_MAX);
        assert_eq!(clock.read(66 * second), 6 * second + limits::CONTROL_TURNS_APART_MAX);
        assert_eq!(clock.read(67 * second), 7 * second + limits::CONTROL_TURNS_APART_MAX);
    }
}
