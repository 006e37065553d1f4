//! The meaning of `ferrywire doctor`'s flags.
//!
//! Read next: [`crate::doctor`].

use std::path::Path;
use std::time::Duration;

use ferrywire::{Encryption, limits};

use super::engine::{EnginePlan, secret};
use super::plugin::{self, PluginPlan};
use super::{seconds, with_port};
use crate::args::{self, DoctorFlags, PluginFlags};
use crate::auto::Given;
use crate::exit::{Failure, Outcome};

/// Longest time for one step of `doctor`, in seconds.
const DOCTOR_TIMEOUT_S_DEFAULT: f64 = 10.0;

/// The plan of `doctor`.
#[derive(Clone, Debug)]
pub struct DoctorPlan {
    /// Host and port of the peer, which are not looked up yet; `None` without a peer.
    pub peer: Option<String>,
    /// The engine options of the connection: NICs, secret and encryption.
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
    let secret = valid_secret(secret_file.as_deref())?;
    let nics = nics.given().map(|names| names.0).unwrap_or_default();
    Ok(DoctorPlan {
        peer: address.map(|text| with_port("ADDR:PORT", &text)).transpose()?,
        // A visit succeeds whatever the peer requires.
        engine: EnginePlan { nics, secret, encryption: Encryption::Preferred, ..EnginePlan::default() },
        plugin: plugin.transpose()?,
        timeout: Duration::from_secs_f64(timeout_s),
        json,
        verbose,
    })
}

/// The shared secret; `None` if the environment has an unusable one, which is a finding and no bad usage.
fn valid_secret(path: Option<&Path>) -> Outcome<Option<Vec<u8>>> {
    let named = std::env::var_os(args::variable("secret-file"));
    let of_environment = path.is_none_or(|path| named.is_some_and(|named| path == Path::new(&named)));
    match secret(path) {
        Err(Failure::Usage(_)) if of_environment => Ok(None),
        Ok(Some(secret)) if of_environment && secret.len() < limits::SECRET_BYTES_MIN => Ok(None),
        other => other,
    }
}
