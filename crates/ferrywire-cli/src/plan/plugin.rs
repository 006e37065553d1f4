//! The meaning of `ferrywire plugin`'s flags.
//!
//! Read next: [`crate::plugin`].

use std::path::PathBuf;
use std::time::Duration;

use ferrywire_ncclnet::abi::Version;

use super::{TIMEOUT_S_DEFAULT, seconds, usage};
use crate::args::PluginFlags;
use crate::auto::Given;
use crate::exit::Outcome;

/// The plan of `plugin`.
#[derive(Clone, Debug)]
pub struct PluginPlan {
    /// The plugin's file or name.
    pub path: PathBuf,
    /// The interface version to use; `None` for the newest.
    pub version: Option<Version>,
    /// Whether to print JSON.
    pub json: bool,
    /// Longest time for one step of the plugin.
    pub timeout: Duration,
    /// Whether to print the plugin's log.
    pub verbose: bool,
}

pub(super) fn plan(flags: PluginFlags, verbose: bool) -> Outcome<PluginPlan> {
    let PluginFlags { path, version, json, timeout } = flags;
    let timeout = Duration::from_secs_f64(seconds("--timeout", timeout)?.unwrap_or(TIMEOUT_S_DEFAULT));
    if path.as_os_str().is_empty() {
        return usage("PATH must not be empty: name a plugin file, or a name as in NCCL_NET_PLUGIN");
    }
    Ok(PluginPlan { path, version: version.given(), json, timeout, verbose })
}
