//! What a network is to the engine: a [`Transport`] that listens and dials, and a [`Conn`] that carries bytes.
//!
//! Invariant: no call blocks; what cannot be done now is `WouldBlock`. Read next: `tcp.rs`, `sim/`.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use ferrywire_proto::limits;
use ferrywire_sys::IoVec;
use ferrywire_sys::nics::Nic;

/// What is known about the path under a connection.
#[derive(Clone, Copy, Debug, Default)]
pub struct PathHealth {
    /// Data (or a window probe) is unacknowledged by the peer's kernel.
    pub waiting: bool,
    /// Retransmissions or probes in a row without an answer.
    pub unanswered: u32,
    /// Time since the peer's kernel last acknowledged anything, while something waited.
    pub silent_for: Duration,
    /// Smoothed round trip, zero where unknown.
    pub rtt: Duration,
    /// The shortest round trip of the last minutes, zero where unknown.
    pub min_rtt: Duration,
    /// Bytes of the stream that the peer's kernel has acknowledged, give or take those of the handshake.
    pub acked_bytes: u64,
    /// Payload of a packet at most, in bytes; zero where unknown.
    pub mss_bytes: u32,
}

impl PathHealth {
    /// Whether there is every reason to give the path up.
    pub fn is_dead(&self) -> bool {
        self.waiting && self.unanswered >= UNANSWERED_MIN && self.silent_for >= limits::PATH_DEAD_AFTER
    }

    /// The silence in words.
    pub fn describe(&self) -> String {
        let (silent, unanswered) = (self.silent_for.as_secs_f64(), self.unanswered);
        format!("no answer from the peer's host for {silent:.1} s after {unanswered} retransmissions")
    }
}

/// Retransmissions without an answer before a path counts as dead.
const UNANSWERED_MIN: u32 = 2;

/// A reliable, ordered byte stream that never blocks.
///
/// Errors: `WouldBlock` when nothing can be done now (also while connecting); anything else is final.
pub trait Conn: Send {
    /// Sends from the pieces in order; returns the bytes taken, at least 1.
    ///
    /// # Safety
    /// Each piece must be readable for the length of the call.
    unsafe fn send(&mut self, pieces: &[IoVec]) -> io::Result<usize>;

    /// Whether `send_stable` may spare a copy here; found out per connection, and remembered.
    fn zero_copy(&self) -> bool {
        false
    }

    /// Like `send`, of memory that the caller keeps unchanged until `released` has passed it.
    ///
    /// # Safety
    /// Each piece must stay readable until `released` counts its bytes, or the connection is dropped.
    unsafe fn send_stable(&mut self, pieces: &[IoVec]) -> io::Result<usize> {
        // SAFETY: readable for longer than the call, as promised by the caller.
        unsafe { self.send(pieces) }
    }

    /// Bytes of the stream, counted from its start, whose source memory is free again.
    /// `u64::MAX` when `send` always copies.
    fn released(&mut self) -> u64 {
        u64::MAX
    }

    /// Aborts the connection: nothing more of what `send_stable` was given is put on its way. What a NIC holds already is
    /// read until [`released`](Conn::released) counts it.
    fn abort(&mut self) {
        self.shutdown();
    }

    /// Whether `send_lent` may spare a copy here.
    fn lends(&self) -> bool {
        false
    }

    /// Like `send`, of pieces whose last one may be read where it is, until the other end has received it.
    ///
    /// # Safety
    /// As of `send`; and nobody writes to the last piece until the other end is known to have received it. If that never
    /// becomes known, not before its pages have been given back to the system.
    unsafe fn send_lent(&mut self, pieces: &[IoVec]) -> io::Result<usize> {
        // SAFETY: readable for longer than the call, as promised by the caller.
        unsafe { self.send(pieces) }
    }

    /// Receives into the pieces in order; returns the bytes placed, 0 at the end of the stream.
    ///
    /// # Safety
    /// Each piece must be writable for the length of the call.
    unsafe fn recv(&mut self, pieces: &[IoVec]) -> io::Result<usize>;

    /// Sends from plain bytes; returns how many were taken, at least 1.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // SAFETY: `send` reads its pieces only, and the borrow keeps these bytes readable for the length of the call.
        unsafe { self.send(&[IoVec::new(bytes.as_ptr().cast_mut(), bytes.len())]) }
    }

    /// Receives into plain bytes; returns how many were placed, 0 at the end of the stream.
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        // SAFETY: the exclusive borrow keeps these bytes writable for the length of the call.
        unsafe { self.recv(&[IoVec::new(buffer.as_mut_ptr(), buffer.len())]) }
    }

    /// Whether both ends have addresses of this host, and nothing slow between them.
    fn within_host(&self) -> bool {
        false
    }

    /// Whether its round trip is known to be long.
    fn is_long(&self) -> bool {
        false
    }

    /// Bytes handed to `send` that have not left this host yet.
    fn unsent_bytes(&self) -> usize {
        0
    }

    /// The state of the path, for dead-path detection.
    fn health(&self) -> PathHealth;

    /// Ends both directions at once. Idempotent. Nothing is received afterwards.
    fn shutdown(&mut self);

    /// The descriptor to wait on, or `None` when the connection must be polled.
    fn fd(&self) -> Option<RawFd>;

    /// This end's address.
    fn local(&self) -> SocketAddr;

    /// The other end's address.
    fn remote(&self) -> SocketAddr;

    /// Applies options; see [`Transport::tune`].
    fn tune(&mut self, _options: &ConnOptions) {}

    /// Sizes of its socket buffers as the kernel counts them, to send and to receive; zero without any.
    fn buffer_bytes(&self) -> (usize, usize) {
        (0, 0)
    }

    /// Which congestion control carries it, for reports.
    fn congestion_control(&self) -> String {
        String::from("none")
    }
}

/// A connection that has its own address and port, and is not dialled yet: whoever waits for it can be
/// told which one it will be.
pub trait Bound: Send {
    /// This end's address.
    fn local(&self) -> SocketAddr;
    /// Starts the connection, as [`Transport::dial`] does.
    fn connect(self: Box<Self>) -> io::Result<Box<dyn Conn>>;
}

/// Where connections arrive.
pub trait Listener: Send {
    /// The next connection, or `None` when there is none now.
    fn accept(&mut self) -> io::Result<Option<Box<dyn Conn>>>;
    /// The address that is listened on, with its real port.
    fn local(&self) -> SocketAddr;
    /// The descriptor to wait on, or `None` when it must be polled.
    fn fd(&self) -> Option<RawFd>;
}

/// What a data connection is tuned for; control connections use the default.
#[derive(Clone, Debug, Default)]
pub struct ConnOptions {
    /// Bulk data (large buffers, congestion control for short paths) rather than control.
    pub bulk: bool,
    /// The peer is known to run on this host, whatever the addresses say (a container, a namespace).
    pub same_host: bool,
    /// The shortest round trip that another connection to the peer has seen; zero: none is known.
    pub round_trip: Duration,
    /// Data connections that share a progress thread, and with it a core's cache.
    pub per_thread: usize,
    /// Congestion control by name; `None` chooses.
    pub congestion_control: Option<String>,
    /// Socket buffer in bytes, each way; `None` chooses.
    pub socket_buffer_bytes: Option<usize>,
}

/// A network: makes listeners and connections.
pub trait Transport: Send + Sync + fmt::Debug {
    /// A short name for reports: `tcp`, `sim`.
    fn name(&self) -> &'static str;

    /// Listens on an address; port 0 chooses one.
    fn listen(&self, address: SocketAddr) -> io::Result<Box<dyn Listener>>;

    /// Starts a connection; bytes can move once the peer's host has answered.
    /// `nic` binds the connection to that NIC and its address.
    fn dial(&self, nic: Option<&Nic>, to: SocketAddr, options: &ConnOptions) -> io::Result<Box<dyn Conn>>;

    /// Chooses the address and port of a connection that is dialled later.
    fn bind(&self, nic: Option<&Nic>, to: SocketAddr, options: &ConnOptions) -> io::Result<Box<dyn Bound>>;

    /// Whether data connections can be given these options here; the error says what there is instead.
    fn check(&self, _options: &ConnOptions) -> io::Result<()> {
        Ok(())
    }

    /// Applies options to an accepted connection, once it is known to be a data connection.
    fn tune(&self, conn: &mut dyn Conn, options: &ConnOptions);

    /// The NICs of this host that have an address, loopback included.
    fn nics(&self) -> io::Result<Vec<Nic>>;

    /// Name of the NIC that has this address now.
    fn nic_name(&self, address: IpAddr) -> Option<String> {
        let nics = self.nics().unwrap_or_default();
        nics.into_iter().find(|nic| nic.address == address.to_canonical()).map(|nic| nic.name)
    }

    /// The address and NIC the routing table would use towards `to`.
    fn route(&self, to: IpAddr) -> io::Result<IpAddr>;

    /// Time since some fixed moment; the simulator's own in `sim`.
    fn now(&self) -> Duration;
}

/// A shared network.
pub type SharedTransport = Arc<dyn Transport>;
