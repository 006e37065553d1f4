//! The kernel's facts about NICs: line rate, name by address, usability.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::net::IpAddr;
use std::path::Path;

use ferrywire_host::topology::Map;
use ferrywire_net::Nic;
use ferrywire_sys::nics;

use crate::exit::{Failure, Outcome};
use crate::sys;

/// Limit for NICs on top of other NICs in the search for a device, such as a VLAN on a bond.
const LOWER_NICS_MAX: usize = 4;

/// Line rate in bytes per second, if the driver reports one and a device limits it.
pub fn line_rate_bytes_per_s(nic: &str) -> Option<f64> {
    line_rate_of(&Path::new("/sys/class/net").join(nic))
}

/// The line rate of the NIC with this folder. A veth's reported rate means nothing.
fn line_rate_of(nic: &Path) -> Option<f64> {
    let reported = fs::read_to_string(nic.join("speed")).ok()?;
    let mbit_per_s: f64 = reported.trim().parse().ok()?;
    (mbit_per_s > 0.0 && leads_to_device(nic, LOWER_NICS_MAX)).then_some(mbit_per_s * 1e6 / 8.0)
}

/// Whether the NIC has a device, or is a bond or VLAN of NICs that have.
fn leads_to_device(nic: &Path, lower_nics: usize) -> bool {
    let is_lower = |name: &OsStr| name.as_encoded_bytes().starts_with(b"lower_");
    let lower = || fs::read_dir(nic).into_iter().flatten().flatten().filter(|e| is_lower(&e.file_name()));
    nic.join("device").exists()
        || lower_nics > 0 && lower().any(|entry| leads_to_device(&entry.path(), lower_nics - 1))
}

/// The name of the NIC with this address.
pub fn name_of(address: IpAddr) -> Option<String> {
    sys::nic_addresses().into_iter().find(|(_, of_nic)| *of_nic == address).map(|(name, _)| name)
}

/// Refuses names of NICs that have no address or are down.
pub fn check(names: &[String]) -> Outcome {
    check_of("--nics ", names)
}

/// Refuses a map that names NICs without an address, or that are down, for these GPUs. A map may also name NICs of other GPUs, which other processes check.
pub fn check_map(map: &Map, gpus: &[u32]) -> Outcome {
    let mut of_these = map.nics.iter().filter(|(gpu, _)| gpus.contains(gpu));
    of_these.try_for_each(|(gpu, names)| check_of(&format!("--gpu-nics {gpu}="), names))
}

/// Whether the NIC can be used.
pub fn is_usable(name: &str) -> bool {
    check(&[name.to_owned()]).is_ok()
}

fn check_of(flag: &str, names: &[String]) -> Outcome {
    if names.is_empty() {
        return Ok(());
    }
    let found = nics::addresses()
        .map_err(|error| Failure::failed(format!("cannot list the NICs of this host: {error}")))?;
    judge(flag, names, &found)
}

fn judge(flag: &str, names: &[String], found: &[Nic]) -> Outcome {
    for name in names {
        let mut of_name = found.iter().filter(|nic| nic.name == *name).peekable();
        if of_name.peek().is_none() {
            let present: BTreeSet<&str> = found.iter().map(|nic| nic.name.as_str()).collect();
            let present = present.into_iter().collect::<Vec<_>>().join(", ");
            return Err(Failure::Usage(format!(
                "{flag}{name}: no such NIC with an address; there are {present}"
            )));
        }
        if of_name.all(|nic| !nic.up) {
            return Err(Failure::failed(format!(
                "{flag}{name}: {name} is down: it is switched off, or has no link; bring it up, or leave it out"
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn only_a_device_has_a_line_rate() {
        let root = tempfile::tempdir().expect("a folder");
        let nic = |name: &str, speed: &str| {
            let folder = root.path().join(name);
            fs::create_dir(&folder).expect("made");
            fs::write(folder.join("speed"), speed).expect("written");
            folder
        };
        let (veth, card, bond, vlan) = (
            nic("veth0", "10000\n"),
            nic("eth0", "100000\n"),
            nic("bond0", "200000\n"),
            nic("bond0.7", "200000\n"),
        );
        fs::create_dir(card.join("device")).expect("made");
        symlink(&bond, vlan.join("lower_bond0")).expect("a link");
        let bridge = nic("br0", "10000\n");
        symlink(&veth, bridge.join("lower_veth0")).expect("a link");
        assert_eq!(line_rate_of(&vlan), None, "it leads nowhere yet");
        symlink(&card, bond.join("lower_eth0")).expect("a link");
        assert_eq!([&veth, &bridge].map(|nic| line_rate_of(nic)), [None; 2]);
        let rates = [&card, &bond, &vlan].map(|nic| line_rate_of(nic));
        assert_eq!(rates, [Some(12.5e9), Some(25e9), Some(25e9)]);
        let down = nic("eth1", "-1\n");
        fs::create_dir(down.join("device")).expect("made");
        assert_eq!(line_rate_of(&down), None);
    }

    #[test]
    fn a_nic_that_is_missing_or_down_is_named() {
        let nic = |name: &str, up| Nic {
            name: name.to_owned(),
            address: IpAddr::from([10, 0, 0, 1]),
            prefix_len: 24,
            speed_mbps: None,
            loopback: false,
            up,
        };
        // A new address of a NIC may not be usable yet while others are.
        let found = [nic("b", true), nic("a", false), nic("b", false)];
        let said = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            judge("--gpu-nics 2=", &names, &found)
        };
        assert_eq!(said(&["b"]), Ok(()));
        let missing = "--gpu-nics 2=c: no such NIC with an address; there are a, b";
        assert_eq!(said(&["b", "c"]), Err(Failure::Usage(missing.to_owned())));
        let down = said(&["a"]).expect_err("it is down");
        assert!(
            matches!(&down, Failure::Failed(why) if why.starts_with("--gpu-nics 2=a: a is down")),
            "{down:?}"
        );
    }
}
