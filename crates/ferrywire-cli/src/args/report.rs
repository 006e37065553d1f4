//! The flags of `ferrywire report`.
//!
//! Read next: `../plan/report.rs`.

use std::path::PathBuf;

use clap::Args;

/// The flags of `report`.
#[derive(Debug, Args)]
pub struct ReportFlags {
    /// Files that `ferrywire bench --json FILE` wrote; the first is the base of ratios
    #[arg(value_name = "RESULT.json", required = true)]
    pub files: Vec<PathBuf>,
    /// Write a web page to this file; - is standard output [default: print a table]
    ///
    /// The page is one file with plots and tables. A browser shows it without a network and without JavaScript. An older page
    /// is replaced at once.
    #[arg(long, value_name = "OUT.html")]
    pub html: Option<PathBuf>,
}
