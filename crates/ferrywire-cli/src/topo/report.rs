//! A topology and its plan as JSON and as tables.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use comfy_table::{Table, presets};
use ferrywire_devmem::Possible;
use ferrywire_host::topology::{Cpus, Gpu, GpuPlan, Nic, PciPath, PciRoot, Plan, Topology};
use serde_json::{Value, json};

use crate::exit::Failure;

/// The topology and the plan to show.
pub struct Report<'a> {
    pub topology: &'a Topology,
    /// The host's plan, if there is one.
    pub plan: Option<&'a Plan>,
    /// Channels per GPU.
    pub channels: usize,
}

impl Report<'_> {
    /// The report as JSON.
    pub fn json(&self, error: Option<&Failure>) -> Value {
        let nodes = self.topology.nodes.iter();
        let gpus = |gpus: &[Gpu]| gpus.iter().map(gpu_json).collect::<Vec<_>>();
        json!({
            "schema": 2,
            "version": env!("CARGO_PKG_VERSION"),
            "nodes": nodes.map(|node| json!({ "node": node.number, "cpus": node.cpus.to_string() })).collect::<Vec<_>>(),
            "nics": self.topology.nics.iter().map(nic_json).collect::<Vec<_>>(),
            "gpus": gpus(&self.topology.gpus),
            "hidden_gpus": gpus(&self.topology.hidden_gpus),
            "plan": self.plan.map(|plan| self.plan_json(plan)),
            "notes": self.topology.notes,
            "error": error.map(Failure::message),
        })
    }

    fn plan_json(&self, plan: &Plan) -> Value {
        let gpus = self.per_gpu(plan).into_iter().map(|(gpu, channels)| {
            json!({
                "gpu": gpu.gpu,
                "nics": gpu.nics,
                "channels": channels,
                "locality": gpu.locality.to_string(),
                "why": gpu.why,
                "cpus": gpu.cpus.to_string(),
                "others": gpu.others,
            })
        });
        let unused = plan.unused.iter().map(|unused| json!({ "nic": unused.nic, "why": unused.why }));
        json!({
            "gpus": gpus.collect::<Vec<_>>(),
            "host_nics": plan.host_nics,
            "unused": unused.collect::<Vec<_>>(),
            "notes": plan.notes,
        })
    }

    /// Each GPU, with the number of channels on each of its NICs.
    fn per_gpu<'a>(&self, plan: &'a Plan) -> Vec<(&'a GpuPlan, BTreeMap<String, usize>)> {
        let spread = plan.channels(self.topology, self.channels);
        let counted = spread.into_iter().map(|nics| {
            let mut counts = BTreeMap::new();
            nics.into_iter().for_each(|nic| *counts.entry(nic).or_default() += 1);
            counts
        });
        plan.gpus.iter().zip(counted).collect()
    }

    /// The report as text.
    pub fn text(&self) -> String {
        let mut text = String::new();
        let mut part = |title: &str, body: String| {
            let gap = if text.is_empty() { "" } else { "\n" };
            let _ = write!(text, "{gap}{title}\n{body}");
        };
        part("NUMA nodes", self.nodes());
        part("PCIe roots with GPUs or NICs", self.roots());
        part("GPUs", self.gpus());
        part("NICs", self.nics());
        if self.topology.nics.iter().any(|nic| nic.devmem.is_some()) {
            part("devmem TCP", self.devmem());
        }
        if let Some(plan) = self.plan {
            part("Plan", self.planned(plan));
        }
        let notes = self.topology.notes.iter().chain(self.plan.into_iter().flat_map(|plan| &plan.notes));
        let notes: String = notes.map(|note| format!("  {note}\n")).collect();
        if !notes.is_empty() {
            part("Notes", notes);
        }
        text
    }

    fn nodes(&self) -> String {
        let nodes = &self.topology.nodes;
        table(["node", "CPUs"], nodes.iter().map(|node| [node.number.to_string(), node.cpus.to_string()]))
    }

    fn roots(&self) -> String {
        let mut roots = BTreeMap::<PciRoot, Root>::new();
        for gpu in &self.topology.gpus {
            if let Some(root) = at_root(&mut roots, gpu.pci.as_ref()) {
                root.nodes.extend(gpu.node);
                root.gpus.push(gpu.index);
            }
        }
        for nic in &self.topology.nics {
            if let Some(root) = at_root(&mut roots, nic.pci.as_ref()) {
                root.nodes.extend(nic.node);
                root.nics.push(nic.name.clone());
            }
        }
        let row = |(root, on): (&PciRoot, &Root)| {
            let nodes = on.nodes.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
            let gpus = on.gpus.iter().copied().collect::<Cpus>().to_string();
            [root.to_string(), or_dash(nodes), or_dash(gpus), or_dash(on.nics.join(","))]
        };
        if roots.is_empty() {
            "  none\n".to_owned()
        } else {
            table(["root", "node", "GPUs", "NICs"], roots.iter().map(row))
        }
    }

    fn gpus(&self) -> String {
        let row = |number: String, gpu: &Gpu| {
            let [address, root] = place(gpu.pci.as_ref());
            [
                number,
                gpu.name.clone().unwrap_or_else(|| "-".to_owned()),
                address,
                root,
                number_or_dash(gpu.node),
            ]
        };
        let shown = self.topology.gpus.iter().map(|gpu| row(gpu.index.to_string(), gpu));
        let hidden = self.topology.hidden_gpus.iter().map(|gpu| row("hidden".to_owned(), gpu));
        let rows: Vec<_> = shown.chain(hidden).collect();
        if rows.is_empty() {
            "  none\n".to_owned()
        } else {
            table(["GPU", "model", "PCI", "root", "node"], rows.into_iter())
        }
    }

    fn nics(&self) -> String {
        let head = [
            "NIC",
            "state",
            "Gbit/s",
            "MTU",
            "addresses",
            "PCI",
            "root",
            "node",
            "driver",
            "queues",
            "header split",
        ];
        table(head, self.topology.nics.iter().map(nic_row))
    }

    fn devmem(&self) -> String {
        let asked = self.topology.nics.iter().filter_map(|nic| Some((nic, nic.devmem.as_ref()?)));
        let row = |(nic, found): (&Nic, &Possible)| {
            let words: Vec<&str> =
                found.unsupported_reason.iter().chain(&found.missing).map(String::as_str).collect();
            [nic.name.clone(), answer(found).to_owned(), or_dash(words.join("; "))]
        };
        table(["NIC", "supported", "reason, or missing setup"], asked.map(row))
    }

    fn planned(&self, plan: &Plan) -> String {
        let row = |(gpu, channels): (&GpuPlan, BTreeMap<String, usize>)| {
            let count = |nic: &String| channels.get(nic).copied().unwrap_or(0);
            let nics: Vec<String> = gpu.nics.iter().map(|nic| format!("{nic} ({})", count(nic))).collect();
            [gpu.gpu.to_string(), nics.join(", "), gpu.cpus.to_string(), gpu.why.clone()]
        };
        let mut text = if plan.gpus.is_empty() {
            format!("  no GPU: host memory uses {}\n", or_dash(plan.host_nics.join(", ")))
        } else {
            table(["GPU", "NICs (channels)", "CPUs", "reason"], self.per_gpu(plan).into_iter().map(row))
        };
        for unused in &plan.unused {
            let _ = writeln!(text, "  not used: {}: {}", unused.nic, unused.why);
        }
        text
    }
}

/// The devices below a PCIe root.
#[derive(Default)]
struct Root {
    nodes: BTreeSet<u32>,
    gpus: Vec<u32>,
    nics: Vec<String>,
}

fn at_root<'a>(roots: &'a mut BTreeMap<PciRoot, Root>, pci: Option<&PciPath>) -> Option<&'a mut Root> {
    Some(roots.entry(pci?.root?).or_default())
}

fn gpu_json(gpu: &Gpu) -> Value {
    let pci = gpu.pci.as_ref();
    json!({
        "gpu": gpu.index,
        "name": gpu.name,
        "pci": pci.map(|pci| pci.address.to_string()),
        "pci_root": pci.and_then(|pci| Some(pci.root?.to_string())),
        "node": gpu.node,
    })
}

fn nic_json(nic: &Nic) -> Value {
    let pci = nic.pci.as_ref();
    json!({
        "nic": nic.name,
        "up": nic.up,
        "addresses": nic.addresses.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "pci": pci.map(|pci| pci.address.to_string()),
        "pci_root": pci.and_then(|pci| Some(pci.root?.to_string())),
        "node": nic.node,
        "speed_mbps": nic.speed_mbps,
        "mtu_bytes": nic.mtu_bytes,
        "driver": nic.driver,
        "device": nic.device,
        "loopback": nic.loopback,
        "lower": nic.lower,
        "rx_queues": nic.rx_queues,
        "tx_queues": nic.tx_queues,
        "header_split": nic.header_split,
        "devmem": nic.devmem.as_ref().map(devmem_json),
    })
}

fn devmem_json(found: &Possible) -> Value {
    json!({
        "possible": (found.receives.is_some() || found.is_ruled_out()).then(|| found.is_possible()),
        "receives": found.receives,
        "sends": found.sends,
        "free_queues": found.free_queues,
        "missing": found.missing,
        "unsupported_reason": found.unsupported_reason,
    })
}

/// Whether a NIC supports devmem TCP, as text for the table.
fn answer(found: &Possible) -> &'static str {
    match (found.receives, found.is_possible(), found.missing.is_empty()) {
        (None, ..) if !found.is_ruled_out() => "unknown",
        (_, false, _) => "no",
        (_, true, true) => "yes",
        (_, true, false) => "with setup",
    }
}

fn nic_row(nic: &Nic) -> [String; 11] {
    let [address, root] = place(nic.pci.as_ref());
    let addresses: Vec<String> = nic.addresses.iter().map(ToString::to_string).collect();
    let split = nic.header_split.map(|on| if on { "on" } else { "off" }.to_owned());
    let on = if nic.lower.is_empty() { String::new() } else { format!("on {}", nic.lower.join(",")) };
    [
        nic.name.clone(),
        if nic.up { "up" } else { "down" }.to_owned(),
        nic.speed_mbps.map_or_else(|| "-".to_owned(), |mbps| (f64::from(mbps) / 1000.0).to_string()),
        nic.mtu_bytes.to_string(),
        or_dash(addresses.join(",")),
        if nic.pci.is_none() { or_dash(on) } else { address },
        root,
        number_or_dash(nic.node),
        nic.driver.clone().unwrap_or_else(|| "-".to_owned()),
        format!("{}/{}", nic.rx_queues, nic.tx_queues),
        split.unwrap_or_else(|| "-".to_owned()),
    ]
}

/// PCI address and PCIe root of a device, as text for the table.
fn place(pci: Option<&PciPath>) -> [String; 2] {
    let address = pci.map(|pci| pci.address.to_string());
    let root = pci.and_then(|pci| Some(pci.root?.to_string()));
    [address, root].map(|text| text.unwrap_or_else(|| "-".to_owned()))
}

fn number_or_dash(number: Option<u32>) -> String {
    number.map_or_else(|| "-".to_owned(), |number| number.to_string())
}

fn or_dash(text: String) -> String {
    if text.is_empty() { "-".to_owned() } else { text }
}

fn table<const N: usize>(head: [&str; N], rows: impl Iterator<Item = [String; N]>) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header(head);
    table.add_rows(rows);
    let lines = table.to_string();
    lines.lines().map(|line| format!(" {}\n", line.trim_end())).collect()
}
