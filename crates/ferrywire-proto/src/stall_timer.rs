//! A deadline that only counts time in which whoever waits has run.
//!
//! A process that was stopped for a minute has not waited for a minute: what it waits for, mostly another of
//! its own threads, was stopped with it. Invariant: between two looks at most `LOOKS_APART_MAX` counts.

use std::time::Duration;

/// Longer times between two looks count as this long.
const LOOKS_APART_MAX: Duration = Duration::from_millis(100);

/// The time waited, of the time that a wait may take.
#[derive(Debug)]
pub struct StallTimer {
    limit: Duration,
    waited: Duration,
    looked_at: Option<Duration>,
}

impl StallTimer {
    /// One that is over after this time.
    pub fn new(limit: Duration) -> StallTimer {
        StallTimer { limit, waited: Duration::ZERO, looked_at: None }
    }

    /// Whether it is over, now. Ask often.
    pub fn is_over(&mut self, now: Duration) -> bool {
        let apart = self.looked_at.map_or(Duration::ZERO, |at| now.saturating_sub(at));
        self.waited += apart.min(LOOKS_APART_MAX);
        self.looked_at = Some(now);
        self.waited >= self.limit
    }

    /// The time that has counted.
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
