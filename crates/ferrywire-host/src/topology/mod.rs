//! What this host is made of, as far as it matters for moving bytes: NICs, GPUs, NUMA nodes, cores; and which GPU
//! uses which NIC.
//!
//! ```text
//!   sysfs ───────────────────────┐
//!   addresses, ethtool, driver ──┴─ Source ──> Topology ── PlanOptions ──> Plan ── the other host's Plan ──> Routes
//! ```
//!
//! [`Topology`] is what the kernel and the CUDA driver tell, read through a [`Source`], which may be a recorded tree
//! of files in place of this host. [`Plan`] is a pure function of a topology and [`PlanOptions`], [`routes`] one of two
//! plans: neither looks at anything else.
//! Invariant: NICs are known by name and GPUs by PCI address, compared as numbers; the order of a list decides nothing.
//! Read next: `plan.rs`, then `source.rs` for where things are read.

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
pub use source::{DriverGpu, Facts, Source};

/// What a host is made of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Topology {
    /// NICs, loopback included, by name.
    pub nics: Vec<Nic>,
    /// GPUs that this process may use, by number.
    pub gpus: Vec<Gpu>,
    /// Further GPUs of the host, which the driver does not show to this process (`CUDA_VISIBLE_DEVICES`).
    pub hidden_gpus: Vec<Gpu>,
    /// NUMA nodes, by number; a host without NUMA has one.
    pub nodes: Vec<Node>,
    /// CPUs that this process may use: those of one core together, cores in order.
    pub cores: Vec<Cpus>,
    /// What was not found as expected, for people.
    pub notes: Vec<String>,
}

/// A network interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Nic {
    /// Its name: `eth1`.
    pub name: String,
    /// Where it is on the PCI bus, if it is there itself.
    pub pci: Option<PciPath>,
    /// The NUMA node it is attached to, where the kernel knows.
    pub node: Option<u32>,
    /// Whether a device is behind it. Bonds, VLANs, bridges, tunnels and veth have none of their own.
    pub device: bool,
    /// Whether it is the loopback interface.
    pub loopback: bool,
    /// NICs that it stands on: those of a bond, the one of a VLAN.
    pub lower: Vec<String>,
    /// Whether it is switched on and has a link.
    pub up: bool,
    /// Its addresses; IPv6 link-local ones are left out.
    pub addresses: Vec<Address>,
    /// Speed in Mbit/s where the driver tells one.
    pub speed_mbps: Option<u32>,
    /// Largest packet.
    pub mtu_bytes: u32,
    /// Name of its driver.
    pub driver: Option<String>,
    /// Receive queues.
    pub rx_queues: u32,
    /// Transmit queues.
    pub tx_queues: u32,
    /// Whether it splits headers from payload, where the driver tells: devmem TCP needs that.
    pub header_split: Option<bool>,
    /// Whether it can do devmem TCP, once that was asked ([`Topology::probe_devmem`]).
    pub devmem: Option<Possible>,
}

/// An address of a NIC with its subnet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    /// The address.
    pub ip: IpAddr,
    /// Length of the subnet's prefix.
    pub prefix_len: u8,
}

/// A GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Gpu {
    /// Its number for this process: the driver's; without a driver its place in the order of PCI addresses.
    pub index: u32,
    /// The model, where somebody tells it.
    pub name: Option<String>,
    /// Where it is on the PCI bus. Simulated GPUs are nowhere.
    pub pci: Option<PciPath>,
    /// The NUMA node it is attached to, where the kernel knows.
    pub node: Option<u32>,
}

/// A NUMA node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    /// Its number.
    pub number: u32,
    /// Its CPUs.
    pub cpus: Cpus,
}

impl Topology {
    /// Reads it. What a kernel or driver does not tell is left out, so this always succeeds.
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

    /// This host, as it is now. Loads the CUDA driver where there is one.
    pub fn detect() -> Topology {
        Topology::read(&Source::detect())
    }

    /// Asks which NICs of this host can do devmem TCP, and changes nothing. Those without a device of their own are
    /// left out. Not for a recorded topology: the answers would be about this host.
    pub fn probe_devmem(&mut self) {
        for nic in self.nics.iter_mut().filter(|nic| nic.device) {
            nic.devmem = Some(possible(&nic.name));
        }
    }

    /// A NIC by name.
    pub fn nic(&self, name: &str) -> Option<&Nic> {
        self.nics.iter().find(|nic| nic.name == name)
    }

    /// The one NUMA node of a host that has no more: nothing is far then, whatever devices say.
    fn only_node(&self) -> Option<u32> {
        match &self.nodes[..] {
            [only] => Some(only.number),
            _ => None,
        }
    }
}

impl Nic {
    /// Whether `other` lies in one of its subnets.
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
        // A shift by all 128 bits is what an empty prefix asks for.
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
