//! What was typed: one typed flag per option, nothing decided yet.
//!
//! Every flag is an `Option`, so that "not given" stays visible: the environment (`FERRYWIRE_<FLAG>`)
//! fills in first, then the TOML file ([`crate::file`]), and [`crate::plan`] gives the rest its meaning.

use std::path::PathBuf;

use clap::builder::{BoolishValueParser, FalseyValueParser};
use clap::{ArgAction, Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use ferrywire_ncclnet::abi::Version;
use serde::{Deserialize, Serialize};

use crate::units::{Bytes, Gpus, Names, Sizes};

const AFTER_HELP: &str = "Every option but -v can also be given as FERRYWIRE_<OPTION> in the environment or, of bench, under its name in the TOML \
file of --config; an option goes before the environment, the environment before the file. Sizes take K, M, G \
(powers of 1024); rates are decimal (GB/s = 1e9 bytes/s).\n\nExit status: 0 finished and verified, 1 failed, 2 bad usage, \
130 stopped by Ctrl-C, 143 by SIGTERM.";

const PLUGIN_AFTER_HELP: &str = "The file's code runs, as its users run it: name only plugins that you trust. With -v \
what it logs is printed.\n\nExit status: 0 the plugin works and has devices, 1 it does not, 2 bad usage, 130 stopped by \
Ctrl-C, 143 by SIGTERM.";

const TOPO_AFTER_HELP: &str = "Each GPU uses the NICs behind its own PCIe bridge, else those below its PCIe root, else \
those of its NUMA node; what is slower than it might be is noted. Without a GPU all NICs serve host memory.\n\nExit status: \
0 there is a plan, 1 there is none (the tables are printed all the same), 2 bad usage.";

const DOCTOR_AFTER_HELP: &str = "FAIL: something does not work. warn: it works, slower than it might, or not for everything. \
info: good to know. Each finding has its evidence and what to type or change; no setting is changed. Without ADDR:PORT only \
this host is looked at. With it the peer is visited over each NIC that a run would use: whether it answers, is ferrywire of \
this version, holds the same secret and is free, and which NICs lead to which of its; nothing is measured. A plugin's code \
runs, in a process of its own: name only plugins that you trust.\n\nExit status: 0 nothing failed, 1 a finding is FAIL, 2 bad \
usage, 130 stopped by Ctrl-C, 143 by SIGTERM.";

const NIXL_AFTER_HELP: &str = "NIXL takes backends from one folder, beside its own library; NIXL_PLUGIN_DIR replaces that folder \
rather than adding to it. So the backend is copied there, into each NIXL of the environment: nixl-cu12 and nixl-cu13 alike. The \
environment is that of --python, else the virtual environment in which this command lies, else the active one (VIRTUAL_ENV), \
else that of python3. Programs then ask NIXL for the backend FERRYWIRE.\n\nExit status: 0 done; of status: every NIXL has the \
backend. 1 it could not be done; of status: there is no NIXL, or one lacks the backend. 2 bad usage.";

/// Moves memory between machines over ordinary TCP NICs, and says how fast and whether it arrived.
#[derive(Debug, Parser)]
#[command(name = "ferrywire", version, after_help = AFTER_HELP)]
pub struct Cli {
    /// Print the effective values of a run; twice for the engine's own log
    #[arg(short, long, global = true, action = ArgAction::Count)]
    pub verbose: u8,
    /// What to do
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Measure and verify transfers; without serve or connect: both ends on this host, over loopback, or with torchrun, mpirun, mpiexec or srun one process of a run
    Bench(Box<Bench>),
    /// GPUs, NICs, NUMA nodes, PCIe roots of this host, and the plan: which GPU uses which NICs, and why
    #[command(after_help = TOPO_AFTER_HELP)]
    Topo(TopoFlags),
    /// What stands in the way of speed, or of working at all: each finding with its evidence and its mend
    #[command(after_help = DOCTOR_AFTER_HELP)]
    Doctor(DoctorFlags),
    /// What an NCCL net plugin exports: versions, devices, properties. It is started in a process of its own
    #[command(after_help = PLUGIN_AFTER_HELP)]
    Plugin(PluginFlags),
    /// The backend for NIXL: put it into the NIXL of a Python environment, see whether it is there, take it away
    #[command(after_help = NIXL_AFTER_HELP)]
    Nixl {
        /// What to do
        #[command(subcommand)]
        action: NixlCommand,
    },
    /// The process in which a plugin is started
    #[command(hide = true)]
    PluginChild {
        /// As for plugin
        path: PathBuf,
        /// As for plugin
        #[arg(long)]
        version: Option<Version>,
    },
}

/// `topo`.
#[derive(Clone, Debug, Default, Args)]
pub struct TopoFlags {
    /// Write JSON instead of text
    #[arg(long, action = ArgAction::SetTrue, value_parser = FalseyValueParser::new())]
    pub json: bool,
    /// NICs of some GPUs, in place of what the plan would choose: 0=eth1,1=eth2, or 0-7=eth1,eth2 for several of each
    #[arg(long, alias = "map", value_name = "GPU=NIC,...")]
    pub gpu_nics: Option<String>,
    /// NICs to plan with, by name [default: those with a device, except ones for control only]
    #[arg(long, value_name = "NAMES")]
    pub nics: Option<Names>,
    /// Let GPUs use NICs of another NUMA node where there is no nearer one
    #[arg(long, action = ArgAction::SetTrue, value_parser = FalseyValueParser::new())]
    pub allow_cross_numa: bool,
    /// Channels per GPU to spread over its NICs [default: 8]
    #[arg(long, value_name = "N")]
    pub channels: Option<usize>,
    /// Undo first what runs with --allow-nic-setup that were killed have left at NICs of this network namespace: rules and settings. Live runs keep theirs
    #[arg(long, action = ArgAction::SetTrue, value_parser = FalseyValueParser::new())]
    pub clean_up: bool,
    /// A recorded host in place of this one
    #[arg(long, value_name = "DIR", hide = true)]
    pub root: Option<PathBuf>,
}

/// `doctor`.
#[derive(Clone, Debug, Default, Args)]
pub struct DoctorFlags {
    /// A peer to visit, where `ferrywire bench serve` or another endpoint listens [default: none; port 7420]
    #[arg(value_name = "ADDR:PORT")]
    pub address: Option<String>,
    /// Write JSON instead of text
    #[arg(long, action = ArgAction::SetTrue, value_parser = FalseyValueParser::new())]
    pub json: bool,
    /// NICs to look at and to visit the peer over, by name [default: all; to the peer those that a run would use]
    #[arg(long, value_name = "NAMES")]
    pub nics: Option<Names>,
    /// Look too whether this NCCL net plugin loads and offers devices: its file, or a name as in NCCL_NET_PLUGIN
    #[arg(long, value_name = "PATH")]
    pub plugin: Option<PathBuf>,
    /// Longest time for one step: for the peer to answer, for a call of the plugin; in seconds [default: 10]
    #[arg(long, alias = "deadline", value_name = "S")]
    pub timeout: Option<f64>,
    /// File with the shared secret; or set FERRYWIRE_SECRET
    #[arg(long, value_name = "FILE")]
    pub secret_file: Option<PathBuf>,
}

/// `plugin`.
#[derive(Debug, Args)]
pub struct PluginFlags {
    /// The plugin's file, or a name as in NCCL_NET_PLUGIN, looked up as NCCL does
    #[arg(value_name = "PATH")]
    pub path: PathBuf,
    /// Version of the interface to use: v4 to v12 [default: the newest that it exports]
    #[arg(long, value_name = "vN")]
    pub version: Option<Version>,
    /// Write JSON instead of text
    #[arg(long, action = ArgAction::SetTrue, value_parser = FalseyValueParser::new())]
    pub json: bool,
    /// Longest time for one step of the plugin, in seconds [default: 30]
    #[arg(long, alias = "deadline", value_name = "S")]
    pub timeout: Option<f64>,
}

/// The subcommands of `nixl`.
#[derive(Debug, Subcommand)]
pub enum NixlCommand {
    /// Copy the backend into every NIXL of the environment; an older copy is replaced
    #[command(after_help = NIXL_AFTER_HELP)]
    Install {
        /// Where
        #[command(flatten)]
        flags: NixlFlags,
        /// Let programs that ask for UCX get ferrywire too, for those that cannot be told another name. Both ends need it; `remove` undoes it
        #[arg(long, action = ArgAction::SetTrue, value_parser = FalseyValueParser::new())]
        as_ucx: bool,
    },
    /// Each NIXL of the environment, and whether it has the backend
    #[command(after_help = NIXL_AFTER_HELP)]
    Status(NixlFlags),
    /// Delete what install has put there, and give NIXL's own UCX backend its name again
    #[command(after_help = NIXL_AFTER_HELP)]
    Remove(NixlFlags),
}

/// Of each of them.
#[derive(Clone, Debug, Default, Args)]
pub struct NixlFlags {
    /// The interpreter whose packages have NIXL, or its virtual environment [default: see below]
    #[arg(long, alias = "prefix", value_name = "PATH")]
    pub python: Option<PathBuf>,
    /// The backend's file [default: the one of this command's build or wheel]
    #[arg(long, value_name = "PATH")]
    pub library: Option<PathBuf>,
    /// Write JSON instead of text
    #[arg(long, action = ArgAction::SetTrue, value_parser = FalseyValueParser::new())]
    pub json: bool,
}

/// `bench`: alone loopback mode or one process of a run, else one of its two ends.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, after_help = AFTER_HELP)]
pub struct Bench {
    /// Which end
    #[command(subcommand)]
    pub end: Option<End>,
    /// Options of loopback mode, and of a run of several processes
    #[command(flatten)]
    pub options: ConnectFlags,
    /// Which process of a run this is
    #[command(flatten)]
    pub ranks: RankArgs,
}

/// Which process of a run this is, where no launcher tells.
#[derive(Clone, Debug, Default, Args, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
#[command(next_help_heading = "Several processes")]
pub struct RankArgs {
    /// Number of this process among those of the run, from 0 [default: what torchrun, mpirun, mpiexec or srun says]
    #[arg(long, value_name = "N")]
    pub rank: Option<u32>,
    /// How many processes there are: the first half moves data to the second, rank i to rank i + N/2 [default: what the launcher says; 1 is loopback mode]
    #[arg(long, alias = "world", value_name = "N")]
    pub world_size: Option<u32>,
    /// Number of this process among those of its host: its GPU, where --memory names a kind without a number [default: what the launcher says, else 0]
    #[arg(long, value_name = "N")]
    pub local_rank: Option<u32>,
    /// Where rank 0 waits for the others; beyond loopback the serving rank with local rank r listens on PORT + r [default: port 7420 of loopback where all are on one host, else of MASTER_ADDR; of Slurm's first node at a port of the job's step]
    #[arg(long, value_name = "ADDR:PORT")]
    pub rendezvous: Option<String>,
    /// As for serve
    #[arg(long, hide = true)]
    pub inject: Option<Inject>,
}

/// The two ends of a bench.
#[derive(Debug, Subcommand)]
pub enum End {
    /// One end: listens, takes its configuration from the peer, stays up for further peers
    #[command(after_help = AFTER_HELP)]
    Serve(Box<ServeFlags>),
    /// The other end: everything is configured here
    #[command(after_help = AFTER_HELP)]
    Connect {
        /// Where the other end listens
        #[arg(value_name = "ADDR:PORT")]
        address: String,
        /// Options of the run
        #[command(flatten)]
        options: Box<ConnectFlags>,
    },
}

/// Options of `bench serve`: only what a peer must not decide.
#[derive(Clone, Debug, Default, Args, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct ServeFlags {
    /// Address to listen on; 0.0.0.0 listens on every NIC [default: 127.0.0.1:7420]
    #[arg(long, value_name = "ADDR:PORT")]
    pub listen: Option<String>,
    /// NICs to use, by name [default: with --memory cuda:N those on that GPU's PCIe root, else every NIC with an address; loopback when listening on loopback]
    #[arg(long, value_name = "NAMES")]
    pub nics: Option<Names>,
    /// Several endpoints in this process, one for each of these GPUs: 0-7 or 0,2,4 [default: one endpoint]
    #[arg(long, value_name = "LIST")]
    pub gpus: Option<Gpus>,
    /// NICs of each GPU, where the plan (see `topo`) is not to be followed: 0=eth1,1=eth1,eth2 or 0-1=eth1
    #[arg(long, alias = "map", value_name = "GPU=NIC,...")]
    pub gpu_nics: Option<String>,
    /// Let GPUs use NICs of another NUMA node where there is no nearer one
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          value_parser = BoolishValueParser::new(), value_name = "BOOL")]
    pub allow_cross_numa: Option<bool>,
    /// A recorded host to plan with in place of this one
    #[arg(long, value_name = "DIR", hide = true)]
    pub root: Option<PathBuf>,
    /// End after one peer, with its outcome as exit status
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          value_parser = BoolishValueParser::new(), value_name = "BOOL")]
    pub once: Option<bool>,
    /// Progress threads of this end [default: chosen]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Congestion control of this end's connections [default: chosen]
    #[arg(long, value_name = "NAME")]
    pub congestion_control: Option<String>,
    /// How channels move bytes; plugin has to be said at both ends, and with devmem a peer that says tcp is refused [default: auto]
    #[arg(long)]
    pub transport: Option<Transport>,
    /// Let devmem change what NICs need for it: header split, rules for flows, which queues other flows go to; undone at the end
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          value_parser = BoolishValueParser::new(), value_name = "BOOL")]
    pub allow_nic_setup: Option<bool>,
    /// NCCL net plugin that carries payload; it runs in a process of its own. Both ends need the same one: a peer can never name a file
    #[arg(long, value_name = "PATH")]
    pub plugin: Option<PathBuf>,
    /// How receives into GPU memory are gathered that a plugin or devmem scatters; of a plugin the same on both ends [default: kernel]
    #[arg(long)]
    pub unpack: Option<Unpack>,
    /// Allow GPU memory over GPUDirectTCPX within one host, which ends the real one's process: for simulators
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          value_parser = BoolishValueParser::new(), value_name = "BOOL")]
    pub allow_same_host_gpu: Option<bool>,
    /// Memory of this end that peers may ask for beside host memory, and get if they do not ask: host, cuda or cuda:N, sim or sim:N (a simulated GPU) [default: any CUDA GPU that is here; with --plugin host]
    #[arg(long, value_name = "KIND")]
    pub memory: Option<String>,
    /// Longest message of the plugin, where the peer says another than the default; over GPUDirect-TCPX at most 1M [default: 512K]
    #[arg(long, value_name = "BYTES")]
    pub chunk: Option<Bytes>,
    /// Requests posted per channel of the plugin, the same on both ends [default: 16]
    #[arg(long, value_name = "N")]
    pub window: Option<usize>,
    /// Longest time for a call of the plugin, and for a peer to say what it wants where its run does not say, in seconds [default: 30]
    #[arg(long, alias = "deadline", value_name = "S")]
    pub timeout: Option<f64>,
    /// File with the shared secret; or set FERRYWIRE_SECRET
    #[arg(long, value_name = "FILE")]
    pub secret_file: Option<PathBuf>,
    /// TOML file with further options
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Spoil the data before it is verified (tests of the verification)
    #[arg(long, hide = true)]
    pub inject: Option<Inject>,
    /// That of this peer of a run alone
    #[arg(long, hide = true)]
    pub inject_member: Option<usize>,
    /// End when the starting process ends
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          value_parser = BoolishValueParser::new())]
    pub child: Option<bool>,
}

/// Options of `bench connect` and of loopback mode.
#[derive(Clone, Debug, Default, Args, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct ConnectFlags {
    /// One-sided write (default), one-sided read, or two-sided send
    #[arg(long)]
    pub op: Option<Op>,
    /// Where this side's bytes lie: host, cuda or cuda:N, sim or sim:N (a simulated GPU) [default: cuda where a GPU is present, else host; with --plugin host]
    #[arg(long, value_name = "KIND")]
    pub memory: Option<String>,
    /// Where the peer's bytes lie: as for --memory; simulated GPUs its serve must offer with --memory [default: cuda where a GPU is present there, of two on one host the other one, else host; with --plugin host]
    #[arg(long, value_name = "KIND")]
    pub peer_memory: Option<String>,
    /// Message sizes, a list or a range by powers of two: 64K,1M or 4K..256M [default: 4K,64K,1M,16M,64M; latency: 8,4K,64K]
    #[arg(long, value_name = "SIZES")]
    pub sizes: Option<Sizes>,
    /// Transfers in flight [default: chosen by size; 1 with --pattern latency]
    #[arg(long, value_name = "N")]
    pub depth: Option<usize>,
    /// Cut each message into N scattered blocks, moved by one vectored call
    #[arg(long, value_name = "N")]
    pub blocks: Option<usize>,
    /// Who sends to whom: unidir (default), bidir, all-to-all (needs --gpus), incast, or latency (write and notify, answered likewise)
    #[arg(long)]
    pub pattern: Option<Pattern>,
    /// Peers that write to the one end at once, with --pattern incast [default: 2]
    #[arg(long, value_name = "N")]
    pub peers: Option<usize>,
    /// Channels per peer [default: chosen]
    #[arg(long, value_name = "N")]
    pub channels: Option<usize>,
    /// NICs to use, by name: eth1,eth2 [default: those on the PCIe root of the GPU of --memory, else all that share a subnet with the peer, else the route's own]
    #[arg(long, value_name = "NAMES")]
    pub nics: Option<Names>,
    /// Several endpoints in this process, one for each of these GPUs: 0-7 or 0,2,4; the serve there needs --gpus too. GPU i moves data to GPU i of the other end [default: one endpoint]
    #[arg(long, value_name = "LIST")]
    pub gpus: Option<Gpus>,
    /// NICs of each GPU, where the plan (see `topo`) is not to be followed: 0=eth1,1=eth1,eth2 or 0-1=eth1
    #[arg(long, alias = "map", value_name = "GPU=NIC,...")]
    pub gpu_nics: Option<String>,
    /// Let GPUs use NICs of another NUMA node where there is no nearer one
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          value_parser = BoolishValueParser::new(), value_name = "BOOL")]
    pub allow_cross_numa: Option<bool>,
    /// A recorded host to plan with in place of this one
    #[arg(long, value_name = "DIR", hide = true)]
    pub root: Option<PathBuf>,
    /// Chunk size; over GPUDirect-TCPX at most 1M [default: chosen]
    #[arg(long, value_name = "BYTES")]
    pub chunk: Option<Bytes>,
    /// Requests in flight per channel; of a plugin the same on both ends [default: chosen]
    #[arg(long, value_name = "N")]
    pub window: Option<usize>,
    /// Messages per size in the timed part; with --seconds too, whichever ends first
    #[arg(long, value_name = "N")]
    pub iters: Option<u64>,
    /// Length of the timed part per size [default: 2]
    #[arg(long, value_name = "S")]
    pub seconds: Option<f64>,
    /// Messages per size before the timed part [default: 0.2 seconds' worth]
    #[arg(long, value_name = "N")]
    pub warmup: Option<u64>,
    /// How channels move bytes [default: auto]
    #[arg(long)]
    pub transport: Option<Transport>,
    /// Let devmem change what NICs need for it: header split, rules for flows, which queues other flows go to; undone at the end
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          value_parser = BoolishValueParser::new(), value_name = "BOOL")]
    pub allow_nic_setup: Option<bool>,
    /// NCCL net plugin that carries payload; it runs in a process of its own. Both ends need the same one: give --plugin to serve too
    #[arg(long, value_name = "PATH")]
    pub plugin: Option<PathBuf>,
    /// How receives into GPU memory are gathered that a plugin or devmem scatters; of a plugin the same on both ends [default: kernel]
    #[arg(long)]
    pub unpack: Option<Unpack>,
    /// Allow GPU memory over GPUDirectTCPX within one host, which ends the real one's process: for simulators
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          value_parser = BoolishValueParser::new(), value_name = "BOOL")]
    pub allow_same_host_gpu: Option<bool>,
    /// Check every iteration's bytes (default), samples, or nothing
    #[arg(long)]
    pub verify: Option<Verify>,
    /// Write results as JSON; - is standard output. Table and progress then go to standard error
    #[arg(long, value_name = "FILE|-")]
    pub json: Option<String>,
    /// Write results as CSV; - is standard output
    #[arg(long, value_name = "FILE|-")]
    pub csv: Option<String>,
    /// Longest time without progress, in seconds [default: 30]
    #[arg(long, alias = "deadline", value_name = "S")]
    pub timeout: Option<f64>,
    /// Checksum every chunk
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          value_parser = BoolishValueParser::new(), value_name = "BOOL")]
    pub crc: Option<bool>,
    /// Congestion control of the data connections [default: chosen]
    #[arg(long, value_name = "NAME")]
    pub congestion_control: Option<String>,
    /// Progress threads of this end [default: chosen]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// File with the shared secret; or set FERRYWIRE_SECRET
    #[arg(long, value_name = "FILE")]
    pub secret_file: Option<PathBuf>,
    /// TOML file with further options
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Which peer of an incast this process is
    #[arg(long, hide = true)]
    pub member: Option<usize>,
    /// The run that this process joins
    #[arg(long, hide = true)]
    pub run: Option<String>,
}

/// The operation that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Op {
    /// One-sided write into the peer's memory
    Write,
    /// One-sided read from the peer's memory
    Read,
    /// Two-sided send and receive
    Send,
}

/// Who sends to whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pattern {
    /// One direction
    #[value(alias = "pair")]
    #[serde(alias = "pair")]
    Unidir,
    /// Both directions at once
    Bidir,
    /// Every GPU of one side to every GPU of the other, with --gpus
    #[value(alias = "mesh")]
    #[serde(alias = "mesh")]
    AllToAll,
    /// Several peers to one
    Incast,
    /// One message there, one back
    Latency,
}

/// How channels move bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Transport {
    /// A plugin where one is named with --plugin, else devmem where both ends can, else TCP
    Auto,
    /// TCP sockets
    Tcp,
    /// An NCCL net plugin for payload, TCP for the rest; needs --plugin on both ends
    Plugin,
    /// Linux devmem TCP: NICs write to and read from GPU memory; needs it on both ends
    Devmem,
    /// The simulated network
    #[value(hide = true)]
    Sim,
}

/// How scattered receives are gathered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Unpack {
    /// By a kernel of the GPU
    Kernel,
    /// By a copy per fragment
    Copy,
    /// Through host memory
    Host,
    /// Not at all: for measuring only, needs --verify off
    None,
}

/// How much of the data is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verify {
    /// Every byte: what the timed part left, then each iteration of an untimed pass with contents of its own, as many as were timed but at most half of --seconds long
    All,
    /// Some pages of what was left and of some iterations
    Sample,
    /// Nothing: the result is marked as not verified
    Off,
}

/// How data is spoilt to test the verification.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Inject {
    /// One byte flipped
    WrongByte,
    /// The bytes of the iteration before
    OldPattern,
    /// As if the write had never happened
    SkipWrite,
    /// One byte flipped in the verified pass, seconds after it began
    LateByte,
    /// Nothing: iterations of the verified pass take a second longer
    Slow,
    /// The thread of the peer panics in the verified pass
    Panic,
}

/// Parses the command line and the environment; ends the process with status 2 when they make no sense.
pub fn parse() -> Cli {
    let matches = command().get_matches();
    Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit())
}

/// The whole command, each option readable from its variable.
pub fn command() -> clap::Command {
    with_environment(Cli::command())
}

/// The environment variable of an option.
pub fn variable(long: &str) -> String {
    format!("FERRYWIRE_{}", long.replace('-', "_").to_ascii_uppercase())
}

/// Former spellings of an option, which stay valid.
pub fn former_names(arg: &clap::Arg) -> impl Iterator<Item = &str> {
    arg.get_all_aliases().into_iter().flatten()
}

/// The variable of a former spelling, where that is set and today's is not.
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

#[cfg(test)]
mod tests {
    #[test]
    fn the_command_is_well_formed() {
        super::command().debug_assert();
    }
}
