//! The engine's options, which both ends of a bench and `doctor` have: NICs, GPUs, metrics and the secret.
//!
//! Read next: `../transport.rs`, which decides between TCP, a plugin and devmem.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use ferrywire::Encryption;
use ferrywire_host::topology::Map;

use super::usage;
use crate::args::Unpack;
use crate::auto::{Given, OrAuto};
use crate::bench;
use crate::bench::secret_file::Phase;
use crate::exit::{Failure, Outcome};
use crate::transport::{DevmemUse, PluginUse};
use crate::units::{Gpus, Names};

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
    /// Whether data connections are encrypted.
    pub encryption: Encryption,
    /// Whether data connections that are not encrypted are authenticated.
    pub keyed_checksum: bool,
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
    /// How far the parent process has exchanged the shared secret for another, if it follows the secret file.
    pub secret_phase: Option<Phase>,
    /// The file that holds the shared secret, and may hold another one later.
    pub secret_file: Option<PathBuf>,
}

impl EnginePlan {
    /// How scattered receives are gathered, if the user chose a way.
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

/// The GPUs with an endpoint each, and the map of their NICs.
pub(super) fn multi_gpu(
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
            "--gpu-nics {gpu}=...: GPU {gpu} is not one of --gpus; add the GPU there, or leave its NICs out"
        )),
        (_, Some(gpu)) => usage(format!("--gpu-nics names no NIC for GPU {gpu} of --gpus: add {gpu}=NIC")),
        (None, None) => Ok((gpus, map)),
    }
}

/// Refuses an index in the flag: with several endpoints each uses the memory of its own GPU.
pub(super) fn unnumbered(flag: &str, gpus: Option<&Gpus>, memory: Option<&str>) -> Outcome {
    match (gpus, memory.and_then(|text| text.split_once(':'))) {
        (Some(Gpus(only)), Some((_, number))) if matches!(only[..], [gpu] if number.parse() == Ok(gpu)) => {
            Ok(())
        }
        (Some(_), Some((kind, number))) => usage(format!(
            "{flag} {kind}:{number}: with --gpus each endpoint uses memory of its own GPU; use {flag} {kind}"
        )),
        _ => Ok(()),
    }
}

/// Returns the address at which a child of this process serves its metrics. Checks the given address.
pub(super) fn next_metrics(address: Option<&str>) -> Outcome<Option<String>> {
    let next = address.map(ferrywire_metrics::next_to).transpose();
    next.map_err(|error| Failure::Usage(format!("--metrics: {error}")))
}

/// The secret file that was typed or named in the environment; the one in the configuration file only if the
/// environment has no secret.
pub(super) fn secret_file(typed: Option<PathBuf>, filled: Option<PathBuf>) -> Option<PathBuf> {
    typed.or(filled.filter(|_| secret_of_environment().is_none()))
}

/// The secret in the environment: any bytes.
fn secret_of_environment() -> Option<Vec<u8>> {
    std::env::var_os("FERRYWIRE_SECRET").map(OsString::into_vec).filter(|secret| !secret.is_empty())
}

pub(super) fn secret(path: Option<&Path>) -> Outcome<Option<Vec<u8>>> {
    // Passed by the parent process, which has read the file.
    if let Some(handed) = bench::child_secret::secret() {
        return Ok(Some(handed));
    }
    let Some(path) = path else {
        return Ok(secret_of_environment());
    };
    bench::secret_file::read(path).map(|secret| Some(secret.to_vec()))
}
