//! Fills memory with patterns, poisons it, and finds the first wrong byte.
//!
//! Host memory is accessed through a small buffer; memory of a GPU by that GPU, all pieces of a message at once.
//! Read next: `pattern.rs`, `layout.rs`.

use ferrywire::Region;
use ferrywire_memory::pattern::Stretch;
use serde::{Deserialize, Serialize};

use super::layout::{Layout, Piece};
use super::pattern::{Pattern, mix};
use crate::args::{Inject, Verify};
use crate::exit::Outcome;
use crate::memory::Local;
use crate::units::Bytes;

/// Size of the buffer for host memory, which fits into the L1 cache.
const BUFFER_BYTES: usize = 16 << 10;
/// Bytes that `--verify sample` checks in each place: both ends of a message and some pages between.
const SAMPLE_BYTES: u64 = 4096;
const SAMPLES: u64 = 16;
/// Bytes of wrong data that are examined to identify them.
const NEAR_BYTES: u64 = 64;
/// Iteration number of the contents of gaps.
const GAP_ITERATION: u64 = u64::MAX;
/// Iteration numbers of the timed part begin here, one per slot; the verified pass counts from 0.
const TIMED_ITERATION: u64 = 1 << 40;

/// A byte that differs from the expected one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mismatch {
    /// Size of the message in bytes.
    pub size_bytes: u64,
    /// Offset in the message; in the region for a byte outside of every message.
    pub offset: u64,
    /// The expected byte.
    pub expected: u8,
    /// The byte that was found.
    pub found: u8,
    /// A description of the wrong data.
    #[serde(deserialize_with = "crate::sanitize::one_line")]
    pub likely: String,
}

impl std::fmt::Display for Mismatch {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Mismatch { size_bytes, offset, expected, found, likely } = self;
        let size = Bytes(*size_bytes);
        write!(
            out,
            "data mismatch at size {size}, offset {offset}: expected 0x{expected:02x}, found 0x{found:02x} ({likely})"
        )
    }
}

/// The iteration number of the timed part's contents of a slot.
pub fn timed_iteration(slot: u64) -> u64 {
    TIMED_ITERATION + slot
}

/// The memory of one flow on one side, with its contents.
pub struct Contents<'a> {
    /// The registered memory of this end.
    pub local: &'a Local,
    /// The layout of the flow's bytes.
    pub layout: &'a Layout,
    /// The seed of the run.
    pub seed: u64,
}

impl Contents<'_> {
    fn pattern(&self, iteration: u64) -> Pattern {
        Pattern::new(self.seed, iteration)
    }

    /// Writes an iteration's bytes into a slot.
    pub fn fill(&self, slot: u64, iteration: u64) -> Outcome {
        self.put(slot, self.pattern(iteration))
    }

    /// Writes bytes into a slot that all differ from an iteration's, and the gaps' bytes into the gaps.
    pub fn poison(&self, slot: u64, iteration: u64) -> Outcome {
        let pattern = self.pattern(iteration).complement();
        let both = |piece| [data_of(piece, pattern), self.gap_of(piece)];
        self.write(self.layout.pieces(slot).flat_map(both))
    }

    fn put(&self, slot: u64, pattern: Pattern) -> Outcome {
        self.write(self.layout.pieces(slot).map(|piece| data_of(piece, pattern)))
    }

    fn write(&self, mut stretches: impl Iterator<Item = Stretch>) -> Outcome {
        match &self.local.patterns {
            Some(gpu) => Ok(gpu.fill(&stretches.collect::<Vec<_>>())?),
            None => stretches.try_for_each(|stretch| put(&self.local.region, stretch)),
        }
    }

    /// The first piece with a wrong byte, and the index of that byte.
    fn find(&self, mut stretches: impl Iterator<Item = Stretch>) -> Outcome<Option<(Stretch, u64)>> {
        let Some(gpu) = &self.local.patterns else {
            let differs = |stretch| first_difference(&self.local.region, stretch).transpose();
            return stretches.find_map(differs).transpose();
        };
        let all: Vec<Stretch> = stretches.collect();
        Ok(gpu.first_difference(&all)?.map(|(stretch, index)| (all[stretch], index)))
    }

    fn gap_of(&self, piece: Piece) -> Stretch {
        let Piece { offset, bytes, cell_end, .. } = piece;
        let gap = offset + bytes;
        Stretch {
            pattern: self.pattern(GAP_ITERATION).words(),
            from: gap,
            offset: gap,
            bytes: cell_end - gap,
        }
    }

    /// Corrupts a slot that holds an iteration's bytes.
    pub fn spoil(&self, slot: u64, iteration: u64, how: Inject) -> Outcome {
        match how {
            Inject::OldPattern => self.fill(slot, iteration.wrapping_sub(1)),
            Inject::SkipWrite => self.poison(slot, iteration),
            Inject::Slow | Inject::Panic => Ok(()),
            Inject::WrongByte | Inject::LateByte => {
                let Some(piece) = self.layout.pieces(slot).last().filter(|piece| piece.bytes > 0) else {
                    return Ok(());
                };
                let wrong = !self.pattern(iteration).byte(piece.logical + piece.bytes - 1);
                Ok(self.local.region.write_at(piece.offset + piece.bytes - 1, &[wrong])?)
            }
        }
    }

    /// The first byte of a slot that is not the iteration's, or of a gap that was overwritten.
    pub fn check(&self, slot: u64, iteration: u64, how: Verify) -> Outcome<Option<Mismatch>> {
        if how == Verify::Off {
            return Ok(None);
        }
        let pattern = self.pattern(iteration);
        let checked_stretches = |piece: Piece| {
            let data = data_of(piece, pattern);
            let parts = stretches(piece.bytes, how, mix(self.seed ^ iteration)).into_iter();
            let part = move |(start, bytes)| Stretch {
                from: data.from + start,
                offset: data.offset + start,
                bytes,
                ..data
            };
            parts.map(part).chain([self.gap_of(piece)])
        };
        match self.find(self.layout.pieces(slot).flat_map(checked_stretches))? {
            Some((stretch, index)) => self.mismatch(iteration, stretch, index).map(Some),
            None => Ok(None),
        }
    }

    fn mismatch(&self, iteration: u64, stretch: Stretch, index: u64) -> Outcome<Mismatch> {
        let mut near = vec![0; (stretch.bytes - index).min(NEAR_BYTES) as usize];
        self.local.region.read_at(stretch.offset + index, &mut near)?;
        let offset = stretch.from + index;
        let in_gap = stretch.pattern == self.pattern(GAP_ITERATION).words();
        let likely = if in_gap {
            "a byte outside of all messages was written".to_owned()
        } else {
            self.likely(iteration, offset, &near)
        };
        Ok(Mismatch {
            size_bytes: self.layout.size(),
            offset,
            expected: stretch.pattern.byte(offset),
            found: near[0],
            likely,
        })
    }

    /// A description of the bytes from `offset` on, such as the contents of another iteration.
    fn likely(&self, iteration: u64, offset: u64, near: &[u8]) -> String {
        let is = |pattern: Pattern| pattern.first_difference(offset, near).is_none();
        if is(self.pattern(iteration).complement()) {
            return "never written".to_owned();
        }
        match (1..=64).find(|age| is(self.pattern(iteration.wrapping_sub(*age)))) {
            Some(age) => format!("the data of {age} iterations ago"),
            None => "no data of this run at this offset".to_owned(),
        }
    }

    /// Whether the CPU can access the memory only by copies.
    pub fn is_on_gpu(&self) -> bool {
        self.local.patterns.is_some()
    }

    /// Writes the stamp of an iteration: the first bytes of a slot, at most 8, by one small write.
    pub fn stamp(&self, slot: u64, iteration: u64) -> Outcome {
        let (offset, stamp) = self.stamp_of(slot, iteration);
        Ok(self.local.region.write_at(offset, &stamp)?)
    }

    /// Checks that a slot begins with an iteration's stamp.
    pub fn check_stamp(&self, slot: u64, iteration: u64) -> Outcome<Option<Mismatch>> {
        let (offset, stamp) = self.stamp_of(slot, iteration);
        let mut found = [0; 8];
        let found = &mut found[..stamp.len()];
        self.local.region.read_at(offset, found)?;
        let Some(i) = stamp.iter().zip(&*found).position(|(a, b)| a != b) else {
            return Ok(None);
        };
        Ok(Some(Mismatch {
            size_bytes: self.layout.size(),
            offset: i as u64,
            expected: stamp[i],
            found: found[i],
            likely: self.likely(iteration, i as u64, &found[i..]),
        }))
    }

    fn stamp_of(&self, slot: u64, iteration: u64) -> (u64, Vec<u8>) {
        let first = self.layout.pieces(slot).next().expect("a message has at least one piece");
        let mut stamp = vec![0; first.bytes.min(8) as usize];
        self.pattern(iteration).fill(0, &mut stamp);
        (first.offset, stamp)
    }
}

fn data_of(piece: Piece, pattern: Pattern) -> Stretch {
    let Piece { offset, logical, bytes, .. } = piece;
    Stretch { pattern: pattern.words(), from: logical, offset, bytes }
}

/// The pieces that are checked.
fn stretches(bytes: u64, how: Verify, seed: u64) -> Vec<(u64, u64)> {
    if how != Verify::Sample || bytes <= SAMPLES * SAMPLE_BYTES {
        return vec![(0, bytes)];
    }
    let between = (0..SAMPLES).map(|i| mix(seed ^ i) % (bytes - SAMPLE_BYTES));
    let starts = between.chain([0, bytes - SAMPLE_BYTES]);
    starts.map(|start| (start, SAMPLE_BYTES)).collect()
}

fn put(region: &Region, stretch: Stretch) -> Outcome {
    let Stretch { pattern, from, offset, bytes } = stretch;
    let mut buffer = [0; BUFFER_BYTES];
    for start in (0..bytes).step_by(BUFFER_BYTES) {
        let part = &mut buffer[..(bytes - start).min(BUFFER_BYTES as u64) as usize];
        pattern.fill(from + start, part);
        region.write_at(offset + start, part)?;
    }
    Ok(())
}

/// The piece and the index of its first wrong byte.
fn first_difference(region: &Region, stretch: Stretch) -> Outcome<Option<(Stretch, u64)>> {
    let Stretch { pattern, from, offset, bytes } = stretch;
    let mut buffer = [0; BUFFER_BYTES];
    for start in (0..bytes).step_by(BUFFER_BYTES) {
        let part = &mut buffer[..(bytes - start).min(BUFFER_BYTES as u64) as usize];
        region.read_at(offset + start, part)?;
        if let Some(i) = pattern.first_difference(from + start, part) {
            return Ok(Some((stretch, start + i as u64)));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::super::layout::flows;
    use super::super::protocol::{Run, Side};
    use super::*;
    use crate::args::{Op, Pattern as Traffic};
    use crate::memory::Memory;

    fn run(size: u64, blocks: Option<u64>) -> Run {
        Run {
            op: Op::Write,
            pattern: Traffic::Unidir,
            memory: Memory::Host,
            peer_memory: Some(Memory::Host),
            unpack: None,
            sizes: vec![size],
            depth: Some(2),
            blocks,
            peers: 1,
            multi_gpu: false,
            iters: Some(1),
            seconds: None,
            warmup: None,
            verify: Verify::All,
            timeout_s: 1.0,
            seed: 11,
        }
    }

    /// Fills two slots with iterations 6 and 7, corrupts the second, and checks both, on the host and on a GPU.
    fn found_after(size: u64, blocks: Option<u64>, spoil: impl Fn(&Contents)) -> [Option<Mismatch>; 2] {
        let [host, gpu] = [Memory::Host, Memory::Sim(8)].map(|memory| found_in(memory, size, blocks, &spoil));
        assert_eq!(host, gpu);
        host
    }

    fn found_in(
        memory: Memory,
        size: u64,
        blocks: Option<u64>,
        spoil: &impl Fn(&Contents),
    ) -> [Option<Mismatch>; 2] {
        let run = run(size, blocks);
        let endpoint = ferrywire::Endpoint::builder().build().expect("an endpoint");
        let bytes = super::super::layout::region_bytes(&run);
        let local = memory.open().and_then(|home| home.register(&endpoint, bytes)).expect("memory");
        let layout = Layout::new(&run, flows(&run)[0], Side::Serve, 0);
        let contents = Contents { local: &local, layout: &layout, seed: run.seed };
        for slot in 0..2 {
            contents.poison(slot, 6 + slot).expect("poisoned");
            contents.fill(slot, 6 + slot).expect("filled");
        }
        spoil(&contents);
        [0, 1].map(|slot| contents.check(slot, 6 + slot, Verify::All).expect("checked"))
    }

    fn likely(size: u64, blocks: Option<u64>, how: Inject) -> String {
        let [good, bad] = found_after(size, blocks, |contents| contents.spoil(1, 7, how).expect("spoilt"));
        assert_eq!(good, None);
        let bad = bad.unwrap_or_else(|| panic!("{how:?} was not caught at {size} {blocks:?}"));
        assert!(bad.expected != bad.found && bad.offset < size);
        bad.likely
    }

    #[test]
    fn good_data_passes() {
        for (size, blocks) in [(0, None), (1, None), (4096, None), (100_001, None), (1000, Some(7))] {
            assert_eq!(found_after(size, blocks, |_| ()), [None, None]);
        }
    }

    #[test]
    fn every_kind_of_wrong_data_is_caught() {
        for (size, blocks) in [(1, None), (9, None), (100_001, None), (1000, Some(7))] {
            likely(size, blocks, Inject::WrongByte);
            let old = likely(size, blocks, Inject::OldPattern);
            assert!(old == "the data of 1 iterations ago" || size == 1, "{old}");
            assert_eq!(likely(size, blocks, Inject::SkipWrite), "never written");
        }
    }

    #[test]
    fn a_byte_outside_every_message_is_caught() {
        for (size, blocks) in [(100, None), (1000, Some(7))] {
            let outside = |contents: &Contents| {
                let piece = contents.layout.pieces(1).next().expect("a piece");
                contents.local.region.write_at(piece.offset + piece.bytes, b"x").expect("written");
            };
            let [_, bad] = found_after(size, blocks, outside);
            assert!(bad.is_some_and(|bad| bad.likely.starts_with("a byte outside of all messages")));
        }
    }

    #[test]
    fn stamps_tell_iterations_apart() {
        for size in [1, 8, 100] {
            found_after(size, None, |contents| {
                contents.stamp(0, 3).expect("stamped");
                assert_eq!(contents.check_stamp(0, 3).expect("read"), None);
                assert!(contents.check_stamp(0, 4).expect("read").is_some());
            });
        }
    }
}
