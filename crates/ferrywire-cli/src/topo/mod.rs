//! `ferrywire topo`: shows this host's hardware, and which GPU uses which NICs.
//!
//! `ferrywire_host::topology` finds and plans; this module only shows the result.
//! Read next: [`report`].

mod report;

use ferrywire_devmem::nic::{self, CleanUp};
use ferrywire_host::topology::{Plan, PlanError, Source, Topology};

use crate::exit::{self, Failure, Outcome};
use crate::plan::TopoPlan;
use report::Report;

/// Prints the topology, with the plan if there is one.
pub fn run(asked: &TopoPlan) -> Outcome {
    let cleaned = if asked.clean_up { clean_up() } else { Ok(()) };
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
    let outcome = outcome.and(cleaned);
    let report = Report { topology: &topology, plan: plan.as_ref(), channels: asked.channels };
    let text = if asked.json { format!("{}\n", report.json(outcome.as_ref().err())) } else { report.text() };
    let printed = exit::print(&text);
    outcome.and(printed)
}

/// Undoes what killed runs have left, and reports it.
fn clean_up() -> Outcome {
    let CleanUp { reported, failed } = nic::clean_up();
    reported.iter().for_each(|line| exit::note(line));
    if reported.is_empty() {
        exit::note("no run has left anything at a NIC of this network namespace");
    }
    if failed {
        return Err(Failure::failed(
            "--clean-up is incomplete: changes of earlier runs may be left at NICs, for the reasons above",
        ));
    }
    Ok(())
}

fn failure(error: &PlanError) -> Failure {
    if error.is_usage() { Failure::Usage(error.to_string()) } else { Failure::failed(error.to_string()) }
}
