//! A timeout that counts only time in which the waiting thread runs.
//!
//! A process that was stopped for a minute has not waited for a minute: the thread whose result it awaits is
//! mostly one of its own, and was stopped too.
//! Invariant: the time between two calls counts up to `POLLS_APART_MAX`.

use std::time::Duration;

/// Most time between two calls that counts as waited.
const POLLS_APART_MAX: Duration = Duration::from_millis(100);

/// Compares the time waited so far with a limit.
#[derive(Debug)]
pub struct StallTimer {
    limit: Duration,
    waited: Duration,
    last_poll: Option<Duration>,
}

impl StallTimer {
    /// A timer that is over after `limit` of counted time.
    pub fn new(limit: Duration) -> StallTimer {
        StallTimer { limit, waited: Duration::ZERO, last_poll: None }
    }

    /// Whether the limit is reached at `now`. Call this often: long gaps between calls do not count.
    pub fn is_over(&mut self, now: Duration) -> bool {
        let apart = self.last_poll.map_or(Duration::ZERO, |at| now.saturating_sub(at));
        self.waited += apart.min(POLLS_APART_MAX);
        self.last_poll = Some(now);
        self.waited >= self.limit
    }

    /// The waited time that has counted so far.
    pub fn waited(&self) -> Duration {
        self.waited
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_stop_is_not_a_long_wait() {
        let millis = Duration::from_millis;
        let mut timer = StallTimer::new(millis(300));
        assert!(!timer.is_over(millis(5000)));
        assert!(!timer.is_over(millis(5050)));
        assert!(!timer.is_over(millis(99_000)));
        assert!(!timer.is_over(millis(99_100)));
        assert!(timer.is_over(millis(99_150)));
        assert_eq!(timer.waited(), millis(300));
    }
}
