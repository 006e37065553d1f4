//! Puts the results of several runs beside each other.
//!
//! Two results belong together if they measured one thing: operation, pattern, memory, direction, endpoints, blocks, size
//! and depth are equal. The order of sizes in a file does not matter. Read next: `text.rs`, `page.rs`.

use std::collections::{BTreeMap, BTreeSet};

use clap::ValueEnum;

use super::load::StoredRun;
use crate::bench::host::Host;
use crate::bench::result::{ALL, ResultRow};
use crate::bench::table;
use crate::units::Bytes;

/// The subject of a result, apart from size and depth: one curve of a plot.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Series {
    op: String,
    pattern: String,
    memory: String,
    peer_memory: String,
    direction: String,
    blocks: Option<u64>,
    /// GPUs, ranks or peer of the result; `None` in a run with one endpoint at each end.
    endpoints: Option<String>,
}

/// The subject of a result, with size and depth.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    pub series: Series,
    pub size_bytes: u64,
    pub depth: usize,
}

/// One subject that was measured, with the result of each run.
#[derive(Debug)]
pub struct Line<'a> {
    pub key: Key,
    /// The result of each run; `None` if the run did not measure this subject.
    pub results: Vec<Option<&'a ResultRow>>,
}

/// Runs side by side.
#[derive(Debug)]
pub struct Comparison<'a> {
    pub runs: &'a [StoredRun],
    /// The lines, ordered by series as in the files, then by size and depth.
    pub lines: Vec<Line<'a>>,
}

/// A part of a key: its name, and its value.
pub type KeyPart = (&'static str, fn(&Key) -> String);

/// Every part of a key but the size.
const PARTS: [KeyPart; 8] = [
    ("op", |key| key.series.op.clone()),
    ("pattern", |key| key.series.pattern.clone()),
    ("memory", |key| key.series.memory.clone()),
    ("peer memory", |key| key.series.peer_memory.clone()),
    ("direction", |key| key.series.direction.clone()),
    ("blocks", |key| key.series.blocks.map_or_else(dash, |blocks| blocks.to_string())),
    ("endpoints", |key| key.series.endpoints.clone().unwrap_or_else(dash)),
    ("depth", |key| key.depth.to_string()),
];

/// A figure of a result: its name, and its value if the result has it.
#[derive(Clone, Copy, Debug)]
pub struct Metric {
    pub name: &'static str,
    pub value: fn(&ResultRow) -> Option<f64>,
}

/// Throughput; the first is the one that is compared. A latency run shows none of these.
pub const THROUGHPUT: [Metric; 5] = [
    Metric { name: "GB/s p50", value: |row| is_throughput(row).then_some(row.gb_per_s.p50) },
    Metric { name: "min", value: |row| is_throughput(row).then_some(row.gb_per_s.min) },
    Metric { name: "max", value: |row| is_throughput(row).then_some(row.gb_per_s.max) },
    Metric { name: "Gbit/s", value: |row| is_throughput(row).then_some(row.gb_per_s.p50 * 8.0) },
    Metric { name: "ns/block", value: |row| row.extra.get("ns_per_block")?.as_f64() },
];

/// Metrics of latency. Comparisons use the first.
pub const LATENCY: [Metric; 3] = [
    Metric { name: "us p50", value: |row| Some(row.latency_us?.p50) },
    Metric { name: "us p99", value: |row| Some(row.latency_us?.p99) },
    Metric { name: "us max", value: |row| Some(row.latency_us?.max) },
];

/// CPU time; the first is the one that is compared.
pub const CPU: [Metric; 2] = [
    Metric { name: "source", value: |row| Some(row.cpu_s_per_gb?.source) },
    Metric { name: "target", value: |row| Some(row.cpu_s_per_gb?.target) },
];

fn is_throughput(row: &ResultRow) -> bool {
    row.pattern != crate::args::Pattern::Latency
}

impl Series {
    fn of(row: &ResultRow) -> Series {
        Series {
            op: typed(row.op),
            pattern: typed(row.pattern),
            memory: row.memory.clone(),
            peer_memory: row.peer_memory.clone(),
            direction: row.direction.clone(),
            blocks: row.blocks,
            endpoints: endpoints(row),
        }
    }

    /// Whether the result is about one of several pairs of endpoints, or one of several peers.
    fn is_part(&self) -> bool {
        self.endpoints.as_deref().is_some_and(|endpoints| endpoints != ALL)
    }
}

impl<'a> Comparison<'a> {
    /// Aligns the results of all runs.
    pub fn of(runs: &'a [StoredRun]) -> Comparison<'a> {
        let mut places: BTreeMap<Series, usize> = BTreeMap::new();
        let mut by_key: BTreeMap<(usize, u64, usize, usize), Line<'a>> = BTreeMap::new();
        for (run_index, run) in runs.iter().enumerate() {
            let mut counts: BTreeMap<(usize, u64, usize), usize> = BTreeMap::new();
            for row in &run.document.results {
                let series = Series::of(row);
                let next = places.len();
                let place = *places.entry(series.clone()).or_insert(next);
                let (size_bytes, depth) = (row.size_bytes, row.depth);
                let count = counts.entry((place, size_bytes, depth)).or_default();
                let line = by_key.entry((place, size_bytes, depth, *count)).or_insert_with(|| Line {
                    key: Key { series, size_bytes, depth },
                    results: vec![None; runs.len()],
                });
                line.results[run_index] = Some(row);
                // A size may be listed twice: its second result belongs to the second of other runs.
                *count += 1;
            }
        }
        Comparison { runs, lines: by_key.into_values().collect() }
    }

    /// Whether there is more than one run.
    pub fn is_of_several(&self) -> bool {
        self.runs.len() > 1
    }

    /// The parts of keys that distinguish lines, beside the size.
    pub fn varying_parts(&self) -> Vec<KeyPart> {
        PARTS.into_iter().filter(|part| self.values(part).len() > 1).collect()
    }

    /// The parts of keys that all lines share, with their values.
    pub fn common_parts(&self) -> Vec<(&'static str, String)> {
        let common = PARTS.into_iter().filter_map(|part| match self.values(&part).as_slice() {
            [value] if *value != dash() => Some((part.0, value.clone())),
            _ => None,
        });
        common.collect()
    }

    fn values(&self, (_, value): &KeyPart) -> Vec<String> {
        let mut values: Vec<String> = self.lines.iter().map(|line| value(&line.key)).collect();
        values.sort_unstable();
        values.dedup();
        values
    }

    /// The lines about whole runs: without single pairs of endpoints where there are totals.
    pub fn totals(&self) -> Vec<&Line<'a>> {
        let has_totals = self.lines.iter().any(|line| line.key.series.endpoints.as_deref() == Some(ALL));
        self.lines.iter().filter(|line| !(has_totals && line.key.series.is_part())).collect()
    }

    /// Options whose values differ between runs, with the value of each run.
    ///
    /// The seed is chosen anew for each run, and in loopback mode the address too: neither explains a
    /// difference.
    pub fn differing_options(&self) -> Vec<(String, Vec<String>)> {
        let options = self.options().into_iter();
        let differs = |(name, values): &(String, Vec<String>)| {
            !["seed", "address"].contains(&name.as_str()) && values.windows(2).any(|pair| pair[0] != pair[1])
        };
        options.filter(differs).collect()
    }

    /// All options, with the value of each run.
    pub fn options(&self) -> Vec<(String, Vec<String>)> {
        let names: BTreeSet<&String> = self.runs.iter().flat_map(|run| run.document.config.keys()).collect();
        let value = |run: &StoredRun, name: &str| run.document.config.get(name).map_or_else(dash, option);
        let of_runs = |name: &String| self.runs.iter().map(|run| value(run, name)).collect();
        names.into_iter().map(|name| (name.clone(), of_runs(name))).collect()
    }

    /// Facts about each run: a name, and the value of each run.
    pub fn facts(&self) -> Vec<(&'static str, Vec<String>)> {
        let facts = FACTS.into_iter().map(|(name, value)| (name, self.runs.iter().map(value).collect()));
        facts.filter(|(_, values): &(_, Vec<String>)| values.iter().any(|value| *value != dash())).collect()
    }

    /// The bottlenecks of a run: each with the sizes in a row that have it.
    pub fn bottlenecks(&self, run: usize) -> Vec<(String, String)> {
        let mut groups: Vec<(&str, Vec<u64>)> = Vec::new();
        for row in self.totals().into_iter().filter_map(|line| line.results[run]) {
            match groups.last_mut() {
                Some((bottleneck, sizes)) if *bottleneck == row.bottleneck => sizes.push(row.size_bytes),
                _ => groups.push((&row.bottleneck, vec![row.size_bytes])),
            }
        }
        let named = |(bottleneck, mut sizes): (&str, Vec<u64>)| {
            sizes.dedup();
            let sizes: Vec<String> = sizes.into_iter().map(|size| Bytes(size).to_string()).collect();
            (bottleneck.to_owned(), sizes.join(", "))
        };
        groups.into_iter().map(named).collect()
    }
}

/// A fact about a run: its name, and its value.
type Fact = (&'static str, fn(&StoredRun) -> String);

const FACTS: [Fact; 10] = [
    ("host", |run| run.document.host.hostname.clone()),
    ("host's hardware", |run| hardware(&run.document.host)),
    ("host's kernel", |run| run.document.host.kernel.clone()),
    ("peer", |run| match &run.document.peer {
        Some(peer) if is_one_machine(run) => format!("{} (the same host)", peer.hostname),
        Some(peer) => peer.hostname.clone(),
        None => dash(),
    }),
    ("peer's hardware", |run| other_host(run).map_or_else(dash, hardware)),
    ("peer's kernel", |run| other_host(run).map_or_else(dash, |peer| peer.kernel.clone())),
    ("ferrywire", |run| run.document.version.clone()),
    ("transport", |run| distinct(run, |row| row.transport.clone())),
    ("in force", |run| distinct(run, in_force)),
    ("error", |run| run.document.error.clone().unwrap_or_else(dash)),
];

fn is_one_machine(run: &StoredRun) -> bool {
    let host = &run.document.host;
    run.document.peer.as_ref().is_some_and(|peer| !host.boot_id.is_empty() && host.boot_id == peer.boot_id)
}

/// The peer's host, if it is another machine.
fn other_host(run: &StoredRun) -> Option<&Host> {
    run.document.peer.as_ref().filter(|_| !is_one_machine(run))
}

fn hardware(host: &Host) -> String {
    format!("{} cores, {} GiB, {}", host.cores, host.memory_bytes >> 30, host.cpu)
}

fn in_force(row: &ResultRow) -> String {
    let plural = |n: usize, noun: &str| format!("{n} {noun}{}", if n == 1 { "" } else { "s" });
    format!(
        "{}, chunk {}, window {}, {}, congestion control {}",
        plural(row.channels, "channel"),
        Bytes(row.chunk_bytes),
        row.window,
        plural(row.threads, "thread"),
        row.congestion_control
    )
}

/// The distinct values of a run's results.
fn distinct(run: &StoredRun, value: fn(&ResultRow) -> String) -> String {
    let mut values: Vec<String> = Vec::new();
    for value in run.document.results.iter().map(value) {
        if !values.contains(&value) {
            values.push(value);
        }
    }
    values.join("; ")
}

/// The GPUs, ranks or peer that a result is about; `None` if the run has one endpoint at each end.
fn endpoints(row: &ResultRow) -> Option<String> {
    if let Some([here, there]) = table::pair(row) {
        return Some(if here == ALL { here } else { format!("{here} > {there}") });
    }
    if let Some(member) = row.extra.get("member") {
        return Some(format!("peer {member}"));
    }
    row.gpu.clone().filter(|gpu| gpu == ALL)
}

/// An option's value, as people write it.
fn option(value: &serde_json::Value) -> String {
    match value {
        serde_json::Value::Null => "not set".to_owned(),
        serde_json::Value::String(text) => text.clone(),
        serde_json::Value::Array(items) => items.iter().map(option).collect::<Vec<_>>().join(", "),
        other => other.to_string(),
    }
}

/// The value of an option, as it is typed.
fn typed(value: impl ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// The text that stands for a missing value.
pub fn dash() -> String {
    "-".to_owned()
}

/// A figure relative to that of the first run, if both have one.
pub fn ratio(line: &Line, run: usize, metric: Metric) -> Option<f64> {
    let figure = |run: usize| line.results[run].and_then(metric.value);
    let first = figure(0).filter(|first| *first > 0.0)?;
    Some(figure(run)? / first)
}

/// A ratio as text: `1.25x`.
pub fn ratio_text(ratio: Option<f64>) -> String {
    ratio.map_or_else(dash, |ratio| format!("{}x", table::three_digits(ratio)))
}
