//! A connection of a comm, with its name in errors.
//!
//! The name of the NIC is looked up while the connection is up: once the NIC is down, its address may be gone.

use std::fmt;
use std::net::SocketAddr;

use ferrywire_net::{Conn, Nic};
use ferrywire_sys::nics;

use crate::device::network;

/// A connection with its name.
pub struct Link {
    pub conn: Box<dyn Conn>,
    /// The remote address and the NIC.
    pub name: LinkName,
}

/// Shown as `10.0.1.2:4567 over eth1`.
#[derive(Clone, Debug)]
pub struct LinkName {
    peer: SocketAddr,
    nic: Option<String>,
}

impl Link {
    /// Names all connections.
    pub fn all(conns: Vec<Box<dyn Conn>>) -> impl ExactSizeIterator<Item = Link> {
        let nics = network().addresses().unwrap_or_default();
        conns.into_iter().map(move |conn| Link::new(conn, &nics))
    }

    fn new(conn: Box<dyn Conn>, nics: &[Nic]) -> Link {
        let nic = nics::with_address(nics, conn.local().ip()).map(|nic| nic.name.clone());
        let name = LinkName { peer: conn.remote(), nic };
        Link { conn, name }
    }
}

impl fmt::Display for LinkName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.nic {
            Some(nic) => write!(f, "{} over {nic}", self.peer),
            None => write!(f, "{}", self.peer),
        }
    }
}
