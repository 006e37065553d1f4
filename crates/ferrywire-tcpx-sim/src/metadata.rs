//! The unpack metadata of a receive comm, by which the host gathers a scattered receive.
//!
//! `entries[16][2048]` of 16 bytes, then `count[16]` of 8. The k-th receive of a comm uses slot k mod 16.
//! Invariant: a slot's count covers only entries that are written.
//! Read next: `progress.rs`, which fills it.

use crate::gpu::Mapped;

/// Number of receives that can have metadata at the same time.
pub const SLOTS: usize = 16;
/// Most entries of one receive.
pub const ENTRIES_PER_SLOT: usize = 2048;
/// Bytes of an entry: source u32, length u32, destination u64.
pub const ENTRY_BYTES: usize = 16;
/// Offset of the counts in the block, in bytes.
pub const COUNTS_OFFSET: usize = SLOTS * ENTRIES_PER_SLOT * ENTRY_BYTES;
/// Size of the whole block in bytes.
pub const METADATA_BYTES: usize = COUNTS_OFFSET + SLOTS * size_of::<u64>();

const _: () = assert!(COUNTS_OFFSET == 524_288 && METADATA_BYTES == 524_416);

/// An entry of the metadata: one piece of a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Entry {
    /// Offset of the piece in the receive pool, in bytes.
    pub source: u32,
    /// Length of the piece in bytes.
    pub len: u32,
    /// Offset of the piece from the pointer given to `irecv`, in bytes.
    pub target: u64,
}

const _: () = assert!(size_of::<Entry>() == ENTRY_BYTES);

/// The metadata block, which host and GPU access at the same address.
#[derive(Debug)]
pub struct Metadata {
    block: Mapped,
    counts: [usize; SLOTS],
}

impl Metadata {
    /// An empty block in the given memory of [`METADATA_BYTES`] bytes.
    pub fn new(block: Mapped) -> Metadata {
        let mut metadata = Metadata { block, counts: [0; SLOTS] };
        (0..SLOTS).for_each(|slot| metadata.clear(slot));
        metadata
    }

    /// Address of the metadata block.
    pub fn address(&self) -> u64 {
        self.block.address() as u64
    }

    /// Clears the entries of a slot.
    pub fn clear(&mut self, slot: usize) {
        self.counts[slot] = 0;
        self.publish(slot);
    }

    /// Adds entries to a slot; returns false and adds none if they do not fit.
    pub fn append(&mut self, slot: usize, entries: &[Entry]) -> bool {
        let first = self.counts[slot];
        if first + entries.len() > ENTRIES_PER_SLOT {
            return false;
        }
        for (k, entry) in entries.iter().enumerate() {
            let at = (slot * ENTRIES_PER_SLOT + first + k) * ENTRY_BYTES;
            // SAFETY: `at` is below `COUNTS_OFFSET`, and the block is larger and aligned to a page.
            unsafe { self.block.address().add(at).cast::<Entry>().write_volatile(*entry) };
        }
        self.counts[slot] += entries.len();
        self.publish(slot);
        true
    }

    fn publish(&mut self, slot: usize) {
        let at = COUNTS_OFFSET + slot * size_of::<u64>();
        // SAFETY: the counts end with the block, which is aligned to a page.
        unsafe { self.block.address().add(at).cast::<u64>().write_volatile(self.counts[slot] as u64) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word(metadata: &Metadata, at: usize) -> u64 {
        // SAFETY: the tests stay within the block, at multiples of eight.
        unsafe { metadata.block.address().add(at).cast::<u64>().read_volatile() }
    }

    #[test]
    fn entries_and_counts_are_where_the_host_reads_them() {
        let mut metadata = Metadata::new(Mapped::host(METADATA_BYTES).unwrap());
        let entries =
            [Entry { source: 0x1001, len: 7, target: 0 }, Entry { source: 0x3000, len: 4096, target: 7 }];
        assert!(metadata.append(3, &entries));
        let base = 3 * 2048 * 16;
        assert_eq!(word(&metadata, base), 0x1001 | 7 << 32);
        assert_eq!(word(&metadata, base + 24), 7);
        assert_eq!(word(&metadata, 524_288 + 3 * 8), 2);
        assert_eq!(word(&metadata, 524_288 + 4 * 8), 0);
        metadata.clear(3);
        assert_eq!(word(&metadata, 524_288 + 3 * 8), 0);
    }

    #[test]
    fn a_slot_takes_2048_entries() {
        let mut metadata = Metadata::new(Mapped::host(METADATA_BYTES).unwrap());
        let entry = Entry { source: 0, len: 1, target: 0 };
        assert!(metadata.append(15, &[entry; 2048]));
        assert!(!metadata.append(15, &[entry]));
        assert_eq!(word(&metadata, 524_288 + 15 * 8), 2048);
        assert_eq!(word(&metadata, 15 * 2048 * 16), 1 << 32);
    }
}
