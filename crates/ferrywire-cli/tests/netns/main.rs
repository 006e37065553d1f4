//! Several hosts on one machine: the real command between network namespaces, with four links that are slow,
//! lost or silent, and with processes that are stopped or killed.
//!
//! Needs root and iproute2 (one test also nft); without them each test says "SKIPPED: needs ..." and passes.
//! The tests take turns. With `FERRYWIRE_LONG=1` more NICs are lost and more processes killed;
//! `FERRYWIRE_SEED=N` repeats the kills of an earlier run.

mod faults;
mod kills;
mod links;
mod process;
mod world;

use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

/// After this much silence a peer is lost: the engine's default.
const HEARTBEAT_LIMIT: Duration = Duration::from_secs(10);
/// What a busy machine and the farewell may add.
const SLACK: Duration = Duration::from_secs(5);
/// More than any run here takes that is not disturbed.
const RUN_DEADLINE: Duration = Duration::from_secs(60);

/// The turn of one test; `None` where it cannot run.
fn turn() -> Option<MutexGuard<'static, ()>> {
    static ONE: Mutex<()> = Mutex::new(());
    let turn = ONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    match world::missing() {
        None => Some(turn),
        Some(what) => {
            skip(&what);
            None
        }
    }
}

/// Says aloud, past the test harness, that a test did not run.
fn skip(what: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "SKIPPED: needs {what}");
}

/// Whether there is time for everything.
fn long() -> bool {
    std::env::var("FERRYWIRE_LONG").is_ok_and(|value| value == "1")
}
