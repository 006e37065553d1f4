//! The NICs that the plugin offers, and their properties.
//!
//! Interfaces that are up and have an IPv4 address, selected by `NCCL_GPUDIRECTTCPX_SOCKET_IFNAME` and sorted by the
//! bytes of their names: eth10 comes before eth2, whatever the order in the list.
//! Invariant: names and paths given to the host live as long as the process.
//! Read next: `table.rs`.

use std::ffi::CString;
use std::fs;
use std::net::{IpAddr, Ipv4Addr};

use ferrywire_sys::nics;

use crate::settings::Settings;

/// Most devices that the plugin offers.
pub const DEVICES_MAX: usize = 16;
/// Assumed speed of a NIC that reports none, in Mbit/s.
const SPEED_DEFAULT_MBPS: i32 = 10_000;

/// One NIC that the plugin offers.
#[derive(Debug)]
pub struct Device {
    /// The interface's name.
    pub name: CString,
    /// The interface's address.
    pub address: Ipv4Addr,
    /// The interface's directory in sysfs, if it has one.
    pub pci_path: Option<CString>,
    /// Link speed in Mbit/s.
    pub speed_mbps: i32,
}

/// Finds the devices that the settings select; the error says why there are none.
pub fn find(settings: &Settings, made_up_paths: bool) -> Result<Vec<Device>, String> {
    let interfaces = if settings.ipv6_only { Vec::new() } else { interfaces()? };
    let names: Vec<&str> = interfaces.iter().map(|(name, _)| name.as_str()).collect();
    let chosen = choose(&names, settings.interfaces.as_deref());
    let mut devices = Vec::new();
    for (k, name) in chosen.into_iter().take(DEVICES_MAX).enumerate() {
        let address = interfaces.iter().find(|(other, _)| *other == name).map(|(_, address)| *address);
        devices.extend(address.map(|address| device(&name, address, k, made_up_paths)));
    }
    if devices.is_empty() {
        return Err(format!(
            "NET/GPUDirectTCPX : no interface found (NCCL_GPUDIRECTTCPX_SOCKET_IFNAME={:?})",
            settings.interfaces
        ));
    }
    Ok(devices)
}

/// The IPv4 address of an interface; `None` if it has no usable one.
pub fn address_of(name: &str) -> Option<Ipv4Addr> {
    let interfaces = interfaces().ok()?;
    interfaces.into_iter().find(|(other, _)| other == name).map(|(_, address)| address)
}

/// Whether an address belongs to this host (this network namespace): such traffic never crosses a NIC.
pub fn is_own(address: Ipv4Addr) -> bool {
    nics::addresses().is_ok_and(|all| nics::is_local(&all, IpAddr::V4(address)))
}

/// Interfaces that are up, each with its first IPv4 address.
fn interfaces() -> Result<Vec<(String, Ipv4Addr)>, String> {
    let mut found: Vec<(String, Ipv4Addr)> = Vec::new();
    for nic in nics::addresses().map_err(|e| format!("interfaces cannot be listed: {e}"))? {
        if let IpAddr::V4(address) = nic.address
            && nic.up
            && !found.iter().any(|(name, _)| *name == nic.name)
        {
            found.push((nic.name, address));
        }
    }
    Ok(found)
}

/// The names that the list selects, sorted bytewise. Without a list: ib* if there are any, else all but
/// docker and lo, else docker, else lo.
fn choose(names: &[&str], list: Option<&str>) -> Vec<String> {
    let matching = |wanted: &dyn Fn(&str) -> bool| -> Vec<String> {
        let mut found: Vec<String> =
            names.iter().filter(|name| wanted(name)).map(|&n| n.to_owned()).collect();
        found.sort();
        found
    };
    if let Some(list) = list {
        return matching(&|name| matches_list(name, list));
    }
    let defaults: [&dyn Fn(&str) -> bool; 4] = [
        &|name| name.starts_with("ib"),
        &|name| !name.starts_with("docker") && !name.starts_with("lo"),
        &|name| name.starts_with("docker"),
        &|name| name.starts_with("lo"),
    ];
    defaults.into_iter().map(matching).find(|found| !found.is_empty()).unwrap_or_default()
}

/// Whether a list selects a name: prefixes, exact names after `=`, excluded names after `^`.
fn matches_list(name: &str, list: &str) -> bool {
    let (list, excluding) = list.strip_prefix('^').map_or((list, false), |rest| (rest, true));
    let (list, exact) = list.strip_prefix('=').map_or((list, false), |rest| (rest, true));
    let found = list
        .split(',')
        .map(|item| item.split(':').next().unwrap_or_default().trim())
        .filter(|item| !item.is_empty())
        .any(|item| if exact { name == item } else { name.starts_with(item) });
    found != excluding
}

fn device(name: &str, address: Ipv4Addr, index: usize, made_up_path: bool) -> Device {
    let path = fs::canonicalize(format!("/sys/class/net/{name}/device"))
        .ok()
        .map(|path| path.to_string_lossy().into_owned())
        .or_else(|| made_up_path.then(|| pci_path(index)));
    Device {
        name: CString::new(name).unwrap_or_default(),
        address,
        pci_path: path.and_then(|path| CString::new(path).ok()),
        speed_mbps: speed_mbps(name).unwrap_or(SPEED_DEFAULT_MBPS),
    }
}

/// A made-up path of the form that a PCI device has.
fn pci_path(index: usize) -> String {
    format!("/sys/devices/pci0000:00/0000:00:1d.0/0000:{:02x}:00.0", 0x80 + index)
}

fn speed_mbps(name: &str) -> Option<i32> {
    let text = fs::read_to_string(format!("/sys/class/net/{name}/speed")).ok()?;
    text.trim().parse().ok().filter(|speed| *speed > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: &[&str] = &["lo", "eth2", "docker0", "eth10", "eth1"];

    #[test]
    fn names_sort_by_their_bytes() {
        assert_eq!(choose(HOST, Some("eth2,eth1")), ["eth1", "eth10", "eth2"]);
    }

    #[test]
    fn prefixes_exact_names_and_exclusions() {
        assert_eq!(choose(HOST, Some("=eth1,lo")), ["eth1", "lo"]);
        assert_eq!(choose(HOST, Some("^eth,docker")), ["lo"]);
        assert_eq!(choose(HOST, Some("^=eth1")), ["docker0", "eth10", "eth2", "lo"]);
        assert_eq!(choose(HOST, Some("ib")), [""; 0]);
    }

    #[test]
    fn the_default_prefers_real_nics() {
        assert_eq!(choose(HOST, None), ["eth1", "eth10", "eth2"]);
        assert_eq!(choose(&["lo", "ib0", "eth0"], None), ["ib0"]);
        assert_eq!(choose(&["lo", "docker0"], None), ["docker0"]);
        assert_eq!(choose(&["lo"], None), ["lo"]);
    }

    #[test]
    fn loopback_is_this_host_and_a_documentation_address_is_not() {
        assert!(is_own(Ipv4Addr::LOCALHOST) && is_own(Ipv4Addr::new(127, 9, 9, 9)));
        assert!(!is_own(Ipv4Addr::new(192, 0, 2, 1)));
    }

    #[test]
    fn made_up_paths_end_as_pci_addresses_do() {
        let last = pci_path(3);
        assert_eq!(last.rsplit('/').next(), Some("0000:83:00.0"));
    }
}
