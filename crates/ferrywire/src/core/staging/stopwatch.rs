//! A stopwatch for a condition: it reads the clock when the condition changes, never between.

use crate::core::trace::Row;
use std::time::{Duration, Instant};

#[derive(Default)]
pub(super) struct Stopwatch {
    total: Duration,
    since: Option<Instant>,
    /// The row of the trace that shows the times in which the condition holds.
    row: Row,
}

impl Stopwatch {
    pub fn new(row: Row) -> Stopwatch {
        Stopwatch { row, ..Stopwatch::default() }
    }

    pub fn row(&self) -> Row {
        self.row
    }

    /// Notes whether the condition holds from now on.
    pub fn set(&mut self, on: bool) {
        match self.since {
            None if on => self.since = Some(Instant::now()),
            Some(since) if !on => {
                self.total += since.elapsed();
                self.row.ends(since, 0);
                self.since = None;
            }
            _ => {}
        }
    }

    /// Time during which the condition held, up to its last end.
    pub fn total(&self) -> Duration {
        self.total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_counts_from_the_first_beginning_to_the_end() {
        let (before, mut watch) = (Instant::now(), Stopwatch::default());
        watch.set(false);
        assert_eq!(watch.total(), Duration::ZERO);
        watch.set(true);
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(2) {}
        watch.set(true);
        watch.set(false);
        let once = watch.total();
        assert!(once >= Duration::from_millis(2) && once <= before.elapsed());
        watch.set(false);
        assert_eq!(watch.total(), once, "nothing is counted between");
    }
}
