//! The addresses at which peers can reach an endpoint.

use crate::config::Config;
use crate::error::{Error, Result};
use ferrywire_net::{Nic, Transport};
use ferrywire_proto::handshake::ListenAddress;
use ferrywire_proto::limits;
use std::net::{IpAddr, SocketAddr};

/// The listening address of each NIC, for peers.
///
/// # Errors
/// [`Error::Io`] if the NICs cannot be listed.
pub(crate) fn advertised(
    config: &Config,
    transport: &dyn Transport,
    listening: &[SocketAddr],
) -> Result<Vec<ListenAddress>> {
    let nics = transport.nics().map_err(|error| Error::io("list NICs", &error))?;
    // If all links are down, an address of a link that is coming up is better than none.
    let all = !nics.iter().any(|nic| nic.up && !nic.loopback);
    let mut out = Vec::new();
    for address in listening {
        let unlisted = unlisted_loopback(&nics, address.ip());
        for nic in nics.iter().chain(&unlisted) {
            let covered = address.ip() == nic.address
                || (address.ip().is_unspecified() && (address.is_ipv6() || nic.address.is_ipv4()));
            let wanted = config.nics.is_empty() || config.nics.contains(&nic.name);
            if covered && wanted && (nic.up || all) && out.len() < limits::ADDRESSES_MAX {
                let name = nic.name.chars().take(15).collect();
                out.push(ListenAddress { address: SocketAddr::new(nic.address, address.port()), nic: name });
            }
        }
    }
    Ok(out)
}

/// The loopback interface with this address, if the address is in its subnet and no NIC lists it: the interface
/// has all addresses of 127.0.0.0/8, and lists 127.0.0.1 alone. The name of a host may stand for 127.0.1.1.
fn unlisted_loopback(nics: &[Nic], address: IpAddr) -> Option<Nic> {
    if !address.is_loopback() || nics.iter().any(|nic| nic.address == address) {
        return None;
    }
    let found = nics.iter().find(|nic| nic.loopback && nic.reaches(address))?;
    Some(Nic { address, ..found.clone() })
}
