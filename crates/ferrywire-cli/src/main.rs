//! The `ferrywire` command.
//!
//! An invocation goes through [`args`], which parses it, and [`plan`], which applies defaults and checks, to
//! [`mod@bench`], [`mod@plugin`], [`nccl`], [`nixl`], [`topo`], [`doctor`], [`watch`] or [`report`], which carry it out. Only
//! [`exit`] turns the outcome into an exit status. All unsafe code is in [`sys`].

// Output to standard error goes through `exit`, which survives a closed descriptor.
#![deny(clippy::print_stderr)]

mod args;
mod auto;
mod bench;
mod doctor;
mod exit;
mod file;
mod memory;
mod nccl;
mod nics;
mod nixl;
mod places;
mod plan;
mod plugin;
mod report;
mod sanitize;
mod sys;
mod tool;
mod topo;
mod transport;
mod units;
mod watch;

use std::panic::catch_unwind;
use std::process::ExitCode;

use bench::isolated::Order;

fn main() -> ExitCode {
    exit::tell_panics();
    let outcome = catch_unwind(run);
    // Threads may still hold endpoints. Endpoints end with the process, but their changes of NICs would not.
    ferrywire_devmem::release_nics();
    // Report the outcome last: a parent kills a child that has reported its outcome.
    match &outcome {
        Ok(outcome) => bench::parent::tell_outcome(outcome),
        Err(_) => bench::parent::tell_outcome(&Err(exit::Failure::panicked())),
    }
    // If a thread has panicked, its message has been printed already.
    outcome.map_or(ExitCode::FAILURE, exit::report)
}

fn run() -> exit::Outcome {
    let typed = args::parse();
    let verbose = typed.verbose;
    let is_evaluated = matches!(typed.command, args::Command::Nccl { .. });
    let plan = match plan::plan(typed) {
        Err(failure) if is_evaluated => return nccl::refuse(failure),
        plan => plan?,
    };
    // A child's log lines are printed by its parent.
    if !matches!(plan, plan::Plan::PluginChild(..)) {
        exit::start_log(verbose, matches!(plan, plan::Plan::Serve(_)));
    }
    ferrywire_metrics::set_face("command");
    // A report has nothing to undo while it reads its files, which may block.
    if !matches!(plan, plan::Plan::Report(_)) {
        sys::catch_interrupt();
    }
    if let Some(order) = Order::from_env() {
        return bench::isolated::child::run(plan, order);
    }
    match plan {
        plan::Plan::Loopback(plan) => bench::loopback::run(*plan),
        plan::Plan::Serve(plan) => bench::serve::run(*plan),
        plan::Plan::Connect(plan) => bench::connect::run(*plan),
        plan::Plan::Ranks(plan) => bench::ranks::run(&plan),
        plan::Plan::Topo(plan) => topo::run(&plan),
        plan::Plan::Doctor(plan) => doctor::run(&plan),
        plan::Plan::Plugin(plan) => plugin::run(&plan),
        plan::Plan::Watch(plan) => watch::run(&plan),
        plan::Plan::Report(plan) => report::run(&plan),
        plan::Plan::Nccl(plan) => nccl::run(&plan),
        plan::Plan::Nixl(plan) => nixl::run(&plan),
        plan::Plan::PluginChild(path, version) => plugin::child::run(&path, version),
        plan::Plan::DriverChild => doctor::driver::child(),
    }
}
