//! Lists of blocks, checked and sorted once, used for any number of transfers.
//!
//! Invariant: every block of a list lies inside its regions. Read next: `multi_region.rs`.

use std::fmt;
use std::sync::{Arc, OnceLock};

use crate::api::region::{Region, RemoteRegion};
use crate::core::operation::Verb;
use crate::error::{Error, Result, TransferError};
use ferrywire_memory::check_range;
use ferrywire_proto::operation::{Piece, Pieces};

/// One block of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Offset in the local region, in bytes.
    pub local_offset: u64,
    /// Offset in the remote region, in bytes.
    pub remote_offset: u64,
    /// Size of the block in bytes.
    pub bytes: u64,
}

/// Lengths, in bytes, of the blocks of [`BlockList::from_offsets`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lengths<'a> {
    /// One length for all blocks.
    Same(u64),
    /// One length for each block.
    Each(&'a [i64]),
}

impl Lengths<'_> {
    fn of(&self, index: usize) -> Result<u64> {
        match self {
            Lengths::Same(bytes) => Ok(*bytes),
            Lengths::Each(list) => unsigned(index, "length", list[index]),
        }
    }
}

/// A checked list of blocks between local and remote regions, for any number of transfers. Clones share the
/// list.
///
/// The list holds its local regions: they stay registered while the list exists.
#[derive(Clone)]
pub struct BlockList {
    parts: Arc<[Arc<Part>]>,
    blocks: usize,
}

/// The blocks between one local and one remote region.
pub(super) struct Part {
    pub local: Region,
    pub remote: RemoteRegion,
    blocks: Vec<Piece>,
    /// All blocks in the order of a write, and of a read. Sorted at first use.
    write: OnceLock<Pieces>,
    read: OnceLock<Pieces>,
}

impl fmt::Debug for BlockList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let runs: usize = self.parts.iter().map(|part| part.in_order(Verb::Write).as_slice().len()).sum();
        write!(f, "BlockList({} blocks, {runs} runs", self.blocks)?;
        match self.parts.len() {
            1 => write!(f, ")"),
            pairs => write!(f, ", {pairs} pairs of regions)"),
        }
    }
}

impl BlockList {
    /// Checks every block against both regions. Blocks are moved in the order of their source addresses.
    /// Adjacent blocks that touch on both sides are moved as one. Where blocks overlap at the target, the
    /// bytes of any of them may remain.
    ///
    /// # Errors
    /// [`TransferError::OutOfRegion`] for a block that is not inside both regions.
    pub fn new(local: &Region, remote: &RemoteRegion, blocks: &[Block]) -> Result<BlockList, TransferError> {
        for block in blocks {
            local.check("local", block.local_offset, block.bytes)?;
            check_range("remote", block.remote_offset, block.bytes, remote.len())?;
        }
        let piece = |block: &Block| Piece {
            local: block.local_offset,
            remote: block.remote_offset,
            len: block.bytes,
        };
        Ok(BlockList::of(local, remote, blocks.iter().map(piece).collect()))
    }

    /// Creates a list from arrays. Block `i` is at `local_offsets[i]` in the local region and at
    /// `remote_offsets[i]` in the remote one, in bytes.
    ///
    /// # Errors
    /// [`TransferError::Invalid`] with the first block that is not inside both regions, or with arrays of different
    /// lengths.
    pub fn from_offsets(
        local: &Region,
        remote: &RemoteRegion,
        local_offsets: &[i64],
        remote_offsets: &[i64],
        lengths: Lengths<'_>,
    ) -> Result<BlockList, TransferError> {
        let count = local_offsets.len();
        same_count("remote offsets", remote_offsets.len(), count)?;
        if let Lengths::Each(list) = lengths {
            same_count("lengths", list.len(), count)?;
        }
        let mut blocks = Vec::with_capacity(count);
        for (index, (local_offset, remote_offset)) in local_offsets.iter().zip(remote_offsets).enumerate() {
            let piece = Piece {
                local: unsigned(index, "local offset", *local_offset)?,
                remote: unsigned(index, "remote offset", *remote_offset)?,
                len: lengths.of(index)?,
            };
            let inside = local
                .check("local", piece.local, piece.len)
                .and_then(|()| Ok(check_range("remote", piece.remote, piece.len, remote.len())?));
            inside.map_err(|error| Error::invalid(format!("block {index}"), error.to_string()))?;
            blocks.push(piece);
        }
        Ok(BlockList::of(local, remote, blocks))
    }

    /// Joins several lists into one, in order. One transfer then moves all blocks, and one notification can
    /// follow them, even if they are of different regions. The lists are not changed.
    ///
    /// # Errors
    /// [`TransferError::Invalid`] without a list, or if the remote regions are not all of one endpoint.
    pub fn join(lists: &[&BlockList]) -> Result<BlockList, TransferError> {
        let Some(owner) = lists.first().map(|list| list.parts[0].remote.owner()) else {
            return Err(Error::invalid("block lists", "the list is empty: give at least one").into());
        };
        let parts: Arc<[Arc<Part>]> = lists.iter().flat_map(|list| list.parts.iter().cloned()).collect();
        match parts.iter().position(|part| part.remote.owner() != owner) {
            Some(at) => {
                let other = parts[at].remote.owner();
                let why = format!(
                    "pair {at} has a remote region of endpoint {other}, and the first pair one of {owner}: join \
                     lists of one remote endpoint"
                );
                Err(Error::invalid("block lists", why).into())
            }
            None => Ok(BlockList { blocks: lists.iter().map(|list| list.blocks).sum(), parts }),
        }
    }

    fn of(local: &Region, remote: &RemoteRegion, blocks: Vec<Piece>) -> BlockList {
        let (write, read, count) = (OnceLock::new(), OnceLock::new(), blocks.len());
        let part = Part { local: local.clone(), remote: *remote, blocks, write, read };
        BlockList { parts: Arc::new([Arc::new(part)]), blocks: count }
    }

    /// Number of blocks in the list.
    pub fn len(&self) -> usize {
        self.blocks
    }

    /// Whether the list has no blocks.
    pub fn is_empty(&self) -> bool {
        self.blocks == 0
    }

    /// Bytes of all blocks.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().flat_map(|part| &part.blocks).map(|piece| piece.len).sum()
    }

    /// The pairs of regions between which a transfer moves bytes, with the blocks in order; the first pair if no pair
    /// has bytes.
    pub(super) fn select(&self, verb: Verb, indices: Option<&[u32]>) -> Result<Vec<(&Part, Pieces)>> {
        let mut chosen: Vec<(&Part, Pieces)> = match indices {
            None => self.parts.iter().map(|part| (&**part, part.in_order(verb).clone())).collect(),
            Some(indices) => {
                let pieces = self.pick(indices)?;
                self.parts
                    .iter()
                    .map(|part| &**part)
                    .zip(pieces.into_iter().map(|all| sorted(verb, all)))
                    .collect()
            }
        };
        let has_bytes = |(_, pieces): &(&Part, Pieces)| pieces.as_slice()[0].len > 0;
        if chosen.iter().any(has_bytes) {
            chosen.retain(has_bytes)
        } else {
            chosen.truncate(1)
        }
        Ok(chosen)
    }

    /// The blocks with these indices, for each pair of regions.
    fn pick(&self, indices: &[u32]) -> Result<Vec<Vec<Piece>>> {
        let mut ends = Vec::with_capacity(self.parts.len());
        for part in self.parts.iter() {
            ends.push(ends.last().unwrap_or(&0) + part.blocks.len());
        }
        let mut picked: Vec<Vec<Piece>> = vec![Vec::new(); self.parts.len()];
        if let [only] = &mut picked[..] {
            only.reserve(indices.len());
        }
        for index in indices {
            let index = *index as usize;
            if index >= self.blocks {
                let why = format!("{index}, but the list has {} blocks", self.blocks);
                return Err(Error::invalid("block index", why));
            }
            let at = ends.partition_point(|end| *end <= index);
            let blocks = &self.parts[at].blocks;
            picked[at].push(blocks[index + blocks.len() - ends[at]]);
        }
        Ok(picked)
    }
}

impl Part {
    /// All blocks in the order in which a transfer moves them.
    fn in_order(&self, verb: Verb) -> &Pieces {
        let order = if verb == Verb::Read { &self.read } else { &self.write };
        order.get_or_init(|| sorted(verb, self.blocks.clone()))
    }
}

fn unsigned(index: usize, what: &str, value: i64) -> Result<u64> {
    let negative = |_| Error::invalid(format!("block {index}"), format!("the {what} is {value}"));
    u64::try_from(value).map_err(negative)
}

fn same_count(what: &str, count: usize, blocks: usize) -> Result<()> {
    if count == blocks {
        Ok(())
    } else {
        Err(Error::invalid(what, format!("{count} given for {blocks} local offsets: give one for each")))
    }
}

/// Sorts pieces by their source address. Sequential access suits caches and prefetchers: sorting costs a
/// fifth of the time that small scattered blocks take otherwise.
pub(super) fn sorted(verb: Verb, mut pieces: Vec<Piece>) -> Pieces {
    match verb {
        Verb::Read => pieces.sort_unstable_by_key(|piece| piece.remote),
        _ => pieces.sort_unstable_by_key(|piece| piece.local),
    }
    Pieces::joined(pieces)
}
