//! `ferrywire report`: shows stored results of `bench --json` as a page or as a table, several runs side by side.
//!
//! Reading order: [`load`] (files to runs), [`compare`] (which results of which runs belong together), [`text`] (the
//! table), [`page`] and [`plot`] (the page), [`mod@write`] (the page's file).
//!
//! Invariant: every text of a file is sanitized when it is loaded, and the page escapes it.

mod compare;
mod load;
mod page;
mod plot;
mod text;
mod write;

use std::path::Path;

use crate::bench::result::ResultRow;
use crate::exit::{self, Outcome};
use crate::plan::ReportPlan;
use crate::sys;
use compare::Comparison;

/// Writes the page, or prints the table if no page was asked for.
pub fn run(asked: &ReportPlan) -> Outcome {
    if let Some(out) = &asked.html {
        write::check(out, &asked.files)?;
    }
    let runs = load::runs(&asked.files)?;
    let comparison = Comparison::of(&runs);
    match asked.html.as_deref() {
        None => exit::print(&text::render(&comparison)),
        Some(out) if out == Path::new("-") => exit::print(&page::render(&comparison)),
        Some(out) => {
            let page = page::render(&comparison);
            // A signal must not leave the temporary file behind.
            sys::catch_interrupt();
            write::replace(out, &page)
        }
    }
}

/// Whether the bytes of a result were checked and right.
fn verified(row: &ResultRow) -> &'static str {
    if row.verified == Some(true) { "yes" } else { "NO" }
}
