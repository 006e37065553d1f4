//! One socket of a comm, and the state machines that move pieces over it.
//!
//! A piece is a header and its payload. Sending: take the next piece of the comm's queue, send header and payload in
//! one call, count what is sent. Receiving: read a header, find its receive, and read the payload directly into the
//! receive's memory, together with the next header.
//!
//! A sender's life: empty -> piece in flight -> empty | failed. A receiver's life: header in flight -> payload in
//! flight -> header in flight | waits for a receive that is not posted yet | ended | failed.
//! Invariant: memory of a request is touched only while the connection is in its sender or receiver; closing takes
//! the connection out.

use std::io;
use std::time::Duration;

use ferrywire_net::{Conn, IoVec};

use crate::failure::Fault;
use crate::header::{HEADER_BYTES, Header};
use crate::link::{Link, LinkName};
use crate::metrics::Connected;
use crate::receiving::Receiving;
use crate::sending::Sending;

/// Interval at which a sender without room checks whether its path is alive. The check starts anew if it is made
/// less often than twice a second.
pub const HEALTH_INTERVAL: Duration = Duration::from_millis(200);
/// Time without any acknowledgement after which a path is given up. NCCL cannot continue after an error, so the
/// restart of a switch should not cause one.
const SILENT_MAX: Duration = Duration::from_secs(60);

/// Most bytes that one turn receives on a socket, before the next socket has its turn.
const RECEIVE_BYTES_PER_TURN: usize = 1 << 20;
/// Most pieces that one turn sends on a socket.
const PIECES_PER_TURN: usize = 2;

/// The result of a turn on a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// More pieces can be moved on the socket immediately.
    More,
    /// Nothing can be done now: there is no piece to send, or nothing has arrived.
    Idle,
    /// The socket's send buffer is full.
    Blocked,
    /// The next piece belongs to the receive with this number, which is not posted yet.
    Waits(u64),
    /// The peer has ended its stream between messages; or the stream has failed, which is recorded in the comm.
    Over,
}

/// A part of an outgoing message that one socket sends.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// The header that precedes the piece on the socket.
    pub header: Header,
    /// Address of the piece's first byte.
    pub data: *mut u8,
}

/// The sending end of a socket.
pub struct Sender {
    /// Declared before the connection, so that the channel's metrics end before the connection closes.
    channel: Connected,
    conn: Box<dyn Conn>,
    name: LinkName,
    piece: Option<(Piece, [u8; HEADER_BYTES])>,
    /// Number of bytes of header and payload that the kernel has.
    sent: usize,
    over: bool,
}

// SAFETY: the pointer in a piece is to memory that NCCL keeps until the request is done or the comm closed, readable
// from any thread.
unsafe impl Send for Sender {}

impl Sender {
    /// Makes a sender of a proved connection.
    pub fn new(Link { channel, conn, name }: Link) -> Sender {
        Sender { channel, conn, name, piece: None, sent: 0, over: false }
    }

    pub fn conn(&mut self) -> &mut dyn Conn {
        self.conn.as_mut()
    }

    /// Whether a piece is in flight on this socket.
    pub fn is_busy(&self) -> bool {
        self.piece.is_some()
    }

    /// The fault of a silent path, if it is given up now; to be called regularly while the socket has no room.
    pub fn silence(&mut self) -> Option<Fault> {
        if self.over {
            return None;
        }
        let path = self.conn.health();
        let given_up = path.is_dead() && path.silent_for >= SILENT_MAX;
        given_up.then(|| {
            self.over = true;
            self.channel.lost();
            Fault::remote(format_args!("{} does not answer", self.name))
        })
    }

    /// Ends the connection: the piece's memory is not touched any more, and the kernel still sends the bytes that
    /// it has.
    pub fn stop(&mut self) {
        self.piece = None;
        self.over = true;
        self.conn.shutdown();
    }

    /// Sends pieces from `next` until there is none, the socket has no room, or other sockets should have their
    /// turn.
    pub fn turn(&mut self, comm: &Sending, mut next: impl FnMut() -> Option<Piece>) -> Turn {
        if self.over {
            return Turn::Over;
        }
        for _ in 0..PIECES_PER_TURN {
            if self.piece.is_none() {
                let Some(piece) = next() else { return Turn::Idle };
                self.piece = Some((piece, piece.header.to_bytes()));
                self.sent = 0;
            }
            match self.send() {
                Ok(Some(done)) => comm.sent(&done.header),
                Ok(None) => return Turn::Blocked,
                Err(e) => {
                    self.over = true;
                    self.channel.lost();
                    comm.failure.record(Fault::connection(&self.name, &e));
                    return Turn::Over;
                }
            }
        }
        Turn::More
    }

    /// Continues with the piece in flight; returns it once all of it is sent, `None` while the socket has no room.
    fn send(&mut self) -> io::Result<Option<Piece>> {
        while let Some((piece, header)) = &mut self.piece {
            let payload_bytes = piece.header.bytes as usize;
            if self.sent == HEADER_BYTES + payload_bytes {
                // A finished piece may be the last one before NCCL closes the comm.
                match self.conn.flush() {
                    Ok(()) => {}
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                    Err(e) => return Err(e),
                }
                let done = *piece;
                self.piece = None;
                return Ok(Some(done));
            }
            let head_sent = self.sent.min(HEADER_BYTES);
            let payload_sent = self.sent - head_sent;
            // SAFETY: the sent part of the payload is shorter than the payload.
            let rest = unsafe { piece.data.add(payload_sent) };
            let head_rest = &mut header[head_sent..];
            let pieces = [
                IoVec::new(head_rest.as_mut_ptr(), head_rest.len()),
                IoVec::new(rest, payload_bytes - payload_sent),
            ];
            // SAFETY: the header is this sender's; NCCL keeps the payload until the request is done or the comm closed,
            // and a comm is not closed while this connection is in its place and in use.
            match unsafe { self.conn.send(&pieces) } {
                Ok(bytes) => {
                    self.sent += bytes;
                    self.channel.sent(bytes);
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(e) => return Err(e),
            }
        }
        Ok(None)
    }

    /// Checks whether the peer has ended its stream, since it sends no data on this socket.
    pub fn check_end(&mut self, comm: &Sending) -> Turn {
        if self.over {
            return Turn::Over;
        }
        let mut byte = 0;
        // SAFETY: the byte is a local variable.
        let fault = match unsafe { self.conn.recv(&[IoVec::new(&mut byte, 1)]) } {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Turn::Idle,
            Err(e) => {
                self.channel.lost();
                Fault::connection(&self.name, &e)
            }
            Ok(0) => Fault::remote(format_args!("{} has closed the connection", self.name)),
            Ok(_) => Fault::remote(format_args!("{} sent data that was not requested", self.name)),
        };
        self.over = true;
        comm.failure.record(fault);
        Turn::Over
    }
}

/// The receiving end of a socket.
pub struct Receiver {
    /// Declared before the connection, so that the channel's metrics end before the connection closes.
    channel: Connected,
    conn: Box<dyn Conn>,
    name: LinkName,
    /// The socket's number within its comm.
    socket: usize,
    header: [u8; HEADER_BYTES],
    head_bytes: usize,
    payload: Option<Payload>,
    over: bool,
}

/// The payload of a piece in flight.
struct Payload {
    message: u64,
    piece_bytes: usize,
    next: *mut u8,
    left_bytes: usize,
}

// SAFETY: the pointer is to memory that NCCL keeps until the request is done or the comm is closed, and that any
// thread may write.
unsafe impl Send for Receiver {}

impl Receiver {
    /// Makes a receiver of a proved connection.
    pub fn new(Link { channel, conn, name }: Link, socket: usize) -> Receiver {
        let header = [0; HEADER_BYTES];
        Receiver { channel, conn, name, socket, header, head_bytes: 0, payload: None, over: false }
    }

    pub fn conn(&mut self) -> &mut dyn Conn {
        self.conn.as_mut()
    }

    /// Whether the payload of a piece is in flight on this socket.
    pub fn is_busy(&self) -> bool {
        self.payload.is_some()
    }

    /// Ends the connection: memory of receives is not touched any more.
    pub fn stop(&mut self) {
        self.payload = None;
        self.over = true;
        self.conn.shutdown();
    }

    /// Receives the bytes that have arrived, until none is left or other sockets should have their turn.
    pub fn turn(&mut self, comm: &Receiving) -> Turn {
        let mut received = 0;
        while received < RECEIVE_BYTES_PER_TURN {
            if self.over {
                return Turn::Over;
            }
            if self.payload.is_none() && self.head_bytes == HEADER_BYTES {
                match self.place(comm) {
                    Ok(None) => {}
                    Ok(Some(message)) => return Turn::Waits(message),
                    Err(fault) => return self.breaks(comm, fault),
                }
                continue;
            }
            let (bytes, wanted) = match self.receive() {
                Ok((0, _)) => return self.end(comm),
                Ok(moved) => moved,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Turn::Idle,
                Err(e) => {
                    self.channel.lost();
                    return self.breaks(comm, Fault::connection(&self.name, &e));
                }
            };
            received += bytes;
            self.channel.received(bytes);
            self.arrived(comm, bytes);
            // After a short read nothing more has arrived, which another call would only confirm. A record that
            // does not open is reported by the next call.
            if bytes < wanted && self.head_bytes < HEADER_BYTES && !self.conn.has_received() {
                return Turn::Idle;
            }
        }
        Turn::More
    }

    /// Receives with one call: the rest of a payload together with the header after it, or the rest of a header.
    /// Returns the number of bytes received and the number asked for.
    ///
    /// # Errors
    /// The connection's error.
    fn receive(&mut self) -> io::Result<(usize, usize)> {
        let (next, payload_bytes) = self
            .payload
            .as_ref()
            .map_or((self.header.as_mut_ptr(), 0), |payload| (payload.next, payload.left_bytes));
        let header = &mut self.header[self.head_bytes..];
        let pieces = [IoVec::new(next, payload_bytes), IoVec::new(header.as_mut_ptr(), header.len())];
        let wanted = payload_bytes + header.len();
        // SAFETY: the header is this receiver's; the payload's memory was checked against its receive, whose buffer is
        // exclusively its own until it is done or the comm closed, which waits for this connection.
        Ok((unsafe { self.conn.recv(&pieces) }?, wanted))
    }

    /// Counts the bytes that one call has placed.
    fn arrived(&mut self, comm: &Receiving, mut bytes: usize) {
        if let Some(payload) = &mut self.payload {
            let here = bytes.min(payload.left_bytes);
            // SAFETY: `here` is within the piece.
            payload.next = unsafe { payload.next.add(here) };
            payload.left_bytes -= here;
            bytes -= here;
            if payload.left_bytes == 0 {
                comm.received(payload.message, payload.piece_bytes);
                self.payload = None;
            }
        }
        self.head_bytes += bytes;
    }

    /// Finds the memory of the piece whose header has arrived; returns the number of the message whose receive is
    /// awaited, if it is not posted yet.
    fn place(&mut self, comm: &Receiving) -> Result<Option<u64>, Fault> {
        let header = Header::from_bytes(&self.header)
            .ok_or_else(|| Fault::remote(format_args!("{} sent a malformed message", self.name)))?;
        let Some(start) = comm.place(self.socket, &header)? else { return Ok(Some(header.message)) };
        self.head_bytes = 0;
        let piece_bytes = header.bytes as usize;
        if piece_bytes == 0 {
            comm.received(header.message, 0);
            return Ok(None);
        }
        self.payload =
            Some(Payload { message: header.message, piece_bytes, next: start, left_bytes: piece_bytes });
        Ok(None)
    }

    /// Handles the end of the stream, in order or within a message.
    fn end(&mut self, comm: &Receiving) -> Turn {
        if self.payload.is_some() || self.head_bytes > 0 {
            self.channel.lost();
            let why = format_args!("{} closed the connection in the middle of a message", self.name);
            return self.breaks(comm, Fault::remote(why));
        }
        self.over = true;
        comm.ended(self.socket);
        Turn::Over
    }

    /// Handles a stream that ends early: the message in flight stays without a part.
    fn breaks(&mut self, comm: &Receiving, fault: Fault) -> Turn {
        let placed = self.payload.take().map(|payload| payload.message);
        let met = || (self.head_bytes == HEADER_BYTES).then(|| Header::from_bytes(&self.header)).flatten();
        self.over = true;
        comm.broke(self.socket, placed.or_else(|| met().map(|header| header.message)), fault);
        Turn::Over
    }
}
