//! The wait for the rest of a record of a protected connection.
//!
//! Invariant: only time counts in which this process has looked for the rest, and in which no byte of it came.

use std::time::Duration;

/// Time between two looks after which this process has not looked meanwhile.
const PAUSE: Duration = Duration::from_secs(1);

/// A wait for the rest of a record.
#[derive(Default)]
pub(super) struct RecordRest {
    /// The last look, if there was one.
    seen: Option<Seen>,
}

struct Seen {
    /// Bytes received so far, and when the last of them came.
    received: u64,
    since: Duration,
    at: Duration,
}

impl RecordRest {
    /// Looks at the number of bytes received so far, at the time `now`. Returns the time for which no byte has come.
    pub fn waited(&mut self, received: u64, now: Duration) -> Duration {
        // After a pause of this process the rest may lie unread in the kernel.
        let goes_on = |seen: &Seen| seen.received == received && now.saturating_sub(seen.at) <= PAUSE;
        let since = self.seen.as_ref().filter(|seen| goes_on(seen)).map_or(now, |seen| seen.since);
        self.seen = Some(Seen { received, since, at: now });
        now.saturating_sub(since)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Looks every 200 ms in these milliseconds. Returns the seconds waited at each look.
    fn looks(rest: &mut RecordRest, received: u64, ms: std::ops::Range<u64>) -> Vec<u64> {
        let at = |ms| rest.waited(received, Duration::from_millis(ms)).as_secs();
        ms.step_by(200).map(at).collect()
    }

    /// The rest lay unread in the kernel while the process was stopped, and the connection was given up as attacked.
    #[test]
    fn a_pause_of_this_process_is_no_wait_for_the_rest_of_a_record() {
        let mut rest = RecordRest::default();
        assert_eq!(looks(&mut rest, 10, 0..4001).last(), Some(&4));
        assert_eq!(looks(&mut rest, 10, 60_000..60_001), [0]);
        assert_eq!(looks(&mut rest, 10, 60_200..70_001).last(), Some(&10), "while it looks the time counts");
    }

    #[test]
    fn each_byte_begins_the_wait_for_the_rest_of_a_record_again() {
        let mut rest = RecordRest::default();
        assert_eq!(looks(&mut rest, 10, 0..4801).last(), Some(&4));
        assert_eq!(looks(&mut rest, 11, 5000..5001), [0]);
        assert_eq!(looks(&mut rest, 11, 5200..7001).last(), Some(&2));
    }
}
