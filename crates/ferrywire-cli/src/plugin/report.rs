//! The report on a plugin as JSON and as text.

use std::fmt::Write;
use std::path::Path;

use comfy_table::{CellAlignment, Table, presets};
use ferrywire_ncclnet::Properties;
use ferrywire_ncclnet::abi::{PTR_CUDA, PTR_DMABUF, PTR_HOST};
use ferrywire_ncclnet::log::LogLine;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::exit::Failure;

/// The facts about a started plugin.
#[derive(Debug, Serialize, Deserialize)]
pub struct Report {
    pub path: String,
    /// The interface versions that the plugin exports, newest first.
    pub exported: Vec<String>,
    /// Exported versions that are too old to be used.
    pub older: Vec<String>,
    /// The version that NCCL 2.30 would use.
    pub nccl_choice: Option<String>,
    /// The version that was used for this report.
    pub used: String,
    /// The plugin's name after `init`.
    pub name: String,
    /// The plugin's name before `init`.
    pub name_before_init: String,
    pub devices: Vec<Device>,
}

/// One device. The fields are those of the interface; a field that the used version lacks has the value that
/// NCCL assumes.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Device {
    device: i32,
    name: String,
    pci_path: Option<String>,
    guid: u64,
    memory: Vec<String>,
    reg_is_global: bool,
    force_flush: bool,
    speed_mbps: i32,
    port: i32,
    latency_us: f32,
    max_comms: i32,
    max_recvs: i32,
    device_type: i32,
    device_version: i32,
    members: Vec<i32>,
    max_p2p_bytes: usize,
    max_coll_bytes: usize,
    max_multi_request: i32,
    rail: Option<i16>,
    plane: Option<i16>,
    refused_by_nccl: Option<String>,
    error: Option<String>,
}

impl Device {
    /// A device with its properties.
    pub fn new(device: i32, properties: &Properties) -> Device {
        let kinds = [(PTR_HOST, "host"), (PTR_CUDA, "cuda"), (PTR_DMABUF, "dmabuf")];
        let taken = kinds.iter().filter(|(bit, _)| properties.ptr_support & bit != 0);
        Device {
            device,
            name: properties.name.clone(),
            pci_path: properties.pci_path.clone(),
            guid: properties.guid,
            memory: taken.map(|(_, kind)| (*kind).to_owned()).collect(),
            reg_is_global: properties.reg_is_global,
            force_flush: properties.force_flush,
            speed_mbps: properties.speed_mbps,
            port: properties.port,
            latency_us: properties.latency_us,
            max_comms: properties.max_comms,
            max_recvs: properties.max_recvs,
            device_type: properties.device_type,
            device_version: properties.device_version,
            members: properties.devices.clone(),
            max_p2p_bytes: properties.max_p2p_bytes,
            max_coll_bytes: properties.max_coll_bytes,
            max_multi_request: properties.max_multi_request,
            rail: properties.rail,
            plane: properties.plane,
            refused_by_nccl: properties.refused_by_nccl(),
            error: None,
        }
    }

    /// A device whose properties could not be read.
    pub fn failed(device: i32, error: String) -> Device {
        Device { device, error: Some(error), ..Device::default() }
    }

    fn kind(&self) -> String {
        match (self.device_type, self.device_version) {
            (0, _) => "host".to_owned(),
            (1, version) => format!("unpack {version}"),
            (other, version) => format!("{other}, version {version}"),
        }
    }

    fn pci(&self) -> &str {
        self.pci_path.as_deref().map_or("-", |path| path.rsplit('/').next().unwrap_or(path))
    }

    /// Notes in text about the device.
    fn notes(&self) -> String {
        let members: Vec<String> = self.members.iter().map(i32::to_string).collect();
        let flags = [
            self.reg_is_global.then(|| "global registration".to_owned()),
            self.force_flush.then(|| "flush always".to_owned()),
            (self.members.len() > 1).then(|| format!("made of {}", members.join("+"))),
            self.rail.map(|rail| format!("rail {rail}")),
            self.plane.map(|plane| format!("plane {plane}")),
        ];
        flags.into_iter().flatten().collect::<Vec<_>>().join(", ")
    }
}

impl Report {
    /// The first error of a device.
    pub fn first_error(&self) -> Option<String> {
        self.devices.iter().find_map(|device| device.error.clone())
    }
}

/// The report, the error, or both as JSON.
pub fn json(report: Option<&Report>, error: Option<&Failure>, path: &Path) -> Value {
    let mut value = match report.map(serde_json::to_value) {
        Some(Ok(value)) => value,
        _ => json!({ "path": path.to_string_lossy() }),
    };
    value["schema"] = 2.into();
    value["version"] = env!("CARGO_PKG_VERSION").into();
    value["error"] = error.map_or(Value::Null, |error| error.message().into());
    value
}

/// The report as text.
pub fn text(report: &Report) -> String {
    let mut text = String::new();
    let mut line = |what: &str, value: &str| {
        let _ = writeln!(text, "{what:<9} {value}");
    };
    line("file", &report.path);
    line("name", &name(report));
    line("exports", &exports(report));
    line("version", &report.used);
    for refused in report.devices.iter().filter_map(|device| device.refused_by_nccl.as_ref()) {
        line("note", &format!("NCCL rejects this plugin: {refused}"));
    }
    for row in table(report).to_string().lines() {
        text += row.trim_end();
        text.push('\n');
    }
    text
}

fn name(report: &Report) -> String {
    if report.name == report.name_before_init {
        report.name.clone()
    } else {
        format!("{} (before init: {})", report.name, report.name_before_init)
    }
}

fn exports(report: &Report) -> String {
    let all: Vec<&str> = report.exported.iter().chain(&report.older).map(String::as_str).collect();
    let choice = match &report.nccl_choice {
        Some(choice) => format!("NCCL 2.30 uses {choice}"),
        None => "NCCL 2.30 uses none of them".to_owned(),
    };
    format!("{} ({choice})", all.join(", "))
}

type Column = (&'static str, fn(&Device) -> String);

const COLUMNS: [Column; 12] = [
    ("device", |device| device.device.to_string()),
    ("NIC", |device| device.name.clone()),
    ("PCI", |device| device.pci().to_owned()),
    ("Mbit/s", |device| device.speed_mbps.to_string()),
    ("port", |device| device.port.to_string()),
    ("guid", |device| format!("{:#x}", device.guid)),
    ("latency us", |device| device.latency_us.to_string()),
    ("memory", |device| device.memory.join(" ")),
    ("type", Device::kind),
    ("max comms", |device| device.max_comms.to_string()),
    ("max receives", |device| device.max_recvs.to_string()),
    ("notes", Device::notes),
];

fn table(report: &Report) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header(COLUMNS.map(|(title, _)| title));
    for device in &report.devices {
        match &device.error {
            Some(error) => table.add_row([device.device.to_string(), error.clone()]),
            None => table.add_row(COLUMNS.map(|(_, value)| value(device))),
        };
    }
    for column in [0, 3, 4, 5, 6, 9, 10] {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// A line of the plugin's log.
pub fn log_line(line: &LogLine) -> String {
    let device = line.device.map(|device| format!(", device {device}")).unwrap_or_default();
    let held_back = match line.held_back {
        0 => String::new(),
        count => format!(" ({count} more like it)"),
    };
    let level = format!("{:?}", line.level).to_lowercase();
    let LogLine { file, line, text, .. } = line;
    format!("plugin: {level}{device}: {text} [{file}:{line}]{held_back}")
}
