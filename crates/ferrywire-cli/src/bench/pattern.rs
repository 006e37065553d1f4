//! The bytes that are sent, as a function of run seed, iteration and offset.
//!
//! The 8-byte word at index `w` of iteration `i` is made of `key(seed) + i * I + w * W`. Both steps are odd, so
//! neighbouring iterations and offsets differ already in the lowest byte: even a one-byte message distinguishes an old
//! iteration from a new one (256 in a row differ). The complement of a pattern differs from it in every byte and is
//! used to poison destinations. The two ends only have to agree on seed and iteration: each writes and compares in its
//! own memory, by the CPU or the GPU, see [`ferrywire_memory::pattern`].

use ferrywire_memory::pattern::WordPattern;

/// Distance of neighbouring iterations (odd).
const ITERATION_STEP: u64 = 0x9e37_79b9_7f4a_7c15;
/// Distance of neighbouring words (odd).
const WORD_STEP: u64 = 0xd1b5_4a32_d192_ed03;

/// The contents of one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pattern(WordPattern);

impl Pattern {
    /// The pattern of one iteration of a run.
    pub fn new(seed: u64, iteration: u64) -> Pattern {
        let key = mix(seed).wrapping_add(iteration.wrapping_mul(ITERATION_STEP));
        Pattern(WordPattern { key, step: WORD_STEP, flip: 0 })
    }

    /// The pattern that differs from this one in every byte.
    pub fn complement(self) -> Pattern {
        Pattern(WordPattern { flip: !self.0.flip, ..self.0 })
    }

    /// The pattern in the form in which GPUs write and compare it.
    pub fn words(self) -> WordPattern {
        self.0
    }

    /// The byte at `offset`.
    pub fn byte(self, offset: u64) -> u8 {
        self.0.byte(offset)
    }

    /// Writes the bytes from `offset` on.
    pub fn fill(self, offset: u64, into: &mut [u8]) {
        self.0.fill(offset, into);
    }

    /// The index in `found` of the first byte that differs from the pattern, which starts at `offset`.
    pub fn first_difference(self, offset: u64, found: &[u8]) -> Option<usize> {
        self.0.first_difference(offset, found)
    }
}

/// Mixes the bits of a seed (the finalizer of splitmix64).
pub fn mix(seed: u64) -> u64 {
    let a = (seed ^ (seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let b = (a ^ (a >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    b ^ (b >> 31)
}

/// The numbers `0..count` in an order that depends only on the seed.
pub fn shuffled(count: u64, seed: u64) -> Vec<u32> {
    let mut order: Vec<u32> = (0..count as u32).collect();
    for i in (1..order.len()).rev() {
        let j = mix(seed ^ mix(i as u64)) % (i as u64 + 1);
        order.swap(i, j as usize);
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(pattern: Pattern, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        pattern.fill(offset, &mut bytes);
        bytes
    }

    #[test]
    fn any_piece_equals_the_whole_there() {
        let pattern = Pattern::new(7, 3);
        let whole = bytes(pattern, 0, 3000);
        for (offset, len) in [(0, 0), (1, 1), (3, 4), (5, 700), (8, 8), (9, 1500), (511, 1026), (2999, 1)] {
            let piece = bytes(pattern, offset as u64, len);
            assert_eq!(piece, whole[offset..offset + len], "{offset} {len}");
            assert_eq!(pattern.first_difference(offset as u64, &piece), None);
        }
    }

    #[test]
    fn single_bytes_are_those_of_the_whole() {
        for pattern in [Pattern::new(7, 3), Pattern::new(8, 1 << 40).complement()] {
            for offset in [0, 1 << 33, u64::MAX - 5000].into_iter().flat_map(|first| first..first + 40) {
                assert_eq!(bytes(pattern, offset, 1), [pattern.byte(offset)], "{offset}");
            }
        }
    }

    #[test]
    fn a_wrong_byte_is_found_wherever_it_is() {
        let pattern = Pattern::new(1, 0);
        for offset in [0u64, 1, 7, 8] {
            for wrong in [0usize, 1, 7, 8, 511, 512, 513, 1000, 1028] {
                let mut found = bytes(pattern, offset, 1029);
                found[wrong] ^= 1;
                assert_eq!(pattern.first_difference(offset, &found), Some(wrong));
            }
        }
    }

    #[test]
    fn an_old_iteration_is_found_even_in_one_byte() {
        for seed in 0..50 {
            for age in 1..256 {
                let old = bytes(Pattern::new(seed, 1000 - age), 0, 1);
                assert_eq!(Pattern::new(seed, 1000).first_difference(0, &old), Some(0), "{seed} {age}");
            }
        }
    }

    #[test]
    fn shifted_data_is_found() {
        let pattern = Pattern::new(5, 9);
        for shift in [1u64, 2, 7, 8, 64, 4096, 1 << 20] {
            assert!(pattern.first_difference(0, &bytes(pattern, shift, 16)).is_some(), "{shift}");
        }
    }

    #[test]
    fn poison_differs_in_every_byte() {
        let pattern = Pattern::new(5, 9);
        let pairs = bytes(pattern, 0, 999).into_iter().zip(bytes(pattern.complement(), 0, 999));
        assert!(pairs.into_iter().all(|(a, b)| a != b));
    }

    #[test]
    fn shuffles_are_permutations_and_differ() {
        let (a, b) = (shuffled(1000, 1), shuffled(1000, 2));
        assert_ne!(a, b);
        for mut order in [a, b] {
            order.sort_unstable();
            assert!(order.into_iter().eq(0..1000));
        }
    }

    /// Prints the speed of filling and comparing: `cargo test --release -- --ignored --nocapture speed`.
    #[test]
    #[ignore = "prints a measurement"]
    fn speed() {
        let mut buffer = vec![0; 32 << 10];
        let pattern = Pattern::new(1, 1);
        let start = std::time::Instant::now();
        (0..100_000).for_each(|i| pattern.fill(i * 8, std::hint::black_box(&mut buffer)));
        let fill_s = start.elapsed().as_secs_f64();
        pattern.fill(0, &mut buffer);
        let start = std::time::Instant::now();
        (0..100_000)
            .for_each(|_| assert_eq!(pattern.first_difference(0, std::hint::black_box(&buffer)), None));
        let gigabytes = 100_000.0 * buffer.len() as f64 / 1e9;
        println!(
            "fill {:.1} GB/s, compare {:.1} GB/s",
            gigabytes / fill_s,
            gigabytes / start.elapsed().as_secs_f64()
        );
    }
}
