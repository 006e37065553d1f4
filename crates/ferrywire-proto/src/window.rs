//! Acknowledgement by count: the frames of one channel that are sent and not acknowledged, and, at the other
//! end, the received frames.
//!
//! A [`Window`] is a bounded FIFO of sent frames, and [`Acks`] counts received ones. Only the peer's count
//! releases entries, the oldest first, so an acknowledgement needs nothing but a count. When a channel is lost,
//! the entries that the peer has placed are released. The rest is taken out, oldest first, and sent over other
//! channels.
//!
//! Invariant: the count that goes to the peer covers only frames that are placed, or whose refusals are in the
//! stream. Pure: no sockets, no clock.
//! Read next: the engine's `core/queue.rs`, which fills the window, and `core/channel/`, which empties it.

use std::collections::VecDeque;

use crate::limits;
use crate::wire::{self, Header, Kind, Refusal};

/// Received frames after which an acknowledgement is sent at once.
const URGENT_FRAMES: u64 = 16;

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

    /// Whether another entry fits into the window.
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

    /// Number that the next entry of the window will have.
    pub fn next(&self) -> u64 {
        self.first + self.entries.len() as u64
    }

    /// Number of the oldest entry of the window.
    pub fn first(&self) -> u64 {
        self.first
    }

    /// Whether nothing is in flight in the window.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Bytes in flight in the window.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The entry with this number; `None` when the entry is not in flight.
    pub fn get_mut(&mut self, number: u64) -> Option<&mut T> {
        let index = usize::try_from(number.checked_sub(self.first)?).ok()?;
        self.entries.get_mut(index).map(|(entry, _)| entry)
    }

    /// The window's entries from `number` on, oldest first.
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

    /// Removes all entries from the window, and returns them with their numbers, oldest first.
    pub fn drain(&mut self) -> Vec<(u64, T)> {
        let first = self.first;
        self.first = self.next();
        self.bytes = 0;
        self.entries.drain(..).enumerate().map(|(i, (entry, _))| (first + i as u64, entry)).collect()
    }
}

/// Frames of one channel that are received, and those of them that are acknowledged, as counts.
///
/// A refused frame is acknowledged only once its refusal is in the stream, and refusals are sent in the order
/// of their frames. The count that was sent never exceeds the count that was received.
#[derive(Debug, Default)]
pub struct Acks {
    /// Number of the channel's frames that were placed or refused.
    received: u64,
    /// The highest acknowledgement of the channel that was written to the stream.
    acknowledged: u64,
    unacknowledged_bytes: usize,
    /// Numbers of refused frames whose refusals are not in the stream yet, each with its reason.
    refused: Vec<(u64, Refusal)>,
    /// Refusals that are in the stream. The peer may not have received them.
    reported: Vec<(u64, Refusal)>,
    /// Whether the next frame reports that payload of the lane waits for this end's GPU.
    held: bool,
}

impl Acks {
    /// Counts a frame of `bytes` bytes that was placed, or refused with the reason in `placed`.
    #[inline]
    pub fn count(&mut self, placed: Result<(), Refusal>, bytes: usize) {
        if let Err(refusal) = placed {
            self.refused.push((self.received, refusal));
        }
        self.received += 1;
        self.unacknowledged_bytes += bytes;
    }

    /// Makes the next frame report that payload of the lane waits for this end's GPU.
    pub fn report_held(&mut self) {
        self.held = true;
    }

    /// Whether an acknowledgement, a refusal or another report waits to be sent.
    #[inline]
    pub fn due(&self) -> bool {
        self.held || self.received != self.acknowledged || !self.refused.is_empty()
    }

    /// Whether the acknowledgement should be sent at once, without waiting for the next data frame.
    #[inline]
    pub fn urgent(&self) -> bool {
        self.unacknowledged_bytes >= limits::ACK_BYTES
            || self.unacknowledged_frames() >= URGENT_FRAMES
            || !self.refused.is_empty()
            || self.held
    }

    /// Number of frames that were received and not acknowledged.
    #[inline]
    pub fn unacknowledged_frames(&self) -> u64 {
        self.received - self.acknowledged
    }

    /// The count for the next header. The count ends before the first frame whose refusal is not in the
    /// stream yet.
    #[inline]
    pub fn covered(&self) -> u64 {
        self.refused.first().map_or(self.received, |(number, _)| *number)
    }

    /// Notes that a header with this count (its low 32 bits) is in the stream.
    #[inline]
    pub fn sent_with_header(&mut self, low: u32) {
        self.acknowledged = self.acknowledged.max(wire::widen(low, self.acknowledged));
        if self.acknowledged == self.received {
            self.unacknowledged_bytes = 0;
        }
    }

    /// Appends a frame to `out` that carries only an acknowledgement and the waiting refusals. `posted` is
    /// the count of posted lane receives for its header.
    pub fn encode_frame(&mut self, out: &mut Vec<u8>, posted: u32, crc: bool) {
        let mut header = Header::new(Kind::Ack);
        header.ack = self.received as u32;
        header.posted = posted;
        let refused: Vec<_> =
            self.refused.drain(..self.refused.len().min(limits::WINDOW_FRAMES_MAX)).collect();
        let body = wire::encode_refusals(&refused);
        // A refusal in the stream may still be lost with the connection; then the fence reports the refusal
        // again.
        let known_to_peer = self.known_to_peer();
        self.reported.retain(|(number, _)| *number >= known_to_peer);
        self.reported.extend(refused);
        header.len = body.len() as u32;
        if std::mem::take(&mut self.held) {
            header.flags |= wire::FLAG_HELD;
        }
        if crc {
            header.flags |= wire::FLAG_CRC;
            header.crc = crc32fast::hash(&body);
        }
        out.extend_from_slice(&header.encode());
        out.extend_from_slice(&body);
        self.acknowledged = self.covered();
        self.unacknowledged_bytes = 0;
    }

    /// Returns what a fence reports: the number of frames received, and the refusals that the peer may not
    /// have.
    pub fn end(mut self) -> (u64, Vec<(u64, Refusal)>) {
        let known_to_peer = self.known_to_peer();
        let mut refused = self.reported;
        refused.append(&mut self.refused);
        refused.retain(|(number, _)| *number >= known_to_peer);
        (self.received, refused)
    }

    /// The peer has received the acknowledgements of all frames below this number: its window bounds how far
    /// it sends ahead of them.
    fn known_to_peer(&self) -> u64 {
        self.received.saturating_sub(limits::WINDOW_FRAMES_MAX as u64)
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

    #[test]
    fn held_payload_is_reported_once_by_a_frame_of_its_own() {
        let mut acks = Acks::default();
        let flags = |acks: &mut Acks| {
            let mut frame = Vec::new();
            acks.encode_frame(&mut frame, 0, true);
            Header::decode(&frame[..].try_into().unwrap()).unwrap().flags
        };
        assert!(!acks.due());
        acks.report_held();
        // The count of another frame's header does not report it.
        acks.sent_with_header(0);
        assert!(acks.due() && acks.urgent());
        assert_eq!(flags(&mut acks), wire::FLAG_CRC | wire::FLAG_HELD);
        assert!(!acks.due());
        assert_eq!(flags(&mut acks), wire::FLAG_CRC);
        let data = Header { flags: wire::FLAG_HELD, ..Header::new(Kind::Data) };
        assert!(Header::decode(&data.encode()).is_err(), "only an acknowledgement reports it");
    }

    #[test]
    fn a_refused_frame_is_acknowledged_only_with_its_refusal() {
        let mut acks = Acks::default();
        for placed in [Ok(()), Err(Refusal::NoRegion), Ok(())] {
            acks.count(placed, 1);
        }
        assert!(acks.due() && acks.urgent());
        assert_eq!(acks.covered(), 1, "the count of a data frame ends before the refused one");
        acks.sent_with_header(1);
        let mut frame = Vec::new();
        acks.encode_frame(&mut frame, 0, false);
        let (header, body) = frame.split_first_chunk().expect("a header");
        assert_eq!(Header::decode(header).map(|header| header.ack), Ok(3));
        assert_eq!(wire::refusals(body).collect::<Vec<_>>(), [(1, Refusal::NoRegion)]);
        assert!(!acks.due());
        // The frame may be lost with the connection.
        assert_eq!(acks.end(), (3, vec![(1, Refusal::NoRegion)]));
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
