//! The frames of a data channel.
//!
//! A frame is a [`Header`], then `segments` placement descriptors, then `len` payload bytes, then `notify`
//! message bytes. Every frame but [`Kind::Ack`] occupies an entry in the channel's window and is acknowledged
//! by count; each header also carries the count of the other direction.
//!
//! Invariant: [`Header::decode`] rejects every header that breaks a limit of `limits.rs`, so its result may
//! size buffers. Pure: bytes in, values out.
//! Read next: `window.rs`, the engine's `channel/`.

use crate::limits;

/// Bytes of an encoded [`Header`].
pub const HEADER_BYTES: usize = 64;
/// Bytes of an encoded [`Placement`].
pub const PLACEMENT_BYTES: usize = 12;
/// Bytes of an encoded refusal in an [`Kind::Ack`] frame.
pub const REFUSAL_BYTES: usize = 8;

const MAGIC: u16 = 0xfe77;
const PLACEMENTS_CRC_AT: usize = 52;
/// Offset of the header's own checksum, used with [`FLAG_CRC`]. It covers all other bytes of the header,
/// since a wrong offset or count must not be acted on.
const HEAD_CRC_AT: usize = 56;
const POSTED_AT: usize = 60;

/// Kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Payload for the region or sink `key`, at `offset` or at the descriptors' offsets.
    Data = 1,
    /// Acknowledgement only; its payload lists refused frames.
    Ack = 2,
    /// A notification, delivered once `total` bytes of `transfer` are placed. With `total` 0 it is
    /// standalone: `transfer` is its number, and notifications are delivered by number. With [`WITHDRAWN`]
    /// the transfer has failed.
    Notify = 3,
    /// An eager message with tag `key`; `offset` is its number among the sender's messages.
    Send = 4,
    /// Announces a message with tag `key` and `total` bytes; `offset` is its number, as in `Send`. With
    /// [`WITHDRAWN`] the announcement is taken back.
    Announce = 5,
    /// The announced message `transfer` is matched, and may go to sink `key`.
    Match = 6,
    /// Returns `total` bytes of eager credit.
    Credit = 7,
    /// Requests the descriptors' ranges of region `key`, to be written to sink `total` at `offset`.
    Read = 8,
    /// Refuses `transfer`, a read or an announced send; `key` is the reason's code.
    Refuse = 9,
}

impl Kind {
    fn parse(byte: u8) -> Option<Kind> {
        use Kind::*;
        [Data, Ack, Notify, Send, Announce, Match, Credit, Read, Refuse]
            .into_iter()
            .find(|kind| *kind as u8 == byte)
    }
}

/// Header, descriptors and the bytes behind them each carry a checksum.
pub const FLAG_CRC: u8 = 1;
/// The receiver counts the payload towards `total` of `transfer`; a notification follows them.
pub const FLAG_COUNTED: u8 = 2;
/// `key` is a sink: the temporary target of a matched receive or a read.
pub const FLAG_SINK: u8 = 4;
/// The payload is not in the stream: it is the next message of the channel's lane.
pub const FLAG_POSTED: u8 = 8;
/// In an [`Kind::Ack`]: payload of the lane has waited for the receiver's GPU for long, and the lane's packets may be
/// dropped for lack of buffers.
pub const FLAG_HELD: u8 = 16;
/// `total` of an announcement whose send was cancelled before it was matched, and of a notification whose
/// transfer has failed.
pub const WITHDRAWN: u64 = u64::MAX;

const FLAGS_KNOWN: u8 = FLAG_CRC | FLAG_COUNTED | FLAG_SINK | FLAG_POSTED | FLAG_HELD;

/// The fixed part of a frame. The [`Kind`] defines the meaning of `transfer`, `key`, `offset` and `total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Kind of the frame.
    pub kind: Kind,
    /// Flags of the frame: `FLAG_*` bits.
    pub flags: u8,
    /// Number of placement descriptors that follow; 0 means one placement, at `offset`.
    pub segments: u16,
    /// Payload bytes, without descriptors and notification.
    pub len: u32,
    /// Frames received and placed in the other direction, low 32 bits of their number.
    pub ack: u32,
    /// CRC-32 of payload and notification, with [`FLAG_CRC`].
    pub crc: u32,
    /// The sender's id of the transfer.
    pub transfer: u64,
    /// Key of a region or sink, or the tag of a send.
    pub key: u64,
    /// Offset in the target, or a message's number.
    pub offset: u64,
    /// Total length of the transfer in bytes, or another 64-bit value.
    pub total: u64,
    /// Bytes of the notification behind the payload, which is delivered when the payload is placed.
    pub notify: u16,
    /// CRC-32 of the descriptors, with [`FLAG_CRC`]; checked before they are used.
    pub placements_crc: u32,
    /// Receives posted on the channel's lane in the other direction, low 32 bits of their number; 0 without a
    /// lane.
    pub posted: u32,
}

/// Why bytes are not a valid header or frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The bytes do not start like a header: the stream is out of step, or another protocol.
    #[error("not a frame header")]
    NotAHeader,
    /// A field of the header breaks its limit or contradicts another field.
    #[error("frame field out of range: {0}")]
    OutOfRange(&'static str),
    /// A checksum of the header differs from that of the received bytes.
    #[error("checksum mismatch: expected {expected:08x}, computed {computed:08x}")]
    Checksum {
        /// The checksum in the frame's header.
        expected: u32,
        /// The checksum of the bytes that were received.
        computed: u32,
    },
}

impl Header {
    /// A header of this kind; all other fields are zero.
    pub fn new(kind: Kind) -> Header {
        Header {
            kind,
            flags: 0,
            segments: 0,
            len: 0,
            ack: 0,
            crc: 0,
            transfer: 0,
            key: 0,
            offset: 0,
            total: 0,
            notify: 0,
            placements_crc: 0,
            posted: 0,
        }
    }

    /// Whether the payload travels on the lane.
    #[inline]
    pub fn is_posted(&self) -> bool {
        self.flags & FLAG_POSTED != 0
    }

    /// Bytes of the placement descriptors, which follow the header.
    #[inline]
    pub fn placement_bytes(&self) -> usize {
        usize::from(self.segments) * PLACEMENT_BYTES
    }

    /// Bytes of the frame without its header, on the channel and the lane together.
    #[inline]
    pub fn body_bytes(&self) -> usize {
        self.placement_bytes() + self.len as usize + usize::from(self.notify)
    }

    /// Bytes that follow the header on the channel.
    #[inline]
    pub fn stream_bytes(&self) -> usize {
        self.body_bytes() - if self.is_posted() { self.len as usize } else { 0 }
    }

    /// The header of an eager message's frame whose bytes go to the receive with this sink: as if the message had been
    /// announced.
    pub fn for_sink(&self, key: u64) -> Header {
        let flags = self.flags & FLAG_CRC | FLAG_SINK;
        Header { kind: Kind::Data, flags, key, offset: 0, total: u64::from(self.len), ..*self }
    }

    /// The header of an eager message whose frame had the header [`for_sink`](Header::for_sink): the message has this
    /// tag and number.
    pub fn for_inbox(&self, tag: u64, number: u64) -> Header {
        Header { kind: Kind::Send, flags: self.flags & FLAG_CRC, key: tag, offset: number, total: 0, ..*self }
    }

    /// Encodes the header of the frame.
    #[inline]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0u8; HEADER_BYTES];
        out[0] = self.kind as u8;
        out[1] = self.flags;
        out[2..4].copy_from_slice(&self.segments.to_le_bytes());
        out[4..8].copy_from_slice(&self.len.to_le_bytes());
        out[8..12].copy_from_slice(&self.ack.to_le_bytes());
        out[12..16].copy_from_slice(&self.crc.to_le_bytes());
        out[16..24].copy_from_slice(&self.transfer.to_le_bytes());
        out[24..32].copy_from_slice(&self.key.to_le_bytes());
        out[32..40].copy_from_slice(&self.offset.to_le_bytes());
        out[40..48].copy_from_slice(&self.total.to_le_bytes());
        out[48..50].copy_from_slice(&self.notify.to_le_bytes());
        out[50..52].copy_from_slice(&MAGIC.to_le_bytes());
        out[PLACEMENTS_CRC_AT..][..4].copy_from_slice(&self.placements_crc.to_le_bytes());
        out[POSTED_AT..].copy_from_slice(&self.posted.to_le_bytes());
        seal(&mut out);
        out
    }

    /// Decodes a header, and checks every field against its limit.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Header, WireError> {
        let kind = Kind::parse(bytes[0]).ok_or(WireError::NotAHeader)?;
        let sealed = bytes[1] & FLAG_CRC != 0;
        let zeroes = if sealed { 0..0 } else { PLACEMENTS_CRC_AT..POSTED_AT };
        if u16_at(bytes, 50) != MAGIC || bytes[zeroes].iter().any(|byte| *byte != 0) {
            return Err(WireError::NotAHeader);
        }
        if sealed {
            let (expected, computed) = (u32_at(bytes, HEAD_CRC_AT), head_crc(bytes));
            if expected != computed {
                return Err(WireError::Checksum { expected, computed });
            }
        }
        let header = Header {
            kind,
            flags: bytes[1],
            segments: u16_at(bytes, 2),
            len: u32_at(bytes, 4),
            ack: u32_at(bytes, 8),
            crc: u32_at(bytes, 12),
            transfer: u64_at(bytes, 16),
            key: u64_at(bytes, 24),
            offset: u64_at(bytes, 32),
            total: u64_at(bytes, 40),
            notify: u16_at(bytes, 48),
            placements_crc: u32_at(bytes, PLACEMENTS_CRC_AT),
            posted: u32_at(bytes, POSTED_AT),
        };
        header.check()?;
        Ok(header)
    }

    /// Overwrites the counts of the other direction in an encoded header.
    #[inline]
    pub fn patch_counts(encoded: &mut [u8; HEADER_BYTES], ack: u32, posted: u32) {
        encoded[8..12].copy_from_slice(&ack.to_le_bytes());
        encoded[POSTED_AT..].copy_from_slice(&posted.to_le_bytes());
        seal(encoded);
    }

    fn check(&self) -> Result<(), WireError> {
        let bad = |what| Err(WireError::OutOfRange(what));
        if self.flags & !FLAGS_KNOWN != 0 {
            return bad("flags");
        }
        if self.is_posted() && (self.kind != Kind::Data || self.len == 0) {
            return bad("flags for this kind");
        }
        if self.flags & FLAG_HELD != 0 && self.kind != Kind::Ack {
            return bad("flags for this kind");
        }
        if usize::from(self.segments) > limits::SEGMENTS_PER_CHUNK_MAX {
            return bad("segments");
        }
        if usize::from(self.notify) > limits::NOTIFY_BYTES_MAX || (self.notify > 0 && self.kind != Kind::Data)
        {
            return bad("notify");
        }
        let len = self.len as usize;
        let (len_max, segments_ok) = match self.kind {
            Kind::Data => (limits::CHUNK_BYTES_MAX, true),
            Kind::Ack => (limits::WINDOW_FRAMES_MAX * REFUSAL_BYTES, self.segments == 0),
            Kind::Notify => (limits::NOTIFY_BYTES_MAX, self.segments == 0),
            Kind::Send => (limits::EAGER_BYTES_MAX, self.segments == 0),
            Kind::Read => (0, self.segments > 0),
            Kind::Announce | Kind::Match | Kind::Credit | Kind::Refuse => (0, self.segments == 0),
        };
        if len > len_max {
            return bad("len");
        }
        if !segments_ok {
            return bad("segments for this kind");
        }
        if self.kind == Kind::Ack && !len.is_multiple_of(REFUSAL_BYTES) {
            return bad("len of refusals");
        }
        if self.kind != Kind::Read && self.offset.checked_add(u64::from(self.len)).is_none() {
            return bad("offset");
        }
        Ok(())
    }
}

/// Writes the checksum into an encoded header with [`FLAG_CRC`].
fn seal(encoded: &mut [u8; HEADER_BYTES]) {
    if encoded[1] & FLAG_CRC != 0 {
        let crc = head_crc(encoded);
        encoded[HEAD_CRC_AT..][..4].copy_from_slice(&crc.to_le_bytes());
    }
}

/// The checksum of a header: over all bytes except the checksum.
fn head_crc(encoded: &[u8; HEADER_BYTES]) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    crc.update(&encoded[..HEAD_CRC_AT]);
    crc.update(&encoded[POSTED_AT..]);
    crc.finalize()
}

/// Destination of a part of the payload: `len` bytes at `offset` of the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Offset in the target, in bytes.
    pub offset: u64,
    /// Length of the part in bytes.
    pub len: u32,
}

impl Placement {
    /// Appends the encoded descriptor to `out`.
    pub fn encode_into(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.offset.to_le_bytes());
        out.extend_from_slice(&self.len.to_le_bytes());
    }
}

/// Decodes descriptors. A partial one at the end is ignored; the caller has checked the length.
pub fn placements(bytes: &[u8]) -> impl Iterator<Item = Placement> + '_ {
    bytes
        .chunks_exact(PLACEMENT_BYTES)
        .map(|piece| Placement { offset: u64_at(piece, 0), len: u32_at(piece, 8) })
}

/// Why the target refused a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Refusal {
    /// The target region does not exist, or not any more.
    NoRegion = 1,
    /// Offset and length exceed the target region.
    OutOfRegion = 2,
    /// The receive or read has ended.
    NoSink = 3,
    /// A limit of the refusing end is reached.
    Limit = 4,
    /// The memory is not accessible to the channel's transport.
    UnreachableMemory = 5,
    /// The copy to GPU memory failed.
    Gpu = 6,
    /// The frame was refused for any other reason.
    Other = 255,
}

impl Refusal {
    /// Decodes the code of a refusal's reason; unknown codes become [`Refusal::Other`].
    pub fn parse(code: u8) -> Refusal {
        match code {
            1 => Refusal::NoRegion,
            2 => Refusal::OutOfRegion,
            3 => Refusal::NoSink,
            4 => Refusal::Limit,
            5 => Refusal::UnreachableMemory,
            6 => Refusal::Gpu,
            _ => Refusal::Other,
        }
    }

    /// The reason of the refusal as text for users.
    pub fn text(self) -> &'static str {
        match self {
            Refusal::NoRegion => {
                "the peer has no region with that key: deregistered, or from before a restart; exchange descriptors again"
            }
            Refusal::OutOfRegion => "offset and length are outside of the peer's region",
            Refusal::NoSink => "the peer's receive or read is over (cancelled or failed)",
            Refusal::Limit => {
                "the peer reached a limit: of notifications that it did not take (NOTIFICATIONS_HELD_MAX), or of outstanding operations"
            }
            Refusal::UnreachableMemory => {
                "the peer's region is GPU memory that its transport does not reach: a plugin reaches only the GPU that it was configured for"
            }
            Refusal::Gpu => "the peer's copy to GPU memory failed: see the peer's log",
            Refusal::Other => "the peer gave no known reason",
        }
    }
}

/// Encodes the refused frames of a [`Kind::Ack`]: the low 32 bits of each number, and the reason.
pub fn encode_refusals(refused: &[(u64, Refusal)]) -> Vec<u8> {
    let mut out = Vec::with_capacity(refused.len() * REFUSAL_BYTES);
    for (number, why) in refused {
        out.extend_from_slice(&(*number as u32).to_le_bytes());
        out.extend_from_slice(&u32::from(*why as u8).to_le_bytes());
    }
    out
}

/// Decodes the list that [`encode_refusals`] made.
pub fn refusals(bytes: &[u8]) -> impl Iterator<Item = (u32, Refusal)> + '_ {
    bytes.chunks_exact(REFUSAL_BYTES).map(|piece| (u32_at(piece, 0), Refusal::parse(piece[4])))
}

/// Restores a full count from its low 32 bits; the count is at most 2^31 away from `near`.
pub fn widen(low: u32, near: u64) -> u64 {
    let delta = low.wrapping_sub(near as u32) as i32;
    near.wrapping_add_signed(i64::from(delta))
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_header() -> impl Strategy<Value = Header> {
        (
            prop::sample::select(&[0, 1, 8, 9][..]),
            0u16..=64,
            1u32..=1 << 20,
            any::<u32>(),
            any::<u64>(),
            0u64..u64::MAX / 2,
            0u16..1000,
        )
            .prop_map(|(flags, segments, len, ack, key, offset, notify)| Header {
                flags,
                segments,
                len,
                ack,
                crc: ack ^ 7,
                transfer: key ^ 1,
                key,
                offset,
                total: key >> 3,
                posted: ack ^ 5,
                notify,
                ..Header::new(Kind::Data)
            })
    }

    /// Numbers around a limit, and few or many of them.
    fn near(limit: u64) -> impl Strategy<Value = u64> {
        prop::sample::select(vec![0, 1, limit / 2, limit - 1, limit, limit + 1, u64::from(u16::MAX)])
    }

    proptest! {
        #[test]
        fn a_header_survives_the_wire(header in any_header()) {
            prop_assert_eq!(Header::decode(&header.encode()), Ok(header));
        }

        #[test]
        fn a_flipped_bit_of_a_checked_header_is_found(header in any_header(), ack: u32, bit in 0..HEADER_BYTES * 8) {
            let header = Header { flags: header.flags | FLAG_CRC, placements_crc: ack ^ 3, ..header };
            let mut bytes = header.encode();
            Header::patch_counts(&mut bytes, ack, ack ^ 9);
            prop_assert_eq!(Header::decode(&bytes), Ok(Header { ack, posted: ack ^ 9, ..header }));
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(Header::decode(&bytes).is_err());
        }

        /// Every header that is decoded keeps the limits, and no limit is stricter than it has to be.
        #[test]
        fn a_header_is_decoded_exactly_within_the_limits(
            kind in 0u8..12,
            flags in prop_oneof![3 => Just(0), 2 => prop::sample::select(vec![FLAG_POSTED, FLAG_HELD, 1, 2, 4]), 1 => any::<u8>()],
            segments in near(limits::SEGMENTS_PER_CHUNK_MAX as u64),
            len in prop_oneof![
                near(limits::CHUNK_BYTES_MAX as u64),
                near(limits::EAGER_BYTES_MAX as u64),
                near(limits::NOTIFY_BYTES_MAX as u64),
                near((limits::WINDOW_FRAMES_MAX * REFUSAL_BYTES) as u64),
            ],
            notify in prop_oneof![Just(0), near(limits::NOTIFY_BYTES_MAX as u64)],
            left in near(limits::CHUNK_BYTES_MAX as u64),
        ) {
            let flags = flags & !FLAG_CRC;
            let header = Header {
                flags,
                segments: segments as u16,
                len: len as u32,
                notify: notify as u16,
                offset: u64::MAX - left,
                ..Header::new(Kind::Data)
            };
            let mut bytes = header.encode();
            bytes[0] = kind;
            let fits = |kind: Kind| {
                let (bytes_max, may_have_segments) = match kind {
                    Kind::Data => (limits::CHUNK_BYTES_MAX as u64, true),
                    Kind::Read => (0, true),
                    Kind::Ack => ((limits::WINDOW_FRAMES_MAX * REFUSAL_BYTES) as u64, false),
                    Kind::Notify => (limits::NOTIFY_BYTES_MAX as u64, false),
                    Kind::Send => (limits::EAGER_BYTES_MAX as u64, false),
                    _ => (0, false),
                };
                flags & !FLAGS_KNOWN == 0
                    && (flags & FLAG_POSTED == 0 || kind == Kind::Data && len > 0)
                    && (flags & FLAG_HELD == 0 || kind == Kind::Ack)
                    && segments <= if may_have_segments { limits::SEGMENTS_PER_CHUNK_MAX as u64 } else { 0 }
                    && (kind != Kind::Read || segments > 0)
                    && len <= bytes_max
                    && (kind != Kind::Ack || len.is_multiple_of(REFUSAL_BYTES as u64))
                    && (notify == 0 || kind == Kind::Data && notify <= limits::NOTIFY_BYTES_MAX as u64)
                    && (kind == Kind::Read || len <= left)
            };
            let expected = Kind::parse(kind).is_some_and(fits);
            let decoded = Header::decode(&bytes);
            prop_assert_eq!(decoded.is_ok(), expected, "{:?} of {:?}", decoded, header);
        }

        #[test]
        fn a_count_is_widened_from_its_low_half(near in 0u64..1 << 48, step in -1000i64..1000) {
            let full = near.saturating_add_signed(step);
            prop_assert_eq!(widen(full as u32, near), full);
        }

        #[test]
        fn placements_survive_the_wire(list: Vec<(u64, u32)>) {
            let mut bytes = Vec::new();
            for (offset, len) in &list {
                Placement { offset: *offset, len: *len }.encode_into(&mut bytes);
            }
            let back: Vec<_> = placements(&bytes).map(|p| (p.offset, p.len)).collect();
            prop_assert_eq!(back, list);
        }
    }

    #[test]
    fn text_is_not_a_header() {
        let mut text = [b' '; HEADER_BYTES];
        text[..18].copy_from_slice(b"GET / HTTP/1.1\r\n\r\n");
        assert_eq!(Header::decode(&text), Err(WireError::NotAHeader));
    }

    #[test]
    fn lengths_past_the_limit_are_refused() {
        let mut header = Header::new(Kind::Data);
        header.len = limits::CHUNK_BYTES_MAX as u32 + 1;
        assert_eq!(Header::decode(&header.encode()), Err(WireError::OutOfRange("len")));
        let mut send = Header::new(Kind::Send);
        send.len = limits::EAGER_BYTES_MAX as u32 + 1;
        assert_eq!(Header::decode(&send.encode()), Err(WireError::OutOfRange("len")));
    }
}
