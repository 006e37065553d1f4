//! Bytes that tell where they belong, written and compared where they lie: by the GPU in memory of GPUs.
//!
//! For benchmarks and tests, which would else measure copies to the host. The same sequence is made by
//! [`WordPattern`] on the host, by kernels on CUDA GPUs and by the engine of simulated ones, so that what one kind
//! of memory is filled with can be looked for in another.
//!
//! Invariant: what is written or read lies inside of the region, which is checked before anything begins.
//! Read next: `cuda/pattern.rs`, `sim/work.rs`.

use super::cuda::CudaPattern;
use super::sim::SimPattern;
use super::unpack::PatternParameters;
use super::{Gpu, Place, Region};
use crate::error::Result;

/// Words looked at together when comparing.
const GROUP_BYTES: usize = 512;

/// An endless sequence of 8-byte words: with `sum = key + w * step`, word `w` is `sum ^ sum << 32 ^ flip`, in
/// little-endian order. The sum form lets the compiler fill and compare with vector instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WordPattern {
    /// Word 0, before its halves are mixed.
    pub key: u64,
    /// Distance of neighbouring words.
    pub step: u64,
    /// Bits that are turned in every word.
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

    /// The byte at `offset`.
    pub fn byte(self, offset: u64) -> u8 {
        self.word_at(self.sum(offset / 8)).to_le_bytes()[(offset % 8) as usize]
    }

    /// Writes the bytes from `offset` on.
    pub fn fill(self, offset: u64, into: &mut [u8]) {
        let head = head_bytes(offset, into.len());
        let (first, rest) = into.split_at_mut(head);
        for (i, byte) in first.iter_mut().enumerate() {
            *byte = self.byte(offset + i as u64);
        }
        let mut sum = self.sum((offset + head as u64) / 8);
        let mut words = rest.chunks_exact_mut(8);
        for word in &mut words {
            word.copy_from_slice(&self.word_at(sum).to_le_bytes());
            sum = sum.wrapping_add(self.step);
        }
        let last = words.into_remainder();
        let bytes = self.word_at(sum).to_le_bytes();
        last.copy_from_slice(&bytes[..last.len()]);
    }

    /// The first byte that is not what it should be from `offset` on, as an index into `found`.
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
        let words = group.chunks_exact(8);
        let last = words.remainder();
        for word in words {
            let found =
                u64::from_le_bytes([word[0], word[1], word[2], word[3], word[4], word[5], word[6], word[7]]);
            difference |= found ^ self.word_at(sum);
            sum = sum.wrapping_add(self.step);
        }
        difference != 0 || self.word_at(sum).to_le_bytes()[..last.len()] != *last
    }

    fn scan(self, offset: u64, found: &[u8]) -> Option<usize> {
        found.iter().enumerate().position(|(i, byte)| *byte != self.byte(offset + i as u64))
    }
}

/// Bytes up to the next word boundary.
fn head_bytes(offset: u64, available: usize) -> usize {
    available.min((offset.wrapping_neg() % 8) as usize)
}

/// Some bytes of a region and the part of a pattern that belongs there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// The pattern.
    pub pattern: WordPattern,
    /// Its first byte here.
    pub from: u64,
    /// Where in the region.
    pub offset: u64,
    /// How many bytes.
    pub bytes: u64,
}

/// Writes and compares patterns in a region of a GPU's memory, by that GPU. Each call waits until it is done, and
/// costs the host one launch for all short stretches and one for each long one.
///
/// What peers write to the region at the same time may be overwritten, or found half.
pub struct RegionPattern {
    region: Region,
    by: By,
}

enum By {
    Sim(SimPattern),
    Cuda(Box<CudaPattern>),
}

impl RegionPattern {
    /// For a region of GPU memory; nothing for host memory, where the caller can do it as well.
    pub fn of(region: &Region) -> Result<Option<RegionPattern>> {
        if region.place() == Place::Host {
            return Ok(None);
        }
        let by = match Gpu::opened(region.place())? {
            Gpu::Sim(gpu) => By::Sim(gpu.pattern()),
            Gpu::Cuda(gpu) => By::Cuda(Box::new(CudaPattern::new(&gpu)?)),
        };
        Ok(Some(RegionPattern { region: region.clone(), by }))
    }

    /// Writes all stretches, which should not overlap. Does not return while a GPU still writes: with one that stands still,
    /// not at all.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) once the region's memory is its user's again, and the GPU's.
    pub fn fill(&self, stretches: &[Stretch]) -> Result<()> {
        let parts = self.parts(stretches)?;
        self.region.memory().while_it_stays(|| {
            match &self.by {
                By::Sim(sim) => sim.fill(parts)?,
                // SAFETY: inside of a region of this GPU, whose memory stays until this has returned.
                By::Cuda(cuda) => unsafe { cuda.fill_parts(&parts) }?,
            }
            Ok(())
        })
    }

    /// The first stretch with a byte that is not its pattern's, and the index of that byte in it. Waits for a GPU as
    /// [`fill`](RegionPattern::fill) does.
    pub fn first_difference(&self, stretches: &[Stretch]) -> Result<Option<(usize, u64)>> {
        let parts = self.parts(stretches)?;
        self.region.memory().while_it_stays(|| {
            Ok(match &self.by {
                By::Sim(sim) => sim.first_difference(parts)?,
                // SAFETY: as above.
                By::Cuda(cuda) => unsafe { cuda.first_difference_of_parts(&parts) }?,
            })
        })
    }

    fn parts(&self, stretches: &[Stretch]) -> Result<Vec<PatternParameters>> {
        let base = self.region.as_ptr() as u64;
        let part = |stretch: &Stretch| {
            let Stretch { pattern: WordPattern { key, step, flip }, from, offset, bytes } = *stretch;
            self.region.check("target", offset, bytes)?;
            Ok(PatternParameters { key, step, flip, offset: from, address: base + offset, bytes })
        };
        stretches.iter().map(part).collect()
    }
}

impl PatternParameters {
    pub(crate) fn pattern(&self) -> WordPattern {
        WordPattern { key: self.key, step: self.step, flip: self.flip }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::sim::SimGpu;
    use crate::{Endpoint, Error};

    const PATTERN: WordPattern =
        WordPattern { key: 0x1234_5678_9abc_def1, step: 0xd1b5_4a32_d192_ed03, flip: 0 };

    #[test]
    fn a_simulated_gpu_writes_and_finds_what_the_host_does() {
        let end = Endpoint::builder().build().unwrap();
        let region = end.register_sim(10, 200_000).unwrap();
        let gpu = RegionPattern::of(&region).unwrap().expect("GPU memory");
        let other = WordPattern { key: 7, flip: !0, ..PATTERN };
        let stretches = [
            Stretch { pattern: PATTERN, from: 5, offset: 3, bytes: 150_001 },
            Stretch { pattern: other, from: 1 << 40, offset: 150_004, bytes: 0 },
            Stretch { pattern: other, from: 1, offset: 150_004, bytes: 4_001 },
        ];
        gpu.fill(&stretches).unwrap();
        let mut bytes = vec![0; 200_000];
        region.read_at(0, &mut bytes).unwrap();
        for Stretch { pattern, from, offset, bytes: len } in stretches {
            let there = &bytes[offset as usize..][..len as usize];
            assert_eq!(pattern.first_difference(from, there), None);
        }
        assert!(bytes[..3].iter().chain(&bytes[154_005..]).all(|byte| *byte == 0), "nothing else is written");
        assert_eq!(gpu.first_difference(&stretches).unwrap(), None);
        for (wrong, found) in
            [(154_004, (2, 4_000)), (150_003, (0, 150_000)), (70_000, (0, 69_997)), (3, (0, 0))]
        {
            region.write_at(wrong, &[!bytes[wrong as usize]]).unwrap();
            assert_eq!(gpu.first_difference(&stretches).unwrap(), Some(found));
        }
    }

    #[test]
    fn nothing_outside_of_the_region_is_touched() {
        let end = Endpoint::builder().build().unwrap();
        let region = end.register_sim(10, 100).unwrap();
        let gpu = RegionPattern::of(&region).unwrap().expect("GPU memory");
        for (offset, bytes) in [(0, 101), (100, 1), (u64::MAX, 2)] {
            let outside = [Stretch { pattern: PATTERN, from: 0, offset, bytes }];
            assert!(gpu.fill(&outside).is_err() && gpu.first_difference(&outside).is_err(), "{offset}");
        }
        assert!(RegionPattern::of(&end.register_zeroed(100).unwrap()).unwrap().is_none());
    }

    /// It was written to, though it was its user's again.
    #[test]
    fn memory_that_was_deregistered_is_not_touched() {
        let end = Endpoint::builder().build().unwrap();
        let gpu = SimGpu::open(10).unwrap();
        let buffer = gpu.alloc(4096, 4096).unwrap();
        // SAFETY: the buffer outlives the region.
        let region = unsafe { end.register_raw(buffer.as_ptr(), buffer.len()) }.unwrap();
        let pattern = RegionPattern::of(&region).unwrap().expect("GPU memory");
        let all = [Stretch { pattern: PATTERN, from: 0, offset: 0, bytes: 4096 }];
        region.deregister().unwrap();
        assert!(matches!(pattern.fill(&all), Err(Error::Invalid { .. })));
        assert!(matches!(pattern.first_difference(&all), Err(Error::Invalid { .. })));
        assert_eq!(gpu.read_to_vec(buffer.address(), 4096).unwrap(), [0; 4096]);
    }
}
