//! The window of one channel: frames that are sent and not acknowledged, as a bounded FIFO.
//!
//! Only the peer's count releases entries, the oldest first, so an acknowledgement needs nothing but a count.
//! When a channel is lost, the entries that the peer has placed are released. The rest is taken out, oldest
//! first, and sent over other channels.
//!
//! Pure: no sockets, no clock.
//! Read next: the engine's `core/queue.rs`, which fills the window, and `core/channel/`, which empties it.

use std::collections::VecDeque;

/// A bounded FIFO of entries in flight, numbered from 0 without gaps.
#[derive(Debug)]
pub struct Window<T> {
    entries: VecDeque<(T, usize)>,
    first: u64,
    bytes: usize,
    frames_max: usize,
    bytes_max: usize,
}

impl<T> Window<T> {
    /// An empty window. Its first entry always fits; further ones while there are fewer than `frames_max`
    /// entries and `bytes_max` bytes.
    pub fn new(frames_max: usize, bytes_max: usize) -> Window<T> {
        Window { entries: VecDeque::new(), first: 0, bytes: 0, frames_max: frames_max.max(1), bytes_max }
    }

    /// Whether another entry fits.
    pub fn has_room(&self) -> bool {
        self.entries.len() < self.frames_max && (self.bytes < self.bytes_max || self.entries.is_empty())
    }

    /// Adds an entry and returns its number. Check `has_room` first; exceeding the bound is a bug.
    pub fn post(&mut self, entry: T, bytes: usize) -> u64 {
        debug_assert!(self.has_room());
        self.entries.push_back((entry, bytes));
        self.bytes += bytes;
        self.next() - 1
    }

    /// Number of the next entry.
    pub fn next(&self) -> u64 {
        self.first + self.entries.len() as u64
    }

    /// Number of the oldest entry.
    pub fn first(&self) -> u64 {
        self.first
    }

    /// Whether the window is empty.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Bytes in flight.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The entry with this number; `None` when it is not in flight.
    pub fn get_mut(&mut self, number: u64) -> Option<&mut T> {
        let index = usize::try_from(number.checked_sub(self.first)?).ok()?;
        self.entries.get_mut(index).map(|(entry, _)| entry)
    }

    /// The entries from `number` on, oldest first.
    pub fn from(&mut self, number: u64) -> impl Iterator<Item = &mut T> {
        let skip = number.saturating_sub(self.first) as usize;
        self.entries.iter_mut().skip(skip).map(|(entry, _)| entry)
    }

    /// Whether a peer's count is plausible: at most `sent` frames have left this end.
    pub fn may_acknowledge(&self, count: u64, sent: u64) -> bool {
        count >= self.first && count <= sent && sent <= self.next()
    }

    /// Releases the oldest entry when its number is below `count`.
    pub fn release(&mut self, count: u64) -> Option<(u64, T)> {
        if self.first >= count {
            return None;
        }
        let (entry, bytes) = self.entries.pop_front()?;
        self.bytes -= bytes;
        self.first += 1;
        Some((self.first - 1, entry))
    }

    /// Takes out all entries with their numbers, oldest first.
    pub fn drain(&mut self) -> Vec<(u64, T)> {
        let first = self.first;
        self.first = self.next();
        self.bytes = 0;
        self.entries.drain(..).enumerate().map(|(i, (entry, _))| (first + i as u64, entry)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_original_sent_seventeen_chunks_through_a_window_of_sixteen() {
        let mut window = Window::new(16, usize::MAX);
        for chunk in 0..16 {
            assert!(window.has_room());
            window.post(chunk, 1);
        }
        assert!(!window.has_room(), "the check comes before the post");
        assert_eq!(window.release(1), Some((0, 0)));
        assert!(window.has_room());
    }

    #[test]
    fn one_entry_larger_than_the_bound_still_passes() {
        let mut window = Window::new(4, 10);
        assert!(window.has_room());
        window.post((), 100);
        assert!(!window.has_room());
    }

    proptest! {
        #[test]
        fn behaves_like_a_list_of_numbers(steps: Vec<(bool, u8)>) {
            let mut window = Window::new(8, 1000);
            let mut model: Vec<(u64, usize)> = Vec::new();
            let mut next = 0u64;
            for (post, value) in steps {
                if post && window.has_room() {
                    prop_assert!(model.len() < 8);
                    window.post(value, value.into());
                    model.push((next, value.into()));
                    next += 1;
                } else {
                    let count = window.first() + u64::from(value % 4);
                    while let Some((number, _)) = window.release(count) {
                        prop_assert_eq!(model.remove(0).0, number);
                    }
                    prop_assert!(model.first().is_none_or(|(n, _)| *n >= count.min(next)));
                }
                prop_assert_eq!((window.next() - window.first()) as usize, model.len());
                prop_assert_eq!(window.bytes(), model.iter().map(|(_, b)| b).sum::<usize>());
                prop_assert_eq!(window.next(), next);
            }
            let drained: Vec<u64> = window.drain().into_iter().map(|(n, _)| n).collect();
            prop_assert_eq!(drained, model.iter().map(|(n, _)| *n).collect::<Vec<_>>());
            prop_assert!(window.is_empty() && window.bytes() == 0);
        }
    }
}
