//! Findings of `doctor` between hosts: paths, packet sizes and NICs without a counterpart.
//!
//! A table plants faults, each of which `doctor` has to name, and another has set-ups without a fault, of which it must
//! say nothing. Not planted here: a driver that hangs, a plugin without its daemon and a quota of CPU time, which are in
//! `tests/cli/doctor.rs`; a NIC of low speed, which the unit tests of `nic.rs` have, as a veth reports no speed of its own.
//! Clocks that differ are no fault: ferrywire compares none.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::thread;

use serde_json::Value;

use crate::process::Process;
use crate::world::{Host, LINKS, World};
use crate::{RUN_TIMEOUT, shared_turn, turn};

/// Worlds that exist at once; most of the time they wait.
const AT_ONCE: usize = 3;
const PEER: &str = "10.77.1.2:7420";
const PEER_V6: &str = "[fd77:1::2]:7420";

/// The findings with this id: about what, and how much it matters.
fn found(report: &Value, id: &str) -> Vec<(String, String)> {
    let all = report["findings"].as_array().expect("findings").iter();
    let text = |value: &Value| value.as_str().expect("text").to_owned();
    all.filter(|finding| finding["id"] == id)
        .map(|finding| (text(&finding["subject"]), text(&finding["level"])))
        .collect()
}

#[test]
fn paths_to_a_peer_are_reported_and_nics_without_one() {
    let Some(_turn) = turn() else { return };
    let world = World::new("2gbit");
    world.set_mtu(Host::A, 2, 9000);
    world.address(Host::B, &Host::B.nic(3), "10.99.0.2/24");
    let serve = Process::serve(&world, "--memory host");
    let ended = Process::start(&world, Host::A, "doctor 10.77.1.2 --json").end(RUN_TIMEOUT);
    assert_eq!(ended.status, Some(0), "{ended:?}");
    let report = ended.json();
    let mut ways = found(&report, "path");
    ways.sort();
    let names: Vec<_> = ways.iter().map(|(subject, _)| subject.as_str()).collect();
    assert_eq!(names, ["va1", "va2", "va3", "va4"], "{report}");
    let small: Vec<_> = found(&report, "path-mtu").into_iter().filter(|(_, level)| level == "warn").collect();
    assert_eq!(small, [("va2".to_owned(), "warn".to_owned())], "{report}");
    assert_eq!(found(&report, "peer-nic").len(), 1, "{report}");
    assert!(serve.failures().is_empty(), "{}", serve.errors());
}

#[test]
fn a_link_that_is_down_leaves_the_others() {
    let Some(_turn) = turn() else { return };
    let world = World::new("2gbit");
    let serve = Process::serve(&world, "--memory host");
    world.set_link(Host::B, 4, "down");
    let visit = |args: &str| {
        Process::start(&world, Host::A, &format!("doctor 10.77.1.2 {args} --json")).end(RUN_TIMEOUT)
    };
    let around = visit("");
    assert_eq!((around.status, found(&around.json(), "path").len()), (Some(0), 3), "{around:?}");
    let asked = visit("--nics va1,va4");
    assert_eq!(asked.status, Some(1), "{asked:?}");
    let states = found(&asked.json(), "nic-state");
    assert!(states.contains(&("va4".to_owned(), "fail".to_owned())), "{states:?}");
    assert!(serve.failures().is_empty(), "{}", serve.errors());
}

/// How a run of doctor goes.
struct Case {
    name: &'static str,
    /// Changes the healthy hosts.
    plant: fn(&World),
    /// The peer, and options.
    args: &'static str,
    /// Where a bench serves; empty for nowhere.
    serves: (Host, &'static str),
    /// Commands that start doctor.
    under: &'static [&'static str],
    variables: &'static [(&'static str, &'static str)],
    /// Id, level and part of subject, evidence or fix of the finding that has to be there.
    finds: (&'static str, &'static str, &'static str),
    /// Ids of further alarms that the fault gives.
    and: &'static [&'static str],
}

/// Hosts without a fault.
const HEALTHY: Case = Case {
    name: "four links",
    plant: |_| {},
    args: PEER,
    serves: (Host::B, "0.0.0.0:7420"),
    under: &[],
    variables: &[],
    finds: ("path", "ok", "va4"),
    and: &[],
};

const HEALTHY_HOSTS: [Case; 7] = [
    HEALTHY,
    Case {
        name: "one link",
        plant: |world| {
            for link in 2..=LINKS {
                [Host::A, Host::B].iter().for_each(|host| world.set_link(*host, link, "down"));
            }
        },
        finds: ("path", "ok", "va1"),
        ..HEALTHY
    },
    Case {
        name: "jumbo frames",
        plant: |world| {
            (1..=LINKS)
                .for_each(|link| [Host::A, Host::B].iter().for_each(|host| world.set_mtu(*host, link, 9000)))
        },
        finds: ("path-mtu", "ok", "MTU is 9000"),
        ..HEALTHY
    },
    Case {
        name: "IPv6 only",
        plant: ipv6_only,
        args: PEER_V6,
        serves: (Host::B, "[::]:7420"),
        finds: ("path", "ok", "fd77:4::2"),
        ..HEALTHY
    },
    Case {
        name: "a route for each NIC, and NICs by name",
        plant: routes_by_source,
        args: "10.77.1.2:7420 --nics va1,va2",
        finds: ("path", "ok", "va2"),
        ..HEALTHY
    },
    Case {
        name: "an endpoint for each of two GPUs",
        serves: (Host::B, "0.0.0.0:7420 --gpus 0-1 --gpu-nics 0=vb1,1=vb2"),
        finds: ("path", "ok", "va1"),
        ..HEALTHY
    },
    Case {
        name: "one host",
        args: "127.0.0.1:7420",
        serves: (Host::A, "127.0.0.1:7420"),
        finds: ("path", "ok", "lo"),
        ..HEALTHY
    },
];

const FAULTS: [Case; 20] = [
    Case {
        name: "small packets at the other end of a link",
        plant: |world| world.set_mtu(Host::A, 2, 9000),
        finds: ("path-mtu", "warn", "va2"),
        ..HEALTHY
    },
    Case {
        name: "a firewall that drops what one NIC is answered",
        plant: |world| route(world, Host::B, "add blackhole 10.77.2.1/32"),
        finds: ("peer-channel", "warn", "over va2: no answer"),
        ..HEALTHY
    },
    Case {
        name: "a firewall in front of the peer",
        plant: |world| route(world, Host::B, "add blackhole 10.77.1.1/32"),
        args: "10.77.1.2:7420 --timeout 2",
        finds: ("peer-reachable", "fail", "firewall"),
        ..HEALTHY
    },
    Case {
        name: "no bench at the peer",
        serves: (Host::B, ""),
        finds: ("peer-reachable", "fail", "bench serve"),
        ..HEALTHY
    },
    Case {
        name: "another secret",
        variables: &[("FERRYWIRE_SECRET", "the secret of others")],
        finds: ("peer-greeting", "fail", "--secret-file"),
        ..HEALTHY
    },
    Case {
        name: "IPv6 at the peer alone",
        args: PEER_V6,
        finds: ("peer-reachable", "fail", "no NIC of this host has an IPv6 address"),
        ..HEALTHY
    },
    Case {
        name: "IPv4 of a host that has IPv6 alone",
        plant: ipv6_only,
        finds: ("peer-reachable", "fail", "no NIC of this host has an IPv4 address"),
        ..HEALTHY
    },
    Case {
        name: "another program at the port",
        serves: (Host::B, "0.0.0.0:7421 --metrics 10.77.1.2:7420"),
        finds: ("peer-greeting", "fail", "not ferrywire"),
        ..HEALTHY
    },
    Case {
        name: "a route of this host over the wrong NIC",
        plant: |world| route(world, Host::A, "add 10.77.2.2/32 dev va1"),
        finds: ("route", "warn", "from 10.77.2.1 to 10.77.2.2 leads over va1"),
        ..HEALTHY
    },
    Case {
        name: "a route of the peer over the wrong NIC",
        plant: |world| route(world, Host::B, "add 10.77.2.1/32 dev vb1"),
        finds: ("peer-channel", "warn", "over va2: no answer"),
        ..HEALTHY
    },
    Case {
        name: "an address that the peer has too",
        plant: |world| world.address(Host::A, "va3", "10.77.3.2/24"),
        finds: ("duplicate-address", "warn", "va3"),
        and: &["peer-channel"],
        ..HEALTHY
    },
    Case {
        name: "a NIC of the peer without a counterpart",
        plant: |world| world.address(Host::B, "vb3", "10.99.0.2/24"),
        finds: ("peer-nic", "warn", "10.99.0.2"),
        ..HEALTHY
    },
    Case {
        name: "a NIC that is down and named",
        plant: |world| world.set_link(Host::A, 4, "down"),
        args: "10.77.1.2:7420 --nics va1,va4",
        finds: ("nic-state", "fail", "va4"),
        ..HEALTHY
    },
    Case {
        name: "tiny socket buffers",
        plant: |world| sysctl(world, "tcp_rmem", "4096 8192 65536"),
        finds: ("tcp-buffers", "warn", "tcp_rmem"),
        ..HEALTHY
    },
    Case {
        name: "no selective acknowledgements",
        plant: |world| sysctl(world, "tcp_sack", "0"),
        finds: ("tcp-options", "warn", "tcp_sack is 0"),
        ..HEALTHY
    },
    Case {
        name: "little locked memory",
        under: &["prlimit", "--memlock=65536:65536"],
        finds: ("locked-memory", "note", "64 KiB"),
        ..HEALTHY
    },
    Case {
        name: "few descriptors",
        under: &["prlimit", "--nofile=128:128"],
        finds: ("open-files", "warn", "ulimit -n"),
        ..HEALTHY
    },
    Case {
        name: "one core of several",
        under: &["taskset", "-c", "0"],
        finds: ("affinity", "warn", "taskset"),
        and: &["cores"],
        ..HEALTHY
    },
    Case {
        name: "a variable with a wrong name",
        variables: &[("FERRYWIRE_NIX", "va1")],
        finds: ("unknown-variable", "warn", "FERRYWIRE_NIX"),
        ..HEALTHY
    },
    Case {
        name: "NICs for NCCL that are not there",
        variables: &[("NCCL_SOCKET_IFNAME", "=eth7")],
        finds: ("nccl-nics", "warn", "=eth7 names no NIC"),
        ..HEALTHY
    },
];

fn ip(world: &World, host: Host, args: &str) {
    world.inside(host, "ip", &args.split_whitespace().collect::<Vec<_>>());
}

fn route(world: &World, host: Host, args: &str) {
    ip(world, host, &format!("route {args}"));
}

/// Sets a variable of host A's network.
fn sysctl(world: &World, name: &str, value: &str) {
    let script = format!("echo {value} > /proc/sys/net/ipv4/{name}");
    world.inside(Host::A, "sh", &["-c", &script]);
}

fn ipv6_only(world: &World) {
    for (host, last) in [(Host::A, 1), (Host::B, 2)] {
        for link in 1..=LINKS {
            ip(world, host, &format!("addr flush dev {}", host.nic(link)));
            ip(world, host, &format!("addr add fd77:{link}::{last}/64 dev {} nodad", host.nic(link)));
        }
    }
}

/// Routes for hosts whose NICs are in one subnet: each address leaves over its own NIC.
fn routes_by_source(world: &World) {
    for (host, last) in [(Host::A, 1), (Host::B, 2)] {
        for link in 1..=LINKS {
            let nic = host.nic(link);
            ip(world, host, &format!("rule add from 10.77.{link}.{last} table {link}"));
            route(world, host, &format!("add 10.77.{link}.0/24 dev {nic} table {link}"));
        }
        // Without a source, all of it seems to leave over the first NIC.
        route(world, host, &format!("add 10.77.0.0/16 dev {}", host.nic(1)));
    }
}

/// Id and subject of the findings that are alarms.
fn alarms(report: &Value) -> BTreeSet<(String, String)> {
    let all = report["findings"].as_array().expect("findings").iter();
    let alarms = all.filter(|finding| finding["level"] == "warn" || finding["level"] == "fail");
    let text = |value: &Value| value.as_str().expect("text").to_owned();
    alarms.map(|finding| (text(&finding["id"]), text(&finding["subject"]))).collect()
}

/// What is wrong with doctor's report of a case. `host_has` are the alarms that this host gives without a peer.
fn wrong(case: &Case, host_has: &BTreeSet<(String, String)>) -> Option<String> {
    let world = World::new("2gbit");
    (case.plant)(&world);
    let (host, listen) = case.serves;
    let serve = (!listen.is_empty()).then(|| Process::serve_at(&world, host, listen, "--memory host"));
    let variables: Vec<_> = case.variables.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
    let args = format!("doctor {} --json", case.args);
    let report = Process::start_under(&world, Host::A, case.under, &args, &variables).end(RUN_TIMEOUT).json();
    let (id, level, part) = case.finds;
    let all = report["findings"].as_array().expect("findings");
    let is_it = |finding: &&Value| {
        let has = |field: &str| finding[field].as_str().is_some_and(|text| text.contains(part));
        // On a busy machine a round trip is long, which is a note.
        let is_level = finding["level"] == level || (level == "ok" && finding["level"] == "note");
        finding["id"] == id && is_level && ["subject", "evidence", "fix"].into_iter().any(has)
    };
    let failures = serve.map_or_else(Vec::new, |serve| serve.failures());
    let mut alarms = alarms(&report);
    alarms.retain(|alarm| !host_has.contains(alarm));
    let others: Vec<_> =
        alarms.iter().filter(|(of, _)| of != id && !case.and.contains(&of.as_str())).collect();
    let missed = !all.iter().any(|finding| is_it(&finding));
    (missed || !others.is_empty()).then(|| {
        format!(
            "{}: finds {id}: {}, false alarms {others:?}, serve says {failures:?}\n{report:#}",
            case.name, !missed
        )
    })
}

/// Runs cases, some at once, and fails with all that is wrong.
fn hold_to_account(cases: &[Case]) {
    let world = World::new("2gbit");
    let alone = Process::start(&world, Host::A, "doctor --json").end(RUN_TIMEOUT).json();
    let host_has = alarms(&alone);
    let (rest, found) = (Mutex::new(cases.iter()), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some(case) = { rest.lock().expect("a case").next() } {
                    let wrong = wrong(case, &host_has);
                    found.lock().expect("no panic").extend(wrong);
                }
            });
        }
    });
    let found = found.into_inner().expect("no panic");
    assert!(found.is_empty(), "{} of {} cases:\n{}", found.len(), cases.len(), found.join("\n"));
}

#[test]
fn planted_faults_are_found_by_name() {
    let Some(_turn) = shared_turn() else { return };
    hold_to_account(&FAULTS);
}

#[test]
fn healthy_hosts_give_no_alarm() {
    let Some(_turn) = shared_turn() else { return };
    hold_to_account(&HEALTHY_HOSTS);
}
