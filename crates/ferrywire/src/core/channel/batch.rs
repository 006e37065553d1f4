//! The pieces of one socket call.
//!
//! Invariant: the pieces of a call are consecutive bytes of the stream; after one that was left out none is added.
//! Read next: `sender.rs`, which gathers frames into a batch.

use std::io;

use ferrywire_net::{Conn, IoVec};
use ferrywire_proto::limits;

// A header, the blocks of its payload and a notification go out in one call.
const _: () = assert!(limits::SEGMENTS_PER_CHUNK_MAX + 2 <= ferrywire_sys::IOVECS_PER_CALL_MAX);

/// The pieces of one socket call.
pub(super) struct Batch<'a> {
    pieces: &'a mut Vec<IoVec>,
    bytes: usize,
    /// Bytes at the front that are sent already.
    pub skip: usize,
    /// Whether this call is without copies; set by its first piece where `split`.
    stable: Option<bool>,
    /// Calls with and without copies are kept apart.
    split: bool,
    /// Whether the connection takes pieces that are lent.
    pub lends: bool,
    /// The last piece is lent.
    lent: bool,
    /// A piece was left for the next call, and so is everything behind it.
    closed: bool,
    /// How long the call takes is to be counted.
    pub timed: bool,
}

impl<'a> Batch<'a> {
    /// An empty one, for a call of this connection.
    pub fn new(pieces: &'a mut Vec<IoVec>, conn: &dyn Conn) -> Batch<'a> {
        pieces.clear();
        Batch {
            pieces,
            bytes: 0,
            skip: 0,
            stable: None,
            split: conn.zero_copy(),
            // Over a long path what is lent would be free only a round trip later.
            lends: conn.lends() && !conn.is_long(),
            lent: false,
            closed: false,
            timed: false,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Bytes of all pieces.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn is_full(&self) -> bool {
        self.closed
            || self.bytes >= limits::SEND_BYTES_PER_CALL_MAX
            || self.pieces.len() + 3 > ferrywire_sys::IOVECS_PER_CALL_MAX
    }

    /// Adds a piece that is lent, if there is room: it is the last of this call.
    pub fn lend(&mut self, base: *mut u8, len: usize) -> bool {
        let before = self.pieces.len();
        self.add(base, len, false);
        let taken = self.pieces.len() > before;
        self.lent |= taken;
        self.closed |= taken;
        taken
    }

    /// Adds a piece; `stable` says that it may be sent without a copy.
    pub fn add(&mut self, base: *mut u8, len: usize, stable: bool) {
        let skip = self.skip.min(len);
        self.skip -= skip;
        if len == skip {
            return;
        }
        self.closed |= self.pieces.len() == ferrywire_sys::IOVECS_PER_CALL_MAX
            || (self.split && *self.stable.get_or_insert(stable) != stable);
        if !self.closed {
            // SAFETY: `skip` is less than the length of the piece.
            self.pieces.push(IoVec::new(unsafe { base.add(skip) }, len - skip));
            self.bytes += len - skip;
        }
    }

    /// The socket call. Returns the bytes that the kernel took.
    ///
    /// # Safety
    /// Each piece is readable for the length of the call. Those that are `stable` stay readable until `Conn::released` has
    /// passed them, or the connection is dropped. One that is lent is not written to before the peer has placed its frame, or
    /// its pages have been given back to the system.
    pub unsafe fn send(self, conn: &mut dyn Conn) -> io::Result<usize> {
        // SAFETY: promised by the caller.
        unsafe {
            match (self.lent, self.stable == Some(true)) {
                (true, _) => conn.send_lent(self.pieces),
                (false, true) => conn.send_stable(self.pieces),
                (false, false) => conn.send(self.pieces),
            }
        }
    }
}
