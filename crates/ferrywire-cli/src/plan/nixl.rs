//! The meaning of `ferrywire nixl`'s flags.
//!
//! Invariant: a given path is not empty. Read next: [`crate::nixl`].

use std::path::PathBuf;

use super::usage;
use crate::args::{NixlCommand, NixlFlags};
use crate::auto::Given;
use crate::exit::Outcome;

/// The plan of `nixl`.
#[derive(Clone, Debug)]
pub struct NixlPlan {
    pub action: NixlAction,
    /// The interpreter that the user named.
    pub python: Option<PathBuf>,
    /// The library that the user named.
    pub library: Option<PathBuf>,
    /// Whether to print JSON.
    pub json: bool,
}

/// The action on the backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NixlAction {
    /// Install the backend.
    Install {
        /// Whether to install it under the name of UCX too.
        as_ucx: bool,
    },
    /// Show the backend's state.
    Status,
    /// Remove the backend.
    Remove,
}

/// Makes the plan of a command.
pub fn plan(action: NixlCommand) -> Outcome<NixlPlan> {
    let (action, flags) = match action {
        NixlCommand::Install { flags, as_ucx } => (NixlAction::Install { as_ucx }, flags),
        NixlCommand::Status(flags) => (NixlAction::Status, flags),
        NixlCommand::Remove(flags) => (NixlAction::Remove, flags),
    };
    let NixlFlags { python, library, json } = flags;
    let (python, library) = (python.given(), library.given());
    for (flag, path) in [("--python", &python), ("--library", &library)] {
        if path.as_ref().is_some_and(|path| path.as_os_str().is_empty()) {
            return usage(format!("{flag} must not be empty: name a path, or leave out {flag}"));
        }
    }
    Ok(NixlPlan { action, python, library, json })
}
