//! The meaning of `ferrywire nccl env`'s flags.
//!
//! Read next: [`crate::nccl`].

use std::path::PathBuf;
use std::time::Duration;

use super::{TIMEOUT_S_DEFAULT, seconds, usage};
use crate::args::NcclFlags;
use crate::exit::Outcome;

/// The plan of `nccl env`.
#[derive(Clone, Debug)]
pub struct NcclPlan {
    /// The plugin's file, if the user named one.
    pub path: Option<PathBuf>,
    /// Longest time for one step of the plugin.
    pub timeout: Duration,
    /// Whether to print the plugin's log.
    pub verbose: bool,
}

pub(super) fn plan(flags: NcclFlags, verbose: bool) -> Outcome<NcclPlan> {
    let NcclFlags { path, timeout } = flags;
    let timeout = Duration::from_secs_f64(seconds("--timeout", timeout)?.unwrap_or(TIMEOUT_S_DEFAULT));
    if path.as_ref().is_some_and(|path| path.as_os_str().is_empty()) {
        return usage("PATH must not be empty: name a plugin file, or leave out PATH");
    }
    Ok(NcclPlan { path, timeout, verbose })
}
