//! Which bytes of a stream the kernel may still read, and whether zero copy pays on this connection.
//!
//! Loopback, veth and NICs without scatter-gather copy the memory anyway, at a higher price, and the
//! completions say so. The first completions of a connection are its probe. States: probing -> on | off, for
//! good.
//! Invariant: `released` never passes a byte of an incomplete send.

use std::collections::VecDeque;

use super::ZeroCopyPolicy;
use ferrywire_sys::zerocopy::Completion;

/// Number of zero-copy completions that decide whether zero copy stays on.
const PROBES: u32 = 8;
/// Most incomplete zero-copy sends of a connection; further sends are copied.
const UNFINISHED_MAX: usize = 1024;

/// The zero-copy state of one connection.
#[derive(Debug, Default)]
pub(super) struct ZeroCopy {
    usable: bool,
    policy: ZeroCopyPolicy,
    probes_seen: u32,
    /// The kernel's number of the oldest send in `unfinished`.
    first_number: u32,
    unfinished: VecDeque<Send>,
}

#[derive(Debug)]
struct Send {
    /// Offset in the connection's stream of the first byte of the zero-copy send.
    start: u64,
    finished: bool,
}

impl ZeroCopy {
    pub(super) fn new(usable: bool, policy: ZeroCopyPolicy) -> ZeroCopy {
        ZeroCopy { usable, policy, ..ZeroCopy::default() }
    }

    /// Whether the policy keeps zero copy on, whatever the path and the completions say.
    pub(super) fn always(&self) -> bool {
        self.policy == ZeroCopyPolicy::Always
    }

    /// Whether zero copy is on for this connection.
    pub(super) fn usable(&self) -> bool {
        self.usable
    }

    /// Whether the next send may be a zero-copy send.
    pub(super) fn has_room(&self) -> bool {
        self.usable && self.unfinished.len() < UNFINISHED_MAX
    }

    /// Turns zero copy off for the rest of the connection.
    pub(super) fn turn_off(&mut self) {
        self.usable = false;
    }

    /// Whether the kernel may still read memory of an earlier send.
    pub(super) fn is_unfinished(&self) -> bool {
        !self.unfinished.is_empty()
    }

    /// Records a zero-copy send that starts at offset `start` of the stream.
    pub(super) fn sent(&mut self, start: u64) {
        self.unfinished.push_back(Send { start, finished: false });
    }

    /// Records a completion; completions arrive in any order. Numbers that belong to no send of this
    /// connection are ignored.
    pub(super) fn finish(&mut self, completion: Completion) {
        let skip = completion.first.wrapping_sub(self.first_number) as usize;
        let count = completion.last.wrapping_sub(completion.first) as usize + 1;
        let finished = self.unfinished.iter_mut().skip(skip).take(count);
        let seen = finished.map(|send| send.finished = true).count() as u32;
        if self.probes_seen < PROBES && completion.copied && !self.always() {
            self.usable = false;
        }
        self.probes_seen = self.probes_seen.saturating_add(seen);
        while self.unfinished.front().is_some_and(|send| send.finished) {
            self.unfinished.pop_front();
            self.first_number = self.first_number.wrapping_add(1);
        }
    }

    /// Bytes from the start of the stream whose memory is released; `sent_bytes` were sent in all.
    pub(super) fn released(&self, sent_bytes: u64) -> u64 {
        self.unfinished.front().map_or(sent_bytes, |send| send.start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn done(first: u32, last: u32) -> Completion {
        Completion { first, last, copied: false }
    }

    fn with_sends(count: u64) -> ZeroCopy {
        let mut zero_copy = ZeroCopy::new(true, ZeroCopyPolicy::Auto);
        (0..count).for_each(|i| zero_copy.sent(i * 100));
        zero_copy
    }

    #[test]
    fn memory_is_released_in_order() {
        let mut zero_copy = with_sends(4);
        zero_copy.finish(done(1, 2));
        assert_eq!(zero_copy.released(400), 0);
        zero_copy.finish(done(0, 0));
        assert_eq!(zero_copy.released(400), 300);
        zero_copy.finish(done(3, 3));
        assert_eq!(zero_copy.released(450), 450);
        assert!(!zero_copy.is_unfinished());
    }

    #[test]
    fn numbers_wrap() {
        let mut zero_copy = with_sends(3);
        zero_copy.first_number = u32::MAX - 1;
        zero_copy.finish(done(u32::MAX - 1, 0));
        assert_eq!(zero_copy.released(300), 300);
        assert_eq!(zero_copy.first_number, 1);
    }

    #[test]
    fn foreign_numbers_are_ignored() {
        let mut zero_copy = with_sends(2);
        zero_copy.finish(done(2, 5));
        zero_copy.finish(done(u32::MAX - 3, u32::MAX));
        assert_eq!(zero_copy.released(200), 0);
        zero_copy.finish(done(0, u32::MAX));
        assert_eq!(zero_copy.released(200), 200);
    }

    #[test]
    fn a_copied_probe_turns_it_off_and_a_late_copy_does_not() {
        let mut probing = with_sends(2);
        probing.finish(Completion { copied: true, ..done(0, 0) });
        assert!(!probing.usable() && probing.is_unfinished());

        let mut kept = with_sends(9);
        kept.finish(done(0, 7));
        kept.finish(Completion { copied: true, ..done(8, 8) });
        assert!(kept.usable());
    }

    #[test]
    fn unfinished_sends_are_bounded() {
        assert!(with_sends(UNFINISHED_MAX as u64 - 1).has_room());
        assert!(!with_sends(UNFINISHED_MAX as u64).has_room());
    }
}
