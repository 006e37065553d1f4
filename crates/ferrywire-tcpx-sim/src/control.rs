//! The control socket of a comm: records of 16 bytes from sender to receiver, and small messages inline.
//!
//! The receiver reads into a buffer of 128 bytes until the socket is empty or the buffer is full. If the last records
//! and the end of the stream arrive together, the loop keeps the records, reads the end, and reports an error although
//! it has good data; the next call uses them. This is the one spurious error of a comm whose peer has closed.
//! Invariant: records are taken once, in the order in which they were written.
//! Read next: `progress.rs`, which schedules by these records.

use std::io;

/// Bytes of a record.
pub const RECORD_BYTES: usize = 16;
/// Most records per write, and the size of the receiver's buffer in records.
pub const RECORDS_PER_WRITE: usize = 8;
const INBOX_BYTES: usize = RECORDS_PER_WRITE * RECORD_BYTES;

/// The kind and place of the payload that a record announces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Payload of `size` bytes on data socket `index`.
    Chunk,
    /// Payload of `total` bytes on the control socket.
    Inline,
}

/// One control message, which announces payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Where the payload travels.
    pub kind: Kind,
    /// Index of the chunk's data socket.
    pub index: u16,
    /// Size of the chunk in bytes.
    pub size: u32,
    /// Offset of the chunk in the message.
    pub offset: u32,
    /// Size of the message in bytes.
    pub total: u32,
}

impl Record {
    /// Encodes the record.
    pub fn encode(&self) -> [u8; RECORD_BYTES] {
        let kind: u16 = match self.kind {
            Kind::Chunk => 0,
            Kind::Inline => 1,
        };
        let mut bytes = [0; RECORD_BYTES];
        bytes[0..2].copy_from_slice(&kind.to_ne_bytes());
        bytes[2..4].copy_from_slice(&self.index.to_ne_bytes());
        bytes[4..8].copy_from_slice(&self.size.to_ne_bytes());
        bytes[8..12].copy_from_slice(&self.offset.to_ne_bytes());
        bytes[12..16].copy_from_slice(&self.total.to_ne_bytes());
        bytes
    }

    /// Decodes a record; `None` for an unknown type.
    pub fn decode(bytes: &[u8; RECORD_BYTES]) -> Option<Record> {
        let &[k0, k1, i0, i1, s0, s1, s2, s3, o0, o1, o2, o3, t0, t1, t2, t3] = bytes;
        let kind = match u16::from_ne_bytes([k0, k1]) {
            0 => Kind::Chunk,
            1 => Kind::Inline,
            _ => return None,
        };
        Some(Record {
            kind,
            index: u16::from_ne_bytes([i0, i1]),
            size: u32::from_ne_bytes([s0, s1, s2, s3]),
            offset: u32::from_ne_bytes([o0, o1, o2, o3]),
            total: u32::from_ne_bytes([t0, t1, t2, t3]),
        })
    }
}

/// Why there is no next record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlError {
    /// The peer has closed the connection, or the socket failed.
    Closed,
    /// The bytes are no record: no plugin sends them.
    Garbage,
}

/// Quirks of the real plugin's reader that are switched on.
#[derive(Clone, Copy, Debug)]
pub struct Oddities {
    /// Whether the end of the stream behind good records is an error immediately.
    pub close_error: bool,
    /// Whether half a record is waited for without limit.
    pub spin: bool,
}

/// The receiver's buffer of control bytes.
#[derive(Debug)]
pub struct Inbox {
    bytes: [u8; INBOX_BYTES],
    start: usize,
    end: usize,
    oddities: Oddities,
}

impl Inbox {
    /// An empty buffer for control bytes.
    pub fn new(oddities: Oddities) -> Inbox {
        Inbox { bytes: [0; INBOX_BYTES], start: 0, end: 0, oddities }
    }

    /// The next record; `None` if none has arrived. `recv` never blocks and returns `WouldBlock` instead.
    pub fn next(
        &mut self,
        recv: &mut impl FnMut(&mut [u8]) -> io::Result<usize>,
    ) -> Result<Option<Record>, ControlError> {
        if self.len() == 0 {
            self.refill(recv)?;
        }
        if self.len() == 0 || !self.complete_record(recv)? {
            return Ok(None);
        }
        let bytes = self.bytes[self.start..].first_chunk().ok_or(ControlError::Garbage)?;
        self.start += RECORD_BYTES;
        Record::decode(bytes).ok_or(ControlError::Garbage).map(Some)
    }

    /// Moves up to `target.len()` bytes that were read ahead; returns their number.
    pub fn take_payload(&mut self, target: &mut [u8]) -> usize {
        let count = target.len().min(self.len());
        target[..count].copy_from_slice(&self.bytes[self.start..self.start + count]);
        self.start += count;
        count
    }

    fn len(&self) -> usize {
        self.end - self.start
    }

    /// Reads until the socket is empty or the buffer is full.
    fn refill(&mut self, recv: &mut impl FnMut(&mut [u8]) -> io::Result<usize>) -> Result<(), ControlError> {
        (self.start, self.end) = (0, 0);
        while self.end < INBOX_BYTES {
            match recv(&mut self.bytes[self.end..]) {
                Ok(0) if self.end > 0 && !self.oddities.close_error => break,
                Ok(0) => return Err(ControlError::Closed),
                Ok(count) => self.end += count,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => return Err(ControlError::Closed),
            }
        }
        Ok(())
    }

    /// Reads the rest of the first record. The real plugin does so without limit, even if the peer is
    /// disconnected.
    fn complete_record(
        &mut self,
        recv: &mut impl FnMut(&mut [u8]) -> io::Result<usize>,
    ) -> Result<bool, ControlError> {
        if self.len() < RECORD_BYTES {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.len());
        }
        while self.len() < RECORD_BYTES {
            let end = self.end;
            match recv(&mut self.bytes[end..RECORD_BYTES]) {
                Ok(count) if count > 0 => self.end += count,
                _ if self.oddities.spin => std::thread::yield_now(),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                _ => return Err(ControlError::Closed),
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    const ALL: Oddities = Oddities { close_error: true, spin: true };

    fn chunk(offset: u32, size: u32, total: u32) -> Record {
        Record { kind: Kind::Chunk, index: 0, size, offset, total }
    }

    /// A socket that returns these pieces, then nothing, or its end.
    fn socket(pieces: &[&[u8]], closed: bool) -> impl FnMut(&mut [u8]) -> io::Result<usize> + use<> {
        let mut pieces: VecDeque<Vec<u8>> = pieces.iter().map(|piece| piece.to_vec()).collect();
        move |target| match pieces.front_mut() {
            Some(piece) => {
                let count = piece.len().min(target.len());
                target[..count].copy_from_slice(&piece[..count]);
                piece.drain(..count);
                if piece.is_empty() {
                    pieces.pop_front();
                }
                Ok(count)
            }
            None if closed => Ok(0),
            None => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    #[test]
    fn records_travel_as_traced() {
        let bytes = |record: Record| record.encode().map(|byte| format!("{byte:02x}")).concat();
        assert_eq!(bytes(chunk(0, 4096, 6000)), "00000000001000000000000070170000");
        assert_eq!(bytes(chunk(4096, 1904, 6000)), "00000000700700000010000070170000");
        let empty = Record { kind: Kind::Inline, ..chunk(0, 0, 0) };
        assert_eq!(bytes(empty), "01000000000000000000000000000000");
        assert_eq!(Record::decode(&empty.encode()), Some(empty));
        assert_eq!(Record::decode(&[9; RECORD_BYTES]), None);
    }

    #[test]
    fn records_come_one_by_one_whatever_the_pieces() {
        let stream: Vec<u8> = (0..20).flat_map(|k| chunk(k, 1, 20).encode()).collect();
        for piece in [1, 7, 16, 48, 320] {
            let pieces: Vec<&[u8]> = stream.chunks(piece).collect();
            let (mut inbox, mut recv) = (Inbox::new(ALL), socket(&pieces, false));
            for k in 0..20 {
                assert_eq!(inbox.next(&mut recv), Ok(Some(chunk(k, 1, 20))), "pieces of {piece}");
            }
            assert_eq!(inbox.next(&mut recv), Ok(None));
        }
    }

    #[test]
    fn an_end_behind_good_records_is_one_error_and_then_the_records() {
        let stream = [chunk(0, 1, 2).encode(), chunk(1, 1, 2).encode()].concat();
        let (mut inbox, mut recv) = (Inbox::new(ALL), socket(&[&stream], true));
        assert_eq!(inbox.next(&mut recv), Err(ControlError::Closed));
        assert_eq!(inbox.next(&mut recv), Ok(Some(chunk(0, 1, 2))));
        assert_eq!(inbox.next(&mut recv), Ok(Some(chunk(1, 1, 2))));
        assert_eq!(inbox.next(&mut recv), Err(ControlError::Closed));
    }

    #[test]
    fn a_full_buffer_hides_the_end() {
        let stream = [chunk(0, 1, 1).encode(); RECORDS_PER_WRITE].concat();
        let (mut inbox, mut recv) = (Inbox::new(ALL), socket(&[&stream], true));
        (0..RECORDS_PER_WRITE).for_each(|_| assert!(matches!(inbox.next(&mut recv), Ok(Some(_)))));
    }

    #[test]
    fn without_the_oddity_the_end_comes_after_the_records() {
        let oddities = Oddities { close_error: false, spin: false };
        let record = chunk(0, 1, 1);
        let (mut inbox, mut recv) = (Inbox::new(oddities), socket(&[&record.encode()], true));
        assert_eq!(inbox.next(&mut recv), Ok(Some(record)));
        assert_eq!(inbox.next(&mut recv), Err(ControlError::Closed));
        let (mut inbox, mut recv) = (Inbox::new(oddities), socket(&[&[0; 8]], true));
        assert_eq!(inbox.next(&mut recv), Err(ControlError::Closed));
    }

    #[test]
    fn payload_read_too_far_is_given_out() {
        let inline = Record { kind: Kind::Inline, ..chunk(0, 0, 5) };
        let stream = [&inline.encode()[..], b"hello", &chunk(0, 1, 1).encode()].concat();
        let (mut inbox, mut recv) = (Inbox::new(ALL), socket(&[&stream[..30], &stream[30..]], false));
        assert_eq!(inbox.next(&mut recv), Ok(Some(inline)));
        let mut text = [0; 5];
        assert_eq!(inbox.take_payload(&mut text), 5);
        assert_eq!(&text, b"hello");
        assert_eq!(inbox.next(&mut recv), Ok(Some(chunk(0, 1, 1))));
    }
}
