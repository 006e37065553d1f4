//! The report as one web page: no script, nothing from elsewhere, and well-formed XML as well as HTML.
//!
//! Each figure stands in a `data` element whose `value` is the number of the file; the text is rounded. Read next: `plot.rs`.

use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::compare::{
    CPU, Comparison, Key, KeyPart, LATENCY, Line, Metric, THROUGHPUT, dash, ratio, ratio_text,
};
use super::plot::{self, Curve, Point, Scale};
use crate::bench::result::{NicBytes, ResultRow};
use crate::bench::table::three_digits;
use crate::units::Bytes;

const STYLE: &str = include_str!("style.css");
/// Most curves of one plot: more cannot be distinguished.
const CURVES_MAX: usize = 16;

/// Renders the whole page.
pub fn render(comparison: &Comparison) -> String {
    let names: Vec<&str> = comparison.runs.iter().map(|run| run.name.as_str()).collect();
    let common = comparison.common_parts();
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                // With a closing slash the elements are also well-formed XML.
                (PreEscaped("<meta charset=\"utf-8\"/>"))
                (PreEscaped("<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>"))
                (PreEscaped("<meta name=\"color-scheme\" content=\"light dark\"/>"))
                title { "ferrywire bench: " (names.join(", ")) }
                style { (PreEscaped(STYLE)) }
            }
            body {
                header {
                    h1 { "ferrywire bench" }
                    p class="names" {
                        @for (index, name) in names.iter().enumerate() {
                            @if index > 0 { " · " }
                            (name)
                        }
                    }
                    p class="note" {
                        @for (index, (name, value)) in common.iter().enumerate() {
                            @if index > 0 { " · " }
                            (name) " " b { (value) }
                        }
                    }
                }
                main {
                    (runs(comparison))
                    (throughput(comparison))
                    (latency(comparison))
                    (cpu(comparison))
                    (bottlenecks(comparison))
                    (nics(comparison))
                    (options(comparison))
                }
                footer {
                    p { "Written by ferrywire report " (env!("CARGO_PKG_VERSION")) "." }
                }
            }
        }
    };
    page.into_string()
}

/// Hosts, settings in force, and the options that differ.
fn runs(comparison: &Comparison) -> Markup {
    let differing = comparison.differing_options();
    html! {
        section id="runs" {
            h2 { (if comparison.is_of_several() { "Runs" } else { "Run" }) }
            (by_run(comparison, comparison.facts().into_iter().map(|(name, values)| (name.to_owned(), values))))
            @if !differing.is_empty() {
                h3 { "Options that differ" }
                (by_run(comparison, differing.into_iter()))
            }
        }
    }
}

/// All options, folded.
fn options(comparison: &Comparison) -> Markup {
    html! {
        section id="options" {
            h2 { "Options" }
            details {
                summary { "All options; where one is not set, ferrywire chose" }
                (by_run(comparison, comparison.options().into_iter()))
            }
        }
    }
}

/// A table with a line per fact and a column per run.
fn by_run(comparison: &Comparison, facts: impl Iterator<Item = (String, Vec<String>)>) -> Markup {
    html! {
        div class="scroll" {
            table class="facts" {
                @if comparison.is_of_several() {
                    thead {
                        tr {
                            td {}
                            @for run in comparison.runs { th scope="col" { (run.name) } }
                        }
                    }
                }
                tbody {
                    @for (name, values) in facts {
                        tr {
                            th scope="row" { (name) }
                            @for value in values {
                                td class=[(name == "error" && value != dash()).then_some("error")] { (value) }
                            }
                        }
                    }
                }
            }
        }
    }
}

fn throughput(comparison: &Comparison) -> Markup {
    let curves = curves(comparison, |row| {
        let value = (THROUGHPUT[0].value)(row)?;
        Some((value, row.gb_per_s.min, row.gb_per_s.max))
    });
    let lines: Vec<&Line> = comparison.lines.iter().collect();
    html! {
        @if has(comparison, &THROUGHPUT) {
            section id="throughput" {
                h2 { "Throughput" }
                p class="note" { "GB/s: 1e9 bytes per second, over intervals of the timed part." }
                (limited("Throughput by message size", "GB/s", "bars: min to max", curves, Scale::Linear))
                (figures(comparison, &lines, &THROUGHPUT, true))
            }
        }
    }
}

fn latency(comparison: &Comparison) -> Markup {
    let curves = curves(comparison, |row| row.latency_us.map(|us| (us.p50, us.p50, us.p99)));
    let lines: Vec<&Line> = comparison.lines.iter().collect();
    html! {
        @if has(comparison, &LATENCY) {
            section id="latency" {
                h2 { "Latency" }
                p class="note" {
                    "Microseconds from posting a message to its completion; with pattern latency half of the round trip. "
                    "Deep queues add waiting."
                }
                (limited("Latency by message size", "us", "bars: p50 to p99", curves, Scale::Logarithmic))
                (figures(comparison, &lines, &LATENCY, false))
            }
        }
    }
}

fn cpu(comparison: &Comparison) -> Markup {
    let lines: Vec<&Line> = comparison.lines.iter().collect();
    html! {
        @if has(comparison, &CPU) {
            section id="cpu" {
                h2 { "CPU" }
                p class="note" { "CPU seconds per GB, at the end that data comes from and at the end that data goes to." }
                (figures(comparison, &lines, &CPU, false))
            }
        }
    }
}

fn bottlenecks(comparison: &Comparison) -> Markup {
    html! {
        section id="bottleneck" {
            h2 { "Bottleneck" }
            div class="scroll" {
                table {
                    thead {
                        tr {
                            @if comparison.is_of_several() { th scope="col" class="text" { "run" } }
                            th scope="col" class="text" { "sizes" }
                            th scope="col" class="text" { "bottleneck" }
                        }
                    }
                    @for (index, run) in comparison.runs.iter().enumerate() {
                        tbody {
                            @for (bottleneck, sizes) in comparison.bottlenecks(index) {
                                tr {
                                    @if comparison.is_of_several() { td class="text" { (run.name) } }
                                    td class="text" { (sizes) }
                                    td class="text" { (bottleneck) }
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

fn nics(comparison: &Comparison) -> Markup {
    let parts = comparison.varying_parts();
    html! {
        section id="nics" {
            h2 { "Bytes by NIC" }
            p class="note" { "Bytes of the timed part and its protocol, at both ends." }
            div class="scroll" {
                table {
                    thead {
                        tr {
                            th scope="col" { "size" }
                            @for (name, _) in &parts { th scope="col" { (name) } }
                            @if comparison.is_of_several() { th scope="col" class="text" { "run" } }
                            th scope="col" class="text" { "end" }
                            th scope="col" class="text" { "NIC" }
                            th scope="col" { "sent" }
                            th scope="col" { "received" }
                        }
                    }
                    @for line in comparison.totals() {
                        tbody {
                            @for (run, row) in results(line) {
                                @for (end, nic) in nics_of(row) {
                                    tr {
                                        th scope="row" { (Bytes(line.key.size_bytes)) }
                                        @for (_, value) in &parts { td { (value(&line.key)) } }
                                        @if comparison.is_of_several() { td class="text" { (comparison.runs[run].name) } }
                                        td class="text short" { (end) }
                                        td class="text" { (nic.nic) }
                                        td { (byte_count(nic.tx_bytes)) }
                                        td { (byte_count(nic.rx_bytes)) }
                                    }
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// The NICs of both ends of a result.
fn nics_of(row: &ResultRow) -> Vec<(&'static str, NicBytes)> {
    let of_peer = row.extra.get("peer_per_nic").cloned().unwrap_or_default();
    let of_peer: Vec<NicBytes> = serde_json::from_value(of_peer).unwrap_or_default();
    let here = row.per_nic.iter().cloned().map(|nic| ("this end", nic));
    here.chain(of_peer.into_iter().map(|nic| ("peer", nic))).collect()
}

/// A table of figures: a line per result, the results of one measurement under each other.
fn figures(comparison: &Comparison, lines: &[&Line], metrics: &[Metric], verified: bool) -> Markup {
    let parts = comparison.varying_parts();
    let several = comparison.is_of_several();
    let shown: Vec<&&Line> =
        lines.iter().filter(|line| results(line).any(|(_, row)| any(row, metrics))).collect();
    let metrics: Vec<Metric> =
        metrics.iter().copied().filter(|metric| has(comparison, std::slice::from_ref(metric))).collect();
    html! {
        div class="scroll" {
            table class="figures" {
                thead {
                    tr {
                        th scope="col" { "size" }
                        @for (name, _) in &parts { th scope="col" { (name) } }
                        @if several { th scope="col" class="text" { "run" } }
                        @for (index, metric) in metrics.iter().enumerate() {
                            th scope="col" { (metric.name) }
                            @if several && index == 0 { th scope="col" { "ratio" } }
                        }
                        @if verified { th scope="col" { "verified" } }
                    }
                }
                @for line in shown {
                    tbody {
                        @for (run, row) in results(line) {
                            tr {
                                th scope="row" { (Bytes(line.key.size_bytes)) }
                                @for (_, value) in &parts { td { (value(&line.key)) } }
                                @if several { td class="text" { (comparison.runs[run].name) } }
                                @for (index, metric) in metrics.iter().enumerate() {
                                    td { (figure((metric.value)(row))) }
                                    @if several && index == 0 {
                                        td class="ratio" { (ratio_text(ratio(line, run, *metric))) }
                                    }
                                }
                                @if verified { td { (super::verified(row)) } }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// A number of the file, and its rounded text.
fn figure(value: Option<f64>) -> Markup {
    match value {
        Some(value) => html! { data value=(value) { (three_digits(value)) } },
        None => html! { (dash()) },
    }
}

/// A number of bytes of the file, and its text in decimal units.
fn byte_count(bytes: u64) -> Markup {
    let units = [(1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")];
    let value = bytes as f64;
    let unit = units.into_iter().find(|(unit, _)| value >= *unit);
    let text = unit.map_or_else(
        || format!("{bytes} B"),
        |(unit, name)| format!("{} {name}", three_digits(value / unit)),
    );
    html! { data value=(bytes) { (text) } }
}

/// The results of a line, each with the index of its run.
fn results<'a>(line: &Line<'a>) -> impl Iterator<Item = (usize, &'a ResultRow)> {
    line.results.iter().enumerate().filter_map(|(run, row)| row.map(|row| (run, row)))
}

fn any(row: &ResultRow, metrics: &[Metric]) -> bool {
    metrics.iter().any(|metric| (metric.value)(row).is_some())
}

/// Whether any result has any of these figures.
fn has(comparison: &Comparison, metrics: &[Metric]) -> bool {
    comparison.lines.iter().flat_map(results).any(|(_, row)| any(row, metrics))
}

/// A plot of as many curves as can be distinguished.
fn limited(title: &str, unit: &str, range: &str, mut curves: Vec<Curve>, scale: Scale) -> Markup {
    let left_out = curves.len().saturating_sub(CURVES_MAX);
    curves.truncate(CURVES_MAX);
    html! {
        (plot::plot(title, unit, range, &curves, scale))
        @if left_out > 0 {
            p class="note" { "The plot leaves out " (left_out) " curves; the table has all results." }
        }
    }
}

/// The curves of a figure: one per run and series. `value` gives the figure, and the low and the high end of its range.
fn curves(comparison: &Comparison, value: impl Fn(&ResultRow) -> Option<(f64, f64, f64)>) -> Vec<Curve> {
    let parts: Vec<_> = comparison.varying_parts().into_iter().filter(|(name, _)| *name != "depth").collect();
    let mut curves = Vec::new();
    let totals = comparison.totals();
    for of_series in totals.chunk_by(|a, b| a.key.series == b.key.series) {
        for (run, stored) in comparison.runs.iter().enumerate() {
            let points = of_series.iter().filter_map(|line| {
                let (value, low, high) = value(line.results[run]?)?;
                Some(Point { size_bytes: line.key.size_bytes, value, low, high })
            });
            let points: Vec<Point> = points.collect();
            let mut name: Vec<String> =
                parts.iter().filter_map(|part| named(part, &of_series[0].key)).collect();
            if comparison.is_of_several() || name.is_empty() {
                name.insert(0, stored.name.clone());
            }
            if !points.is_empty() {
                curves.push(Curve { name: name.join(", "), points });
            }
        }
    }
    curves
}

/// A part of a key with the name that it needs to be understood alone; `None` if the key lacks it.
fn named((name, value): &KeyPart, key: &Key) -> Option<String> {
    let value = value(key);
    let explains_itself = !["blocks", "peer memory"].contains(name);
    (value != dash()).then(|| if explains_itself { value } else { format!("{name} {value}") })
}
