//! The addresses at which peers can reach an endpoint.

use crate::config::Config;
use crate::error::{Error, Result};
use ferrywire_net::Transport;
use ferrywire_proto::handshake::ListenAddress;
use ferrywire_proto::limits;
use std::net::SocketAddr;

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
        for nic in &nics {
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
