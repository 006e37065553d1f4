//! Compares the kernel's counters of NICs with the bytes that the command reports.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::world::{Host, LINKS, World};

/// Headers of a packet as a NIC counts it: Ethernet, IPv4, TCP and its timestamps. What the kernel hands over as one and
/// segments later, or never, it counts once.
const HEADERS_BYTES: u64 = 14 + 20 + 20 + 12;
/// How far the two may lie apart, with heads, acknowledgements and the conversation in it.
const AGREE: f64 = 0.01;

/// Bytes that the NICs of host A have sent, by link.
pub struct Counters(Vec<(u64, u64)>);

impl Counters {
    /// As they are now.
    pub fn of(world: &World) -> Counters {
        Counters((1..=LINKS).map(|link| world.sent(Host::A, link)).collect())
    }

    /// Bytes of TCP that each has sent since then.
    pub fn payload_since(world: &World, before: &Counters) -> Vec<u64> {
        let payload = |(now, before): (&(u64, u64), &(u64, u64))| {
            (now.0 - before.0) - (now.1 - before.1) * HEADERS_BYTES
        };
        Counters::of(world).0.iter().zip(&before.0).map(payload).collect()
    }
}

/// Bytes sent according to these rows, by NIC.
pub fn sent_by_nic(rows: &[Value]) -> BTreeMap<String, u64> {
    let mut reported = BTreeMap::new();
    for nic in rows.iter().flat_map(|row| row["per_nic"].as_array().expect("NICs")) {
        let name = nic["nic"].as_str().expect("a name").to_owned();
        *reported.entry(name).or_default() += nic["tx_bytes"].as_u64().expect("bytes");
    }
    reported
}

/// The kernel counted what we say, on every NIC.
pub fn agree(what: &str, kernel: &[u64], rows: &[Value]) {
    let reported = sent_by_nic(rows);
    assert_eq!(reported.len(), LINKS, "{reported:?}");
    let shares: Vec<f64> =
        kernel.iter().zip(reported.values()).map(|(kernel, ours)| *kernel as f64 / *ours as f64).collect();
    println!("SUMMARY bytes by the kernel over ours, {what}: {shares:.4?}");
    let near = |share: &f64| (share - 1.0).abs() <= AGREE;
    assert!(shares.iter().all(near), "{what}: {shares:?} of {kernel:?} by the kernel and {reported:?} by us");
}
