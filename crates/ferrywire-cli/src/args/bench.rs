//! The flags of `ferrywire bench`, `bench serve` and `bench connect`.
//!
//! Invariant: options of both ends have one name and one meaning, since one TOML file may serve both.
//! Read next: `../plan/serve.rs`, `../plan/connect.rs`.

#![allow(
    rustdoc::broken_intra_doc_links,
    reason = "the comments of options are help texts, which write cuda[:N]"
)]

use std::path::PathBuf;

use clap::builder::BoolishValueParser;
use clap::{Args, Subcommand, ValueEnum};
use ferrywire::Encryption;
use serde::{Deserialize, Serialize};

use super::help;
use crate::auto::OrAuto;
use crate::units::{Bytes, Gpus, Names, Sizes};

/// The flags of `bench`: without a subcommand, loopback mode or one rank of a run.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, after_long_help = help::BENCH)]
pub struct Bench {
    /// Which end of a run
    #[command(subcommand)]
    pub end: Option<End>,
    /// Options of loopback mode, and of a run of several processes
    #[command(flatten)]
    pub options: ConnectFlags,
    /// Which rank of a run this process is
    #[command(flatten)]
    pub ranks: RankArgs,
}

/// Which rank of a run this process is, if no launcher sets it.
#[derive(Clone, Debug, Default, Args, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
#[command(next_help_heading = "Ranks")]
pub struct RankArgs {
    /// Rank of this process, from 0 [default: auto]
    ///
    /// auto: the rank that torchrun, mpirun, mpiexec or srun assigns.
    #[arg(long, value_name = "N")]
    pub rank: Option<OrAuto<u32>>,
    /// Number of ranks: even, or 1 for loopback mode [default: auto]
    ///
    /// Rank i of the first half sends to rank i + N/2. At most 1024. auto: the world size of the launcher, else 1.
    #[arg(long, alias = "world", value_name = "N")]
    pub world_size: Option<OrAuto<u32>>,
    /// Number of this process among those of its host [default: auto]
    ///
    /// The rank uses the GPU with this number where --memory names a kind without a number. auto: the local rank of the
    /// launcher, else 0.
    #[arg(long, value_name = "N")]
    pub local_rank: Option<OrAuto<u32>>,
    /// Where rank 0 waits for the other ranks [default: auto]
    ///
    /// auto: loopback where all ranks are on one host, else MASTER_ADDR, else the first node of the Slurm job. The port is
    /// MASTER_PORT unless torchrun listens there, a port of the Slurm job step, or 7420. mpirun and mpiexec over several
    /// hosts need the option. Beyond loopback a serving rank with local rank r listens on PORT + r.
    #[arg(long, value_name = "ADDR:PORT")]
    pub rendezvous: Option<OrAuto<String>>,
    /// Spoil the data of this rank, as for serve (tests of the verification)
    #[arg(long, hide = true)]
    pub inject: Option<Inject>,
}

/// The two ends of a bench.
#[derive(Debug, Subcommand)]
pub enum End {
    /// Listen for peers; each peer configures its own run
    ///
    /// `serve` takes one run at a time, refuses others as busy and stays up for further peers. Beyond loopback both ends
    /// need the same secret. Without one, `serve` generates a one-time secret and prints the connect command with it.
    #[command(after_long_help = help::SERVE)]
    Serve(Box<ServeFlags>),
    /// Connect to `bench serve`, run the transfers and print the results
    #[command(after_long_help = help::CONNECT)]
    Connect {
        /// Where `ferrywire bench serve` listens; without a port: port 7420
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
    /// Address to listen on; 0.0.0.0 is every NIC [default: 127.0.0.1:7420]
    #[arg(long, value_name = "ADDR:PORT")]
    pub listen: Option<String>,
    /// NICs to use, by name: eth1,eth2 [default: auto]
    ///
    /// auto: with --memory cuda:N the NICs on the PCIe root of that GPU, else every NIC with an address; with --listen on
    /// loopback only loopback.
    #[arg(long, value_name = "NAMES")]
    pub nics: Option<OrAuto<Names>>,
    /// One endpoint for each of these GPUs: 0-7 or 0,2,4 [default: one endpoint]
    #[arg(long, value_name = "LIST")]
    pub gpus: Option<Gpus>,
    /// NICs of each GPU: 0=eth1,1=eth1,eth2 or 0-1=eth1 [default: auto]
    ///
    /// Needs --gpus, and names every GPU of it. auto: the plan that `ferrywire topo` shows.
    #[arg(long, alias = "map", value_name = "GPU=NIC,...")]
    pub gpu_nics: Option<OrAuto<String>>,
    /// Allow NICs of another NUMA node for GPUs without a nearer NIC
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          value_parser = BoolishValueParser::new(), value_name = "BOOL")]
    pub allow_cross_numa: Option<bool>,
    /// A recorded host to plan with in place of this one
    #[arg(long, value_name = "DIR", hide = true)]
    pub root: Option<PathBuf>,
    /// End after one run, with its outcome as exit status
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          value_parser = BoolishValueParser::new(), value_name = "BOOL")]
    pub once: Option<bool>,
    /// Progress threads of this end [default: auto]
    ///
    /// auto: one for each core, at most 16.
    #[arg(long, value_name = "N")]
    pub threads: Option<OrAuto<usize>>,
    /// Encrypt data connections: off, preferred or required [default: preferred]
    ///
    /// --encrypt alone is required: a peer with encryption off is refused. preferred encrypts if the peer prefers or requires
    /// it too; bench serve prefers it. The control session is always encrypted. Payload over a plugin or devmem cannot be.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "required", value_name = "WHEN")]
    pub encrypt: Option<Encrypt>,
    /// Congestion control of this end's data connections [default: auto]
    ///
    /// auto: cubic where the round trip is below 0.5 ms, else the default of the system.
    #[arg(long, value_name = "NAME")]
    pub congestion_control: Option<OrAuto<String>>,
    /// How channels move bytes [default: auto]
    ///
    /// Both ends must name plugin. With devmem, a peer that names tcp is refused.
    #[arg(long)]
    pub transport: Option<Transport>,
    /// Let devmem change NIC settings; undone at the end
    ///
    /// devmem may turn header split on, add rules for its flows, and move other flows off its queues.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          value_parser = BoolishValueParser::new(), value_name = "BOOL")]
    pub allow_nic_setup: Option<bool>,
    /// NCCL net plugin that carries payload, on both ends [default: none]
    ///
    /// The plugin runs in a process of its own. Both ends need the same plugin: a peer can never name a file.
    #[arg(long, value_name = "PATH")]
    pub plugin: Option<PathBuf>,
    /// How scattered receives into GPU memory are gathered [default: kernel]
    ///
    /// A plugin or devmem may scatter what it receives. With a plugin both ends need the same value.
    #[arg(long)]
    pub unpack: Option<Unpack>,
    /// Allow GPU memory over GPUDirect-TCPX within one host, for simulators
    ///
    /// The real plugin ends its process when both ends are on one host.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          value_parser = BoolishValueParser::new(), value_name = "BOOL")]
    pub allow_same_host_gpu: Option<bool>,
    /// Memory that peers may use beside host memory [default: auto]
    ///
    /// host, cuda, cuda:N, sim, or sim:N (a simulated GPU). A peer that names no memory gets this memory. auto: any CUDA GPU
    /// of this host; with --plugin host.
    #[arg(long, value_name = "KIND")]
    pub memory: Option<OrAuto<String>>,
    /// Longest message of the plugin [default: 512K]
    ///
    /// Needed where the peer sets another --chunk than the default. Over GPUDirect-TCPX at most 1M.
    #[arg(long, value_name = "BYTES")]
    pub chunk: Option<OrAuto<Bytes>>,
    /// Requests in flight per channel of the plugin [default: 16]
    ///
    /// Both ends need the same value.
    #[arg(long, value_name = "N")]
    pub window: Option<OrAuto<usize>>,
    /// Longest time for a plugin call or a silent peer, in seconds [default: 30]
    ///
    /// A silent peer has connected and has not yet asked for a run. A run brings its own timeout.
    #[arg(long, alias = "deadline", value_name = "S")]
    pub timeout: Option<f64>,
    /// Serve Prometheus metrics at this address [default: none]
    ///
    /// PORT alone is a port of loopback. ADDR:PORT+ takes the next free port if another process has it. The metrics are at
    /// http://ADDR:PORT/metrics.
    #[arg(long, value_name = "ADDR:PORT")]
    pub metrics: Option<String>,
    /// File with the secret that this end and the peer share [default: none]
    ///
    /// Without the option, the environment variable FERRYWIRE_SECRET holds the secret itself.
    /// `serve` and `connect` take a changed file while they run: both secrets are valid for 10 minutes.
    #[arg(long, value_name = "FILE")]
    pub secret_file: Option<PathBuf>,
    /// TOML file with further options [default: none]
    ///
    /// Options have their long names there, such as gpu-nics. One file may serve both ends.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Spoil the data before it is verified (tests of the verification)
    #[arg(long, hide = true)]
    pub inject: Option<Inject>,
    /// The index of the only peer of a run whose data are spoiled (tests of the verification)
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
    /// Operation that moves the bytes [default: write]
    #[arg(long)]
    pub op: Option<Op>,
    /// Where this end's bytes lie: host, cuda[:N] or sim[:N] [default: auto]
    ///
    /// cuda:N is CUDA device N, sim:N a simulated GPU. auto: cuda where a GPU is present, else host; with --plugin host.
    #[arg(long, value_name = "KIND")]
    pub memory: Option<OrAuto<String>>,
    /// Where the peer's bytes lie: host, cuda[:N] or sim[:N] [default: auto]
    ///
    /// auto: cuda where the peer has a GPU (on a shared host the next GPU), else host; with --plugin host. `bench serve`
    /// must offer simulated GPUs with --memory.
    #[arg(long, value_name = "KIND")]
    pub peer_memory: Option<OrAuto<String>>,
    /// Message sizes: 64K,1M or 4K..256M [default: 4K,64K,1M,16M,64M]
    ///
    /// A list, a range by powers of two, or both; at most 64 sizes. With --pattern latency the default is 8,4K,64K. With
    /// --blocks N it is N times 4K and, without --pattern latency, N times 64K.
    #[arg(long, value_name = "SIZES")]
    pub sizes: Option<Sizes>,
    /// Transfers in flight [default: auto]
    ///
    /// auto: 256 MiB in flight, as 4 to 64 transfers; with --pattern latency 1. At most 4096.
    #[arg(long, value_name = "N")]
    pub depth: Option<OrAuto<usize>>,
    /// Scattered blocks per message, moved by one vectored call [default: none]
    #[arg(long, value_name = "N")]
    pub blocks: Option<usize>,
    /// Traffic direction [default: unidir]
    #[arg(long)]
    pub pattern: Option<Pattern>,
    /// Peers that send to one end, with --pattern incast [default: 2]
    ///
    /// At most 128.
    #[arg(long, value_name = "N")]
    pub peers: Option<usize>,
    /// Channels per peer [default: auto]
    ///
    /// auto: as many as --threads has by default, rounded up to a multiple of the NIC pairs; at least 8
    /// from a round trip of 5 ms on. At most 256.
    #[arg(long, value_name = "N")]
    pub channels: Option<OrAuto<usize>>,
    /// NICs to use, by name: eth1,eth2 [default: auto]
    ///
    /// auto: the NICs on the PCIe root of the GPU of --memory, else all NICs that share a subnet with the peer, else the NIC
    /// of the route to the peer.
    #[arg(long, value_name = "NAMES")]
    pub nics: Option<OrAuto<Names>>,
    /// One endpoint for each of these GPUs: 0-7 or 0,2,4 [default: one endpoint]
    ///
    /// All endpoints are in this process. GPU i sends to GPU i of the peer; `bench serve` needs --gpus too.
    #[arg(long, value_name = "LIST")]
    pub gpus: Option<Gpus>,
    /// NICs of each GPU: 0=eth1,1=eth1,eth2 or 0-1=eth1 [default: auto]
    ///
    /// Needs --gpus, and names every GPU of it. auto: the plan that `ferrywire topo` shows.
    #[arg(long, alias = "map", value_name = "GPU=NIC,...")]
    pub gpu_nics: Option<OrAuto<String>>,
    /// Allow NICs of another NUMA node for GPUs without a nearer NIC
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          value_parser = BoolishValueParser::new(), value_name = "BOOL")]
    pub allow_cross_numa: Option<bool>,
    /// A recorded host to plan with in place of this one
    #[arg(long, value_name = "DIR", hide = true)]
    pub root: Option<PathBuf>,
    /// Chunk size [default: auto]
    ///
    /// auto: 2M; over a plugin 512K. At most 4M; over GPUDirect-TCPX at most 1M.
    #[arg(long, value_name = "BYTES")]
    pub chunk: Option<OrAuto<Bytes>>,
    /// Frames or requests in flight per channel [default: auto]
    ///
    /// auto: 1024; over a plugin 16. Over a plugin both ends need the same value, at most 128.
    #[arg(long, value_name = "N")]
    pub window: Option<OrAuto<usize>>,
    /// Messages per size in the timed part [default: none]
    ///
    /// With --seconds too, the timed part ends with whichever is reached first.
    #[arg(long, value_name = "N")]
    pub iters: Option<u64>,
    /// Length of the timed part per size, in seconds [default: 2]
    ///
    /// With --iters alone, time does not end the timed part.
    #[arg(long, value_name = "S")]
    pub seconds: Option<f64>,
    /// Messages per size before the timed part [default: auto]
    ///
    /// auto: as many as take 0.2 seconds.
    #[arg(long, value_name = "N")]
    pub warmup: Option<OrAuto<u64>>,
    /// How channels move bytes [default: auto]
    #[arg(long)]
    pub transport: Option<Transport>,
    /// Let devmem change NIC settings; undone at the end
    ///
    /// devmem may turn header split on, add rules for its flows, and move other flows off its queues.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          value_parser = BoolishValueParser::new(), value_name = "BOOL")]
    pub allow_nic_setup: Option<bool>,
    /// NCCL net plugin that carries payload, on both ends [default: none]
    ///
    /// The plugin runs in a process of its own. Both ends need the same plugin: give --plugin to `bench serve` too.
    #[arg(long, value_name = "PATH")]
    pub plugin: Option<PathBuf>,
    /// How scattered receives into GPU memory are gathered [default: kernel]
    ///
    /// A plugin or devmem may scatter what it receives. With a plugin both ends need the same value.
    #[arg(long)]
    pub unpack: Option<Unpack>,
    /// Allow GPU memory over GPUDirect-TCPX within one host, for simulators
    ///
    /// The real plugin ends its process when both ends are on one host.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          value_parser = BoolishValueParser::new(), value_name = "BOOL")]
    pub allow_same_host_gpu: Option<bool>,
    /// How much of the data is compared with what was sent [default: all]
    ///
    /// First the contents that the timed part left are compared. Then an untimed pass compares its iterations, each with
    /// contents of its own. The pass has as many iterations as the timed part and takes at most half of --seconds.
    #[arg(long)]
    pub verify: Option<Verify>,
    /// Write results as JSON; - is standard output [default: none]
    ///
    /// The table and the progress then go to standard error. docs/bench.schema.json describes the fields.
    #[arg(long, value_name = "FILE|-")]
    pub json: Option<String>,
    /// Write results as CSV; - is standard output [default: none]
    ///
    /// The table and the progress then go to standard error.
    #[arg(long, value_name = "FILE|-")]
    pub csv: Option<String>,
    /// Longest time without progress, in seconds [default: 30]
    ///
    /// The run fails when no byte has moved for this long. A run that makes progress may take longer.
    #[arg(long, alias = "deadline", value_name = "S")]
    pub timeout: Option<f64>,
    /// Checksum every chunk
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          value_parser = BoolishValueParser::new(), value_name = "BOOL")]
    pub crc: Option<bool>,
    /// Encrypt data connections: off, preferred or required [default: off]
    ///
    /// --encrypt alone is required: a peer with encryption off is refused. preferred encrypts if the peer prefers or requires
    /// it too; bench serve prefers it. The control session is always encrypted. Payload over a plugin or devmem cannot be.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "required", value_name = "WHEN")]
    pub encrypt: Option<Encrypt>,
    /// Authenticate data connections that are not encrypted
    ///
    /// A change on the path ends the connection before changed bytes reach memory. --crc finds accidents only.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          value_parser = BoolishValueParser::new(), value_name = "BOOL")]
    pub keyed_checksum: Option<bool>,
    /// Congestion control of this end's data connections [default: auto]
    ///
    /// auto: cubic where the round trip is below 0.5 ms, else the default of the system.
    #[arg(long, value_name = "NAME")]
    pub congestion_control: Option<OrAuto<String>>,
    /// Progress threads of this end [default: auto]
    ///
    /// auto: one for each core, at most 16.
    #[arg(long, value_name = "N")]
    pub threads: Option<OrAuto<usize>>,
    /// Serve Prometheus metrics at this address [default: none]
    ///
    /// PORT alone is a port of loopback. ADDR:PORT+ takes the next free port if another process has it. The metrics are at
    /// http://ADDR:PORT/metrics.
    #[arg(long, value_name = "ADDR:PORT")]
    pub metrics: Option<String>,
    /// File with the secret that this end and the peer share [default: none]
    ///
    /// Without the option, the environment variable FERRYWIRE_SECRET holds the secret itself.
    /// `serve` and `connect` take a changed file while they run: both secrets are valid for 10 minutes.
    #[arg(long, value_name = "FILE")]
    pub secret_file: Option<PathBuf>,
    /// TOML file with further options [default: none]
    ///
    /// Options have their long names there, such as gpu-nics. One file may serve both ends.
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

/// Traffic direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pattern {
    /// One direction
    #[value(alias = "pair")]
    #[serde(alias = "pair")]
    Unidir,
    /// Both directions at once
    Bidir,
    /// Every GPU of one end to every GPU of the other; needs --gpus or ranks
    #[value(alias = "mesh")]
    #[serde(alias = "mesh")]
    AllToAll,
    /// Several peers to one end
    Incast,
    /// One message, answered by one message: half of the round trip
    Latency,
}

/// How channels move bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Transport {
    /// The plugin of --plugin, else devmem where both ends can, else tcp
    Auto,
    /// TCP sockets
    Tcp,
    /// NCCL net plugin for payload, TCP for the rest; needs --plugin on both ends
    Plugin,
    /// Linux devmem TCP: NICs access GPU memory; both ends need it
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
    /// By one copy per fragment
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
    /// Every byte of every iteration
    All,
    /// Some pages of some iterations
    Sample,
    /// Nothing: the result is marked as not verified
    Off,
}

/// Whether data connections are encrypted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Encrypt {
    /// Never; a peer that requires it is refused
    Off,
    /// If the peer prefers or requires it
    Preferred,
    /// Always; a peer with encryption off is refused
    Required,
}

impl From<Encrypt> for Encryption {
    fn from(encrypt: Encrypt) -> Encryption {
        match encrypt {
            Encrypt::Off => Encryption::Off,
            Encrypt::Preferred => Encryption::Preferred,
            Encrypt::Required => Encryption::Required,
        }
    }
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
