//! Devices: the NICs that NCCL may use, chosen by the rules of NCCL's own socket transport.
//!
//! `NCCL_SOCKET_IFNAME` is a list of prefixes of names; `=` in front makes it a list of whole names, `^` a list of
//! excluded prefixes. Without it: NICs whose names begin with `ib`; if there are none, all but docker's bridges and
//! loopback; then docker's bridges; then loopback. `NCCL_SOCKET_FAMILY` (`AF_INET`, `AF_INET6`) selects addresses.
//! Invariants: a NIC is listed once, with its first matching address; devices never change after they are listed, and
//! their strings live as long as the process.
//! Read next: `merged.rs`, for devices made of several NICs.

use std::ffi::{CString, OsStr};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::{LazyLock, OnceLock};
use std::time::Duration;

use ferrywire_net::Nic;
use ferrywire_net::tcp::TcpTransport;
use ferrywire_sys::nics;

use crate::failure::{Fault, Outcome};
use crate::log;

/// Speed in Mbit/s that is assumed of a NIC that reports none, as in NCCL.
const SPEED_MBPS_UNKNOWN: u32 = 10_000;
/// Speed in Mbit/s of loopback: the rate that several copying cores reach.
const SPEED_MBPS_LOOPBACK: u32 = 100_000;
/// Time for which the host's addresses and link states are cached.
const ADDRESSES_FOR: Duration = Duration::from_secs(1);
/// Most devices of the plugin, which is the limit of NCCL's own transport.
const DEVICES_MAX: usize = 16;

/// A NIC, or several merged ones, as NCCL sees them.
#[derive(Debug)]
pub struct Device {
    /// The NICs with their addresses, at least one. Implausible speeds are removed.
    pub nics: Vec<Nic>,
    /// Numbers of the devices that this one is merged of; a plain device has its own number.
    pub members: Vec<i32>,
    /// Name of the device for NCCL.
    pub name: CString,
    /// Path in sysfs of the device's PCI function; `None` for virtual NICs.
    pub pci_path: Option<CString>,
    /// Speed of the device in Mbit/s.
    pub speed_mbps: i32,
}

impl Device {
    /// The plain device of a NIC.
    pub fn of(number: i32, mut nic: Nic) -> Device {
        let unknown = if nic.loopback { SPEED_MBPS_LOOPBACK } else { SPEED_MBPS_UNKNOWN };
        let speed_mbps = nic.speed_mbps.unwrap_or(unknown).try_into().unwrap_or(i32::MAX);
        let name = CString::new(nic.name.as_str()).unwrap_or_default();
        let pci_path = pci_path(Path::new("/sys/class/net"), &nic.name);
        if pci_path.is_none() {
            // A veth reports 10 Gbit/s, whatever its real rate is.
            nic.speed_mbps = None;
        }
        Device { nics: vec![nic], members: vec![number], name, pci_path, speed_mbps }
    }

    /// The device's NICs that are up, or all of them if none is: dialling then reports the real error.
    pub fn nics_up(&self) -> Vec<&Nic> {
        if self.nics.len() == 1 {
            return self.nics.iter().collect();
        }
        let now = network().addresses().unwrap_or_default();
        let is_up = |nic: &&Nic| {
            now.iter().any(|other| other.up && other.name == nic.name && other.address == nic.address)
        };
        let (up, down): (Vec<&Nic>, Vec<&Nic>) = self.nics.iter().partition(is_up);
        if up.is_empty() {
            return down;
        }
        for nic in down {
            log::warn_once(format_args!("NIC {} is down and left out", nic.name));
        }
        up
    }
}

/// The network of all comms. Link states and addresses are cached, because there are hundreds of comms with many
/// sockets each, and a host may have as many interfaces.
pub fn network() -> &'static TcpTransport {
    static NETWORK: LazyLock<TcpTransport> = LazyLock::new(|| TcpTransport::asking_once_in(ADDRESSES_FOR));
    &NETWORK
}

/// The plain devices of this process; listed once, as soon as there are any.
pub fn devices() -> Outcome<&'static [Device]> {
    static DEVICES: OnceLock<Vec<Device>> = OnceLock::new();
    if let Some(devices) = DEVICES.get() {
        return Ok(devices);
    }
    let nics = nics::list().map_err(|e| Fault::system("cannot list the network interfaces", &e))?;
    let variable = |name| std::env::var(name).ok().filter(|text| !text.is_empty());
    let (names, family) = (variable("NCCL_SOCKET_IFNAME"), variable("NCCL_SOCKET_FAMILY"));
    let chosen = choose(nics, names.as_deref(), family.as_deref());
    if chosen.is_empty() {
        let wanted = names.map(|names| format!(" of NCCL_SOCKET_IFNAME={names}")).unwrap_or_default();
        return Err(Fault {
            why: format!("no network interface{wanted} is up and has an address"),
            ..no_device()
        });
    }
    let devices =
        DEVICES.get_or_init(|| (0..).zip(chosen).map(|(number, nic)| Device::of(number, nic)).collect());
    for (index, device) in devices.iter().enumerate() {
        let speed = device.speed_mbps;
        for nic in &device.nics {
            log::info(format_args!("device {index}: {} {}, {speed} Mbit/s", nic.name, nic.address));
        }
    }
    Ok(devices)
}

fn no_device() -> Fault {
    Fault::system("this host has no NIC that can be used", &std::io::Error::from_raw_os_error(libc::ENODEV))
}

/// Chooses the NICs to use, in the kernel's order.
fn choose(nics: Vec<Nic>, names: Option<&str>, family: Option<&str>) -> Vec<Nic> {
    let fits = |nic: &Nic| {
        let right = match family {
            Some("AF_INET") => nic.address.is_ipv4(),
            Some("AF_INET6") => nic.address.is_ipv6(),
            _ => true,
        };
        // As in NCCL, loopback uses IPv4 unless `NCCL_SOCKET_FAMILY` selects IPv6.
        nic.up && right && (!nic.loopback || nic.address.is_ipv4() || family == Some("AF_INET6"))
    };
    let mut usable: Vec<Nic> = Vec::new();
    for nic in nics.into_iter().filter(fits) {
        if usable.iter().all(|other| other.name != nic.name) {
            usable.push(nic);
        }
    }
    let of = |pattern: &str| {
        let pattern = Pattern::parse(pattern);
        usable.iter().filter(|nic| pattern.takes(&nic.name)).take(DEVICES_MAX).cloned().collect::<Vec<_>>()
    };
    match names {
        Some(names) => of(names),
        None => {
            let wishes = ["ib", "^docker,lo,virbr", "docker", "lo"];
            wishes.iter().map(|wish| of(wish)).find(|found| !found.is_empty()).unwrap_or_default()
        }
    }
}

/// A list of names in NCCL's notation.
struct Pattern<'a> {
    not: bool,
    exact: bool,
    names: Vec<&'a str>,
}

impl Pattern<'_> {
    fn parse(text: &str) -> Pattern<'_> {
        let (not, text) = text.strip_prefix('^').map_or((false, text), |rest| (true, rest));
        let (exact, text) = text.strip_prefix('=').map_or((false, text), |rest| (true, rest));
        // A port may follow a name; it is meant for NCCL's own listeners.
        let names = text.split(',').map(|item| item.split(':').next().unwrap_or_default().trim());
        Pattern { not, exact, names: names.filter(|name| !name.is_empty()).collect() }
    }

    fn takes(&self, name: &str) -> bool {
        let matches = |item: &&str| if self.exact { name == *item } else { name.starts_with(*item) };
        self.names.iter().any(matches) != self.not
    }
}

/// The directory of a NIC's PCI function: the last part of its device's path that is a PCI address.
fn pci_path(class: &Path, name: &str) -> Option<CString> {
    let device = fs::canonicalize(class.join(name).join("device")).ok()?;
    let function = device.ancestors().find(|path| path.file_name().is_some_and(is_pci_address))?;
    CString::new(function.as_os_str().as_bytes()).ok()
}

/// Whether a name is a PCI address, such as `0000:3b:00.1`.
fn is_pci_address(name: &OsStr) -> bool {
    let parts: Vec<&[u8]> = name.as_bytes().split(|byte| matches!(byte, b':' | b'.')).collect();
    let hex = |part: &&[u8]| !part.is_empty() && part.iter().all(u8::is_ascii_hexdigit);
    parts.len() == 4 && parts.iter().all(hex) && parts[0].len() >= 4
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nic(name: &str, address: &str) -> Nic {
        Nic {
            name: name.into(),
            address: address.parse().unwrap(),
            prefix_len: 24,
            speed_mbps: None,
            loopback: name == "lo",
            up: name != "down0",
        }
    }

    fn host() -> Vec<Nic> {
        [
            ("lo", "127.0.0.1"),
            ("lo", "::1"),
            ("down0", "10.0.9.1"),
            ("eth0", "10.0.0.1"),
            ("eth0", "2001:db8::1"),
            ("eth1", "10.0.1.1"),
            ("eth10", "10.0.2.1"),
            ("docker0", "172.17.0.1"),
        ]
        .map(|(name, address)| nic(name, address))
        .into()
    }

    fn chosen(names: Option<&str>, family: Option<&str>) -> Vec<String> {
        choose(host(), names, family).into_iter().map(|nic| format!("{} {}", nic.name, nic.address)).collect()
    }

    #[test]
    fn by_default_loopback_and_docker_are_left_out() {
        assert_eq!(chosen(None, None), ["eth0 10.0.0.1", "eth1 10.0.1.1", "eth10 10.0.2.1"]);
        let alone = choose(vec![nic("lo", "127.0.0.1"), nic("docker0", "172.17.0.1")], None, None);
        assert_eq!(alone[0].name, "docker0");
        assert_eq!(choose(vec![nic("lo", "127.0.0.1")], None, None)[0].name, "lo");
        let ib = choose(vec![nic("eth0", "10.0.0.1"), nic("ib0", "10.0.1.1")], None, None);
        assert_eq!((ib.len(), ib[0].name.as_str()), (1, "ib0"));
    }

    #[test]
    fn nccl_socket_ifname_is_obeyed() {
        assert_eq!(chosen(Some("lo"), None), ["lo 127.0.0.1"]);
        assert_eq!(chosen(Some("eth1"), None), ["eth1 10.0.1.1", "eth10 10.0.2.1"]);
        assert_eq!(chosen(Some("=eth1"), None), ["eth1 10.0.1.1"]);
        assert_eq!(chosen(Some("=eth1,lo:4000"), None), ["lo 127.0.0.1", "eth1 10.0.1.1"]);
        assert_eq!(chosen(Some("^eth,lo"), None), ["docker0 172.17.0.1"]);
        assert_eq!(
            chosen(Some("^=eth1,lo"), None),
            ["eth0 10.0.0.1", "eth10 10.0.2.1", "docker0 172.17.0.1"]
        );
        assert_eq!(chosen(Some("wlan"), None), [""; 0]);
        assert_eq!(chosen(Some("down"), None), [""; 0]);
    }

    #[test]
    fn nccl_socket_family_is_obeyed() {
        assert_eq!(chosen(None, Some("AF_INET6")), ["eth0 2001:db8::1"]);
        assert_eq!(chosen(Some("lo"), Some("AF_INET6")), ["lo ::1"]);
        assert_eq!(chosen(Some("eth0"), Some("AF_INET")), ["eth0 10.0.0.1"]);
    }

    #[test]
    fn a_path_ends_at_the_pci_function() {
        for (name, right) in
            [("0000:3b:00.1", true), ("virtio0", false), ("net", false), ("pci0000:00", false)]
        {
            assert_eq!(is_pci_address(OsStr::new(name)), right, "{name}");
        }
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let function = root.join("pci0000:00/0000:00:04.0");
        fs::create_dir_all(function.join("virtio1")).unwrap();
        fs::create_dir_all(root.join("net/eth0")).unwrap();
        std::os::unix::fs::symlink(function.join("virtio1"), root.join("net/eth0/device")).unwrap();
        let path = pci_path(&root.join("net"), "eth0").unwrap();
        assert_eq!(path.as_bytes(), function.as_os_str().as_bytes());
        assert_eq!(pci_path(&root.join("net"), "lo"), None);
    }
}
