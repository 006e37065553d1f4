//! The batch of buffers that one socket call sends.
//!
//! Invariant: the pieces of a batch are consecutive bytes of the stream. After the first piece that did not
//! fit, no piece is added.
//! Read next: `sender.rs`, which gathers frames into a batch.

use std::io;

use ferrywire_net::{Conn, IoVec};
use ferrywire_proto::limits;

// One call can take a header, its placements, the blocks of the payload and a notification.
const _: () = assert!(limits::SEGMENTS_PER_CHUNK_MAX + 2 <= ferrywire_sys::IOVECS_PER_CALL_MAX);

/// The buffers of one socket call.
pub(super) struct Batch<'a> {
    pieces: &'a mut Vec<IoVec>,
    bytes: usize,
    /// Bytes at the front of the next pieces that an earlier call has sent.
    pub skip: usize,
    /// Whether this call sends without a copy. The first piece decides, where `split`.
    stable: Option<bool>,
    /// The connection can send without copies; a call sends either all of its pieces so, or none.
    split: bool,
    /// Whether the connection takes lent pieces, whose memory the kernel reads until the peer has placed
    /// them.
    pub lends: bool,
    /// Whether the last piece is lent.
    lent: bool,
    /// Whether a piece was left for the next call. All later pieces then follow in that call too.
    closed: bool,
    /// Whether the duration of the call is measured.
    pub timed: bool,
}

impl<'a> Batch<'a> {
    /// Creates an empty batch for one call of this connection.
    pub fn new(pieces: &'a mut Vec<IoVec>, conn: &dyn Conn) -> Batch<'a> {
        pieces.clear();
        Batch {
            pieces,
            bytes: 0,
            skip: 0,
            stable: None,
            split: conn.zero_copy(),
            // On a path with a long RTT a lent piece would stay in use for one RTT.
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

    /// Adds a lent piece, if there is room, and closes the batch. Returns whether the piece was added.
    pub fn lend(&mut self, base: *mut u8, len: usize) -> bool {
        let before = self.pieces.len();
        self.add(base, len, false);
        let taken = self.pieces.len() > before;
        self.lent |= taken;
        self.closed |= taken;
        taken
    }

    /// Adds a piece. `stable` allows the kernel to send the piece without a copy.
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

    /// Makes the socket call. Returns the bytes that the kernel took.
    ///
    /// # Safety
    /// Each piece is readable for the length of the call. A `stable` piece stays readable until
    /// `Conn::released` has passed it, or the connection is dropped. A lent piece is not written to before
    /// the peer has placed its frame, or its pages have been given back to the system.
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
