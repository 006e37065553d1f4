//! Fuzz targets for data frames, and for the pure code that acts on them, compared with models.

use super::{Input, check_text};
use crate::inbox::Scatter;
use crate::limits;
use crate::operation::{Piece, merge};
use crate::outbox::{ChunkLimits, Cutter};
use crate::window::Window;
use crate::wire::{self, HEADER_BYTES, Header, Kind};
use std::collections::VecDeque;

pub(super) fn headers(input: &mut Input<'_>) {
    let mut bytes: [u8; HEADER_BYTES] = input.array();
    if input.u8() & 1 == 0 {
        // Starts behind the magic, which random bytes would rarely hit.
        let sample = Header::new(Kind::Data).encode();
        bytes[50..].copy_from_slice(&sample[50..]);
        bytes[0] %= 11;
    }
    let Ok(header) = Header::decode(&bytes) else { return };
    assert_eq!(header.encode(), bytes, "what is accepted is what would be sent");
    assert!(header.len as usize <= limits::CHUNK_BYTES_MAX);
    assert!(usize::from(header.segments) <= limits::SEGMENTS_PER_CHUNK_MAX);
    assert!(usize::from(header.notify) <= limits::NOTIFY_BYTES_MAX);
    let body = header.placement_bytes() + header.len as usize + usize::from(header.notify);
    assert_eq!(header.body_bytes(), body);
    if matches!(header.kind, Kind::Data | Kind::Send | Kind::Notify) {
        assert!(header.offset.checked_add(header.len.into()).is_some());
    }
    let checked = Header { flags: header.flags | wire::FLAG_CRC, ..header };
    assert_eq!(Header::decode(&checked.encode()), Ok(checked));
    let ack = input.u32();
    let mut patched = bytes;
    Header::patch_counts(&mut patched, ack, !ack);
    assert_eq!(Header::decode(&patched), Ok(Header { ack, posted: !ack, ..header }));
}

pub(super) fn lists(input: &mut Input<'_>) {
    let (low, near) = (input.u32(), input.u64());
    let full = wire::widen(low, near);
    assert_eq!(full as u32, low);
    let far = full.wrapping_sub(near) as i64;
    assert!((-(1 << 31)..1 << 31).contains(&far), "{near} {full}");
    let bytes = input.take(usize::MAX);
    let mut again = Vec::new();
    wire::placements(bytes).for_each(|placement| placement.encode_into(&mut again));
    assert_eq!(again, bytes[..bytes.len() / wire::PLACEMENT_BYTES * wire::PLACEMENT_BYTES]);
    let refused: Vec<_> = wire::refusals(bytes).map(|(number, why)| (number.into(), why)).collect();
    assert_eq!(refused.len(), bytes.len() / wire::REFUSAL_BYTES);
    let encoded = wire::encode_refusals(&refused);
    let back: Vec<_> = wire::refusals(&encoded).map(|(number, why)| (number.into(), why)).collect();
    assert_eq!(back, refused);
    refused.iter().for_each(|(_, why)| check_text(why.text()));
}

pub(super) fn windows(input: &mut Input<'_>) {
    let (frames_max, bytes_max) = (usize::from(input.u8()), usize::from(input.u16()));
    let mut window = Window::new(frames_max, bytes_max);
    let mut model: VecDeque<(u64, usize)> = VecDeque::new();
    let mut next = 0;
    while !input.is_empty() {
        match input.u8() % 4 {
            0 | 1 => {
                let bytes = usize::from(input.u16());
                let held: usize = model.iter().map(|(_, bytes)| bytes).sum();
                let room = model.len() < frames_max.max(1) && (held < bytes_max || model.is_empty());
                assert_eq!(window.has_room(), room);
                if room {
                    assert_eq!(window.post(bytes, bytes), next);
                    model.push_back((next, bytes));
                    next += 1;
                }
            }
            2 => {
                // Widens a count from the wire, as a channel does.
                let count = wire::widen(input.u32() % 300, window.first());
                let sent = next - u64::from(input.u8()).min(model.len() as u64);
                if window.may_acknowledge(count, sent) {
                    assert!(count <= sent);
                    while let Some((number, bytes)) = window.release(count) {
                        assert_eq!(model.pop_front(), Some((number, bytes)));
                        assert!(number < count);
                    }
                    assert!(model.front().is_none_or(|(number, _)| *number >= count));
                }
            }
            _ => {
                let number = wire::widen(input.u32(), window.first());
                let there = model.iter().find(|(each, _)| *each == number).map(|(_, bytes)| *bytes);
                assert_eq!(window.get_mut(number).copied(), there);
                let from = window.from(number).count();
                assert_eq!(from, model.iter().filter(|(each, _)| *each >= number).count());
            }
        }
        assert_eq!(window.bytes(), model.iter().map(|(_, bytes)| bytes).sum::<usize>());
        assert_eq!((window.next(), window.is_empty()), (next, model.is_empty()));
    }
    assert_eq!(window.drain(), Vec::from(model));
}

pub(super) fn geometry(input: &mut Input<'_>) {
    let count = input.u8() % 24;
    let pieces: Vec<Piece> = (0..count)
        .map(|_| Piece {
            local: input.u32().into(),
            remote: input.u32().into(),
            len: u64::from(input.u16()) % 5000,
        })
        .collect();
    let total: u64 = pieces.iter().map(|piece| piece.len).sum();
    let merged = merge(pieces.iter().copied());
    assert_eq!(merged.iter().map(|piece| piece.len).sum::<u64>(), total);
    assert!(merged.iter().all(|piece| piece.len > 0));
    // Finds the place of a byte of the message by walking the list.
    let at = |list: &[Piece], mut position: u64| {
        for piece in list {
            if position < piece.len {
                return Some((piece.local + position, piece.remote + position));
            }
            position -= piece.len;
        }
        None
    };
    let mut cutter = Cutter::default();
    let mut position = 0;
    loop {
        let bounds = ChunkLimits { bytes: 1 + u64::from(input.u16()), segments: usize::from(input.u8()) };
        let Some(chunk) = cutter.next(&merged, bounds) else { break };
        assert_eq!(chunk.position, position);
        assert!(chunk.bytes > 0 && u64::from(chunk.bytes) <= bounds.bytes);
        let locals: Vec<_> = chunk.locals(&merged).collect();
        assert_eq!(locals.iter().map(|(_, len)| len).sum::<u64>(), chunk.bytes.into());
        let places = chunk.placements(&merged);
        assert!(places.len() <= locals.len() && locals.len() <= bounds.segments.max(1));
        assert_eq!(places.iter().map(|place| u64::from(place.len)).sum::<u64>(), chunk.bytes.into());
        let here = at(&pieces, position);
        assert_eq!(Some((locals[0].0, places[0].offset)), here);
        assert_eq!(chunk.single(&merged), (locals.len() == 1).then_some(places[0].offset));
        position += u64::from(chunk.bytes);
        assert_eq!(cutter.position(), position);
    }
    assert_eq!(position, total);
    let scatter = Scatter::new(pieces.iter().map(|piece| (piece.local, piece.len)));
    let (from, len) = match input.u8() & 1 {
        0 => (input.u64(), input.u64()),
        _ => (input.u32().into(), input.u16().into()),
    };
    let found = scatter.locate(from, len).map(|ranges| ranges.collect::<Vec<_>>());
    let fits = from.checked_add(len).is_some_and(|end| end <= total);
    assert_eq!(found.is_some(), fits);
    if let Some(ranges) = found {
        assert_eq!(ranges.iter().map(|(_, len)| len).sum::<u64>(), len);
        let mut position = from;
        for (offset, len) in ranges {
            assert!(len > 0);
            assert_eq!(at(&pieces, position).map(|(local, _)| local), Some(offset));
            position += len;
        }
    }
}
