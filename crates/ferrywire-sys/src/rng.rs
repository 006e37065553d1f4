//! A seeded random number generator (SplitMix64), the only source of randomness in simulations.
//!
//! Invariant: a seed and a sequence of calls give identical numbers on every machine. Never use it for keys;
//! `random.rs` provides those.

use std::time::Duration;

/// A random number generator, whose whole state is one number.
#[derive(Debug)]
pub struct Rng(u64);

impl Rng {
    /// A random number generator that starts from `seed`.
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    /// A random number from the whole range of `u64`.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A random number in `0..end`; `end` must not be 0.
    pub fn below(&mut self, end: u64) -> u64 {
        ((u128::from(self.number()) * u128::from(end)) >> 64) as u64
    }

    /// A random number in `0.0..1.0`.
    pub fn fraction(&mut self) -> f64 {
        (self.number() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// True with this probability. A probability of zero draws no number.
    pub fn chance(&mut self, probability: f64) -> bool {
        probability > 0.0 && self.fraction() < probability
    }

    /// A random length in `1..=max`; `max` must not be 0.
    pub fn prefix(&mut self, max: usize) -> usize {
        1 + self.below(max as u64) as usize
    }

    /// A random duration in `0..=max`. A `max` of zero draws no number.
    pub fn up_to(&mut self, max: Duration) -> Duration {
        if max.is_zero() {
            return max;
        }
        Duration::from_nanos(self.below(max.as_nanos() as u64 + 1))
    }
}
