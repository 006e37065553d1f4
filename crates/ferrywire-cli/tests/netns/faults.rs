//! A peer that falls silent is named by the other end in time; one that only pauses is not lost.

use std::thread;
use std::time::{Duration, Instant};

use crate::process::{CONNECT, Process, SERVE};
use crate::world::{Host, LINKS, World};
use crate::{HEARTBEAT_LIMIT, RUN_DEADLINE, SLACK, skip, turn};

/// Two hosts with a run between them that goes on for longer than any test.
struct Running {
    world: World,
    serve: Process,
    connect: Process,
}

impl Running {
    fn start() -> Running {
        let world = World::new("200mbit");
        let serve = Process::serve(&world, "");
        let connect = Process::connect(&world, "--sizes 1M --seconds 600");
        thread::sleep(Duration::from_millis(1500));
        let moved: u64 = (1..=LINKS).map(|link| world.sent_bytes(Host::A, link)).sum();
        assert!(moved > 1_000_000, "only {moved} bytes: {}", connect.errors());
        Running { world, serve, connect }
    }

    /// Both ends name each other in time, counted from now; serve goes on.
    fn both_ends_notice(self) {
        let Running { world: _world, serve, connect } = self;
        let since = Instant::now();
        connect_notices(connect, since);
        serve_notices(serve, since);
    }
}

fn left(since: Instant) -> Duration {
    (HEARTBEAT_LIMIT + SLACK).saturating_sub(since.elapsed())
}

fn connect_notices(connect: Process, since: Instant) {
    let ended = connect.end(left(since));
    let error = ended.failure();
    println!("connect after {:.1} s: {error}", since.elapsed().as_secs_f64());
    assert!(error.contains(SERVE), "{error}");
    assert!(ended.json()["error"].as_str().is_some_and(|error| error.contains(SERVE)));
}

fn serve_notices(mut serve: Process, since: Instant) {
    let error = serve.await_error(left(since));
    println!("serve after {:.1} s: {error}", since.elapsed().as_secs_f64());
    assert!(error.contains(CONNECT), "{error}");
    assert!(serve.runs(), "serve ended: {}", serve.errors());
    assert_eq!(serve.error_lines().len(), 1, "{}", serve.errors());
}

#[test]
fn a_peer_stopped_for_three_seconds_is_not_lost() {
    let Some(_turn) = turn() else { return };
    let pause = |host| {
        let world = World::new("200mbit");
        let serve = Process::serve(&world, "");
        let connect = Process::connect(&world, "--sizes 1M --seconds 6");
        thread::sleep(Duration::from_millis(1500));
        let paused = if host == Host::A { &connect } else { &serve };
        paused.signal("-STOP");
        thread::sleep(Duration::from_secs(3));
        paused.signal("-CONT");
        connect.end(RUN_DEADLINE).verified();
        assert!(serve.error_lines().is_empty(), "{}", serve.errors());
    };
    thread::scope(|scope| {
        for host in [Host::A, Host::B] {
            scope.spawn(move || pause(host));
        }
    });
}

#[test]
fn a_peer_stopped_for_good_is_named() {
    let Some(_turn) = turn() else { return };
    thread::scope(|scope| {
        scope.spawn(|| {
            let Running { world: _world, serve, connect } = Running::start();
            serve.signal("-STOP");
            connect_notices(connect, Instant::now());
        });
        scope.spawn(|| {
            let Running { world: _world, serve, connect } = Running::start();
            connect.signal("-STOP");
            serve_notices(serve, Instant::now());
        });
    });
}

#[test]
fn dropped_packets_are_noticed_by_both_ends() {
    let Some(_turn) = turn() else { return };
    if let Err(why) = World::new("200mbit").deafen(Host::A) {
        return skip(&format!("nft, to drop packets: {why}"));
    }
    let drop_at = |hosts: &[Host]| {
        let running = Running::start();
        hosts.iter().for_each(|host| running.world.deafen(*host).expect("it was possible before"));
        running.both_ends_notice();
    };
    thread::scope(|scope| {
        let cases: [&[Host]; 3] = [&[Host::A, Host::B], &[Host::A], &[Host::B]];
        for hosts in cases {
            scope.spawn(move || drop_at(hosts));
        }
    });
}

#[test]
fn a_namespace_deleted_with_its_links_is_noticed() {
    let Some(_turn) = turn() else { return };
    let running = Running::start();
    (1..=LINKS).for_each(|link| running.world.delete_link(link));
    running.world.delete(Host::B);
    running.both_ends_notice();
}
