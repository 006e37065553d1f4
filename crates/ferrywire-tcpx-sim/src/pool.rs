//! The pages of a receive pool, and how received bytes are scattered over them.
//!
//! A page belongs to the comm that took it until the comm gives it back or is closed. A page that is not recorded stays
//! taken: the pool can leak, as the real one does.
//! Invariant: the code is pure: page numbers and lengths, no memory. A page has one owner or is free, and is
//! handed out only when free.
//! Read next: `gpu.rs`, which gives the pages memory.

use std::collections::VecDeque;

use crate::random::Random;

/// Bytes of a page of the pool.
pub const PAGE_BYTES: usize = 4096;
/// The owner of free pages; no comm has this number.
const NOBODY: u64 = 0;

/// A piece of a page that holds received bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fragment {
    /// The page's index in the pool.
    pub page: u32,
    /// Offset of the bytes in the page.
    pub offset: u32,
    /// Number of bytes of the fragment.
    pub len: u32,
}

impl Fragment {
    /// Offset of the bytes in the pool.
    pub fn pool_offset(&self) -> u32 {
        self.page * PAGE_BYTES as u32 + self.offset
    }
}

/// The free and the taken pages of a receive pool.
#[derive(Debug)]
pub struct PagePool {
    free: VecDeque<u32>,
    owners: Vec<u64>,
}

impl PagePool {
    /// Makes a pool of free pages, in an order given by the seed or in ascending order.
    pub fn new(pages: u32, shuffled: Option<Random>) -> PagePool {
        let mut free: Vec<u32> = (0..pages).collect();
        if let Some(mut random) = shuffled {
            for k in (1..free.len()).rev() {
                free.swap(k, random.below(k as u64 + 1) as usize);
            }
        }
        PagePool { free: free.into(), owners: vec![NOBODY; pages as usize] }
    }

    /// Takes a free page for a comm; `None` if none is free.
    pub fn take(&mut self, owner: u64) -> Option<u32> {
        let page = self.free.pop_front()?;
        self.owners[page as usize] = owner;
        Some(page)
    }

    /// Returns a page that was just taken and not needed; it is the next one to be taken.
    pub fn put_back(&mut self, page: u32) {
        self.owners[page as usize] = NOBODY;
        self.free.push_front(page);
    }

    /// Gives a page back to the pool; returns false if the comm does not own it.
    pub fn give_back(&mut self, owner: u64, page: u32) -> bool {
        let Some(holder) = self.owners.get_mut(page as usize).filter(|holder| **holder == owner) else {
            return false;
        };
        *holder = NOBODY;
        self.free.push_back(page);
        true
    }

    /// All pages that the comm still owns: closing its sockets gives them back.
    pub fn owned_by(&self, owner: u64) -> Vec<u32> {
        let pages = 0..self.owners.len() as u32;
        pages.filter(|page| self.owners[*page as usize] == owner).collect()
    }

    /// Number of free pages in the pool.
    #[cfg(test)]
    pub fn free_count(&self) -> usize {
        self.free.len()
    }
}

/// Decides where in a page the next bytes are placed, by seed and position in the stream, so that a call that
/// received nothing changes nothing.
#[derive(Debug)]
pub struct Carver {
    seed: u64,
    scatter: bool,
    fragment_bytes: u32,
}

/// Number of fragments of which one is odd, on average.
const ODD_ONE_IN: u64 = 8;

impl Carver {
    /// Makes fragments of at most `fragment_bytes`; with `scatter` some of them are odd.
    pub fn new(seed: u64, scatter: bool, fragment_bytes: u32) -> Carver {
        Carver { seed, scatter, fragment_bytes: fragment_bytes.clamp(1, PAGE_BYTES as u32) }
    }

    /// The place in a page for at most `wanted` bytes, the first of which is at `position` of the stream.
    pub fn carve(&self, page: u32, wanted: usize, position: u64) -> Fragment {
        let most = self.fragment_bytes.min(u32::try_from(wanted).unwrap_or(u32::MAX));
        let mut random = Random::new(self.seed, position);
        if !self.scatter || !random.one_in(ODD_ONE_IN) {
            return Fragment { page, offset: 0, len: most };
        }
        let offset = random.below(PAGE_BYTES as u64) as u32;
        let room = most.min(PAGE_BYTES as u32 - offset).max(1);
        Fragment { page, offset, len: 1 + random.below(u64::from(room)) as u32 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_one_owner_at_a_time() {
        let mut pool = PagePool::new(2, None);
        assert_eq!((pool.take(7), pool.take(8), pool.take(7)), (Some(0), Some(1), None));
        assert!(!pool.give_back(8, 0), "another's page");
        assert!(pool.give_back(7, 0));
        assert!(!pool.give_back(7, 0), "twice");
        assert!(!pool.give_back(7, 99), "no such page");
        assert_eq!(pool.take(9), Some(0));
    }

    #[test]
    fn pages_not_needed_come_first_and_returned_ones_last() {
        let mut pool = PagePool::new(3, None);
        let page = pool.take(1).unwrap();
        pool.put_back(page);
        assert_eq!(pool.take(1), Some(page));
        pool.give_back(1, page);
        assert_eq!(pool.take(1), Some(1));
    }

    #[test]
    fn a_closed_comm_has_no_pages() {
        let mut pool = PagePool::new(8, Some(Random::new(5, 0)));
        let taken: Vec<u32> = (0..3).filter_map(|_| pool.take(4)).collect();
        pool.take(5);
        let mut owned = pool.owned_by(4);
        owned.iter().for_each(|page| assert!(pool.give_back(4, *page)));
        owned.sort_unstable();
        let mut expected = taken;
        expected.sort_unstable();
        assert_eq!(owned, expected);
        assert_eq!(pool.free_count(), 7);
    }

    #[test]
    fn fragments_stay_in_their_page_and_some_are_odd() {
        let carver = Carver::new(3, true, 4096);
        let fragments: Vec<Fragment> = (0..2000).map(|k| carver.carve(k, 9000, k.into())).collect();
        assert!(fragments.iter().all(|f| f.len >= 1 && f.offset + f.len <= 4096));
        let odd = fragments.iter().filter(|f| f.offset % 2 == 1).count();
        assert!((20..500).contains(&odd), "{odd} odd ones");
        let plain = Carver::new(3, false, 1448);
        assert!((0..100).all(|page| plain.carve(page, 5000, 0) == Fragment { page, offset: 0, len: 1448 }));
        assert_eq!(plain.carve(0, 10, 0).len, 10);
    }
}
