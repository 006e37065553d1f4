//! One socket of a comm, and what moves its bytes: pieces out, or pieces in.
//!
//! A piece is a header and its payload. Sending: take the next piece of the comm's queue, send header and payload in
//! one call, say how much of the message is gone. Receiving: read a header, find the receive it names, read payload
//! straight there, together with the next header.
//!
//! A sender's life: empty -> piece under way -> empty | failed. A receiver's: header under way -> payload under way ->
//! header under way | waits for a receive that is not posted yet | ended | failed.
//! Invariant: memory of a request is touched only while the connection is in its place; closing takes it out.

use std::io;
use std::time::Duration;

use ferrywire_net::{Conn, IoVec};

use crate::failure::Fault;
use crate::header::{HEADER_BYTES, Header};
use crate::link::{Link, LinkName};
use crate::receiving::Receiving;
use crate::sending::Sending;

/// How often a sender without room asks whether its path is alive. Who asks more rarely than twice a second begins to
/// count anew each time.
pub const HEALTH_INTERVAL: Duration = Duration::from_millis(200);
/// A path on which nothing was answered for so long is given up. NCCL cannot go on after an error, so a switch that
/// restarts should not be one.
const SILENT_MAX: Duration = Duration::from_secs(60);

/// Most bytes that one turn receives on a socket before others have theirs.
const RECEIVE_BYTES_PER_TURN: usize = 1 << 20;
/// Most pieces that one turn sends on a socket.
const PIECES_PER_TURN: usize = 2;

/// What a turn came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// There is more to do at once.
    More,
    /// There is nothing to do now: no piece to send, or nothing has arrived.
    Idle,
    /// The socket has no room.
    Blocked,
    /// What arrived belongs to this receive, which is not posted yet.
    Waits(u64),
    /// The peer has ended its stream where it may; or it failed, which the comm knows.
    Over,
}

/// A part of a message on its way out.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// What the receiver is told.
    pub header: Header,
    /// The first byte of this part.
    pub data: *mut u8,
}

/// The sending side of a socket.
pub struct Sender {
    conn: Box<dyn Conn>,
    name: LinkName,
    piece: Option<(Piece, [u8; HEADER_BYTES])>,
    /// Bytes of header and payload that the kernel has.
    sent: usize,
}

// SAFETY: the pointer in a piece is to memory that NCCL keeps until the request is done or the comm closed,
// whatever thread reads it.
unsafe impl Send for Sender {}

impl Sender {
    /// Over a connection that has proved itself.
    pub fn new(Link { conn, name }: Link) -> Sender {
        Sender { conn, name, piece: None, sent: 0 }
    }

    /// The connection.
    pub fn conn(&mut self) -> &mut dyn Conn {
        self.conn.as_mut()
    }

    /// Whether a piece is under way.
    pub fn is_busy(&self) -> bool {
        self.piece.is_some()
    }

    /// Why the path is given up, if it is; for one who asks again and again while there is no room.
    pub fn silence(&mut self) -> Option<Fault> {
        let path = self.conn.health();
        let given_up = path.is_dead() && path.silent_for >= SILENT_MAX;
        given_up.then(|| Fault::remote(format_args!("{} does not answer", self.name)))
    }

    /// Ends the connection: memory of the piece under way is not touched any more, what the kernel has goes on.
    pub fn stop(&mut self) {
        self.piece = None;
        self.conn.shutdown();
    }

    /// Sends pieces that `next` gives, until there is none, no room, or others should have their turn.
    pub fn turn(&mut self, comm: &Sending, mut next: impl FnMut() -> Option<Piece>) -> Turn {
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
                    comm.failure.record(Fault::connection(&self.name, &e));
                    return Turn::Over;
                }
            }
        }
        Turn::More
    }

    /// Goes on with the piece under way: the piece once it is gone, `None` when there is no room.
    fn send(&mut self) -> io::Result<Option<Piece>> {
        while let Some((piece, header)) = &mut self.piece {
            let payload_bytes = piece.header.bytes as usize;
            if self.sent == HEADER_BYTES + payload_bytes {
                let done = *piece;
                self.piece = None;
                return Ok(Some(done));
            }
            let head_sent = self.sent.min(HEADER_BYTES);
            let payload_sent = self.sent - head_sent;
            // SAFETY: what is sent of the payload is less than its length.
            let rest = unsafe { piece.data.add(payload_sent) };
            let head_rest = &mut header[head_sent..];
            let pieces = [
                IoVec::new(head_rest.as_mut_ptr(), head_rest.len()),
                IoVec::new(rest, payload_bytes - payload_sent),
            ];
            // SAFETY: the header is ours; the payload is kept by NCCL until the request is done or the comm closed,
            // and a comm is not closed while this connection is in its place and in use.
            match unsafe { self.conn.send(&pieces) } {
                Ok(bytes) => self.sent += bytes,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(e) => return Err(e),
            }
        }
        Ok(None)
    }

    /// Looks at what the peer said, which can only be that it has gone.
    pub fn look(&mut self, comm: &Sending) -> Turn {
        let mut byte = 0;
        // SAFETY: the byte is ours.
        let fault = match unsafe { self.conn.recv(&[IoVec::new(&mut byte, 1)]) } {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Turn::Idle,
            Err(e) => Fault::connection(&self.name, &e),
            Ok(0) => Fault::remote(format_args!("{} has closed the connection", self.name)),
            Ok(_) => Fault::remote(format_args!("{} sent what nobody asked for", self.name)),
        };
        comm.failure.record(fault);
        Turn::Over
    }
}

/// The receiving side of a socket.
pub struct Receiver {
    conn: Box<dyn Conn>,
    name: LinkName,
    /// Its number among those of its comm.
    socket: usize,
    header: [u8; HEADER_BYTES],
    head_bytes: usize,
    payload: Option<Payload>,
    over: bool,
}

/// The payload of a piece, on its way in.
struct Payload {
    message: u64,
    piece_bytes: usize,
    next: *mut u8,
    left_bytes: usize,
}

// SAFETY: as for Sender; the memory is NCCL's, to be written by whichever thread holds this.
unsafe impl Send for Receiver {}

impl Receiver {
    /// Over a connection that has proved itself.
    pub fn new(Link { conn, name }: Link, socket: usize) -> Receiver {
        Receiver { conn, name, socket, header: [0; HEADER_BYTES], head_bytes: 0, payload: None, over: false }
    }

    /// The connection.
    pub fn conn(&mut self) -> &mut dyn Conn {
        self.conn.as_mut()
    }

    /// Whether a payload is under way.
    pub fn is_busy(&self) -> bool {
        self.payload.is_some()
    }

    /// Ends the connection: memory of receives is not touched any more.
    pub fn stop(&mut self) {
        self.payload = None;
        self.over = true;
        self.conn.shutdown();
    }

    /// Receives what is there, until nothing is left or others should have their turn.
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
                Err(e) => return self.breaks(comm, Fault::connection(&self.name, &e)),
            };
            received += bytes;
            self.arrived(comm, bytes);
            // Less than was asked for: there is no more, which another call would only confirm.
            if bytes < wanted && self.head_bytes < HEADER_BYTES {
                return Turn::Idle;
            }
        }
        Turn::More
    }

    /// One call: the rest of a payload together with the header after it, or the rest of a header. Gives the bytes
    /// that came, and those that were asked for.
    fn receive(&mut self) -> io::Result<(usize, usize)> {
        let (next, payload_bytes) = self
            .payload
            .as_ref()
            .map_or((self.header.as_mut_ptr(), 0), |payload| (payload.next, payload.left_bytes));
        let header = &mut self.header[self.head_bytes..];
        let pieces = [IoVec::new(next, payload_bytes), IoVec::new(header.as_mut_ptr(), header.len())];
        let wanted = payload_bytes + header.len();
        // SAFETY: the header is ours; the payload's place was checked against its receive, whose buffer is nobody
        // else's until it is done or the comm closed, which waits for this connection.
        Ok((unsafe { self.conn.recv(&pieces) }?, wanted))
    }

    /// Counts what one call has placed.
    fn arrived(&mut self, comm: &Receiving, mut bytes: usize) {
        if let Some(payload) = &mut self.payload {
            let here = bytes.min(payload.left_bytes);
            // SAFETY: within the piece.
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

    /// Finds the place of the piece whose header is here. The message to wait for, if it has none yet.
    fn place(&mut self, comm: &Receiving) -> Result<Option<u64>, Fault> {
        let header = Header::from_bytes(&self.header)
            .ok_or_else(|| Fault::remote(format_args!("{} sent what is no message", self.name)))?;
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

    /// The stream has ended, in order or within a message.
    fn end(&mut self, comm: &Receiving) -> Turn {
        if self.payload.is_some() || self.head_bytes > 0 {
            let why = format_args!("{} closed the connection within a message", self.name);
            return self.breaks(comm, Fault::remote(why));
        }
        self.over = true;
        comm.ended(self.socket);
        Turn::Over
    }

    /// Nothing more comes from this stream, and the message under way stays without a part.
    fn breaks(&mut self, comm: &Receiving, fault: Fault) -> Turn {
        let placed = self.payload.take().map(|payload| payload.message);
        let met = || (self.head_bytes == HEADER_BYTES).then(|| Header::from_bytes(&self.header)).flatten();
        self.over = true;
        comm.broke(self.socket, placed.or_else(|| met().map(|header| header.message)), fault);
        Turn::Over
    }
}
