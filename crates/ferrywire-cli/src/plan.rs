//! The meaning of flags: applies every default, and refuses contradictions.
//!
//! Read next: `plan/`, a file for each command; `transport.rs`.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;

use ferrywire_ncclnet::abi::Version;

use crate::args::{Cli, Command, End, NcclCommand};
use crate::auto::Given;
use crate::bench::protocol::SECONDS_MAX;
use crate::exit::{Failure, Outcome};

mod connect;
mod doctor;
mod engine;
mod nccl;
mod nixl;
mod plugin;
mod ranks;
mod report;
mod run;
mod serve;
mod topo;
mod watch;

pub use connect::ConnectPlan;
pub use doctor::DoctorPlan;
pub use engine::EnginePlan;
pub use nccl::NcclPlan;
pub use nixl::{NixlAction, NixlPlan};
pub use plugin::PluginPlan;
pub use ranks::RanksPlan;
pub use report::ReportPlan;
pub use serve::ServePlan;
pub use topo::TopoPlan;
pub use watch::WatchPlan;

use connect::{loopback_flags, plan_connect, with_file};
use engine::unnumbered;

/// The port of `serve` and `connect` if none is given.
const PORT_DEFAULT: u16 = 7420;
/// Default of the longest time without progress, in seconds.
const TIMEOUT_S_DEFAULT: f64 = 30.0;

/// The work of this process.
#[derive(Debug)]
pub enum Plan {
    /// A bench with both ends on this host.
    Loopback(Box<ConnectPlan>),
    /// The listening end of a bench.
    Serve(Box<ServePlan>),
    /// The connecting end of a bench.
    Connect(Box<ConnectPlan>),
    /// One rank of a bench of several processes.
    Ranks(Box<RanksPlan>),
    /// Show a topology.
    Topo(TopoPlan),
    /// Check a host, and a peer.
    Doctor(Box<DoctorPlan>),
    /// Show a plugin.
    Plugin(PluginPlan),
    /// Show live rates.
    Watch(WatchPlan),
    /// Show stored results.
    Report(ReportPlan),
    /// Install, show or remove the NIXL backend.
    Nixl(NixlPlan),
    /// Print the environment for NCCL.
    Nccl(NcclPlan),
    /// The child process that loads a plugin for [`Plan::Plugin`].
    PluginChild(PathBuf, Option<Version>),
    /// The child process that loads the CUDA driver for [`Plan::Doctor`].
    DriverChild,
}

/// Makes the plan for a parsed command line.
///
/// # Errors
/// Contradicting or invalid flags.
pub fn plan(typed: Cli) -> Outcome<Plan> {
    let verbose = typed.verbose > 0;
    let bench = match typed.command {
        Command::Bench(bench) => bench,
        Command::Topo(flags) => return topo::plan(flags).map(Plan::Topo),
        Command::Watch(flags) => return watch::plan(&flags, verbose).map(Plan::Watch),
        Command::Doctor(flags) => return doctor::plan(flags, verbose).map(Box::new).map(Plan::Doctor),
        Command::Plugin(flags) => return plugin::plan(flags, verbose).map(Plan::Plugin),
        Command::Report(flags) => return report::plan(flags).map(Plan::Report),
        Command::Nixl { action } => return nixl::plan(action).map(Plan::Nixl),
        Command::Nccl { action: NcclCommand::Env(flags) } => {
            return nccl::plan(flags, verbose).map(Plan::Nccl);
        }
        Command::PluginChild { path, version } => return Ok(Plan::PluginChild(path, version)),
        Command::DriverChild => return Ok(Plan::DriverChild),
    };
    match bench.end {
        None => match ranks::of(&bench.options, bench.ranks)? {
            Some((ranks, flags)) => {
                let plan = ranks::plan(bench.options, ranks, &flags, verbose)?;
                Ok(Plan::Ranks(Box::new(plan)))
            }
            None => {
                let options = loopback_flags(bench.options)?;
                Ok(Plan::Loopback(Box::new(plan_connect(options, Vec::new(), false, verbose)?)))
            }
        },
        Some(End::Serve(flags)) => Ok(Plan::Serve(Box::new(serve::plan(*flags, verbose)?))),
        Some(End::Connect { address, options }) => {
            let addresses = resolve("ADDR:PORT", &address)?;
            let options = with_file(*options)?;
            unnumbered("--memory", options.gpus.as_ref(), options.memory.given_ref().map(String::as_str))?;
            let beyond = addresses.iter().any(|address| !address.ip().is_loopback());
            let plan = plan_connect(options, addresses, beyond, verbose)?;
            Ok(Plan::Connect(Box::new(ConnectPlan { typed_address: Some(address), ..plan })))
        }
    }
}

fn resolve(flag: &str, text: &str) -> Outcome<Vec<SocketAddr>> {
    look_up(&with_port(flag, text)?).map_err(|why| Failure::failed(format!("{flag} {text}: {why}")))
}

/// The host and port of an address, with the default port if it has none. Nothing is looked up.
pub fn with_port(flag: &str, text: &str) -> Outcome<String> {
    let bare: Result<IpAddr, _> = text.trim_matches(['[', ']']).parse();
    if let Ok(ip) = bare {
        return Ok(SocketAddr::new(ip, PORT_DEFAULT).to_string());
    }
    if matches!(text.rsplit_once(':').map_or(text, |(host, _)| host), "" | "[]") {
        return usage(format!(
            "{flag} \"{text}\": the host is empty; write ADDR:PORT, for example 10.0.0.2:{PORT_DEFAULT}"
        ));
    }
    let with_port = if text.contains(':') { text.to_owned() } else { format!("{text}:{PORT_DEFAULT}") };
    let port_is_number = with_port.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    if !port_is_number {
        return usage(format!(
            "{flag} {text}: not an address; write ADDR:PORT, for example 10.0.0.2:{PORT_DEFAULT}"
        ));
    }
    Ok(with_port)
}

/// The addresses of a host and port. May wait for a name server.
pub fn look_up(host_and_port: &str) -> Result<Vec<SocketAddr>, String> {
    let found = host_and_port.to_socket_addrs();
    let found: Vec<SocketAddr> =
        found.map_err(|error| format!("cannot look up the name: {error}"))?.collect();
    if found.is_empty() { Err("the name has no address; write an IP address".to_owned()) } else { Ok(found) }
}

fn at_least_one(flag: &str, value: Option<usize>) -> Outcome<Option<usize>> {
    if value == Some(0) { usage(format!("{flag} must be at least 1 (got 0)")) } else { Ok(value) }
}

fn seconds(flag: &str, value: Option<f64>) -> Outcome<Option<f64>> {
    match value {
        Some(s) if !(s > 0.0 && s <= SECONDS_MAX) => {
            usage(format!("{flag} must be above 0 and at most {SECONDS_MAX} seconds (got {s})"))
        }
        other => Ok(other),
    }
}

fn usage<T>(message: impl Into<String>) -> Outcome<T> {
    Err(Failure::Usage(message.into()))
}

#[cfg(test)]
mod tests {
    use super::run::SECONDS_DEFAULT;
    use super::*;
    use crate::args::{ConnectFlags, Pattern};
    use crate::auto::OrAuto;
    use crate::bench::protocol::Run;
    use crate::units::Sizes;

    fn run(flags: ConnectFlags) -> Outcome<Run> {
        plan_connect(flags, Vec::new(), false, false).map(|plan| plan.run)
    }

    #[test]
    fn seconds_apply_only_without_iterations() {
        assert_eq!(run(ConnectFlags::default()).map(|run| run.seconds), Ok(Some(SECONDS_DEFAULT)));
        let counted = ConnectFlags { iters: Some(7), ..Default::default() };
        assert_eq!(run(counted).map(|run| (run.iters, run.seconds)), Ok((Some(7), None)));
    }

    #[test]
    fn contradictions_are_bad_usage() {
        let bad = [
            ConnectFlags { depth: Some(OrAuto::Value(0)), ..Default::default() },
            ConnectFlags { peers: Some(3), ..Default::default() },
            ConnectFlags { memory: Some(OrAuto::Value("cuda:x".to_owned())), ..Default::default() },
            ConnectFlags { peer_memory: Some(OrAuto::Value("sim:99".to_owned())), ..Default::default() },
            ConnectFlags { pattern: Some(Pattern::AllToAll), ..Default::default() },
            ConnectFlags {
                pattern: Some(Pattern::Latency),
                depth: Some(OrAuto::Value(2)),
                ..Default::default()
            },
            ConnectFlags { blocks: Some(5), sizes: Some(Sizes(vec![4])), ..Default::default() },
            ConnectFlags { seconds: Some(f64::NAN), ..Default::default() },
        ];
        for flags in bad {
            assert!(matches!(run(flags.clone()), Err(Failure::Usage(_))), "{flags:?}");
        }
    }

    #[test]
    fn addresses_may_lack_the_port() {
        assert_eq!(resolve("x", "10.0.0.2"), Ok(vec![SocketAddr::from(([10, 0, 0, 2], PORT_DEFAULT))]));
        assert_eq!(resolve("x", "10.0.0.2:9"), Ok(vec![SocketAddr::from(([10, 0, 0, 2], 9))]));
        assert_eq!(resolve("x", "[::1]:9").map(|found| found[0].port()), Ok(9));
        assert!(matches!(resolve("x", "host:port"), Err(Failure::Usage(_))));
        for empty in ["", ":17000", "[]:17000"] {
            let said = resolve("--listen", empty);
            assert!(
                matches!(&said, Err(Failure::Usage(why)) if why.contains("the host is empty")),
                "{said:?}"
            );
        }
    }
}
