//! Allocation of a ring: spans are taken at one end and returned at the other.
//!
//! Invariant: spans do not overlap, and each is contiguous and begins at a multiple of [`ALIGN_BYTES`]. Pure
//! arithmetic without memory.
//! Read next: `pipeline.rs`, which adds the memory.

use std::collections::VecDeque;

/// Spans begin at multiples of this: a cache line, which suits copy engines.
const ALIGN_BYTES: usize = 64;

/// The allocation state of a ring.
#[derive(Debug)]
pub(super) struct Ring {
    len: usize,
    /// New spans end before this.
    bound: usize,
    /// Offset and aligned length of each span, oldest first, and whether it was returned before an older one.
    spans: VecDeque<(usize, usize, bool)>,
    used: usize,
}

impl Ring {
    pub fn new(len: usize) -> Ring {
        Ring { len, bound: len, spans: VecDeque::new(), used: 0 }
    }

    /// Size of the ring in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Lets new spans use only the first `bytes` bytes.
    pub fn keep_within(&mut self, bytes: usize) {
        self.bound = bytes.min(self.len);
    }

    /// Bytes that new spans may use.
    pub fn bound(&self) -> usize {
        self.bound
    }

    /// Bytes of spans that are taken, or returned before an older one.
    pub fn used(&self) -> usize {
        self.used
    }

    /// Whether no span is taken.
    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }

    /// Whether a span of this length could be taken now.
    pub fn fits(&self, bytes: usize) -> bool {
        self.place(aligned(bytes)).is_some()
    }

    /// Takes a span. Returns its offset, or `None` if there is no room.
    pub fn take(&mut self, bytes: usize) -> Option<usize> {
        let bytes = aligned(bytes);
        let offset = self.place(bytes)?;
        self.spans.push_back((offset, bytes, false));
        self.used += bytes;
        Some(offset)
    }

    /// Returns the oldest span.
    pub fn give_back(&mut self) {
        let oldest = self.spans.front().map(|(offset, ..)| *offset);
        debug_assert!(oldest.is_some(), "a span was returned that is not in the ring");
        self.give_back_at(oldest.unwrap_or(0));
    }

    /// Returns a span, in any order. Its room is free once all older spans are returned.
    pub fn give_back_at(&mut self, offset: usize) {
        let span = self.spans.iter_mut().find(|(at, _, given)| *at == offset && !given);
        debug_assert!(span.is_some(), "a span was returned that is not in the ring");
        if let Some((.., given)) = span {
            *given = true;
        }
        while let Some((_, bytes, _)) = self.spans.pop_front_if(|(.., given)| *given) {
            self.used -= bytes;
        }
    }

    fn place(&self, bytes: usize) -> Option<usize> {
        let (Some((tail, ..)), Some((last, len, _))) = (self.spans.front(), self.spans.back()) else {
            return (bytes <= self.bound).then_some(0);
        };
        let head = last + len;
        if last < tail {
            // The spans wrap around: the free bytes lie between the newest and the oldest.
            (head + bytes <= (*tail).min(self.bound)).then_some(head)
        } else if head + bytes <= self.bound {
            Some(head)
        } else {
            (bytes <= (*tail).min(self.bound)).then_some(0)
        }
    }
}

/// The aligned length. A span of 0 bytes would have the offset of the next one.
fn aligned(bytes: usize) -> usize {
    bytes.max(1).next_multiple_of(ALIGN_BYTES)
}

/// The bytes of a ring that hold a frame's payload.
pub(crate) struct Staged {
    pub(super) line: usize,
    pub(super) offset: usize,
    /// Address in the ring.
    pub(super) host: usize,
    /// Whether some of the bytes were lent to the socket.
    pub(super) lent: bool,
    pub(super) state: State,
}

/// A staged frame's state; see `sending.rs`.
pub(super) enum State {
    Reserved,
    /// The copies of the frame end at this mark.
    Copying(u64),
    /// The operation has failed: there is nothing to send.
    Lost,
    Ready,
}

impl Staged {
    /// Address of the bytes to send, once they are copied.
    pub fn base(&self) -> *mut u8 {
        self.host as *mut u8
    }

    /// Whether some of the bytes were lent to the socket, which may read them until the peer has placed the
    /// frame.
    pub fn is_lent(&self) -> bool {
        self.lent
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn four_slots_fit_and_a_fifth_waits_for_the_oldest() {
        let mut ring = Ring::new(4 * 512);
        let offsets: Vec<_> = (0..5).map(|_| ring.take(512)).collect();
        assert_eq!(offsets, [Some(0), Some(512), Some(1024), Some(1536), None]);
        ring.give_back();
        assert_eq!((ring.take(513), ring.take(512), ring.take(1)), (None, Some(0), None));
    }

    #[test]
    fn a_span_given_back_early_is_free_after_those_before_it() {
        let mut ring = Ring::new(4 * 512);
        let offsets: Vec<_> = (0..4).map(|_| ring.take(512).unwrap()).collect();
        ring.give_back_at(offsets[1]);
        ring.give_back_at(offsets[2]);
        assert_eq!(ring.take(512), None);
        ring.give_back_at(offsets[0]);
        assert_eq!(
            (0..4).map(|_| ring.take(512)).collect::<Vec<_>>(),
            [Some(0), Some(512), Some(1024), None]
        );
        ring.give_back_at(offsets[3]);
        ring.give_back();
        assert!(!ring.is_empty());
    }

    #[test]
    fn a_span_is_never_split_at_the_end() {
        let mut ring = Ring::new(1024);
        assert_eq!((ring.take(640), ring.take(512)), (Some(0), None));
        assert_eq!(ring.take(128), Some(640));
        ring.give_back();
        assert_eq!(ring.take(512), Some(0), "the 256 bytes at the end are skipped");
        assert_eq!((ring.take(128), ring.take(129)), (Some(512), None));
        (0..3).for_each(|_| ring.give_back());
        assert_eq!(ring.take(1024), Some(0), "an empty ring is whole again");
    }

    #[test]
    fn spans_of_a_ring_that_is_cut_short_lie_in_its_first_part() {
        let mut ring = Ring::new(4 * 512);
        (0..3).for_each(|_| assert!(ring.take(512).is_some()));
        ring.keep_within(2 * 512);
        assert_eq!(ring.take(512), None, "the last quarter is beyond the bound");
        ring.give_back();
        assert_eq!((ring.take(512), ring.take(512)), (Some(0), None));
        (0..2).for_each(|_| ring.give_back());
        assert_eq!((ring.take(512), ring.take(512)), (Some(512), None));
        ring.keep_within(8 * 512);
        assert_eq!((ring.bound(), ring.take(512), ring.take(512)), (4 * 512, Some(2 * 512), Some(3 * 512)));
    }

    proptest! {
        #[test]
        fn spans_lie_inside_apart_and_aligned(steps: Vec<(bool, bool, u16)>) {
            let mut ring = Ring::new(64 << 10);
            let mut model: VecDeque<(usize, usize)> = VecDeque::new();
            for (take, whole, bytes) in steps {
                let bytes = usize::from(bytes);
                ring.keep_within(if whole { 64 << 10 } else { 32 << 10 });
                if !take {
                    if model.pop_front().is_some() {
                        ring.give_back();
                    }
                    continue;
                }
                prop_assert_eq!(ring.fits(bytes), ring.take(bytes).is_some_and(|offset| {
                    model.push_back((offset, bytes.max(1)));
                    assert!(offset + bytes <= ring.bound());
                    true
                }));
                for (at, (offset, len)) in model.iter().enumerate() {
                    prop_assert!(ring.used() <= ring.len());
                    prop_assert!(offset % ALIGN_BYTES == 0 && offset + len <= 64 << 10);
                    for (other, more) in model.iter().skip(at + 1) {
                        prop_assert!(offset + len <= *other || other + more <= *offset);
                    }
                }
                prop_assert!(!model.is_empty() || bytes > ring.bound(), "an empty ring takes what is within its bound");
                let used: usize = model.iter().map(|(_, len)| len.next_multiple_of(ALIGN_BYTES)).sum();
                prop_assert_eq!(ring.used(), used);
            }
        }
    }
}
