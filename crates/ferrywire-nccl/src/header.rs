//! The header before each piece of a message.
//!
//! It has 64 bytes, so that payload keeps its alignment in the stream and the kernel copies whole cache lines.

use crate::handle::array;

/// Bytes of an encoded header.
pub const HEADER_BYTES: usize = 64;

const MAGIC: u32 = u32::from_le_bytes(*b"FWnp");

/// The header of a piece: which bytes of which message follow it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Number of the message within the comm.
    pub message: u64,
    /// Length of the whole message, in bytes.
    pub total_bytes: u64,
    /// The piece's offset in the message, in bytes.
    pub offset: u64,
    /// Length of the piece, in bytes.
    pub bytes: u64,
    /// Tag that the sender gave the message.
    pub tag: i32,
}

impl Header {
    /// Encodes the header of a piece.
    pub fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.tag.to_le_bytes());
        for (index, number) in
            [self.message, self.total_bytes, self.offset, self.bytes].into_iter().enumerate()
        {
            bytes[8 + 8 * index..][..8].copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    /// Decodes a header; `None` if the bytes are not one, if the piece is outside of its message, or for the last
    /// message number, which stands for none.
    pub fn from_bytes(bytes: &[u8; HEADER_BYTES]) -> Option<Header> {
        let number = |index: usize| u64::from_le_bytes(array(bytes, 8 + 8 * index));
        let header = Header {
            message: number(0),
            total_bytes: number(1),
            offset: number(2),
            bytes: number(3),
            tag: i32::from_le_bytes(array(bytes, 4)),
        };
        let fits = header.offset.checked_add(header.bytes).is_some_and(|end| end <= header.total_bytes);
        let empty = header.bytes == 0 && header.total_bytes != 0;
        let counted = header.message < u64::MAX;
        (array(bytes, 0) == MAGIC.to_le_bytes() && fits && !empty && counted).then_some(header)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: Header = Header { message: 3, total_bytes: 100, offset: 60, bytes: 40, tag: -2 };

    #[test]
    fn a_head_survives_its_bytes() {
        assert_eq!(Header::from_bytes(&HEAD.to_bytes()), Some(HEAD));
        let empty = Header { message: 0, total_bytes: 0, offset: 0, bytes: 0, tag: 0 };
        assert_eq!(Header::from_bytes(&empty.to_bytes()), Some(empty));
    }

    #[test]
    fn pieces_outside_of_their_message_and_messages_that_cannot_be_are_refused() {
        for (offset, bytes) in [(61, 40), (u64::MAX, 40), (60, u64::MAX), (101, 0), (60, 0)] {
            assert_eq!(
                Header::from_bytes(&Header { offset, bytes, ..HEAD }.to_bytes()),
                None,
                "{offset} {bytes}"
            );
        }
        // Regression: a worker took this number for "none" and never slept.
        assert_eq!(Header::from_bytes(&Header { message: u64::MAX, ..HEAD }.to_bytes()), None);
        let mut bytes = HEAD.to_bytes();
        bytes[0] ^= 1;
        assert_eq!(Header::from_bytes(&bytes), None);
    }
}
