//! PCI addresses, and the path from a PCI root to a device.
//!
//! Invariant: an address is compared as numbers. Drivers write it with letters in either case and with four or eight
//! digits of domain, so comparing text would take one device for two.
//! Read next: `locality.rs`, which compares paths.

use std::fmt;
use std::path::{Component, Path};
use std::str::FromStr;

/// The address of a PCI function, shown as sysfs names it: `0000:0a:00.0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    /// PCI domain (segment) of the function.
    pub domain: u32,
    /// Bus number within the domain.
    pub bus: u8,
    /// Device number on the bus.
    pub device: u8,
    /// Function number of the device.
    pub function: u8,
}

/// The root of a PCI tree: a host bridge or PCIe root complex, shown as `0000:01`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciRoot {
    /// PCI domain (segment) of the root.
    pub domain: u32,
    /// Number of the root's first bus.
    pub bus: u8,
}

/// The path from a PCI root to a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PciPath {
    /// The root of the path, if the kernel reports it.
    pub root: Option<PciRoot>,
    /// Bridges on the path (root port and switches), from the root on.
    pub bridges: Vec<PciAddress>,
    /// Address of the device at the end of the path.
    pub address: PciAddress,
}

impl FromStr for PciAddress {
    type Err = ();

    /// Parses a PCI address with or without domain, letters in either case.
    fn from_str(text: &str) -> Result<PciAddress, ()> {
        let (rest, function) = text.trim().rsplit_once('.').ok_or(())?;
        let (rest, device) = rest.rsplit_once(':').ok_or(())?;
        let (domain, bus) = rest.rsplit_once(':').unwrap_or(("0", rest));
        let address = PciAddress {
            domain: hex(domain, 8)?,
            bus: hex(bus, 2)? as u8,
            device: hex(device, 2)? as u8,
            function: hex(function, 1)? as u8,
        };
        if address.device < 32 && address.function < 8 { Ok(address) } else { Err(()) }
    }
}

fn hex(text: &str, digits_max: usize) -> Result<u32, ()> {
    let is_hex = !text.is_empty() && text.len() <= digits_max && text.bytes().all(|b| b.is_ascii_hexdigit());
    if is_hex { u32::from_str_radix(text, 16).map_err(drop) } else { Err(()) }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

impl fmt::Display for PciRoot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}", self.domain, self.bus)
    }
}

impl PciPath {
    /// The path that a device's folder in sysfs spells; `None` if no PCI device is on it.
    ///
    /// The part after the last PCI device is ignored: `0000:00:03.0/virtio2`.
    pub fn of_folder(folder: &Path) -> Option<PciPath> {
        let names = folder.components().filter_map(|component| match component {
            Component::Normal(name) => name.to_str(),
            _ => None,
        });
        let (mut root, mut on_way) = (None, Vec::new());
        for name in names {
            root = root.or_else(|| root_named(name));
            on_way.extend(name.parse::<PciAddress>());
        }
        let address = on_way.pop()?;
        Some(PciPath { root, bridges: on_way, address })
    }

    /// A path of which only the device at its end is known.
    pub fn unknown_way(address: PciAddress) -> PciPath {
        PciPath { root: None, bridges: Vec::new(), address }
    }

    /// The bridges that two paths share, from the root on; `None` if the roots differ or one is unknown.
    pub fn shared_bridges(&self, other: &PciPath) -> Option<&[PciAddress]> {
        if self.root.is_none() || self.root != other.root {
            return None;
        }
        let shared = self.bridges.iter().zip(&other.bridges).take_while(|(one, other)| one == other).count();
        Some(&self.bridges[..shared])
    }
}

fn root_named(name: &str) -> Option<PciRoot> {
    let (domain, bus) = name.strip_prefix("pci")?.split_once(':')?;
    Some(PciRoot { domain: hex(domain, 8).ok()?, bus: hex(bus, 2).ok()? as u8 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_address_in_many_spellings() {
        let address = PciAddress { domain: 0, bus: 0x0a, device: 0, function: 0 };
        for text in ["0000:0a:00.0", "0000:0A:00.0", "00000000:0A:00.0", "0a:00.0", " 0000:0a:00.0\n"] {
            assert_eq!(text.parse(), Ok(address), "{text:?}");
        }
        assert_eq!(address.to_string(), "0000:0a:00.0");
        assert_eq!(
            "10000:e1:1f.7".parse::<PciAddress>().map(|a| a.to_string()),
            Ok("10000:e1:1f.7".to_owned())
        );
    }

    #[test]
    fn a_malformed_pci_address_is_refused() {
        for text in [
            "",
            "virtio2",
            "0000:0a:00",
            "0000:0a:20.0",
            "0000:0a:00.8",
            "0000:+a:00.0",
            "0000:00a:00.0",
            "a.0",
        ] {
            assert_eq!(text.parse::<PciAddress>(), Err(()), "{text:?}");
        }
    }

    #[test]
    fn a_way_is_read_from_a_folder() {
        let path = |text| PciPath::of_folder(Path::new(text)).expect("a way");
        let gpu = path("/sys/devices/pci0000:01/0000:01:00.0/0000:02:00.0/0000:03:00.0/0000:04:00.0");
        assert_eq!(gpu.root, Some(PciRoot { domain: 0, bus: 1 }));
        assert_eq!((gpu.bridges.len(), gpu.address.bus), (3, 4));
        let nic =
            path("/sys/devices/pci0000:01/0000:01:00.0/0000:02:00.0/0000:03:02.0/0000:06:00.0/net/eth1");
        assert_eq!(gpu.shared_bridges(&nic).map(<[_]>::len), Some(2));
        let virtio = path("/sys/devices/pci0000:00/0000:00:03.0/virtio2");
        assert_eq!((virtio.address.to_string().as_str(), virtio.bridges.len()), ("0000:00:03.0", 0));
        assert_eq!(gpu.shared_bridges(&virtio), None);
        assert_eq!(PciPath::of_folder(Path::new("/sys/devices/virtual/net/lo")), None);
    }

    #[test]
    fn two_unknown_ways_share_nothing() {
        let nowhere = PciPath::unknown_way("0000:04:00.0".parse().expect("an address"));
        assert_eq!(nowhere.shared_bridges(&nowhere), None);
    }
}
