//! What of a frame's body is still to come, and where it goes.
//!
//! A body is received in *parts*, one after another into the pieces at hand. Mostly the whole body is one part; a payload
//! that waits for room on its way has several.
//!
//! Invariant: bytes are taken in the order of the stream, and `part_left <= left`.
//! Read next: `receiver.rs`, which feeds it.

use ferrywire_net::IoVec;

// SAFETY: the pieces point into memory that the frame's landing keeps alive, into a ring of the channel's payload, or into
// the body's own message; whichever thread owns the channel may write there.
unsafe impl Send for Body {}

/// The body of the frame that is being received, without its placements.
#[derive(Default)]
pub(super) struct Body {
    /// Where the bytes of the part go. None: they are thrown away.
    pub pieces: Vec<IoVec>,
    /// The first piece that is not full.
    next: usize,
    /// Bytes that are still to come, of all and of the part at hand.
    left: usize,
    part_left: usize,
    /// The notification or message that is received behind the payload.
    message: Vec<u8>,
    /// The checksum so far, where the frame has one.
    crc: Option<crc32fast::Hasher>,
}

impl Body {
    /// So many bytes are about to come, with a checksum or without.
    pub fn begin(&mut self, bytes: usize, has_crc: bool) {
        self.pieces.clear();
        self.next = 0;
        (self.left, self.part_left) = (bytes, bytes);
        self.message.clear();
        self.crc = has_crc.then(crc32fast::Hasher::new);
    }

    /// Makes room for bytes that go to a message of our own, behind the payload's pieces.
    pub fn expect_message(&mut self, len: usize) {
        self.message.resize(len, 0);
        if len > 0 {
            self.pieces.push(IoVec::new(self.message.as_mut_ptr(), len));
        }
    }

    /// The next part goes to this piece; with the last one comes a message of this length.
    pub fn open_part(&mut self, piece: IoVec, message: Option<usize>) {
        self.close_part();
        self.pieces.push(piece);
        let message = message.unwrap_or(0);
        self.part_left = piece.len + message;
        debug_assert!(self.part_left <= self.left, "parts are as long as the body");
        if message > 0 {
            self.expect_message(message);
        }
    }

    /// The part at hand is over, and the next one has no room yet.
    pub fn close_part(&mut self) {
        self.pieces.clear();
        self.next = 0;
        self.part_left = 0;
    }

    /// The rest is thrown away.
    pub fn throw_away(&mut self) {
        self.pieces.clear();
        self.next = 0;
        self.part_left = self.left;
    }

    /// Bytes that are still to come.
    pub fn left(&self) -> usize {
        self.left
    }

    /// Whether all of the part at hand is here.
    pub fn part_is_whole(&self) -> bool {
        self.part_left == 0
    }

    /// Whether what comes is thrown away.
    pub fn is_thrown_away(&self) -> bool {
        self.pieces.is_empty() && self.left > 0
    }

    /// The pieces that the rest of the part goes to.
    pub fn rest(&self) -> &[IoVec] {
        &self.pieces[self.next..]
    }

    /// So many bytes were received into the pieces.
    pub fn advance(&mut self, mut bytes: usize) {
        self.left -= bytes;
        self.part_left -= bytes;
        while bytes > 0 {
            let piece = &mut self.pieces[self.next];
            let used = bytes.min(piece.len);
            if let Some(crc) = &mut self.crc {
                // SAFETY: these bytes of the piece were just received.
                crc.update(unsafe { std::slice::from_raw_parts(piece.base, used) });
            }
            // SAFETY: `used` is at most the length of the piece.
            *piece = IoVec::new(unsafe { piece.base.add(used) }, piece.len - used);
            bytes -= used;
            self.next += usize::from(piece.len == 0);
        }
    }

    /// Copies bytes of the part that came through the scratch buffer to their place. Returns how many it took.
    pub fn copy_in(&mut self, bytes: &[u8]) -> usize {
        let used = self.part_left.min(bytes.len());
        if self.pieces.is_empty() {
            self.left -= used;
            self.part_left -= used;
            return used;
        }
        let mut from = &bytes[..used];
        while !from.is_empty() {
            let piece = self.pieces[self.next];
            let now = from.len().min(piece.len);
            // SAFETY: the piece is live memory of at least `now` bytes (see `receive_some`).
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), piece.base, now) };
            self.advance(now);
            from = &from[now..];
        }
        used
    }

    /// The checksum of the frame is of more than the stream brings.
    pub fn leave_unchecked(&mut self) {
        self.crc = None;
    }

    /// The checksum of all that was received into pieces, where the frame has one.
    pub fn take_crc(&mut self) -> Option<u32> {
        self.crc.take().map(crc32fast::Hasher::finalize)
    }

    /// The message that was received.
    pub fn take_message(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.message)
    }
}
