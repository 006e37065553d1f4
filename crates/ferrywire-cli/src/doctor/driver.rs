//! Asks the CUDA driver for its version and GPUs, in a child process: a driver may hang or crash.
//!
//! Invariant: this process never loads the driver, and waits for the child for a limited time.
//! Read next: `gpu.rs`, which judges the answer.

use std::io::Write;
use std::process::Command;
use std::time::Duration;

use ferrywire_host::topology::{DriverGpu, driver_gpus};
use ferrywire_memory::cuda::{CudaError, driver_version};
use serde::{Deserialize, Serialize};

use crate::exit::{Failure, Outcome};
use crate::sys;
use crate::tool::{self, NoOutput};

/// The command-line argument that starts the child process.
const CHILD: &str = "driver-child";

/// The answer of the driver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Driver {
    /// The driver works. Its version in its own notation (12040 is CUDA 12.4), and its GPUs.
    Works(u32, Vec<Shown>),
    /// There is no driver.
    Missing,
    /// The driver shows no GPU.
    NoGpu,
    /// The driver is too old; the field is its error.
    Old(String),
    /// The driver reports an error, or ended its process.
    Broken(String),
    /// The driver did not answer in time.
    Hangs(Duration),
}

/// A GPU: the driver's index, PCI address and name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shown(u32, String, String);

impl Driver {
    /// Asks the driver of this host.
    pub fn ask(limit: Duration) -> Driver {
        let Ok(own) = std::env::current_exe() else {
            return Driver::Broken("the path of this program is unknown".to_owned());
        };
        match tool::run(sys::name_parent(Command::new(own).arg(CHILD)), limit) {
            Ok(text) => serde_json::from_str(&text).unwrap_or_else(|_| {
                Driver::Broken("the process that loads the CUDA driver ended without an answer".to_owned())
            }),
            Err(NoOutput::Late(limit)) => Driver::Hangs(limit),
            Err(why @ NoOutput::Failed(_)) => {
                Driver::Broken(format!("the CUDA driver ended the process that loaded it: {why}"))
            }
            Err(why @ NoOutput::NotStarted(_)) => {
                Driver::Broken(format!("cannot start the process that loads the CUDA driver: {why}"))
            }
        }
    }

    /// The GPUs for a topology; `None` without a driver that answers.
    pub fn gpus(&self) -> Option<Vec<DriverGpu>> {
        let gpu = |Shown(index, address, name): &Shown| {
            Some(DriverGpu { index: *index, address: address.parse().ok()?, name: name.clone() })
        };
        match self {
            Driver::Works(_, gpus) => Some(gpus.iter().filter_map(gpu).collect()),
            Driver::NoGpu => Some(Vec::new()),
            _ => None,
        }
    }

    /// Loads the driver of this host in this process.
    fn load() -> Driver {
        let shown = |gpu: DriverGpu| Shown(gpu.index, gpu.address.to_string(), gpu.name);
        match driver_version().and_then(|version| Ok((version, driver_gpus()?))) {
            Ok((version, gpus)) => Driver::Works(version, gpus.into_iter().map(shown).collect()),
            Err(CudaError::NoDriver) => Driver::Missing,
            Err(CudaError::NoDevice) => Driver::NoGpu,
            Err(error @ CudaError::OldDriver { .. }) => Driver::Old(error.to_string()),
            Err(error) => Driver::Broken(error.to_string()),
        }
    }
}

/// Loads the driver, prints its answer for the parent, and ends the process without running the driver's exit handlers.
pub fn child() -> Outcome {
    sys::die_with_parent();
    let mut parent = sys::take_stdout().map_err(|error| Failure::failed(error.to_string()))?;
    let answer = serde_json::to_string(&Driver::load()).unwrap_or_default();
    // A parent that is gone needs no answer.
    let _ = parent.write_all(answer.as_bytes());
    sys::exit_now(0)
}
