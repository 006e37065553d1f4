//! Endpoints over TCP that is watched, or held up, call by call.
//!
//! A [`Watcher`] sees what the engine asks of its transport, where the public API shows nothing of it.

mod descriptors;
mod lent;
mod notices;
mod paths;
mod stuck;

use ferrywire::{Endpoint, Peer};
use ferrywire_net::tcp::TcpTransport;
use ferrywire_net::{Bound, Conn, ConnOptions, IoVec, Listener, Nic, PathHealth, Transport};
use std::fmt::Debug;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);

/// Waits until something is so.
fn eventually(what: &str, mut so: impl FnMut() -> bool) {
    // Looks are counted, so that time in which this process was stopped is not.
    const BETWEEN: Duration = Duration::from_millis(5);
    for _ in 0..LIMIT.as_millis() / BETWEEN.as_millis() {
        if so() {
            return;
        }
        thread::sleep(BETWEEN);
    }
    panic!("never came about: {what}");
}

/// Callbacks for calls of the engine.
trait Watcher: Debug + Send + Sync + 'static {
    /// Accepting a connection failed, for this reason.
    fn accept_failed(&self, _error: &io::Error) {}
    /// At most `bytes` are about to be received.
    fn receiving(&self, _bytes: usize) {}
    /// Whether a channel's connection is broken from now on, and dialled in vain.
    fn is_cut(&self, _channel: u64) -> bool {
        false
    }
    /// A channel's path is checked.
    fn looking_at_path(&self) {}
    /// Whether large pieces go out without copies, which ferrywire leaves off over loopback.
    fn sends_without_copies(&self) -> bool {
        false
    }
    /// The kernel's notices of so many such sends were read.
    fn noticed(&self, _sends: u64) {}
    /// The kernel has taken so many bytes in one call, in which the last piece was lent or none.
    fn sent(&self, _bytes: usize, _lent: bool) {}
}

/// TCP, and who watches it.
#[derive(Debug)]
struct Watched<W> {
    tcp: TcpTransport,
    watcher: Arc<W>,
    /// Connections of channels that were bound so far.
    dialled: AtomicU64,
}

impl<W: Watcher> Watched<W> {
    fn new(watcher: &Arc<W>) -> Arc<Watched<W>> {
        Arc::new(Watched {
            tcp: TcpTransport::default(),
            watcher: watcher.clone(),
            dialled: AtomicU64::new(0),
        })
    }

    fn watch(&self, conn: Box<dyn Conn>, channel: Option<u64>) -> Box<dyn Conn> {
        Box::new(WatchedConn::new(conn, channel, self.watcher.clone()))
    }
}

impl<W: Watcher> Transport for Watched<W> {
    fn name(&self) -> &'static str {
        self.tcp.name()
    }

    fn listen(&self, address: SocketAddr) -> io::Result<Box<dyn Listener>> {
        Ok(Box::new(WatchedListener { listener: self.tcp.listen(address)?, watcher: self.watcher.clone() }))
    }

    fn dial(&self, nic: Option<&Nic>, to: SocketAddr, options: &ConnOptions) -> io::Result<Box<dyn Conn>> {
        self.tcp.dial(nic, to, options).map(|conn| self.watch(conn, None))
    }

    fn bind(&self, nic: Option<&Nic>, to: SocketAddr, options: &ConnOptions) -> io::Result<Box<dyn Bound>> {
        let bound = self.tcp.bind(nic, to, options)?;
        let channel = self.dialled.fetch_add(1, Ordering::SeqCst);
        Ok(Box::new(WatchedBound { bound, channel, watcher: self.watcher.clone() }))
    }

    fn tune(&self, conn: &mut dyn Conn, options: &ConnOptions) {
        self.tcp.tune(conn, options);
    }

    fn nics(&self) -> io::Result<Vec<Nic>> {
        self.tcp.nics()
    }

    fn route(&self, to: IpAddr) -> io::Result<IpAddr> {
        self.tcp.route(to)
    }

    fn now(&self) -> Duration {
        self.tcp.now()
    }
}

struct WatchedBound<W> {
    bound: Box<dyn Bound>,
    channel: u64,
    watcher: Arc<W>,
}

impl<W: Watcher> Bound for WatchedBound<W> {
    fn local(&self) -> SocketAddr {
        self.bound.local()
    }

    fn connect(self: Box<Self>) -> io::Result<Box<dyn Conn>> {
        let WatchedBound { bound, channel, watcher } = *self;
        Ok(Box::new(WatchedConn::new(bound.connect()?, Some(channel), watcher)))
    }
}

struct WatchedListener<W> {
    listener: Box<dyn Listener>,
    watcher: Arc<W>,
}

impl<W: Watcher> Listener for WatchedListener<W> {
    fn accept(&mut self) -> io::Result<Option<Box<dyn Conn>>> {
        let result = self.listener.accept();
        result.as_ref().err().iter().for_each(|error| self.watcher.accept_failed(error));
        let watch = |conn| -> Box<dyn Conn> { Box::new(WatchedConn::new(conn, None, self.watcher.clone())) };
        result.map(|conn| conn.map(watch))
    }

    fn local(&self) -> SocketAddr {
        self.listener.local()
    }

    fn fd(&self) -> Option<RawFd> {
        self.listener.fd()
    }
}

struct WatchedConn<W> {
    conn: Box<dyn Conn>,
    /// The number of a dialled channel's connection, in the order of binding.
    channel: Option<u64>,
    watcher: Arc<W>,
    uncopied: Uncopied,
}

/// The sends of a connection that left the memory in place.
#[derive(Default)]
struct Uncopied {
    sent_bytes: u64,
    /// Such sends that the kernel has not reported.
    unfinished: u64,
    /// Bytes sent when the kernel had reported all of them.
    released_bytes: u64,
}

impl<W: Watcher> WatchedConn<W> {
    fn new(conn: Box<dyn Conn>, channel: Option<u64>, watcher: Arc<W>) -> WatchedConn<W> {
        WatchedConn { conn, channel, watcher, uncopied: Uncopied::default() }
    }

    fn took(&mut self, result: io::Result<usize>) -> io::Result<usize> {
        self.uncopied.sent_bytes += *result.as_ref().unwrap_or(&0) as u64;
        result
    }
}

impl<W: Watcher> Conn for WatchedConn<W> {
    unsafe fn send(&mut self, pieces: &[IoVec]) -> io::Result<usize> {
        // SAFETY: promised by the caller.
        let sent = unsafe { self.conn.send(pieces) };
        self.watcher.sent(*sent.as_ref().unwrap_or(&0), false);
        self.took(sent)
    }

    fn lends(&self) -> bool {
        self.conn.lends()
    }

    unsafe fn send_lent(&mut self, pieces: &[IoVec]) -> io::Result<usize> {
        // SAFETY: promised by the caller.
        let sent = unsafe { self.conn.send_lent(pieces) };
        self.watcher.sent(*sent.as_ref().unwrap_or(&0), true);
        self.took(sent)
    }

    fn zero_copy(&self) -> bool {
        self.watcher.sends_without_copies()
    }

    unsafe fn send_stable(&mut self, pieces: &[IoVec]) -> io::Result<usize> {
        let fd = self.conn.fd().filter(|_| self.watcher.sends_without_copies());
        // SAFETY: promised by the caller.
        let Some(fd) = fd else { return unsafe { self.send(pieces) } };
        // SAFETY: likewise.
        let sent = unsafe { send_uncopied(fd, pieces) };
        if sent.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::ENOBUFS)) {
            // The sends in flight exhaust the limit of locked memory.
            // SAFETY: promised by the caller.
            return unsafe { self.send(pieces) };
        }
        self.uncopied.unfinished += u64::from(sent.is_ok());
        self.took(sent)
    }

    fn released(&mut self) -> u64 {
        let Some(fd) = self.conn.fd().filter(|_| self.watcher.sends_without_copies()) else {
            return u64::MAX;
        };
        let finished = take_notices(fd);
        self.watcher.noticed(finished);
        self.uncopied.unfinished -= finished;
        if self.uncopied.unfinished == 0 {
            self.uncopied.released_bytes = self.uncopied.sent_bytes;
        }
        self.uncopied.released_bytes
    }

    unsafe fn recv(&mut self, pieces: &[IoVec]) -> io::Result<usize> {
        if self.channel.is_some_and(|channel| self.watcher.is_cut(channel)) {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        self.watcher.receiving(pieces.iter().map(|piece| piece.len).sum());
        // SAFETY: promised by the caller.
        unsafe { self.conn.recv(pieces) }
    }

    fn health(&self) -> PathHealth {
        if self.channel.is_some() {
            self.watcher.looking_at_path();
        }
        self.conn.health()
    }

    fn shutdown(&mut self) {
        self.conn.shutdown();
    }

    fn fd(&self) -> Option<RawFd> {
        self.conn.fd()
    }

    fn local(&self) -> SocketAddr {
        self.conn.local()
    }

    fn remote(&self) -> SocketAddr {
        self.conn.remote()
    }
}

/// An endpoint that is watched, another that does nothing unless it is turned, and the first one's peer there.
fn towards_an_end_that_is_not_polled<W: Watcher>(watcher: &Arc<W>) -> (Endpoint, Endpoint, Peer) {
    let builder = || Endpoint::builder().channels(1).peer_timeout(LIMIT * 10);
    let there = builder().listen("127.0.0.1:0".parse().unwrap()).threads(0).build().unwrap();
    let here = builder().threads(1).transport(Watched::new(watcher)).build().unwrap();
    let connecting = here.start_connect(there.listen_addresses()[0]).unwrap();
    let mut connected = None;
    eventually("they are connected", || {
        there.progress();
        connected = connected.take().or_else(|| connecting.poll());
        connected.is_some()
    });
    (here, there, connected.unwrap().unwrap())
}

/// Of one uncopied send: less than any receiver's window, and than the limit of locked memory.
const UNCOPIED_BYTES_MAX: usize = 16 << 10;

/// Sends some, and has the kernel read the memory where it is.
///
/// # Safety
/// Each piece stays readable until the kernel has reported that the send is finished.
unsafe fn send_uncopied(fd: RawFd, pieces: &[IoVec]) -> io::Result<usize> {
    let on: libc::c_int = 1;
    let size = size_of_val(&on) as libc::socklen_t;
    // SAFETY: the option is an integer.
    unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_ZEROCOPY, (&raw const on).cast(), size) };
    let mut room = UNCOPIED_BYTES_MAX;
    let part = |piece: &IoVec| {
        let iov_len = piece.len.min(room);
        room -= iov_len;
        libc::iovec { iov_base: piece.base.cast(), iov_len }
    };
    let mut pieces: Vec<libc::iovec> = pieces.iter().map(part).filter(|part| part.iov_len > 0).collect();
    // SAFETY: all zero is a message without anything.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (pieces.as_mut_ptr(), pieces.len());
    let flags = libc::MSG_ZEROCOPY | libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the message names pieces that are readable for as long as the kernel reads them, as promised.
    let sent = unsafe { libc::sendmsg(fd, &raw const message, flags) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// Reads all notices of a socket; the number of sends that they are about.
fn take_notices(fd: RawFd) -> u64 {
    let mut sends = 0;
    loop {
        let mut control = [0_u64; 16];
        // SAFETY: all zero is a message without anything.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(&control);
        // SAFETY: the message has room for what it says.
        if unsafe { libc::recvmsg(fd, &raw mut message, libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT) } < 0 {
            return sends;
        }
        // SAFETY: the kernel wrote whole control messages; a `sock_extended_err` follows the head of the first.
        let reported = unsafe {
            let head = libc::CMSG_FIRSTHDR(&raw const message);
            assert!(!head.is_null());
            libc::CMSG_DATA(head).cast::<libc::sock_extended_err>().read_unaligned()
        };
        sends += u64::from(reported.ee_data - reported.ee_info) + 1;
    }
}
