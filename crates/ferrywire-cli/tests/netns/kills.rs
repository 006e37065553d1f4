//! Either end is killed at random moments, and the other survives it as it should.

use std::sync::Mutex;
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::process::{CONNECT, Process, SERVE, wait_until};
use crate::world::{Host, World};
use crate::{RUN_TIMEOUT, clock, long, nothing_is_left, shared_turn, summarize};

/// A survivor that can ask for the other end's port knows after this long.
const NOTICED_IN: Duration = Duration::from_secs(5);
/// Kills happen up to this long after the start of `connect`.
const MOMENT_MAX_MS: u64 = 2500;
/// Sizes that are so short that kills meet the set-up, the timed part, the verified pass and the steps between.
const MANY_SIZES: &str = "--sizes 1M,64K,2M,4K,4M,1K,1M,64K,2M,4K,4M,1K --seconds 0.4";

/// A number of a sequence that a seed determines.
fn random(seed: u64, i: u64) -> u64 {
    let mut x = seed.wrapping_add((i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

fn seed() -> u64 {
    let given = std::env::var("FERRYWIRE_SEED").ok().and_then(|seed| seed.parse().ok());
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock");
    given.unwrap_or(now.as_nanos() as u64)
}

#[test]
fn sigkill_of_either_side() {
    let Some(_turn) = shared_turn() else { return };
    let kills = if long() { 200 } else { 6 };
    let seed = seed();
    println!("FERRYWIRE_SEED={seed}");
    let moment = |i: u64| Duration::from_millis(random(seed, i) % MOMENT_MAX_MS);
    let kinds = [connect_is_killed, serve_is_killed, connect_is_killed_and_serve_ends];
    let noticed = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for (kind, kill) in (0..).zip(kinds) {
            let noticed = &noticed;
            scope.spawn(move || {
                for i in (kind..kills).step_by(kinds.len()) {
                    println!("kill {i} (kind {kind}) after {:?}", moment(i));
                    let after = clock::undisturbed(|| {
                        let world = World::new("200mbit");
                        let after = kill(&world, moment(i));
                        nothing_is_left(&world);
                        after
                    });
                    println!("kill {i}: noticed after {after:.1?}");
                    noticed.lock().expect("whoever panicked ended the test").extend(after);
                }
            });
        }
    });
    let noticed = noticed.into_inner().expect("nobody panicked");
    summarize("SIGKILL of either side", kills as usize, noticed, NOTICED_IN);
}

/// Kills a `connect` in the middle; says whether its run had certainly begun, and when it was killed.
fn kill_connect(world: &World, moment: Duration) -> (bool, Duration) {
    let before = world.sent_bytes_of(Host::A);
    let connect = Process::connect(world, MANY_SIZES);
    thread::sleep(moment);
    let begun = world.sent_bytes_of(Host::A) > before + 1_000_000;
    let since = clock::now();
    let ended = connect.kill();
    assert_eq!(ended.status, None, "killed, not ended: {}", ended.errors);
    (begun, since)
}

fn connect_is_killed(world: &World, moment: Duration) -> Option<Duration> {
    let mut serve = Process::serve(world, "");
    let (begun, since) = kill_connect(world, moment);
    // Until serve is sure that the peer is gone, it is busy.
    loop {
        let again = Process::connect(world, "--sizes 64K --iters 8").end(RUN_TIMEOUT);
        if again.errors.contains("busy with a run of") && clock::now() - since < RUN_TIMEOUT {
            continue;
        }
        again.verified();
        break;
    }
    if begun {
        let said = wait_until(RUN_TIMEOUT, || !serve.failures().is_empty());
        assert!(said, "serve has not said that the run failed: {}", serve.errors());
    }
    assert!(serve.runs(), "serve ended: {}", serve.errors());
    let errors = serve.failures();
    assert!(errors.len() == 1 || (errors.is_empty() && !begun), "{errors:?}: {}", serve.errors());
    assert!(errors.iter().all(|error| error.contains(CONNECT)), "{errors:?}");
    Some(serve.kill().failed_at? - since)
}

fn connect_is_killed_and_serve_ends(world: &World, moment: Duration) -> Option<Duration> {
    let serve = Process::serve(world, "--once");
    let (begun, since) = kill_connect(world, moment);
    if !begun {
        // Perhaps serve has not seen a peer yet, and goes on waiting for its first.
        serve.kill();
        return None;
    }
    let ended = serve.end(RUN_TIMEOUT);
    let error = ended.failure();
    assert!(error.contains(CONNECT), "{error}");
    Some(ended.failed_at? - since)
}

fn serve_is_killed(world: &World, moment: Duration) -> Option<Duration> {
    let serve = Process::serve(world, "");
    let connect = Process::connect(world, MANY_SIZES);
    thread::sleep(moment);
    let since = clock::now();
    serve.kill();
    let ended = connect.end(RUN_TIMEOUT);
    let error = ended.failure();
    assert!(error.contains(SERVE), "{error}");
    assert!(ended.json()["error"].as_str().is_some_and(|error| error.contains(SERVE)));
    Some(ended.failed_at? - since)
}
