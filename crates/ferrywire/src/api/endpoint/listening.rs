//! The port that an endpoint listens on, and the error message when it is taken.
//!
//! The kernel gives ports of the ephemeral range to outgoing connections, and keeps each for a minute after
//! its connection has ended. A port in that range may so be taken although no process has it open.
#![forbid(unsafe_code)]

use crate::config::Config;
use crate::error::{Error, Result};
use ferrywire_net::{Listener, Transport};
use std::io;
use std::net::SocketAddr;
use std::ops::RangeInclusive;

/// File in which Linux publishes the range of ephemeral ports.
const EPHEMERAL_RANGE: &str = "/proc/sys/net/ipv4/ip_local_port_range";
/// First port that unprivileged processes may use.
const UNPRIVILEGED: u16 = 1024;
/// Most ports below the range that are tried in search of a free one.
const PROPOSED_MAX: usize = 64;

/// Opens the configured address, which may be unspecified to stand for every NIC.
///
/// # Errors
/// [`Error::Io`] with a hint if the port is taken.
pub(super) fn listen(config: &Config, transport: &dyn Transport) -> Result<Vec<Box<dyn Listener>>> {
    let Some(address) = config.listen else {
        return Ok(Vec::new());
    };
    let failed = |error: io::Error| {
        let what = format!("listen on {address}");
        let hint = hint(address, &error, ephemeral_range(), |port| {
            transport.listen(SocketAddr::new(address.ip(), port)).is_ok()
        });
        Error::Io { what, message: format!("{error}{hint}"), code: error.raw_os_error() }
    };
    Ok(vec![transport.listen(address).map_err(failed)?])
}

fn ephemeral_range() -> Option<RangeInclusive<u16>> {
    let text = std::fs::read_to_string(EPHEMERAL_RANGE).ok()?;
    let mut ports = text.split_whitespace().map(str::parse);
    Some(ports.next()?.ok()?..=ports.next()?.ok()?)
}

/// Advice about a port that is taken, if it lies in the ephemeral range. `is_free` returns whether a port can
/// be listened on.
fn hint(
    address: SocketAddr,
    error: &io::Error,
    range: Option<RangeInclusive<u16>>,
    is_free: impl Fn(u16) -> bool,
) -> String {
    let Some(range) = range.filter(|range| range.contains(&address.port())) else { return String::new() };
    if error.kind() != io::ErrorKind::AddrInUse {
        return String::new();
    }
    let (first, last) = (*range.start(), *range.end());
    let below = (UNPRIVILEGED..first).rev().take(PROPOSED_MAX).find(|port| is_free(*port));
    let way = match below {
        Some(port) => format!("listen on a port below it, such as {port}"),
        None => "listen on a port outside that range".to_owned(),
    };
    format!(
        "; port {} lies in the range that the kernel gives to outgoing connections ({first} to {last}, sysctl \
         net.ipv4.ip_local_port_range), and an outgoing connection may use the port, or have used it within the last minute: {way}",
        address.port()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(port: u16, range: Option<RangeInclusive<u16>>, kind: io::ErrorKind) -> String {
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        hint(address, &kind.into(), range, |port| port == 32_765)
    }

    #[test]
    fn a_taken_port_of_the_ephemeral_range_is_reported_with_one_below_it() {
        let range = || Some(32_768..=60_999);
        let text = said(40_000, range(), io::ErrorKind::AddrInUse);
        assert!(text.contains("port 40000 lies in the range") && text.contains("32768 to 60999"), "{text}");
        assert!(text.ends_with("such as 32765"), "{text}");
        assert_eq!(said(7420, range(), io::ErrorKind::AddrInUse), "");
        assert_eq!(said(40_000, range(), io::ErrorKind::PermissionDenied), "");
        assert_eq!(said(40_000, None, io::ErrorKind::AddrInUse), "");
        let none_below = said(40_000, Some(1024..=65_535), io::ErrorKind::AddrInUse);
        assert!(none_below.ends_with("listen on a port outside that range"), "{none_below}");
    }
}
