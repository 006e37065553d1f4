//! The meaning of flags: applies every default, and refuses contradictions.
//!
//! Read next: `plan/run.rs`, `plan/ranks.rs`, `transport.rs`.

use std::ffi::OsString;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ferrywire::limits::CHANNELS_MAX;
use ferrywire_host::topology::{Map, PlanOptions};
use ferrywire_ncclnet::abi::Version;

use crate::args::{
    self, Cli, Command, ConnectFlags, DoctorFlags, End, Inject, Pattern, PluginFlags, ReportFlags,
    ServeFlags, TopoFlags, Unpack, WatchFlags,
};
use crate::auto::{Given, OrAuto};
use crate::bench::protocol::{Run, SECONDS_MAX};
use crate::exit::{Failure, Outcome};
use crate::memory::Memory;
use crate::transport::{self, DevmemUse, PluginUse};
use crate::units::{Gpus, Names};
use crate::{bench, file};

mod nixl;
mod ranks;
mod run;

pub use nixl::{NixlAction, NixlPlan};
pub use ranks::RanksPlan;
use run::plan_run;

/// The port of `serve` and `connect` if none is given.
const PORT_DEFAULT: u16 = 7420;
/// Longest time without progress, in seconds.
const TIMEOUT_S_DEFAULT: f64 = 30.0;

/// Longest time for one step of `doctor`, in seconds.
const DOCTOR_TIMEOUT_S_DEFAULT: f64 = 10.0;

/// Time between two samples of `watch`, in seconds.
const WATCH_INTERVAL_S_DEFAULT: f64 = 1.0;

/// Channels per GPU that `topo` assigns.
const TOPO_CHANNELS_DEFAULT: usize = 8;

/// Most files of one report: more columns cannot be compared by eye.
const REPORT_FILES_MAX: usize = 16;

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
    /// The child process that loads a plugin for [`Plan::Plugin`].
    PluginChild(PathBuf, Option<Version>),
}

/// The plan of `topo`.
#[derive(Clone, Debug)]
pub struct TopoPlan {
    /// Restrictions on the topology plan.
    pub options: PlanOptions,
    /// Channels per GPU.
    pub channels: usize,
    /// Whether to undo first what killed processes have left at NICs.
    pub clean_up: bool,
    /// A recorded host; `None` for this host.
    pub root: Option<PathBuf>,
    /// Print JSON.
    pub json: bool,
}

/// The plan of `doctor`.
#[derive(Clone, Debug)]
pub struct DoctorPlan {
    /// Addresses of the peer, first choice first; empty without a peer.
    pub addresses: Vec<SocketAddr>,
    /// NICs and secret.
    pub engine: EnginePlan,
    /// A plugin to try.
    pub plugin: Option<PluginPlan>,
    /// Longest time for one step.
    pub timeout: Duration,
    /// Print JSON.
    pub json: bool,
    /// Whether to print passed checks too.
    pub verbose: bool,
}

/// The plan of `watch`.
#[derive(Clone, Debug)]
pub struct WatchPlan {
    /// Print once and end.
    pub once: bool,
    /// Print JSON.
    pub json: bool,
    /// Time between two samples.
    pub interval: Duration,
    /// Whether to print a row per channel.
    pub verbose: bool,
}

/// The plan of `plugin`.
#[derive(Clone, Debug)]
pub struct PluginPlan {
    /// The plugin's file or name.
    pub path: PathBuf,
    /// The interface version to use; `None` for the newest.
    pub version: Option<Version>,
    /// Print JSON.
    pub json: bool,
    /// Longest time for one step.
    pub timeout: Duration,
    /// Whether to print the plugin's log.
    pub verbose: bool,
}

/// The plan of `report`.
#[derive(Clone, Debug)]
pub struct ReportPlan {
    /// Stored results, the base of ratios first.
    pub files: Vec<PathBuf>,
    /// The file for the page; `None` for a table on standard output.
    pub html: Option<PathBuf>,
}

/// Engine options of one end.
#[derive(Clone, Debug, Default)]
pub struct EnginePlan {
    /// NICs by name; empty for the engine's choice.
    pub nics: Vec<String>,
    /// GPUs with an endpoint each; `None` for a single endpoint.
    pub gpus: Option<Vec<u32>>,
    /// NICs by GPU, if the user gave them.
    pub map: Map,
    /// Whether GPUs may use NICs of other NUMA nodes.
    pub allow_cross_numa: bool,
    /// A recorded host to plan with; `None` for this host.
    pub root: Option<PathBuf>,
    /// Channels per peer.
    pub channels: Option<usize>,
    /// Chunk size in bytes.
    pub chunk_bytes: Option<u64>,
    /// Frames in flight per channel.
    pub window: Option<usize>,
    /// Progress threads.
    pub threads: Option<usize>,
    /// Whether each chunk has a checksum.
    pub crc: Option<bool>,
    /// Where to serve metrics; `None` leaves it to the environment.
    pub metrics: Option<String>,
    /// Congestion control by name.
    pub congestion_control: Option<String>,
    /// The plugin that carries payload.
    pub plugin: Option<PluginUse>,
    /// Devmem TCP, if it is required or to be tried.
    pub devmem: Option<DevmemUse>,
    /// The shared secret.
    pub secret: Option<Vec<u8>>,
}

impl EnginePlan {
    /// How scattered receives are gathered, if the user said so.
    pub fn unpack(&self) -> Option<Unpack> {
        let of_devmem = || self.devmem.as_ref().and_then(|devmem| devmem.unpack);
        self.plugin.as_ref().and_then(|plugin| plugin.unpack).or_else(of_devmem)
    }

    /// The effective values of transport, NICs and GPUs, as they are shown and stored.
    pub fn effective_values(&self) -> serde_json::Map<String, serde_json::Value> {
        let (plugin, devmem) = (self.plugin.as_ref(), self.devmem.as_ref());
        let values = serde_json::json!({
            "transport": match (plugin, devmem) {
                (Some(_), _) => "plugin",
                (None, Some(devmem)) => devmem.asked_for(),
                (None, None) => "tcp",
            },
            "plugin": plugin.map(|plugin| &plugin.path),
            "gpus": self.gpus,
            "gpu_nics": self.map.nics,
            "allow_cross_numa": self.allow_cross_numa,
            "allow_nic_setup": devmem.is_some_and(|devmem| devmem.allow_nic_setup),
            "allow_same_host_gpu": plugin.is_some_and(|plugin| plugin.allow_same_host_gpu),
        });
        match values {
            serde_json::Value::Object(values) => values,
            _ => unreachable!("an object was written"),
        }
    }
}

/// A run at the connecting end.
#[derive(Clone, Debug)]
pub struct ConnectPlan {
    /// Addresses of the other end, first choice first; loopback mode fills them in.
    pub addresses: Vec<SocketAddr>,
    /// The address as it was typed.
    pub typed_address: Option<String>,
    /// The parameters on which both ends must agree.
    pub run: Run,
    /// Engine options of this end.
    pub engine: EnginePlan,
    /// Longest time without progress.
    pub timeout: Duration,
    /// The file for JSON.
    pub json: Option<PathBuf>,
    /// The file for CSV.
    pub csv: Option<PathBuf>,
    /// Whether to print effective values.
    pub verbose: bool,
    /// The run's id, which several peers of one run share.
    pub run_id: String,
    /// The index of this peer in an incast; only 0 prints.
    pub member: usize,
    /// The flags as environment of further processes of the run.
    pub environment: Vec<(String, OsString)>,
}

/// The listening end.
#[derive(Clone, Debug)]
pub struct ServePlan {
    /// The address to listen on.
    pub listen: SocketAddr,
    /// Engine options of this end.
    pub engine: EnginePlan,
    /// The memory location that peers may request besides host memory, and that they get by default; `None` for this
    /// host's default.
    pub memory: Option<Memory>,
    /// Whether `engine.secret` was generated for this run and has to be printed.
    pub one_time_secret: bool,
    /// Longest time that a connected peer may take to greet, unless its run says otherwise.
    pub timeout: Duration,
    /// Whether to end after one peer.
    pub once: bool,
    /// Whether to print effective values.
    pub verbose: bool,
    /// Data to corrupt, in tests.
    pub inject: Option<Inject>,
    /// The peer of a run whose data are corrupted; `None` for all peers.
    pub inject_member: Option<usize>,
    /// Whether to end with the process that started this one.
    pub child: bool,
}

/// Makes the plan for a parsed command line.
///
/// # Errors
/// Contradicting or invalid flags.
pub fn plan(typed: Cli) -> Outcome<Plan> {
    let verbose = typed.verbose > 0;
    let bench = match typed.command {
        Command::Bench(bench) => bench,
        Command::Topo(flags) => return plan_topo(flags).map(Plan::Topo),
        Command::Watch(flags) => return plan_watch(&flags, verbose).map(Plan::Watch),
        Command::Doctor(flags) => return plan_doctor(flags, verbose).map(Box::new).map(Plan::Doctor),
        Command::Plugin(flags) => return plan_plugin(flags, verbose).map(Plan::Plugin),
        Command::Report(flags) => return plan_report(flags).map(Plan::Report),
        Command::Nixl { action } => return nixl::plan(action).map(Plan::Nixl),
        Command::PluginChild { path, version } => return Ok(Plan::PluginChild(path, version)),
    };
    match bench.end {
        None => match ranks::of(&bench.options, bench.ranks)? {
            Some((ranks, flags)) => {
                let plan = ranks::plan(bench.options, ranks, &flags, verbose)?;
                Ok(Plan::Ranks(Box::new(plan)))
            }
            None => {
                let options = here_on_both_ends(bench.options)?;
                Ok(Plan::Loopback(Box::new(plan_connect(options, Vec::new(), false, verbose)?)))
            }
        },
        Some(End::Serve(flags)) => Ok(Plan::Serve(Box::new(plan_serve(*flags, verbose)?))),
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

fn plan_topo(flags: TopoFlags) -> Outcome<TopoPlan> {
    let TopoFlags { json, gpu_nics: map, nics, allow_cross_numa, channels, clean_up, root } = flags;
    let map = map.given().map_or(Ok(Default::default()), |text| {
        text.parse().map_err(|why| Failure::Usage(format!("--gpu-nics {text}: {why}")))
    })?;
    let channels = at_least_one("--channels", channels.given())?.unwrap_or(TOPO_CHANNELS_DEFAULT);
    if channels > CHANNELS_MAX {
        return usage(format!("--channels must be at most {CHANNELS_MAX} (got {channels})"));
    }
    let nics = nics.given().map(|names| names.0).unwrap_or_default();
    if clean_up && root.is_some() {
        return usage("--clean-up changes NICs of this host only: leave out --root");
    }
    Ok(TopoPlan { options: PlanOptions { map, nics, allow_cross_numa }, channels, clean_up, root, json })
}

fn plan_doctor(flags: DoctorFlags, verbose: bool) -> Outcome<DoctorPlan> {
    let DoctorFlags { address, json, nics, plugin, timeout, secret_file } = flags;
    let timeout_s = seconds("--timeout", timeout)?.unwrap_or(DOCTOR_TIMEOUT_S_DEFAULT);
    let plugin = plugin.map(|path| {
        plan_plugin(PluginFlags { path, version: None, json: false, timeout: Some(timeout_s) }, verbose)
    });
    let secret = secret(secret_file.as_deref())?;
    let nics = nics.map(|names| names.0).unwrap_or_default();
    Ok(DoctorPlan {
        addresses: address.map_or(Ok(Vec::new()), |text| resolve("ADDR:PORT", &text))?,
        engine: EnginePlan { nics, secret, ..EnginePlan::default() },
        plugin: plugin.transpose()?,
        timeout: Duration::from_secs_f64(timeout_s),
        json,
        verbose,
    })
}

fn plan_watch(flags: &WatchFlags, verbose: bool) -> Outcome<WatchPlan> {
    let WatchFlags { once, json, interval } = *flags;
    let interval = seconds("--interval", interval)?.unwrap_or(WATCH_INTERVAL_S_DEFAULT);
    Ok(WatchPlan { once, json, interval: Duration::from_secs_f64(interval), verbose })
}

fn plan_plugin(flags: PluginFlags, verbose: bool) -> Outcome<PluginPlan> {
    let PluginFlags { path, version, json, timeout } = flags;
    let timeout = Duration::from_secs_f64(seconds("--timeout", timeout)?.unwrap_or(TIMEOUT_S_DEFAULT));
    if path.as_os_str().is_empty() {
        return usage("PATH must not be empty: name a plugin file, or a name as in NCCL_NET_PLUGIN");
    }
    Ok(PluginPlan { path, version: version.given(), json, timeout, verbose })
}

fn plan_report(flags: ReportFlags) -> Outcome<ReportPlan> {
    let ReportFlags { files, html } = flags;
    if files.iter().any(|file| file.as_os_str().is_empty()) {
        return usage("RESULT.json must not be empty: name a file that `ferrywire bench --json FILE` wrote");
    }
    if html.as_ref().is_some_and(|html| html.as_os_str().is_empty()) {
        return usage("--html must not be empty: name a file, or leave out --html to print a table");
    }
    if files.len() > REPORT_FILES_MAX {
        return usage(format!("at most {REPORT_FILES_MAX} files fit one report (got {})", files.len()));
    }
    Ok(ReportPlan { files, html })
}

fn plan_serve(flags: ServeFlags, verbose: bool) -> Outcome<ServePlan> {
    let flags = match flags.config.clone() {
        Some(path) => {
            let typed = flags.secret_file.clone();
            let flags = file::fill(flags, &path)?;
            ServeFlags { secret_file: secret_file(typed, flags.secret_file), ..flags }
        }
        None => flags,
    };
    let listen = match &flags.listen {
        Some(text) => resolve("--listen", text)?[0],
        None => SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), PORT_DEFAULT),
    };
    let child = flags.child.unwrap_or(false);
    let given = if child { bench::child_secret::secret() } else { secret(flags.secret_file.as_deref())? };
    let one_time_secret = given.is_none() && !listen.ip().is_loopback();
    let secret = if one_time_secret { Some(bench::host::random_hex(16)?.into_bytes()) } else { given };
    let call_limit =
        Duration::from_secs_f64(seconds("--timeout", flags.timeout)?.unwrap_or(TIMEOUT_S_DEFAULT));
    let memory = Memory::typed("--memory", flags.memory.given_ref().map(String::as_str))?;
    unnumbered("--memory", flags.gpus.as_ref(), flags.memory.given_ref().map(String::as_str))?;
    let (gpus, map) =
        multi_gpu(flags.gpus.clone(), flags.gpu_nics.given_ref().map(String::as_str), &flags.nics)?;
    let engine = EnginePlan {
        // Contradictions are reported before missing resources.
        devmem: transport::devmem_for_serve(&flags, listen, call_limit)?,
        plugin: transport::for_serve(&flags, call_limit)?,
        gpus,
        map,
        allow_cross_numa: flags.allow_cross_numa.unwrap_or(false),
        root: flags.root,
        nics: flags.nics.given().map(|names| names.0).unwrap_or_default(),
        threads: at_least_one("--threads", flags.threads.given())?,
        congestion_control: flags.congestion_control.given(),
        metrics: flags.metrics,
        secret,
        ..EnginePlan::default()
    };
    next_metrics(engine.metrics.as_deref())?;
    let once = flags.once.unwrap_or(false);
    Ok(ServePlan {
        listen,
        engine,
        memory,
        one_time_secret,
        timeout: call_limit,
        once,
        verbose,
        inject: flags.inject,
        inject_member: flags.inject_member,
        child,
    })
}

/// In loopback mode the memory of both ends is decided here, once.
fn here_on_both_ends(flags: ConnectFlags) -> Outcome<ConnectFlags> {
    let mut flags = with_file(flags)?;
    for (flag, text) in [("--memory", &flags.memory), ("--peer-memory", &flags.peer_memory)] {
        unnumbered(flag, flags.gpus.as_ref(), text.given_ref().map(String::as_str))?;
    }
    let memory = memory(&mut flags)?;
    if flags.plugin.is_none() && flags.peer_memory.given_ref().is_none() {
        let there = Memory::detect(Some(memory));
        let of_gpus = || there.kind().to_owned();
        let text = flags.gpus.as_ref().map_or_else(|| there.to_string(), |_| of_gpus());
        flags.peer_memory = Some(text.into());
    }
    Ok(flags)
}

/// With several endpoints each uses the memory of its own GPU, so the flag must not have an index.
fn unnumbered(flag: &str, gpus: Option<&Gpus>, memory: Option<&str>) -> Outcome {
    match (gpus, memory.and_then(|text| text.split_once(':'))) {
        (Some(Gpus(only)), Some((_, number))) if matches!(only[..], [gpu] if number.parse() == Ok(gpu)) => {
            Ok(())
        }
        (Some(_), Some((kind, number))) => usage(format!(
            "{flag} {kind}:{number}: with --gpus the bytes of each endpoint lie on its own GPU; use {flag} {kind}"
        )),
        _ => Ok(()),
    }
}

fn with_file(flags: ConnectFlags) -> Outcome<ConnectFlags> {
    let typed = flags.secret_file.clone();
    match flags.config.clone() {
        Some(path) => file::fill(flags, &path)
            .map(|flags| ConnectFlags { secret_file: secret_file(typed, flags.secret_file), ..flags }),
        None => Ok(flags),
    }
}

/// The memory location of this end; stored in the flags, so that further processes of the run use it too.
fn memory(flags: &mut ConnectFlags) -> Outcome<Memory> {
    let typed = Memory::typed("--memory", flags.memory.given_ref().map(String::as_str))?;
    let memory = match (typed, &flags.plugin) {
        (Some(memory), _) => memory,
        (None, Some(_)) => Memory::Host,
        (None, None) => Memory::detect(None),
    };
    flags.memory = Some(memory.to_string().into());
    Ok(memory)
}

/// `beyond`: whether the other end may be on another host.
fn plan_connect(
    flags: ConnectFlags,
    addresses: Vec<SocketAddr>,
    beyond: bool,
    verbose: bool,
) -> Outcome<ConnectPlan> {
    let mut flags = with_file(flags)?;
    let memory = memory(&mut flags)?;
    let secret = secret(flags.secret_file.as_deref())?;
    if secret.is_none() && beyond && !addresses.is_empty() {
        return usage(
            "beyond loopback a secret is needed: set FERRYWIRE_SECRET or --secret-file to the same secret on both ends (serve prints it)",
        );
    }
    let (gpus, map) =
        multi_gpu(flags.gpus.clone(), flags.gpu_nics.given_ref().map(String::as_str), &flags.nics)?;
    check_outputs(&flags)?;
    check_pattern(&flags)?;
    let timeout_s = seconds("--timeout", flags.timeout)?.unwrap_or(TIMEOUT_S_DEFAULT);
    let plugin = transport::for_connect(&flags, Duration::from_secs_f64(timeout_s))?;
    let devmem = transport::devmem_for_connect(&flags, beyond, Duration::from_secs_f64(timeout_s))?;
    Ok(ConnectPlan {
        addresses,
        typed_address: None,
        run: plan_run(&flags, memory, timeout_s)?,
        timeout: Duration::from_secs_f64(timeout_s),
        json: flags.json.as_ref().map(PathBuf::from),
        csv: flags.csv.as_ref().map(PathBuf::from),
        verbose,
        run_id: flags.run.clone().map_or_else(|| bench::host::random_hex(8), Ok)?,
        member: flags.member.unwrap_or(0),
        environment: environment(&ConnectFlags {
            metrics: next_metrics(flags.metrics.as_deref())?,
            ..flags.clone()
        })?,
        engine: EnginePlan {
            channels: at_least_one("--channels", flags.channels.given())?,
            chunk_bytes: flags.chunk.given().map(|chunk| chunk.0),
            // A plugin's window is a separate option.
            window: at_least_one("--window", flags.window.given())?.filter(|_| plugin.is_none()),
            plugin,
            devmem,
            threads: at_least_one("--threads", flags.threads.given())?,
            nics: flags.nics.given().map(|names| names.0).unwrap_or_default(),
            gpus,
            map,
            allow_cross_numa: flags.allow_cross_numa.unwrap_or(false),
            root: flags.root,
            crc: flags.crc,
            congestion_control: flags.congestion_control.given(),
            metrics: flags.metrics,
            secret,
        },
    })
}

/// Where a child of this process serves its metrics; checks the address.
fn next_metrics(address: Option<&str>) -> Outcome<Option<String>> {
    let next = address.map(ferrywire_metrics::next_to).transpose();
    next.map_err(|error| Failure::Usage(format!("--metrics: {error}")))
}

/// Refuses one file for both outputs.
fn check_outputs(flags: &ConnectFlags) -> Outcome {
    match (&flags.json, &flags.csv) {
        (Some(json), Some(csv)) if is_one_place(Path::new(json), Path::new(csv)) => usage(format!(
            "--json {json} and --csv {csv} name one file, and one would overwrite the other: name two files"
        )),
        _ => Ok(()),
    }
}

/// Whether both paths name one file, or standard output.
fn is_one_place(one: &Path, other: &Path) -> bool {
    // /dev/null may be used twice.
    let nowhere = Path::new("/dev/null");
    if one == other {
        return one != nowhere;
    }
    let found = |path: &Path| {
        let path = if path == Path::new("-") { Path::new("/dev/stdout") } else { path };
        fs::metadata(path).ok().map(|found| (found.dev(), found.ino()))
    };
    // A new file in an existing folder.
    let new = |path: &Path| {
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let folder = fs::canonicalize(parent.unwrap_or(Path::new("."))).ok()?;
        Some(folder.join(path.file_name()?))
    };
    match (found(one), found(other)) {
        (Some(file), Some(also)) => file == also && Some(file) != found(nowhere),
        (None, None) => new(one).is_some_and(|place| new(other) == Some(place)),
        _ => false,
    }
}

fn check_pattern(flags: &ConnectFlags) -> Outcome {
    match (flags.pattern, &flags.gpus, flags.peers) {
        (Some(Pattern::AllToAll), None, _) => {
            usage("--pattern all-to-all needs several GPUs at each end: name them with --gpus")
        }
        (_, Some(_), Some(_)) => {
            usage("--peers: with --gpus each GPU is a peer of the incast; leave out --peers")
        }
        _ => Ok(()),
    }
}

/// The GPUs with an endpoint each, and the map of their NICs.
fn multi_gpu(
    gpus: Option<Gpus>,
    map: Option<&str>,
    nics: &Option<OrAuto<Names>>,
) -> Outcome<(Option<Vec<u32>>, Map)> {
    let map: Map = match map {
        Some(text) => text.parse().map_err(|why| Failure::Usage(format!("--gpu-nics {text}: {why}")))?,
        None => Map::default(),
    };
    let gpus = gpus.map(|gpus| gpus.0);
    if map.nics.is_empty() {
        return Ok((gpus, map));
    }
    if nics.given_ref().is_some() {
        return usage("--gpu-nics and --nics both name NICs: leave out --nics");
    }
    let named = gpus.as_deref().unwrap_or_default();
    match (
        map.nics.keys().find(|gpu| !named.contains(gpu)),
        named.iter().find(|gpu| !map.nics.contains_key(gpu)),
    ) {
        (Some(gpu), _) => usage(format!(
            "--gpu-nics {gpu}=...: GPU {gpu} is not one of --gpus; name it there, or leave it out here"
        )),
        (_, Some(gpu)) => usage(format!("--gpu-nics names no NIC for GPU {gpu} of --gpus: add {gpu}=NIC")),
        (None, None) => Ok((gpus, map)),
    }
}

/// The flags as variables, without those that only the first process of a run may have.
fn environment(flags: &ConnectFlags) -> Outcome<Vec<(String, OsString)>> {
    let own = ConnectFlags { json: None, csv: None, config: None, ..flags.clone() };
    let table = toml::Table::try_from(own).map_err(|error| Failure::failed(error.to_string()))?;
    Ok(table.into_iter().map(|(key, value)| (args::variable(&key), plain(&value).into())).collect())
}

fn plain(value: &toml::Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// The secret file that was typed or named in the environment; the one in the configuration file only if the
/// environment has no secret.
fn secret_file(typed: Option<PathBuf>, filled: Option<PathBuf>) -> Option<PathBuf> {
    typed.or(filled.filter(|_| secret_of_environment().is_none()))
}

/// The secret in the environment: any bytes.
fn secret_of_environment() -> Option<Vec<u8>> {
    std::env::var_os("FERRYWIRE_SECRET").map(OsString::into_vec).filter(|secret| !secret.is_empty())
}

fn secret(path: Option<&Path>) -> Outcome<Option<Vec<u8>>> {
    // Passed by the parent process, which has read the file.
    if let Some(handed) = bench::child_secret::secret() {
        return Ok(Some(handed));
    }
    let Some(path) = path else {
        return Ok(secret_of_environment());
    };
    let text = std::fs::read(path)
        .map_err(|error| Failure::Usage(format!("--secret-file {}: {error}", path.display())))?;
    let secret = text.trim_ascii().to_vec();
    if secret.is_empty() {
        return usage(format!(
            "--secret-file {}: the file is empty; write the secret into it",
            path.display()
        ));
    }
    Ok(Some(secret))
}

fn resolve(flag: &str, text: &str) -> Outcome<Vec<SocketAddr>> {
    let bare: Result<IpAddr, _> = text.trim_matches(['[', ']']).parse();
    if let Ok(ip) = bare {
        return Ok(vec![SocketAddr::new(ip, PORT_DEFAULT)]);
    }
    let with_port = if text.contains(':') { text.to_owned() } else { format!("{text}:{PORT_DEFAULT}") };
    let port_is_number = with_port.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    if !port_is_number {
        return usage(format!(
            "{flag} {text}: not an address; write ADDR:PORT, for example 10.0.0.2:{PORT_DEFAULT}"
        ));
    }
    let found: Vec<SocketAddr> = match with_port.to_socket_addrs() {
        Ok(found) => found.collect(),
        Err(error) => return Err(Failure::failed(format!("{flag} {text}: {error}"))),
    };
    if found.is_empty() {
        Err(Failure::failed(format!("{flag} {text}: the name has no address")))
    } else {
        Ok(found)
    }
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
            ConnectFlags { depth: Some(0.into()), ..Default::default() },
            ConnectFlags { peers: Some(3), ..Default::default() },
            ConnectFlags { memory: Some("cuda:x".to_owned().into()), ..Default::default() },
            ConnectFlags { peer_memory: Some("sim:99".to_owned().into()), ..Default::default() },
            ConnectFlags { pattern: Some(Pattern::AllToAll), ..Default::default() },
            ConnectFlags { pattern: Some(Pattern::Latency), depth: Some(2.into()), ..Default::default() },
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
    }
}
