//! A connection whose bytes travel in records that are encrypted, or only authenticated.
//!
//! ```text
//! send   pieces --seal--> `outgoing` --> the connection below, long sends without a copy
//! recv   the connection below --> `incoming` --open--> pieces
//! ```
//!
//! Bytes count as received only after their record's tag is verified. Until then the piece may contain bytes
//! that an attacker has changed; a record that does not open leaves zeros there. A send does not wait until a
//! record is full: the bytes of one call are sealed at once. Short pieces share records, and cost one copy
//! more at each end.
//!
//! Invariants: bytes that `send` has taken are sealed once, whatever the kernel takes; after a record that
//! does not open nothing is received any more.
//! Read next: `sealed/outgoing.rs`; `record.rs` in the crate `ferrywire-proto`, which defines the format of
//! records.

mod outgoing;

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::RawFd;

use ferrywire_proto::limits::RECORD_BYTES_MAX;
use ferrywire_proto::protection::Protection;
use ferrywire_proto::record::{
    RECORD_HEADER_BYTES, RECORD_OVERHEAD, RECORD_TAG_BYTES, RecordError, RecordSecrets, Records,
};

use crate::{Conn, ConnOptions, IoVec, PathHealth};
use outgoing::Outgoing;

/// Shortest piece in bytes that has records of its own.
const OWN_RECORD_BYTES_MIN: usize = 16 << 10;

/// A connection that encrypts or only authenticates its bytes.
pub struct Sealed {
    inner: Box<dyn Conn>,
    sealer: Records,
    opener: Records,
    outgoing: Outgoing,
    /// The payload of a record that is made of short pieces.
    joined: Vec<u8>,
    /// Bytes of record headers and tags sealed so far.
    overhead: u64,
    incoming: Incoming,
    /// Why no further record of the peer can be opened.
    failure: Option<RecordError>,
}

/// Received bytes: `payload` of the record that was opened last, then records that are not opened yet.
struct Incoming {
    buffer: Vec<u8>,
    payload: (usize, usize),
    sealed: (usize, usize),
}

impl fmt::Debug for Sealed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sealed({} to {})", self.inner.local(), self.inner.remote())
    }
}

impl Sealed {
    /// A connection that protects all later bytes of `inner`. `initiates` says whether this end has opened
    /// the connection.
    pub fn new(
        inner: Box<dyn Conn>,
        protection: Protection,
        secrets: RecordSecrets,
        initiates: bool,
    ) -> Sealed {
        let RecordSecrets { from_initiator, from_responder } = secrets;
        let (ours, theirs) =
            if initiates { (from_initiator, from_responder) } else { (from_responder, from_initiator) };
        Sealed {
            inner,
            sealer: Records::new(protection, ours),
            opener: Records::new(protection, theirs),
            outgoing: Outgoing::default(),
            joined: Vec::new(),
            overhead: 0,
            incoming: Incoming { buffer: Vec::new(), payload: (0, 0), sealed: (0, 0) },
            failure: None,
        }
    }

    /// Lends the records of long sends to the kernel from now on, instead of having them copied. The caller
    /// must report by [`placed`](Conn::placed) how many bytes the peer has placed.
    pub fn lending(mut self) -> Sealed {
        self.outgoing.lend();
        self
    }

    /// Seals bytes at `cursor`, at most as many as `outgoing` has room for at the chosen place. Returns the
    /// number of bytes sealed.
    ///
    /// # Safety
    /// The pieces are readable.
    unsafe fn seal(&mut self, cursor: &mut Cursor<'_>) -> io::Result<usize> {
        let mut taken = 0;
        loop {
            // A long piece has records of its own: they are sealed without a copy, and mostly opened without one.
            let run = cursor.run(OWN_RECORD_BYTES_MIN).min(RECORD_BYTES_MAX);
            let Some(record) = self.outgoing.room(run + RECORD_OVERHEAD).filter(|_| run > 0) else {
                return Ok(taken);
            };
            let sealed = match cursor.piece() {
                Some(piece) if piece.len >= run => {
                    // SAFETY: the caller promises that the pieces are readable.
                    let payload = unsafe { std::slice::from_raw_parts(piece.base, run) };
                    cursor.take(run, |_| {});
                    self.sealer.seal_from(payload, record)
                }
                _ => {
                    // Not in the record: a slot contains nothing but sealed bytes at any time.
                    self.joined.clear();
                    cursor.take(run, |piece| {
                        // SAFETY: the caller promises that the pieces are readable.
                        let part = unsafe { std::slice::from_raw_parts(piece.base, piece.len) };
                        self.joined.extend_from_slice(part);
                    });
                    self.sealer.seal_from(&self.joined, record)
                }
            };
            sealed.map_err(broken)?;
            self.outgoing.sealed(run);
            self.overhead += RECORD_OVERHEAD as u64;
            taken += run;
        }
    }

    /// Hands sealed records to the kernel until it has all of them or has no room.
    fn push(&mut self) -> io::Result<()> {
        self.outgoing.push(&mut *self.inner)
    }

    /// Opens the next record if it is complete: directly into the piece at `cursor` if it has room for the whole record, else
    /// in place. Returns the bytes that are now in the piece, or `None` while no record is complete.
    ///
    /// # Safety
    /// The pieces are writable.
    unsafe fn open(&mut self, cursor: &mut Cursor<'_>) -> Result<Option<usize>, RecordError> {
        let Incoming { buffer, payload, sealed: (start, end) } = &mut self.incoming;
        let Some(header) = buffer[*start..*end].first_chunk() else { return Ok(None) };
        let bytes = Records::record_bytes(*header)?;
        if *end - *start < bytes {
            return Ok(None);
        }
        let record = &mut buffer[*start..*start + bytes];
        let payload_bytes = bytes - RECORD_OVERHEAD;
        let direct = cursor
            .piece()
            .filter(|piece| payload_bytes >= OWN_RECORD_BYTES_MIN && piece.len >= payload_bytes);
        let placed = match direct {
            Some(piece) => {
                // SAFETY: the caller promises that the pieces are writable.
                let target = unsafe { std::slice::from_raw_parts_mut(piece.base, payload_bytes) };
                self.opener.open_into(record, target)?;
                cursor.take(payload_bytes, |_| {});
                payload_bytes
            }
            None => {
                self.opener.open(record)?;
                *payload = (*start + RECORD_HEADER_BYTES, *start + bytes - RECORD_TAG_BYTES);
                0
            }
        };
        *start += bytes;
        Ok(Some(placed))
    }

    /// Reads more records from the connection below. Returns whether the kernel may have more.
    fn fill(&mut self) -> io::Result<bool> {
        let Incoming { buffer, sealed: (start, end), .. } = &mut self.incoming;
        outgoing::allocate(buffer);
        if *start > 0 {
            buffer.copy_within(*start..*end, 0);
            (*start, *end) = (0, *end - *start);
        }
        let bytes = self.inner.read(&mut buffer[*end..])?;
        if bytes == 0 && *end > 0 {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the protected connection ended within a record: the peer or the network cut it",
            ));
        }
        if bytes == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
        }
        *end += bytes;
        Ok(*end == buffer.len())
    }
}

fn broken(error: RecordError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

impl Conn for Sealed {
    unsafe fn send(&mut self, pieces: &[IoVec]) -> io::Result<usize> {
        let mut cursor = Cursor::new(pieces);
        if cursor.left() == 0 {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        self.push()?;
        let (bytes, mut taken) = (cursor.left(), 0);
        loop {
            self.outgoing.choose(bytes, &*self.inner);
            // SAFETY: the caller promises that the pieces are readable.
            taken += unsafe { self.seal(&mut cursor) }?;
            match self.push() {
                Ok(()) if cursor.left() > 0 => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && taken > 0 => return Ok(taken),
                Err(error) => return Err(error),
                Ok(()) => return Ok(taken),
            }
        }
    }

    unsafe fn recv(&mut self, pieces: &[IoVec]) -> io::Result<usize> {
        let mut cursor = Cursor::new(pieces);
        if cursor.left() == 0 {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        let (mut placed, mut may_have_more) = (0, true);
        loop {
            let Incoming { buffer, payload: (from, to), .. } = &mut self.incoming;
            let bytes = (*to - *from).min(cursor.left());
            if bytes > 0 {
                cursor.take(bytes, |piece| {
                    // SAFETY: the caller promises that the piece is writable; `buffer` is this connection's own.
                    unsafe { std::ptr::copy_nonoverlapping(buffer[*from..].as_ptr(), piece.base, piece.len) };
                    *from += piece.len;
                });
                placed += bytes;
                if cursor.left() == 0 {
                    return Ok(placed);
                }
            }
            if let Some(failure) = self.failure {
                return if placed > 0 { Ok(placed) } else { Err(broken(failure)) };
            }
            // SAFETY: the caller promises that the pieces are writable.
            match unsafe { self.open(&mut cursor) } {
                Ok(Some(bytes)) => {
                    placed += bytes;
                    if cursor.left() == 0 {
                        return Ok(placed);
                    }
                    continue;
                }
                Ok(None) => {}
                Err(failure) => {
                    self.failure = Some(failure);
                    continue;
                }
            }
            // The kernel had fewer bytes than there was room for: another call would be in vain.
            let filled = if may_have_more { self.fill() } else { Err(io::ErrorKind::WouldBlock.into()) };
            match filled {
                Ok(more) => may_have_more = more,
                Err(_) if placed > 0 => return Ok(placed),
                Err(error) if error.get_ref().is_none() && error.kind() == io::ErrorKind::UnexpectedEof => {
                    return Ok(0);
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn abort(&mut self) {
        self.inner.abort();
    }

    fn placed(&mut self, bytes: u64) {
        self.outgoing.placed(bytes);
    }

    fn has_unsent(&self) -> bool {
        self.outgoing.unsent() > 0
    }

    fn flush(&mut self) -> io::Result<()> {
        self.push()
    }

    fn has_received(&self) -> bool {
        let Incoming { buffer, payload: (from, to), sealed: (start, end) } = &self.incoming;
        let complete = |header: &[u8; RECORD_HEADER_BYTES]| {
            Records::record_bytes(*header).map_or(true, |bytes| end - start >= bytes)
        };
        from < to || self.failure.is_some() || buffer[*start..*end].first_chunk().is_some_and(complete)
    }

    fn begun_bytes(&self) -> usize {
        let (start, end) = self.incoming.sealed;
        end - start
    }

    fn within_host(&self) -> bool {
        self.inner.within_host()
    }

    fn is_long(&self) -> bool {
        self.inner.is_long()
    }

    fn unsent_bytes(&self) -> usize {
        self.inner.unsent_bytes() + self.outgoing.unsent()
    }

    /// The health of the underlying connection. `acked_bytes` counts payload, and at most as much as the
    /// peer's kernel has acknowledged.
    fn health(&self) -> PathHealth {
        let health = self.inner.health();
        PathHealth { acked_bytes: health.acked_bytes.saturating_sub(self.overhead), ..health }
    }

    fn shutdown(&mut self) {
        self.inner.shutdown();
    }

    fn fd(&self) -> Option<RawFd> {
        self.inner.fd()
    }

    fn local(&self) -> SocketAddr {
        self.inner.local()
    }

    fn remote(&self) -> SocketAddr {
        self.inner.remote()
    }

    fn tune(&mut self, options: &ConnOptions) {
        self.inner.tune(options);
    }

    fn buffer_bytes(&self) -> (usize, usize) {
        self.inner.buffer_bytes()
    }

    fn congestion_control(&self) -> String {
        self.inner.congestion_control()
    }
}

/// A position in a list of pieces.
struct Cursor<'a> {
    pieces: &'a [IoVec],
    /// Bytes of the first piece that lie before the position.
    within: usize,
    left: usize,
}

impl<'a> Cursor<'a> {
    fn new(pieces: &'a [IoVec]) -> Cursor<'a> {
        Cursor { pieces, within: 0, left: pieces.iter().map(|piece| piece.len).sum() }
    }

    /// Number of bytes from the cursor to the end of the pieces.
    fn left(&self) -> usize {
        self.left
    }

    /// The part of the current piece behind the position; `None` at the end of the list.
    fn piece(&mut self) -> Option<IoVec> {
        while let Some(piece) = self.pieces.first() {
            if self.within < piece.len {
                // SAFETY: `within` is less than the length of the piece.
                return Some(IoVec::new(unsafe { piece.base.add(self.within) }, piece.len - self.within));
            }
            self.pieces = &self.pieces[1..];
            self.within = 0;
        }
        None
    }

    /// Length in bytes of the piece at the position if it is at least `long`, else of all pieces before the
    /// next one that is.
    fn run(&mut self, long: usize) -> usize {
        let Some(piece) = self.piece() else { return 0 };
        if piece.len >= long {
            return piece.len;
        }
        let short = self.pieces[1..].iter().map(|piece| piece.len).take_while(|len| *len < long);
        piece.len + short.sum::<usize>()
    }

    /// Calls `each` for the next `bytes` bytes, in parts, and moves the position behind them.
    fn take(&mut self, mut bytes: usize, mut each: impl FnMut(IoVec)) {
        debug_assert!(bytes <= self.left);
        self.left -= bytes;
        while bytes > 0 {
            let piece = self.pieces[0];
            let part = (piece.len - self.within).min(bytes);
            if part > 0 {
                // SAFETY: `within + part` is at most the length of the piece.
                each(IoVec::new(unsafe { piece.base.add(self.within) }, part));
            }
            bytes -= part;
            self.within += part;
            if self.within == piece.len {
                self.pieces = &self.pieces[1..];
                self.within = 0;
            }
        }
    }
}

#[cfg(test)]
mod tests;
