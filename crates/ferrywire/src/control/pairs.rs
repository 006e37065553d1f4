//! Which local NIC connects to which address of the peer.
//!
//! NICs are paired within a subnet first. An address in no NIC's subnet is reached over the NIC of the route.
//! A NIC without a counterpart in its subnet is left out, unless the user named it.
//!
//! Hosts may share an address on bridges of their own, for example those of containers and virtual machines,
//! and advertise it to their peers. Invariant: no path leads back to this host, as far as can be known. Only
//! dialling shows that a path leads nowhere.

use crate::core::context::Context;
use ferrywire_net::Nic;
use ferrywire_proto::handshake::{Hello, ListenAddress};
use ferrywire_proto::limits;
use std::net::SocketAddr;
use std::time::Duration;

/// A path: from `nic`, or from the NIC of the route, to `remote`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Pair {
    pub nic: Option<Nic>,
    pub remote: SocketAddr,
    /// The peer's name for its NIC.
    pub remote_nic: String,
}

impl Pair {
    /// Whether both lead over the same NIC to the same address.
    pub fn equals(&self, other: &Pair) -> bool {
        let nic = |pair: &Pair| pair.nic.as_ref().map(|nic| nic.address);
        self.remote == other.remote && nic(self) == nic(other)
    }

    /// Whether this host has the NIC and it is up; true for the NIC of the route.
    pub fn nic_is_up(&self, context: &Context) -> bool {
        let Some(own) = &self.nic else { return true };
        let nics = context.transport.nics().unwrap_or_default();
        nics.iter().any(|nic| nic.up && nic.address == own.address)
    }
}

/// The paths to a peer that was reached at `dialled` and listens on `listens`. Addresses that are `is_ours`
/// are left out.
///
/// `chosen` are the NIC names that the user gave; if empty, all NICs are used that fit.
pub(super) fn pairs(
    nics: &[Nic],
    chosen: &[String],
    dialled: SocketAddr,
    listens: &[ListenAddress],
    is_ours: impl Fn(SocketAddr) -> bool,
) -> Vec<Pair> {
    // The dialled address has led to the peer, even if other hosts have it too.
    let leads_there = |address: &&ListenAddress| address.address == dialled || !is_ours(address.address);
    let usable = |nic: &&Nic| {
        nic.up
            && nic.loopback == dialled.ip().is_loopback()
            && (chosen.is_empty() || chosen.contains(&nic.name))
    };
    let same_family = |nic: &Nic| nic.address.is_ipv4() == dialled.is_ipv4();
    let is_best_of_its_nic = |nic: &Nic| {
        same_family(nic) || !nics.iter().any(|other| other.name == nic.name && same_family(other))
    };
    let mut out: Vec<Pair> = Vec::new();
    for nic in nics.iter().filter(usable) {
        let same_subnet = |address: &&ListenAddress| {
            nic.reaches(address.address.ip()) && address.address.ip().is_loopback() == nic.loopback
        };
        let taken = |address: &ListenAddress| out.iter().any(|pair| pair.remote == address.address);
        // Prefer the dialled address, which works; then an address without a pair; then any.
        let found = listens
            .iter()
            .filter(same_subnet)
            .filter(leads_there)
            .min_by_key(|address| (address.address != dialled, taken(address)));
        match found {
            Some(address) => out.push(Pair {
                nic: Some(nic.clone()),
                remote: address.address,
                remote_nic: address.nic.clone(),
            }),
            // An address of the other family is tried only if its NIC, which the user named, has no other.
            None if nic.reaches(dialled.ip()) || (!chosen.is_empty() && is_best_of_its_nic(nic)) => {
                out.push(Pair { nic: Some(nic.clone()), remote: dialled, remote_nic: String::new() });
            }
            None => {}
        }
    }
    if out.is_empty() {
        out.push(by_route(dialled));
    }
    out
}

/// The path over which the peer was reached.
pub(super) fn by_route(dialled: SocketAddr) -> Pair {
    Pair { nic: None, remote: dialled, remote_nic: String::new() }
}

/// Notices that this host's NICs have changed: an address, a NIC that is up or down, or a new one.
#[derive(Default)]
pub(super) struct NicWatch {
    seen: Option<Vec<Nic>>,
    looked_at: Duration,
    changes: u64,
}

impl NicWatch {
    /// The number of changes so far. Looks at most once per `REDIAL_INTERVAL`: a look costs system calls.
    pub fn changes(&mut self, context: &Context, now: Duration) -> u64 {
        if self.seen.is_none() || now.saturating_sub(self.looked_at) >= limits::REDIAL_INTERVAL {
            self.looked_at = now;
            if let Ok(nics) = context.transport.nics() {
                let before = self.seen.replace(nics);
                self.changes += u64::from(before.is_some() && before != self.seen);
            }
        }
        self.changes
    }
}

/// Whether an address that `peer` advertises leads to this endpoint instead. If the peer is on another host,
/// all addresses of local NICs do; on this host, or if unknown, only addresses that this endpoint listens on.
pub(super) fn leads_to_us(nics: &[Nic], me: &Hello, peer: &Hello, address: SocketAddr) -> bool {
    match peer.shares_host(me) {
        Some(false) => nics.iter().any(|nic| nic.address == address.ip()),
        _ => me.addresses.iter().any(|own| own.address == address),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrywire_proto::handshake::testing::hello;

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
        named(&pairs(nics, &chosen, dialled, &listens(list), |_| false))
    }

    fn named(pairs: &[Pair]) -> Vec<(String, String)> {
        let name = |pair: &Pair| pair.nic.as_ref().map_or("route".into(), |nic| nic.name.clone());
        pairs.iter().map(|pair| (name(pair), pair.remote.ip().to_string())).collect()
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
    fn an_address_of_the_other_family_is_no_path_beside_one_of_the_same() {
        let nics = [nic("lo", "127.0.0.1"), nic("lo", "::1")];
        for order in [[0, 1], [1, 0]] {
            let nics = order.map(|at| nics[at].clone());
            let found = paths(&nics, &["lo"], "127.0.0.1", &["127.0.0.1"]);
            assert_eq!(found, [("lo".into(), "127.0.0.1".into())]);
        }
        // Without an address of the same family the pair is dialled: its error names both families.
        let found = paths(&[nic("eth1", "fd00::1")], &["eth1"], "10.0.1.2", &["10.0.1.2"]);
        assert_eq!(found, [("eth1".into(), "10.0.1.2".into())]);
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

    const BRIDGE: &str = "172.17.0.1";

    /// The paths to `10.0.1.2:7420` from a host with a container bridge, where this endpoint listens on
    /// `own_port`. A boot id of zero stands for a host that does not report it.
    fn past_a_bridge(own_port: u16, boots: [u8; 2], dialled: &str) -> Vec<(String, String)> {
        let nics = [nic("eth1", "10.0.1.1"), nic("docker0", BRIDGE)];
        let (mut me, mut peer) = (hello(1), hello(2));
        [me.boot_id, peer.boot_id] = boots.map(|boot| [boot; 16]);
        me.addresses = listens(&["10.0.1.1", BRIDGE]);
        me.addresses.iter_mut().for_each(|own| own.address.set_port(own_port));
        let (dialled, list) = (dialled.parse().unwrap(), listens(&["10.0.1.2", BRIDGE]));
        named(&pairs(&nics, &[], dialled, &list, |address| leads_to_us(&nics, &me, &peer, address)))
    }

    #[test]
    fn an_address_that_this_host_has_too_is_no_path_to_another_host() {
        let rail = ("eth1".into(), "10.0.1.2".into());
        for own_port in [7420, 7421] {
            assert_eq!(past_a_bridge(own_port, [1, 2], "10.0.1.2:7420"), std::slice::from_ref(&rail));
        }
        // The dialled address has led to the peer, so its path is kept.
        assert_eq!(past_a_bridge(7420, [1, 2], "172.17.0.1:7420"), [rail, ("docker0".into(), BRIDGE.into())]);
    }

    #[test]
    fn within_a_host_only_what_we_listen_on_ourselves_is_no_path() {
        let (rail, bridge) = (("eth1".into(), "10.0.1.2".into()), ("docker0".into(), BRIDGE.into()));
        for boots in [[1, 1], [0, 2], [1, 0], [0, 0]] {
            assert_eq!(past_a_bridge(7420, boots, "10.0.1.2:7420"), std::slice::from_ref(&rail));
            assert_eq!(past_a_bridge(7421, boots, "10.0.1.2:7420"), [rail.clone(), bridge.clone()]);
        }
    }
}
