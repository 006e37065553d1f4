//! The meaning of `ferrywire doctor`'s flags.
//!
//! Read next: [`crate::doctor`].

use std::net::SocketAddr;
use std::time::Duration;

use super::engine::{EnginePlan, secret};
use super::plugin::{self, PluginPlan};
use super::{resolve, seconds};
use crate::args::{DoctorFlags, PluginFlags};
use crate::exit::Outcome;

/// Longest time for one step of `doctor`, in seconds.
const DOCTOR_TIMEOUT_S_DEFAULT: f64 = 10.0;

/// The plan of `doctor`.
#[derive(Clone, Debug)]
pub struct DoctorPlan {
    /// Addresses of the peer, first choice first; empty without a peer.
    pub addresses: Vec<SocketAddr>,
    /// The engine options of the connection: NICs and secret.
    pub engine: EnginePlan,
    /// The plugin to check, if one was given.
    pub plugin: Option<PluginPlan>,
    /// Longest time for one step.
    pub timeout: Duration,
    /// Whether to print JSON.
    pub json: bool,
    /// Whether to print passed checks too.
    pub verbose: bool,
}

pub(super) fn plan(flags: DoctorFlags, verbose: bool) -> Outcome<DoctorPlan> {
    let DoctorFlags { address, json, nics, plugin, timeout, secret_file } = flags;
    let timeout_s = seconds("--timeout", timeout)?.unwrap_or(DOCTOR_TIMEOUT_S_DEFAULT);
    let plugin = plugin.map(|path| {
        plugin::plan(PluginFlags { path, version: None, json: false, timeout: Some(timeout_s) }, verbose)
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
