//! Which worker and which channel moves what a peer has queued.
//!
//! Small operations, and longer ones while others are not busy, are taken *in order*: by the channels of the *home worker*
//! first, and by the next channel only while those before it are busy. So few threads do all the work while there is little.
//! What is cut into chunks is shared by all channels.
//!
//! Invariant: whatever is queued, the worker of a channel that may take it is awake or is woken.
//! Read next: `../channel/sender.rs`, which asks how much a channel may take; `../worker/inline.rs`, which wakes.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::core::queue::SMALL_BYTES_MAX;
use crate::core::sleeper::Sleeper;
use ferrywire_proto::schedule;

use super::PeerState;

/// Bytes of bulk per additional worker that is woken. Waking a sleeping thread costs the caller microseconds,
/// as much as sending these bytes.
const ROUSE_BYTES: u64 = 256 << 10;

impl PeerState {
    /// The worker whose channels carry small operations first.
    pub fn home(&self) -> &Arc<Sleeper> {
        &self.context.sleepers[self.home_index()]
    }

    /// The number of the home worker.
    pub fn home_index(&self) -> usize {
        self.home.load(Ordering::Relaxed)
    }

    /// Chooses the home worker again after channels came or went: the worker of the first live channel.
    pub fn choose_home(&self) {
        let first = self.counters.iter().position(|channel| channel.alive.load(Ordering::Relaxed));
        self.home.store(self.engine_worker(first.unwrap_or(0) as u16), Ordering::SeqCst);
    }

    /// The number of the worker that owns a channel. Both ends agree if they have as many workers. Peers begin with
    /// different workers, since the first channels carry most of what is in order.
    pub fn engine_worker(&self, index: u16) -> usize {
        (self.info.session as u32 as usize + usize::from(index)) % self.context.sleepers.len()
    }

    /// Whether a channel belongs to the home worker.
    pub fn is_home(&self, index: u16) -> bool {
        self.engine_worker(index) == self.home.load(Ordering::Relaxed)
    }

    /// Bytes in its window from which a channel counts as busy, so that the next one helps.
    pub fn fill_bytes(&self) -> u64 {
        self.queue.fill_bytes[usize::from(self.route.is_staged())]
    }

    /// Largest bulk operation in bytes that channels take in order.
    pub fn ordered_bytes(&self) -> u64 {
        // A checksum is made while the queue is locked. A single thread wakes no others for the parts.
        if self.info.crc || self.context.sleepers.len() == 1 {
            return 0;
        }
        let in_flight = schedule::local_bytes(self.channels_per_thread());
        self.route.ordered_bytes().min(in_flight).min(self.info.chunk_bytes as u64)
    }

    /// Whether channels take the next bulk operation in order.
    pub fn next_is_ordered(&self) -> bool {
        self.queue.next_is_ordered(self.ordered_bytes()) && self.is_ordered()
    }

    /// Whether channels take operations of at most [`PeerState::ordered_bytes`] in order. Where the queue alone keeps all of
    /// them busy, there is no order to keep.
    pub fn is_ordered(&self) -> bool {
        let queued = self.queue.bulk_bytes();
        let fill = if self.route.is_staged() { self.fill_bytes() } else { schedule::DEEP_BYTES };
        queued < fill * self.channels() as u64
    }

    /// Whether the channels take an operation of so many bytes in order: each only while those before it are busy.
    pub fn takes_in_order(&self, bytes: u64) -> bool {
        bytes <= SMALL_BYTES_MAX || (bytes <= self.ordered_bytes() && self.is_ordered())
    }

    /// Whether the bytes queued and in flight are deep bulk.
    pub fn in_deep_bulk(&self) -> bool {
        // Idle threads ask all the time. The backlogs are in the cache of the threads that move bytes.
        self.is_deep_bulk(self.in_flight.bytes())
            && self.is_deep_bulk(self.queue.bulk_bytes().saturating_add(self.live_backlog().1))
    }

    /// Whether `bytes` bytes are deep bulk for this peer's number of channels.
    pub fn is_deep_bulk(&self, bytes: u64) -> bool {
        schedule::is_deep_bulk(bytes, self.channels())
    }

    /// Number of channels of this peer that share one worker.
    pub fn channels_per_thread(&self) -> usize {
        self.counters.len().div_ceil(self.context.sleepers.len())
    }

    /// Number of channels that the peer was set up with, live or not.
    pub fn channels(&self) -> usize {
        self.counters.len()
    }

    pub fn live_channels(&self) -> usize {
        self.counters.iter().filter(|channel| channel.alive.load(Ordering::Relaxed)).count()
    }

    /// Whether a channel must leave operations taken in order to a channel before it, which has room.
    pub fn leaves_ordered(&self, index: u16) -> bool {
        self.counters[..usize::from(index)].iter().any(|each| each.has_ordered_room.load(Ordering::SeqCst))
    }

    /// The fewest bytes in the window of any channel.
    pub fn least_backlog(&self) -> u64 {
        self.counters.iter().map(|channel| channel.backlog.load(Ordering::Relaxed)).min().unwrap_or(0)
    }

    /// Bytes in flight on all channels of the worker that owns this channel, including its own.
    pub fn thread_backlog(&self, index: u16) -> u64 {
        let worker = self.engine_worker(index);
        let shared = (0..).zip(&self.counters).filter(|(other, _)| self.engine_worker(*other) == worker);
        shared.map(|(_, channel)| channel.in_flight()).sum()
    }

    /// Bytes of staged payload that a channel with `backlog` bytes in its window may take.
    pub fn staged_share(&self, backlog: u64) -> u64 {
        let (channels, in_flight) = self.live_backlog();
        schedule::staged_share(self.queue.bulk_bytes(), in_flight, channels, backlog)
    }

    /// The shortest and the longest chunk, in bytes, of staged payload.
    pub fn staged_chunk_bytes(&self) -> (usize, usize) {
        let (channels, in_flight) = self.live_backlog();
        let alone = self.in_flight_beside_one() == 0;
        schedule::staged_chunk_bytes(self.queue.bulk_bytes().saturating_add(in_flight), alone, channels)
    }

    /// The number of live channels, and the bytes that they have in flight together.
    fn live_backlog(&self) -> (usize, u64) {
        let live = self.counters.iter().filter(|channel| channel.alive.load(Ordering::Relaxed));
        live.fold((0, 0), |(count, bytes), channel| (count + 1, bytes + channel.in_flight()))
    }

    /// Wakes the workers for an operation of `bytes` bytes that was queued: the one that takes it if channels take it in
    /// order, else all.
    pub fn rouse_for(&self, bytes: u64) {
        if !self.takes_in_order(bytes) {
            self.rouse_all();
        } else if self.in_bulk() && self.next_is_ordered() {
            self.rouse_for_ordered();
        } else if self.in_bulk() && bytes > SMALL_BYTES_MAX && self.queue.bulk_bytes() > 0 {
            // It has more pieces than one frame carries, or waits behind an operation that all channels take.
            self.rouse_all();
        } else {
            self.wake_home_worker();
        }
    }

    /// Wakes the worker of the first channel that has room for operations taken in order. If none has room, each channel
    /// takes frames as soon as it has.
    pub fn rouse_for_ordered(&self) {
        let first = self.counters.iter().position(|each| each.has_ordered_room.load(Ordering::SeqCst));
        if let Some(index) = first {
            self.context.sleepers[self.engine_worker(index as u16)].rouse();
        }
    }

    /// Wakes workers other than the home worker for `bytes` bytes that are cut, in proportion.
    pub fn rouse_for_bulk(&self, bytes: u64) {
        let sleepers = &self.context.sleepers;
        // Other workers have no channel of this peer.
        let count = sleepers.len().min(self.channels()).max(1);
        let mut left = bytes.div_ceil(ROUSE_BYTES);
        // Operations start at different workers in turn.
        let first = self.rouse_first.fetch_add(1, Ordering::Relaxed);
        for step in 0..count {
            let channel = first.wrapping_add(step) % count;
            let sleeper = &sleepers[self.engine_worker(channel as u16)];
            if left == 0 {
                break;
            }
            left -= u64::from(sleeper.index != self.home_index() && sleeper.rouse());
        }
    }

    fn rouse_all(&self) {
        self.context.sleepers.iter().for_each(|sleeper| _ = sleeper.rouse());
    }

    /// Wakes the home worker if frames are queued: only its channels take small operations.
    pub fn wake_home_worker(&self) {
        if self.queue.has_work() {
            self.home().rouse();
        }
    }
}
