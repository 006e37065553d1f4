//! One TCP connection.
//!
//! States: connecting -> open -> failed | shut. The kernel keeps the state, but reports an error to one call
//! only; later calls would see an ordinary end of the stream. So this file remembers the first error.
//! Invariant: the end of the stream is reported only when the peer or this end has ended it.
//! Read next: `health.rs` and `zero_copy.rs`.

use std::cell::{Cell, OnceCell};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::Arc;

use socket2::Socket;

use super::health::Watch;
use super::lending::Lending;
use super::tuning::{self, Path, Tuning};
use super::zero_copy::ZeroCopy;
use super::{Prepared, START, ZeroCopyPolicy, canonical, ip_address};
use crate::{Conn, ConnOptions, IoVec, PathHealth};
use ferrywire_sys::IOVECS_PER_CALL_MAX;
use ferrywire_sys::fork::Withheld;
use ferrywire_sys::nics::{self, Recent};
use ferrywire_sys::tcp_info::{self, TcpInfo};
use ferrywire_sys::{socket, zerocopy};

/// Smallest zero-copy send in bytes. Pinning the pages of a shorter one costs more than a copy.
const ZERO_COPY_BYTES_MIN: usize = 64 << 10;

/// A TCP connection, dialled or accepted.
#[derive(Debug)]
pub struct TcpConn {
    /// A copy in a forked child would keep the connection open, and its events in the poller, after this end
    /// has closed it.
    _withheld: Withheld,
    socket: Socket,
    local: SocketAddr,
    remote: SocketAddr,
    /// Whether both ends have addresses of this host; computed at first need. An accepted connection computes
    /// it only after the dialling end has proven itself, since the kernel has to list every interface.
    within_host: OnceCell<bool>,
    /// Whether no byte has moved in either direction yet.
    connecting: bool,
    /// Tuning of a data connection, revised as its round trip becomes known.
    tuning: Option<Tuning>,
    /// The connection's first error, as `errno`; the kernel reports it only once.
    failure: Option<i32>,
    shut: bool,
    sent_bytes: u64,
    zero_copy: ZeroCopy,
    lending: Lending,
    watch: Cell<Watch>,
    /// Cached addresses of this host, needed for tuning.
    addresses: Arc<Recent>,
}

impl TcpConn {
    /// Starts to connect a prepared socket.
    pub(super) fn dialled(prepared: Prepared) -> io::Result<TcpConn> {
        let Prepared { socket, path, to, options, addresses, zero_copy } = prepared;
        let within_host = Some(path == Path::SameHost);
        let mut conn = TcpConn::established(socket, to, within_host, addresses, zero_copy)?;
        conn.connecting = true;
        conn.tuning = Tuning::new(path, options.round_trip, &options);
        Ok(conn)
    }

    /// Wraps a connected socket. `within_host` says whether both ends are on this host, where that is known.
    pub(super) fn established(
        socket: Socket,
        remote: SocketAddr,
        within_host: Option<bool>,
        addresses: Arc<Recent>,
        policy: ZeroCopyPolicy,
    ) -> io::Result<TcpConn> {
        let local = canonical(ip_address(&socket.local_addr()?)?);
        let alone = remote.ip().is_loopback() || remote.ip() == local.ip();
        let within_host = within_host.or(alone.then_some(true));
        let wanted = within_host != Some(true) || policy == ZeroCopyPolicy::Always;
        let zero_copy = wanted && zerocopy::enable(socket.as_raw_fd()).is_ok();
        let zero_copy = ZeroCopy::new(zero_copy, policy);
        let within_host = within_host.map_or_else(OnceCell::new, OnceCell::from);
        Ok(TcpConn {
            _withheld: Withheld::new(socket.as_fd()),
            socket,
            local,
            remote,
            within_host,
            connecting: false,
            tuning: None,
            failure: None,
            shut: false,
            sent_bytes: 0,
            zero_copy,
            lending: Lending::default(),
            watch: Cell::default(),
            addresses,
        })
    }

    /// Test hook: turns zero copy on for a path that would not use it, until the kernel reports that it
    /// copies.
    #[cfg(test)]
    pub(super) fn force_zero_copy(&mut self) {
        zerocopy::enable(self.descriptor()).expect("Linux has had it since 4.14");
        self.zero_copy = ZeroCopy::new(true, ZeroCopyPolicy::Auto);
        self.within_host = OnceCell::from(false);
    }

    fn descriptor(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    /// Whether the remote address belongs to this host. If the kernel does not list its addresses, the answer
    /// is yes: a copy is always correct.
    fn has_local_peer(&self) -> bool {
        *self.within_host.get_or_init(|| {
            self.addresses.addresses().map_or(true, |nics| nics::is_local(&nics, self.remote.ip()))
        })
    }

    fn may_spare_copies(&self) -> bool {
        self.zero_copy.always() || !self.has_local_peer()
    }

    /// Notes that bytes have moved; the first ones prove that the connection is established.
    fn moved(&mut self, bytes: usize) -> usize {
        self.connecting = false;
        let fd = self.descriptor();
        if let Some(tuning) = &mut self.tuning {
            tuning.moved(fd);
        }
        bytes
    }

    /// The error that the caller gets: `WouldBlock` while connecting, and afterwards the first failure, on
    /// every call.
    fn judged(&mut self, error: io::Error) -> io::Error {
        // Inaccessible memory is no failure of the connection, which goes on with other memory.
        if error.kind() == io::ErrorKind::WouldBlock || error.raw_os_error() == Some(libc::EFAULT) {
            return error;
        }
        let mut errno = error.raw_os_error().unwrap_or(libc::EIO);
        if self.connecting && matches!(errno, libc::ENOTCONN | libc::EINPROGRESS) {
            match socket::take_error(self.descriptor()) {
                Some(cause) => errno = cause.raw_os_error().unwrap_or(errno),
                None if self.is_dialling() => return io::Error::from(io::ErrorKind::WouldBlock),
                None => {}
            }
        }
        io::Error::from_raw_os_error(*self.failure.get_or_insert(errno))
    }

    fn is_dialling(&self) -> bool {
        TcpInfo::read(self.descriptor()).is_ok_and(|info| info.state == tcp_info::SYN_SENT)
    }

    /// The result of a receive of 0 bytes: the end of the stream, unless the connection failed or the pieces
    /// were empty.
    fn ended(&self, pieces: &[IoVec]) -> io::Result<usize> {
        if total_bytes(pieces) == 0 {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        match self.failure {
            // EPIPE: this end wrote to a peer that had ended its stream in order; what the peer sent before
            // is complete.
            None | Some(libc::EPIPE) => Ok(0),
            Some(errno) => Err(io::Error::from_raw_os_error(errno)),
        }
    }

    /// Counts the bytes of a send. A send of 0 bytes is a caller's mistake: its pieces were empty.
    fn took(&mut self, result: io::Result<usize>) -> io::Result<usize> {
        match result {
            Ok(0) => Err(io::Error::from(io::ErrorKind::InvalidInput)),
            Ok(bytes) => {
                self.sent_bytes += bytes as u64;
                Ok(self.moved(bytes))
            }
            Err(e) => Err(self.judged(e)),
        }
    }

    /// Reads the zero-copy completions from the error queue, which also clears `EPOLLERR`.
    fn drain_completions(&mut self) {
        while self.zero_copy.is_unfinished() {
            match zerocopy::completion(self.descriptor()) {
                Ok(completion) => completion.into_iter().for_each(|done| self.zero_copy.finish(done)),
                Err(_) => break,
            }
        }
    }
}

impl Conn for TcpConn {
    unsafe fn send(&mut self, pieces: &[IoVec]) -> io::Result<usize> {
        if self.shut {
            return Err(io::Error::from(io::ErrorKind::BrokenPipe));
        }
        let fd = self.descriptor();
        let result = match self.lending.held() {
            // SAFETY: the caller promises that the pieces are readable.
            0 => unsafe { socket::send(fd, pieces, 0) },
            // The pipe already holds the first bytes of these pieces.
            _ => self.lending.go_on(fd),
        };
        self.took(result)
    }

    fn zero_copy(&self) -> bool {
        self.zero_copy.usable() && self.may_spare_copies()
    }

    unsafe fn send_stable(&mut self, pieces: &[IoVec]) -> io::Result<usize> {
        let copied = self.shut || !self.zero_copy.has_room() || total_bytes(pieces) < ZERO_COPY_BYTES_MIN;
        if copied || !self.may_spare_copies() {
            // SAFETY: the caller promises that the pieces are readable for longer than the call.
            return unsafe { self.send(pieces) };
        }
        let start = self.sent_bytes;
        // SAFETY: the caller keeps the memory unchanged until `released` passes it, and `released` counts a
        // send only after its completion.
        match unsafe { zerocopy::send(self.descriptor(), pieces) } {
            Err(e) if matches!(e.raw_os_error(), Some(libc::ENOBUFS | libc::EFAULT)) => {
                if e.raw_os_error() == Some(libc::EFAULT) {
                    self.zero_copy.turn_off();
                }
                // SAFETY: the caller promises that the pieces are readable for longer than the call.
                unsafe { self.send(pieces) }
            }
            result => {
                if result.is_ok() {
                    self.zero_copy.sent(start);
                }
                self.took(result)
            }
        }
    }

    fn lends(&self) -> bool {
        self.lending.usable()
    }

    unsafe fn send_lent(&mut self, pieces: &[IoVec]) -> io::Result<usize> {
        if self.shut {
            return Err(io::Error::from(io::ErrorKind::BrokenPipe));
        }
        let fd = self.descriptor();
        let mut late = None;
        // SAFETY: the caller keeps the promise of `send_lent`, which `Lending::send` asks for.
        let sent = unsafe { self.lending.send(fd, pieces, &mut late) };
        if let Some(error) = late {
            // The error is stored here, and the next call reports it.
            self.judged(error);
        }
        match sent {
            Some(result) => self.took(result),
            // SAFETY: the caller promises that the pieces are readable for longer than the call.
            None => unsafe { self.send(pieces) },
        }
    }

    fn within_host(&self) -> bool {
        !self.is_long() && self.has_local_peer()
    }

    fn is_long(&self) -> bool {
        self.tuning.as_ref().is_some_and(Tuning::is_long)
    }

    fn released(&mut self) -> u64 {
        self.drain_completions();
        self.zero_copy.released(self.sent_bytes)
    }

    fn abort(&mut self) {
        self.shut = true;
        // The call fails only when the connection has already ended.
        let _ = socket::abort(self.descriptor());
    }

    unsafe fn recv(&mut self, pieces: &[IoVec]) -> io::Result<usize> {
        if self.shut {
            return Ok(0);
        }
        // SAFETY: the caller promises that the pieces are writable.
        match unsafe { socket::recv(self.descriptor(), pieces) } {
            Ok(0) => self.ended(pieces),
            Ok(bytes) => Ok(self.moved(bytes)),
            Err(e) => Err(self.judged(e)),
        }
    }

    fn unsent_bytes(&self) -> usize {
        socket::unsent_bytes(self.descriptor()).unwrap_or(0)
    }

    fn health(&self) -> PathHealth {
        let info = TcpInfo::read(self.descriptor()).unwrap_or_default();
        let mut watch = self.watch.get();
        let health = watch.sample(START.elapsed(), &info);
        self.watch.set(watch);
        health
    }

    fn shutdown(&mut self) {
        if !self.shut {
            self.shut = true;
            // The call fails only when the connection has already ended.
            let _ = socket::shutdown(self.descriptor());
        }
    }

    fn fd(&self) -> Option<RawFd> {
        Some(self.descriptor())
    }

    fn local(&self) -> SocketAddr {
        self.local
    }

    fn remote(&self) -> SocketAddr {
        self.remote
    }

    fn tune(&mut self, options: &ConnOptions) {
        let fd = self.descriptor();
        let nics = self.addresses.addresses();
        if let Ok(nics) = &nics {
            self.within_host.get_or_init(|| nics::is_local(nics, self.remote.ip()));
        }
        let nics = nics.unwrap_or_default();
        let path = Path::towards(&nics, Some(self.local.ip()), self.remote.ip());
        let round_trip = tuning::shorter(options.round_trip, tuning::round_trip(fd));
        if let Err(e) = tuning::apply(fd, path, round_trip, options) {
            tracing::warn!("cannot tune the connection from {}: {e}", self.remote);
        }
        self.tuning = Tuning::new(path, round_trip, options);
    }

    fn buffer_bytes(&self) -> (usize, usize) {
        socket::buffers(self.descriptor()).unwrap_or_default()
    }

    fn congestion_control(&self) -> String {
        socket::congestion_control(self.descriptor()).unwrap_or_else(|_| String::from("unknown"))
    }
}

impl Drop for TcpConn {
    /// Aborts a connection that has incomplete zero-copy sends. After the drop their memory may change, and
    /// the kernel must not send the changed bytes to the peer.
    fn drop(&mut self) {
        self.drain_completions();
        if self.zero_copy.is_unfinished() {
            let _ = socket::abort_on_close(self.descriptor());
        }
    }
}

/// Total bytes of the pieces that one system call uses.
fn total_bytes(pieces: &[IoVec]) -> usize {
    let used = &pieces[..pieces.len().min(IOVECS_PER_CALL_MAX)];
    used.iter().fold(0, |total, piece| total.saturating_add(piece.len))
}
