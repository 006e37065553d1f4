//! The outputs of a run: a table, JSON and CSV.
//!
//! Read next: `result.rs`, `table.rs`.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use ferrywire::payload::plugin::Variable;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::host::Host;
use super::idle_nics;
use super::isolated;
use super::result::ResultRow;
use super::table;
use crate::exit::{self, Failure, Outcome};
use crate::memory::Memory;
use crate::plan::ConnectPlan;

/// Version of the JSON form.
pub const SCHEMA: u32 = 2;

/// The record of a run.
#[derive(Clone, Debug)]
pub struct Record {
    /// Effective values of the options.
    pub config: Value,
    /// This end's host.
    pub host: Host,
    /// The other end's host, once it has answered.
    pub peer: Option<Host>,
    /// The number of the other end's progress threads.
    pub peer_threads: Option<usize>,
    /// Results of the finished sizes.
    pub results: Vec<ResultRow>,
}

/// News of a run in progress.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum News {
    /// The other end has answered: its host and the number of its progress threads.
    Peer(Host, usize),
    /// The processes of a run of several ranks.
    Ranks(Vec<RankRow>),
    /// A size is finished.
    Results(Vec<ResultRow>),
}

/// One process of a run of several ranks, as it is stored.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RankRow {
    pub rank: u32,
    /// The rank's host.
    pub host: String,
    /// The rank's memory location.
    pub memory: String,
    /// The rank's number on its host.
    pub local_rank: u32,
}

impl Record {
    /// An empty record of a run.
    pub fn new(plan: &ConnectPlan) -> Record {
        Record {
            config: config(plan),
            host: Host::this(),
            peer: None,
            peer_threads: None,
            results: Vec::new(),
        }
    }

    /// Stores news of the run.
    pub fn take(&mut self, news: News) {
        match news {
            News::Peer(host, threads) => (self.peer, self.peer_threads) = (Some(host), Some(threads)),
            News::Ranks(ranks) => self.note("ranks", json!(ranks)),
            News::Results(rows) => {
                let rows = rows.into_iter().map(|row| with_idle_nics(&self.config, row));
                self.results.extend(rows.collect::<Vec<_>>());
            }
        }
    }

    /// Stores the plugin's environment.
    pub fn note_environment(&mut self, variables: &[Variable]) {
        self.note("plugin_environment", json!(isolated::stored(variables)));
    }

    fn note(&mut self, name: &str, value: Value) {
        if let Some(config) = self.config.as_object_mut() {
            config.insert(name.to_owned(), value);
        }
    }

    /// The effective values, one per line.
    pub fn effective_values(&self) -> String {
        let values = self.config.as_object().into_iter().flatten();
        values.map(|(name, value)| format!("{name} = {value}\n")).collect()
    }

    fn json(&self, outcome: &Outcome) -> Value {
        let mut peer = json!(self.peer);
        if let (Some(peer), Some(threads)) = (peer.as_object_mut(), self.peer_threads) {
            peer.insert("threads".to_owned(), json!(threads));
        }
        json!({
            "schema": SCHEMA,
            "version": env!("CARGO_PKG_VERSION"),
            "config": self.config,
            "host": self.host,
            "peer": peer,
            "results": self.results,
            "error": outcome.as_ref().err().map(Failure::message),
        })
    }
}

/// The result with this end's NICs that carry no channel.
fn with_idle_nics(config: &Value, mut row: ResultRow) -> ResultRow {
    let idle = idle_nics::of_result(config, &row);
    if !idle.is_empty() {
        row.extra.insert("idle_nics".to_owned(), json!(idle));
    }
    row
}

/// A value is `null` if the engine chooses; the results then have its choice.
fn config(plan: &ConnectPlan) -> Value {
    let addresses: Vec<String> = plan.addresses.iter().map(ToString::to_string).collect();
    let plugin = plan.engine.plugin.as_ref();
    let mut config = json!(plan.run);
    let own = json!({
        "address": addresses,
        "unpack": plan.run.unpack.or(plan.engine.unpack()),
        "nics": plan.engine.nics,
        "channels": plan.engine.channels,
        "chunk": plan.engine.chunk_bytes,
        "window": plugin.map_or(plan.engine.window, |plugin| plugin.window),
        "threads": plan.engine.threads,
        "crc": plan.engine.crc,
        "encryption": plan.engine.encryption.name(),
        "keyed_checksum": plan.engine.keyed_checksum,
        "congestion_control": plan.engine.congestion_control,
        "secret": plan.engine.secret.is_some(),
    });
    if let (Some(config), Value::Object(own)) = (config.as_object_mut(), own) {
        config.extend(own);
        config.extend(plan.engine.effective_values());
        if plan.run.multi_gpu {
            // Each endpoint has the memory of its own GPU.
            config.insert("memory".to_owned(), json!(plan.run.memory.kind()));
            config.insert("peer_memory".to_owned(), json!(plan.run.peer_memory.map(Memory::kind)));
        } else {
            // A rank has one GPU, which the results name.
            config.insert("gpus".to_owned(), Value::Null);
        }
    }
    config
}

/// The files for results, opened before anything is measured.
#[derive(Debug)]
pub struct Output {
    json: Option<Sink>,
    csv: Option<Sink>,
}

/// A file or standard output.
#[derive(Debug)]
struct Sink {
    path: PathBuf,
    file: Option<File>,
}

impl Output {
    /// Opens the JSON and CSV files of the plan; none for peers of an incast other than the first, which
    /// prints.
    pub fn open(plan: &ConnectPlan) -> Outcome<Output> {
        let none = plan.member > 0;
        let open = |path: &Option<PathBuf>| match path {
            Some(path) if !none => Sink::open(path).map(Some),
            _ => Ok(None),
        };
        Ok(Output { json: open(&plan.json)?, csv: open(&plan.csv)? })
    }

    /// Prints the table and writes the files, also for a failed run.
    pub fn finish(self, record: &Record, outcome: &Outcome) -> Outcome {
        let table = self.show(record);
        let json = self.json.map_or(Ok(()), |sink| {
            let text = serde_json::to_string_pretty(&record.json(outcome)).unwrap_or_default();
            sink.write(&format!("{text}\n"))
        });
        let csv = self.csv.map_or(Ok(()), |sink| sink.write(&csv(&record.results)));
        table.and(json).and(csv)
    }

    fn show(&self, record: &Record) -> Outcome {
        if record.results.is_empty() {
            return Ok(());
        }
        let table = table::render(record);
        if self.json.is_none() && self.csv.is_none() {
            return exit::print(&table);
        }
        exit::aside(&table);
        Ok(())
    }
}

impl Sink {
    fn open(path: &Path) -> Outcome<Sink> {
        if path == Path::new("-") {
            return Ok(Sink { path: path.to_owned(), file: None });
        }
        match File::create(path) {
            Ok(file) => Ok(Sink { path: path.to_owned(), file: Some(file) }),
            Err(error) => Err(Failure::failed(format!("cannot write {}: {error}", path.display()))),
        }
    }

    fn write(self, text: &str) -> Outcome {
        match self.file {
            Some(mut file) => file
                .write_all(text.as_bytes())
                .map_err(|error| Failure::failed(format!("cannot write {}: {error}", self.path.display()))),
            None => exit::print(text),
        }
    }
}

/// A column of the CSV: its name, and its value in a result's JSON.
const CSV: &[(&str, &str)] = &[
    ("op", "/op"),
    ("memory", "/memory"),
    ("peer_memory", "/peer_memory"),
    ("transport", "/transport"),
    ("unpack", "/unpack"),
    ("pattern", "/pattern"),
    ("gpu", "/gpu"),
    ("peer_gpu", "/peer_gpu"),
    ("direction", "/direction"),
    ("size_bytes", "/size_bytes"),
    ("depth", "/depth"),
    ("blocks", "/blocks"),
    ("iterations", "/iterations"),
    ("channels", "/channels"),
    ("chunk_bytes", "/chunk_bytes"),
    ("window", "/window"),
    ("threads", "/threads"),
    ("congestion_control", "/congestion_control"),
    ("verified", "/verified"),
    ("gb_per_s_min", "/gb_per_s/min"),
    ("gb_per_s_p50", "/gb_per_s/p50"),
    ("gb_per_s_max", "/gb_per_s/max"),
    ("latency_us_p50", "/latency_us/p50"),
    ("latency_us_p99", "/latency_us/p99"),
    ("latency_us_max", "/latency_us/max"),
    ("cpu_s_per_gb_source", "/cpu_s_per_gb/source"),
    ("cpu_s_per_gb_target", "/cpu_s_per_gb/target"),
    ("ns_per_block", "/extra/ns_per_block"),
    ("bottleneck", "/bottleneck"),
    ("setup_s", "/setup_s"),
    ("rank", "/extra/ranks/0"),
    ("peer_rank", "/extra/ranks/1"),
];

fn csv(results: &[ResultRow]) -> String {
    let names: Vec<&str> = CSV.iter().map(|(name, _)| *name).collect();
    let line = |result: &ResultRow| {
        let result = json!(result);
        let fields: Vec<String> = CSV.iter().map(|(_, pointer)| csv_field(result.pointer(pointer))).collect();
        fields.join(",")
    };
    let lines = std::iter::once(names.join(",")).chain(results.iter().map(line));
    lines.map(|line| line + "\n").collect()
}

fn csv_field(value: Option<&Value>) -> String {
    match value {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) if text.contains([',', '"', '\n']) => {
            format!("\"{}\"", text.replace('"', "\"\""))
        }
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn csv_fields_are_quoted_where_needed() {
        assert_eq!(csv_field(Some(&json!("a, \"b\""))), "\"a, \"\"b\"\"\"");
        assert_eq!(csv_field(Some(&Value::Null)), "");
        assert_eq!(csv_field(Some(&json!(1.5))), "1.5");
    }
}
