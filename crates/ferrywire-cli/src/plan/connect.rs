//! The meaning of the flags of `ferrywire bench connect` and of loopback mode.
//!
//! Read next: `run.rs`, the parameters of the run; `engine.rs`, the options of both ends.

use std::ffi::OsString;
use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ferrywire::Encryption;

use super::engine::{EnginePlan, multi_gpu, next_metrics, secret, secret_file, unnumbered};
use super::run::plan_run;
use super::{TIMEOUT_S_DEFAULT, at_least_one, seconds, usage};
use crate::args::{ConnectFlags, Pattern};
use crate::auto::{Given, OrAuto};
use crate::bench::protocol::Run;
use crate::exit::{Failure, Outcome};
use crate::memory::Memory;
use crate::{args, bench, file, transport};

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
    /// The file for results as JSON, if one was given.
    pub json: Option<PathBuf>,
    /// The file for results as CSV, if one was given.
    pub csv: Option<PathBuf>,
    /// Whether to print effective values.
    pub verbose: bool,
    /// The run's id, which several peers of one run share.
    pub run_id: String,
    /// The index of this peer in an incast; only 0 prints.
    pub member: usize,
    /// The flags as environment variables, for further processes of the run.
    pub environment: Vec<(String, OsString)>,
}

/// Decides the memory of both ends in loopback mode.
pub(super) fn loopback_flags(flags: ConnectFlags) -> Outcome<ConnectFlags> {
    let mut flags = with_file(flags)?;
    for (flag, text) in [("--memory", &flags.memory), ("--peer-memory", &flags.peer_memory)] {
        unnumbered(flag, flags.gpus.as_ref(), text.given_ref().map(String::as_str))?;
    }
    let memory = memory(&mut flags)?;
    if flags.plugin.is_none() && flags.peer_memory.given_ref().is_none() {
        let there = Memory::detect(Some(memory));
        let of_gpus = || there.kind().to_owned();
        let text = flags.gpus.as_ref().map_or_else(|| there.to_string(), |_| of_gpus());
        flags.peer_memory = Some(OrAuto::Value(text));
    }
    Ok(flags)
}

pub(super) fn with_file(flags: ConnectFlags) -> Outcome<ConnectFlags> {
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
    flags.memory = Some(OrAuto::Value(memory.to_string()));
    Ok(memory)
}

/// Makes the plan of a connecting end. `beyond` is whether the other end may be on another host.
pub(super) fn plan_connect(
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
            "a connection to another host needs a secret: set FERRYWIRE_SECRET or --secret-file to the same secret at both ends (serve prints it)",
        );
    }
    let (gpus, map) =
        multi_gpu(flags.gpus.clone(), flags.gpu_nics.given_ref().map(String::as_str), &flags.nics)?;
    check_outputs(&flags)?;
    check_pattern(&flags)?;
    let timeout_s = seconds("--timeout", flags.timeout)?.unwrap_or(TIMEOUT_S_DEFAULT);
    let plugin = transport::for_connect(&flags, Duration::from_secs_f64(timeout_s))?;
    let devmem = transport::devmem_for_connect(&flags, beyond, Duration::from_secs_f64(timeout_s))?;
    // Without an address the other ends belong to this run: all keep the secret that they began with.
    let secret_file = flags.secret_file.clone().filter(|_| !addresses.is_empty());
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
            // The window of a plugin is a separate option.
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
            encryption: flags.encrypt.map_or(Encryption::Off, Into::into),
            keyed_checksum: flags.keyed_checksum.unwrap_or(false),
            congestion_control: flags.congestion_control.given(),
            metrics: flags.metrics,
            secret,
            secret_phase: None,
            secret_file,
        },
    })
}

/// Refuses an empty name, and one file for both outputs.
fn check_outputs(flags: &ConnectFlags) -> Outcome {
    for (flag, name) in [("--json", &flags.json), ("--csv", &flags.csv)] {
        if name.as_deref() == Some("") {
            return usage(format!(
                "{flag}: the name of the file is empty; write a name, or - for standard output"
            ));
        }
    }
    match (&flags.json, &flags.csv) {
        (Some(json), Some(csv)) if is_one_file(Path::new(json), Path::new(csv)) => usage(format!(
            "--json {json} and --csv {csv} name one file, and one would overwrite the other: name two files"
        )),
        _ => Ok(()),
    }
}

/// Whether both paths name one file, or standard output.
fn is_one_file(one: &Path, other: &Path) -> bool {
    // /dev/null may be used twice.
    let nowhere = Path::new("/dev/null");
    if one == other {
        return one != nowhere;
    }
    let found = |path: &Path| {
        let path = if path == Path::new("-") { Path::new("/dev/stdout") } else { path };
        fs::metadata(path).ok().map(|found| (found.dev(), found.ino()))
    };
    // The paths may name a new file in an existing folder.
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

/// The flags as variables, without those that only the first process of a run may have.
fn environment(flags: &ConnectFlags) -> Outcome<Vec<(String, OsString)>> {
    let own = ConnectFlags { json: None, csv: None, config: None, ..flags.clone() };
    let table = toml::Table::try_from(own).map_err(|error| Failure::failed(error.to_string()))?;
    Ok(table.into_iter().map(|(key, value)| (args::variable(&key), plain(&value).into())).collect())
}

pub(super) fn plain(value: &toml::Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}
