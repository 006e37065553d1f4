//! The pairs of ranks that move data: the first half to the second.
//!
//! Invariant: pure; every rank computes the same pairs from world size and pattern.

use crate::args::Pattern;

/// The pairs of ranks, those of rank 0 first.
pub fn pairs(pattern: Pattern, world_size: u32) -> Vec<(u32, u32)> {
    let half = world_size / 2;
    match pattern {
        Pattern::AllToAll => {
            (0..half).flat_map(|from| (half..world_size).map(move |to| (from, to))).collect()
        }
        Pattern::Incast => (0..half).map(|from| (from, half)).collect(),
        _ => (0..half).map(|from| (from, from + half)).collect(),
    }
}

/// The indices of the pairs in which a rank connects.
pub fn from(pairs: &[(u32, u32)], rank: u32) -> Vec<usize> {
    (0..pairs.len()).filter(|at| pairs[*at].0 == rank).collect()
}

/// The ranks that connect to a serving rank; the index of each is its member number there.
pub fn members(pairs: &[(u32, u32)], serving: u32) -> Vec<u32> {
    pairs.iter().filter(|(_, to)| *to == serving).map(|(from, _)| *from).collect()
}

/// The number of serving ranks.
pub fn serving(pairs: &[(u32, u32)]) -> usize {
    let mut ranks: Vec<u32> = pairs.iter().map(|(_, to)| *to).collect();
    ranks.sort_unstable();
    ranks.dedup();
    ranks.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_join_the_halves() {
        assert_eq!(pairs(Pattern::Unidir, 4), [(0, 2), (1, 3)]);
        assert_eq!(pairs(Pattern::Latency, 2), [(0, 1)]);
        assert_eq!(pairs(Pattern::Incast, 6), [(0, 3), (1, 3), (2, 3)]);
        assert_eq!(pairs(Pattern::AllToAll, 4), [(0, 2), (0, 3), (1, 2), (1, 3)]);
    }

    #[test]
    fn every_rank_finds_its_own() {
        let mesh = pairs(Pattern::AllToAll, 6);
        assert_eq!((from(&mesh, 1), members(&mesh, 4), serving(&mesh)), (vec![3, 4, 5], vec![0, 1, 2], 3));
        let incast = pairs(Pattern::Incast, 6);
        assert_eq!((from(&incast, 2), members(&incast, 3), serving(&incast)), (vec![2], vec![0, 1, 2], 1));
        assert!(members(&incast, 4).is_empty());
    }
}
