//! The pieces of one socket call.

use ferrywire_net::IoVec;
use ferrywire_proto::limits;

// A head, the blocks of its payload and a notification go out in one call.
const _: () = assert!(limits::SEGMENTS_PER_CHUNK_MAX + 2 <= ferrywire_sys::IOVECS_PER_CALL_MAX);

/// The pieces of one socket call.
pub(super) struct Batch<'a> {
    pub(super) pieces: &'a mut Vec<IoVec>,
    pub(super) bytes: usize,
    /// Bytes at the front that are sent already.
    pub(super) skip: usize,
    /// Whether this call is without copies; set by its first piece where `split`.
    pub(super) stable: Option<bool>,
    /// Calls with and without copies are kept apart.
    pub(super) split: bool,
    /// The last piece is lent.
    pub(super) lent: bool,
    /// A piece was left for the next call, and so is everything behind it.
    pub(super) closed: bool,
}

impl Batch<'_> {
    pub(super) fn full(&self) -> bool {
        self.closed
            || self.bytes >= limits::SEND_BYTES_PER_CALL_MAX
            || self.pieces.len() + 3 > ferrywire_sys::IOVECS_PER_CALL_MAX
    }

    /// Adds a piece that is lent, if there is room: it is the last of this call.
    pub(super) fn lend(&mut self, base: *mut u8, len: usize) -> bool {
        let before = self.pieces.len();
        self.add(base, len, false);
        let taken = self.pieces.len() > before;
        self.lent |= taken;
        self.closed |= taken;
        taken
    }

    pub(super) fn add(&mut self, base: *mut u8, len: usize, stable: bool) {
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
}
