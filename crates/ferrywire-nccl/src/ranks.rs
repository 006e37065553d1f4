//! How many ranks of a communicator this process has: one, or one per GPU if a single process drives them all, as JAX
//! does.
//!
//! From v11 on, NCCL names the communicator of each rank. With older versions every process counts as one rank.
//! Invariant: [`most`] never decreases, because threads made for many ranks stay.

use std::collections::BTreeMap;
use std::sync::Mutex;

use crate::comm::locked;

static RANKS: Mutex<Ranks> = Mutex::new(Ranks { of_comms: BTreeMap::new(), most: 1 });

struct Ranks {
    /// The number of local ranks of each communicator, by NCCL's id.
    of_comms: BTreeMap<u64, usize>,
    most: usize,
}

/// Counts a rank of the communicator `comm` in this process.
pub fn begin(comm: u64) {
    locked(&RANKS).begin(comm);
}

/// Notes that a rank of this communicator has ended. Returns whether it was the last of this process.
pub fn end(comm: u64) -> bool {
    locked(&RANKS).end(comm)
}

/// The largest number of ranks that this process ever had in one communicator.
pub fn most() -> usize {
    locked(&RANKS).most
}

impl Ranks {
    fn begin(&mut self, comm: u64) {
        let ranks = self.of_comms.entry(comm).or_insert(0);
        *ranks += 1;
        self.most = self.most.max(*ranks);
    }

    fn end(&mut self, comm: u64) -> bool {
        let Some(ranks) = self.of_comms.get_mut(&comm) else { return false };
        *ranks -= 1;
        let is_last = *ranks == 0;
        if is_last {
            self.of_comms.remove(&comm);
        }
        is_last
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
            assert_eq!((ranks.end(comm), ranks.end(comm)), (true, false));
            ranks.begin(7);
            assert!(ranks.end(7));
        }
        assert_eq!((ranks.most, ranks.of_comms.len()), (1, 0));
        (0..4).for_each(|_| ranks.begin(7));
        ranks.begin(8);
        assert_eq!([(); 4].map(|()| ranks.end(7)), [false, false, false, true]);
        assert_eq!((ranks.most, ranks.of_comms.len()), (4, 1));
    }
}
