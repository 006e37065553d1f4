//! Which channel carries the next chunk, and how large it is.
//!
//! Channels pull: a channel takes the next chunk when it is ready for one, so a fast NIC takes more and
//! a slow one less, with no plan to go wrong. Two rules keep the end of a transfer short: chunks shrink
//! as the rest shrinks, and a channel whose backlog is longer than the others' leaves the rest to them.
//!
//! Pure: numbers in, numbers out. Read next: `outbox/`, which applies the rules.

use crate::limits;
use std::time::Duration;

/// Bytes of the next chunk: an equal share of the rest, within the bounds, whole pages.
pub fn chunk_bytes(rest: u64, channels: usize, chunk_bytes_min: usize, chunk_bytes_max: usize) -> u64 {
    let max = chunk_bytes_max as u64;
    let min = (chunk_bytes_min as u64).min(max);
    let share = (rest / (2 * channels.max(1) as u64)).next_multiple_of(4096);
    share.clamp(min, max)
}

/// Whether a channel with `backlog` bytes accepted and not yet acknowledged may take another chunk,
/// when the least loaded live channel of the peer has `least`.
///
/// A channel ahead of the others by more than it would take to even out waits, unless all is quiet.
pub fn may_take(backlog: u64, least: u64, chunk_bytes_max: usize) -> bool {
    backlog <= least.saturating_add(SPREAD_CHUNKS * chunk_bytes_max as u64)
}

/// Chunks by which one channel's backlog may exceed the least loaded one's.
const SPREAD_CHUNKS: u64 = 8;

/// Bytes of small operations that a channel may take now, of those that all channels of a peer share:
/// as many as keep it within `SMALL_SPREAD_BYTES` of the least loaded one, so that each thread has some.
pub fn small_share(backlog: u64, least: u64) -> u64 {
    least.saturating_add(SMALL_SPREAD_BYTES).saturating_sub(backlog)
}

/// Backlog of small operations by which a channel may be ahead of the least loaded one.
const SMALL_SPREAD_BYTES: u64 = 256 << 10;

/// Bytes of bulk that a channel may take now whose two ends are on this host, and its longest chunk, where so many
/// channels have such a bound of their own on one thread.
///
/// The threads at its ends take turns on a core, or share a cache, which holds what is `in_flight` between
/// the two. A bound on that, no larger than the socket buffers, keeps it there. It also lets
/// the kernel take each call whole: a partial one ends at an odd byte, and the pages into which the kernel copies
/// what a thread sends are shared by all its connections, so from then on everything lies askew in them and is
/// copied out at half the speed. What lies in a ring at an end that stages, and is copied there, comes on top.
pub fn local_share(in_flight: u64, sharing: usize, ends_staged: u64, chunk_bytes_max: usize) -> (u64, usize) {
    let local = local_bytes(sharing);
    let bound = local + ends_staged * limits::STAGING_OUT_RING_BYTES as u64;
    (bound.saturating_sub(in_flight), chunk_bytes_max.min(local as usize / 2))
}

/// Bulk in flight on each of so many channels of two threads of one host, and the size of their socket buffers.
pub fn local_bytes(sharing: usize) -> u64 {
    (LOCAL_BYTES / sharing.max(1) as u64).max(LOCAL_BYTES_MIN)
}

/// Bulk in flight between two threads of one host, and the least of one channel.
const LOCAL_BYTES: u64 = 2 << 20;
const LOCAL_BYTES_MIN: u64 = 512 << 10;

/// Bytes of bulk that a channel with `backlog` bytes may take where payload is staged: an equal share of what is
/// queued and of what all `channels` have together.
///
/// A copy and its mark are begun long before the first byte can be sent, so a channel would take much more than it
/// sends, and a few of them everything there is.
pub fn staged_share(queued: u64, backlog_of_all: u64, channels: usize, backlog: u64) -> u64 {
    if queued == 0 {
        // What waits then has no bytes: a notification behind all that is cut.
        return 1;
    }
    // Rounded up: whatever is queued, who has least may take of it.
    queued.saturating_add(backlog_of_all).div_ceil(channels.max(1) as u64).saturating_sub(backlog)
}

/// Shortest and longest chunk of staged payload, while `in_flight` bytes of several operations are queued or under way, or of
/// one that is `alone`.
///
/// Of several a channel copies half of an equal share while another half is on the wire, in whole steps, or of a message a
/// little would be left for a chunk of its own: each costs a GPU a moment. Who is alone waits for the first chunk's copy and
/// for the last one's, so it is cut finely.
pub fn staged_chunk_bytes(in_flight: u64, alone: bool, channels: usize) -> (usize, usize) {
    let (step, longest) = (limits::STAGING_CHUNK_BYTES_MIN, limits::STAGING_SLOT_BYTES);
    if alone {
        return (step, limits::STAGING_BATCH_BYTES);
    }
    let half = (in_flight / channels.max(1) as u64 / 2).min(longest as u64) as usize;
    (half.next_multiple_of(step).clamp(step, longest), longest)
}

/// Channels for a peer: enough that every core and NIC pair has work, few enough to stay in cache.
pub fn channels_default(cores: usize, pairs: usize) -> usize {
    workers(cores).next_multiple_of(pairs.max(1)).min(limits::CHANNELS_MAX)
}

/// Progress threads: one per core that can be kept busy.
pub fn threads_default(cores: usize) -> usize {
    workers(cores)
}

/// How long a thread without work spins before it sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spin {
    /// Mostly.
    pub usual: Duration,
    /// While there is enough under way, see [`is_deep_bulk`].
    pub in_deep_bulk: Duration,
}

/// How long threads spin where so many have so many cores.
///
/// To be woken takes longer than to send 64 KiB, and where cores are left over a thread had better wait for the next message
/// of a few in flight. In deep bulk a wake that is some microseconds late delays nothing, and spinning costs half of a core.
/// But where threads share cores with whatever else moves the bytes, a yield is the better way to take turns.
pub fn spin(cores: usize, threads: usize) -> Spin {
    match cores >= 2 * threads.max(1) && cores > 4 {
        true => SPIN_ON_SPARE_CORES,
        false => SPIN,
    }
}

/// Whether so many bytes under way are several chunks for each channel.
pub fn is_deep_bulk(bytes: u64, channels: usize) -> bool {
    bytes >= channels as u64 * DEEP_BYTES
}

const SPIN: Spin = Spin { usual: Duration::from_micros(50), in_deep_bulk: Duration::from_micros(50) };
const SPIN_ON_SPARE_CORES: Spin = Spin { usual: Duration::from_micros(500), in_deep_bulk: Duration::ZERO };
const DEEP_BYTES: u64 = 2 << 20;

/// All cores of a small host, half of those of a large one: the rest has other work.
fn workers(cores: usize) -> usize {
    match cores {
        0..=8 => cores.max(1),
        _ => (cores / 2).clamp(8, 16),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_chunk_is_within_bounds(rest: u64, channels in 0usize..300, max in 1usize..limits::CHUNK_BYTES_MAX) {
            let bytes = chunk_bytes(rest / 2, channels, limits::CHUNK_BYTES_MIN, max);
            prop_assert!(bytes >= 1 && bytes <= max as u64);
        }

        #[test]
        fn chunks_do_not_grow_towards_the_end(rest in 0u64..1 << 40, less in 0u64..1 << 40, channels in 1usize..64) {
            let (small, large) = (rest.min(less), rest.max(less));
            let bytes = |rest| chunk_bytes(rest, channels, limits::CHUNK_BYTES_MIN, 1 << 20);
            prop_assert!(bytes(small) <= bytes(large));
        }

        #[test]
        fn the_least_loaded_channel_may_always_take(backlog: u64, chunk in 1usize..1 << 22) {
            prop_assert!(may_take(backlog, backlog, chunk));
        }
    }

    #[test]
    fn within_a_host_one_chunk_is_under_way_while_the_next_is_taken() {
        for sharing in [0, 1, 2, 4, 64] {
            let (share, chunk) = local_share(0, sharing, 0, limits::CHUNK_BYTES_MAX);
            assert_eq!(share, 2 * chunk as u64);
            assert_eq!(local_share(chunk as u64, sharing, 0, limits::CHUNK_BYTES_MAX), (share / 2, chunk));
            assert_eq!(local_share(share + 1, sharing, 0, 4096), (0, 4096));
            let staged = 2 * limits::STAGING_OUT_RING_BYTES as u64;
            assert_eq!(local_share(share, sharing, 2, 4096), (staged, 4096));
        }
        assert!(local_bytes(4) < local_bytes(1) && local_bytes(64) == local_bytes(4));
    }

    #[test]
    fn hosts_keep_as_many_threads_busy_as_they_have_cores_to_spare() {
        let threads = [0, 1, 2, 8, 12, 16, 24, 32, 208].map(threads_default);
        assert_eq!(threads, [1, 1, 2, 8, 8, 8, 12, 16, 16]);
    }

    #[test]
    fn threads_spin_for_long_only_where_others_have_cores() {
        assert!(spin(32, 16).usual > spin(32, 17).usual);
        assert_eq!([spin(2, 1), spin(2, 2), spin(8, 8), spin(1, 0)], [SPIN; 4]);
    }

    #[test]
    fn in_bulk_a_channel_has_several_chunks() {
        assert!(!is_deep_bulk(16 << 20, 16), "a message of 1 MiB for each of 16 channels");
        assert!(is_deep_bulk(64 << 20, 16) && is_deep_bulk(4 << 20, 1));
    }

    #[test]
    fn what_is_staged_is_shared_equally() {
        assert_eq!(staged_share(1 << 20, 0, 4, 0), 256 << 10);
        // Who has more than the others waits, until they have as much.
        assert_eq!(staged_share(1 << 20, 8 << 20, 4, 8 << 20), 0);
        assert_eq!(staged_share(1 << 20, 8 << 20, 4, 0), 9 << 18);
        // All alone it takes everything.
        assert_eq!(staged_share(1 << 30, 0, 1, 0), 1 << 30);
    }

    #[test]
    fn one_operation_is_cut_finely_and_many_are_not() {
        let (finest, slot) = (limits::STAGING_CHUNK_BYTES_MIN, limits::STAGING_SLOT_BYTES);
        let shortest = |in_flight, channels| staged_chunk_bytes(in_flight, false, channels).0;
        assert_eq!(staged_chunk_bytes(1 << 40, true, 16), (finest, slot / 2));
        assert_eq!(staged_chunk_bytes(0, false, 16), (finest, slot));
        assert_eq!(shortest(16 << 20, 16), 512 << 10);
        // Of 16 messages of 1 MiB one has just ended: those that follow it are not cut into 480, 480 and 64 KiB.
        assert_eq!(shortest(15 << 20, 16), 512 << 10);
        assert_eq!([shortest(1 << 40, 16), shortest(1 << 40, 0)], [slot; 2]);
    }

    proptest! {
        /// Whatever is queued finds somebody who may take it, a chunk at a time.
        #[test]
        fn the_least_loaded_channel_may_take_what_is_staged(
            queued in 0u64..1 << 40,
            backlogs in proptest::collection::vec(0u64..1 << 30, 1..64),
        ) {
            let least = backlogs.iter().copied().min().unwrap_or(0);
            prop_assert!(staged_share(queued, backlogs.iter().sum(), backlogs.len(), least) > 0);
        }
    }

    #[test]
    fn every_pair_of_nics_gets_as_many_channels() {
        assert_eq!(channels_default(2, 1), 2);
        assert_eq!(channels_default(2, 4), 4);
        assert_eq!(channels_default(208, 3), 18);
    }
}
