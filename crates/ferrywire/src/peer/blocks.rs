//! Lists of blocks, checked and put in order once, used for any number of operations.

use std::fmt;
use std::sync::{Arc, OnceLock};

use crate::error::{Error, Result};
use crate::memory::{Region, RemoteRegion, check_range};
use crate::operation::Verb;
use crate::transfer::{Piece, Pieces, merge};

/// One block of a vectored operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Offset in the local region, in bytes.
    pub local_offset: u64,
    /// Offset in the remote region, in bytes.
    pub remote_offset: u64,
    /// Size in bytes.
    pub bytes: u64,
}

/// A checked list of blocks between a local and a remote region, made once and used many times.
#[derive(Clone)]
pub struct BlockList {
    pub(super) local: Region,
    pub(super) remote: RemoteRegion,
    pub(super) blocks: Arc<[Piece]>,
    /// All blocks as a write moves them, and as a read does.
    pub(super) write: OnceLock<Pieces>,
    pub(super) read: OnceLock<Pieces>,
}

impl fmt::Debug for BlockList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "BlockList({} blocks, {} runs)",
            self.blocks.len(),
            self.in_order(Verb::Write).as_slice().len()
        )
    }
}

impl BlockList {
    /// Checks every block against both regions. Blocks are moved in the order of their addresses at the
    /// source, and runs that touch on both sides as one; where blocks overlap at the target, either's bytes
    /// stay.
    pub fn new(local: &Region, remote: &RemoteRegion, blocks: &[Block]) -> Result<BlockList> {
        for block in blocks {
            local.check("local", block.local_offset, block.bytes)?;
            check_range("remote", block.remote_offset, block.bytes, remote.len())?;
        }
        let blocks: Arc<[Piece]> = blocks
            .iter()
            .map(|block| Piece { local: block.local_offset, remote: block.remote_offset, len: block.bytes })
            .collect();
        let (write, read) = Default::default();
        Ok(BlockList { local: local.clone(), remote: *remote, blocks, write, read })
    }

    /// Blocks in the list.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether it has no blocks.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// All blocks in the order in which an operation moves them, sorted at its first use.
    fn in_order(&self, verb: Verb) -> &Pieces {
        let order = if verb == Verb::Read { &self.read } else { &self.write };
        order.get_or_init(|| sorted(verb, self.blocks.to_vec()))
    }

    pub(super) fn select(&self, verb: Verb, indices: Option<&[u32]>) -> Result<Pieces> {
        let Some(indices) = indices else {
            return Ok(self.in_order(verb).clone());
        };
        let mut chosen = Vec::with_capacity(indices.len());
        for index in indices {
            let piece = self.blocks.get(*index as usize).ok_or_else(|| {
                Error::invalid(
                    "block index",
                    format!("{index}, but the list has {} blocks", self.blocks.len()),
                )
            })?;
            chosen.push(*piece);
        }
        Ok(sorted(verb, chosen))
    }
}

/// Pieces in the order of their addresses at the source: reading on from one to the next is what caches
/// and prefetchers are good at, and it costs a fifth of the time of small scattered blocks.
pub(super) fn sorted(verb: Verb, mut pieces: Vec<Piece>) -> Pieces {
    match verb {
        Verb::Read => pieces.sort_unstable_by_key(|piece| piece.remote),
        _ => pieces.sort_unstable_by_key(|piece| piece.local),
    }
    pieces_of(merge(pieces))
}

pub(super) fn pieces_of(mut merged: Vec<Piece>) -> Pieces {
    match merged.len() {
        0 => Pieces::One(Piece { local: 0, remote: 0, len: 0 }),
        1 => Pieces::One(merged.remove(0)),
        _ => Pieces::Many(merged.into()),
    }
}
