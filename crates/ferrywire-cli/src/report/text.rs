//! The report for a terminal.
//!
//! Read next: `compare.rs`.

use std::fmt::Write;

use comfy_table::{CellAlignment, Table, TableComponent, presets};

use super::compare::{CPU, Comparison, LATENCY, Line, Metric, THROUGHPUT, dash, ratio, ratio_text};
use crate::bench::table::three_digits;
use crate::units::Bytes;

/// Columns of figures: name, and figure.
const COLUMNS: [Metric; 7] =
    [THROUGHPUT[0], THROUGHPUT[1], THROUGHPUT[2], LATENCY[0], LATENCY[1], CPU_SOURCE, CPU_TARGET];
const CPU_SOURCE: Metric = Metric { name: "CPU s/GB source", value: CPU[0].value };
const CPU_TARGET: Metric = Metric { name: "CPU s/GB target", value: CPU[1].value };

/// The whole report.
pub fn render(comparison: &Comparison) -> String {
    let mut text = String::new();
    runs(&mut text, comparison);
    let common: Vec<String> =
        comparison.common_parts().into_iter().map(|(name, value)| format!("{name} {value}")).collect();
    let _ = writeln!(text, "all results: {}", common.join(", "));
    let _ = writeln!(text, "{}", figures(comparison));
    for (index, run) in comparison.runs.iter().enumerate() {
        for (bottleneck, sizes) in comparison.bottlenecks(index) {
            let of_run = if comparison.is_of_several() { format!("{}: ", run.name) } else { String::new() };
            let _ = writeln!(text, "{of_run}bottleneck: {bottleneck} (sizes {sizes})");
        }
    }
    text
}

/// Each run with its hosts, and the options that differ.
fn runs(text: &mut String, comparison: &Comparison) {
    let facts = comparison.facts();
    let differing = comparison.differing_options();
    for (index, run) in comparison.runs.iter().enumerate() {
        let _ = writeln!(text, "{}", run.name);
        for (name, values) in facts.iter().filter(|(_, values)| values[index] != dash()) {
            let _ = writeln!(text, "  {name}: {}", values[index]);
        }
        for (name, values) in &differing {
            let _ = writeln!(text, "  option {name}: {}", values[index]);
        }
    }
}

fn figures(comparison: &Comparison) -> Table {
    let parts = comparison.varying_parts();
    let metrics: Vec<Metric> = COLUMNS.into_iter().filter(|metric| is_present(comparison, *metric)).collect();
    let several = comparison.is_of_several();
    let unverified = comparison
        .lines
        .iter()
        .flat_map(|line| line.results.iter().flatten())
        .any(|row| row.verified != Some(true));
    let mut header: Vec<&str> = vec!["size"];
    header.extend(parts.iter().map(|(name, _)| *name));
    header.extend(several.then_some("run"));
    header.extend(metrics.iter().map(|metric| metric.name));
    header.extend(several.then_some("ratio"));
    header.extend(unverified.then_some("verified"));
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table
        .set_style(TableComponent::HeaderLines, '─')
        .set_style(TableComponent::MiddleHeaderIntersections, '─');
    table.set_header(header);
    for line in &comparison.lines {
        for (run, row) in line.results.iter().enumerate().filter_map(|(run, row)| Some((run, (*row)?))) {
            let mut cells = vec![Bytes(line.key.size_bytes).to_string()];
            cells.extend(parts.iter().map(|(_, value)| value(&line.key)));
            cells.extend(several.then(|| comparison.runs[run].name.clone()));
            let figure = |metric: &Metric| (metric.value)(row).map_or_else(dash, three_digits);
            cells.extend(metrics.iter().map(figure));
            cells.extend(several.then(|| main_ratio(line, run)));
            cells.extend(unverified.then(|| super::verified(row).to_owned()));
            table.add_row(cells);
        }
    }
    table.column_iter_mut().for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    table
}

/// The ratio to the first run: of throughput, or of latency where a run measures only latency.
fn main_ratio(line: &Line, run: usize) -> String {
    ratio_text(ratio(line, run, THROUGHPUT[0]).or_else(|| ratio(line, run, LATENCY[0])))
}

/// Whether any result has this figure.
fn is_present(comparison: &Comparison, metric: Metric) -> bool {
    let mut rows = comparison.lines.iter().flat_map(|line| line.results.iter().flatten());
    rows.any(|row| (metric.value)(row).is_some())
}
