//! Four links share the load, whatever one of them does.

use std::thread;

use serde_json::Value;

use crate::clock::undisturbed;
use crate::process::{Process, wait_until};
use crate::world::{Host, LINKS, World};
use crate::{RUN_TIMEOUT, long, shared_turn, skip, turn};

/// Bytes sent over each link, by the result of a run.
fn sent(row: &Value) -> Vec<u64> {
    let per_nic = row["per_nic"].as_array().expect("per_nic");
    let of = |link| {
        let nic = Host::A.nic(link);
        let found = per_nic.iter().find(|entry| entry["nic"] == nic.as_str());
        found.and_then(|entry| entry["tx_bytes"].as_u64()).unwrap_or_else(|| panic!("no {nic} in {row}"))
    };
    (1..=LINKS).map(of).collect()
}

#[test]
fn four_nics_share_the_load() {
    let Some(_turn) = turn() else { return };
    // Only links that are the limit are shared evenly. Where others keep the cores busy, slower ones may be.
    let mut limit = String::new();
    for rate in ["2gbit", "500mbit"] {
        let world = World::new(rate);
        let _serve = Process::serve(&world, "");
        let run = Process::connect(&world, "--sizes 64M --depth 4 --seconds 3");
        let row = run.end(RUN_TIMEOUT).verified();
        let sent = sent(&row);
        limit = row["bottleneck"].as_str().unwrap_or_default().to_owned();
        println!("{rate}: {sent:?}, limited by {limit}");
        let (least, most) = (sent.iter().min().expect("four"), sent.iter().max().expect("four"));
        if most - least <= most / 20 {
            return;
        }
        assert!(limit.starts_with("CPU: all cores of"), "{rate}: {sent:?}, limited by {limit}");
    }
    skip(&format!("cores that are not busy with other work, to share links evenly: {limit}"));
}

#[test]
fn a_slow_nic_gets_less() {
    let Some(_turn) = turn() else { return };
    // The links are the limit also where other work keeps the cores busy.
    let world = World::new("500mbit");
    world.shape(3, "50mbit");
    let _serve = Process::serve(&world, "");
    let row = Process::connect(&world, "--sizes 64M --depth 4 --seconds 3").end(RUN_TIMEOUT).verified();
    let sent = sent(&row);
    let slow = sent[2];
    assert!(slow > 0, "{sent:?}");
    assert!([0, 1, 3].iter().all(|link| slow < sent[*link] / 4), "{sent:?}");
}

#[test]
fn each_nic_lost_in_turn_carries_again() {
    let Some(_turn) = shared_turn() else { return };
    // The first link carries the control connection too.
    let links: &[&[usize]] = if long() { &[&[1, 2], &[3, 4]] } else { &[&[1, 3]] };
    for together in links {
        thread::scope(|scope| {
            for link in *together {
                // On a busy machine a run may be over before the link carries again.
                scope.spawn(|| assert!([12, 60].iter().any(|seconds| undisturbed(|| lose(*link, *seconds)))));
            }
        });
    }
}

/// A run in the course of which one link is down until its channel is lost; false if the run ended before that link carried again.
fn lose(link: usize, seconds: u64) -> bool {
    /// More than heartbeats can come to.
    const DATA_BYTES: u64 = 10_000_000;
    let world = World::new("300mbit");
    let _serve = Process::serve(&world, "");
    let mut run = Process::connect(&world, &format!("--sizes 4M --depth 8 --seconds {seconds} -v"));
    let nic = Host::A.nic(link);
    let begun = || world.sent_bytes(Host::A, link) > DATA_BYTES;
    assert!(wait_until(RUN_TIMEOUT, begun), "link {link} carries nothing: {}", run.errors());
    world.set_link(Host::A, link, "down");
    let is_loss = |line: &str| line.contains("lost channel") && line.contains(&nic);
    let lost = wait_until(RUN_TIMEOUT, || run.errors().lines().any(is_loss));
    assert!(lost, "link {link} is down, and its channel is not lost: {}", run.errors());
    let before = world.sent_bytes(Host::A, link);
    world.set_link(Host::A, link, "up");
    let carries = || world.sent_bytes(Host::A, link) > before + DATA_BYTES;
    wait_until(RUN_TIMEOUT, || carries() || !run.runs());
    if !carries() {
        println!("link {link} has not carried again in a run of {seconds} s: {}", run.errors());
        return false;
    }
    let ended = run.end(RUN_TIMEOUT);
    let row = ended.verified();
    let named = |line: &str| line.starts_with("lost: ") && line.contains(&nic);
    assert!(ended.errors.lines().any(named), "no word of {nic}: {}", ended.errors);
    let lost = row["extra"]["lost_channels"].to_string();
    assert!(lost.contains(&nic), "{row}");
    assert!(sent(&row).iter().all(|bytes| *bytes > DATA_BYTES), "{row}");
    true
}
