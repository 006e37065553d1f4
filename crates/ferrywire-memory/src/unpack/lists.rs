//! Lists of copies, and the words through which CPU and GPU exchange them while the copy kernel runs.
//!
//! States of a list: `filled -> posted -> taken -> done`. A running kernel takes the next list. When a posted
//! list was not taken, the posting thread launches the kernel again.
//! Invariant: the structures here equal those of `kernel.cu`; tests in `kernels.rs` compare them.
//! Read next: `kernels.rs`, which launches the copy kernel; the engine's `staging/kernel.rs`, which posts
//! lists.

use super::kernels::PIECE_BYTES;
use crate::GpuCopy;
use std::sync::atomic::{AtomicU64, Ordering};

/// Runs per block above which whole runs distribute the work evenly enough.
const EVEN_RUNS_PER_BLOCK: u64 = 8;
/// Most runs that a block takes from a list at once.
pub(super) const LIST_BATCH: u64 = 256;

/// A list of runs for [`Kernels::copy`](super::Kernels::copy), and its division into pieces.
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
    /// The empty list, which ends the copies.
    pub const NONE: CopyList = CopyList {
        count: 0,
        value: 0,
        batch: 0,
        slices: 0,
        piece_bytes: 0,
        only: GpuCopy { source: 0, target: 0, bytes: 0 },
    };

    /// A list of runs whose completion is reported as `value`, divided for `blocks` blocks, a power of two.
    /// With few runs each block copies a piece of every run, since runs may have any length.
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

    /// The list's words as `kernel.cu` reads them, without the list's number.
    pub(super) fn words(&self) -> [u64; LIST_WORDS] {
        let CopyList { count, value, batch, slices, piece_bytes, only: GpuCopy { source, target, bytes } } =
            *self;
        [count, value, batch | slices << 32, piece_bytes, source, target, bytes as u64, 0]
    }
}

pub(super) const LIST_WORDS: usize = 8;
/// Position of the list's number in every word; the number's lower bits fill the bits above. The GPU may see
/// some words earlier than others, and recognizes a complete list by equal numbers.
pub(super) const NUMBER_AT: u32 = 56;

/// Words in mapped memory through which CPU and GPU exchange lists; each side writes to cache lines of its
/// own. Lists are numbered, and list `n` is in `lists[n % 2]`.
#[derive(Debug)]
#[repr(C)]
pub struct CopyMailbox {
    lists: [[AtomicU64; LIST_WORDS]; 2],
    /// Flag that is not 0 after all blocks of the kernel have started.
    pub begun: AtomicU64,
    /// Flag that is not 0 after the GPU has stopped waiting for further lists. A list posted before that is
    /// still taken if the GPU can have seen it.
    pub closed: AtomicU64,
    /// Number of the first list that the GPU does not take, once the GPU has decided.
    pub ended: AtomicU64,
    _unused: [u64; 5],
}

impl CopyMailbox {
    /// Resets the mailbox while no kernel runs; the next kernel will start with list `first`.
    pub fn clear(&self, first: u64) {
        // The number is as far as possible from those of the next lists.
        let far = first.wrapping_add(128) << NUMBER_AT;
        for word in self.lists.iter().flatten() {
            word.store(far, Ordering::Relaxed);
        }
        for word in [&self.begun, &self.closed, &self.ended] {
            word.store(0, Ordering::Relaxed);
        }
    }

    /// Posts list `n`, which the GPU may take from now on.
    pub fn post(&self, n: u64, list: &CopyList) {
        for (word, part) in self.lists[(n % 2) as usize].iter().zip(list.words()) {
            debug_assert!(part >> NUMBER_AT == 0, "{list:?}");
            word.store(n << NUMBER_AT | part, Ordering::Release);
        }
    }
}

/// Addresses through which [`Kernels::copy`](super::Kernels::copy) finds lists and reports completion.
#[derive(Clone, Copy, Debug)]
pub struct CopyAddresses {
    /// Address of a [`CopyMailbox`].
    pub mailbox: u64,
    /// Address of the runs ([`GpuCopy`]) of lists with even numbers.
    pub runs: u64,
    /// Offset in bytes from the runs of even lists to the runs of lists with odd numbers.
    pub stride: u64,
    /// Address of a word of pinned memory, to which the GPU writes the value of each list once its copies are
    /// done and visible.
    pub completion: u64,
    /// Address of the stream's own [`Counter`](super::Counter).
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
        // A run of 900 KiB and one of 4 KiB, then three of equal length: two blocks share each run.
        assert_eq!(cut(2, 900 << 10, 2), (2, 2, 452 << 10));
        assert_eq!(cut(3, 1 << 20, 2), (3, 2, 512 << 10));
        assert_eq!(cut(5, 64 << 10, 4), (5, 4, 16 << 10));
        // One or two pieces per block, never three.
        assert_eq!(cut(1, 12 << 10, 4), (1, 2, 8 << 10));
        assert_eq!(cut(3, 100, 4), (1, 1, 4096));
        // Many runs of one length, and more runs than the blocks can take at once.
        assert_eq!(cut(64, 16 << 10, 4), (16, 1, 16 << 10));
        assert_eq!(cut(8192, 128, 2), (256, 1, 4096));
    }
}
