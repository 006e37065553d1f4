//! Patterns in regions of a GPU's memory: many stretches at once, short and long.

use crate::{gpu, is_real};
use ferrywire::region::pattern::RegionPattern;
use ferrywire::{Endpoint, RegisterError};
use ferrywire_memory::cuda::CudaError;
use ferrywire_memory::pattern::{Stretch, WordPattern};

const SHORT: u64 = 4097;
/// More than one block of threads writes.
const LONG: u64 = (256 << 10) + 5;

fn pattern(number: u64) -> WordPattern {
    WordPattern {
        key: number.wrapping_mul(0x9e37_79b9_7f4a_7c15),
        step: 0xd1b5_4a32_d192_ed03,
        flip: if number.is_multiple_of(3) { !0 } else { 0 },
    }
}

/// Stretches of every alignment with a byte between them, every 50th a long one, one of each size empty.
fn stretches(count: u64) -> (Vec<Stretch>, u64) {
    let mut offset = 1;
    let stretch = |number| {
        let bytes = match number % 50 {
            7 => 0,
            11 => LONG + number % 16,
            _ => 1 + (number * 37) % SHORT,
        };
        let stretch = Stretch { pattern: pattern(number), from: number * 1001, offset, bytes };
        offset += bytes + 1;
        stretch
    };
    let all = (0..count).map(stretch).collect();
    (all, offset)
}

#[test]
fn many_stretches_are_written_and_compared_at_once() {
    let Some(gpu) = gpu() else { return };
    let end = Endpoint::builder().build().unwrap();
    let (all, bytes) = stretches(if is_real(&gpu) { 5_000 } else { 300 });
    let region = end.alloc_cuda(0, bytes as usize).unwrap();
    let patterns = match RegionPattern::of(&region) {
        Ok(patterns) => patterns.expect("memory of a GPU"),
        // The stand-in that runs no kernels.
        Err(RegisterError::Cuda(CudaError::Call { .. })) => {
            return println!("SKIPPED: needs a CUDA device that runs kernels");
        }
        Err(error) => panic!("{error}"),
    };
    patterns.fill(&all).unwrap();
    let mut found = vec![0; bytes as usize];
    region.read_at(0, &mut found).unwrap();
    for Stretch { pattern, from, offset, bytes } in &all {
        let there = &found[*offset as usize..][..*bytes as usize];
        assert_eq!(pattern.first_difference(*from, there), None, "{offset}");
        assert_eq!(found[*offset as usize - 1], 0, "nothing before {offset} is written");
    }
    assert_eq!(patterns.first_difference(&all).unwrap(), None);
    // From the last stretch to the first, so that each is found before the others.
    for number in [all.len() - 1, 261, 212, 211, 62, 61, 60, 11, 3, 0] {
        let Stretch { offset, bytes, .. } = all[number];
        for index in [bytes - 1, bytes / 2, 0] {
            region.write_at(offset + index, &[!found[(offset + index) as usize]]).unwrap();
            assert_eq!(patterns.first_difference(&all).unwrap(), Some((number, index)));
        }
    }
    assert!(patterns.fill(&[Stretch { offset: bytes - 1, bytes: 2, ..all[0] }]).is_err());
    assert_eq!(patterns.first_difference(&[]).unwrap(), None);
}
