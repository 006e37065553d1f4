//! What the flags of `ferrywire nixl` mean.
//!
//! Invariant: a path that is given has at least one character. Read next: [`crate::nixl`].

use std::path::PathBuf;

use super::usage;
use crate::args::{NixlCommand, NixlFlags};
use crate::exit::Outcome;

/// What is to be done about the backend for NIXL.
#[derive(Clone, Debug)]
pub struct NixlPlan {
    /// What.
    pub action: NixlAction,
    /// The interpreter that was named.
    pub python: Option<PathBuf>,
    /// The backend that was named.
    pub library: Option<PathBuf>,
    /// Print JSON.
    pub json: bool,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NixlAction {
    /// Put it there.
    Install {
        /// Under the name of UCX too.
        as_ucx: bool,
    },
    /// See whether it is there.
    Status,
    /// Take it away.
    Remove,
}

/// The plan of one of its commands.
pub fn plan(action: NixlCommand) -> Outcome<NixlPlan> {
    let (action, flags) = match action {
        NixlCommand::Install { flags, as_ucx } => (NixlAction::Install { as_ucx }, flags),
        NixlCommand::Status(flags) => (NixlAction::Status, flags),
        NixlCommand::Remove(flags) => (NixlAction::Remove, flags),
    };
    let NixlFlags { python, library, json } = flags;
    for (flag, path) in [("--python", &python), ("--library", &library)] {
        if path.as_ref().is_some_and(|path| path.as_os_str().is_empty()) {
            return usage(format!("{flag} is empty"));
        }
    }
    Ok(NixlPlan { action, python, library, json })
}
