//! The command line as typed: one flag per option, before any decision.
//!
//! Every flag is an `Option`, so that "not given" stays visible: the environment (`FERRYWIRE_<FLAG>`)
//! fills in first, then the TOML file ([`crate::file`]), and [`crate::plan`] gives the rest its meaning.
//!
//! The first paragraph of a flag's comment is its line of `-h`: at most [`help::LINE_CHARS_MAX`] characters, with the default.
//! Further paragraphs are shown by `--help` only.
//!
//! Invariant: an option whose help says `[default: auto]` takes the word `auto`
//! ([`OrAuto`](crate::auto::OrAuto)), and so does an option of this name in another command, since one variable
//! or file may serve several commands.
//! Read next: `args/`, a file for each command.

mod bench;
mod doctor;
mod help;
mod nccl;
mod nixl;
mod plugin;
mod report;
mod topo;
mod watch;

pub use bench::{
    Bench, ConnectFlags, End, Inject, Op, Pattern, RankArgs, ServeFlags, Transport, Unpack, Verify,
};
pub use doctor::DoctorFlags;
pub use nccl::{NcclCommand, NcclFlags};
pub use nixl::{NixlCommand, NixlFlags};
pub use plugin::PluginFlags;
pub use report::ReportFlags;
pub use topo::TopoFlags;
pub use watch::WatchFlags;

use std::ffi::OsStr;
use std::path::PathBuf;

use clap::{ArgAction, CommandFactory, FromArgMatches, Parser, Subcommand};
use ferrywire_ncclnet::abi::Version;

/// Move GPU and host memory between machines over TCP NICs, and measure how fast
#[derive(Debug, Parser)]
#[command(name = "ferrywire", version, after_long_help = help::COMMAND)]
pub struct Cli {
    /// Print the effective values and the engine's log; -vv logs more
    ///
    /// The log has level info with -v, debug with -vv and trace with -vvv. `bench` also prints the seconds of each stage of a
    /// size, `doctor` the findings with level ok, and `plugin` the log of the plugin.
    #[arg(short, long, global = true, action = ArgAction::Count)]
    pub verbose: u8,
    /// What to do
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Measure and verify transfers, between two hosts or on this host alone
    ///
    /// `bench serve` and `bench connect` are the two ends of a run. Without a subcommand both ends run on this host over
    /// loopback. Started by torchrun, mpirun, mpiexec or srun, the process is one rank of a run.
    Bench(Box<Bench>),
    /// Show GPUs, NICs, NUMA nodes, PCIe roots, and which GPU uses which NICs
    #[command(after_long_help = help::TOPO)]
    Topo(TopoFlags),
    /// Check this host and the way to a peer; each finding has evidence and a fix
    #[command(after_long_help = help::DOCTOR)]
    Doctor(DoctorFlags),
    /// Show the versions, devices and properties of an NCCL net plugin
    #[command(after_long_help = help::PLUGIN)]
    Plugin(PluginFlags),
    /// Show live rates of all processes of this host that use ferrywire
    ///
    /// Each process has a socket that only its user and root can read, whatever way it uses ferrywire: command, Rust, Python,
    /// C, NIXL or NCCL. Root sees the processes of all users.
    #[command(after_long_help = help::WATCH)]
    Watch(WatchFlags),
    /// Show stored results of bench as a web page or a table, runs side by side
    #[command(after_long_help = help::REPORT)]
    Report(ReportFlags),
    /// Print the environment with which NCCL uses ferrywire
    #[command(after_long_help = help::NCCL)]
    Nccl {
        /// What to do
        #[command(subcommand)]
        action: NcclCommand,
    },
    /// Install, check or remove the NIXL backend of a Python environment
    #[command(after_long_help = help::NIXL)]
    Nixl {
        /// What to do
        #[command(subcommand)]
        action: NixlCommand,
    },
    /// The process in which a plugin is started
    #[command(hide = true)]
    PluginChild {
        /// Plugin file, as for `ferrywire plugin`
        path: PathBuf,
        /// Interface version to use, as for `ferrywire plugin`
        #[arg(long)]
        version: Option<Version>,
    },
    /// The process in which the CUDA driver is loaded
    #[command(hide = true)]
    DriverChild,
}

/// Parses the command line and the environment. Ends the process with status 2 if they are not valid.
pub fn parse() -> Cli {
    let parsed = command().try_get_matches().and_then(|matches| Cli::from_arg_matches(&matches));
    parsed.unwrap_or_else(|error| {
        let typed: Vec<_> = std::env::args_os().skip(1).filter(|word| !is_flag(word)).take(2).collect();
        if error.use_stderr() && typed == ["nccl", "env"] {
            // The usage error is what is reported.
            let _ = crate::nccl::print_failing();
        }
        error.exit()
    })
}

fn is_flag(word: &OsStr) -> bool {
    word.as_encoded_bytes().starts_with(b"-")
}

/// Builds the command line of `ferrywire`. Each option can also be set by its environment variable.
pub fn command() -> clap::Command {
    help::wrapped(with_environment(Cli::command()))
}

/// Name of the environment variable of an option.
pub fn variable(long: &str) -> String {
    format!("FERRYWIRE_{}", long.replace('-', "_").to_ascii_uppercase())
}

/// The options of `bench` and of its ends.
pub fn of_bench(command: &clap::Command) -> impl Iterator<Item = &clap::Arg> {
    let bench = command.find_subcommand("bench").expect("bench is a subcommand");
    bench.get_subcommands().flat_map(|end| end.get_arguments()).chain(bench.get_arguments())
}

/// Environment variables of the options of `bench` and of its ends, those of former spellings too.
pub fn bench_variables() -> Vec<String> {
    let command = command();
    let names = of_bench(&command).flat_map(|arg| arg.get_long().into_iter().chain(former_names(arg)));
    names.map(variable).collect()
}

/// Former spellings of an option, which stay valid.
pub fn former_names(arg: &clap::Arg) -> impl Iterator<Item = &str> {
    arg.get_all_aliases().into_iter().flatten()
}

/// Name of the environment variable of a former spelling, if that variable is set and today's is not.
fn variable_set(arg: &clap::Arg) -> Option<String> {
    let today = arg.get_long().map(variable)?;
    if std::env::var_os(today).is_some() {
        return None;
    }
    former_names(arg).map(variable).find(|name| std::env::var_os(name).is_some())
}

fn with_environment(command: clap::Command) -> clap::Command {
    let named = command.mut_args(|arg| match arg.get_long() {
        Some(long) if !["help", "version", "verbose"].contains(&long) => {
            let variable = variable_set(&arg).unwrap_or_else(|| variable(long));
            arg.env(variable).hide_env(true)
        }
        _ => arg,
    });
    let subcommands: Vec<String> = named.get_subcommands().map(|sub| sub.get_name().to_owned()).collect();
    subcommands.into_iter().fold(named, |command, name| command.mut_subcommand(name, with_environment))
}
