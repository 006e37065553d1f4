//! Runs that are asked to end, and runs that are killed.

use crate::hosts::{self, Running, Seen, connect, ferrywire, find, seen, until};
use ferrywire_devmem::sys::flow::{Flow, Flows};
use std::env;
use std::thread;
use std::time::Duration;

/// A run that is longer than any test waits.
const LONG_RUN: &str = "--sizes 1M --seconds 3000 --channels 2 --depth 2";

fn has_rules(seen: &Seen) -> bool {
    !seen.rules.is_empty()
}

#[test]
fn a_run_that_is_asked_to_end_leaves_nothing() {
    if !hosts::are_here() {
        return;
    }
    let before = [find(0, false), find(1, false)];
    for (signal, status, of_serve) in
        [(libc::SIGTERM, 143, false), (libc::SIGTERM, 143, true), (libc::SIGINT, 130, false)]
    {
        let (serving, connected) = (Running::serve(""), Running::connect(LONG_RUN));
        until(0, "a rule for each lane", has_rules);
        until(1, "a rule for each lane", has_rules);
        // In the midst of it.
        thread::sleep(Duration::from_millis(500));
        let (asked, host, other) = if of_serve { (serving, 1, connected) } else { (connected, 0, serving) };
        asked.signal(signal);
        assert_eq!(asked.ended(), Some(status), "it was asked to end by signal {signal}");
        assert_eq!(seen(host), before[host], "after signal {signal} to the end there");
        if !of_serve {
            until(1, "the rules of a peer that is gone go", |seen| seen.rules.is_empty());
            other.signal(libc::SIGTERM);
        }
        assert_eq!(other.ended(), Some(if of_serve { 1 } else { 143 }));
        assert_eq!([seen(0), seen(1)], before, "after both have ended");
    }
}

#[test]
fn changes_of_a_killed_run_are_undone_on_request() {
    if !hosts::are_here() {
        return;
    }
    let before = [find(0, false), find(1, false)];
    let (serving, mut connected) = (Running::serve(""), Running::connect(LONG_RUN));
    until(0, "a rule for each lane", has_rules);
    connected.child.kill().expect("it lives");
    connected.child.wait().expect("it is dead");
    assert!(has_rules(&seen(0)), "nobody has undone them");
    let cleaned = ferrywire(0, "topo --clean-up").output().expect("it starts");
    let reported = String::from_utf8_lossy(&cleaned.stderr).into_owned();
    for words in ["ended without undoing its changes", "restored header split"] {
        assert!(reported.contains(words), "{reported}");
    }
    assert_eq!(seen(0), before[0], "{reported}");
    // The one that serves lives, and keeps what it has.
    let during = seen(1);
    assert!(!during.bound.is_empty());
    let kept = ferrywire(1, "topo --clean-up").output().expect("it starts");
    let reported = String::from_utf8_lossy(&kept.stderr).into_owned();
    assert!(reported.contains("no run has left anything"), "{reported}");
    assert_eq!((seen(1).bound, seen(1).spread), (during.bound, during.spread));
    serving.signal(libc::SIGTERM);
    assert_eq!(serving.ended(), Some(143));
    assert_eq!(seen(1), before[1]);
}

/// Not really random, and different each time.
fn moments() -> impl Iterator<Item = Duration> {
    let seed = env::var("FERRYWIRE_SEED").ok().and_then(|seed| seed.parse().ok());
    let mut state: u64 = seed.unwrap_or_else(|| u64::from(std::process::id()) ^ 0x5eed);
    println!("moments of seed {state}");
    std::iter::repeat_with(move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        Duration::from_micros((state >> 33) % 4_000_000)
    })
}

#[test]
fn killed_runs_leave_nothing_after_one_more_start() {
    if !hosts::are_here() {
        return;
    }
    // Rules of others need them to be on.
    let before_there = find(1, false);
    find(0, true);
    let flow = Flow::new("10.9.0.1:22".parse().unwrap(), "10.9.0.2:5555".parse().unwrap(), 1).unwrap();
    let foreign = Flows::open("dm0").and_then(|flows| flows.insert(&flow)).expect("room");
    let before = seen(0);
    let serving = Running::serve("");
    let of_serve = seen(1);
    let kills = if env::var("MTU").is_ok_and(|mtu| mtu == "1500") { 100 } else { 10 };
    let (mut dirty, mut with_rules) = (0, 0);
    for (number, moment) in moments().take(20 * kills).enumerate() {
        let mut run = Running::connect(LONG_RUN);
        thread::sleep(moment);
        run.child.kill().expect("it lives");
        run.child.wait().expect("it is dead");
        let now = seen(0);
        dirty += usize::from(now != before);
        with_rules += usize::from(now.rules.len() > 1);
        if number + 1 >= kills && with_rules > 0 {
            break;
        }
    }
    println!("at least {kills} kills: {dirty} left something, {with_rules} of them rules");
    assert!(with_rules > 0, "no kill came in mid-run");
    // A run may find that the one before is not over yet.
    let mut said = String::new();
    let done = (0..20).any(|_| {
        let run = connect("--sizes 64K,1M --iters 2 --channels 2");
        said = String::from_utf8_lossy(&run.stderr).into_owned();
        run.status.success()
    });
    assert!(done, "{said}");
    assert_eq!(seen(0), before, "{said}");
    until(1, "the rules of peers that are gone go", |seen| seen.rules.is_empty());
    assert_eq!(seen(1), of_serve, "what serves lives");
    serving.signal(libc::SIGTERM);
    assert_eq!(serving.ended(), Some(143));
    assert_eq!(seen(1), before_there);
    Flows::open("dm0").and_then(|flows| flows.delete(foreign)).expect("it is still there");
}
