//! Fills memory with patterns, poisons it, and finds the first byte that is wrong.

use ferrywire::Region;
use serde::{Deserialize, Serialize};

use super::layout::{Layout, Piece};
use super::pattern::{Pattern, mix};
use crate::args::{Inject, Verify};
use crate::exit::Outcome;
use crate::units::Bytes;

/// Memory is filled and compared through a buffer of this size, which stays in the nearest cache.
const BUFFER_BYTES: usize = 16 << 10;
/// What `--verify sample` looks at: both ends of a message and some pages between.
const SAMPLE_BYTES: u64 = 4096;
const SAMPLES: u64 = 16;
/// Iteration number of what lies in gaps.
const GAP_ITERATION: u64 = u64::MAX;
/// Iteration numbers of the timed part start here, one per slot; the verified pass counts from 0.
const TIMED_ITERATION: u64 = 1 << 40;

/// A byte that is not what it should be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mismatch {
    /// Size of the message.
    pub size_bytes: u64,
    /// In the message; in the region for a byte outside every message.
    pub offset: u64,
    /// What should be there.
    pub expected: u8,
    /// What is there.
    pub found: u8,
    /// What it looks like.
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

/// The number under which the timed part's contents of a slot are known.
pub fn timed_iteration(slot: u64) -> u64 {
    TIMED_ITERATION + slot
}

/// The memory of one flow on one side, with what belongs into it.
pub struct Contents<'a> {
    /// The memory.
    pub region: &'a Region,
    /// Where in it.
    pub layout: &'a Layout,
    /// Of the run.
    pub seed: u64,
}

impl Contents<'_> {
    fn pattern(&self, iteration: u64) -> Pattern {
        Pattern::new(self.seed, iteration)
    }

    /// Puts an iteration's bytes into a slot.
    pub fn fill(&self, slot: u64, iteration: u64) -> Outcome {
        self.put(slot, self.pattern(iteration))
    }

    /// Puts into a slot what differs from an iteration in every byte, and the gaps' bytes into the gaps.
    pub fn poison(&self, slot: u64, iteration: u64) -> Outcome {
        let gaps = self.pattern(GAP_ITERATION);
        for piece in self.layout.pieces(slot) {
            put(self.region, gaps, piece.offset + piece.bytes, piece.offset + piece.bytes, gap_bytes(piece))?;
        }
        self.put(slot, self.pattern(iteration).complement())
    }

    fn put(&self, slot: u64, pattern: Pattern) -> Outcome {
        self.layout.pieces(slot).try_for_each(|p| put(self.region, pattern, p.offset, p.logical, p.bytes))
    }

    /// Spoils a slot that holds an iteration's bytes.
    pub fn spoil(&self, slot: u64, iteration: u64, how: Inject) -> Outcome {
        match how {
            Inject::OldPattern => self.fill(slot, iteration.wrapping_sub(1)),
            Inject::SkipWrite => self.poison(slot, iteration),
            Inject::WrongByte => {
                let Some(piece) = self.layout.pieces(slot).last().filter(|piece| piece.bytes > 0) else {
                    return Ok(());
                };
                let wrong = !self.pattern(iteration).byte(piece.logical + piece.bytes - 1);
                Ok(self.region.write_at(piece.offset + piece.bytes - 1, &[wrong])?)
            }
        }
    }

    /// The first byte of a slot that is not the iteration's, or of a gap that was written to.
    pub fn check(&self, slot: u64, iteration: u64, how: Verify) -> Outcome<Option<Mismatch>> {
        if how == Verify::Off {
            return Ok(None);
        }
        for piece in self.layout.pieces(slot) {
            for (start, bytes) in stretches(piece.bytes, how, mix(self.seed ^ iteration)) {
                let (offset, logical) = (piece.offset + start, piece.logical + start);
                if let Some(wrong) = self.check_stretch(iteration, offset, logical, bytes)? {
                    return Ok(Some(wrong));
                }
            }
            if let Some(wrong) = self.check_gap(piece)? {
                return Ok(Some(wrong));
            }
        }
        Ok(None)
    }

    fn check_stretch(
        &self,
        iteration: u64,
        offset: u64,
        logical: u64,
        bytes: u64,
    ) -> Outcome<Option<Mismatch>> {
        let pattern = self.pattern(iteration);
        let Some((i, near)) = first_difference(self.region, pattern, offset, logical, bytes)? else {
            return Ok(None);
        };
        let at = logical + i;
        Ok(Some(Mismatch {
            size_bytes: self.layout.size(),
            offset: at,
            expected: pattern.byte(at),
            found: near[0],
            likely: self.likely(iteration, at, &near),
        }))
    }

    fn check_gap(&self, piece: Piece) -> Outcome<Option<Mismatch>> {
        let (pattern, offset) = (self.pattern(GAP_ITERATION), piece.offset + piece.bytes);
        let Some((i, near)) = first_difference(self.region, pattern, offset, offset, gap_bytes(piece))?
        else {
            return Ok(None);
        };
        Ok(Some(Mismatch {
            size_bytes: self.layout.size(),
            offset: offset + i,
            expected: pattern.byte(offset + i),
            found: near[0],
            likely: "written to, though no message lies there".to_owned(),
        }))
    }

    /// Tells what the bytes from `offset` on look like.
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

    /// First bytes of a slot that one small write can mark, at most 8.
    pub fn stamp(&self, slot: u64, iteration: u64) -> Outcome {
        let (offset, stamp) = self.stamp_of(slot, iteration);
        Ok(self.region.write_at(offset, &stamp)?)
    }

    /// Whether a slot starts with an iteration's stamp.
    pub fn check_stamp(&self, slot: u64, iteration: u64) -> Outcome<Option<Mismatch>> {
        let (offset, stamp) = self.stamp_of(slot, iteration);
        let mut found = [0; 8];
        let found = &mut found[..stamp.len()];
        self.region.read_at(offset, found)?;
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

fn gap_bytes(piece: Piece) -> u64 {
    piece.cell_end - piece.offset - piece.bytes
}

/// The stretches of a piece that are looked at.
fn stretches(bytes: u64, how: Verify, seed: u64) -> Vec<(u64, u64)> {
    if how != Verify::Sample || bytes <= SAMPLES * SAMPLE_BYTES {
        return vec![(0, bytes)];
    }
    let between = (0..SAMPLES).map(|i| mix(seed ^ i) % (bytes - SAMPLE_BYTES));
    let starts = between.chain([0, bytes - SAMPLE_BYTES]);
    starts.map(|start| (start, SAMPLE_BYTES)).collect()
}

fn put(region: &Region, pattern: Pattern, offset: u64, logical: u64, bytes: u64) -> Outcome {
    let mut buffer = [0; BUFFER_BYTES];
    for start in (0..bytes).step_by(BUFFER_BYTES) {
        let part = &mut buffer[..(bytes - start).min(BUFFER_BYTES as u64) as usize];
        pattern.fill(logical + start, part);
        region.write_at(offset + start, part)?;
    }
    Ok(())
}

/// The index of the first wrong byte, and up to 64 bytes from there on.
fn first_difference(
    region: &Region,
    pattern: Pattern,
    offset: u64,
    logical: u64,
    bytes: u64,
) -> Outcome<Option<(u64, Vec<u8>)>> {
    let mut buffer = [0; BUFFER_BYTES];
    for start in (0..bytes).step_by(BUFFER_BYTES) {
        let part = &mut buffer[..(bytes - start).min(BUFFER_BYTES as u64) as usize];
        region.read_at(offset + start, part)?;
        if let Some(i) = pattern.first_difference(logical + start, part) {
            let near = &part[i..part.len().min(i + 64)];
            return Ok(Some((start + i as u64, near.to_vec())));
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

    fn run(size: u64, blocks: Option<u64>) -> Run {
        Run {
            op: Op::Write,
            pattern: Traffic::Pair,
            memory: "host".into(),
            peer_memory: "host".into(),
            unpack: None,
            sizes: vec![size],
            depth: Some(2),
            blocks,
            peers: 1,
            iters: Some(1),
            seconds: None,
            warmup: None,
            verify: Verify::All,
            deadline_s: 1.0,
            seed: 11,
        }
    }

    /// Fills two slots with iterations 6 and 7, spoils the second, and checks both.
    fn found_after(size: u64, blocks: Option<u64>, spoil: impl Fn(&Contents)) -> [Option<Mismatch>; 2] {
        let run = run(size, blocks);
        let endpoint = ferrywire::Endpoint::builder().build().expect("an endpoint");
        let region =
            endpoint.register_zeroed(super::super::layout::region_bytes(&run) as usize).expect("memory");
        let layout = Layout::new(&run, flows(&run)[0], Side::Serve, 0);
        let contents = Contents { region: &region, layout: &layout, seed: run.seed };
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
                contents.region.write_at(piece.offset + piece.bytes, b"x").expect("written");
            };
            let [_, bad] = found_after(size, blocks, outside);
            assert!(bad.is_some_and(|bad| bad.likely.starts_with("written to")));
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
