//! Random draws for a pair, from the generator that all simulations use.
//!
//! Invariant: a seed and a sequence of calls give identical numbers.
//! Read next: `plan.rs`, which draws.

pub(super) use ferrywire_sys::rng::Rng;

pub(super) trait Draw {
    /// A random number in `least..=most`.
    fn between(&mut self, least: u64, most: u64) -> u64;

    /// True in `chance` of a hundred cases.
    fn percent(&mut self, chance: u64) -> bool;
}

impl Draw for Rng {
    fn between(&mut self, least: u64, most: u64) -> u64 {
        least + self.below(most - least + 1)
    }

    fn percent(&mut self, chance: u64) -> bool {
        self.below(100) < chance
    }
}
