//! Detects plugin calls that do not return.
//!
//! Time is counted between checks, with a maximum per check. So a process that was stopped for a minute does
//! not treat its calls as a minute old.
//! Invariant: pure; a call is identified by its thread and its beginning.

use ferrywire_ncclnet::InflightCall;
use ferrywire_proto::limits;
use std::time::Duration;

/// The calls that were in flight at the last check.
#[derive(Debug, Default)]
pub(crate) struct CallWatch {
    seen: Vec<Seen>,
    last_look: Duration,
}

#[derive(Debug)]
struct Seen {
    thread: i32,
    age: Duration,
    /// Time for which the call has been watched, summed over the checks.
    watched: Duration,
}

impl CallWatch {
    /// Checks the calls in flight. Returns those that have been watched for longer than `limit`.
    pub fn overdue(&mut self, calls: Vec<InflightCall>, limit: Duration, now: Duration) -> Vec<InflightCall> {
        let passed = now.saturating_sub(self.last_look).min(2 * limits::PATH_CHECK_INTERVAL);
        self.last_look = now;
        let before = std::mem::take(&mut self.seen);
        let mut overdue = Vec::new();
        for call in calls {
            // A call that is older than the last call seen on its thread is that same call; a new one would
            // be younger.
            let same = before.iter().find(|seen| seen.thread == call.thread && seen.age < call.since);
            let same = same.filter(|_| call.since >= passed);
            let watched = same.map_or(Duration::ZERO, |seen| seen.watched + passed);
            self.seen.push(Seen { thread: call.thread, age: call.since, watched });
            if watched > limit {
                overdue.push(call);
            }
        }
        overdue
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrywire_ncclnet::Call;

    fn call(thread: i32, since_ms: u64) -> InflightCall {
        let (plugin, device, since) = ("x".into(), None, Duration::from_millis(since_ms));
        InflightCall { plugin, call: Call::Test, device, thread, since }
    }

    fn looks(watch: &mut CallWatch, ages: impl Iterator<Item = (u64, u64)>) -> Option<u64> {
        let limit = Duration::from_secs(2);
        ages.into_iter().find_map(|(at, age)| {
            let now = Duration::from_millis(at);
            (!watch.overdue(vec![call(7, age)], limit, now).is_empty()).then_some(at)
        })
    }

    #[test]
    fn a_call_is_overdue_after_the_limit() {
        let found = looks(&mut CallWatch::default(), (0..100).map(|n| (n * 200, 50 + n * 200)));
        assert!(found.is_some_and(|at| (2000..2600).contains(&at)), "{found:?}");
    }

    #[test]
    fn many_short_calls_are_no_long_one() {
        assert_eq!(looks(&mut CallWatch::default(), (0..100).map(|n| (n * 200, n % 3 * 20))), None);
    }

    #[test]
    fn time_in_which_the_process_was_stopped_does_not_count() {
        let mut watch = CallWatch::default();
        assert_eq!(looks(&mut watch, [(0, 10), (200, 210), (60_200, 60_210)].into_iter()), None);
        assert!(watch.overdue(Vec::new(), Duration::ZERO, Duration::from_secs(61)).is_empty());
    }
}
