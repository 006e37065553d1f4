//! Verification patterns: each byte is determined by its offset.
//!
//! [`WordPattern`] on the host, kernels on CUDA GPUs and the engine of simulated GPUs produce identical
//! bytes. So a pattern written to one kind of memory can be verified in another.
//! Read next: `cuda/pattern.rs`, `sim/work.rs`.

use super::unpack::PatternParameters;

/// Bytes that one step of a comparison examines.
const GROUP_BYTES: usize = 512;

/// An endless sequence of 8-byte words: with `sum = key + w * step`, word `w` is `sum ^ sum << 32 ^ flip`, in
/// little-endian order. The sum form lets the compiler fill and compare with vector instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WordPattern {
    /// Value of word 0 before its halves are mixed.
    pub key: u64,
    /// Difference between neighbouring words, before their halves are mixed.
    pub step: u64,
    /// Bits that are inverted in every word.
    pub flip: u64,
}

impl WordPattern {
    fn sum(self, index: u64) -> u64 {
        self.key.wrapping_add(index.wrapping_mul(self.step))
    }

    #[inline(always)]
    fn word_at(self, sum: u64) -> u64 {
        sum ^ (sum << 32) ^ self.flip
    }

    /// The pattern's byte at `offset`.
    pub fn byte(self, offset: u64) -> u8 {
        self.word_at(self.sum(offset / 8)).to_le_bytes()[(offset % 8) as usize]
    }

    /// Writes the pattern's bytes from `offset` on into `into`.
    pub fn fill(self, offset: u64, into: &mut [u8]) {
        let head = head_bytes(offset, into.len());
        let (first, rest) = into.split_at_mut(head);
        for (i, byte) in first.iter_mut().enumerate() {
            *byte = self.byte(offset + i as u64);
        }
        let mut sum = self.sum((offset + head as u64) / 8);
        let (words, last) = rest.as_chunks_mut();
        for word in words {
            *word = self.word_at(sum).to_le_bytes();
            sum = sum.wrapping_add(self.step);
        }
        let bytes = self.word_at(sum).to_le_bytes();
        last.copy_from_slice(&bytes[..last.len()]);
    }

    /// Index in `found` of the first byte that differs from the pattern, which starts at `offset`.
    pub fn first_difference(self, offset: u64, found: &[u8]) -> Option<usize> {
        let mut at = head_bytes(offset, found.len());
        if let Some(i) = self.scan(offset, &found[..at]) {
            return Some(i);
        }
        while at < found.len() {
            let group = &found[at..found.len().min(at + GROUP_BYTES)];
            if self.group_differs((offset + at as u64) / 8, group) {
                return self.scan(offset + at as u64, group).map(|i| at + i);
            }
            at += group.len();
        }
        None
    }

    fn group_differs(self, index: u64, group: &[u8]) -> bool {
        let mut sum = self.sum(index);
        let mut difference = 0;
        let (words, last) = group.as_chunks();
        for word in words {
            difference |= u64::from_le_bytes(*word) ^ self.word_at(sum);
            sum = sum.wrapping_add(self.step);
        }
        difference != 0 || self.word_at(sum).to_le_bytes()[..last.len()] != *last
    }

    fn scan(self, offset: u64, found: &[u8]) -> Option<usize> {
        found.iter().enumerate().position(|(i, byte)| *byte != self.byte(offset + i as u64))
    }
}

/// Bytes from `offset` up to the next word boundary, at most `available`.
fn head_bytes(offset: u64, available: usize) -> usize {
    available.min((offset.wrapping_neg() % 8) as usize)
}

/// `bytes` bytes for a test. They differ from position to position and from salt to salt, and none of them is 0, so that memory
/// that nothing was written to is told from them.
pub fn without_zeroes(bytes: usize, salt: u64) -> Vec<u8> {
    let mut word = salt.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x0123_4567_89ab_cdef;
    let mut out = vec![0; bytes.next_multiple_of(8)];
    for place in out.as_chunks_mut().0 {
        word = word.wrapping_mul(0xd134_2543_de82_ef95).wrapping_add(1);
        *place = ((word ^ (word >> 29)) | 0x0101_0101_0101_0101).to_le_bytes();
    }
    out.truncate(bytes);
    out
}

/// A range of a region, and the part of a pattern that belongs there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// The pattern of which the range contains a part.
    pub pattern: WordPattern,
    /// Offset of the range's first byte in the pattern.
    pub from: u64,
    /// Offset of the range's first byte in the region.
    pub offset: u64,
    /// Length of the range in bytes.
    pub bytes: u64,
}

impl PatternParameters {
    /// The pattern alone, without address and length.
    pub fn pattern(&self) -> WordPattern {
        WordPattern { key: self.key, step: self.step, flip: self.flip }
    }
}
