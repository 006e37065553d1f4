//! How a transfer is cut into chunks, and which channel carries the next one.
//!
//! A message is a list of [`Piece`]s: which local bytes belong to which remote bytes. A [`Cutter`] walks it
//! once and hands out [`Chunk`]s, runs of the message with a bounded number of bytes and placements. A
//! [`Scatter`] is the receiving side of a message that is addressed by position (a receive, a read): it maps
//! a range of the message to ranges of local memory.
//!
//! Channels pull: each takes the next chunk when it is ready, so a fast NIC carries more and a slow one less,
//! without a plan that could be wrong. Two rules keep the end of a transfer short: chunks shrink as the rest
//! shrinks, and a channel whose backlog is much longer than the others' leaves the rest to them.
//!
//! Invariant: the chunks of a message cover each of its bytes exactly once, in order. Pure: numbers in,
//! numbers out.
//! Read next: `outbox/`, which cuts the chunks.

use crate::limits;
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

/// Size of the next chunk in bytes: half of an equal share of the rest, in whole pages, within the bounds.
pub fn chunk_bytes(rest: u64, channels: usize, chunk_bytes_min: usize, chunk_bytes_max: usize) -> u64 {
    let max = chunk_bytes_max as u64;
    let min = (chunk_bytes_min as u64).min(max);
    let share = (rest / (2 * channels.max(1) as u64)).next_multiple_of(4096);
    share.clamp(min, max)
}

/// Whether a channel with `backlog` unacknowledged bytes may take another chunk, when the least loaded live
/// channel of the peer has `least`.
///
/// A channel that is far ahead of the others waits until they catch up.
pub fn may_take(backlog: u64, least: u64, chunk_bytes_max: usize) -> bool {
    backlog <= least.saturating_add(SPREAD_CHUNKS * chunk_bytes_max as u64)
}

/// Backlog, in chunks, by which a channel may be ahead of the least loaded one.
const SPREAD_CHUNKS: u64 = 8;

/// Bytes of small operations that a channel may take now from the peer's queue. The share keeps the channel
/// within `SMALL_SPREAD_BYTES` of the least loaded one, so every thread gets some.
pub fn small_share(backlog: u64, least: u64) -> u64 {
    least.saturating_add(SMALL_SPREAD_BYTES).saturating_sub(backlog)
}

/// Backlog of small operations, in bytes, by which a channel may be ahead of the least loaded one.
const SMALL_SPREAD_BYTES: u64 = 256 << 10;

/// Bytes of bulk that a channel within this host may take now, and its longest chunk in bytes. `sharing`
/// channels of one thread each have such a bound.
///
/// The threads at the two ends alternate on a core or share a cache, which holds the bytes in flight between
/// them. A bound no larger than the socket buffers keeps these bytes in the cache. It also lets the kernel
/// take each call whole. A partial call ends at an odd byte; the kernel copies sent bytes into pages that all
/// connections of a thread share, so all later bytes are misaligned and are copied out at half the speed. A
/// staging end adds its ring to the bound, since bytes wait there while they are copied.
pub fn local_share(in_flight: u64, sharing: usize, ends_staged: u64, chunk_bytes_max: usize) -> (u64, usize) {
    let local = local_bytes(sharing);
    let bound = local + ends_staged * limits::STAGING_OUT_RING_BYTES as u64;
    (bound.saturating_sub(in_flight), chunk_bytes_max.min(local as usize / 2))
}

/// Bytes of bulk in flight on each of `sharing` channels between two threads of one host; also the size of
/// their socket buffers.
pub fn local_bytes(sharing: usize) -> u64 {
    (LOCAL_BYTES / sharing.max(1) as u64).max(LOCAL_BYTES_MIN)
}

/// Bytes of bulk in flight between two threads of one host; below, the least for one channel.
const LOCAL_BYTES: u64 = 2 << 20;
const LOCAL_BYTES_MIN: u64 = 512 << 10;

/// Bytes of bulk that a channel with `backlog` bytes may take where payload is staged: an equal share of the
/// queue and of the backlogs of all `channels`.
///
/// Copies start long before the first byte can be sent. Without this bound a channel would take much more
/// than it sends, and a few channels would take everything.
pub fn staged_share(queued: u64, backlog_of_all: u64, channels: usize, backlog: u64) -> u64 {
    if queued == 0 {
        // A queue without bytes holds a notification that follows bytes cut earlier; any channel may take it.
        return 1;
    }
    // Rounded up, so that the least loaded channel may always take some.
    queued.saturating_add(backlog_of_all).div_ceil(channels.max(1) as u64).saturating_sub(backlog)
}

/// Shortest and longest chunk of staged payload in bytes. `in_flight` bytes are queued or in flight; `alone`
/// says that they belong to one operation.
///
/// With several operations a channel copies half of its share while the other half is on the wire. The size
/// is a whole number of steps, so no message leaves a small rest for a chunk of its own: each chunk costs the
/// GPU some time. A single operation waits for the copies of its first and last chunk, so it is cut finely.
pub fn staged_chunk_bytes(in_flight: u64, alone: bool, channels: usize) -> (usize, usize) {
    let (step, longest) = (limits::STAGING_CHUNK_BYTES_MIN, limits::STAGING_SLOT_BYTES);
    if alone {
        return (step, limits::STAGING_BATCH_BYTES);
    }
    let half = (in_flight / channels.max(1) as u64 / 2).min(longest as u64) as usize;
    (half.next_multiple_of(step).clamp(step, longest), longest)
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

    proptest! {
        #[test]
        fn a_chunk_is_within_bounds(rest: u64, channels in 0usize..300, max in 1usize..limits::CHUNK_BYTES_MAX) {
            let bytes = chunk_bytes(rest / 2, channels, limits::CHUNK_BYTES_MIN, max);
            prop_assert!(bytes >= 1 && bytes <= max as u64);
        }

        #[test]
        fn chunks_do_not_grow_towards_the_end(rest in 0u64..1 << 40, less in 0u64..1 << 40, channels in 1usize..64) {
            let (small, large) = (rest.min(less), rest.max(less));
            let bytes = |rest| chunk_bytes(rest, channels, limits::CHUNK_BYTES_MIN, 1 << 20);
            prop_assert!(bytes(small) <= bytes(large));
        }

        #[test]
        fn the_least_loaded_channel_may_always_take(backlog: u64, chunk in 1usize..1 << 22) {
            prop_assert!(may_take(backlog, backlog, chunk));
        }
    }

    #[test]
    fn within_a_host_one_chunk_is_under_way_while_the_next_is_taken() {
        for sharing in [0, 1, 2, 4, 64] {
            let (share, chunk) = local_share(0, sharing, 0, limits::CHUNK_BYTES_MAX);
            assert_eq!(share, 2 * chunk as u64);
            assert_eq!(local_share(chunk as u64, sharing, 0, limits::CHUNK_BYTES_MAX), (share / 2, chunk));
            assert_eq!(local_share(share + 1, sharing, 0, 4096), (0, 4096));
            let staged = 2 * limits::STAGING_OUT_RING_BYTES as u64;
            assert_eq!(local_share(share, sharing, 2, 4096), (staged, 4096));
        }
        assert!(local_bytes(4) < local_bytes(1) && local_bytes(64) == local_bytes(4));
    }

    #[test]
    fn what_is_staged_is_shared_equally() {
        assert_eq!(staged_share(1 << 20, 0, 4, 0), 256 << 10);
        // A channel with more than the others waits until they have as much.
        assert_eq!(staged_share(1 << 20, 8 << 20, 4, 8 << 20), 0);
        assert_eq!(staged_share(1 << 20, 8 << 20, 4, 0), 9 << 18);
        // A single channel may take everything.
        assert_eq!(staged_share(1 << 30, 0, 1, 0), 1 << 30);
    }

    #[test]
    fn one_operation_is_cut_finely_and_many_are_not() {
        let (finest, slot) = (limits::STAGING_CHUNK_BYTES_MIN, limits::STAGING_SLOT_BYTES);
        let shortest = |in_flight, channels| staged_chunk_bytes(in_flight, false, channels).0;
        assert_eq!(staged_chunk_bytes(1 << 40, true, 16), (finest, slot / 2));
        assert_eq!(staged_chunk_bytes(0, false, 16), (finest, slot));
        assert_eq!(shortest(16 << 20, 16), 512 << 10);
        // When one of 16 messages of 1 MiB has just ended, the next are not cut into 480, 480 and 64 KiB.
        assert_eq!(shortest(15 << 20, 16), 512 << 10);
        assert_eq!([shortest(1 << 40, 16), shortest(1 << 40, 0)], [slot; 2]);
    }

    proptest! {
        /// Some channel may always take a chunk of what is queued.
        #[test]
        fn the_least_loaded_channel_may_take_what_is_staged(
            queued in 0u64..1 << 40,
            backlogs in proptest::collection::vec(0u64..1 << 30, 1..64),
        ) {
            let least = backlogs.iter().copied().min().unwrap_or(0);
            prop_assert!(staged_share(queued, backlogs.iter().sum(), backlogs.len(), least) > 0);
        }
    }
}
