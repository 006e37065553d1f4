//! Test patterns that are written and checked where the region's memory is: GPU memory by its GPU.
//!
//! Benchmarks and tests use this so as not to measure copies to the host.
//! Invariant: all bytes written or read lie inside the region; this is checked first.
//! Read next: `pattern.rs` of `ferrywire-memory`.

use super::Region;
use crate::error::{RegisterError, Result};
use ferrywire_memory::cuda::CudaPattern;
use ferrywire_memory::pattern::{Stretch, WordPattern};
use ferrywire_memory::sim::SimPattern;
use ferrywire_memory::unpack::PatternParameters;
use ferrywire_memory::{Gpu, MemoryLocation};

/// Writes and checks patterns in a region of GPU memory, on its GPU. Each call waits until the GPU is done.
/// The call costs one launch for all short ranges, and one for each long one.
///
/// Bytes that peers write at the same time may be overwritten, or be read torn.
pub struct RegionPattern {
    region: Region,
    by: By,
}

enum By {
    Sim(SimPattern),
    Cuda(Box<CudaPattern>),
}

impl RegionPattern {
    /// Creates a pattern writer for a region of GPU memory; `None` for host memory, which the caller can
    /// access directly.
    ///
    /// # Errors
    /// [`RegisterError::Cuda`] or [`RegisterError::SimGpu`].
    pub fn of(region: &Region) -> Result<Option<RegionPattern>, RegisterError> {
        if region.location() == MemoryLocation::Host {
            return Ok(None);
        }
        let by = match Gpu::opened(region.location())? {
            Gpu::Sim(gpu) => By::Sim(gpu.pattern()),
            Gpu::Cuda(gpu) => By::Cuda(Box::new(CudaPattern::new(&gpu)?)),
        };
        Ok(Some(RegionPattern { region: region.clone(), by }))
    }

    /// Writes all ranges, which should not overlap. Blocks until the GPU is done, without a timeout.
    ///
    /// # Errors
    /// [`RegisterError::Invalid`] if the region is deregistered; the GPU's error.
    pub fn fill(&self, stretches: &[Stretch]) -> Result<(), RegisterError> {
        let parts = self.parts(stretches)?;
        let done = self.region.memory().while_it_stays(|| {
            match &self.by {
                By::Sim(sim) => sim.fill(parts)?,
                // SAFETY: the parts lie inside a region of this GPU, whose memory stays until the call has
                // returned.
                By::Cuda(cuda) => unsafe { cuda.fill_parts(&parts) }?,
            }
            Ok(())
        });
        Ok(done?)
    }

    /// The index of the first range with a byte that differs from its pattern, and the index of that byte
    /// in the range. Blocks until the GPU is done, without a timeout.
    ///
    /// # Errors
    /// As for [`fill`](RegionPattern::fill).
    pub fn first_difference(&self, stretches: &[Stretch]) -> Result<Option<(usize, u64)>, RegisterError> {
        let parts = self.parts(stretches)?;
        let done = self.region.memory().while_it_stays(|| {
            Ok(match &self.by {
                By::Sim(sim) => sim.first_difference(parts)?,
                // SAFETY: the parts lie inside a region of this GPU, whose memory stays until the call has
                // returned.
                By::Cuda(cuda) => unsafe { cuda.first_difference_of_parts(&parts) }?,
            })
        });
        Ok(done?)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Endpoint;
    use ferrywire_memory::sim::SimGpu;

    const PATTERN: WordPattern =
        WordPattern { key: 0x1234_5678_9abc_def1, step: 0xd1b5_4a32_d192_ed03, flip: 0 };

    #[test]
    fn a_simulated_gpu_writes_and_finds_what_the_host_does() {
        let end = Endpoint::builder().build().unwrap();
        let region = end.alloc_sim(10, 200_000).unwrap();
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
        let region = end.alloc_sim(10, 100).unwrap();
        let gpu = RegionPattern::of(&region).unwrap().expect("GPU memory");
        for (offset, bytes) in [(0, 101), (100, 1), (u64::MAX, 2)] {
            let outside = [Stretch { pattern: PATTERN, from: 0, offset, bytes }];
            assert!(gpu.fill(&outside).is_err() && gpu.first_difference(&outside).is_err(), "{offset}");
        }
        assert!(RegionPattern::of(&end.alloc_host(100).unwrap()).unwrap().is_none());
    }

    /// Regression: the pattern was written to memory that had been deregistered.
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
        assert!(matches!(pattern.fill(&all), Err(RegisterError::Invalid { .. })));
        assert!(matches!(pattern.first_difference(&all), Err(RegisterError::Invalid { .. })));
        assert_eq!(gpu.read_to_vec(buffer.address(), 4096).unwrap(), [0; 4096]);
    }
}
