//! The flags of `ferrywire nccl`.
//!
//! Read next: `../plan/nccl.rs`.

use std::path::PathBuf;

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Args, Subcommand};

use super::help;

/// The subcommands of `nccl`.
#[derive(Debug, Subcommand)]
pub enum NcclCommand {
    /// Check the plugin, and print what to export so that NCCL finds it
    ///
    /// The plugin is loaded in a process of its own, with this environment. Standard output has lines for a shell.
    /// After a failure they fail, so `eval` fails too.
    #[command(after_long_help = help::NCCL)]
    Env(NcclFlags),
}

/// The flags of `nccl env`.
#[derive(Clone, Debug, Default, Args)]
pub struct NcclFlags {
    /// File of the plugin [default: that of this command's build or wheel]
    #[arg(value_name = "PATH", value_parser = OsStringValueParser::new().map(PathBuf::from))]
    pub path: Option<PathBuf>,
    /// Longest time for one step of the plugin, in seconds [default: 30]
    #[arg(long, value_name = "S")]
    pub timeout: Option<f64>,
}
