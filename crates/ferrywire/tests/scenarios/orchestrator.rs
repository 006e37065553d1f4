//! Several endpoints of a process, as one.

use std::net::{SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use ferrywire::orchestrator::Target;
use ferrywire::{Builder, ConnectError, Endpoint, Error, Orchestrator, Peer, Region, TransferError};
use ferrywire_memory::sim::SimGpu;

use crate::compile;

const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(300);
const GPUS: usize = 8;

fn builders(count: usize, build: impl Fn(usize) -> Builder) -> Vec<(String, Builder)> {
    (0..count).map(|gpu| (format!("gpu {gpu}"), build(gpu).threads(1).channels(1))).collect()
}

fn loopback(port: u16) -> SocketAddr {
    ([127, 0, 0, 1], port).into()
}

fn listening(count: usize) -> Orchestrator {
    let builders = builders(count, |_| Endpoint::builder().listen(loopback(0)));
    Orchestrator::start(builders, LONG).expect("they start")
}

fn connecting(count: usize) -> Orchestrator {
    Orchestrator::start(builders(count, |_| Endpoint::builder()), LONG).expect("they start")
}

fn address(end: &Orchestrator, endpoint: usize) -> SocketAddr {
    end.endpoints()[endpoint].listen_addresses()[0]
}

/// The parts of a failed phase's error.
fn parts(error: impl Into<Error>) -> (&'static str, String, Error) {
    match error.into() {
        Error::Phase { phase, endpoint, error, .. } => (phase, endpoint, *error),
        other => panic!("{other}"),
    }
}

#[test]
fn endpoints_of_a_process_start_connect_register_and_move_together() {
    let (there, here) = (listening(GPUS), connecting(GPUS));
    // Every one to every one.
    let pairs = (0..GPUS * GPUS).map(|pair| (pair / GPUS, pair % GPUS));
    let target = |(from, to)| Target { endpoint: from, addresses: vec![address(&there, to)] };
    let targets: Vec<Target> = pairs.clone().map(target).collect();
    let (peers, accepted) = std::thread::scope(|scope| {
        let accepting = scope.spawn(|| there.accept(GPUS, LONG).expect("all come"));
        let peers = here.connect(&targets, LONG).expect("all connect");
        (peers, accepting.join().expect("it accepts"))
    });
    assert_eq!((peers.len(), accepted.iter().map(Vec::len).collect::<Vec<_>>()), (64, vec![GPUS; GPUS]));
    let regions = |end: &Orchestrator, seed: usize| -> Vec<Region> {
        let register =
            move |gpu: usize, endpoint: &Endpoint| endpoint.register(vec![(seed + gpu) as u8; GPUS << 10]);
        end.each("registering", LONG, register).expect("memory")
    };
    let (sources, targets) = (regions(&here, 1), regions(&there, 100));
    let write = |((from, to), peer): ((usize, usize), &Peer)| {
        let (remote, at) = (targets[to].descriptor(), (from as u64) << 10);
        peer.write(&sources[from], at, &remote, at, 1 << 10).expect("a transfer")
    };
    let transfers: Vec<_> = pairs.zip(&peers).map(write).collect();
    assert!(transfers.iter().all(|transfer| transfer.wait(LONG) == Ok(1 << 10)));
    for target in &targets {
        let mut found = vec![0; GPUS << 10];
        target.read_at(0, &mut found).expect("it lies inside");
        assert!(
            found
                .chunks(1 << 10)
                .enumerate()
                .all(|(from, part)| part.iter().all(|byte| *byte == 1 + from as u8))
        );
    }
    here.close(LONG).expect("they close");
    there.close(LONG).expect("they close");
}

#[test]
fn an_endpoint_that_cannot_start_is_named_and_the_others_leave_nothing() {
    let taken = TcpListener::bind(loopback(0)).expect("a port");
    let free: Vec<u16> = {
        let ports = [(); 2].map(|()| TcpListener::bind(loopback(0)).expect("a port"));
        ports.iter().map(|port| port.local_addr().expect("it has one").port()).collect()
    };
    let port = [free[0], taken.local_addr().expect("it has one").port(), free[1]];
    let start =
        || Orchestrator::start(builders(3, |gpu| Endpoint::builder().listen(loopback(port[gpu]))), LONG);
    let (phase, endpoint, error) = parts(start().expect_err("a port is taken"));
    assert_eq!((phase, endpoint.as_str()), ("starting", "gpu 1"));
    assert!(error.to_string().contains("in use"), "{error}");
    drop(taken);
    // Endpoints that had started release their ports soon.
    let since = Instant::now();
    while let Err(error) = start() {
        assert!(since.elapsed() < LONG, "{error}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_target_that_does_not_answer_is_named_and_the_other_peers_are_closed() {
    let (there, here) = (listening(1), connecting(2));
    let nobody = TcpListener::bind(loopback(0)).and_then(|port| port.local_addr()).expect("a port");
    let targets = [
        Target { endpoint: 0, addresses: vec![nobody, address(&there, 0)] },
        Target { endpoint: 1, addresses: vec![nobody] },
    ];
    let (phase, endpoint, error) = parts(here.connect(&targets, LONG).expect_err("nobody is there"));
    assert_eq!((phase, endpoint.as_str()), ("connecting", "gpu 1"));
    assert!(matches!(error, Error::Unreachable { .. }), "{error}");
    // The first had another address to go to, unless the failure came before it got there.
    if let Ok(peer) = there.endpoints()[0].accept(LONG.min(Duration::from_secs(2))) {
        let gone = peer.wait_notification(LONG).expect_err("it goes");
        assert!(matches!(gone, TransferError::PeerClosed { .. } | TransferError::PeerLost { .. }), "{gone}");
    }
    let good = [Target { endpoint: 1, addresses: vec![address(&there, 0)] }];
    assert_eq!(here.connect(&good, LONG).expect("it is there").len(), 1, "the endpoints go on");
}

#[test]
fn peers_that_do_not_come_are_counted() {
    let (there, here) = (listening(2), connecting(1));
    let only = [Target { endpoint: 0, addresses: vec![address(&there, 0)] }];
    let peers = here.connect(&only, LONG).expect("it is there");
    let (phase, endpoint, error) = parts(there.accept(1, SHORT).expect_err("only one of two"));
    assert_eq!((phase, endpoint.as_str()), ("accepting", "gpu 1"));
    assert!(error.to_string().contains("0 of 1"), "{error}");
    let gone = peers[0].wait_notification(LONG).expect_err("it is closed");
    assert!(matches!(gone, TransferError::PeerClosed { .. } | TransferError::PeerLost { .. }), "{gone}");
}

#[test]
fn work_that_fails_on_one_endpoint_names_it() {
    let here = connecting(3);
    let fail = |gpu: usize, _: &Endpoint| match gpu {
        1 => Err(Error::invalid("memory", "there is none")),
        other => Ok(other),
    };
    let (phase, endpoint, _) = parts(here.each("registering", LONG, fail).expect_err("one fails"));
    assert_eq!((phase, endpoint.as_str()), ("registering", "gpu 1"));
    assert_eq!(here.each("registering", LONG, |gpu, _| Ok::<_, Error>(gpu)), Ok(vec![0, 1, 2]));
}

#[test]
fn a_closed_endpoint_says_so_in_try_accept() {
    let there = listening(1);
    let end = &there.endpoints()[0];
    assert!(end.try_accept().is_none());
    there.close(LONG).expect("it closes");
    assert!(matches!(end.try_accept(), Some(Err(ConnectError::Closed))));
}

#[test]
fn a_timeout_beyond_all_clocks_is_a_far_one() {
    let builders = builders(1, |_| Endpoint::builder().listen(loopback(0)));
    let there = Orchestrator::start(builders, Duration::MAX).expect("it starts");
    let here = connecting(1);
    let target = [Target { endpoint: 0, addresses: vec![address(&there, 0)] }];
    assert_eq!(here.connect(&target, Duration::MAX).expect("it is there").len(), 1);
}

/// Work on one endpoint that does not end, and a target that takes a connection and says nothing, are late by name.
#[test]
fn an_endpoint_that_does_not_end_in_time_is_named() {
    let here = connecting(2);
    let (release, released) = std::sync::mpsc::channel::<()>();
    let released = std::sync::Mutex::new(released);
    let hang = move |gpu: usize, _: &Endpoint| {
        if gpu == 1 {
            let _ = released.lock().expect("nobody else").recv();
        }
        Ok::<_, Error>(gpu)
    };
    let (phase, endpoint, error) = parts(here.each("registering", SHORT, hang).expect_err("one hangs"));
    assert_eq!((phase, endpoint.as_str()), ("registering", "gpu 1"));
    assert!(matches!(error, Error::Stalled { waited: SHORT, .. }), "{error}");
    drop(release);

    let there = listening(1);
    let silent = TcpListener::bind(loopback(0)).expect("a port");
    let target = |endpoint, address| Target { endpoint, addresses: vec![address] };
    let nobody = silent.local_addr().expect("it has one");
    let targets = [target(0, address(&there, 0)), target(1, nobody)];
    let limit = Duration::from_secs(2);
    let (phase, endpoint, error) = parts(here.connect(&targets, limit).expect_err("one is silent"));
    assert_eq!((phase, endpoint.as_str()), ("connecting", "gpu 1"));
    let (what, peer) = (format!("connecting to {nobody}"), Some(nobody.to_string()));
    assert_eq!(error, Error::Stalled { what, peer, waited: limit });
    if let Ok(peer) = there.endpoints()[0].accept(SHORT) {
        let gone = peer.wait_notification(LONG).expect_err("it is closed with the others");
        assert!(matches!(gone, TransferError::PeerClosed { .. } | TransferError::PeerLost { .. }), "{gone}");
    }
}

/// Threads, descriptors and simulated GPUs of this process.
fn held() -> (usize, usize, usize) {
    let count = |folder: &str| std::fs::read_dir(folder).expect("of this process").count();
    let gpus = (0..16).filter(|gpu| SimGpu::opened(*gpu).is_some()).count();
    (count("/proc/self/task"), count("/proc/self/fd"), gpus)
}

/// The names of this process's threads.
fn threads() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").expect("of this process").flatten();
    tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok()).collect()
}

/// In whatever phase it fails. Alone in its process: others' threads would be counted too.
#[test]
fn a_phase_that_fails_leaves_nothing_behind() {
    compile::alone("orchestrator::a_phase_that_fails_leaves_nothing_behind", || {
        let others = threads();
        // Whatever is made once and stays.
        drop((listening(2), connecting(2).each("", LONG, |_, endpoint| endpoint.alloc_sim(0, 64)).is_ok()));
        // The threads of the process stay, which drop owners of memory and answer `ferrywire watch`; others end.
        let stays = |name: &String| {
            ["ferrywire-own\n", "ferrywire-watch\n"].contains(&name.as_str()) || others.contains(name)
        };
        let until = |what: &str, holds: &dyn Fn() -> bool| {
            let since = Instant::now();
            while !holds() {
                assert!(
                    since.elapsed() < LONG,
                    "{what}: threads, descriptors, GPUs {:?}, {:?}",
                    held(),
                    threads()
                );
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        until("at first", &|| held().2 == 0 && threads().iter().all(stays));
        let before = held();
        let taken = TcpListener::bind(loopback(0)).expect("a port");
        let port = taken.local_addr().expect("it has one");
        let phases: [(&str, &dyn Fn()); 6] = [
            ("starting", &|| {
                let build = |gpu| Endpoint::builder().listen(if gpu == 2 { port } else { loopback(0) });
                Orchestrator::start(builders(4, build), LONG).expect_err("one has no port");
            }),
            ("extending", &|| {
                let mut all = listening(2);
                all.extend(builders(2, |_| Endpoint::builder().listen(port)), LONG).expect_err("no port");
            }),
            ("connecting", &|| {
                let (here, there) = (connecting(2), listening(1));
                let target = |endpoint, address| Target { endpoint, addresses: vec![address] };
                let targets = [target(0, address(&there, 0)), target(1, port)];
                here.connect(&targets, SHORT).expect_err("nobody speaks there");
            }),
            ("accepting", &|| {
                let (here, there) = (connecting(1), listening(2));
                let only = [Target { endpoint: 0, addresses: vec![address(&there, 0)] }];
                let _peers = here.connect(&only, LONG).expect("it is there");
                there.accept(1, SHORT).expect_err("one of two");
            }),
            ("registering", &|| {
                let register = |gpu: usize, endpoint: &Endpoint| match gpu {
                    3 => Err(Error::invalid("memory", "there is none").into()),
                    _ => endpoint.alloc_sim(gpu as u32, 1 << 20),
                };
                connecting(4).each("registering", LONG, register).expect_err("one has no memory");
            }),
            ("registering late", &|| {
                let register = |gpu: usize, endpoint: &Endpoint| {
                    let region = endpoint.alloc_sim(gpu as u32, 1 << 20);
                    std::thread::sleep(if gpu == 1 { 3 * SHORT } else { Duration::ZERO });
                    region
                };
                connecting(2).each("registering", SHORT, register).expect_err("one is late");
            }),
        ];
        let with_port = (before.0, before.1 + 1, before.2);
        for (name, fail) in phases {
            fail();
            // There may be fewer descriptors: `ferrywire watch` or a process that starts may have asked this one for
            // its counters while they were counted.
            until(name, &|| {
                let (threads, descriptors, gpus) = held();
                (threads, gpus) == (with_port.0, with_port.2) && descriptors <= with_port.1
            });
        }
    });
}

/// Regression: it waited for its whole timeout, and its error was that of a firewall.
#[test]
fn an_endpoint_that_does_not_listen_accepts_nothing_and_says_so_at_once() {
    let (phase, endpoint, error) = parts(connecting(2).accept(1, LONG).unwrap_err());
    assert_eq!((phase, endpoint.as_str()), ("accepting", "gpu 0"));
    assert!(
        matches!(&error, Error::Invalid { .. }) && error.to_string().contains("does not listen"),
        "{error}"
    );
    assert_eq!(connecting(1).accept(0, LONG).expect("it accepts none").concat().len(), 0);
}

/// Regression: an address that did not answer used up the timeout of those behind it.
#[test]
fn an_address_that_does_not_answer_leaves_time_for_the_next_one() {
    let (there, here) = (listening(1), connecting(1));
    let silent = TcpListener::bind(loopback(0)).expect("a port");
    let addresses = vec![silent.local_addr().expect("an address"), address(&there, 0)];
    let peers =
        here.connect(&[Target { endpoint: 0, addresses }], Duration::from_secs(20)).expect("the second one");
    assert_eq!(peers[0].identity(), there.endpoints()[0].identity());
}
