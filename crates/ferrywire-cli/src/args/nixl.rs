//! The flags of `ferrywire nixl`.
//!
//! Read next: `../plan/nixl.rs`.

use std::path::PathBuf;

use clap::builder::{FalseyValueParser, OsStringValueParser, TypedValueParser};
use clap::{ArgAction, Args, Subcommand};

use super::help;
use crate::auto::OrAuto;

/// The subcommands of `nixl`.
#[derive(Debug, Subcommand)]
pub enum NixlCommand {
    /// Copy the backend into every NIXL of the environment
    ///
    /// An older copy is replaced.
    #[command(after_long_help = help::NIXL)]
    Install {
        /// The environment to install into
        #[command(flatten)]
        flags: NixlFlags,
        /// Give programs that ask for the UCX backend ferrywire instead
        ///
        /// For programs whose backend name cannot be changed. Both ends need it. `ferrywire nixl remove` undoes it.
        #[arg(long, action = ArgAction::SetTrue, value_parser = FalseyValueParser::new())]
        as_ucx: bool,
    },
    /// Show each NIXL of the environment, and whether it has the backend
    #[command(after_long_help = help::NIXL)]
    Status(NixlFlags),
    /// Delete what install copied, and restore NIXL's own UCX backend
    #[command(after_long_help = help::NIXL)]
    Remove(NixlFlags),
}

/// The options that `install`, `status` and `remove` share.
#[derive(Clone, Debug, Default, Args)]
pub struct NixlFlags {
    /// Interpreter or virtual environment that has NIXL [default: auto]
    ///
    /// auto: the virtual environment in which this command lies, else the active one (VIRTUAL_ENV), else that of python3.
    #[arg(long, alias = "prefix", value_name = "PATH", value_parser = OsStringValueParser::new().map(OrAuto::path))]
    pub python: Option<OrAuto<PathBuf>>,
    /// File of the backend [default: auto]
    ///
    /// `install` copies this file. `status` compares the installed copy with it. auto: the backend of this command's build
    /// or wheel.
    #[arg(long, value_name = "PATH", value_parser = OsStringValueParser::new().map(OrAuto::path))]
    pub library: Option<OrAuto<PathBuf>>,
    /// Write JSON instead of text
    #[arg(long, action = ArgAction::SetTrue, value_parser = FalseyValueParser::new())]
    pub json: bool,
}
