//! TCP over the kernel's nonblocking sockets.
//!
//! Every connection sets `TCP_NODELAY`, since the engine batches its frames itself, and keepalive, so that
//! the kernel ends an idle connection whose host is gone. `TCP_USER_TIMEOUT` is left alone on purpose: it
//! also ends connections to live peers whose window stays closed because their application is slow. The
//! engine detects a dead path from [`Conn::health`] instead.
//! Invariant: a descriptor is closed only when its connection or listener is dropped.
//! Read next: `tcp/conn.rs`.

mod conn;
mod health;
mod lending;
mod tuning;
mod zero_copy;

#[cfg(test)]
mod tests;

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use socket2::{Domain, Protocol, Socket, Type};

use self::tuning::Path;
use super::{Bound, Conn, ConnOptions, Listener, Nic, Transport};
use ferrywire_sys::fork::Withheld;
use ferrywire_sys::nics::{self, Recent};
use ferrywire_sys::socket;

pub use self::conn::TcpConn;

/// Connections that the kernel queues until they are accepted.
const BACKLOG: i32 = 1024;
/// Seconds without traffic before the first keepalive probe.
const KEEPALIVE_IDLE_S: i32 = 2;
/// Seconds between keepalive probes.
const KEEPALIVE_INTERVAL_S: i32 = 1;
/// Unanswered keepalive probes before the kernel ends the connection.
const KEEPALIVE_PROBES: i32 = 5;

/// Zero of the clock [`TcpTransport::now`].
static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// The transport over the kernel's TCP sockets.
#[derive(Debug, Default)]
pub struct TcpTransport {
    /// Whether the log already says that connections cannot be bound to a device.
    device_refusal_told: AtomicBool,
    /// Cached addresses of this host; a path is classified by them.
    addresses: Arc<Recent>,
    zero_copy: ZeroCopyPolicy,
}

/// On which connections large payload in host memory is sent with `MSG_ZEROCOPY`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ZeroCopyPolicy {
    /// Zero copy on connections between hosts, until the kernel reports that it copies anyway (veth, NICs
    /// without scatter-gather).
    #[default]
    Auto,
    /// Zero copy on every connection, also within a host, whatever the kernel reports. For measurements, and
    /// for tests of the memory that must stay unchanged.
    Always,
}

impl Transport for TcpTransport {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn listen(&self, address: SocketAddr) -> io::Result<Box<dyn Listener>> {
        Ok(Box::new(TcpListener::bind(address, self.addresses.clone(), self.zero_copy)?))
    }

    fn dial(&self, nic: Option<&Nic>, to: SocketAddr, options: &ConnOptions) -> io::Result<Box<dyn Conn>> {
        Ok(Box::new(self.connect(nic, to, options)?))
    }

    fn bind(&self, nic: Option<&Nic>, to: SocketAddr, options: &ConnOptions) -> io::Result<Box<dyn Bound>> {
        let prepared = self.prepare(nic, to, options)?;
        let of_nic = |nic: &Nic| Ok(SocketAddr::new(nic.address, 0));
        let address = nic.map_or_else(|| nics::route_to(prepared.to), of_nic)?;
        prepared.bind(address).map_err(|e| no_port_left(e, address.ip()))?;
        let local = canonical(ip_address(&prepared.socket.local_addr()?)?);
        Ok(Box::new(TcpBound { prepared, local }))
    }

    fn check(&self, options: &ConnOptions) -> io::Result<()> {
        let Some(name) = &options.congestion_control else { return Ok(()) };
        let socket = new_socket(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0))?;
        tuning::check_control(socket.as_raw_fd(), name)
    }

    fn tune(&self, conn: &mut dyn Conn, options: &ConnOptions) {
        conn.tune(options);
    }

    fn nics(&self) -> io::Result<Vec<Nic>> {
        nics::list()
    }

    fn nic_name(&self, address: IpAddr) -> Option<String> {
        let nics = self.addresses().unwrap_or_default();
        nics::with_address(&nics, address).map(|nic| nic.name.clone())
    }

    fn route(&self, to: IpAddr) -> io::Result<IpAddr> {
        nics::route(to)
    }

    fn now(&self) -> Duration {
        START.elapsed()
    }
}

/// A socket that is not connected yet, and the options and addresses that its connection needs.
struct Prepared {
    socket: Socket,
    path: Path,
    to: SocketAddr,
    options: ConnOptions,
    addresses: Arc<Recent>,
    zero_copy: ZeroCopyPolicy,
}

impl Prepared {
    fn bind(&self, address: SocketAddr) -> io::Result<()> {
        self.socket.bind(&address.into())
    }

    fn connect(self) -> io::Result<TcpConn> {
        match self.socket.connect(&self.to.into()) {
            Err(e) if e.raw_os_error() != Some(libc::EINPROGRESS) => return Err(e),
            _ => {}
        }
        tuning::complete(self.socket.as_raw_fd(), self.path, self.options.round_trip, &self.options);
        TcpConn::dialled(self)
    }
}

/// A socket that is bound to its local port and not dialled yet.
struct TcpBound {
    prepared: Prepared,
    local: SocketAddr,
}

impl Bound for TcpBound {
    fn local(&self) -> SocketAddr {
        self.local
    }

    fn connect(self: Box<Self>) -> io::Result<Box<dyn Conn>> {
        Ok(Box::new(self.prepared.connect()?))
    }
}

impl TcpTransport {
    /// A transport that caches this host's addresses for `interval`, so that many connections list the
    /// interfaces once. An address added within the interval may not be known yet.
    pub fn asking_once_in(interval: Duration) -> TcpTransport {
        TcpTransport { addresses: Arc::new(Recent::new(interval)), ..TcpTransport::default() }
    }

    /// Sets on which connections sends avoid a copy.
    pub fn zero_copy(mut self, policy: ZeroCopyPolicy) -> TcpTransport {
        self.zero_copy = policy;
        self
    }

    /// Number of times that the kernel was asked for this host's addresses; for tests.
    pub fn addresses_asked(&self) -> usize {
        self.addresses.asked()
    }

    /// This host's addresses, one [`Nic`] each, without link speeds.
    pub fn addresses(&self) -> io::Result<Arc<[Nic]>> {
        self.addresses.addresses()
    }

    fn connect(&self, nic: Option<&Nic>, to: SocketAddr, options: &ConnOptions) -> io::Result<TcpConn> {
        let prepared = self.prepare(nic, to, options)?;
        if let Some(nic) = nic {
            // connect() then chooses the local port, and may share it among destinations. Best effort: on
            // failure bind() chooses it.
            let fd = prepared.socket.as_raw_fd();
            let _ = socket::set_int(fd, libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, 1);
            prepared.bind(SocketAddr::new(nic.address, 0))?;
        }
        prepared.connect()
    }

    /// A socket with its options set before connecting, bound to the NIC's device.
    fn prepare(&self, nic: Option<&Nic>, to: SocketAddr, options: &ConnOptions) -> io::Result<Prepared> {
        let to = canonical(to);
        let nics = self.addresses()?;
        let socket = new_socket(to)?;
        common_options(&socket)?;
        let path = Path::towards(&nics, nic.map(|nic| nic.address), to.ip());
        tuning::prepare(socket.as_raw_fd(), path, options.round_trip, options)?;
        if let Some(nic) = nic {
            self.bind_to_device(&socket, nic, to, nics::is_local(&nics, to.ip()))?;
        }
        let (options, addresses) = (options.clone(), self.addresses.clone());
        Ok(Prepared { socket, path, to, options, addresses, zero_copy: self.zero_copy })
    }

    /// Binds a socket to the NIC's device. Sockets to an address of this host stay unbound: their packets
    /// travel over loopback, and a socket bound to another device would never see the answer.
    fn bind_to_device(&self, socket: &Socket, nic: &Nic, to: SocketAddr, local_peer: bool) -> io::Result<()> {
        if nic.address.is_ipv4() != to.is_ipv4() {
            let why =
                format!("{} of NIC {} and {to} are of different address families", nic.address, nic.name);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        if !nic.loopback && !local_peer {
            match socket::bind_to_device(socket.as_raw_fd(), &nic.name) {
                Err(e) if e.raw_os_error() == Some(libc::EPERM) => self.tell_device_refusal(nic),
                result => result?,
            }
        }
        Ok(())
    }

    fn tell_device_refusal(&self, nic: &Nic) {
        if !self.device_refusal_told.swap(true, Ordering::Relaxed) {
            tracing::debug!(
                "not permitted to bind sockets to NIC {} (needs CAP_NET_RAW): the routing table chooses the NIC by the local address",
                nic.name
            );
        }
    }
}

/// A listening TCP socket, with the options of its future connections.
#[derive(Debug)]
pub struct TcpListener {
    /// A copy in a forked child would keep the port taken.
    _withheld: Withheld,
    socket: Socket,
    local: SocketAddr,
    addresses: Arc<Recent>,
    zero_copy: ZeroCopyPolicy,
}

impl TcpListener {
    fn bind(
        address: SocketAddr,
        addresses: Arc<Recent>,
        zero_copy: ZeroCopyPolicy,
    ) -> io::Result<TcpListener> {
        let socket = new_socket(address)?;
        socket.set_reuse_address(true)?;
        if address.is_ipv6() && address.ip().is_unspecified() {
            // `net.ipv6.bindv6only` may confine it to IPv6, and endpoints advertise the IPv4 addresses too.
            socket.set_only_v6(false)?;
        }
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        let local = ip_address(&socket.local_addr()?)?;
        let _withheld = Withheld::new(socket.as_fd());
        Ok(TcpListener { _withheld, socket, local, addresses, zero_copy })
    }
}

impl Listener for TcpListener {
    fn accept(&mut self) -> io::Result<Option<Box<dyn Conn>>> {
        loop {
            match self.socket.accept4(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC) {
                Ok((socket, remote)) => {
                    // A connection that is already closed is skipped; the dialling end notices it.
                    if let Ok(conn) = accepted(socket, &remote, self) {
                        return Ok(Some(Box::new(conn)));
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(e) if !is_about_the_connection(&e) => return Err(e),
                Err(_) => {}
            }
        }
    }

    fn local(&self) -> SocketAddr {
        self.local
    }

    fn fd(&self) -> Option<RawFd> {
        Some(self.socket.as_raw_fd())
    }
}

fn accepted(socket: Socket, remote: &socket2::SockAddr, listener: &TcpListener) -> io::Result<TcpConn> {
    common_options(&socket)?;
    let remote = canonical(ip_address(remote)?);
    TcpConn::established(socket, remote, None, listener.addresses.clone(), listener.zero_copy)
}

/// Explains `EADDRINUSE`: a connection whose port is bound before it is dialled shares the port with no other
/// connection, whatever their destinations.
fn no_port_left(error: io::Error, address: IpAddr) -> io::Error {
    if error.kind() != io::ErrorKind::AddrInUse {
        return error;
    }
    let why = format!("no local port of {address} is free: widen net.ipv4.ip_local_port_range");
    io::Error::new(io::ErrorKind::AddrInUse, why)
}

/// Whether accept() reports a failure of the incoming connection, not of the listener.
fn is_about_the_connection(error: &io::Error) -> bool {
    const PASSED_ON: [i32; 10] = [
        libc::EINTR,
        libc::ECONNABORTED,
        libc::ENETDOWN,
        libc::EPROTO,
        libc::ENOPROTOOPT,
        libc::EHOSTDOWN,
        libc::ENONET,
        libc::EHOSTUNREACH,
        libc::EOPNOTSUPP,
        libc::ENETUNREACH,
    ];
    error.raw_os_error().is_some_and(|errno| PASSED_ON.contains(&errno))
}

fn new_socket(address: SocketAddr) -> io::Result<Socket> {
    Socket::new(Domain::for_address(address), Type::STREAM.nonblocking().cloexec(), Some(Protocol::TCP))
}

fn common_options(socket: &Socket) -> io::Result<()> {
    let fd = socket.as_raw_fd();
    socket::set_int(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, 1)?;
    socket::set_int(fd, libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, KEEPALIVE_IDLE_S)?;
    socket::set_int(fd, libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)?;
    socket::set_int(fd, libc::IPPROTO_TCP, libc::TCP_KEEPCNT, KEEPALIVE_PROBES)?;
    socket::set_int(fd, libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1)
}

fn ip_address(address: &socket2::SockAddr) -> io::Result<SocketAddr> {
    address.as_socket().ok_or_else(|| io::Error::from(io::ErrorKind::AddrNotAvailable))
}

/// Converts an IPv4-mapped IPv6 address, as an IPv6 listener reports it, to IPv4.
fn canonical(address: SocketAddr) -> SocketAddr {
    match address.ip().to_canonical() {
        IpAddr::V4(v4) => SocketAddr::new(v4.into(), address.port()),
        IpAddr::V6(_) => address,
    }
}
