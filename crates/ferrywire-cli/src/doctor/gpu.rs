//! Checks of GPUs, their driver, and their distance to NICs.
//!
//! Invariant: [`judge`] reads nothing. Read next: `finding.rs`.

use std::collections::BTreeMap;

use ferrywire_host::topology::{Gpu, Locality, PciAddress, PciPath, Plan, PlanError, PlanOptions, Topology};

use super::driver::Driver;
use super::files::{line, number};
use super::finding::{Finding, Level};
use crate::memory::is_mps_running;

const SUBJECT: &str = "CUDA";

/// Facts about GPUs that the topology does not have.
#[derive(Clone, Debug)]
pub struct Gpus {
    /// The answer of the driver.
    pub driver: Driver,
    /// Contents of `/proc/driver/nvidia/version`.
    pub module: Option<String>,
    /// Whether a server shares GPUs among processes (MPS).
    pub mps: bool,
    /// PCIe links by PCI address.
    pub links: BTreeMap<String, Link>,
    /// The report of `nvidia-smi` for each GPU.
    pub smi: Vec<SmiRow>,
}

/// Speed and width of a PCIe link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// The kernel's text, such as `32.0 GT/s PCIe`: present and maximal.
    pub speed: [String; 2],
    /// Number of lanes: present and maximal.
    pub width: [u32; 2],
}

/// `nvidia-smi`'s report on a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SmiRow {
    /// The GPU's index among all of the host, which is not the driver's where `CUDA_VISIBLE_DEVICES` is set.
    pub index: String,
    /// The GPU's PCI address.
    pub address: String,
    /// Persistence mode: `Enabled` or `Disabled`.
    pub persistence: String,
    /// A number, or text if the GPU does not count errors.
    pub uncorrected_errors: String,
}

impl Gpus {
    /// Reads the facts of this host, except the driver's answer.
    pub fn read(driver: Driver, topology: &Topology, nvidia_smi: &dyn Fn(&[&str]) -> Option<String>) -> Gpus {
        let devices = topology.gpus.iter().chain(&topology.hidden_gpus).filter_map(|gpu| gpu.pci.as_ref());
        let devices = devices.chain(topology.nics.iter().filter_map(|nic| nic.pci.as_ref()));
        let query = ["--query-gpu=index,pci.bus_id,persistence_mode,ecc.errors.uncorrected.volatile.total"];
        let works = matches!(driver, Driver::Works(..));
        let asked = works.then(|| nvidia_smi(&[query[0], "--format=csv,noheader"])).flatten();
        Gpus {
            driver,
            module: line("/proc/driver/nvidia/version")
                .and_then(|text| Some(text.lines().next()?.to_owned())),
            mps: is_mps_running(),
            links: devices.filter_map(|pci| Some((pci.address.to_string(), link(pci)?))).collect(),
            smi: asked.map(|text| parse_smi(&text)).unwrap_or_default(),
        }
    }
}

fn link(pci: &PciPath) -> Option<Link> {
    let folder = format!("/sys/bus/pci/devices/{}", pci.address);
    let speed = |name| line(format!("{folder}/{name}_link_speed"));
    let width = |name| number(format!("{folder}/{name}_link_width"));
    Some(Link { speed: [speed("current")?, speed("max")?], width: [width("current")?, width("max")?] })
}

fn parse_smi(text: &str) -> Vec<SmiRow> {
    let row = |line: &str| {
        let mut parts = line.split(", ").map(|part| part.trim().to_owned());
        Some(SmiRow {
            index: parts.next()?,
            address: parts.next()?,
            persistence: parts.next()?,
            uncorrected_errors: parts.next()?,
        })
    };
    text.lines().filter_map(row).collect()
}

/// The findings about GPUs.
pub fn judge(gpus: &Gpus, topology: &Topology, options: &PlanOptions) -> Vec<Finding> {
    let mut found = vec![driver(gpus, topology)];
    if gpus.mps {
        let mps = Finding::ok(
            "mps",
            SUBJECT,
            "an MPS server shares the GPUs (CUDA_MPS_PIPE_DIRECTORY, or /tmp/nvidia-mps)",
        );
        found.push(
            mps.at(Level::Note)
                .fix("nothing to do; note that an error of one client may end the contexts of all"),
        );
    }
    if !topology.hidden_gpus.is_empty() {
        let evidence =
            format!("{} GPUs of the host are hidden from this process", topology.hidden_gpus.len());
        found.push(
            Finding::ok("hidden-gpus", "GPUs", evidence).at(Level::Note).fix("check CUDA_VISIBLE_DEVICES"),
        );
    }
    gpus.smi.iter().for_each(|smi| found.extend(health(smi, topology)));
    found.extend(links(gpus, topology));
    found.extend(locality(topology, options));
    found.extend(reach(topology));
    found
}

fn driver(gpus: &Gpus, topology: &Topology) -> Finding {
    let on_bus = topology.gpus.len() + topology.hidden_gpus.len();
    let found = |evidence: String| Finding::ok("cuda-driver", SUBJECT, evidence);
    match &gpus.driver {
        Driver::Works(version, shown) => {
            let module = gpus.module.as_deref().map_or_else(String::new, |module| format!("; {module}"));
            let version = format!("{}.{}", version / 1000, version % 1000 / 10);
            found(format!("driver for CUDA {version}, {} GPUs{module}", shown.len()))
        }
        Driver::Missing if on_bus == 0 => {
            found("no GPU and no driver: ferrywire uses host memory".to_owned()).at(Level::Note)
        }
        Driver::Missing => found(format!("{on_bus} GPUs on the PCI bus, but libcuda.so.1 is missing"))
            .warn("install the NVIDIA driver, or start the container with --gpus all"),
        Driver::NoGpu if on_bus == 0 => {
            found("a driver is loaded, but no GPU was found".to_owned()).at(Level::Note)
        }
        Driver::NoGpu => found(format!("{on_bus} GPUs on the PCI bus, but the driver shows none"))
            .warn("check CUDA_VISIBLE_DEVICES, and dmesg for lines with NVRM"),
        Driver::Old(error) => found(error.clone()).fail("install a newer NVIDIA driver"),
        Driver::Broken(error) => {
            found(error.clone()).fail("run nvidia-smi for details; use --memory host until the driver works")
        }
        Driver::Hangs(limit) => {
            let limit_s = limit.as_secs_f64();
            found(format!("the CUDA driver hangs: cuInit and its queries took longer than {limit_s} s")).fail(
                "check dmesg for lines with NVRM or Xid, then reset the GPUs or the host; until then use --memory host",
            )
        }
    }
}

/// A GPU of `nvidia-smi` by the number that it has for this process.
fn name(smi: &SmiRow, topology: &Topology) -> String {
    let address = smi.address.parse::<PciAddress>().ok();
    let is_it = |gpu: &&Gpu| gpu.pci.as_ref().map(|pci| pci.address) == address;
    match (address, topology.gpus.iter().find(is_it)) {
        (None, _) => format!("GPU {}", smi.index),
        (Some(_), Some(gpu)) => format!("GPU {}", gpu.index),
        (Some(address), None) => format!("GPU at {address}, hidden from this process"),
    }
}

fn health(smi: &SmiRow, topology: &Topology) -> [Finding; 2] {
    let subject = name(smi, topology);
    let mode =
        Finding::ok("persistence", &subject, format!("nvidia-smi: persistence mode {}", smi.persistence));
    let mode = if smi.persistence == "Disabled" {
        mode.at(Level::Note).fix(
            "nvidia-smi -pm 1, or run nvidia-persistenced: without it the first use of the GPU takes seconds",
        )
    } else {
        mode
    };
    let errors = format!("nvidia-smi: uncorrected memory errors: {}", smi.uncorrected_errors);
    let errors = Finding::ok("ecc", subject, errors);
    let errors = match smi.uncorrected_errors.parse::<u64>() {
        Ok(1..) => errors.warn("drain and reset this GPU; if the errors come back, replace it"),
        _ => errors,
    };
    [mode, errors]
}

fn links(gpus: &Gpus, topology: &Topology) -> Vec<Finding> {
    let shown = topology.gpus.iter().map(|gpu| (format!("GPU {}", gpu.index), gpu.pci.as_ref(), true));
    let nics =
        topology.nics.iter().filter(|nic| nic.up).map(|nic| (nic.name.clone(), nic.pci.as_ref(), false));
    let found = shown.chain(nics).filter_map(|(subject, pci, is_gpu)| {
        let link = gpus.links.get(&pci?.address.to_string())?;
        Some(of_link(subject, link, is_gpu))
    });
    found.collect()
}

fn of_link(subject: String, link: &Link, is_gpu: bool) -> Finding {
    let Link { speed: [speed, speed_max], width: [width, width_max] } = link;
    let evidence = format!("current_link_speed {speed} of {speed_max}, width {width} of {width_max}");
    let found = Finding::ok("pcie-link", subject, evidence);
    let slow = speed != speed_max && !speed.starts_with("Unknown");
    match (*width > 0 && width < width_max, slow) {
        (true, _) => found.warn(
            "move the card to another slot, or reseat it: the card has fewer PCIe lanes than it supports",
        ),
        // An idle GPU reduces its link speed.
        (false, true) if is_gpu => {
            found.at(Level::Note).fix("check again under load: an idle GPU lowers its speed")
        }
        (false, true) => found.warn("move the card to another slot, or check the slot's firmware settings"),
        _ => found,
    }
}

fn locality(topology: &Topology, options: &PlanOptions) -> Vec<Finding> {
    let plan = match Plan::of(topology, options) {
        Ok(plan) => plan,
        Err(error) if topology.gpus.is_empty() => return without_gpu(&error),
        Err(error) => {
            let found = Finding::ok("gpu-nics", "GPUs", error.to_string());
            return vec![found.warn(
                "run ferrywire topo to list GPUs and NICs; then use --gpu-nics or --allow-cross-numa",
            )];
        }
    };
    let of_gpu = |gpu: &ferrywire_host::topology::GpuPlan| {
        let found = Finding::ok(
            "gpu-nics",
            format!("GPU {}", gpu.gpu),
            format!("uses {}: {}", gpu.nics.join(", "), gpu.why),
        );
        match gpu.locality {
            Locality::Across => {
                found.warn("put a NIC on the GPU's NUMA node: without one, bytes cross CPU sockets")
            }
            Locality::Node => found
                .at(Level::Note)
                .fix("put a NIC on the GPU's PCIe root to avoid the path through the CPU"),
            _ => found,
        }
    };
    plan.gpus.iter().map(of_gpu).collect()
}

/// The findings about an impossible plan without GPUs. Only a wrong option is one: other findings cover the NICs.
fn without_gpu(error: &PlanError) -> Vec<Finding> {
    if error.is_usage() {
        vec![
            Finding::ok("gpu-nics", "NICs", error.to_string())
                .warn("run ferrywire topo to list GPUs and NICs"),
        ]
    } else {
        Vec::new()
    }
}

/// NICs that could access GPU memory directly; for information only.
fn reach(topology: &Topology) -> Vec<Finding> {
    if topology.gpus.is_empty() {
        return Vec::new();
    }
    let asked = topology.nics.iter().filter_map(|nic| Some((nic, nic.devmem.as_ref()?)));
    let found = asked.map(|(nic, possible)| {
        let words: Vec<&str> =
            possible.unsupported_reason.iter().chain(&possible.missing).map(String::as_str).collect();
        let found = |evidence: String| Finding::ok("devmem", &nic.name, evidence);
        match (possible.receives, possible.is_possible(), words.is_empty()) {
            (None, ..) if !possible.is_ruled_out() => found(format!("devmem TCP: unknown: {}", words.join("; ")))
                .at(Level::Note)
                .fix("run doctor as root or with CAP_NET_ADMIN, outside of containers; on Linux 6.12 to 6.14 try --transport devmem"),
            (_, true, true) => found("devmem TCP: possible".to_owned()),
            (_, true, false) => found(format!("devmem TCP: possible with setup: {}", words.join("; ")))
                .at(Level::Note)
                .fix("--transport devmem --allow-nic-setup"),
            (_, false, _) => found(format!("devmem TCP: no: {}", words.join("; ")))
                .at(Level::Note)
                .fix("see docs/devmem.md"),
        }
    });
    found.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::{levels, nic};
    use ferrywire_devmem::nic::Possible;
    use ferrywire_host::topology::{Gpu, Nic};

    fn pci(text: &str) -> Option<PciPath> {
        PciPath::of_folder(std::path::Path::new(text))
    }

    fn host() -> Topology {
        let nic = Nic {
            pci: pci("/sys/devices/pci0000:00/0000:00:02.0/0000:02:00.0"),
            node: Some(0),
            ..nic("eth1")
        };
        let gpu = Gpu {
            out_of_reach: false,
            index: 0,
            name: None,
            pci: pci("/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0"),
            node: Some(0),
        };
        let (hidden_gpus, nodes, cores, notes) = Default::default();
        Topology { nics: vec![nic], gpus: vec![gpu], hidden_gpus, nodes, cores, notes }
    }

    fn good() -> Gpus {
        let link =
            Link { speed: ["32.0 GT/s PCIe".to_owned(), "32.0 GT/s PCIe".to_owned()], width: [16, 16] };
        Gpus {
            driver: Driver::Works(12040, Vec::new()),
            module: None,
            mps: false,
            links: [("0000:01:00.0", link.clone()), ("0000:02:00.0", link)]
                .map(|(name, link)| (name.to_owned(), link))
                .into(),
            smi: parse_smi("0, 00000000:01:00.0, Enabled, 0\n"),
        }
    }

    fn of(gpus: &Gpus, topology: &Topology, id: &str) -> Vec<Level> {
        levels(&judge(gpus, topology, &PlanOptions::default()), id)
    }

    #[test]
    fn a_gpu_beside_its_nic_has_nothing_to_fix() {
        let found = judge(&good(), &host(), &PlanOptions::default());
        assert!(found.iter().all(|finding| finding.level == Level::Ok), "{found:?}");
        assert_eq!(levels(&found, "pcie-link").len(), 2);
    }

    #[test]
    fn a_driver_that_is_missing_matters_where_there_are_gpus() {
        let none = Topology { gpus: Vec::new(), ..host() };
        let with = |driver: Driver| Gpus { driver, ..good() };
        assert_eq!(of(&with(Driver::Missing), &none, "cuda-driver"), [Level::Note]);
        assert_eq!(of(&with(Driver::Missing), &host(), "cuda-driver"), [Level::Warn]);
        assert_eq!(of(&with(Driver::NoGpu), &none, "cuda-driver"), [Level::Note]);
        assert_eq!(of(&with(Driver::NoGpu), &host(), "cuda-driver"), [Level::Warn]);
        for broken in [
            Driver::Old("old".to_owned()),
            Driver::Broken("broken".to_owned()),
            Driver::Hangs(std::time::Duration::from_secs(10)),
        ] {
            assert_eq!(of(&with(broken), &host(), "cuda-driver"), [Level::Fail]);
        }
    }

    #[test]
    fn missing_lanes_are_reported_and_idle_gpus_excused() {
        let link = |device: &str, speed: &str, width| {
            let mut gpus = good();
            let link = gpus.links.get_mut(device).expect("it has one");
            (link.speed[0], link.width[0]) = (speed.to_owned(), width);
            of(&gpus, &host(), "pcie-link")
        };
        assert_eq!(link("0000:01:00.0", "2.5 GT/s PCIe", 16), [Level::Note, Level::Ok]);
        assert_eq!(link("0000:01:00.0", "32.0 GT/s PCIe", 8), [Level::Warn, Level::Ok]);
        assert_eq!(link("0000:02:00.0", "16.0 GT/s PCIe", 16), [Level::Ok, Level::Warn]);
        // A virtual machine shows these values.
        assert_eq!(link("0000:02:00.0", "Unknown", 0), [Level::Ok, Level::Ok]);
    }

    #[test]
    fn distance_between_gpu_and_nic_is_reported() {
        let mut other_root = host();
        other_root.nics[0].pci = pci("/sys/devices/pci0000:80/0000:80:02.0/0000:82:00.0");
        assert_eq!(of(&good(), &other_root, "gpu-nics"), [Level::Note]);
        other_root.nics[0].node = Some(1);
        let crossing = PlanOptions { allow_cross_numa: true, ..PlanOptions::default() };
        assert_eq!(levels(&judge(&good(), &other_root, &crossing), "gpu-nics"), [Level::Warn]);
        let alone = Topology { nics: Vec::new(), ..host() };
        assert_eq!(of(&good(), &alone, "gpu-nics"), [Level::Warn]);
    }

    /// Regression: a process that may not ask the kernel reported that the NIC does not support devmem TCP.
    #[test]
    fn what_the_kernel_was_not_asked_is_unknown() {
        let with = |receives, reason: &str| {
            let unsupported_reason = vec![reason.to_owned()];
            let mut host = host();
            host.nics[0].devmem = Some(Possible { receives, unsupported_reason, ..Possible::default() });
            let found = judge(&good(), &host, &PlanOptions::default());
            let found = found.into_iter().find(|finding| finding.id == "devmem").expect("it is there");
            (found.level, found.evidence, found.fix.unwrap_or_default())
        };
        let (level, evidence, fix) = with(None, "not permitted");
        assert_eq!((level, evidence.as_str()), (Level::Note, "devmem TCP: unknown: not permitted"));
        assert!(fix.contains("CAP_NET_ADMIN"), "{fix}");
        let (level, evidence, _) = with(Some(false), "the driver cannot");
        assert_eq!((level, evidence.as_str()), (Level::Note, "devmem TCP: no: the driver cannot"));
    }

    /// Regression: with `CUDA_VISIBLE_DEVICES=3` the errors of GPU 3 were those of another one in all other findings.
    #[test]
    fn a_gpu_has_one_number_in_all_findings() {
        let smi = parse_smi("2, 00000000:03:00.0, Enabled, 7\n3, 00000000:01:00.0, Enabled, 0\n");
        let found = judge(&Gpus { smi, ..good() }, &host(), &PlanOptions::default());
        let subject = |id: &str| -> Vec<_> {
            found.iter().filter(|finding| finding.id == id).map(|finding| finding.subject.as_str()).collect()
        };
        assert_eq!(subject("ecc"), ["GPU at 0000:03:00.0, hidden from this process", "GPU 0"]);
        assert!(subject("pcie-link").contains(&"GPU 0"));
    }

    #[test]
    fn the_output_of_nvidia_smi_counts() {
        let smi = |text: &str| Gpus { smi: parse_smi(text), ..good() };
        assert_eq!(of(&smi("0, 00000000:01:00.0, Disabled, [N/A]\n"), &host(), "persistence"), [Level::Note]);
        assert_eq!(of(&smi("0, 00000000:01:00.0, Disabled, [N/A]\n"), &host(), "ecc"), [Level::Ok]);
        assert_eq!(
            of(&smi("0, 00000000:01:00.0, Enabled, 3\n1, 00000000:02:00.0, Enabled, 0\n"), &host(), "ecc"),
            [Level::Warn, Level::Ok]
        );
        assert_eq!(of(&Gpus { mps: true, ..good() }, &host(), "mps"), [Level::Note]);
        let hidden = Topology { hidden_gpus: host().gpus, ..host() };
        assert_eq!(of(&good(), &hidden, "hidden-gpus"), [Level::Note]);
    }
}
