//! The rest of a frame's body that is still to be received, and its target.
//!
//! A body is received in *parts*. Most bodies are one part. A payload that goes through a staging ring has
//! several: each part needs room in the ring.
//!
//! Invariant: bytes are taken in the order of the stream, and `part_left <= left`.
//! Read next: `receiver.rs`, which fills the body.

use ferrywire_net::IoVec;

// SAFETY: the pieces point into memory that the frame's landing keeps alive, into a ring of the channel's payload, or into
// the body's own message; whichever thread owns the channel may write there.
unsafe impl Send for Body {}

/// The body of the frame that is being received. Placements are not part of the body.
#[derive(Default)]
pub(super) struct Body {
    /// Targets of the current part. If empty, its bytes are discarded.
    pub pieces: Vec<IoVec>,
    /// Index of the first piece that is not full.
    next: usize,
    /// Bytes that are still to be received, of the body and of the current part.
    left: usize,
    part_left: usize,
    /// The notification or message that follows the payload.
    message: Vec<u8>,
    /// Checksum of the bytes received so far, if the frame has one.
    crc: Option<crc32fast::Hasher>,
}

impl Body {
    /// Starts a body of `bytes` bytes.
    pub fn begin(&mut self, bytes: usize, has_crc: bool) {
        self.pieces.clear();
        self.next = 0;
        (self.left, self.part_left) = (bytes, bytes);
        self.message.clear();
        self.crc = has_crc.then(crc32fast::Hasher::new);
    }

    /// Adds a buffer of `len` bytes for the message that follows the payload.
    pub fn expect_message(&mut self, len: usize) {
        self.message.resize(len, 0);
        if len > 0 {
            self.pieces.push(IoVec::new(self.message.as_mut_ptr(), len));
        }
    }

    /// Starts a part whose bytes go to `piece`. `message` is the length of the message behind the last part.
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

    /// Ends the current part while the next one has no room yet.
    pub fn close_part(&mut self) {
        self.pieces.clear();
        self.next = 0;
        self.part_left = 0;
    }

    /// Discards the rest of the body.
    pub fn throw_away(&mut self) {
        self.pieces.clear();
        self.next = 0;
        self.part_left = self.left;
    }

    /// Bytes of the body that are still to be received.
    pub fn left(&self) -> usize {
        self.left
    }

    /// Whether the current part has been received completely.
    pub fn part_is_whole(&self) -> bool {
        self.part_left == 0
    }

    /// Whether the rest of the body is discarded.
    pub fn is_thrown_away(&self) -> bool {
        self.pieces.is_empty() && self.left > 0
    }

    /// Targets of the rest of the current part.
    pub fn rest(&self) -> &[IoVec] {
        &self.pieces[self.next..]
    }

    /// Notes that `bytes` bytes were received into the pieces.
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

    /// Copies bytes from the scratch buffer to the current part. Returns the number of bytes taken.
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

    /// Skips the checksum here: the frame's checksum also covers bytes that travel beside the stream.
    pub fn leave_unchecked(&mut self) {
        self.crc = None;
    }

    /// The checksum of all received bytes, if the frame has one.
    pub fn take_crc(&mut self) -> Option<u32> {
        self.crc.take().map(crc32fast::Hasher::finalize)
    }

    /// Takes the message that was received.
    pub fn take_message(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.message)
    }
}
