//! The GPUs of a host: those that the CUDA driver shows, and NVIDIA's devices on the PCI bus.
//!
//! Without a driver, GPUs are found on the bus alone. With a driver, the bus also shows the GPUs that it hides from
//! this process.
//! Read next: `plan.rs`.

use super::nics::node_of;
use super::source::Source;
use super::{Gpu, PciAddress, PciPath};

const NVIDIA: u32 = 0x10de;
/// PCI classes (without the programming interface) of display and 3D controllers.
const CLASSES: [u32; 2] = [0x0300, 0x0302];

/// PCI device ids of server GPUs, for hosts whose driver is not loaded.
const MODELS: [(u32, &str); 12] = [
    (0x1eb8, "Tesla T4"),
    (0x20b0, "A100-SXM4-40GB"),
    (0x20b2, "A100-SXM4-80GB"),
    (0x20b5, "A100 80GB PCIe"),
    (0x20f1, "A100-PCIE-40GB"),
    (0x2330, "H100 80GB HBM3"),
    (0x2331, "H100 PCIe"),
    (0x2335, "H200"),
    (0x233b, "H200 NVL"),
    (0x26b9, "L40S"),
    (0x27b8, "L4"),
    (0x2901, "B200"),
];

/// The GPUs that this process may use, and those that are hidden from it.
pub(super) fn read(source: &Source) -> (Vec<Gpu>, Vec<Gpu>) {
    let on_bus = on_bus(source);
    let numbered = |(index, path)| gpu(source, index as u32, path, None);
    let Some(driver) = &source.facts.gpus else {
        return (on_bus.into_iter().enumerate().map(numbered).collect(), Vec::new());
    };
    let mut shown = Vec::new();
    for found in driver {
        let path = path_of(source, found.address);
        shown.push(gpu(source, found.index, path, Some(found.name.clone())));
    }
    shown.sort_by_key(|gpu| gpu.index);
    let hidden = on_bus.into_iter().filter(|path| !driver.iter().any(|gpu| gpu.address == path.address));
    let hidden = hidden.enumerate().map(|(index, path)| {
        let out_of_reach = is_out_of_reach(source, path.address);
        Gpu { out_of_reach, ..numbered((index, path)) }
    });
    (shown, hidden.collect())
}

/// Whether this process may not open the device file of a GPU. A container has device files of its own GPUs only; a
/// batch system may forbid to open those of other jobs.
fn is_out_of_reach(source: &Source, address: PciAddress) -> bool {
    let folder = "proc/driver/nvidia/gpus";
    let Some(text) = source.text(&format!("{folder}/{address}/information")) else {
        return !source.names(folder).is_empty();
    };
    let minor = text.lines().find_map(|line| line.strip_prefix("Device Minor:"));
    minor.is_some_and(|minor| source.may_open(&format!("dev/nvidia{}", minor.trim())) == Some(false))
}

fn gpu(source: &Source, index: u32, path: PciPath, name: Option<String>) -> Gpu {
    let name = name.or_else(|| model_by_module(source, path.address)).or_else(|| model(source, path.address));
    Gpu { index, name, node: node_of(source, &path), pci: Some(path), out_of_reach: false }
}

fn on_bus(source: &Source) -> Vec<PciPath> {
    let addresses = source.names("sys/bus/pci/devices").into_iter().filter_map(|name| name.parse().ok());
    let mut paths: Vec<PciPath> = addresses
        .filter(|address| is_gpu(source, *address))
        .map(|address| path_of(source, address))
        .collect();
    paths.sort_by_key(|path| path.address);
    paths
}

fn is_gpu(source: &Source, address: PciAddress) -> bool {
    let number = |file: &str| source.hex(&format!("sys/bus/pci/devices/{address}/{file}"));
    number("vendor") == Some(NVIDIA) && number("class").is_some_and(|class| CLASSES.contains(&(class >> 8)))
}

fn path_of(source: &Source, address: PciAddress) -> PciPath {
    let folder = source.folder(&format!("sys/bus/pci/devices/{address}"));
    let path = folder.and_then(|folder| PciPath::of_folder(&folder));
    path.filter(|path| path.address == address).unwrap_or_else(|| PciPath::unknown_way(address))
}

/// The model of a GPU as the kernel part of the driver reports it, which also works without CUDA.
fn model_by_module(source: &Source, address: PciAddress) -> Option<String> {
    let text = source.text(&format!("proc/driver/nvidia/gpus/{address}/information"))?;
    let model = text.lines().find_map(|line| line.strip_prefix("Model:"))?;
    Some(model.trim().to_owned())
}

fn model(source: &Source, address: PciAddress) -> Option<String> {
    let number = source.hex(&format!("sys/bus/pci/devices/{address}/device"))?;
    let known = MODELS.iter().find(|(of, _)| *of == number);
    Some(known.map_or_else(|| format!("PCI device 10de:{number:04x}"), |(_, name)| format!("NVIDIA {name}")))
}
