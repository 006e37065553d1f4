//! The table for people, and the lines below it.
//!
//! Read next: `result.rs`.

use std::fmt::Write;

use clap::ValueEnum;
use comfy_table::{CellAlignment, Table, TableComponent, presets};

use super::idle_nics::IdleNic;
use super::report::Record;
use super::result::{ALL, LatencyUs, ResultRow};
use crate::args::{Op, Pattern};
use crate::units::Bytes;

type Column = (&'static str, fn(&ResultRow) -> String);

const SIZE: Column = ("size", |row| Bytes(row.size_bytes).to_string());
const DIRECTION: Column = ("direction", |row| {
    match (row.gpu.as_deref().filter(|_| row.pattern == Pattern::Incast), row.extra.get("member")) {
        (_, Some(member)) => format!("{} {member}", row.direction),
        (Some(gpu), None) if pair(row).is_none() => format!("{} {gpu}", row.direction),
        (_, None) => row.direction.clone(),
    }
});
const PAIR: Column = ("GPUs", |row| match pair(row) {
    Some([here, _]) if here == ALL => ALL.to_owned(),
    Some([here, there]) => format!("{here} > {there}"),
    None => dash(),
});
const RANKS: Column = ("ranks", PAIR.1);
const DEPTH: Column = ("depth", |row| row.depth.to_string());
const RATE: Column = ("GB/s", |row| format!("{:.2}", row.gb_per_s.p50));
const RATE_MIN: Column = ("min", |row| format!("{:.2}", row.gb_per_s.min));
const RATE_MAX: Column = ("max", |row| format!("{:.2}", row.gb_per_s.max));
const BITS: Column = ("Gbit/s", |row| format!("{:.1}", row.gb_per_s.p50 * 8.0));
const LATENCY: Column = ("us p50", |row| latency(row, |us| us.p50));
const LATENCY_P99: Column = ("us p99", |row| latency(row, |us| us.p99));
const LATENCY_MAX: Column = ("us max", |row| latency(row, |us| us.max));
const WRITE_P50: Column = ("write completion us p50", |row| {
    let p50 =
        row.extra.get("write_completion_us").and_then(|us| us.get("p50")).and_then(serde_json::Value::as_f64);
    p50.map_or_else(dash, three_digits)
});
const PER_BLOCK: Column = ("ns/block", |row| {
    row.extra.get("ns_per_block").and_then(serde_json::Value::as_f64).map_or_else(dash, three_digits)
});
const CPU: Column = ("CPU s/GB source + target", |row| match row.cpu_s_per_gb {
    Some(cpu) => format!("{} + {}", three_digits(cpu.source), three_digits(cpu.target)),
    None => dash(),
});
const VERIFIED: Column = ("verified", |row| if row.verified.is_some() { "yes" } else { "NO" }.to_owned());

fn latency(row: &ResultRow, part: fn(&LatencyUs) -> f64) -> String {
    row.latency_us.as_ref().map_or_else(dash, |us| three_digits(part(us)))
}

/// A figure with three significant digits; with two from 0.1 to 1.
pub fn three_digits(value: f64) -> String {
    let decimals = match value {
        100.0.. => 0,
        10.0.. => 1,
        // Without the limit, a figure next to 0 would fill the line.
        f64::MIN_POSITIVE..0.1 => (2.0 - value.log10().floor()).min(9.0) as usize,
        _ => 2,
    };
    format!("{value:.decimals$}")
}

fn dash() -> String {
    "-".to_owned()
}

fn columns(first: &ResultRow) -> Vec<Column> {
    let mut columns = vec![SIZE];
    columns.extend(pair(first).map(|_| if is_of_ranks(first) { RANKS } else { PAIR }));
    if matches!(first.pattern, Pattern::Bidir | Pattern::Incast) {
        columns.push(DIRECTION);
    }
    if first.pattern == Pattern::Latency {
        columns.extend([LATENCY, LATENCY_P99, LATENCY_MAX]);
        columns.extend((first.op == Op::Write).then_some(WRITE_P50));
    } else {
        columns.extend([DEPTH, RATE, RATE_MIN, RATE_MAX, BITS, LATENCY, LATENCY_P99, CPU]);
    }
    columns.extend(first.blocks.map(|_| PER_BLOCK));
    columns.push(VERIFIED);
    columns
}

/// The whole report: the run's settings, the table, and the bottleneck of each size.
pub fn render(record: &Record) -> String {
    let Some(first) = record.results.first() else {
        return String::new();
    };
    let columns = columns(first);
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table
        .set_style(TableComponent::HeaderLines, '─')
        .set_style(TableComponent::MiddleHeaderIntersections, '─');
    table.set_header(columns.iter().map(|(name, _)| *name));
    // An all-to-all run has too many pairs for a line each.
    let in_table = |row: &&ResultRow| row.pattern != Pattern::AllToAll || is_total(row);
    for row in record.results.iter().filter(in_table) {
        table.add_row(columns.iter().map(|(_, value)| value(row)));
    }
    table.column_iter_mut().for_each(|column| {
        column.set_cell_alignment(CellAlignment::Right);
    });
    let mut text = String::new();
    let _ = writeln!(text, "{}\n{}", headline(first), setting(record, first));
    idle_nics(&mut text, &record.results);
    let _ = writeln!(text, "{table}");
    matrices(&mut text, &record.results);
    bottlenecks(&mut text, &record.results);
    warnings(&mut text, &record.results);
    text
}

/// The GPUs of a row in a run with several endpoints; with the ranks in a run of several ranks.
pub fn pair(row: &ResultRow) -> Option<[String; 2]> {
    let pair = row.extra.get("pair")?.as_array()?;
    let gpu = |at: usize| pair.get(at)?.as_str();
    let rank = |at: usize| row.extra.get("ranks")?.as_array()?.get(at)?.as_u64();
    let named = |at: usize| match (rank(at), gpu(at)?) {
        (Some(rank), gpu) => Some(format!("{rank} ({gpu})")),
        (None, gpu) => Some(gpu.to_owned()),
    };
    Some([named(0)?, named(1)?])
}

fn is_of_ranks(row: &ResultRow) -> bool {
    row.extra.contains_key("ranks")
}

fn is_total(row: &ResultRow) -> bool {
    pair(row).is_some_and(|[here, _]| here == ALL)
}

/// GB/s from every GPU to every GPU: a matrix for each size of an all-to-all run.
fn matrices(text: &mut String, rows: &[ResultRow]) {
    let of_mesh: Vec<&ResultRow> =
        rows.iter().filter(|row| row.pattern == Pattern::AllToAll && !is_total(row)).collect();
    for of_size in of_mesh.chunk_by(|a, b| a.size_bytes == b.size_bytes) {
        let there = distinct(of_size.iter().filter_map(|row| pair(row)).map(|[_, there]| there));
        let mut matrix = Table::new();
        matrix.load_preset(presets::NOTHING);
        matrix.set_header(std::iter::once("from, to").chain(there.iter().map(String::as_str)));
        for here in distinct(of_size.iter().filter_map(|row| pair(row)).map(|[here, _]| here)) {
            let rate = |there: &String| {
                let both = Some([here.clone(), there.clone()]);
                let found = of_size.iter().find(|row| pair(row) == both);
                found.map_or_else(dash, |row| format!("{:.2}", row.gb_per_s.p50))
            };
            matrix.add_row(std::iter::once(here.clone()).chain(there.iter().map(rate)));
        }
        matrix.column_iter_mut().for_each(|column| column.set_cell_alignment(CellAlignment::Right));
        let size = of_size.first().map_or(0, |row| row.size_bytes);
        let which = if of_size.first().is_some_and(|row| is_of_ranks(row)) {
            "rows: ranks of the first half, columns: ranks of the second half"
        } else {
            "rows: GPUs of this end, columns: GPUs of the peer"
        };
        let _ = writeln!(text, "GB/s at {}; {which}\n{matrix}", Bytes(size));
    }
}

/// Distinct names, in the order of their first occurrence.
fn distinct(names: impl Iterator<Item = String>) -> Vec<String> {
    let mut seen = Vec::new();
    for name in names {
        if !seen.contains(&name) {
            seen.push(name);
        }
    }
    seen
}

/// A result as one line of the table.
pub fn line(row: &ResultRow) -> String {
    let cells = columns(row).into_iter().map(|(name, value)| format!("{name} {}", value(row)));
    cells.collect::<Vec<_>>().join(", ")
}

fn headline(row: &ResultRow) -> String {
    let pattern = match (row.pattern, row.op) {
        (Pattern::Latency, Op::Read) => "latency of one read".to_owned(),
        (Pattern::Latency, _) => "half of the round trip".to_owned(),
        (pattern, _) => typed(pattern),
    };
    let op = typed(row.op);
    let blocks = row.blocks.map_or_else(String::new, |n| format!(", {n} blocks per message"));
    if pair(row).is_some() {
        let kind = |memory: &str| memory.split(':').next().unwrap_or_default().to_owned();
        let (here, there) = (kind(&row.memory), kind(&row.peer_memory));
        let (each, [near, far]) = if is_of_ranks(row) {
            ("one process per rank", ["first half", "second half"])
        } else {
            ("one endpoint per GPU", ["this end", "peer"])
        };
        return format!("{op}, {pattern}{blocks}, {each}: {near} {here}, {far} {there}");
    }
    let here = lies(&row.memory, row.gpu.as_deref());
    let there = lies(&row.peer_memory, row.peer_gpu.as_deref());
    format!("{op}, {pattern}{blocks}: this end {here}, peer {there}")
}

/// The value of an option, as it is typed.
fn typed(value: impl ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// A memory location with the name of its GPU.
fn lies(memory: &str, gpu: Option<&str>) -> String {
    gpu.map_or_else(|| memory.to_owned(), |gpu| format!("{memory} ({gpu})"))
}

fn setting(record: &Record, row: &ResultRow) -> String {
    let mut nics: Vec<&str> = row.per_channel.iter().map(|channel| channel.nic.as_str()).collect();
    nics.sort_unstable();
    nics.dedup();
    let plural = |n: usize, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
    let peer = record.peer_threads.map_or_else(String::new, |n| format!(" (peer {n})"));
    format!(
        "transport {}, {}: {}\n{} over {}, chunk {}, window {}, {}{peer}, congestion control {}, setup {:.3} s",
        row.transport,
        row.extra.get("protection").and_then(|name| name.as_str()).unwrap_or("not encrypted"),
        transport_reason(row),
        plural(row.channels, "channel"),
        nics.join(","),
        Bytes(row.chunk_bytes),
        row.window,
        plural(row.threads, "thread"),
        row.congestion_control,
        row.setup_s,
    )
}

/// One line per NIC of this end that carries no channel; results of several pairs may have NICs of their own.
fn idle_nics(text: &mut String, rows: &[ResultRow]) {
    let of_row =
        |row: &ResultRow| row.extra.get("idle_nics").cloned().map(serde_json::from_value::<Vec<IdleNic>>);
    // The total of all pairs comes last, and has the NICs of all.
    let idle = rows.last().and_then(of_row).and_then(Result::ok).unwrap_or_default();
    for IdleNic { nic, reason, fix } in idle {
        let _ = writeln!(text, "NIC {nic} carries no channel: {reason}; {fix}");
    }
}

/// Why this transport was chosen.
fn transport_reason(row: &ResultRow) -> String {
    if let Some(reason) = row.extra.get("transport_reason").and_then(|reason| reason.as_str()) {
        return reason.to_owned();
    }
    match row.extra.get("plugin").and_then(|plugin| plugin.as_str()) {
        Some(plugin) => format!("--plugin names {plugin}"),
        None if row.memory == "host" && row.peer_memory == "host" => "both ends use host memory".to_owned(),
        None => "no plugin is named; GPU memory passes through staging rings in host memory".to_owned(),
    }
}

/// One line per bottleneck; consecutive sizes with one bottleneck share a line.
fn bottlenecks(text: &mut String, rows: &[ResultRow]) {
    let mut groups: Vec<(&str, Vec<u64>)> = Vec::new();
    for row in rows {
        match groups.last_mut() {
            Some((bottleneck, sizes)) if *bottleneck == row.bottleneck => sizes.push(row.size_bytes),
            _ => groups.push((&row.bottleneck, vec![row.size_bytes])),
        }
    }
    for (bottleneck, mut sizes) in groups {
        sizes.dedup();
        let names: Vec<String> = sizes.iter().map(|size| Bytes(*size).to_string()).collect();
        let plural = if names.len() == 1 { "" } else { "s" };
        let _ = writeln!(text, "bottleneck: {bottleneck} (size{plural} {})", names.join(", "));
    }
}

fn warnings(text: &mut String, rows: &[ResultRow]) {
    if rows.iter().any(|row| row.verified.is_none()) {
        let _ = writeln!(text, "not verified: --verify off");
    }
    let Some(last) = rows.last() else { return };
    let lost = last.extra.get("lost_channels").and_then(|lines| lines.as_array());
    for line in lost.into_iter().flatten().filter_map(|line| line.as_str()) {
        let _ = writeln!(text, "lost: {line}");
    }
}
