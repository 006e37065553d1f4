//! Topologies of recorded hosts, and the plans made of them.

mod hosts;
mod mesh;
mod options;
mod order;
mod rails;
mod spread;
#[allow(dead_code, reason = "the command's tests use all of it")]
mod tree;

use ferrywire_host::topology::{Plan, PlanError, PlanOptions, Source, Topology};
use tree::Tree;

/// The topology of a recorded host, or of text in the same format.
fn topology(text: &str) -> Topology {
    let tree = Tree::of(text);
    Topology::read(&Source::recorded(tree.root()).expect("facts"))
}

fn named(name: &str) -> Topology {
    topology(&tree::text(name))
}

/// A recorded host without the lines that contain one of some words.
fn without(name: &str, words: &[&str]) -> String {
    let text = tree::text(name);
    let kept = text.lines().filter(|line| !words.iter().any(|word| line.split(' ').any(|w| w == *word)));
    kept.map(|line| format!("{line}\n")).collect()
}

fn plan(topology: &Topology) -> Plan {
    Plan::of(topology, &PlanOptions::default()).expect("a plan")
}

fn refused(topology: &Topology, options: &PlanOptions) -> PlanError {
    Plan::of(topology, options).expect_err("no plan")
}

/// NICs of each GPU: `["eth1", "eth1+eth2"]`.
fn nics(plan: &Plan) -> Vec<String> {
    plan.gpus.iter().map(|gpu| gpu.nics.join("+")).collect()
}
