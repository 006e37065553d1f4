//! The traits of a network: [`Transport`] listens and dials, [`Conn`] carries bytes.
//!
//! Invariant: no call blocks; a call that cannot proceed returns `WouldBlock`.
//! Read next: `tcp.rs`, `sim/`.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use ferrywire_proto::limits;
use ferrywire_sys::IoVec;
use ferrywire_sys::nics::Nic;

/// State of the network path under a connection, for dead-path detection and reports.
#[derive(Clone, Copy, Debug, Default)]
pub struct PathHealth {
    /// The peer's kernel has data or a window probe to acknowledge.
    pub waiting: bool,
    /// Number of retransmissions or window probes in a row without an answer.
    pub unanswered: u32,
    /// How long this end has waited for an answer without one; zero when `waiting` is false.
    pub silent_for: Duration,
    /// Smoothed round-trip time; zero where unknown.
    pub rtt: Duration,
    /// Shortest round-trip time of the last minutes; zero where unknown.
    pub min_rtt: Duration,
    /// Bytes of the stream that the peer's kernel has acknowledged. The count may include TCP's SYN.
    pub acked_bytes: u64,
    /// Most payload bytes of one packet (MSS); zero where unknown.
    pub mss_bytes: u32,
    /// Packets retransmitted on this connection; zero where unknown.
    pub retransmits: u32,
    /// Congestion window in bytes; zero where unknown.
    pub congestion_window_bytes: u64,
    /// Bytes written to the socket and never sent.
    pub unsent_bytes: u32,
}

impl PathHealth {
    /// Whether the path counts as dead: data waits, at least two retransmissions are unanswered, and the peer
    /// has been silent for [`PATH_DEAD_AFTER`](limits::PATH_DEAD_AFTER).
    pub fn is_dead(&self) -> bool {
        self.waiting && self.unanswered >= UNANSWERED_MIN && self.silent_for >= limits::PATH_DEAD_AFTER
    }

    /// The silence of the peer's host as text for an error message.
    pub fn describe(&self) -> String {
        let (silent, unanswered) = (self.silent_for.as_secs_f64(), self.unanswered);
        format!("no answer from the peer's host for {silent:.1} s after {unanswered} retransmissions")
    }
}

/// Unanswered retransmissions before a path counts as dead; a single one may be a lost packet.
const UNANSWERED_MIN: u32 = 2;

/// A reliable, ordered byte stream that never blocks.
///
/// Errors: `WouldBlock` when a call cannot proceed now, also while connecting. `EFAULT` concerns the memory
/// of that call only. Every other error is final.
pub trait Conn: Send {
    /// Sends from `pieces` in order; returns the bytes taken, at least 1.
    ///
    /// # Safety
    /// Each piece must be readable for the length of the call.
    unsafe fn send(&mut self, pieces: &[IoVec]) -> io::Result<usize>;

    /// Whether [`send_stable`](Conn::send_stable) may avoid a copy on this connection.
    fn zero_copy(&self) -> bool {
        false
    }

    /// Sends like [`send`](Conn::send), from memory that stays unchanged until [`released`](Conn::released)
    /// has passed it.
    ///
    /// # Safety
    /// Each piece must stay readable until `released` counts its bytes, or the connection is dropped.
    unsafe fn send_stable(&mut self, pieces: &[IoVec]) -> io::Result<usize> {
        // SAFETY: the caller promises that the pieces are readable for longer than the call.
        unsafe { self.send(pieces) }
    }

    /// How many bytes from the start of the stream have their source memory released. `u64::MAX` when sends
    /// always copy.
    fn released(&mut self) -> u64 {
        u64::MAX
    }

    /// Aborts the connection: the kernel starts no further packet from memory that `send_stable` was given. A
    /// NIC may still read packets that it already holds, until [`released`](Conn::released) counts their
    /// bytes.
    fn abort(&mut self) {
        self.shutdown();
    }

    /// Whether [`send_lent`](Conn::send_lent) may avoid a copy.
    fn lends(&self) -> bool {
        false
    }

    /// Sends like [`send`](Conn::send); the other end may read the last piece directly from its pages.
    ///
    /// # Safety
    /// The pieces must be readable for the length of the call. No code may write to the last piece until the
    /// other end is known to have received it. Where that never becomes known, its pages must be returned to
    /// the system first.
    unsafe fn send_lent(&mut self, pieces: &[IoVec]) -> io::Result<usize> {
        // SAFETY: the caller promises that the pieces are readable for longer than the call.
        unsafe { self.send(pieces) }
    }

    /// Notes that the other end has taken the first `bytes` bytes that this connection has sent out of its
    /// kernel. A connection that lends memory of its own may use that memory again.
    fn placed(&mut self, _bytes: u64) {}

    /// Receives into `pieces` in order; returns the bytes received, 0 at the end of the stream.
    ///
    /// # Safety
    /// Each piece must be writable for the length of the call.
    unsafe fn recv(&mut self, pieces: &[IoVec]) -> io::Result<usize>;

    /// Sends from a byte slice; returns the bytes taken, at least 1.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // SAFETY: `send` reads its pieces only, and the borrow keeps these bytes readable for the length of the call.
        unsafe { self.send(&[IoVec::new(bytes.as_ptr().cast_mut(), bytes.len())]) }
    }

    /// Receives into a byte slice; returns the bytes received, 0 at the end of the stream.
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        // SAFETY: the exclusive borrow keeps these bytes writable for the length of the call.
        unsafe { self.recv(&[IoVec::new(buffer.as_mut_ptr(), buffer.len())]) }
    }

    /// Whether this connection holds bytes that `send` has taken and the kernel has not. They move with the next `send`,
    /// or with [`flush`](Conn::flush).
    fn has_unsent(&self) -> bool {
        false
    }

    /// Hands the bytes that this connection holds to the kernel; `WouldBlock` if some are left.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Whether this connection holds received bytes, which `recv` may return although the descriptor is not
    /// readable.
    fn has_received(&self) -> bool {
        false
    }

    /// Received bytes of an incomplete record, which `recv` returns only after the rest of the record has
    /// arrived.
    fn begun_bytes(&self) -> usize {
        0
    }

    /// Whether both ends have addresses of this host and the round trip between them is short.
    fn within_host(&self) -> bool {
        false
    }

    /// Whether the connection's round trip is known to be long.
    fn is_long(&self) -> bool {
        false
    }

    /// Bytes taken by `send` that have not left this host yet.
    fn unsent_bytes(&self) -> usize {
        0
    }

    /// The health of the connection's network path.
    fn health(&self) -> PathHealth;

    /// Shuts down both directions at once; nothing is received afterwards. Idempotent.
    fn shutdown(&mut self);

    /// The descriptor to wait on; `None` when the connection must be polled.
    fn fd(&self) -> Option<RawFd>;

    /// Local address of the connection.
    fn local(&self) -> SocketAddr;

    /// Remote address of the connection.
    fn remote(&self) -> SocketAddr;

    /// Applies options to the connection, as [`Transport::tune`] does.
    fn tune(&mut self, _options: &ConnOptions) {}

    /// Sizes of the send and receive socket buffers as the kernel counts them; zero where there are none.
    fn buffer_bytes(&self) -> (usize, usize) {
        (0, 0)
    }

    /// Name of the congestion control, for reports.
    fn congestion_control(&self) -> String {
        String::from("none")
    }
}

/// A connection that has a local port but is not dialled yet, so the port can be announced to the peer in advance.
pub trait Bound: Send {
    /// Local address and port of the future connection.
    fn local(&self) -> SocketAddr;
    /// Starts the connection, as [`Transport::dial`] does.
    fn connect(self: Box<Self>) -> io::Result<Box<dyn Conn>>;
}

/// Accepts incoming connections on one address.
pub trait Listener: Send {
    /// Accepts the next connection; `None` when none is waiting.
    fn accept(&mut self) -> io::Result<Option<Box<dyn Conn>>>;
    /// The local address, with the port that was chosen.
    fn local(&self) -> SocketAddr;
    /// The descriptor to wait on; `None` when the listener must be polled.
    fn fd(&self) -> Option<RawFd>;
}

/// Options of a connection. Control connections use the default, data connections set `bulk`.
#[derive(Clone, Debug, Default)]
pub struct ConnOptions {
    /// Tune for bulk data (large buffers, congestion control by path) instead of control messages.
    pub bulk: bool,
    /// The peer runs on this host although its address does not show it (container, network namespace).
    pub same_host: bool,
    /// Shortest round-trip time of other connections to this peer; zero where unknown.
    pub round_trip: Duration,
    /// Data connections of one progress thread, which share the cache of one core.
    pub per_thread: usize,
    /// Congestion control by name; `None` lets the transport choose.
    pub congestion_control: Option<String>,
    /// Size of each socket buffer in bytes; `None` lets the transport choose.
    pub socket_buffer_bytes: Option<usize>,
}

/// A network: creates listeners and connections, and knows this host's NICs.
pub trait Transport: Send + Sync + fmt::Debug {
    /// A short name for reports: `tcp` or `sim`.
    fn name(&self) -> &'static str;

    /// Listens on an address; port 0 lets the system choose one.
    fn listen(&self, address: SocketAddr) -> io::Result<Box<dyn Listener>>;

    /// Starts a connection to `to`; bytes can move once the peer's host has answered. `nic` binds the
    /// connection to that NIC and its address.
    fn dial(&self, nic: Option<&Nic>, to: SocketAddr, options: &ConnOptions) -> io::Result<Box<dyn Conn>>;

    /// Reserves a local address and port for a connection to `to` that is dialled later.
    fn bind(&self, nic: Option<&Nic>, to: SocketAddr, options: &ConnOptions) -> io::Result<Box<dyn Bound>>;

    /// Whether data connections can have these options on this host. The error says which values are
    /// available.
    fn check(&self, _options: &ConnOptions) -> io::Result<()> {
        Ok(())
    }

    /// Applies options to an accepted connection, once it is known to carry data.
    fn tune(&self, conn: &mut dyn Conn, options: &ConnOptions);

    /// The NICs of this host that have an address, loopback included.
    fn nics(&self) -> io::Result<Vec<Nic>>;

    /// Name of the NIC that currently has this address.
    fn nic_name(&self, address: IpAddr) -> Option<String> {
        let nics = self.nics().unwrap_or_default();
        nics.into_iter().find(|nic| nic.address == address.to_canonical()).map(|nic| nic.name)
    }

    /// The local address that the routing table selects for a connection to `to`.
    fn route(&self, to: IpAddr) -> io::Result<IpAddr>;

    /// Time since a fixed moment of the transport's clock; `sim` counts on its own clock.
    fn now(&self) -> Duration;

    /// A random number for a session, which no other host can guess; those of `sim` follow from its seed.
    fn session_number(&self) -> u64 {
        ferrywire_sys::random::random_u64()
    }
}

/// A transport shared between threads.
pub type SharedTransport = Arc<dyn Transport>;
