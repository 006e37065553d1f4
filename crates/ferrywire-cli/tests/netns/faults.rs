//! A peer that falls silent is named by the other end in time; one that only pauses is not lost.

use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use crate::process::{CONNECT, Ended, Process, SERVE, wait_until};
use crate::world::{Host, World};
use crate::{RUN_TIMEOUT, clock, long, nothing_is_left, shared_turn, skip, summarize};

/// Longest time until a silent peer is reported as lost: the default peer timeout of 10 s, and 1 s for a busy machine.
const NOTICED_IN: Duration = Duration::from_secs(11);
/// Speed of each link.
const RATE: &str = "50mbit";
/// Where there is time for everything: runs of each kind, and how many of them go on together.
const RUNS: usize = 20;
const RUNS_TOGETHER: usize = 4;

/// The fault that hits a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// The process on a host is stopped for good.
    Stopped(Host),
    /// A host hears nothing any more.
    Deaf(Host),
    BothDeaf,
    /// A host goes away, with its links.
    Deleted(Host),
}

impl Fault {
    fn strike(self, world: &World, serve: &Process, connect: &Process) {
        match self {
            Fault::Stopped(Host::A) => connect.signal("-STOP"),
            Fault::Stopped(Host::B) => serve.signal("-STOP"),
            Fault::Deaf(host) => world.deafen(host).expect("nft was there before"),
            Fault::BothDeaf => {
                [Host::A, Host::B].iter().for_each(|host| world.deafen(*host).expect("nft was there before"));
            }
            Fault::Deleted(host) => world.delete(host),
        }
    }

    /// Repairs the fault for the next run.
    fn mend(self, world: &World) {
        match self {
            Fault::Stopped(_) => {}
            Fault::Deaf(host) => world.undeafen(host),
            Fault::BothDeaf => [Host::A, Host::B].iter().for_each(|host| world.undeafen(*host)),
            Fault::Deleted(host) => world.restore(host, RATE),
        }
    }
}

/// Waits until a run that goes on for longer than any test is under way.
fn await_data(world: &World, connect: &Process, serve: &Process) {
    let begun = || world.sent_bytes_of(Host::A) > 1_000_000;
    assert!(wait_until(RUN_TIMEOUT, begun), "no data: {}{}", connect.errors(), serve.errors());
}

/// A run with a fault in its middle; how long after it each end that can still speak named the other.
fn suffer(fault: Fault, once: bool) -> Vec<Duration> {
    let world = World::new(RATE);
    let serve = Process::serve(&world, if once { "--once" } else { "" });
    let connect = Process::connect(&world, "--sizes 1M --seconds 600");
    await_data(&world, &connect, &serve);
    fault.strike(&world, &serve, &connect);
    let since = clock::now();
    let mut noticed = Vec::new();
    // A process that was stopped stays as it is while the other end goes on.
    let stopped = match fault {
        Fault::Stopped(Host::A) => Some(connect),
        _ => {
            noticed.push(connect_names_serve(&connect.end(RUN_TIMEOUT)) - since);
            None
        }
    };
    match fault {
        Fault::Stopped(Host::B) => drop(serve.kill()),
        _ if once => noticed.push(serve_names_connect(&serve.end(RUN_TIMEOUT)) - since),
        _ => noticed.push(serve_goes_on(fault, &world, serve) - since),
    }
    drop(stopped.map(Process::kill));
    nothing_is_left(&world);
    noticed
}

fn connect_names_serve(ended: &Ended) -> Duration {
    let error = ended.failure();
    assert!(error.contains(SERVE), "{error}");
    assert!(ended.json()["error"].as_str().is_some_and(|error| error.contains(SERVE)));
    ended.failed_at.expect("it has said so")
}

/// A `serve --once` that has ended as it should.
fn serve_names_connect(ended: &Ended) -> Duration {
    let error = ended.failure();
    assert!(error.contains(CONNECT), "{error}");
    ended.failed_at.expect("it has said so")
}

/// A plain `serve` says one line, and the next `connect` finds it at its best.
fn serve_goes_on(fault: Fault, world: &World, mut serve: Process) -> Duration {
    let error = serve.await_error(RUN_TIMEOUT);
    assert!(error.contains(CONNECT), "{error}");
    assert!(serve.runs(), "serve ended: {}", serve.errors());
    // A serving end on a deleted host cannot be reached again.
    if fault != Fault::Deleted(Host::B) {
        fault.mend(world);
        Process::connect(world, "--sizes 64K --iters 8").end(RUN_TIMEOUT).verified();
    }
    assert_eq!(serve.error_lines().len(), 1, "{}", serve.errors());
    serve.kill().failed_at.expect("it has said so")
}

/// Runs with faults of one kind, in turn, and with a `serve` of both kinds; a few, or many.
fn suffer_all(kind: &str, faults: &[Fault]) {
    let noticed = Mutex::new(Vec::new());
    let runs = if long() { RUNS } else { faults.len() };
    let numbers: Vec<usize> = (0..runs).collect();
    for together in numbers.chunks(RUNS_TOGETHER) {
        thread::scope(|scope| {
            for i in together {
                let (fault, once, noticed) = (faults[i % faults.len()], i / faults.len() % 2 == 1, &noticed);
                scope.spawn(move || {
                    let after = clock::undisturbed(|| suffer(fault, once));
                    println!("{fault:?}, serve --once {once}: noticed after {after:.1?}");
                    noticed.lock().expect("whoever panicked ended the test").extend(after);
                });
            }
        });
    }
    summarize(kind, runs, noticed.into_inner().expect("nobody panicked"), NOTICED_IN);
}

/// Whether packets can be dropped here.
fn can_deafen() -> bool {
    let tried = World::new(RATE).deafen(Host::A);
    if let Err(why) = &tried {
        skip(&format!("nft, to drop packets: {why}"));
    }
    tried.is_ok()
}

#[test]
fn a_peer_stopped_for_three_seconds_is_not_lost() {
    let Some(_turn) = shared_turn() else { return };
    let pause = |host| {
        let world = World::new(RATE);
        let serve = Process::serve(&world, "");
        let connect = Process::connect(&world, "--sizes 1M --seconds 6");
        await_data(&world, &connect, &serve);
        let paused = if host == Host::A { &connect } else { &serve };
        paused.signal("-STOP");
        thread::sleep(Duration::from_secs(3));
        paused.signal("-CONT");
        connect.end(RUN_TIMEOUT).verified();
        assert!(serve.error_lines().is_empty(), "{}", serve.errors());
    };
    thread::scope(|scope| {
        for host in [Host::A, Host::B] {
            scope.spawn(move || clock::undisturbed(|| pause(host)));
        }
    });
}

#[test]
fn a_peer_stopped_for_good_is_named() {
    let Some(_turn) = shared_turn() else { return };
    suffer_all("stopped for good", &[Fault::Stopped(Host::A), Fault::Stopped(Host::B)]);
}

#[test]
fn dropped_packets_are_noticed_by_both_ends() {
    let Some(_turn) = shared_turn() else { return };
    if can_deafen() {
        suffer_all("packets dropped both ways", &[Fault::BothDeaf]);
    }
}

#[test]
fn packets_dropped_one_way_are_noticed_by_both_ends() {
    let Some(_turn) = shared_turn() else { return };
    if can_deafen() {
        suffer_all("packets dropped one way", &[Fault::Deaf(Host::A), Fault::Deaf(Host::B)]);
    }
}

#[test]
fn a_namespace_deleted_with_its_links_is_noticed() {
    let Some(_turn) = shared_turn() else { return };
    suffer_all("namespace deleted", &[Fault::Deleted(Host::A), Fault::Deleted(Host::B)]);
}
