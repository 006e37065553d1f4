//! Packets as a segmenting NIC gets them: one set of headers, the payload of many segments, and before both the
//! virtio header that says so.
//!
//! Only TCP over IPv4 is ever cut; everything else is one segment. Checksums stay partial: the kernel that
//! receives a packet from a TUN device takes it as one that was checked.
//!
//! Invariant: the pieces of a packet carry the bytes, sequence numbers and flags that its segments would have had.
//! Read next: `sys.rs`, which reads and writes them.

use std::ops::Range;

/// Bytes of the virtio header.
pub const PREFIX_BYTES: usize = 10;
/// The largest packet with its prefix.
pub const PACKET_BYTES_MAX: usize = PREFIX_BYTES + 65536;

const GSO_NONE: u8 = 0;
const GSO_TCP4: u8 = 1;
const FIN_AND_PSH: u8 = 0x09;

/// Offsets and lengths of the headers and segments in a packet.
struct Layout {
    ip: usize,
    tcp: usize,
    payload: usize,
    segment_bytes: usize,
}

impl Layout {
    fn of(packet: &[u8]) -> Option<Layout> {
        let (ip, segment_bytes) = (PREFIX_BYTES, u16::from_ne_bytes([*packet.get(4)?, *packet.get(5)?]));
        if packet[1] & 0x7f != GSO_TCP4 || segment_bytes == 0 {
            return None;
        }
        let tcp = ip + usize::from(*packet.get(ip)? & 15) * 4;
        let payload = tcp + usize::from(*packet.get(tcp + 12)? >> 4) * 4;
        (payload < packet.len()).then_some(Layout { ip, tcp, payload, segment_bytes: segment_bytes.into() })
    }
}

/// Number of segments in a packet.
pub fn count(packet: &[u8]) -> usize {
    Layout::of(packet).map_or(1, |l| (packet.len() - l.payload).div_ceil(l.segment_bytes))
}

/// Bytes of a packet's `count` segments on the wire, with headers.
pub fn wire_bytes(packet: &[u8], count: usize) -> f64 {
    let headers = Layout::of(packet).map_or(0, |l| l.payload - l.ip);
    (packet.len() - PREFIX_BYTES + headers * (count - 1)) as f64
}

/// Builds a packet of these segments of `packet`; `None` for an empty range.
pub fn piece(packet: &[u8], range: Range<usize>) -> Option<Vec<u8>> {
    if range.is_empty() {
        return None;
    }
    let Some(l) = Layout::of(packet) else { return Some(packet.to_vec()) };
    let start = l.payload + range.start * l.segment_bytes;
    let end = (l.payload + range.end * l.segment_bytes).min(packet.len());
    let mut piece = [&packet[..l.payload], &packet[start..end]].concat();
    if range.len() == 1 {
        piece[1] = GSO_NONE;
        piece[4..6].fill(0);
    }
    add16(&mut piece, l.ip + 4, range.start as u16);
    let sequence =
        u32::from_be_bytes([packet[l.tcp + 4], packet[l.tcp + 5], packet[l.tcp + 6], packet[l.tcp + 7]]);
    let sequence = sequence.wrapping_add((range.start * l.segment_bytes) as u32);
    piece[l.tcp + 4..l.tcp + 8].copy_from_slice(&sequence.to_be_bytes());
    if end < packet.len() {
        piece[l.tcp + 13] &= !FIN_AND_PSH;
    }
    set_lengths(&mut piece, &l);
    Some(piece)
}

/// Sets the fields that depend on the length: IP's total length and checksum, and the part of TCP's checksum
/// that covers the pseudo header.
fn set_lengths(piece: &mut [u8], l: &Layout) {
    let total = (piece.len() - l.ip) as u16;
    piece[l.ip + 2..l.ip + 4].copy_from_slice(&total.to_be_bytes());
    piece[l.ip + 10..l.ip + 12].fill(0);
    let header_sum = !folded(sum(&piece[l.ip..l.tcp]));
    piece[l.ip + 10..l.ip + 12].copy_from_slice(&header_sum.to_be_bytes());
    let protocol = u64::from(piece[l.ip + 9]);
    let pseudo = folded(sum(&piece[l.ip + 12..l.ip + 20]) + protocol + (piece.len() - l.tcp) as u64);
    piece[l.tcp + 16..l.tcp + 18].copy_from_slice(&pseudo.to_be_bytes());
}

fn add16(bytes: &mut [u8], at: usize, add: u16) {
    let value = u16::from_be_bytes([bytes[at], bytes[at + 1]]).wrapping_add(add);
    bytes[at..at + 2].copy_from_slice(&value.to_be_bytes());
}

fn sum(bytes: &[u8]) -> u64 {
    bytes.chunks(2).map(|pair| u64::from(u16::from_be_bytes([pair[0], *pair.get(1).unwrap_or(&0)]))).sum()
}

fn folded(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// For tests: a packet of `count` segments.
#[cfg(test)]
pub fn sample(count: usize, segment_bytes: usize) -> Vec<u8> {
    let mut packet = vec![0u8; PREFIX_BYTES + 40];
    packet[0] = 1;
    packet[1] = GSO_TCP4;
    packet[4..6].copy_from_slice(&(segment_bytes as u16).to_ne_bytes());
    packet[PREFIX_BYTES] = 0x45;
    packet[PREFIX_BYTES + 9] = 6;
    packet[PREFIX_BYTES + 12..PREFIX_BYTES + 20].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
    packet[PREFIX_BYTES + 24..PREFIX_BYTES + 28].copy_from_slice(&0xffff_fff0_u32.to_be_bytes());
    packet[PREFIX_BYTES + 32] = 0x50;
    packet[PREFIX_BYTES + 33] = 0x19;
    packet.extend((0..count * segment_bytes).map(|i| (i / segment_bytes) as u8));
    packet
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_carry_what_their_segments_would() {
        let packet = sample(5, 100);
        let middle = piece(&packet, 1..3).unwrap();
        assert_eq!((count(&packet), count(&middle)), (5, 2));
        assert_eq!(middle[50..], [[1u8; 100], [2; 100]].concat());
        assert_eq!(middle[34..38], 0xffff_fff0_u32.wrapping_add(100).to_be_bytes());
        assert_eq!(middle[43], 0x10, "FIN and PSH belong to the last segment");
        assert_eq!(middle[12..14], 240u16.to_be_bytes());
        assert_eq!(folded(sum(&middle[10..30])), 0xffff, "IP's checksum is right");
    }

    #[test]
    fn a_single_segment_is_an_ordinary_packet() {
        let last = piece(&sample(3, 100), 2..3).unwrap();
        assert_eq!((last[1], count(&last), last[43]), (GSO_NONE, 1, 0x19));
        assert_eq!(piece(&last, 0..1).unwrap(), last);
        assert_eq!(piece(&last, 0..0), None);
    }
}
