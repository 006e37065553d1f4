//! `ferrywire nccl env`: prints what to export so that NCCL uses ferrywire's plugin, and checks the plugin.
//!
//! Invariant: standard output has lines that a shell can evaluate whatever the path contains. After a failure they fail,
//! and keep NCCL from its own sockets: a shell takes empty output for success.

use std::path::{Path, PathBuf};

use crate::exit::{self, Failure, Outcome};
use crate::places;
use crate::plan::{NcclPlan, PluginPlan};
use crate::plugin;

/// The file name that NCCL looks for.
const FILE: &str = "libnccl-net-ferrywire.so";
/// The file name that cargo gives the plugin.
const BUILT: &str = "libnccl_net_ferrywire.so";
/// The plugin's name, by which `NCCL_NET` selects it.
const NAME: &str = "ferrywire";

/// The fix for a missing plugin file.
const GET_PLUGIN: &str = "try: pip install . or cargo build --release -p ferrywire-nccl in a checkout, \
                          then name the file: ferrywire nccl env PATH";

/// Checks the plugin and prints the variables, or lines that fail.
pub fn run(plan: &NcclPlan) -> Outcome {
    match checked(plan) {
        Ok(path) => exit::print(&exports(&path)),
        Err(failure) => refuse(failure),
    }
}

/// Prints lines that fail, for a failure of `nccl env`.
pub fn refuse(failure: Failure) -> Outcome {
    exit::with_results(Err(failure), print_failing())
}

/// Prints lines that fail.
pub fn print_failing() -> Outcome {
    exit::print(&failing())
}

/// The path of a plugin that works on this host.
fn checked(plan: &NcclPlan) -> Outcome<String> {
    if plan.path.as_ref().is_some_and(|path| path.as_os_str().is_empty()) {
        return Err(Failure::Usage(
            "PATH must not be empty: name a plugin file, or leave out PATH".to_owned(),
        ));
    }
    let path = plan.path.clone().map_or_else(find, Ok)?;
    let path = std::path::absolute(&path)
        .map_err(|error| Failure::failed(format!("cannot use {}: {error}", path.display())))?;
    if !path.is_file() {
        return Err(Failure::failed(format!("the plugin {} is not a file\n{GET_PLUGIN}", path.display())));
    }
    let text = path.to_str().ok_or_else(|| {
        Failure::failed(format!("the path {} is not UTF-8: copy the plugin elsewhere", path.display()))
    })?;
    let devices = check(&path, plan)?;
    if plan.verbose {
        let nics = if devices == 1 { "NIC" } else { "NICs" };
        exit::note(&format!("{text} loads on this host and has {devices} {nics}"));
    }
    Ok(text.to_owned())
}

/// The plugin of this command's build or wheel.
fn find() -> Outcome<PathBuf> {
    let command = std::env::current_exe()
        .map_err(|error| Failure::failed(format!("cannot find the path of this command: {error}")))?;
    places::of_command(&command, FILE, BUILT).into_iter().find(|path| path.is_file()).ok_or_else(|| {
        Failure::failed(format!(
            "cannot find {FILE} beside {}, nor in the packages of its environment\n{GET_PLUGIN}",
            command.display()
        ))
    })
}

/// The number of the plugin's devices. The plugin runs in a process of its own, with this environment.
fn check(path: &Path, plan: &NcclPlan) -> Outcome<usize> {
    let NcclPlan { timeout, verbose, .. } = *plan;
    let asked = PluginPlan { path: path.to_owned(), version: None, json: false, timeout, verbose };
    match plugin::devices(&asked)? {
        (_, name) if name != NAME => Err(Failure::failed(format!(
            "{} is the plugin of another network, {name}: name the file {FILE}",
            path.display()
        ))),
        (0, _) => Err(Failure::failed(format!("{} has no NIC to use on this host", path.display()))),
        (devices, _) => Ok(devices),
    }
}

fn exports(path: &str) -> String {
    format!("export NCCL_NET_PLUGIN={}\nexport NCCL_NET={NAME}\n", quoted(path))
}

/// Lines with the exit status 1. If a script continues, NCCL finds no network of this name and stops.
fn failing() -> String {
    format!("export NCCL_NET={NAME}; false\n")
}

/// A word as a shell reads it. All is literal between single quotes but the single quote itself.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-+".contains(c);
    if word.chars().all(is_plain) { word.into() } else { format!("'{}'", word.replace('\'', r"'\''")) }
}
