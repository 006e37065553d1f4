//! Reads NICs from `/sys/class/net` and the devices behind it.
//!
//! Read next: `plan.rs`.

use super::source::Source;
use super::{Nic, PciPath};

/// `IFF_UP` of the kernel's interface flags.
const SWITCHED_ON: u32 = 0x1;
const LOOPBACK: u32 = 0x8;

pub(super) fn read(source: &Source) -> Vec<Nic> {
    // The folder also contains files such as `bonding_masters`, which have no `flags`.
    let is_nic = |name: &String| source.text(&format!("sys/class/net/{name}/flags")).is_some();
    let mut nics: Vec<Nic> =
        source.names("sys/class/net").into_iter().filter(is_nic).map(|name| nic(source, name)).collect();
    nics.sort_by(|one, other| by_name(&one.name, &other.name));
    nics
}

/// Orders names with a trailing number by the number: `eth2` before `eth10`.
pub(super) fn by_name(one: &str, other: &str) -> std::cmp::Ordering {
    let key = |name: &str| {
        let stem = name.trim_end_matches(|c: char| c.is_ascii_digit()).to_owned();
        let number: Option<u64> = name[stem.len()..].parse().ok();
        (stem, number, name.to_owned())
    };
    key(one).cmp(&key(other))
}

fn nic(source: &Source, name: String) -> Nic {
    let file = |file: &str| format!("sys/class/net/{name}/{file}");
    let flags = source.hex(&file("flags")).unwrap_or(0);
    let device = source.folder(&file("device"));
    let pci = device.as_deref().and_then(PciPath::of_folder);
    // A device on a bus above PCI, such as virtio, has the node of the PCI device below it.
    let node = pci.as_ref().and_then(|pci| node_of(source, pci));
    let driver = source.folder(&file("device/driver"));
    let queues = source.names(&file("queues"));
    let queues = |kind: &str| queues.iter().filter(|name| name.starts_with(kind)).count() as u32;
    let facts = &source.facts;
    let addresses = facts.addresses.iter().filter(|(of, _)| *of == name).map(|(_, address)| *address);
    let split = facts.header_split.iter().find(|(of, _)| *of == name).map(|(_, split)| *split);
    Nic {
        device: device.is_some(),
        loopback: flags & LOOPBACK != 0,
        lower: lower(source, &name),
        up: flags & SWITCHED_ON != 0 && has_link(source.text(&file("operstate"))),
        addresses: addresses.collect(),
        speed_mbps: source.parsed(&file("speed")).filter(|speed| *speed > 0 && *speed < u32::MAX),
        mtu_bytes: source.parsed(&file("mtu")).unwrap_or(0),
        driver: driver.and_then(|folder| Some(folder.file_name()?.to_str()?.to_owned())),
        rx_queues: queues("rx-"),
        tx_queues: queues("tx-"),
        header_split: split,
        devmem: None,
        pci,
        node,
        name,
    }
}

/// Whether a NIC has a link. Devices without the notion of a link report `unknown` and work.
fn has_link(state: Option<String>) -> bool {
    matches!(state.as_deref(), Some("up" | "unknown"))
}

fn lower(source: &Source, name: &str) -> Vec<String> {
    let names = source.names(&format!("sys/class/net/{name}")).into_iter();
    names.filter_map(|name| Some(name.strip_prefix("lower_")?.to_owned())).collect()
}

/// The NUMA node of a PCI device; `None` if the kernel reports -1, which means no node.
pub(super) fn node_of(source: &Source, pci: &PciPath) -> Option<u32> {
    source.parsed(&format!("sys/bus/pci/devices/{}/numa_node", pci.address))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_ordered_by_their_numbers() {
        let mut names = ["eth10", "lo", "eth2", "ens1f1", "eth", "eth02", "ens1f0"];
        names.sort_by(|one, other| by_name(one, other));
        assert_eq!(names, ["ens1f0", "ens1f1", "eth", "eth02", "eth2", "eth10", "lo"]);
    }
}
