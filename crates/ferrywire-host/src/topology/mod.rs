//! The host's hardware as far as it matters for moving bytes (NICs, GPUs, NUMA nodes, cores), and the plan: which GPU
//! uses which NICs.
//!
//! ```text
//!   sysfs ───────────────────────┐
//!   addresses, ethtool, driver ──┴─ Source ──> Topology ── PlanOptions ──> Plan ── the other host's Plan ──> Routes
//! ```
//!
//! A [`Topology`] is read from the kernel and the CUDA driver through a [`Source`], which may be a recorded tree of
//! files instead of this host. A [`Plan`] is a pure function of a topology and [`PlanOptions`]; [`routes`] is a pure
//! function of two plans.
//! Invariant: NICs are identified by name and GPUs by PCI address, compared as numbers. The order of a list decides
//! nothing.
//! Read next: `plan.rs`, then `source.rs`.

mod assign;
mod cpus;
mod gpus;
mod locality;
mod map;
mod mesh;
mod nics;
mod pci;
mod plan;
mod pool;
mod source;

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use ferrywire_devmem::Possible;
use ferrywire_devmem::nic::possible;

pub use cpus::Cpus;
pub use locality::Locality;
pub use map::Map;
pub use mesh::{Route, by_subnet, routes};
pub use pci::{PciAddress, PciPath, PciRoot};
pub use plan::{GpuPlan, Plan, PlanError, PlanOptions, Unused};
pub use source::{DriverGpu, Facts, Source, driver_gpus};

/// The hardware of a host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Topology {
    /// NICs of the host by name, loopback included.
    pub nics: Vec<Nic>,
    /// GPUs that this process may use, by index.
    pub gpus: Vec<Gpu>,
    /// Further GPUs of the host, which the driver hides from this process (`CUDA_VISIBLE_DEVICES`, a container).
    pub hidden_gpus: Vec<Gpu>,
    /// NUMA nodes by number; a host without NUMA has one.
    pub nodes: Vec<Node>,
    /// Physical cores in order, each with the CPUs that this process may use.
    pub cores: Vec<Cpus>,
    /// Messages about hardware that could not be read.
    pub notes: Vec<String>,
}

/// A network interface of a topology.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Nic {
    /// The NIC's name, such as `eth1`.
    pub name: String,
    /// The PCI path of the NIC's device, if it has one.
    pub pci: Option<PciPath>,
    /// The NUMA node that the NIC is attached to, if the kernel knows it.
    pub node: Option<u32>,
    /// Whether a device is behind the NIC. Bonds, VLANs, bridges, tunnels and veth have none.
    pub device: bool,
    /// Whether the NIC is the loopback interface.
    pub loopback: bool,
    /// NICs underneath this one: the members of a bond, the parent of a VLAN.
    pub lower: Vec<String>,
    /// Whether the NIC is switched on and has a link.
    pub up: bool,
    /// The NIC's addresses, without IPv6 link-local ones.
    pub addresses: Vec<Address>,
    /// Link speed in Mbit/s, if the driver reports one.
    pub speed_mbps: Option<u32>,
    /// Largest packet of the NIC (MTU), in bytes.
    pub mtu_bytes: u32,
    /// Name of the NIC's driver.
    pub driver: Option<String>,
    /// Number of the NIC's receive queues.
    pub rx_queues: u32,
    /// Number of the NIC's transmit queues.
    pub tx_queues: u32,
    /// Whether header split is on, if the driver reports it; devmem TCP needs it.
    pub header_split: Option<bool>,
    /// Whether the NIC supports devmem TCP; `None` before [`Topology::probe_devmem`].
    pub devmem: Option<Possible>,
}

/// An IP address of a NIC, with its subnet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    /// The IP address of the NIC.
    pub ip: IpAddr,
    /// Length of the subnet's prefix, in bits.
    pub prefix_len: u8,
}

/// A GPU of a topology.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Gpu {
    /// The CUDA driver's index for this process; without a driver, the position in the order of PCI addresses.
    pub index: u32,
    /// The GPU's model, if it is known.
    pub name: Option<String>,
    /// The GPU's PCI path; `None` for simulated GPUs.
    pub pci: Option<PciPath>,
    /// The NUMA node that the GPU is attached to, if the kernel knows it.
    pub node: Option<u32>,
    /// Whether this process may not open the GPU's device file, as in a container that was given other GPUs.
    pub out_of_reach: bool,
}

/// A NUMA node of a topology.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    /// The kernel's number of the node.
    pub number: u32,
    /// The CPUs of the node.
    pub cpus: Cpus,
}

impl Topology {
    /// Reads a topology. Facts that the kernel or driver does not report are left out, so reading always succeeds.
    pub fn read(source: &Source) -> Topology {
        let mut topology = Topology {
            nics: nics::read(source),
            nodes: cpus::nodes(source),
            cores: cpus::cores(source),
            notes: source.facts.notes.clone(),
            ..Topology::default()
        };
        (topology.gpus, topology.hidden_gpus) = gpus::read(source);
        topology
    }

    /// Reads the topology of this host as it is now. Loads the CUDA driver if there is one.
    pub fn detect() -> Topology {
        Topology::read(&Source::detect())
    }

    /// Asks the kernel which NICs of this host support devmem TCP, and changes nothing. NICs without a device are left
    /// out. Not for a recorded topology, because the answers are about this host.
    pub fn probe_devmem(&mut self) {
        for nic in self.nics.iter_mut().filter(|nic| nic.device) {
            nic.devmem = Some(possible(&nic.name));
        }
    }

    /// The NIC with this name; `None` if the topology has none.
    pub fn nic(&self, name: &str) -> Option<&Nic> {
        self.nics.iter().find(|nic| nic.name == name)
    }

    /// The NUMA node of a host that has only one, where no device is far from another, whatever the devices report.
    fn only_node(&self) -> Option<u32> {
        match &self.nodes[..] {
            [only] => Some(only.number),
            _ => None,
        }
    }
}

impl Nic {
    /// Whether `other` is in the subnet of this address.
    pub fn reaches(&self, other: IpAddr) -> bool {
        self.addresses.iter().any(|address| address.reaches(other))
    }
}

impl Address {
    fn reaches(self, other: IpAddr) -> bool {
        let (ip, other, bits) = match (self.ip, other) {
            (IpAddr::V4(ip), IpAddr::V4(other)) => (ip.to_bits().into(), other.to_bits().into(), 32),
            (IpAddr::V6(ip), IpAddr::V6(other)) => (ip.to_bits(), other.to_bits(), 128),
            _ => return false,
        };
        let differ: u128 = ip ^ other;
        // An empty prefix shifts by the full width, for which `checked_shr` returns `None`.
        differ.checked_shr(bits - u32::from(self.prefix_len).min(bits)).unwrap_or(0) == 0
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.ip, self.prefix_len)
    }
}

impl FromStr for Address {
    type Err = ();

    fn from_str(text: &str) -> Result<Address, ()> {
        let (ip, prefix_len) = text.split_once('/').ok_or(())?;
        let ip: IpAddr = ip.parse().map_err(drop)?;
        let prefix_len = prefix_len.parse().map_err(drop)?;
        let longest = if ip.is_ipv4() { 32 } else { 128 };
        if prefix_len > longest { Err(()) } else { Ok(Address { ip, prefix_len }) }
    }
}
