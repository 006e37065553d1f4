//! What is reached, and how it is called, where payload goes over lanes; all else is the transport's beside them.
//!
//! Read next: `carrier.rs`.

use super::{Bound, Conn, ConnOptions, Listener, Nic, SharedTransport, Transport};
use crate::memory::Place;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

/// A transport with payload over lanes beside its connections.
#[derive(Debug)]
pub(crate) struct BesideTransport {
    pub inner: SharedTransport,
    /// Whose memory the lanes move, beside the host's.
    pub gpu: Option<Place>,
    pub name: &'static str,
}

impl Transport for BesideTransport {
    fn name(&self) -> &'static str {
        self.name
    }

    fn reaches(&self, place: Place) -> bool {
        place == Place::Host || self.gpu == Some(place)
    }

    fn listen(&self, address: SocketAddr) -> io::Result<Box<dyn Listener>> {
        self.inner.listen(address)
    }

    fn dial(&self, nic: Option<&Nic>, to: SocketAddr, options: &ConnOptions) -> io::Result<Box<dyn Conn>> {
        self.inner.dial(nic, to, options)
    }

    fn bind(&self, nic: Option<&Nic>, to: SocketAddr, options: &ConnOptions) -> io::Result<Box<dyn Bound>> {
        self.inner.bind(nic, to, options)
    }

    fn check(&self, options: &ConnOptions) -> io::Result<()> {
        self.inner.check(options)
    }

    fn tune(&self, conn: &mut dyn Conn, options: &ConnOptions) {
        self.inner.tune(conn, options);
    }

    fn nics(&self) -> io::Result<Vec<Nic>> {
        self.inner.nics()
    }

    fn nic_name(&self, address: IpAddr) -> Option<String> {
        self.inner.nic_name(address)
    }

    fn route(&self, to: IpAddr) -> io::Result<IpAddr> {
        self.inner.route(to)
    }

    fn now(&self) -> Duration {
        self.inner.now()
    }
}
