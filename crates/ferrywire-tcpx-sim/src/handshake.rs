//! The handshake in which two ends make the sockets of a comm.
//!
//! The connecting end makes one control and N data connections, one after the other: control first, then data N-1 down
//! to 0. For each, the acceptor reports its state (good, pending, failed), then the connector does; if both are good
//! the connector sends the socket's index. A pending socket is closed by both ends and tried again. These messages use
//! the control socket.
//! Invariant: both ends have the listener's number of data sockets.
//! Read next: `listener.rs`.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use ferrywire_ncclnet::abi::ResultCode;
use socket2::{Domain, Protocol, Socket, Type};

use crate::comm::Outcome;
use crate::handle::Handle;
use crate::log::{exit_1, warning};

/// Time for which a refused connection is tried again.
const REFUSED_FOR: Duration = Duration::from_secs(20);
/// Pause between two tries of a connection.
const REFUSED_PAUSE: Duration = Duration::from_millis(20);
const GOOD: i32 = 0;
const PENDING: i32 = 1;

/// The connected sockets of a comm.
#[derive(Debug)]
pub struct Sockets {
    /// The control socket of the comm.
    pub control: OwnedFd,
    /// The comm's data sockets, by index.
    pub data: Vec<OwnedFd>,
    /// The peer's address of the data sockets; `None` without data sockets.
    pub peer: Option<Ipv4Addr>,
}

/// Settings of this end for the handshake.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Time that the handshake of each socket takes.
    pub setup: Duration,
    /// How often a socket is tried before the handshake fails.
    pub tries: u32,
    /// Why the dp-manager installs none of the acceptor's rules, in the real plugin's words; `None` if it does.
    pub no_rules: Option<&'static str>,
    /// Time for which the acceptor sleeps at the end.
    pub steering_wait: Duration,
    /// Whether payload that arrives while the acceptor sleeps is fatal.
    pub early_is_fatal: bool,
}

/// Runs the connecting end. Its data sockets use the address `own`, its control socket `own_control`.
pub fn connect(handle: &Handle, own: Ipv4Addr, own_control: Ipv4Addr, plan: &Plan) -> Outcome<Sockets> {
    dial_all(handle, own, own_control, plan).map_err(|e| failed("connect", &e))
}

fn dial_all(handle: &Handle, own: Ipv4Addr, own_control: Ipv4Addr, plan: &Plan) -> io::Result<Sockets> {
    let mut control = dial(own_control, handle.control)?;
    thread::sleep(plan.setup);
    let good = agree_as_connector(&mut control, handle.data_sockets)?;
    if !good {
        return Err(io::Error::other("the listener has a failed control socket"));
    }
    let mut data: Vec<OwnedFd> = Vec::new();
    for index in (0..handle.data_sockets).rev() {
        data.push(dial_data(&mut control, handle, own, index, plan)?.into());
    }
    data.reverse();
    Ok(Sockets { control: control.into(), data, peer: Some(*handle.data.ip()) })
}

fn dial_data(
    control: &mut TcpStream,
    handle: &Handle,
    own: Ipv4Addr,
    index: usize,
    plan: &Plan,
) -> io::Result<TcpStream> {
    for _ in 0..plan.tries {
        let socket = dial(own, handle.data)?;
        thread::sleep(plan.setup);
        if agree_as_connector(control, index)? {
            return Ok(socket);
        }
    }
    Err(io::Error::other("failed to connect socket"))
}

/// Exchanges the connector's messages about a socket; returns false if the socket has to be tried again.
fn agree_as_connector(control: &mut TcpStream, index: usize) -> io::Result<bool> {
    let state = read_word(control)?;
    write_word(control, GOOD)?;
    match state {
        GOOD => write_word(control, index as i32).map(|()| true),
        PENDING => Ok(false),
        state => Err(io::Error::other(format!("the listener says state {state}"))),
    }
}

fn dial(from: Ipv4Addr, to: SocketAddrV4) -> io::Result<TcpStream> {
    let end = Instant::now() + REFUSED_FOR;
    loop {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP))?;
        socket.bind(&SocketAddrV4::new(from, 0).into())?;
        match socket.connect(&to.into()) {
            Ok(()) => {
                let stream = TcpStream::from(socket);
                stream.set_nodelay(true)?;
                return Ok(stream);
            }
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused && Instant::now() < end => {
                thread::sleep(REFUSED_PAUSE);
            }
            Err(e) => return Err(e),
        }
    }
}

/// Runs the accepting end, which waits for connections without limit.
pub fn accept(control: &Socket, data: &Socket, data_sockets: usize, plan: &Plan) -> Outcome<Sockets> {
    accept_all(control, data, data_sockets, plan).map_err(|e| failed("accept", &e))
}

fn accept_all(control: &Socket, data: &Socket, data_sockets: usize, plan: &Plan) -> io::Result<Sockets> {
    let mut control = accept_one(control)?;
    thread::sleep(plan.setup);
    agree_as_acceptor(&mut control, data_sockets, true)?;
    let (mut sockets, mut peer): (Vec<OwnedFd>, _) = (Vec::new(), None);
    for index in (0..data_sockets).rev() {
        let socket = accept_data(&mut control, data, index, plan)?;
        peer = peer_of(&socket);
        sockets.push(socket.into());
    }
    sockets.reverse();
    thread::sleep(plan.steering_wait);
    if plan.early_is_fatal && sockets.iter().any(has_bytes) {
        exit_1(format_args!("payload before flow rules were in force"));
    }
    Ok(Sockets { control: control.into(), data: sockets, peer })
}

/// Whether bytes of a socket wait to be received.
fn has_bytes(socket: &OwnedFd) -> bool {
    let (mut byte, flags) = (0_u8, libc::MSG_PEEK | libc::MSG_DONTWAIT);
    // SAFETY: the kernel writes at most one byte, for which there is room.
    unsafe { libc::recv(socket.as_raw_fd(), (&raw mut byte).cast(), 1, flags) == 1 }
}

fn accept_data(control: &mut TcpStream, data: &Socket, index: usize, plan: &Plan) -> io::Result<TcpStream> {
    for _ in 0..plan.tries {
        let socket = accept_one(data)?;
        thread::sleep(plan.setup);
        if let Some(why) = plan.no_rules {
            let ends = [socket.local_addr(), socket.peer_addr()]
                .map(|end| end.map_or_else(|e| e.to_string(), |end| end.to_string()));
            warning!(
                "update flow steering rule: local {} <- remote {}, failed against receive-datapath-manager: {why}",
                ends[0],
                ends[1]
            );
        }
        if agree_as_acceptor(control, index, plan.no_rules.is_none())? {
            return Ok(socket);
        }
    }
    Err(io::Error::other("failed accept socket"))
}

/// Exchanges the acceptor's messages about a socket; returns false if the socket has to be tried again.
fn agree_as_acceptor(control: &mut TcpStream, index: usize, good: bool) -> io::Result<bool> {
    write_word(control, if good { GOOD } else { PENDING })?;
    let state = read_word(control)?;
    if !good || state == PENDING {
        return Ok(false);
    }
    if state != GOOD {
        return Err(io::Error::other(format!("the connecting end says state {state}")));
    }
    match read_word(control)? {
        named if named == index as i32 => Ok(true),
        named => Err(io::Error::other(format!("socket {named} where {index} was expected"))),
    }
}

fn accept_one(listener: &Socket) -> io::Result<TcpStream> {
    let (socket, _) = listener.accept()?;
    let stream = TcpStream::from(socket);
    stream.set_nodelay(true)?;
    Ok(stream)
}

fn peer_of(socket: &TcpStream) -> Option<Ipv4Addr> {
    match socket.peer_addr() {
        Ok(std::net::SocketAddr::V4(address)) => Some(*address.ip()),
        _ => None,
    }
}

fn read_word(stream: &mut TcpStream) -> io::Result<i32> {
    let mut word = [0; size_of::<i32>()];
    stream.read_exact(&mut word)?;
    Ok(i32::from_ne_bytes(word))
}

fn write_word(stream: &mut TcpStream, word: i32) -> io::Result<()> {
    stream.write_all(&word.to_ne_bytes())
}

fn failed(what: &str, e: &io::Error) -> ResultCode {
    warning!("NET/GPUDirectTCPX {what}: {e}");
    ResultCode::INTERNAL_ERROR
}
