//! The real network: nonblocking TCP sockets.
//!
//! Every connection has `TCP_NODELAY` (the engine gathers its frames itself) and keepalive (the kernel ends
//! a connection whose host is gone while nothing is in flight). `TCP_USER_TIMEOUT` is left alone on purpose:
//! it also ends connections to peers that are alive and keep their window shut because their user is slow.
//! A dead path is found by the engine instead, from [`Conn::health`].
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
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use socket2::{Domain, Protocol, Socket, Type};

use self::tuning::Path;
use super::{Bound, Conn, ConnOptions, Listener, Nic, Transport};
use ferrywire_sys::nics::{self, Recent};
use ferrywire_sys::socket;

pub use self::conn::TcpConn;

/// Connections that the kernel keeps for us until they are accepted.
const BACKLOG: i32 = 1024;
/// An idle connection is probed after this many seconds,
const KEEPALIVE_IDLE_S: i32 = 2;
/// then this often,
const KEEPALIVE_INTERVAL_S: i32 = 1;
/// and given up after this many probes without an answer.
const KEEPALIVE_PROBES: i32 = 5;

/// The moment that [`TcpTransport::now`] counts from.
static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// TCP through the kernel's sockets.
#[derive(Debug, Default)]
pub struct TcpTransport {
    /// It has been said that connections cannot be bound to a device.
    device_refusal_told: AtomicBool,
    /// This host's, which paths are judged by.
    addresses: Arc<Recent>,
    zero_copy: ZeroCopyPolicy,
}

/// Where large payload of host memory is sent without a copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ZeroCopyPolicy {
    /// Between hosts, until the kernel says that it copies all the same (veth, NICs without scatter-gather).
    #[default]
    Auto,
    /// On every connection, within a host too, and whatever the kernel says: to measure what it costs, and to test what
    /// memory must stay unchanged for.
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

/// A socket on its way to be a connection.
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

/// A connection with a port of its own.
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
    /// Asks for this host's addresses at most once an interval, whatever the number of connections. Those that are newer
    /// may not be known yet.
    pub fn asking_once_in(interval: Duration) -> TcpTransport {
        TcpTransport { addresses: Arc::new(Recent::new(interval)), ..TcpTransport::default() }
    }

    /// Sends without copies as `policy` says.
    pub fn zero_copy(mut self, policy: ZeroCopyPolicy) -> TcpTransport {
        self.zero_copy = policy;
        self
    }

    /// How often the kernel was asked for those.
    pub fn addresses_asked(&self) -> usize {
        self.addresses.asked()
    }

    /// This host's addresses, one NIC each, without speeds.
    pub fn addresses(&self) -> io::Result<Arc<[Nic]>> {
        self.addresses.addresses()
    }

    fn connect(&self, nic: Option<&Nic>, to: SocketAddr, options: &ConnOptions) -> io::Result<TcpConn> {
        let prepared = self.prepare(nic, to, options)?;
        if let Some(nic) = nic {
            // The port is chosen by connect(), which can share one among destinations. Only a hint.
            let fd = prepared.socket.as_raw_fd();
            let _ = socket::set_int(fd, libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, 1);
            prepared.bind(SocketAddr::new(nic.address, 0))?;
        }
        prepared.connect()
    }

    /// A tuned socket, bound to its device.
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

    /// Binds a connection to the NIC, unless the peer is on this host: such packets travel over loopback,
    /// where a socket bound to another device would not see the answer.
    fn bind_to_device(&self, socket: &Socket, nic: &Nic, to: SocketAddr, local_peer: bool) -> io::Result<()> {
        if nic.address.is_ipv4() != to.is_ipv4() {
            let why = format!("{} of {} and {to} are of different families", nic.address, nic.name);
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
            tracing::debug!("not allowed to bind to {}: its address alone chooses the route", nic.name);
        }
    }
}

/// A listening TCP socket.
#[derive(Debug)]
pub struct TcpListener {
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
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        let local = ip_address(&socket.local_addr()?)?;
        Ok(TcpListener { socket, local, addresses, zero_copy })
    }
}

impl Listener for TcpListener {
    fn accept(&mut self) -> io::Result<Option<Box<dyn Conn>>> {
        loop {
            match self.socket.accept4(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC) {
                Ok((socket, remote)) => {
                    // One that is gone already is the dialler's business; the next may be fine.
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

/// A connection that has its port before it is dialled shares it with no other, whatever their destinations.
fn no_port_left(error: io::Error, address: IpAddr) -> io::Error {
    if error.kind() != io::ErrorKind::AddrInUse {
        return error;
    }
    let why = format!("no port of {address} is free (sysctl net.ipv4.ip_local_port_range)");
    io::Error::new(io::ErrorKind::AddrInUse, why)
}

/// Errors that accept() passes on from a connection that failed before it was taken.
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

/// IPv4 addresses that an IPv6 listener reports as mapped ones, in their own form.
fn canonical(address: SocketAddr) -> SocketAddr {
    match address.ip().to_canonical() {
        IpAddr::V4(v4) => SocketAddr::new(v4.into(), address.port()),
        IpAddr::V6(_) => address,
    }
}
