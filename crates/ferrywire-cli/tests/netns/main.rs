//! Several hosts on one machine: the real command between network namespaces, with four links that are slow,
//! lost or silent, and with processes that are stopped or killed.
//!
//! Needs root and iproute2 (one test also nft); without them each test says "SKIPPED: needs ..." and passes.
//! Tests that count what a link carries take turns, alone. With `FERRYWIRE_LONG=1` more NICs are lost, more processes killed, more peers
//! silenced, and how soon that is noticed is held against the promise; `FERRYWIRE_SEED=N` repeats the kills of
//! an earlier run.

mod auto;
mod clock;
mod counters;
mod doctor;
mod down;
#[allow(dead_code, reason = "other tests use all of it")]
#[path = "../../../ferrywire/tests/cuda/driver.rs"]
mod driver;
mod faults;
mod gpu;
mod kills;
mod links;
mod long;
mod multi_gpu;
mod plugin;
mod process;
mod ranks;
#[allow(dead_code, reason = "other tests use all of it")]
#[path = "../../../ferrywire-host/tests/topology/tree.rs"]
mod tree;
mod world;

use std::sync::{LazyLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use world::{Host, World};

/// More than any wait here takes, however busy the machine is.
const RUN_TIMEOUT: Duration = Duration::from_secs(90);

/// Held by a test as long as it runs.
type Turn = (Option<RwLockReadGuard<'static, ()>>, Option<RwLockWriteGuard<'static, ()>>);

/// The turn of a test that says how much goes where, which others would change; `None` where it cannot run.
fn turn() -> Option<Turn> {
    take_turn(false)
}

/// The turn of a test of ends that wait or are killed, beside others of that kind, unless how soon they notice is held
/// against a promise.
fn shared_turn() -> Option<Turn> {
    take_turn(!long())
}

fn take_turn(shared: bool) -> Option<Turn> {
    static TURNS: RwLock<()> = RwLock::new(());
    static MISSING: LazyLock<Option<String>> = LazyLock::new(world::missing);
    if let Some(what) = &*MISSING {
        skip(what);
        return None;
    }
    Some(match shared {
        true => (Some(TURNS.read().unwrap_or_else(PoisonError::into_inner)), None),
        false => (None, Some(TURNS.write().unwrap_or_else(PoisonError::into_inner))),
    })
}

/// Prints how soon a kind of fault was noticed; where there is time for many, also holds it against a promise.
fn summarize(kind: &str, runs: usize, mut noticed: Vec<Duration>, promise: Duration) {
    noticed.sort_unstable();
    let [p50, max] =
        [noticed.get(noticed.len() / 2), noticed.last()].map(|t| t.map_or(0.0, Duration::as_secs_f64));
    println!("SUMMARY {kind}: {runs} runs, noticed {} times, p50 {p50:.1} s, max {max:.1} s", noticed.len());
    assert!(!noticed.is_empty(), "{kind}: nobody noticed anything");
    assert!(!long() || max <= promise.as_secs_f64(), "{kind}: noticed after {max:.1} s, not {promise:?}");
}

/// Checks that no process, file or setting of a run is left on these hosts.
fn nothing_is_left(world: &World) {
    for host in [Host::A, Host::B].into_iter().filter(|host| world.exists(*host)) {
        assert_eq!(world.processes(host), "", "processes of {host:?}");
        assert_eq!(world.listeners(host), "", "ports of {host:?}");
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
