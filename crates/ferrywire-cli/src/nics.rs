//! What the kernel tells about NICs.

use std::net::IpAddr;
use std::path::Path;

use ferrywire::topology::Map;

use crate::exit::{Failure, Outcome};
use crate::sys;

/// Line rate in bytes per second, where the driver tells one.
pub fn line_rate_bytes_per_s(nic: &str) -> Option<f64> {
    let path = Path::new("/sys/class/net").join(nic).join("speed");
    let mbit_per_s: f64 = std::fs::read_to_string(path).ok()?.trim().parse().ok()?;
    (mbit_per_s > 0.0).then_some(mbit_per_s * 1e6 / 8.0)
}

/// The NIC that has this address.
pub fn name_of(address: IpAddr) -> Option<String> {
    sys::nic_addresses().into_iter().find(|(_, of_nic)| *of_nic == address).map(|(name, _)| name)
}

/// Refuses names that no NIC with an address has.
pub fn check(names: &[String]) -> Outcome {
    check_of("--nics ", names)
}

/// The same of the NICs of each GPU.
pub fn check_map(map: &Map) -> Outcome {
    map.nics.iter().try_for_each(|(gpu, names)| check_of(&format!("--map {gpu}="), names))
}

fn check_of(flag: &str, names: &[String]) -> Outcome {
    let mut present: Vec<String> = sys::nic_addresses().into_iter().map(|(name, _)| name).collect();
    present.sort_unstable();
    present.dedup();
    match names.iter().find(|name| !present.contains(name)) {
        None => Ok(()),
        Some(name) => {
            let present = present.join(", ");
            Err(Failure::Usage(format!("{flag}{name}: no such NIC with an address; there are {present}")))
        }
    }
}
