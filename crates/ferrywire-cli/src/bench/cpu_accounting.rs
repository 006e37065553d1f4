//! Which reports are from one process, and the CPU seconds of processes: the pairs of a process share its CPU seconds,
//! which count once.
//!
//! Read next: [`super::result`], which divides them by the bytes moved.

use std::collections::BTreeMap;
use std::ops::Range;

use super::protocol::SideReport;
use super::result::RankPair;

/// The processes of one end, by pair.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Processes(Vec<u32>);

/// The processes of both ends of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BothEnds {
    /// The connecting processes.
    pub near: Processes,
    /// The serving processes.
    pub far: Processes,
}

impl BothEnds {
    /// The processes of a run: of several ranks, or one serving process with as many connecting processes as pairs, or
    /// with one if `multi_gpu`.
    pub fn of(ranks: &[RankPair], multi_gpu: bool, pairs: usize) -> BothEnds {
        let one = || Processes(vec![0; pairs]);
        match (ranks, multi_gpu) {
            ([], true) => BothEnds { near: one(), far: one() },
            ([], false) => BothEnds { near: Processes((0..pairs as u32).collect()), far: one() },
            (ranks, _) => BothEnds {
                near: Processes(ranks.iter().map(|pair| pair.ranks.0).collect()),
                far: Processes(ranks.iter().map(|pair| pair.ranks.1).collect()),
            },
        }
    }
}

impl Processes {
    /// CPU seconds of the processes that take part in some pairs, from the reports on all pairs.
    pub fn cpu_s(&self, sides: &[SideReport], pairs: impl Iterator<Item = usize>) -> f64 {
        let mut seconds: BTreeMap<u32, f64> = pairs.filter_map(|at| Some((*self.0.get(at)?, 0.0))).collect();
        for (process, side) in self.0.iter().zip(sides) {
            if let Some(spent) = seconds.get_mut(process) {
                *spent = spent.max(side.cpu_s);
            }
        }
        seconds.values().sum()
    }

    /// CPU seconds of the processes that take part in some pairs, per 1e9 bytes that these processes moved; `None` if
    /// they moved nothing.
    pub fn cpu_s_per_gb(&self, sides: &[SideReport], bytes: &[u64], pairs: Range<usize>) -> Option<f64> {
        let theirs = |at: usize| self.0.get(pairs.clone()).unwrap_or_default().contains(&self.0[at]);
        let moved: u64 =
            (0..bytes.len().min(self.0.len())).filter(|at| theirs(*at)).map(|at| bytes[at]).sum();
        (moved > 0).then(|| self.cpu_s(sides, pairs) / (moved as f64 / 1e9))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sides(cpu_s: &[f64]) -> Vec<SideReport> {
        cpu_s.iter().map(|cpu_s| SideReport { cpu_s: *cpu_s, ..SideReport::default() }).collect()
    }

    #[test]
    fn a_process_counts_once_and_carries_all_its_pairs() {
        let multi_gpu = BothEnds::of(&[], true, 2);
        let seconds = sides(&[4.0, 4.0]);
        assert_eq!(multi_gpu.near.cpu_s(&seconds, 0..2), 4.0);
        assert_eq!(multi_gpu.near.cpu_s_per_gb(&seconds, &[1_000_000_000, 3_000_000_000], 0..1), Some(1.0));
        let several = BothEnds::of(&[], false, 2);
        assert_eq!(several.near.cpu_s(&seconds, 0..2), 8.0);
        assert_eq!(several.near.cpu_s_per_gb(&seconds, &[1_000_000_000, 0], 0..1), Some(4.0));
        assert_eq!(several.near.cpu_s_per_gb(&seconds, &[1_000_000_000, 0], 1..2), None);
    }

    #[test]
    fn ranks_of_a_mesh_have_several_pairs_each() {
        let pair = |from, to| RankPair { ranks: (from, to), hosts: Default::default() };
        let mesh = BothEnds::of(&[pair(0, 2), pair(0, 3), pair(1, 2), pair(1, 3)], false, 4);
        let seconds = sides(&[1.0, 1.0, 2.0, 2.0]);
        let gigabytes = [1_000_000_000; 4];
        assert_eq!(mesh.near.cpu_s(&seconds, 0..4), 3.0);
        assert_eq!(mesh.near.cpu_s_per_gb(&seconds, &gigabytes, 2..3), Some(1.0));
        assert_eq!(mesh.far.cpu_s(&sides(&[5.0, 7.0, 5.0, 7.0]), [1, 3].into_iter()), 7.0);
    }
}
