//! Reads by the peer: a bounded number is answered at once, and a bounded number waits.
//!
//! An answer ends here when the peer has acknowledged it. The peer counts its read only until the bytes have
//! arrived. A NIC that delivers answers and no acknowledgements therefore leaves more reads here than the
//! peer may have outstanding. The excess waits: an unanswered read counts at the peer, so an honest peer has
//! at most `READS_WAITING_MAX` of them waiting. Requests beyond that are refused.
//!
//! Invariant: a request waits only while all slots are taken, and a freed slot goes to the oldest request.
//! Read next: `replies.rs`, which makes the answers.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ferrywire_proto::limits::{INBOUND_READS_MAX, READS_WAITING_MAX};
use ferrywire_proto::wire::{Header, Refusal};

/// A read request that waits. It names its region only by key, so a waiting request does not keep memory in
/// use.
pub struct Request {
    pub header: Header,
    pub placements: Box<[u8]>,
}

#[derive(Default)]
struct Slots {
    taken: usize,
    waiting: VecDeque<Request>,
}

/// The reads by one peer that are being answered, or wait for that.
#[derive(Default)]
pub struct Serving(Mutex<Slots>);

impl Serving {
    fn lock(&self) -> MutexGuard<'_, Slots> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a slot for a request, which is then answered at once. Returns false if the request has to wait.
    ///
    /// # Errors
    /// [`Refusal::Limit`] when `READS_WAITING_MAX` requests wait.
    pub fn admit(&self, header: &Header, placements: &[u8]) -> Result<bool, Refusal> {
        let mut slots = self.lock();
        if slots.taken < INBOUND_READS_MAX {
            slots.taken += 1;
            return Ok(true);
        }
        if slots.waiting.len() >= READS_WAITING_MAX {
            return Err(Refusal::Limit);
        }
        slots.waiting.push_back(Request { header: *header, placements: placements.into() });
        Ok(false)
    }

    /// Frees the slot of an ended answer, or passes it on to the oldest waiting request, which is returned.
    pub fn next(&self) -> Option<Request> {
        let mut slots = self.lock();
        let request = slots.waiting.pop_front();
        slots.taken -= usize::from(request.is_none());
        request
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrywire_proto::wire::Kind;

    /// A peer that posts reads without end is refused, and the number answered at once stays bounded.
    #[test]
    fn requests_wait_in_their_order_and_not_without_end() {
        let serving = Serving::default();
        let ask = |number| serving.admit(&Header { transfer: number, ..Header::new(Kind::Read) }, &[7]);
        let (served, all) = (INBOUND_READS_MAX as u64, (INBOUND_READS_MAX + READS_WAITING_MAX) as u64);
        assert!((0..served).all(|number| ask(number) == Ok(true)));
        assert!((served..all).all(|number| ask(number) == Ok(false)));
        assert_eq!(ask(all), Err(Refusal::Limit));
        for number in served..all {
            let request = serving.next().expect("a request waits");
            assert_eq!((request.header.transfer, &*request.placements), (number, &[7][..]));
        }
        assert_eq!(ask(all), Ok(false), "all slots are taken");
        assert_eq!(serving.next().map(|request| request.header.transfer), Some(all));
        assert!((0..served).all(|_| serving.next().is_none()));
        assert!((0..served).all(|number| ask(number) == Ok(true)));
    }
}
