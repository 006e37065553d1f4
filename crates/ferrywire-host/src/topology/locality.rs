//! How near a NIC is to a GPU.
//!
//! Invariant: a distance that the kernel does not report is [`Locality::Unknown`], neither near nor far. On a host
//! with one NUMA node nothing is far.
//! Read next: `plan.rs`.

use std::cmp::Reverse;
use std::fmt;

use super::{Gpu, Nic, PciAddress, PciPath, Topology};

/// Most levels of NICs on top of other NICs that are followed (a VLAN of a bond has two).
const LOWER_DEPTH_MAX: usize = 8;

/// How near a NIC is to a GPU, nearest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Locality {
    /// The NIC and the GPU are behind the same PCIe bridge: bytes between them need not pass the CPU's root complex.
    Switch,
    /// The NIC and the GPU are below the same PCIe root.
    Root,
    /// The NIC and the GPU are on the same NUMA node.
    Node,
    /// The kernel reports too little to compare the locations of NIC and GPU.
    Unknown,
    /// The NIC and the GPU are on different NUMA nodes.
    Across,
}

impl fmt::Display for Locality {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Locality::Switch => "switch",
            Locality::Root => "root",
            Locality::Node => "node",
            Locality::Unknown => "unknown",
            Locality::Across => "across",
        })
    }
}

/// Locality of a NIC, and the number of shared bridges, by which NICs of the same locality are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Near {
    pub locality: Locality,
    /// The number of bridges that both the NIC's and the GPU's path pass.
    bridges: usize,
    pub bridge: Option<PciAddress>,
}

impl Near {
    fn only(locality: Locality) -> Near {
        Near { locality, bridges: 0, bridge: None }
    }

    /// The key by which NICs are sorted; smaller is nearer.
    pub fn rank(&self) -> (Locality, Reverse<usize>) {
        (self.locality, Reverse(self.bridges))
    }

    /// The distance of a NIC to a GPU: that of the nearest device under the NIC.
    pub fn between(topology: &Topology, gpu: &Gpu, nic: &Nic) -> Near {
        let mut devices = Vec::new();
        devices_of(topology, nic, LOWER_DEPTH_MAX, &mut devices);
        let near = devices.into_iter().map(|device| to_device(topology, gpu, device));
        near.min_by_key(Near::rank).unwrap_or_else(|| to_node(topology, gpu.node, nic.node))
    }
}

/// NICs with a PCI device or NUMA node of their own under this NIC, itself included.
pub(super) fn devices_of<'a>(topology: &'a Topology, nic: &'a Nic, depth: usize, into: &mut Vec<&'a Nic>) {
    if nic.pci.is_some() {
        into.push(nic);
    }
    if depth > 0 {
        for lower in nic.lower.iter().filter_map(|name| topology.nic(name)) {
            devices_of(topology, lower, depth - 1, into);
        }
    }
}

/// The PCI devices under a NIC.
pub(super) fn paths_of<'a>(topology: &'a Topology, nic: &'a Nic) -> Vec<&'a PciPath> {
    let mut devices = Vec::new();
    devices_of(topology, nic, LOWER_DEPTH_MAX, &mut devices);
    devices.into_iter().filter_map(|device| device.pci.as_ref()).collect()
}

fn to_device(topology: &Topology, gpu: &Gpu, nic: &Nic) -> Near {
    let shared = gpu.pci.as_ref().zip(nic.pci.as_ref()).and_then(|(gpu, nic)| gpu.shared_bridges(nic));
    match shared {
        Some([]) => Near::only(Locality::Root),
        Some(bridges) => {
            Near { locality: Locality::Switch, bridges: bridges.len(), bridge: bridges.last().copied() }
        }
        None => to_node(topology, gpu.node, nic.node),
    }
}

fn to_node(topology: &Topology, gpu: Option<u32>, nic: Option<u32>) -> Near {
    let only = topology.only_node();
    Near::only(match (gpu.or(only), nic.or(only)) {
        (Some(gpu), Some(nic)) if gpu == nic => Locality::Node,
        (Some(_), Some(_)) => Locality::Across,
        _ => Locality::Unknown,
    })
}
