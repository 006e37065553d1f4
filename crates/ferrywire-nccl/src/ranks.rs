//! How many ranks of a communicator this process has: one, or as many as it has GPUs, if one process drives them all, as JAX does.
//!
//! From v11 on NCCL says with each rank which communicator it belongs to. With older versions every process counts as one rank.
//! Invariant: [`most`] never sinks: what is made for many ranks stays.

use std::collections::BTreeMap;
use std::sync::Mutex;

use crate::comm::locked;

static RANKS: Mutex<Ranks> = Mutex::new(Ranks { of_comms: BTreeMap::new(), most: 1 });

struct Ranks {
    /// Of each communicator that there is, by what NCCL calls it.
    of_comms: BTreeMap<u64, usize>,
    most: usize,
}

/// A rank of this communicator begins.
pub fn begin(comm: u64) {
    locked(&RANKS).begin(comm);
}

/// It has ended.
pub fn end(comm: u64) {
    locked(&RANKS).end(comm);
}

/// Most ranks that this process ever had in one communicator.
pub fn most() -> usize {
    locked(&RANKS).most
}

impl Ranks {
    fn begin(&mut self, comm: u64) {
        let ranks = self.of_comms.entry(comm).or_insert(0);
        *ranks += 1;
        self.most = self.most.max(*ranks);
    }

    fn end(&mut self, comm: u64) {
        if let Some(ranks) = self.of_comms.get_mut(&comm) {
            *ranks -= 1;
            if *ranks == 0 {
                self.of_comms.remove(&comm);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn communicators_one_after_another_are_not_ranks_of_one() {
        let mut ranks = Ranks { of_comms: BTreeMap::new(), most: 1 };
        for comm in 0..1000 {
            ranks.begin(comm);
            ranks.end(comm);
            ranks.end(comm);
            ranks.begin(7);
            ranks.end(7);
        }
        assert_eq!((ranks.most, ranks.of_comms.len()), (1, 0));
        (0..4).for_each(|_| ranks.begin(7));
        ranks.begin(8);
        (0..4).for_each(|_| ranks.end(7));
        assert_eq!((ranks.most, ranks.of_comms.len()), (4, 1));
    }
}
