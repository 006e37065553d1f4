//! The geometry of a transfer: which local bytes belong to which remote bytes, and how they are cut into
//! chunks.
//!
//! A message is a list of [`Piece`]s. A [`Cutter`] walks it once and hands out [`Chunk`]s, runs of the
//! message with a bounded number of bytes and placements. A [`Scatter`] is the receiving side of a message
//! that is addressed by position (a receive, a read): it maps a range of the message to ranges of local
//! memory.
//!
//! Invariant: the chunks of a message cover each of its bytes exactly once, in order. Pure: numbers only.
//! Read next: `schedule.rs` for the size of chunks, `outbox/`, which cuts them.

use crate::wire::Placement;
use std::sync::Arc;

/// `len` bytes at offset `local` of the local region and at offset `remote` of the remote target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Offset in the local region, in bytes.
    pub local: u64,
    /// Offset in the remote target, in bytes.
    pub remote: u64,
    /// Length in bytes.
    pub len: u64,
}

/// The pieces of one message; a single piece needs no allocation.
#[derive(Clone, Debug)]
pub enum Pieces {
    /// A single piece.
    One(Piece),
    /// Several pieces, shared with a prepared block list.
    Many(Arc<[Piece]>),
}

impl Pieces {
    /// The pieces in this order. Pieces that touch on both sides are joined; a message without bytes becomes
    /// one empty piece.
    pub fn joined(pieces: impl IntoIterator<Item = Piece>) -> Pieces {
        let mut merged = merge(pieces);
        match merged.len() {
            0 => Pieces::One(Piece { local: 0, remote: 0, len: 0 }),
            1 => Pieces::One(merged.remove(0)),
            _ => Pieces::Many(merged.into()),
        }
    }

    /// The pieces, in order.
    pub fn as_slice(&self) -> &[Piece] {
        match self {
            Pieces::One(piece) => std::slice::from_ref(piece),
            Pieces::Many(pieces) => pieces,
        }
    }

    /// Total length of the message in bytes.
    pub fn total(&self) -> u64 {
        self.as_slice().iter().map(|piece| piece.len).sum()
    }
}

/// Drops empty pieces, and joins pieces that touch on both sides.
pub fn merge(pieces: impl IntoIterator<Item = Piece>) -> Vec<Piece> {
    let mut out: Vec<Piece> = Vec::new();
    for piece in pieces {
        if piece.len == 0 {
            continue;
        }
        match out.last_mut() {
            Some(last) if last.local + last.len == piece.local && last.remote + last.len == piece.remote => {
                last.len += piece.len;
            }
            _ => out.push(piece),
        }
    }
    out
}

/// Bounds of one chunk.
#[derive(Clone, Copy, Debug)]
pub struct ChunkLimits {
    /// Most bytes of the chunk.
    pub bytes: u64,
    /// Most pieces of the chunk, and so most placements.
    pub segments: usize,
}

/// A run of a message: `bytes` bytes, starting `within` bytes into piece `first`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    first: u32,
    within: u64,
    /// Length of the chunk in bytes.
    pub bytes: u32,
    /// Offset of the chunk in the message, in bytes.
    pub position: u64,
}

impl Chunk {
    /// The chunk of a message without bytes.
    pub const EMPTY: Chunk = Chunk { first: 0, within: 0, bytes: 0, position: 0 };

    /// The chunk's runs, in order.
    fn runs<'a>(&self, pieces: &'a [Piece]) -> impl Iterator<Item = Piece> + use<'a> {
        let mut left = u64::from(self.bytes);
        let mut within = self.within;
        pieces[(self.first as usize).min(pieces.len())..].iter().map_while(move |piece| {
            if left == 0 {
                return None;
            }
            let len = (piece.len - within).min(left);
            let run = Piece { local: piece.local + within, remote: piece.remote + within, len };
            left -= len;
            within = 0;
            Some(run)
        })
    }

    /// Local `(offset, len)` ranges of the chunk, in order.
    pub fn locals<'a>(&self, pieces: &'a [Piece]) -> impl Iterator<Item = (u64, u64)> + use<'a> {
        self.runs(pieces).map(|run| (run.local, run.len))
    }

    /// Remote placements of the chunk, in order; placements that touch are joined.
    pub fn placements(&self, pieces: &[Piece]) -> Vec<Placement> {
        let mut out: Vec<Placement> = Vec::new();
        for run in self.runs(pieces) {
            match out.last_mut() {
                Some(last) if last.offset + u64::from(last.len) == run.remote => last.len += run.len as u32,
                _ => out.push(Placement { offset: run.remote, len: run.len as u32 }),
            }
        }
        out
    }

    /// The remote offset of a chunk that is one run; `None` for several runs.
    pub fn single(&self, pieces: &[Piece]) -> Option<u64> {
        let piece = pieces.get(self.first as usize)?;
        (piece.len - self.within >= u64::from(self.bytes)).then_some(piece.remote + self.within)
    }
}

/// Walks a message once and hands out its chunks.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cutter {
    piece: usize,
    within: u64,
    position: u64,
}

impl Cutter {
    /// Bytes handed out so far.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// The next chunk within the limits; `None` at the end.
    pub fn next(&mut self, pieces: &[Piece], limits: ChunkLimits) -> Option<Chunk> {
        let start = *self;
        let mut bytes = 0;
        for _ in 0..limits.segments.max(1) {
            let Some(piece) = pieces.get(self.piece) else {
                break;
            };
            let len = (piece.len - self.within).min(limits.bytes - bytes);
            bytes += len;
            self.within += len;
            if self.within < piece.len {
                break;
            }
            self.piece += 1;
            self.within = 0;
            if bytes == limits.bytes {
                break;
            }
        }
        self.position += bytes;
        (bytes > 0).then_some(Chunk {
            first: start.piece as u32,
            within: start.within,
            bytes: bytes as u32,
            position: start.position,
        })
    }
}

/// Maps positions of a message to local memory.
#[derive(Clone, Debug)]
pub struct Scatter {
    ranges: Vec<(u64, u64)>,
    starts: Vec<u64>,
    total: u64,
}

impl Scatter {
    /// A map over `(offset, len)` ranges of a region, in the message's order. Empty ranges are dropped.
    pub fn new(ranges: impl IntoIterator<Item = (u64, u64)>) -> Scatter {
        let ranges: Vec<(u64, u64)> = ranges.into_iter().filter(|(_, len)| *len > 0).collect();
        let mut total = 0;
        let mut starts = Vec::with_capacity(ranges.len());
        for (_, len) in &ranges {
            starts.push(total);
            total += len;
        }
        Scatter { ranges, starts, total }
    }

    /// Local `(offset, len)` ranges of `len` bytes at `position`; `None` when they exceed the ranges.
    pub fn locate(&self, position: u64, len: u64) -> Option<impl Iterator<Item = (u64, u64)> + '_> {
        if position.checked_add(len)? > self.total {
            return None;
        }
        let first = self.starts.partition_point(|start| *start <= position).saturating_sub(1);
        let mut left = len;
        let mut within = position - self.starts.get(first).copied().unwrap_or(0);
        Some(self.ranges[first.min(self.ranges.len())..].iter().map_while(move |(offset, size)| {
            if left == 0 {
                return None;
            }
            let take = (size - within).min(left);
            let range = (offset + within, take);
            left -= take;
            within = 0;
            Some(range)
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bytes_of(pieces: &[Piece]) -> Vec<(u64, u64)> {
        pieces.iter().flat_map(|p| (0..p.len).map(move |i| (p.local + i, p.remote + i))).collect()
    }

    fn any_pieces() -> impl Strategy<Value = Vec<Piece>> {
        prop::collection::vec((0u64..500, 0u64..500, 0u64..40), 0..12).prop_map(|list| {
            list.into_iter().map(|(local, remote, len)| Piece { local, remote, len }).collect()
        })
    }

    proptest! {
        #[test]
        fn chunks_cover_each_byte_once_and_in_order(
            pieces in any_pieces(), sizes in prop::collection::vec((1u64..64, 1usize..5), 1..20)
        ) {
            let merged = merge(pieces.clone());
            prop_assert_eq!(bytes_of(&merged), bytes_of(&pieces));
            let mut cutter = Cutter::default();
            let mut seen = Vec::new();
            let mut position = 0;
            for turn in 0.. {
                let (bytes, segments) = sizes[turn % sizes.len()];
                let Some(chunk) = cutter.next(&merged, ChunkLimits { bytes, segments }) else { break };
                prop_assert!(u64::from(chunk.bytes) <= bytes && chunk.bytes > 0);
                prop_assert_eq!(chunk.position, position);
                position += u64::from(chunk.bytes);
                let locals: Vec<u64> = chunk.locals(&merged).flat_map(|(o, l)| o..o + l).collect();
                let places = chunk.placements(&merged);
                prop_assert!(places.len() <= segments);
                let remotes: Vec<u64> =
                    places.iter().flat_map(|p| p.offset..p.offset + u64::from(p.len)).collect();
                prop_assert_eq!(locals.len(), chunk.bytes as usize);
                if let Some(single) = chunk.single(&merged) {
                    prop_assert_eq!(single, remotes[0]);
                    prop_assert_eq!(places.len(), 1);
                }
                seen.extend(locals.into_iter().zip(remotes));
            }
            prop_assert_eq!(seen, bytes_of(&merged));
        }

        #[test]
        fn a_scatter_finds_every_range(
            ranges in prop::collection::vec((0u64..1000, 0u64..30), 0..10), position in 0u64..200, len in 0u64..200
        ) {
            let flat: Vec<u64> = ranges.iter().flat_map(|(o, l)| *o..o + l).collect();
            let scatter = Scatter::new(ranges);
            let found = scatter.locate(position, len).map(|r| r.flat_map(|(o, l)| o..o + l).collect::<Vec<_>>());
            let end = (position + len) as usize;
            prop_assert_eq!(found, (end <= flat.len()).then(|| flat[position as usize..end].to_vec()));
        }
    }
}
