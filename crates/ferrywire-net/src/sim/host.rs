//! The network traits over the simulator: [`SimHost`] is one host's view of the network.
//!
//! Only this file of the simulator has unsafe code: it copies from and into the caller's pieces.
//! Invariant: each call holds the network's single lock throughout, so each call is one event.
//! Read next: `traffic.rs`, which implements the calls.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use super::SimNet;
use crate::{Bound, Conn, ConnOptions, IoVec, Listener, Nic, PathHealth, Transport};
use ferrywire_sys::rng::Rng;

/// One host of a [`SimNet`].
#[derive(Debug)]
pub struct SimHost {
    net: Arc<SimNet>,
    index: usize,
    host_name: String,
}

impl SimHost {
    pub(super) fn new(net: Arc<SimNet>, index: usize, host_name: &str) -> SimHost {
        SimHost { net, index, host_name: host_name.into() }
    }

    /// The network that the host is part of.
    pub fn net(&self) -> &Arc<SimNet> {
        &self.net
    }

    /// The host's name, which [`SimNet::kill`] and similar calls take.
    pub fn host_name(&self) -> &str {
        &self.host_name
    }
}

impl Transport for SimHost {
    fn name(&self) -> &'static str {
        "sim"
    }

    fn listen(&self, address: SocketAddr) -> io::Result<Box<dyn Listener>> {
        let (id, local) = self.net.lock().listen(self.index, address)?;
        Ok(Box::new(SimListener { net: Arc::clone(&self.net), id, local }))
    }

    fn dial(&self, nic: Option<&Nic>, to: SocketAddr, options: &ConnOptions) -> io::Result<Box<dyn Conn>> {
        self.bind(nic, to, options)?.connect()
    }

    fn bind(&self, nic: Option<&Nic>, to: SocketAddr, options: &ConnOptions) -> io::Result<Box<dyn Bound>> {
        let local = self.net.lock().bind(self.index, nic, to)?;
        let (net, host, bulk) = (Arc::clone(&self.net), self.index, options.bulk);
        Ok(Box::new(SimBound { net, host, local, to, bulk }))
    }

    fn tune(&self, conn: &mut dyn Conn, options: &ConnOptions) {
        let ends = (conn.local(), conn.remote());
        let mut state = self.net.lock();
        let own = |link: &&mut super::link::Link| {
            let [a, b] = &link.ends;
            (a.host == self.index && (a.address, b.address) == ends)
                || (b.host == self.index && (b.address, a.address) == ends)
        };
        if let Some(link) = state.links.values_mut().find(own) {
            link.bulk |= options.bulk;
        }
    }

    fn nics(&self) -> io::Result<Vec<Nic>> {
        let state = self.net.lock();
        Ok(state.hosts[self.index].nics.iter().map(|nic| state.nics[*nic].nic.clone()).collect())
    }

    fn route(&self, to: IpAddr) -> io::Result<IpAddr> {
        let state = self.net.lock();
        state.route(self.index, to).map(|nic| state.nics[nic].nic.address)
    }

    fn now(&self) -> Duration {
        self.net.now()
    }

    fn session_number(&self) -> u64 {
        let mut state = self.net.lock();
        state.sessions += 1;
        Rng::new(self.net.seed() ^ state.sessions << 32).number()
    }
}

/// A local port that is reserved for a connection.
struct SimBound {
    net: Arc<SimNet>,
    host: usize,
    local: SocketAddr,
    to: SocketAddr,
    bulk: bool,
}

impl Bound for SimBound {
    fn local(&self) -> SocketAddr {
        self.local
    }

    fn connect(self: Box<Self>) -> io::Result<Box<dyn Conn>> {
        let link = self.net.lock().dial(self.host, self.local, self.to, self.bulk)?;
        let net = Arc::clone(&self.net);
        Ok(Box::new(SimConn { net, link, end: 0, local: self.local, remote: self.to }))
    }
}

impl Drop for SimBound {
    /// Frees the reserved port, unless a connection was dialled from it.
    fn drop(&mut self) {
        self.net.lock().hosts[self.host].bound.remove(&self.local.port());
    }
}

struct SimListener {
    net: Arc<SimNet>,
    id: u64,
    local: SocketAddr,
}

impl Listener for SimListener {
    fn accept(&mut self) -> io::Result<Option<Box<dyn Conn>>> {
        let mut state = self.net.lock();
        let Some(link) = state.accept(self.id)? else {
            return Ok(None);
        };
        let [remote, local] = state.links[&link].ends.each_ref().map(|end| end.address);
        let net = Arc::clone(&self.net);
        Ok(Some(Box::new(SimConn { net, link, end: 1, local, remote })))
    }

    fn local(&self) -> SocketAddr {
        self.local
    }

    fn fd(&self) -> Option<RawFd> {
        None
    }
}

impl Drop for SimListener {
    fn drop(&mut self) {
        self.net.lock().close_listener(self.id);
    }
}

/// One end of a simulated connection.
struct SimConn {
    net: Arc<SimNet>,
    link: u64,
    end: usize,
    local: SocketAddr,
    remote: SocketAddr,
}

impl fmt::Debug for SimConn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SimConn(c{} end {}, {} -> {})", self.link, self.end, self.local, self.remote)
    }
}

impl Conn for SimConn {
    unsafe fn send(&mut self, pieces: &[IoVec]) -> io::Result<usize> {
        let mut state = self.net.lock();
        let count = state.send_allowed(self.link, self.end, total(pieces)?)?;
        // SAFETY: the caller promises that each piece is readable for the length of this call.
        let bytes = unsafe { gather(pieces, count) };
        state.send(self.link, self.end, &bytes);
        Ok(count)
    }

    unsafe fn recv(&mut self, pieces: &[IoVec]) -> io::Result<usize> {
        let mut state = self.net.lock();
        let count = state.recv_allowed(self.link, self.end, total(pieces)?)?;
        if count > 0 {
            let arrived = &state.links[&self.link].pipes[1 - self.end].arrived;
            // SAFETY: the caller promises that each piece is writable for the length of this call.
            unsafe { scatter(arrived, pieces, count) };
            state.consume(self.link, self.end, count);
        }
        Ok(count)
    }

    fn unsent_bytes(&self) -> usize {
        self.net.lock().unsent_bytes(self.link, self.end)
    }

    fn health(&self) -> PathHealth {
        self.net.lock().health(self.link, self.end)
    }

    fn shutdown(&mut self) {
        self.net.lock().close(self.link, self.end, false);
    }

    fn fd(&self) -> Option<RawFd> {
        None
    }

    fn local(&self) -> SocketAddr {
        self.local
    }

    fn remote(&self) -> SocketAddr {
        self.remote
    }
}

impl Drop for SimConn {
    fn drop(&mut self) {
        self.net.lock().close(self.link, self.end, true);
    }
}

/// Total bytes of the pieces. Zero is an error: a receive of 0 bytes would look like the end of the stream.
fn total(pieces: &[IoVec]) -> io::Result<usize> {
    let total = pieces.iter().map(|piece| piece.len).sum();
    if total == 0 { Err(ErrorKind::InvalidInput.into()) } else { Ok(total) }
}

/// Copies the first `count` bytes of the pieces.
///
/// # Safety
/// Each piece must be readable; together they must hold `count` bytes.
unsafe fn gather(pieces: &[IoVec], count: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(count);
    for piece in pieces {
        let len = piece.len.min(count - bytes.len());
        if len > 0 {
            // SAFETY: the caller promises that `piece.len` bytes can be read, and `len` is not more.
            bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(piece.base, len) });
        }
    }
    bytes
}

/// Copies the first `count` bytes of `from` into the pieces.
///
/// # Safety
/// Each piece must be writable and no part of `from`.
unsafe fn scatter(from: &VecDeque<u8>, pieces: &[IoVec], count: usize) {
    let (first, second) = from.as_slices();
    let mut left = [&first[..first.len().min(count)], &second[..count.saturating_sub(first.len())]];
    for piece in pieces {
        let mut filled = 0;
        for part in &mut left {
            let len = part.len().min(piece.len - filled);
            if len > 0 {
                // SAFETY: `filled + len <= piece.len`, which the caller promises can be written, and
                // `from` is the simulator's own memory, so that the two do not overlap.
                unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), piece.base.add(filled), len) };
            }
            filled += len;
            *part = &part[len..];
        }
    }
}
