//! What callers may write: an address as text or pair, a number that must not be negative.

use std::net::{SocketAddr, ToSocketAddrs};

use ferrywire::Error;
use pyo3::prelude::*;

use crate::errors::usage;

/// `"host:port"` or `(host, port)`, before anybody has looked the host up.
#[derive(FromPyObject)]
pub enum Address {
    /// As one text.
    Text(String),
    /// As sockets take it.
    Pair(String, u16),
}

impl Address {
    /// Looks it up, which may take as long as the name service does.
    pub fn resolve(&self) -> ferrywire::Result<SocketAddr> {
        let (text, found) = match self {
            Address::Text(text) => (text.clone(), text.to_socket_addrs()),
            Address::Pair(host, port) => (format!("{host}:{port}"), (host.as_str(), *port).to_socket_addrs()),
        };
        let found = found.map_err(|error| {
            Error::invalid("address", format!("{text:?} is none: {error}; write it as 'host:port'"))
        })?;
        // An IPv4 address first: what listens on "0.0.0.0" does not hear the other kind.
        let all: Vec<SocketAddr> = found.collect();
        let best = all.iter().find(|each| each.is_ipv4()).or(all.first());
        best.copied().ok_or_else(|| Error::invalid("address", format!("{text:?} has no address")))
    }
}

/// A number of bytes, or an offset.
pub fn unsigned(py: Python<'_>, what: &str, value: i64) -> PyResult<u64> {
    u64::try_from(value).map_err(|_| usage(py, what, format!("{value} is negative")))
}
