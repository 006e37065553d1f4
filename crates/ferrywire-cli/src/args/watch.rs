//! The flags of `ferrywire watch`.
//!
//! Read next: `../plan/watch.rs`.

use clap::builder::FalseyValueParser;
use clap::{ArgAction, Args};

/// The flags of `watch`.
#[derive(Clone, Debug, Default, Args)]
pub struct WatchFlags {
    /// Print once and end
    #[arg(long, action = ArgAction::SetTrue, value_parser = FalseyValueParser::new())]
    pub once: bool,
    /// Write JSON instead of a table: one object per interval
    #[arg(long, action = ArgAction::SetTrue, value_parser = FalseyValueParser::new())]
    pub json: bool,
    /// Time over which rates are measured, in seconds [default: 1]
    #[arg(long, value_name = "S")]
    pub interval: Option<f64>,
}
