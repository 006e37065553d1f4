//! The flags of `ferrywire plugin`.
//!
//! Read next: `../plan/plugin.rs`.

use std::path::PathBuf;

use clap::builder::FalseyValueParser;
use clap::{ArgAction, Args};
use ferrywire_ncclnet::abi::Version;

use crate::auto::OrAuto;

/// The flags of `plugin`.
#[derive(Debug, Args)]
pub struct PluginFlags {
    /// Plugin file, or a name as in NCCL_NET_PLUGIN
    ///
    /// A name is looked up as NCCL does: `shorty` is libnccl-net-shorty.so of the library path.
    #[arg(value_name = "PATH")]
    pub path: PathBuf,
    /// Interface version to use, v4 to v12 [default: auto]
    ///
    /// auto: the newest version that the plugin exports.
    #[arg(long, value_name = "vN")]
    pub version: Option<OrAuto<Version>>,
    /// Write JSON instead of text
    #[arg(long, action = ArgAction::SetTrue, value_parser = FalseyValueParser::new())]
    pub json: bool,
    /// Longest time for one step of the plugin, in seconds [default: 30]
    #[arg(long, alias = "deadline", value_name = "S")]
    pub timeout: Option<f64>,
}
