//! NICs that this end names, or that were chosen for its GPU, and that carry no channel: which ones, why, and the fix.
//!
//! Invariant: without a named or chosen NIC there is no answer; the engine then uses what leads to the peer.
//! Read next: [`super::report`], which stores the answer with each result; [`super::table`], which prints it.

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::result::ResultRow;
use crate::sys;

/// A NIC without a channel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdleNic {
    /// Name of the NIC.
    pub nic: String,
    /// Why the NIC carries no channel.
    pub reason: String,
    /// The step that gives the NIC a channel, or avoids the message.
    pub fix: String,
}

/// The idle NICs of a result; `config` has the effective values of the run.
pub fn of_result(config: &Value, row: &ResultRow) -> Vec<IdleNic> {
    let addresses = sys::nic_addresses();
    find(config, row, |nic| addresses.iter().filter(|(name, _)| name == nic).map(|(_, ip)| *ip).collect())
}

fn find(config: &Value, row: &ResultRow, addresses_of: impl Fn(&str) -> Vec<IpAddr>) -> Vec<IdleNic> {
    let has_channel = |nic: &&str| row.per_channel.iter().any(|channel| channel.nic == *nic);
    let peer = peer_addresses(config);
    let mut idle: Vec<IdleNic> = Vec::new();
    for (flag, nics) in groups(config, row) {
        for nic in nics.iter().copied().filter(|nic| !has_channel(nic)) {
            let (reason, fix) = explain(nic, &flag, nics.len(), row.channels, (&addresses_of(nic), &peer));
            if idle.iter().all(|other| other.nic != nic) {
                idle.push(IdleNic { nic: nic.to_owned(), reason, fix });
            }
        }
    }
    idle
}

/// The NICs of each endpoint of this process, with the option that names them. Ranks of other hosts have other NICs,
/// which this process does not know.
fn groups<'a>(config: &'a Value, row: &ResultRow) -> Vec<(String, Vec<&'a str>)> {
    let names = |list: &'a Value| list.as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    if !row.extra.contains_key("pair") {
        return vec![("--nics".to_owned(), names(&config["nics"]))];
    }
    let is_of_this_process = !config["gpus"].is_null();
    let by_gpu = config["gpu_nics"].as_object().into_iter().flatten().filter(|_| is_of_this_process);
    by_gpu.map(|(gpu, nics)| (format!("--gpu-nics {gpu}"), names(nics))).collect()
}

fn peer_addresses(config: &Value) -> Vec<IpAddr> {
    let texts = config["address"].as_array().into_iter().flatten().filter_map(Value::as_str);
    texts.filter_map(|text| text.parse::<SocketAddr>().ok()).map(|address| address.ip()).collect()
}

fn explain(
    nic: &str,
    flag: &str,
    nics: usize,
    channels: usize,
    (own, peer): (&[IpAddr], &[IpAddr]),
) -> (String, String) {
    let is_loopback = |ips: &[IpAddr]| !ips.is_empty() && ips.iter().all(IpAddr::is_loopback);
    let leave_out = format!("leave {nic} out of {flag}");
    if is_loopback(peer) && !is_loopback(own) {
        let reason = format!("the peer's address {} is loopback, which {nic} does not reach", peer[0]);
        return (reason, format!("{leave_out}, or connect to an address that {nic} reaches"));
    }
    if is_loopback(own) && !is_loopback(peer) {
        return (format!("{nic} is loopback, and the peer is on another address"), leave_out);
    }
    if channels < nics {
        let plural = if channels == 1 { "" } else { "s" };
        let reason = format!("{channels} channel{plural} for {nics} NICs");
        return (reason, format!("--channels {nics} gives each NIC a channel"));
    }
    let reason = "no connection over it reached the peer".to_owned();
    (reason, format!("'ferrywire doctor ADDR:PORT' shows which NICs reach the peer; or {leave_out}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn row(channels: usize, used: &[&str], extra: Value) -> ResultRow {
        let per_channel: Vec<Value> = used
            .iter()
            .enumerate()
            .map(|(channel, nic)| json!({"channel": channel, "nic": nic, "bytes": 1}))
            .collect();
        let spread = json!({"min": 1.0, "p50": 1.0, "max": 1.0});
        serde_json::from_value(json!({
            "op": "write", "memory": "host", "peer_memory": "host", "transport": "tcp", "unpack": null,
            "pattern": "unidir", "gpu": null, "peer_gpu": null, "direction": "to_peer", "size_bytes": 4096,
            "depth": 1, "blocks": null, "iterations": 1, "channels": channels, "chunk_bytes": 4096, "window": 1,
            "threads": 1, "congestion_control": "cubic", "verified": true, "gb_per_s": spread, "latency_us": null,
            "cpu_s_per_gb": null, "bottleneck": "", "setup_s": 0.1, "stages_s": {}, "per_nic": [],
            "per_channel": per_channel, "extra": extra,
        }))
        .expect("a result")
    }

    fn addresses(nic: &str) -> Vec<IpAddr> {
        vec![if nic == "lo" { IpAddr::from([127, 0, 0, 1]) } else { IpAddr::from([10, 0, 0, 1]) }]
    }

    fn said(config: &Value, row: &ResultRow) -> Vec<String> {
        let idle = find(config, row, addresses);
        idle.into_iter().map(|idle| format!("{}: {}; {}", idle.nic, idle.reason, idle.fix)).collect()
    }

    #[test]
    fn each_reason_for_an_idle_nic_has_its_fix() {
        let config = |nics: Value, peer: &str| json!({"nics": nics, "address": [peer], "gpus": null});
        let beyond = config(json!(["eth0", "eth1"]), "10.0.0.2:7420");
        assert_eq!(said(&beyond, &row(2, &["eth0", "eth1"], json!({}))), Vec::<String>::new());
        assert_eq!(
            said(&beyond, &row(1, &["eth0"], json!({}))),
            ["eth1: 1 channel for 2 NICs; --channels 2 gives each NIC a channel"]
        );
        assert_eq!(
            said(&beyond, &row(4, &["eth0"], json!({}))),
            [
                "eth1: no connection over it reached the peer; 'ferrywire doctor ADDR:PORT' shows which NICs reach the \
              peer; or leave eth1 out of --nics"
            ]
        );
        let loopback = config(json!(["lo", "eth1"]), "127.0.0.1:7420");
        let found = said(&loopback, &row(4, &["lo"], json!({})));
        assert!(found[0].starts_with("eth1: the peer's address 127.0.0.1 is loopback"), "{found:?}");
        let found = said(&config(json!(["lo", "eth1"]), "10.0.0.2:7420"), &row(4, &["eth1"], json!({})));
        assert!(found[0].starts_with("lo: lo is loopback"), "{found:?}");
        assert_eq!(said(&config(json!([]), "10.0.0.2:7420"), &row(1, &["eth0"], json!({}))), [""; 0]);
    }

    #[test]
    fn with_several_gpus_each_gpu_has_its_own_nics() {
        let pair = json!({"pair": ["all", "all"]});
        let config = |gpus: Value| json!({"nics": ["eth9"], "address": ["10.0.0.2:7420"], "gpus": gpus, "gpu_nics": {"0": ["eth0", "eth1"]}});
        let found = said(&config(json!([0])), &row(1, &["eth0"], pair.clone()));
        assert_eq!(found, ["eth1: 1 channel for 2 NICs; --channels 2 gives each NIC a channel"]);
        // The ranks of a run are on several hosts.
        assert_eq!(said(&config(json!(null)), &row(1, &["eth0"], pair)), [""; 0]);
    }
}
