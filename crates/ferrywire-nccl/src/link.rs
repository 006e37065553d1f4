//! A connection of a comm, with its name in errors and its channel in metrics.
//!
//! The name of the NIC is looked up while the connection is up: once the NIC is down, its address may be gone.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use ferrywire_net::{Conn, Nic};
use ferrywire_sys::nics;

use crate::device::network;
use crate::failure::{Fault, Outcome};
use crate::metrics::{Connected, Peer};

/// A connection of a comm, with its name in errors.
pub struct Link {
    /// Declared before the connection, so that the channel's metrics end before the connection closes.
    pub channel: Connected,
    pub conn: Box<dyn Conn>,
    /// The remote address and the NIC.
    pub name: LinkName,
}

/// The name of a connection, shown as `10.0.1.2:4567 over eth1`.
#[derive(Clone, Debug)]
pub struct LinkName {
    peer: SocketAddr,
    nic: Option<String>,
}

impl Link {
    /// Names all connections of a comm. Its peer in metrics has the first connection's remote address.
    ///
    /// # Errors
    /// The list of connections is empty.
    pub fn all(conns: Vec<Box<dyn Conn>>) -> Outcome<(Arc<Peer>, impl ExactSizeIterator<Item = Link>)> {
        let first = conns.first().ok_or_else(|| Fault::usage("the comm has no connection"))?;
        let peer = Peer::at(first.remote().ip());
        let nics = network().addresses().unwrap_or_default();
        let its = peer.clone();
        Ok((peer, conns.into_iter().map(move |conn| Link::new(conn, &nics, &its))))
    }

    fn new(conn: Box<dyn Conn>, nics: &[Nic], peer: &Arc<Peer>) -> Link {
        let local = conn.local().ip();
        let nic = nics::with_address(nics, local).map(|nic| nic.name.clone());
        let channel = peer.channel(&nic.clone().unwrap_or_else(|| local.to_string()), conn.fd());
        let name = LinkName { peer: conn.remote(), nic };
        Link { channel, conn, name }
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
