//! `ferrywire topo`: shows this host's hardware, and which GPU uses which NICs.
//!
//! `ferrywire_host::topology` finds and plans; this module only shows the result.
//! Read next: [`report`].

mod report;

use ferrywire_devmem::nic;
use ferrywire_host::topology::{Plan, PlanError, Source, Topology};

use crate::exit::{self, Failure, Outcome};
use crate::plan::TopoPlan;
use report::Report;

/// Prints the topology, with the plan if there is one.
pub fn run(asked: &TopoPlan) -> Outcome {
    if asked.clean_up {
        let reported = nic::clean_up();
        reported.iter().for_each(|line| exit::note(line));
        if reported.is_empty() {
            exit::note("no run has left anything at a NIC of this network namespace");
        }
    }
    let source = match &asked.root {
        Some(root) => Source::recorded(root)?,
        None => Source::detect(),
    };
    let mut topology = Topology::read(&source);
    if asked.root.is_none() {
        topology.probe_devmem();
    }
    let (plan, outcome) = match Plan::of(&topology, &asked.options) {
        Ok(plan) => (Some(plan), Ok(())),
        Err(error) => (None, Err(failure(&error))),
    };
    let report = Report { topology: &topology, plan: plan.as_ref(), channels: asked.channels };
    let text = if asked.json { format!("{}\n", report.json(outcome.as_ref().err())) } else { report.text() };
    let printed = exit::print(&text);
    outcome.and(printed)
}

fn failure(error: &PlanError) -> Failure {
    if error.is_usage() { Failure::Usage(error.to_string()) } else { Failure::failed(error.to_string()) }
}
