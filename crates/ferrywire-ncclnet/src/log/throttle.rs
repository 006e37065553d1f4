//! Limits how many log lines of one place pass. Pure: the time is an argument.

use std::collections::HashMap;
use std::time::Duration;

use ferrywire_proto::limits::{PLUGIN_LOG_BURST_LINES, PLUGIN_LOG_INTERVAL, PLUGIN_LOG_PLACES_MAX};

/// Counts log lines per place and interval.
#[derive(Debug, Default)]
pub struct Throttle {
    places: HashMap<u64, Place>,
}

#[derive(Debug)]
struct Place {
    began: Duration,
    passed: u64,
    held_back: u64,
}

impl Throttle {
    /// Decides about a line: `None` to suppress it, otherwise the number of lines suppressed at its place
    /// since the last that passed.
    pub fn admit(&mut self, place: u64, now: Duration) -> Option<u64> {
        self.make_room(now);
        let place = self.places.entry(place).or_insert(Place { began: now, passed: 0, held_back: 0 });
        if now.saturating_sub(place.began) >= PLUGIN_LOG_INTERVAL {
            place.began = now;
            place.passed = 0;
        }
        if place.passed >= PLUGIN_LOG_BURST_LINES {
            place.held_back += 1;
            return None;
        }
        place.passed += 1;
        Some(std::mem::take(&mut place.held_back))
    }

    /// Forgets the places whose interval is over; if none is, all places.
    fn make_room(&mut self, now: Duration) {
        if self.places.len() < PLUGIN_LOG_PLACES_MAX {
            return;
        }
        self.places.retain(|_, place| now.saturating_sub(place.began) < PLUGIN_LOG_INTERVAL);
        if self.places.len() >= PLUGIN_LOG_PLACES_MAX {
            self.places.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_passes_and_the_rest_is_counted() {
        let mut throttle = Throttle::default();
        let at = Duration::from_secs(7);
        for _ in 0..PLUGIN_LOG_BURST_LINES {
            assert_eq!(throttle.admit(1, at), Some(0));
        }
        for _ in 0..5 {
            assert_eq!(throttle.admit(1, at), None);
        }
        assert_eq!(throttle.admit(2, at), Some(0), "another place is not concerned");
        let almost = at + PLUGIN_LOG_INTERVAL - Duration::from_nanos(1);
        assert_eq!(throttle.admit(1, almost), None);
        assert_eq!(throttle.admit(1, at + PLUGIN_LOG_INTERVAL), Some(6));
        assert_eq!(throttle.admit(1, at + PLUGIN_LOG_INTERVAL), Some(0));
    }

    #[test]
    fn places_are_bounded() {
        let mut throttle = Throttle::default();
        for place in 0..10 * PLUGIN_LOG_PLACES_MAX as u64 {
            assert_eq!(throttle.admit(place, Duration::ZERO), Some(0));
            assert!(throttle.places.len() <= PLUGIN_LOG_PLACES_MAX);
        }
    }
}
