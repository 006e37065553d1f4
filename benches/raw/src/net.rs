//! Sockets: how they are made and tuned, and the buffers they are fed from.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use socket2::{Domain, Protocol, SockRef, Socket, Type};

use crate::plan::Plan;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const PAGE: usize = 4096;

/// Listens on each address.
pub fn listen(addresses: &[SocketAddr]) -> io::Result<Vec<TcpListener>> {
    let one = |&address: &SocketAddr| {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
        socket.set_reuse_address(true)?;
        socket
            .bind(&address.into())
            .map_err(|e| io::Error::new(e.kind(), format!("listening on {address}: {e}")))?;
        socket.listen(1024)?;
        Ok(socket.into())
    };
    addresses.iter().map(one).collect()
}

/// Connects a data connection, tuned before the handshake so that buffers and congestion control count from the
/// first packet.
pub fn connect(from: Option<IpAddr>, to: SocketAddr, plan: &Plan) -> io::Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, Some(Protocol::TCP))?;
    tune(&SockRef::from(&socket), plan)?;
    if let Some(ip) = from {
        socket.bind(&SocketAddr::new(ip, 0).into())?;
    }
    let failed = |e: io::Error| io::Error::new(e.kind(), format!("connecting to {to}: {e}"));
    socket.connect_timeout(&to.into(), CONNECT_TIMEOUT).map_err(failed)?;
    Ok(socket.into())
}

/// Applies the plan's options to an accepted connection.
pub fn tune_accepted(stream: &TcpStream, plan: &Plan) -> io::Result<()> {
    tune(&SockRef::from(stream), plan)
}

/// The congestion control of a connection, as the kernel reports it.
pub fn congestion(stream: &TcpStream) -> String {
    let name = SockRef::from(stream).tcp_congestion().unwrap_or_default();
    String::from_utf8_lossy(&name).trim_end_matches('\0').to_string()
}

fn tune(socket: &SockRef<'_>, plan: &Plan) -> io::Result<()> {
    socket.set_tcp_nodelay(true)?;
    if plan.sockbuf != 0 {
        socket.set_send_buffer_size(plan.sockbuf)?;
        socket.set_recv_buffer_size(plan.sockbuf)?;
    }
    if plan.congestion != "system" {
        let failed =
            |e: io::Error| io::Error::new(e.kind(), format!("congestion control {}: {e}", plan.congestion));
        socket.set_tcp_congestion(plan.congestion.as_bytes()).map_err(failed)?;
    }
    Ok(())
}

/// A page-aligned buffer whose pages are all present before the first byte moves.
pub struct Buffer {
    memory: Vec<u8>,
    start: usize,
}

impl Buffer {
    /// Creates a buffer of `length` bytes with a fixed pattern.
    pub fn new(length: u64) -> Buffer {
        let mut memory = Vec::with_capacity(length as usize + PAGE);
        crate::sys::prefer_huge_pages(memory.spare_capacity_mut());
        memory.resize(length as usize + PAGE, 0x5a);
        let start = memory.as_ptr().align_offset(PAGE);
        Buffer { memory, start }
    }

    /// Cuts the buffer into parts of `part` bytes.
    pub fn parts(&mut self, part: u64) -> impl Iterator<Item = &mut [u8]> {
        let end = self.memory.len() - PAGE + self.start;
        self.memory[self.start..end].chunks_exact_mut(part as usize)
    }
}
