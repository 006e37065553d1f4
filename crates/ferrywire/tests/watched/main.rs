//! Endpoints over TCP that is watched, or held up, call by call.
//!
//! A [`Watcher`] sees what the engine asks of its transport, where the public API shows nothing of it.

mod descriptors;
mod paths;
mod stuck;

use ferrywire::transport::tcp::TcpTransport;
use ferrywire::transport::{Conn, ConnOptions, IoVec, Listener, Nic, PathHealth, Transport};
use std::fmt::Debug;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::RawFd;
use std::sync::Arc;
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

/// What is called when the engine calls.
trait Watcher: Debug + Send + Sync + 'static {
    /// Nobody could be accepted, for this reason.
    fn accept_failed(&self, _error: &io::Error) {}
    /// So many bytes are about to be received, at most.
    fn receiving(&self, _bytes: usize) {}
    /// A channel's path is looked at.
    fn looking_at_path(&self) {}
}

/// TCP, and who watches it.
#[derive(Debug)]
struct Watched<W> {
    tcp: TcpTransport,
    watcher: Arc<W>,
}

impl<W: Watcher> Watched<W> {
    fn new(watcher: &Arc<W>) -> Arc<Watched<W>> {
        Arc::new(Watched { tcp: TcpTransport::default(), watcher: watcher.clone() })
    }

    fn watch(&self, conn: Box<dyn Conn>, bulk: bool) -> Box<dyn Conn> {
        Box::new(WatchedConn { conn, bulk, watcher: self.watcher.clone() })
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
        self.tcp.dial(nic, to, options).map(|conn| self.watch(conn, options.bulk))
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

struct WatchedListener<W> {
    listener: Box<dyn Listener>,
    watcher: Arc<W>,
}

impl<W: Watcher> Listener for WatchedListener<W> {
    fn accept(&mut self) -> io::Result<Option<Box<dyn Conn>>> {
        let result = self.listener.accept();
        result.as_ref().err().iter().for_each(|error| self.watcher.accept_failed(error));
        let watch = |conn| -> Box<dyn Conn> {
            Box::new(WatchedConn { conn, bulk: false, watcher: self.watcher.clone() })
        };
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
    /// Dialled for a channel.
    bulk: bool,
    watcher: Arc<W>,
}

impl<W: Watcher> Conn for WatchedConn<W> {
    unsafe fn send(&mut self, pieces: &[IoVec]) -> io::Result<usize> {
        // SAFETY: promised by the caller.
        unsafe { self.conn.send(pieces) }
    }

    unsafe fn recv(&mut self, pieces: &[IoVec]) -> io::Result<usize> {
        self.watcher.receiving(pieces.iter().map(|piece| piece.len).sum());
        // SAFETY: promised by the caller.
        unsafe { self.conn.recv(pieces) }
    }

    fn health(&self) -> PathHealth {
        if self.bulk {
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
