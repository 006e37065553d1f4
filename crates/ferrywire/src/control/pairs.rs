//! Which local NIC talks to which address of the peer.
//!
//! Same subnet first; an address that is in no NIC's subnet is reached by the route's own NIC. A NIC
//! without a counterpart in its subnet is left out, unless the user named it.

use crate::bootstrap::ListenAddress;
use crate::transport::Nic;
use std::net::SocketAddr;

/// A path: out of `nic` (or wherever the route leads) to `remote`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Pair {
    pub nic: Option<Nic>,
    pub remote: SocketAddr,
    /// The peer's name for its NIC.
    pub remote_nic: String,
}

/// The paths to a peer that was reached at `dialled` and listens on `listens`.
///
/// `chosen` are the names the user gave; empty means all that fit.
pub(super) fn pairs(
    nics: &[Nic],
    chosen: &[String],
    dialled: SocketAddr,
    listens: &[ListenAddress],
) -> Vec<Pair> {
    let usable = |nic: &&Nic| {
        nic.up
            && nic.loopback == dialled.ip().is_loopback()
            && (chosen.is_empty() || chosen.contains(&nic.name))
    };
    let mut out: Vec<Pair> = Vec::new();
    for nic in nics.iter().filter(usable) {
        let same_subnet = |address: &&ListenAddress| {
            nic.reaches(address.address.ip()) && address.address.ip().is_loopback() == nic.loopback
        };
        let taken = |address: &ListenAddress| out.iter().any(|pair| pair.remote == address.address);
        // The address that was dialled works for sure; else one nobody else has; else any.
        let found = listens
            .iter()
            .filter(same_subnet)
            .min_by_key(|address| (address.address != dialled, taken(address)));
        match found {
            Some(address) => out.push(Pair {
                nic: Some(nic.clone()),
                remote: address.address,
                remote_nic: address.nic.clone(),
            }),
            None if !chosen.is_empty() || nic.reaches(dialled.ip()) => {
                out.push(Pair { nic: Some(nic.clone()), remote: dialled, remote_nic: String::new() });
            }
            None => {}
        }
    }
    if out.is_empty() {
        out.push(Pair { nic: None, remote: dialled, remote_nic: String::new() });
    }
    out
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
            up: true,
        }
    }

    fn listens(list: &[&str]) -> Vec<ListenAddress> {
        list.iter()
            .map(|address| ListenAddress {
                address: format!("{address}:7420").parse().unwrap(),
                nic: "n".into(),
            })
            .collect()
    }

    fn paths(nics: &[Nic], chosen: &[&str], dialled: &str, list: &[&str]) -> Vec<(String, String)> {
        let chosen: Vec<String> = chosen.iter().map(|name| (*name).into()).collect();
        let dialled = format!("{dialled}:7420").parse().unwrap();
        let name = |pair: &Pair| pair.nic.as_ref().map_or("route".into(), |nic| nic.name.clone());
        pairs(nics, &chosen, dialled, &listens(list))
            .iter()
            .map(|pair| (name(pair), pair.remote.ip().to_string()))
            .collect()
    }

    #[test]
    fn four_rails_pair_up_by_subnet_and_control_nics_stay_out() {
        let nics = [
            nic("lo", "127.0.0.1"),
            nic("eth1", "10.0.1.1"),
            nic("eth2", "10.0.2.1"),
            nic("eth9", "10.9.9.1"),
        ];
        let found = paths(&nics, &[], "10.0.1.2", &["10.0.2.2", "10.0.1.2", "10.0.3.2"]);
        assert_eq!(found, [("eth1".into(), "10.0.1.2".into()), ("eth2".into(), "10.0.2.2".into())]);
    }

    #[test]
    fn a_peer_behind_a_router_is_reached_by_the_route() {
        let nics = [nic("lo", "127.0.0.1"), nic("eth0", "10.0.1.1")];
        assert_eq!(
            paths(&nics, &[], "192.168.7.7", &["192.168.7.7"]),
            [("route".into(), "192.168.7.7".into())]
        );
    }

    #[test]
    fn a_named_nic_is_used_even_if_it_needs_the_route() {
        let nics = [nic("lo", "127.0.0.1"), nic("eth0", "10.0.1.1"), nic("eth5", "10.5.0.1")];
        assert_eq!(paths(&nics, &["eth5"], "10.0.1.2", &["10.0.1.2"]), [("eth5".into(), "10.0.1.2".into())]);
    }

    #[test]
    fn loopback_talks_to_loopback_only() {
        let nics = [nic("lo", "127.0.0.1"), nic("eth0", "10.0.1.1")];
        assert_eq!(paths(&nics, &[], "127.0.0.1", &["127.0.0.1"]), [("lo".into(), "127.0.0.1".into())]);
    }
}
