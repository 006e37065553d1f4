//! The meaning of `ferrywire nccl env`'s flags.
//!
//! Read next: [`crate::nccl`].

use std::path::PathBuf;
use std::time::Duration;

use super::{TIMEOUT_S_DEFAULT, seconds};
use crate::args::NcclFlags;
use crate::exit::Outcome;

/// The plan of `nccl env`.
#[derive(Clone, Debug)]
pub struct NcclPlan {
    /// The plugin's file, if the user named one. An empty path is refused when the plugin is checked.
    pub path: Option<PathBuf>,
    /// Longest time for one step of the plugin.
    pub timeout: Duration,
    /// Whether to print the plugin's log.
    pub verbose: bool,
}

pub(super) fn plan(flags: NcclFlags, verbose: bool) -> Outcome<NcclPlan> {
    let NcclFlags { path, timeout } = flags;
    let timeout = Duration::from_secs_f64(seconds("--timeout", timeout)?.unwrap_or(TIMEOUT_S_DEFAULT));
    Ok(NcclPlan { path, timeout, verbose })
}
