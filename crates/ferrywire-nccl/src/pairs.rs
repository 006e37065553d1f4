//! Pairs of NICs: the local NIC over which each address of the peer is dialled.
//!
//! The dialling end alone decides, so nothing has to be agreed on: a connection with the listener's secret belongs to
//! its comm, at whichever NIC it arrives.
//! Invariant: every NIC and every address is in a pair, and the numbers of pairs per NIC differ by at most one.

use std::net::SocketAddr;

use ferrywire_net::Nic;

/// A local NIC and an address of the peer that is dialled over it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pair {
    /// The local NIC over which the address is dialled.
    pub nic: Nic,
    /// The peer's address that is dialled.
    pub to: SocketAddr,
}

/// Pairs local NICs with addresses: first those that share a subnet, then in order. The shorter list is used again from
/// its beginning.
pub fn pairs(nics: &[&Nic], addresses: &[SocketAddr]) -> Vec<Pair> {
    let mut used = (vec![0; nics.len()], vec![0; addresses.len()]);
    let all = || (0..nics.len()).flat_map(|ours| (0..addresses.len()).map(move |theirs| (ours, theirs)));
    let mut pairs = Vec::new();
    for _ in 0..nics.len().max(addresses.len()) {
        let cost = |&(ours, theirs): &(usize, usize)| {
            let apart = !nics[ours].reaches(addresses[theirs].ip());
            (used.0[ours] + used.1[theirs], apart, ours, theirs)
        };
        let Some((ours, theirs)) = all().min_by_key(cost) else { break };
        used.0[ours] += 1;
        used.1[theirs] += 1;
        pairs.push(Pair { nic: nics[ours].clone(), to: addresses[theirs] });
    }
    pairs
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{IpAddr, Ipv4Addr};

    /// NIC number k in the subnet 10.0.k.0 with this prefix.
    fn nic(k: u8, prefix_len: u8) -> Nic {
        let address = IpAddr::from([10, 0, k, 1]);
        Nic { name: format!("eth{k}"), address, prefix_len, speed_mbps: None, loopback: false, up: true }
    }

    /// The pairs of local and remote NICs, each by its subnet's number.
    fn met(ours: &[u8], theirs: &[u8], prefix_len: u8) -> Vec<(u8, u8)> {
        let nics: Vec<Nic> = ours.iter().map(|&k| nic(k, prefix_len)).collect();
        let addresses: Vec<_> = theirs.iter().map(|&k| SocketAddr::from(([10, 0, k, 2], 7))).collect();
        let number = |ip: IpAddr| match ip {
            IpAddr::V4(v4) => Ipv4Addr::octets(&v4)[2],
            IpAddr::V6(_) => unreachable!("all are of IPv4"),
        };
        let pairs = pairs(&nics.iter().collect::<Vec<_>>(), &addresses);
        pairs.into_iter().map(|pair| (number(pair.nic.address), number(pair.to.ip()))).collect()
    }

    #[test]
    fn as_many_at_both_ends_meet_by_their_order() {
        for prefix_len in [8, 24, 32] {
            assert_eq!(met(&[0, 1, 2, 3], &[0, 1, 2, 3], prefix_len), [(0, 0), (1, 1), (2, 2), (3, 3)]);
        }
        assert_eq!(met(&[0], &[0], 24), [(0, 0)]);
    }

    #[test]
    fn fewer_at_one_end_are_taken_again() {
        assert_eq!(met(&[0, 1], &[0, 1, 2, 3], 8), [(0, 0), (1, 1), (0, 2), (1, 3)]);
        assert_eq!(met(&[0, 1, 2], &[0, 1], 8), [(0, 0), (1, 1), (2, 0)]);
        assert_eq!(met(&[0], &[0, 1, 2], 32), [(0, 0), (0, 1), (0, 2)]);
    }

    /// Pairing by order alone would send the second NIC to the first subnet and use the third not at all.
    #[test]
    fn those_of_one_subnet_meet_whatever_their_order() {
        assert_eq!(met(&[0, 1, 2], &[2, 0, 1], 24), [(0, 0), (1, 1), (2, 2)]);
        assert_eq!(met(&[0, 1, 2, 3], &[1, 2, 3], 24), [(1, 1), (2, 2), (3, 3), (0, 1)]);
    }
}
