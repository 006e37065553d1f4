//! The simulator's only source of chance: SplitMix64.
//!
//! It lives here because the engine itself needs no randomness of this kind and `rand` is not a
//! dependency; the simulated GPU draws its faults from it too.
//! Invariant: the same seed and the same calls give the same numbers, on every machine.
//! Read next: `faults.rs`, which says how often chance strikes.

use std::time::Duration;

/// A seeded generator.
#[derive(Debug)]
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number in `0..end`; `end` must not be 0.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(end)) >> 64) as u64
    }

    /// A number in `0.0..1.0`.
    pub(crate) fn fraction(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// True with this probability. Draws nothing when it cannot happen.
    pub(crate) fn chance(&mut self, probability: f64) -> bool {
        probability > 0.0 && self.fraction() < probability
    }

    /// A length in `1..=max`; `max` must not be 0.
    pub(crate) fn prefix(&mut self, max: usize) -> usize {
        1 + self.below(max as u64) as usize
    }

    /// A time in `0..=max`. Draws nothing when `max` is zero.
    pub(crate) fn up_to(&mut self, max: Duration) -> Duration {
        if max.is_zero() {
            return max;
        }
        Duration::from_nanos(self.below(max.as_nanos() as u64 + 1))
    }
}
