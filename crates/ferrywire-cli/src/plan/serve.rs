//! The meaning of `ferrywire bench serve`'s flags.
//!
//! Read next: `engine.rs`, the options of both ends; [`crate::bench::serve`].

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use ferrywire::Encryption;

use super::engine::{EnginePlan, multi_gpu, next_metrics, secret, secret_file, unnumbered};
use super::{PORT_DEFAULT, TIMEOUT_S_DEFAULT, at_least_one, resolve, seconds};
use crate::args::{Inject, ServeFlags};
use crate::auto::Given;
use crate::exit::Outcome;
use crate::memory::Memory;
use crate::{bench, file, transport};

/// The plan of the listening end of a bench.
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
    /// Longest time that a connected peer may take to greet, unless its run has another timeout.
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

pub(super) fn plan(flags: ServeFlags, verbose: bool) -> Outcome<ServePlan> {
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
        encryption: flags.encrypt.map_or(Encryption::Preferred, Into::into),
        metrics: flags.metrics,
        secret,
        secret_phase: bench::child_secret::phase(),
        // The parent's secret may be from elsewhere.
        secret_file: flags.secret_file.filter(|_| !child),
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
