//! Time that passes only while this process runs: what stops a whole machine for a while stops its tests, and
//! says nothing about the ends that they watch.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// How often the clock ticks.
const TICK: Duration = Duration::from_millis(10);
/// One tick counts for at most this long.
const TICK_MAX: Duration = Duration::from_millis(250);

/// A run in the course of which more was lost is no measurement.
const LOST_MAX: Duration = Duration::from_secs(1);
/// How often such a run is repeated.
const TRIES: usize = 20;

/// Time that has counted, and time that has not.
static PASSED_US: AtomicU64 = AtomicU64::new(0);
static LOST_US: AtomicU64 = AtomicU64::new(0);

/// A moment, as the time since the first reading of this clock.
pub fn now() -> Duration {
    static START: Once = Once::new();
    START.call_once(|| drop(thread::spawn(tick)));
    Duration::from_micros(PASSED_US.load(Ordering::Relaxed))
}

fn tick() {
    let mut last = Instant::now();
    loop {
        thread::sleep(TICK);
        let now = Instant::now();
        let passed = now.duration_since(last);
        let counts = passed.min(TICK_MAX);
        PASSED_US.fetch_add(counts.as_micros() as u64, Ordering::Relaxed);
        LOST_US.fetch_add((passed - counts).as_micros() as u64, Ordering::Relaxed);
        last = now;
    }
}

/// Does something; again, whatever came of it, if this process was stopped meanwhile: of two ends, one may
/// have been stopped for longer.
pub fn undisturbed<T>(run: impl Fn() -> T) -> T {
    now();
    for _ in 1..TRIES {
        let before = LOST_US.load(Ordering::Relaxed);
        let result = catch_unwind(AssertUnwindSafe(&run));
        // The cause of the pause may have ended just now.
        thread::sleep(2 * TICK);
        let lost = Duration::from_micros(LOST_US.load(Ordering::Relaxed) - before);
        if lost < LOST_MAX {
            return result.unwrap_or_else(|panic| resume_unwind(panic));
        }
        println!("once more: stopped for {lost:.1?}");
    }
    run()
}
