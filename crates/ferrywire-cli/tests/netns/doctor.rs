//! Findings of `doctor` between hosts: paths, packet sizes and NICs without a counterpart.

use serde_json::Value;

use crate::process::Process;
use crate::world::{Host, World};
use crate::{RUN_TIMEOUT, turn};

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
