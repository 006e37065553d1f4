//! The flags of `ferrywire doctor`.
//!
//! Read next: `../plan/doctor.rs`.

use std::path::PathBuf;

use clap::builder::FalseyValueParser;
use clap::{ArgAction, Args};

use crate::auto::OrAuto;
use crate::units::Names;

/// The flags of `doctor`.
#[derive(Clone, Debug, Default, Args)]
pub struct DoctorFlags {
    /// Peer to check, such as a host with `ferrywire bench serve` [default: none]
    ///
    /// Without a port: port 7420. doctor connects over each NIC that a run would use. It reports whether the peer answers,
    /// has the same version and secret and is free, and which NICs of this host reach which NICs of the peer.
    #[arg(value_name = "ADDR:PORT")]
    pub address: Option<String>,
    /// Write JSON instead of text
    #[arg(long, action = ArgAction::SetTrue, value_parser = FalseyValueParser::new())]
    pub json: bool,
    /// NICs to check, by name [default: all]
    ///
    /// doctor connects to the peer over the same NICs; without the option, over the NICs that a run would use.
    #[arg(long, value_name = "NAMES")]
    pub nics: Option<OrAuto<Names>>,
    /// Also check that this NCCL net plugin loads and has devices [default: none]
    ///
    /// A file, or a name as in NCCL_NET_PLUGIN. The plugin's code runs, in a process of its own: name only plugins that you
    /// trust.
    #[arg(long, value_name = "PATH")]
    pub plugin: Option<PathBuf>,
    /// Longest time for one step, in seconds [default: 10]
    ///
    /// A step is the lookup of the peer's name, an answer of the peer or of the GPU's driver, or a call of the plugin.
    #[arg(long, alias = "deadline", value_name = "S")]
    pub timeout: Option<f64>,
    /// File with the secret that this end and the peer share [default: none]
    ///
    /// Without the option, the environment variable FERRYWIRE_SECRET holds the secret itself.
    #[arg(long, value_name = "FILE")]
    pub secret_file: Option<PathBuf>,
}
