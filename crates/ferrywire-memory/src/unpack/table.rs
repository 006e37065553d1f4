//! The table in which a plugin describes a receive's fragments, and the checks of its contents.
//!
//! ```text
//!   0        entries[16][2048]   source offset u32 (in the pool), bytes u32, target offset u64 (in the message)
//!   524288   count[16]           u64
//! ```
//!
//! The k-th receive of a connection uses slot k mod 16. Its count is valid from the `test` that reports done
//! until the receive is returned. Entries are in the order in which sockets finished, so their targets are
//! not sorted.
//!
//! Invariant: entries are read once, into private memory, and [`Checked::read`] accepts them only if they
//! cover each byte of the message once and take no byte from outside the pool.
//! Read next: `gather.rs`.

use super::UnpackError;
use ferrywire_proto::limits;
use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Receives of one connection that use the table concurrently.
pub const SLOTS: usize = 16;
/// Most fragments of one receive.
pub const FRAGMENTS_PER_SLOT_MAX: usize = 2048;
const COUNTS_OFFSET: usize = SLOTS * FRAGMENTS_PER_SLOT_MAX * size_of::<Fragment>();
/// Size of the whole table in bytes.
pub const METADATA_BYTES: usize = COUNTS_OFFSET + SLOTS * size_of::<u64>();

const _: () = assert!(COUNTS_OFFSET == 524_288 && METADATA_BYTES == 524_416);
// The length of merged fragments fits into 32 bits.
const _: () = assert!(limits::CHUNK_BYTES_MAX <= u32::MAX as usize);

/// A piece of a receive: an entry of the plugin's table, and of the private one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Fragment {
    /// Offset of the fragment in the pool, in bytes.
    pub source: u32,
    /// Length of the fragment in bytes.
    pub bytes: u32,
    /// Offset of the fragment in the message, in bytes.
    pub target: u64,
}

const _: () = assert!(size_of::<Fragment>() == 16 && std::mem::offset_of!(Fragment, target) == 8);

impl Fragment {
    /// Offset of the fragment's end in the message, in bytes.
    fn end(&self) -> u64 {
        self.target.saturating_add(self.bytes.into())
    }

    /// Whether `next` continues this fragment in both pool and message.
    fn is_followed_by(&self, next: &Fragment) -> bool {
        let source_end = u64::from(self.source) + u64::from(self.bytes);
        source_end == u64::from(next.source) && self.end() == next.target
    }
}

/// A plugin's table, read in place.
pub(super) struct Metadata {
    base: *mut u8,
}

// SAFETY: the memory is read with atomic loads only, which may be done on any thread.
unsafe impl Send for Metadata {}

impl Metadata {
    /// # Safety
    /// [`METADATA_BYTES`] bytes at `base`, aligned for a [`Fragment`], stay readable while this value lives.
    pub unsafe fn new(base: *mut u8) -> Metadata {
        Metadata { base }
    }

    /// Number of a slot's entries, according to the plugin. A later read of the entries sees at least these.
    fn count(&self, slot: usize) -> u64 {
        assert!(slot < SLOTS, "{slot}");
        let at = COUNTS_OFFSET + slot * size_of::<u64>();
        // SAFETY: the count is inside the table, and aligned; the plugin writes whole words.
        unsafe { AtomicU64::from_ptr(self.base.add(at).cast()) }.load(Ordering::Acquire)
    }

    fn entry(&self, slot: usize, index: usize) -> Fragment {
        assert!(slot < SLOTS && index < FRAGMENTS_PER_SLOT_MAX, "{slot}, {index}");
        let at = (slot * FRAGMENTS_PER_SLOT_MAX + index) * size_of::<Fragment>();
        // SAFETY: the entry is three aligned words inside the table.
        unsafe {
            let base = self.base.add(at);
            Fragment {
                source: AtomicU32::from_ptr(base.cast()).load(Ordering::Relaxed),
                bytes: AtomicU32::from_ptr(base.add(4).cast()).load(Ordering::Relaxed),
                target: AtomicU64::from_ptr(base.add(8).cast()).load(Ordering::Relaxed),
            }
        }
    }
}

impl fmt::Debug for Metadata {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Metadata({:p})", self.base)
    }
}

/// The limits that a slot's fragments must respect.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    pub slot: usize,
    pub pool_bytes: u64,
    pub message_bytes: u64,
    /// Whether the receive went to host memory, and so has no fragments.
    pub host: bool,
}

/// A slot's fragments after all checks, in the plugin's order; reused for each receive.
#[derive(Debug)]
pub(super) struct Checked {
    fragments: Vec<Fragment>,
    /// Ranges of the message that consecutive fragments cover.
    spans: Vec<(u64, u64)>,
}

impl Checked {
    pub fn new() -> Checked {
        Checked {
            fragments: Vec::with_capacity(FRAGMENTS_PER_SLOT_MAX),
            spans: Vec::with_capacity(FRAGMENTS_PER_SLOT_MAX),
        }
    }

    /// Reads and checks a slot's fragments; returns the first violation as an error.
    pub fn read(&mut self, table: &Metadata, bounds: Bounds) -> Result<(), UnpackError> {
        let (slot, count) = (bounds.slot, table.count(bounds.slot));
        self.fragments.clear();
        if bounds.host && count > 0 {
            return Err(UnpackError::FragmentsForHost { slot, count });
        }
        if count > FRAGMENTS_PER_SLOT_MAX as u64 {
            return Err(UnpackError::TooManyFragments { slot, count });
        }
        self.fragments.extend((0..count as usize).map(|index| table.entry(slot, index)));
        self.check(bounds)
    }

    fn check(&mut self, bounds: Bounds) -> Result<(), UnpackError> {
        self.check_ranges(bounds)?;
        self.check_overlap(bounds.slot)?;
        let sum_bytes = self.fragments.iter().map(|fragment| u64::from(fragment.bytes)).sum();
        // The fragments are inside the message, do not overlap, and have as many bytes: they cover each byte
        // once.
        if sum_bytes != bounds.message_bytes && !bounds.host {
            return Err(UnpackError::WrongSum {
                slot: bounds.slot,
                fragments: self.fragments.len(),
                sum_bytes,
                message_bytes: bounds.message_bytes,
            });
        }
        Ok(())
    }

    fn check_ranges(&self, bounds: Bounds) -> Result<(), UnpackError> {
        let Bounds { slot, pool_bytes, message_bytes, .. } = bounds;
        for (fragment, Fragment { source, bytes, target }) in self.fragments.iter().copied().enumerate() {
            if u64::from(source) + u64::from(bytes) > pool_bytes {
                return Err(UnpackError::OutsidePool {
                    slot,
                    fragment,
                    source_offset: source,
                    bytes,
                    pool_bytes,
                });
            }
            if target.checked_add(bytes.into()).is_none_or(|end| end > message_bytes) {
                return Err(UnpackError::OutsideMessage {
                    slot,
                    fragment,
                    target_offset: target,
                    bytes,
                    message_bytes,
                });
            }
        }
        Ok(())
    }

    /// Returns an error when two fragments overlap. Chunks arrive whole, so there are few ranges, and sorting
    /// them is cheap.
    fn check_overlap(&mut self, slot: usize) -> Result<(), UnpackError> {
        self.spans.clear();
        for fragment in self.fragments.iter().filter(|fragment| fragment.bytes > 0) {
            match self.spans.last_mut() {
                Some((_, end)) if *end == fragment.target => *end = fragment.end(),
                _ => self.spans.push((fragment.target, fragment.end())),
            }
        }
        self.spans.sort_unstable();
        if !self.spans.is_sorted_by(|one, next| one.1 <= next.0) {
            return Err(self.overlap(slot));
        }
        Ok(())
    }

    /// The error for the first two fragments that overlap, in the order of the message; there must be some.
    #[cold]
    fn overlap(&self, slot: usize) -> UnpackError {
        let mut order: Vec<usize> =
            (0..self.fragments.len()).filter(|index| self.fragments[*index].bytes > 0).collect();
        order.sort_by_key(|index| self.fragments[*index].target);
        let overlaps = |pair: &&[usize]| self.fragments[pair[0]].end() > self.fragments[pair[1]].target;
        let pair = order.windows(2).find(overlaps).unwrap_or(&[0, 0]);
        let [other, fragment] = [pair[0], pair[1]];
        let Fragment { bytes, target, .. } = self.fragments[fragment];
        let other_end = self.fragments[other].end();
        UnpackError::Overlap { slot, fragment, target_offset: target, bytes, other, other_end }
    }

    /// The checked fragments, with those that continue one another merged.
    pub fn merged(&self) -> impl Iterator<Item = Fragment> {
        let mut rest = self.fragments.iter().copied().filter(|fragment| fragment.bytes > 0).peekable();
        std::iter::from_fn(move || {
            let mut merged = rest.next()?;
            while let Some(next) = rest.next_if(|next| merged.is_followed_by(next)) {
                merged.bytes += next.bytes;
            }
            Some(merged)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BOUNDS: Bounds = Bounds { slot: 3, pool_bytes: 10_000, message_bytes: 100, host: false };

    fn fragments(all: &[(u32, u32, u64)]) -> Checked {
        let mut checked = Checked::new();
        checked.fragments.extend(all.iter().map(|(source, bytes, target)| Fragment {
            source: *source,
            bytes: *bytes,
            target: *target,
        }));
        checked
    }

    fn check(all: &[(u32, u32, u64)]) -> Result<(), UnpackError> {
        fragments(all).check(BOUNDS)
    }

    #[test]
    fn fragments_that_cover_the_message_once_are_believed() {
        for good in [
            &[(0, 100, 0)][..],
            &[(9_900, 100, 0)],
            &[(7, 40, 60), (1000, 60, 0)],
            &[(7, 1, 99), (1000, 60, 0), (1000, 39, 60)],
            &[(10_000, 0, 100), (0, 100, 0), (5, 0, 50), (5, 0, 0)],
        ] {
            assert_eq!(check(good), Ok(()), "{good:?}");
        }
    }

    #[test]
    fn a_source_outside_the_pool_is_refused() {
        for (source_offset, bytes) in [(9_901, 100), (10_000, 1), (u32::MAX, 1), (0, u32::MAX), (10_001, 0)] {
            let refused =
                UnpackError::OutsidePool { slot: 3, fragment: 1, source_offset, bytes, pool_bytes: 10_000 };
            assert_eq!(check(&[(0, 1, 0), (source_offset, bytes, 1)]), Err(refused));
        }
    }

    #[test]
    fn a_target_outside_the_message_is_refused() {
        for (target_offset, bytes) in [(1, 100), (100, 1), (u64::MAX, 1), (u64::MAX - 1, 100), (101, 0)] {
            let refused = UnpackError::OutsideMessage {
                slot: 3,
                fragment: 1,
                target_offset,
                bytes,
                message_bytes: 100,
            };
            assert_eq!(check(&[(0, 1, 0), (0, bytes, target_offset)]), Err(refused));
        }
    }

    #[test]
    fn an_overlap_is_refused_though_the_sum_is_right() {
        let refused = UnpackError::Overlap {
            slot: 3,
            fragment: 2,
            target_offset: 49,
            bytes: 50,
            other: 0,
            other_end: 50,
        };
        assert_eq!(check(&[(0, 50, 0), (500, 0, 20), (100, 50, 49)]), Err(refused));
        let twice = UnpackError::Overlap {
            slot: 3,
            fragment: 1,
            target_offset: 0,
            bytes: 50,
            other: 0,
            other_end: 50,
        };
        assert_eq!(check(&[(0, 50, 0), (0, 50, 0)]), Err(twice));
    }

    #[test]
    fn another_sum_than_the_messages_is_refused() {
        for (all, sum_bytes) in [(&[(0, 60, 0), (60, 39, 60)][..], 99), (&[(0, 0, 0)], 0), (&[], 0)] {
            let refused =
                UnpackError::WrongSum { slot: 3, fragments: all.len(), sum_bytes, message_bytes: 100 };
            assert_eq!(check(all), Err(refused));
        }
        assert_eq!(fragments(&[]).check(Bounds { message_bytes: 0, ..BOUNDS }), Ok(()));
    }

    #[test]
    fn fragments_that_follow_one_another_are_merged() {
        let merged = |all: &[(u32, u32, u64)]| -> Vec<(u32, u32, u64)> {
            fragments(all).merged().map(|one| (one.source, one.bytes, one.target)).collect()
        };
        assert_eq!(merged(&[(0, 10, 0), (10, 20, 10), (30, 5, 30)]), [(0, 35, 0)]);
        assert_eq!(merged(&[(0, 10, 0), (5, 0, 7), (10, 20, 10)]), [(0, 30, 0)]);
        // Neighbours in the pool only, in the message only, and in reverse order.
        for apart in [[(0, 10, 0), (10, 10, 20)], [(0, 10, 0), (11, 10, 10)], [(10, 10, 10), (0, 10, 0)]] {
            assert_eq!(merged(&apart), apart);
        }
        assert_eq!(merged(&[]), []);
    }

    /// A table in the test's memory.
    struct Table(Vec<u64>);

    impl Table {
        fn new() -> Table {
            // Two words per entry, so the base is aligned for an entry.
            Table(vec![0; METADATA_BYTES / 8])
        }

        fn set(&mut self, slot: usize, count: u64, all: &[Fragment]) {
            for (index, fragment) in all.iter().enumerate() {
                let at = (slot * FRAGMENTS_PER_SLOT_MAX + index) * 2;
                self.0[at] = u64::from(fragment.source) | u64::from(fragment.bytes) << 32;
                self.0[at + 1] = fragment.target;
            }
            self.0[COUNTS_OFFSET / 8 + slot] = count;
        }

        fn read(&mut self, bounds: Bounds) -> Result<Checked, UnpackError> {
            let mut checked = Checked::new();
            // SAFETY: of that size, aligned, and outlives the reader.
            let table = unsafe { Metadata::new(self.0.as_mut_ptr().cast()) };
            checked.read(&table, bounds).map(|()| checked)
        }
    }

    #[test]
    fn a_slot_has_2048_fragments_and_not_one_more() {
        let mut table = Table::new();
        let all: Vec<Fragment> =
            (0..2048).map(|k| Fragment { source: k * 2, bytes: 1, target: k.into() }).collect();
        let bounds = Bounds { slot: 15, message_bytes: 2048, ..BOUNDS };
        table.set(15, 2048, &all);
        assert_eq!(table.read(bounds).unwrap().merged().collect::<Vec<_>>(), all);
        for count in [2049, u64::MAX] {
            table.set(15, count, &[]);
            assert_eq!(table.read(bounds).unwrap_err(), UnpackError::TooManyFragments { slot: 15, count });
        }
    }

    #[test]
    fn a_receive_into_host_memory_has_no_fragments() {
        let mut table = Table::new();
        let bounds = Bounds { host: true, ..BOUNDS };
        assert_eq!(table.read(bounds).unwrap().merged().count(), 0);
        table.set(3, 1, &[Fragment { source: 0, bytes: 100, target: 0 }]);
        assert_eq!(table.read(bounds).unwrap_err(), UnpackError::FragmentsForHost { slot: 3, count: 1 });
    }

    proptest! {
        /// Compares with a model that marks the message's bytes one by one.
        #[test]
        fn only_exact_covers_are_believed(
            all in prop::collection::vec((0u32..10_100, 0u32..30, 0u64..110), 0..12),
        ) {
            let mut painted = [0u32; 200];
            let in_pool = all.iter().all(|(source, bytes, _)| source + bytes <= 10_000);
            let in_message = all.iter().all(|(_, bytes, target)| target + u64::from(*bytes) <= 100);
            for (_, bytes, target) in &all {
                painted[*target as usize..][..*bytes as usize].iter_mut().for_each(|byte| *byte += 1);
            }
            let exact = painted[..100].iter().all(|byte| *byte == 1);
            prop_assert_eq!(check(&all).is_ok(), in_pool && in_message && exact);
        }

        /// Random covers in random order are accepted; with one byte of one fragment moved they are not.
        #[test]
        fn a_cover_is_believed_and_a_damaged_one_is_not(
            cuts in prop::collection::btree_set(1u64..100, 0..20),
            order in any::<u64>(),
            victim in any::<prop::sample::Index>(),
            shift in prop::sample::select(vec![-1i64, 1]),
        ) {
            let edges: Vec<u64> = [0].into_iter().chain(cuts).chain([100]).collect();
            let mut all: Vec<(u32, u32, u64)> =
                edges.windows(2).map(|pair| (5, (pair[1] - pair[0]) as u32, pair[0])).collect();
            let mut rng = ferrywire_sys::rng::Rng::new(order);
            for last in (1..all.len()).rev() {
                all.swap(last, rng.below(last as u64 + 1) as usize);
            }
            prop_assert_eq!(check(&all), Ok(()));
            let damaged = victim.index(all.len());
            all[damaged].2 = all[damaged].2.wrapping_add_signed(shift);
            prop_assert!(check(&all).is_err());
        }
    }
}
