//! Helpers of this crate's tests: connections whose far ends the test holds, one that panics, and one whose peer and
//! health the test chooses.

use std::io;
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ferrywire_metrics::Source;
use ferrywire_net::tcp::TcpTransport;
use ferrywire_net::{Conn, ConnOptions, IoVec, PathHealth, Transport};

use crate::metrics::Peer;

/// Time after which a step of a test counts as hung; longer than any step takes on a working machine.
const HANGS_AFTER: Duration = Duration::from_secs(120);

/// Calls `call` until it returns a value.
pub fn until<T>(what: &str, mut call: impl FnMut() -> Option<T>) -> T {
    let begin = Instant::now();
    loop {
        if let Some(answer) = call() {
            return answer;
        }
        assert!(begin.elapsed() < HANGS_AFTER, "{what} takes too long");
        std::thread::yield_now();
    }
}

/// The near or the far ends of a comm's connections.
pub type Ends = Vec<Box<dyn Conn>>;

/// The near and far ends of connections over loopback.
pub fn connections(count: usize) -> (Ends, Ends) {
    let transport = TcpTransport::default();
    let mut listener = transport.listen("127.0.0.1:0".parse().unwrap()).unwrap();
    let connect = |_| {
        let near = transport.dial(None, listener.local(), &ConnOptions::default()).unwrap();
        (near, until("a connection", || listener.accept().unwrap()))
    };
    (0..count).map(connect).unzip()
}

/// Sends all bytes over a connection.
pub fn send(conn: &mut dyn Conn, bytes: &[u8]) {
    assert_eq!(send_some(conn, bytes).unwrap(), bytes.len());
}

/// Sends as many bytes as the far end takes before it ends.
pub fn send_some(conn: &mut dyn Conn, bytes: &[u8]) -> io::Result<usize> {
    let mut bytes = bytes.to_vec();
    let mut sent = 0;
    while sent < bytes.len() {
        let rest = &mut bytes[sent..];
        let rest = [IoVec::new(rest.as_mut_ptr(), rest.len())];
        sent += until("sending", || {
            // SAFETY: the bytes outlive the call.
            would_block(unsafe { conn.send(&rest) }).transpose()
        })?;
    }
    Ok(sent)
}

/// The bytes that have arrived by now.
pub fn drained(conn: &mut dyn Conn) -> Vec<u8> {
    let mut room = vec![0; 1 << 20];
    let rest = [IoVec::new(room.as_mut_ptr(), room.len())];
    // SAFETY: the buffer outlives the call.
    let bytes = would_block(unsafe { conn.recv(&rest) }).unwrap();
    room.truncate(bytes.unwrap_or(0));
    room
}

/// All bytes that arrive until the far end closes.
pub fn received(conn: &mut dyn Conn) -> Vec<u8> {
    let (mut all, mut room) = (Vec::new(), vec![0; 1 << 20]);
    loop {
        let rest = [IoVec::new(room.as_mut_ptr(), room.len())];
        // SAFETY: the buffer outlives the call.
        match until("receiving", || would_block(unsafe { conn.recv(&rest) }).transpose()) {
            Ok(0) => return all,
            Ok(bytes) => all.extend_from_slice(&room[..bytes]),
            Err(e) => panic!("{e}"),
        }
    }
}

fn would_block(moved: io::Result<usize>) -> io::Result<Option<usize>> {
    match moved {
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
        moved => moved.map(Some),
    }
}

/// Waits until the far end's kernel has all bytes.
pub fn has_arrived(conn: &mut dyn Conn) {
    let fd = conn.fd().unwrap();
    until("an acknowledgement", || {
        let mut unacknowledged: libc::c_int = 0;
        // SAFETY: the kernel writes one number into a variable.
        assert_eq!(unsafe { libc::ioctl(fd, libc::TIOCOUTQ, &mut unacknowledged) }, 0);
        (unacknowledged == 0).then_some(())
    });
}

/// Ends a connection as the kernel does for a killed process with unread bytes.
pub fn reset(conn: Box<dyn Conn>) {
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    let size = size_of::<libc::linger>() as libc::socklen_t;
    // SAFETY: the kernel reads one `linger`, which outlives the call.
    let set = unsafe {
        let value = (&raw const linger).cast();
        libc::setsockopt(conn.fd().unwrap(), libc::SOL_SOCKET, libc::SO_LINGER, value, size)
    };
    assert_eq!(set, 0);
}

/// A connection with a bug: receiving on it panics.
pub struct Panics(pub Box<dyn Conn>);

impl Conn for Panics {
    unsafe fn send(&mut self, pieces: &[IoVec]) -> io::Result<usize> {
        // SAFETY: the caller promises that the pieces are readable.
        unsafe { self.0.send(pieces) }
    }

    unsafe fn recv(&mut self, _: &[IoVec]) -> io::Result<usize> {
        panic!("a bug, made for a test");
    }

    fn health(&self) -> PathHealth {
        self.0.health()
    }

    fn shutdown(&mut self) {
        self.0.shutdown();
    }

    fn fd(&self) -> Option<RawFd> {
        self.0.fd()
    }

    fn local(&self) -> SocketAddr {
        self.0.local()
    }

    fn remote(&self) -> SocketAddr {
        self.0.remote()
    }
}

/// A connection with a chosen remote address, whose counts no other test changes, and a chosen health.
pub struct Chosen {
    conn: Box<dyn Conn>,
    remote: SocketAddr,
    health: PathHealth,
    /// Number of times that the health was asked for.
    pub asked: Arc<AtomicUsize>,
}

impl Chosen {
    /// Connections to the peer `remote` that wait for an answer for `silent_for`, and their far ends.
    pub fn connections(count: usize, remote: [u8; 4], silent_for: Duration) -> (Vec<Chosen>, Ends) {
        let (near, far) = connections(count);
        let health = PathHealth { waiting: true, unanswered: 9, silent_for, ..PathHealth::default() };
        let chosen = |conn| Chosen { conn, remote: (remote, 9).into(), health, asked: Arc::default() };
        (near.into_iter().map(chosen).collect(), far)
    }
}

/// Number of connections with the peer `remote` that are counted as lost.
pub fn lost_with(remote: [u8; 4]) -> u64 {
    Peer::at(remote.into()).sample().lost_channels
}

impl Conn for Chosen {
    unsafe fn send(&mut self, pieces: &[IoVec]) -> io::Result<usize> {
        // SAFETY: the caller promises that the pieces are readable.
        unsafe { self.conn.send(pieces) }
    }

    unsafe fn recv(&mut self, pieces: &[IoVec]) -> io::Result<usize> {
        // SAFETY: the caller promises that the pieces are writable.
        unsafe { self.conn.recv(pieces) }
    }

    fn health(&self) -> PathHealth {
        self.asked.fetch_add(1, Ordering::SeqCst);
        self.health
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
        self.remote
    }
}
