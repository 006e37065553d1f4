//! Reads of the peer: so many are answered at once, and some more wait.
//!
//! A read is answered until the peer has acknowledged the answer, while the peer counts it only until the bytes are there.
//! A NIC that brings answers and takes no acknowledgements therefore leaves more here than the peer may ask for at once.
//! What is too many waits: it is not answered, so the peer counts it, and has no more than `READS_WAITING_MAX` of that
//! kind. Past that the peer asks for more than it may.
//!
//! Invariant: a request waits only while all places are taken, and a place that is given back goes to the one that has waited
//! longest. Read next: `frames.rs`, where requests arrive.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ferrywire_proto::limits::{INBOUND_READS_MAX, READS_WAITING_MAX};
use ferrywire_proto::wire::{Header, Refusal};

/// A request that waits. It names a region by its key only, so that nobody who takes memory back waits for it.
pub struct Request {
    pub header: Header,
    pub placements: Box<[u8]>,
}

#[derive(Default)]
struct Places {
    taken: usize,
    waiting: VecDeque<Request>,
}

/// The reads of one peer.
#[derive(Default)]
pub struct Serving(Mutex<Places>);

impl Serving {
    fn lock(&self) -> MutexGuard<'_, Places> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a place for a request, which is answered at once then; false if the request waits.
    ///
    /// # Errors
    /// [`Refusal::Limit`] when too many wait.
    pub fn admit(&self, header: &Header, placements: &[u8]) -> Result<bool, Refusal> {
        let mut places = self.lock();
        if places.taken < INBOUND_READS_MAX {
            places.taken += 1;
            return Ok(true);
        }
        if places.waiting.len() >= READS_WAITING_MAX {
            return Err(Refusal::Limit);
        }
        places.waiting.push_back(Request { header: *header, placements: placements.into() });
        Ok(false)
    }

    /// An answer has ended: the request that has its place now, if one waits.
    pub fn next(&self) -> Option<Request> {
        let mut places = self.lock();
        let request = places.waiting.pop_front();
        places.taken -= usize::from(request.is_none());
        request
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrywire_proto::wire::Kind;

    /// A peer that asks for ever is refused, and what is answered at once stays bounded.
    #[test]
    fn requests_wait_in_their_order_and_not_without_end() {
        let serving = Serving::default();
        let ask = |number| serving.admit(&Header { transfer: number, ..Header::new(Kind::Read) }, &[7]);
        let (served, all) = (INBOUND_READS_MAX as u64, (INBOUND_READS_MAX + READS_WAITING_MAX) as u64);
        assert!((0..served).all(|number| ask(number) == Ok(true)));
        assert!((served..all).all(|number| ask(number) == Ok(false)));
        assert_eq!(ask(all), Err(Refusal::Limit));
        for number in served..all {
            let request = serving.next().expect("one waits");
            assert_eq!((request.header.transfer, &*request.placements), (number, &[7][..]));
        }
        assert_eq!(ask(all), Ok(false), "all places are taken");
        assert_eq!(serving.next().map(|request| request.header.transfer), Some(all));
        assert!((0..served).all(|_| serving.next().is_none()));
        assert!((0..served).all(|number| ask(number) == Ok(true)));
    }
}
