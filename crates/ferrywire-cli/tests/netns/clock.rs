//! Time that passes only while this process runs: what stops a whole machine for a while stops its tests, and
//! says nothing about the ends that they watch.

use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// How often the clock ticks.
const TICK: Duration = Duration::from_millis(10);
/// One tick counts for at most this long.
const TICK_MAX: Duration = Duration::from_millis(250);

/// A moment, as the time since the first look at this clock.
pub fn now() -> Duration {
    static START: Once = Once::new();
    static PASSED_US: AtomicU64 = AtomicU64::new(0);
    START.call_once(|| {
        thread::spawn(|| {
            let mut last = Instant::now();
            loop {
                thread::sleep(TICK);
                let now = Instant::now();
                let passed = now.duration_since(last).min(TICK_MAX);
                PASSED_US.fetch_add(passed.as_micros() as u64, Ordering::Relaxed);
                last = now;
            }
        });
    });
    Duration::from_micros(PASSED_US.load(Ordering::Relaxed))
}
