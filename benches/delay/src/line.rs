//! One direction of the path: which segments pass, and when.
//!
//! Pure: the time is an argument. A segment waits for the rate, then for the delay. It is lost by chance, or
//! dropped when the wait for the rate would be longer than the queue allows.
//!
//! Invariant: packets become due in the order in which they were accepted.
//! Read next: `segments.rs`, for what a packet of many segments is.

use std::collections::VecDeque;

use crate::segments::{self, PACKET_BYTES_MAX};

/// Most spare buffers that are kept: as many as a path of 10 Gbit/s and 10 ms holds.
const SPARES_MAX: usize = 512;
/// Size in bytes below which a packet is copied, instead of keeping a buffer of the largest size.
const SMALL_BYTES: usize = 4096;

/// The properties of the path.
#[derive(Clone, Default)]
pub struct Shape {
    /// Delay of one way, in nanoseconds.
    pub delay_ns: u64,
    /// Probability with which each segment is lost.
    pub loss: f64,
    /// Rate in bytes per second; 0 for no limit.
    pub bytes_per_second: f64,
    /// Longest wait for the rate, in nanoseconds; segments that would wait longer are dropped.
    pub queue_ns: u64,
}

/// Numbers of a packet's segments, by what happened to them.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Fate {
    /// Number of all segments of the packet.
    pub segments: u64,
    /// Number of segments lost by chance.
    pub lost: u64,
    /// Number of segments dropped because the queue was full.
    pub dropped: u64,
}

/// One direction of the path.
pub struct Line {
    shape: Shape,
    random: u64,
    free_at_ns: u64,
    queue: VecDeque<(u64, Vec<u8>)>,
    spares: Vec<Vec<u8>>,
}

impl Line {
    /// Creates a line without packets. With equal seeds equal segments are lost.
    pub fn new(shape: Shape, seed: u64) -> Line {
        let random = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        Line { shape, random, free_at_ns: 0, queue: VecDeque::new(), spares: Vec::new() }
    }

    /// Returns a buffer to read a packet into.
    pub fn spare(&mut self) -> Vec<u8> {
        let mut buffer = self.spares.pop().unwrap_or_default();
        buffer.resize(PACKET_BYTES_MAX, 0);
        buffer
    }

    /// Takes back the buffer of a packet that was written.
    pub fn recycle(&mut self, buffer: Vec<u8>) {
        if buffer.capacity() >= PACKET_BYTES_MAX && self.spares.len() < SPARES_MAX {
            self.spares.push(buffer);
        }
    }

    /// Takes a packet that arrived at `now_ns`. Returns what happened to its segments.
    pub fn accept(&mut self, now_ns: u64, packet: Vec<u8>) -> Fate {
        let count = segments::count(&packet);
        let wire_bytes = segments::wire_bytes(&packet, count);
        let (mut fate, mut first) = (Fate { segments: count as u64, ..Fate::default() }, 0);
        for at in 0..count {
            let lost = self.chance() < self.shape.loss;
            let dropped = !lost && !self.occupy(now_ns, wire_bytes / count as f64);
            fate.lost += u64::from(lost);
            fate.dropped += u64::from(dropped);
            if lost || dropped {
                self.pass(now_ns, segments::piece(&packet, first..at));
                first = at + 1;
            }
        }
        if first > 0 || packet.len() < SMALL_BYTES {
            self.pass(now_ns, segments::piece(&packet, first..count));
            self.recycle(packet);
        } else {
            self.pass(now_ns, Some(packet));
        }
        fate
    }

    /// Returns the next packet that is due at `now_ns`, with the time at which it was due.
    pub fn due(&mut self, now_ns: u64) -> Option<(u64, Vec<u8>)> {
        if self.next_due()? <= now_ns { self.queue.pop_front() } else { None }
    }

    /// Time at which the next packet is due, in nanoseconds.
    pub fn next_due(&self) -> Option<u64> {
        self.queue.front().map(|(due, _)| *due)
    }

    /// Takes the wire for a segment. Returns false if the queue before the wire is full.
    fn occupy(&mut self, now_ns: u64, bytes: f64) -> bool {
        let start = self.free_at_ns.max(now_ns);
        if self.shape.bytes_per_second == 0.0 {
            self.free_at_ns = now_ns;
        } else if start - now_ns > self.shape.queue_ns {
            return false;
        } else {
            self.free_at_ns = start + (bytes / self.shape.bytes_per_second * 1e9) as u64;
        }
        true
    }

    fn pass(&mut self, now_ns: u64, packet: Option<Vec<u8>>) {
        let due = self.free_at_ns.max(now_ns) + self.shape.delay_ns;
        self.queue.extend(packet.map(|packet| (due, packet)));
    }

    /// Returns a random number from 0 up to, not including, 1 (xorshift).
    fn chance(&mut self) -> f64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segments::sample;

    fn drain(line: &mut Line, now_ns: u64) -> Vec<(u64, usize)> {
        std::iter::from_fn(|| line.due(now_ns)).map(|(due, p)| (due, segments::count(&p))).collect()
    }

    #[test]
    fn a_packet_waits_for_the_rate_and_the_delay() {
        let shape = Shape { delay_ns: 1000, bytes_per_second: 1e9, queue_ns: u64::MAX, ..Shape::default() };
        let mut line = Line::new(shape, 1);
        line.accept(0, sample(3, 1000));
        line.accept(0, sample(1, 1000));
        // Each segment has 40 bytes of headers.
        assert_eq!(drain(&mut line, 4119), []);
        assert_eq!(drain(&mut line, 4120), [(4120, 3)]);
        assert_eq!(drain(&mut line, 9999), [(5160, 1)]);
    }

    #[test]
    fn a_full_queue_drops_the_tail() {
        let shape = Shape { bytes_per_second: 1e9, queue_ns: 2000, ..Shape::default() };
        let mut line = Line::new(shape, 1);
        assert_eq!(line.accept(0, sample(5, 1000)), Fate { segments: 5, lost: 0, dropped: 3 });
        assert_eq!(drain(&mut line, u64::MAX), [(2080, 2)]);
    }

    #[test]
    fn loss_takes_its_share_of_segments_and_leaves_the_rest() {
        let mut line = Line::new(Shape { loss: 0.1, ..Shape::default() }, 7);
        let fates: Vec<Fate> = (0..1000).map(|_| line.accept(0, sample(40, 1448))).collect();
        let lost: u64 = fates.iter().map(|f| f.lost).sum();
        assert!((3600..4400).contains(&lost), "{lost} of 40000");
        let passed: usize = drain(&mut line, 0).iter().map(|(_, count)| count).sum();
        assert_eq!(passed as u64, 40_000 - lost);
    }
}
