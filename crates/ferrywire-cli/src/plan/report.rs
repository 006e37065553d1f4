//! The meaning of `ferrywire report`'s flags.
//!
//! Read next: [`crate::report`].

use std::path::PathBuf;

use super::usage;
use crate::args::ReportFlags;
use crate::exit::Outcome;

/// Most files of one report: more columns cannot be compared by eye.
const REPORT_FILES_MAX: usize = 16;

/// The plan of `report`.
#[derive(Clone, Debug)]
pub struct ReportPlan {
    /// Stored results, the base of ratios first.
    pub files: Vec<PathBuf>,
    /// The file for the page; `None` for a table on standard output.
    pub html: Option<PathBuf>,
}

pub(super) fn plan(flags: ReportFlags) -> Outcome<ReportPlan> {
    let ReportFlags { files, html } = flags;
    if files.iter().any(|file| file.as_os_str().is_empty()) {
        return usage("RESULT.json must not be empty: name a file that `ferrywire bench --json FILE` wrote");
    }
    if html.as_ref().is_some_and(|html| html.as_os_str().is_empty()) {
        return usage("--html must not be empty: name a file, or leave out --html to print a table");
    }
    if files.len() > REPORT_FILES_MAX {
        return usage(format!(
            "RESULT.json: a report compares at most {REPORT_FILES_MAX} files (got {}): leave some out",
            files.len()
        ));
    }
    Ok(ReportPlan { files, html })
}
