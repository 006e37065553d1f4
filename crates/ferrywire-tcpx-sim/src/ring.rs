//! The request ring of a comm: ascending numbers over a fixed number of slots.
//!
//! A request's life: FREE -> POSTED -> ACTIVE -> TRANSMITTING -> INACTIVE -> FREE, oldest first at each step.
//! Invariant: the code is pure: no socket, no memory. `released <= finished <= transmitted <= admitted <=
//! posted <= released + slots`.
//! Read next: `progress.rs`, which moves requests from state to state.

/// Number of a request, from 0, over the life of its comm.
pub type Number = u64;

/// The ring of a comm: for each state the number of the first request that has not reached it.
#[derive(Debug)]
pub struct Ring {
    slots: u64,
    released: Number,
    finished: Number,
    transmitted: Number,
    admitted: Number,
    posted: Number,
}

impl Ring {
    /// A ring whose slots are all free.
    pub fn new(slots: u64) -> Ring {
        Ring { slots, released: 0, finished: 0, transmitted: 0, admitted: 0, posted: 0 }
    }

    /// Moves a request from FREE to POSTED; returns its number, or `None` when no slot is free.
    pub fn post(&mut self) -> Option<Number> {
        let number = self.posted;
        (number - self.released < self.slots).then(|| {
            self.posted += 1;
            number
        })
    }

    /// Number of requests posted so far.
    pub fn posted_count(&self) -> u64 {
        self.posted
    }

    /// Number of requests finished so far.
    pub fn finished_count(&self) -> u64 {
        self.finished
    }

    /// Number of the oldest POSTED request.
    pub fn oldest_posted(&self) -> Option<Number> {
        (self.admitted < self.posted).then_some(self.admitted)
    }

    /// Moves the oldest POSTED request to ACTIVE.
    pub fn admit(&mut self) {
        debug_assert!(self.admitted < self.posted);
        self.admitted += 1;
    }

    /// Number of the oldest ACTIVE request.
    pub fn oldest_active(&self) -> Option<Number> {
        (self.transmitted < self.admitted).then_some(self.transmitted)
    }

    /// Moves the oldest ACTIVE request to TRANSMITTING.
    pub fn transmit(&mut self) {
        debug_assert!(self.transmitted < self.admitted);
        self.transmitted += 1;
    }

    /// Number of the oldest TRANSMITTING request: the only one that `test` may be called for.
    pub fn head(&self) -> Option<Number> {
        (self.finished < self.transmitted).then_some(self.finished)
    }

    /// Whether a request is TRANSMITTING.
    pub fn is_transmitting(&self, number: Number) -> bool {
        (self.finished..self.transmitted).contains(&number)
    }

    /// Moves the oldest TRANSMITTING request to INACTIVE.
    pub fn finish(&mut self) {
        debug_assert!(self.finished < self.transmitted);
        self.finished += 1;
    }

    /// Number of the oldest INACTIVE request.
    pub fn oldest_finished(&self) -> Option<Number> {
        (self.released < self.finished).then_some(self.released)
    }

    /// Moves the oldest INACTIVE request to FREE.
    pub fn release(&mut self) {
        debug_assert!(self.released < self.finished);
        self.released += 1;
    }

    /// The number of the request that has, or last had, the slot.
    pub fn number_at(&self, slot: u64) -> Option<Number> {
        let turn = self.posted.checked_sub(slot + 1)? / self.slots;
        Some(turn * self.slots + slot)
    }

    /// Index of a request's slot.
    pub fn slot_of(&self, number: Number) -> usize {
        (number % self.slots) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn advance(ring: &mut Ring) {
        ring.admit();
        ring.transmit();
        ring.finish();
    }

    #[test]
    fn a_finished_request_keeps_its_slot_until_it_is_released() {
        let mut ring = Ring::new(16);
        (0..16).for_each(|k| assert_eq!(ring.post(), Some(k)));
        assert_eq!(ring.post(), None);
        advance(&mut ring);
        assert_eq!(ring.post(), None);
        ring.release();
        assert_eq!(ring.post(), Some(16));
        assert_eq!(ring.slot_of(16), 0);
        assert_eq!(ring.post(), None);
    }

    #[test]
    fn each_state_has_its_oldest() {
        let mut ring = Ring::new(16);
        (0..4).for_each(|k| assert_eq!(ring.post(), Some(k)));
        assert_eq!((ring.oldest_posted(), ring.oldest_active(), ring.head()), (Some(0), None, None));
        ring.admit();
        ring.admit();
        ring.admit();
        ring.transmit();
        ring.transmit();
        ring.finish();
        assert_eq!(ring.oldest_posted(), Some(3));
        assert_eq!(ring.oldest_active(), Some(2));
        assert_eq!(ring.head(), Some(1));
        assert_eq!(ring.oldest_finished(), Some(0));
        assert!(ring.is_transmitting(1) && !ring.is_transmitting(0) && !ring.is_transmitting(2));
    }

    #[test]
    fn slots_know_the_latest_request_that_had_them() {
        let mut ring = Ring::new(4);
        assert_eq!(ring.number_at(0), None);
        for round in 0..3 {
            for slot in 0..4 {
                let number = ring.post().unwrap();
                advance(&mut ring);
                ring.release();
                assert_eq!(ring.number_at(slot), Some(number));
                assert_eq!(number, round * 4 + slot);
            }
        }
        assert_eq!(ring.number_at(3), Some(11));
        ring.post();
        assert_eq!((ring.number_at(0), ring.number_at(1)), (Some(12), Some(9)));
    }
}
