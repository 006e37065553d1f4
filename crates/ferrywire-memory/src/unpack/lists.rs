//! Lists of copies, and what CPU and GPU tell each other about them while the copying kernel runs.
//!
//! A list's life: `filled -> posted -> taken -> told`. The kernel takes the next one as long as it stays; whoever posts
//! one that it did not take launches it anew.
//! Invariant: the structures here are those of `kernel.cu`; tests of `kernels.rs` compare them.
//! Read next: `kernels.rs`, which launches; the engine's `staging/kernel.rs`, who posts.

use super::kernels::PIECE_BYTES;
use crate::GpuCopy;
use std::sync::atomic::{AtomicU64, Ordering};

/// Runs for each block from which on blocks that have as many of them have about as much to do.
const EVEN_RUNS_PER_BLOCK: u64 = 8;
/// Runs that a block takes at once of a list.
pub(super) const LIST_BATCH: u64 = 256;

/// A list of runs for [`Kernels::copy`](super::Kernels::copy), and how it is cut.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyList {
    pub(super) count: u64,
    pub(super) value: u64,
    pub(super) batch: u64,
    pub(super) slices: u64,
    pub(super) piece_bytes: u64,
    pub(super) only: GpuCopy,
}

impl CopyList {
    /// There are no copies any more.
    pub const NONE: CopyList = CopyList {
        count: 0,
        value: 0,
        batch: 0,
        slices: 0,
        piece_bytes: 0,
        only: GpuCopy { source: 0, target: 0, bytes: 0 },
    };

    /// One whose end is told by `value`, cut for so many blocks, a power of two. Of few runs each has a piece of every one,
    /// since they may be of any length.
    pub fn of(runs: &[GpuCopy], value: u64, blocks: u64) -> CopyList {
        let longest = runs.iter().map(|run| run.bytes as u64).max().unwrap_or(0);
        let only = runs.first().copied().unwrap_or_default();
        CopyList { value, only, ..CopyList::cut(runs.len() as u64, longest, blocks) }
    }

    pub(super) fn cut(count: u64, longest: u64, blocks: u64) -> CopyList {
        let few = count < EVEN_RUNS_PER_BLOCK * blocks;
        let most = if few { longest.div_ceil(PIECE_BYTES).clamp(1, blocks) } else { 1 };
        let slices = if most.is_power_of_two() { most } else { most.next_power_of_two() / 2 };
        let batch = (count * slices).div_ceil(blocks).clamp(1, LIST_BATCH);
        let piece_bytes = longest.div_ceil(slices).next_multiple_of(PIECE_BYTES).max(PIECE_BYTES);
        CopyList { count, batch, slices, piece_bytes, ..CopyList::NONE }
    }

    /// As `kernel.cu` reads it, but for its number.
    pub(super) fn words(&self) -> [u64; LIST_WORDS] {
        let CopyList { count, value, batch, slices, piece_bytes, only: GpuCopy { source, target, bytes } } =
            *self;
        [count, value, batch | slices << 32, piece_bytes, source, target, bytes as u64, 0]
    }
}

pub(super) const LIST_WORDS: usize = 8;
/// Every word of a list has the lower bits of the list's number from this bit on: the GPU may read some of them sooner than
/// others.
pub(super) const NUMBER_AT: u32 = 56;

/// What CPU and GPU tell each other about lists, in mapped memory, each side in lines of its own. Lists are numbered, and list
/// `n` is in `lists[n % 2]`.
#[derive(Debug)]
#[repr(C)]
pub struct CopyDesk {
    lists: [[AtomicU64; LIST_WORDS]; 2],
    /// Not 0 once all blocks have begun.
    pub begun: AtomicU64,
    /// Not 0 when the GPU waits for no further list; it takes one that was posted before that can have been seen.
    pub closed: AtomicU64,
    /// The first that it does not take, once that is decided.
    pub ended: AtomicU64,
    _unused: [u64; 5],
}

impl CopyDesk {
    /// Nothing is posted, and no kernel under way; one is to begin with list `first`.
    pub fn clear(&self, first: u64) {
        // As far as can be from the numbers that come.
        let far = first.wrapping_add(128) << NUMBER_AT;
        for word in self.lists.iter().flatten() {
            word.store(far, Ordering::Relaxed);
        }
        for word in [&self.begun, &self.closed, &self.ended] {
            word.store(0, Ordering::Relaxed);
        }
    }

    /// The GPU may take list `n`.
    pub fn post(&self, n: u64, list: &CopyList) {
        for (word, part) in self.lists[(n % 2) as usize].iter().zip(list.words()) {
            debug_assert!(part >> NUMBER_AT == 0, "{list:?}");
            word.store(n << NUMBER_AT | part, Ordering::Release);
        }
    }
}

/// Where [`Kernels::copy`](super::Kernels::copy) finds lists, and tells their end.
#[derive(Clone, Copy, Debug)]
pub struct CopyPlaces {
    /// Address of a [`CopyDesk`].
    pub desk: u64,
    /// Address of the runs, [`GpuCopy`] each, of lists with even numbers.
    pub runs: u64,
    /// Bytes from there to the runs of lists with odd numbers.
    pub stride: u64,
    /// A word of pinned memory, to which the GPU writes the value of each list when all is copied and visible.
    pub told: u64,
    /// Address of a [`Counter`](super::Counter) that is the stream's own.
    pub blocks: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_cut_for_few_blocks_that_have_as_much_to_do() {
        let cut = |count, longest, blocks| {
            let CopyList { batch, slices, piece_bytes, .. } = CopyList::cut(count, longest, blocks);
            (batch, slices, piece_bytes)
        };
        assert_eq!(cut(1, 1 << 20, 2), (1, 2, 512 << 10));
        // One of 900 KiB and one of 4, and three of one length: two blocks share each.
        assert_eq!(cut(2, 900 << 10, 2), (2, 2, 452 << 10));
        assert_eq!(cut(3, 1 << 20, 2), (3, 2, 512 << 10));
        assert_eq!(cut(5, 64 << 10, 4), (5, 4, 16 << 10));
        // As many pieces as a block or two blocks have to do with, and never three.
        assert_eq!(cut(1, 12 << 10, 4), (1, 2, 8 << 10));
        assert_eq!(cut(3, 100, 4), (1, 1, 4096));
        // Many of one length, and more than blocks can take at once.
        assert_eq!(cut(64, 16 << 10, 4), (16, 1, 16 << 10));
        assert_eq!(cut(8192, 128, 2), (256, 1, 4096));
    }
}
