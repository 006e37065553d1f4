//! What the kernel tells about NICs.

use std::path::Path;

/// Line rate in bytes per second, where the driver tells one.
pub fn line_rate_bytes_per_s(nic: &str) -> Option<f64> {
    let path = Path::new("/sys/class/net").join(nic).join("speed");
    let mbit_per_s: f64 = std::fs::read_to_string(path).ok()?.trim().parse().ok()?;
    (mbit_per_s > 0.0).then_some(mbit_per_s * 1e6 / 8.0)
}

/// The NIC that has this address.
pub fn name_of(address: std::net::IpAddr) -> Option<String> {
    crate::sys::nic_addresses()
        .into_iter()
        .find(|(_, nic_address)| *nic_address == address)
        .map(|(name, _)| name)
}
