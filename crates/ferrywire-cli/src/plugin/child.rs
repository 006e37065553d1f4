//! The child process that starts a plugin, which may crash it.
//!
//! Reports to the parent go through standard output, which the plugin does not get: the plugin's own output goes to
//! standard error.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::Path;

use ferrywire_ncclnet::abi::Version;
use ferrywire_ncclnet::{Library, LoadError, Plugin, log};
use serde::{Deserialize, Serialize};

use super::report::{Device, Report};
use crate::exit::Outcome;
use crate::sys;

/// One message to the parent.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Message {
    /// The step that begins, in the words of the error if the plugin ends the process in it: "in init".
    Step(String),
    /// The plugin could not be loaded.
    Failed(String),
    /// The complete report.
    Report(Box<Report>),
}

/// Loads the plugin, reports to the parent, and ends the process without running the plugin's exit handlers.
pub fn run(path: &Path, version: Option<Version>) -> Outcome {
    sys::die_with_parent();
    let parent = sys::take_stdout().map_err(|error| crate::exit::Failure::failed(error.to_string()))?;
    log::tee_to_fd(Some(parent.as_raw_fd()));
    let message = match inspect(path, version, &parent) {
        Ok(report) => Message::Report(Box::new(report)),
        Err(error) => Message::Failed(error.to_string()),
    };
    send(&parent, &message);
    sys::exit_now(0)
}

fn send(parent: &File, message: &Message) {
    if let Ok(line) = serde_json::to_string(message) {
        // A parent that is gone needs no report.
        let _ = (&*parent).write_all((line + "\n").as_bytes());
    }
}

fn inspect(path: &Path, wanted: Option<Version>, parent: &File) -> Result<Report, LoadError> {
    let step = |text: &str| send(parent, &Message::Step(text.to_owned()));
    step("while its file was loaded");
    let library = open(path)?;
    let exported = library.versions();
    let (older, nccl_choice) = (library.older_versions(), library.nccl_choice());
    step("in init");
    // SAFETY: the user asked to start this plugin; this process does nothing else.
    let plugin = unsafe { library.load(wanted) }?;
    let devices = (0..plugin.devices()).map(|device| {
        step(&format!("in getProperties of device {device}"));
        inspect_device(&plugin, device)
    });
    Ok(Report {
        path: plugin.path().to_owned(),
        exported: exported.iter().map(Version::to_string).collect(),
        older: older.iter().map(|version| format!("v{version}")).collect(),
        nccl_choice: nccl_choice.map(|version| version.to_string()),
        used: plugin.version().to_string(),
        name: plugin.name().to_owned(),
        name_before_init: plugin.name_before_init().to_owned(),
        devices: devices.collect(),
    })
}

/// Opens a file, or a name as in `NCCL_NET_PLUGIN`.
fn open(path: &Path) -> Result<Library, LoadError> {
    let named = path.to_str().filter(|name| !name.contains('/') && !path.exists());
    // SAFETY: the user asked to load this file; the environment is not changed in this process.
    unsafe {
        match named {
            Some(name) => Library::find(Some(name)),
            None => Library::open(path),
        }
    }
}

fn inspect_device(plugin: &Plugin, device: i32) -> Device {
    match plugin.properties(device) {
        Ok(properties) => Device::new(device, &properties),
        Err(error) => Device::failed(device, error.to_string()),
    }
}
