//! What a pair draws from the generator of everything that is simulated.
//!
//! Invariant: the same seed and the same calls give the same numbers. Read next: `plan.rs`, which draws.

pub(super) use ferrywire_sys::rng::Rng;

pub(super) trait Draw {
    /// A number in `least..=most`.
    fn between(&mut self, least: u64, most: u64) -> u64;

    /// True so many times in a hundred.
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
