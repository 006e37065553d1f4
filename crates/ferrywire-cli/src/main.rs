//! The `ferrywire` command.
//!
//! The way of an invocation: [`args`] takes what was typed, [`plan`] decides what it means, [`mod@bench`],
//! [`mod@plugin`], [`nixl`], [`topo`] or [`doctor`] does it, and [`exit`] alone turns the outcome into an exit status. Unsafe code is fenced into [`sys`].

// What is said on standard error goes through `exit`, which survives that nobody listens.
#![deny(clippy::print_stderr)]

mod args;
mod bench;
mod doctor;
mod exit;
mod file;
mod memory;
mod nics;
mod nixl;
mod plan;
mod plugin;
mod sanitize;
mod sys;
mod tool;
mod topo;
mod transport;
mod units;

use std::panic::catch_unwind;
use std::process::ExitCode;

use bench::isolated::Order;

fn main() -> ExitCode {
    exit::tell_panics();
    let outcome = catch_unwind(run);
    if let Ok(outcome) = &outcome {
        bench::parent::tell_outcome(outcome);
    }
    // Threads may still hold endpoints, which end with the process: what was set at NICs would not.
    ferrywire_devmem::release_nics();
    // What it panicked with is told.
    outcome.map_or(ExitCode::FAILURE, exit::report)
}

fn run() -> exit::Outcome {
    let typed = args::parse();
    let verbose = typed.verbose;
    let plan = plan::plan(typed)?;
    // What a child would log its parent says.
    if !matches!(plan, plan::Plan::PluginChild(..)) {
        exit::start_log(verbose, matches!(plan, plan::Plan::Serve(_)));
    }
    sys::catch_interrupt();
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
        plan::Plan::Nixl(plan) => nixl::run(&plan),
        plan::Plan::PluginChild(path, version) => plugin::child::run(&path, version),
    }
}
