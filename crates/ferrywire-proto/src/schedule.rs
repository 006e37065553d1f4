//! How many channels and progress threads an endpoint has, how long an idle thread spins, and which channel
//! takes the next chunk.
//!
//! Channels pull: each takes the next chunk when it is ready, so a fast NIC carries more and a slow one less,
//! without a plan that could be wrong. A channel whose backlog is much longer than the others' leaves the rest
//! of a transfer to them, which keeps the end of the transfer short.
//!
//! Pure: numbers in, numbers out.
//! Read next: `outbox/`, which cuts the chunks.

use crate::limits;
use std::time::Duration;

/// Default number of channels per peer: enough to busy every core and NIC pair, few enough to stay in the
/// cache. A long path has more than cores need: the socket buffers of each channel hold only a part of what is under
/// way.
pub fn channels_default(cores: usize, pairs: usize, round_trip: Duration) -> usize {
    let least = if round_trip >= LONG_PATH_ROUND_TRIP { LONG_PATH_CHANNELS } else { 1 };
    workers(cores).next_multiple_of(pairs.max(1)).max(least).min(limits::CHANNELS_MAX)
}

/// Shortest round trip of a long path. Two channels, each with 6 MB under way, still carry 19 Gbit/s over it.
const LONG_PATH_ROUND_TRIP: Duration = Duration::from_millis(5);
/// Fewest channels over a long path. With a round trip of 50 ms, 5 Gbit/s and one segment of 1,000 lost, two cores carry 0.23
/// GB/s over 2 channels, 0.58 over 8 and 0.48 over 16. More would also take more memory for buffers.
const LONG_PATH_CHANNELS: usize = 8;

/// Default number of progress threads: one per core that can be kept busy.
pub fn threads_default(cores: usize) -> usize {
    workers(cores)
}

/// How long an idle progress thread spins before it sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spin {
    /// Spin time of a progress thread that neither stages nor moves deep bulk.
    pub usual: Duration,
    /// Spin time of a thread with channels that stage payload of GPUs: the end of a copy raises no event.
    pub with_staging: Duration,
    /// Spin time while [`is_deep_bulk`] holds.
    pub in_deep_bulk: Duration,
}

/// How long `threads` progress threads spin on a host with `cores` cores.
///
/// Waking a thread takes about as long as sending 64 KiB, so a thread waits that long for the next of a few
/// messages, and longer for a copy unless few cores have to do all the work. In deep bulk a wake that is some
/// microseconds late delays nothing, while spinning costs half a core. Where threads share cores with other
/// senders and receivers, yielding is the better way to alternate.
pub fn spin(cores: usize, threads: usize) -> Spin {
    let in_deep_bulk = if has_spare_cores(cores, threads) { Duration::ZERO } else { SPIN_TIME };
    let with_staging = if works_in_long_runs(cores, threads) { COPY_SPIN_TIME } else { SPIN_TIME };
    Spin { usual: SPIN_TIME, with_staging, in_deep_bulk }
}

/// Bytes of operations taken in order that make a channel busy, so that the next channel helps. `is_protected` says whether
/// payload travels in records.
///
/// Channels fill up in order. Few messages then keep few threads busy, and the other threads sleep. With many
/// cores or spare ones, these threads rarely have to wait for a core, and work best on long runs. Elsewhere the
/// two ends of a channel share a core, and alternate better in short ones. Records cost a thread more time per byte, so
/// spare cores help sooner: on 32 cores they carry 64 KiB messages at 23 instead of 17 GB/s for a fifth more CPU time.
pub fn fill_bytes(cores: usize, threads: usize, is_protected: bool) -> u64 {
    let saves_time = is_protected && has_spare_cores(cores, threads);
    if works_in_long_runs(cores, threads) && !saves_time { FILL_BYTES_IN_LONG_RUNS } else { FILL_BYTES }
}

/// Whether staging rings use half of their bytes while payload goes in both directions between two ends of this
/// host, over so many channels.
///
/// The rings of many channels do not fit into the cache, and each copy from memory that has left it takes longer.
/// In one direction half of the rings is unused, and whole rings are better: a ring of two slots often waits for
/// one of them.
pub fn has_short_rings(channels: usize) -> bool {
    channels > FEW_CHANNELS
}

fn works_in_long_runs(cores: usize, threads: usize) -> bool {
    has_spare_cores(cores, threads) || (cores > FEW_CORES && threads <= cores)
}

fn has_spare_cores(cores: usize, threads: usize) -> bool {
    if cores > FEW_CORES { cores > threads } else { cores > 4 && cores >= 2 * threads.max(1) }
}

/// Up to so many cores, all of them are busy at both ends of a fast transfer within a host.
const FEW_CORES: usize = 8;
/// With more channels than this the rings of both directions and both ends have more than 128 MiB together.
const FEW_CHANNELS: usize = 8;

/// Whether `bytes` in flight are several chunks for each channel.
pub fn is_deep_bulk(bytes: u64, channels: usize) -> bool {
    bytes >= channels as u64 * DEEP_BYTES
}

const SPIN_TIME: Duration = Duration::from_micros(50);
const COPY_SPIN_TIME: Duration = Duration::from_micros(500);
/// Bytes per channel of deep bulk.
pub const DEEP_BYTES: u64 = 2 << 20;

/// Default number of progress threads: one per core up to 16. A large host keeps its other cores for other work.
fn workers(cores: usize) -> usize {
    cores.clamp(1, 16)
}

/// What a channel or a thread moved: bytes of the stream, and frames other than acknowledgements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes sent.
    pub sent_bytes: u64,
    /// Frames sent.
    pub sent_frames: u64,
    /// Bytes received.
    pub received_bytes: u64,
    /// Frames received.
    pub received_frames: u64,
}

impl Traffic {
    /// The sum of the traffic of two channels.
    pub fn plus(self, other: Traffic) -> Traffic {
        Traffic {
            sent_bytes: self.sent_bytes.saturating_add(other.sent_bytes),
            sent_frames: self.sent_frames.saturating_add(other.sent_frames),
            received_bytes: self.received_bytes.saturating_add(other.received_bytes),
            received_frames: self.received_frames.saturating_add(other.received_frames),
        }
    }

    /// What was moved since `before`, an earlier sum.
    pub fn since(self, before: Traffic) -> Traffic {
        Traffic {
            sent_bytes: self.sent_bytes.saturating_sub(before.sent_bytes),
            sent_frames: self.sent_frames.saturating_sub(before.sent_frames),
            received_bytes: self.received_bytes.saturating_sub(before.received_bytes),
            received_frames: self.received_frames.saturating_sub(before.received_frames),
        }
    }

    /// Bytes in both directions.
    pub fn bytes(self) -> u64 {
        self.sent_bytes.saturating_add(self.received_bytes)
    }
}

/// How often it is decided anew whether a progress thread is pinned.
pub const PIN_INTERVAL: Duration = Duration::from_millis(50);

/// Whether each of so many threads is always pinned, on a host with as many cores.
pub fn always_pins(threads: usize) -> bool {
    threads <= FEW_CORES
}

/// Whether a thread with `traffic` in the last `time` is pinned to the core of the thread at the other end of its
/// channels.
///
/// The two threads then alternate on the core, and the payload stays in its cache: less CPU time per byte. They
/// cannot work at the same time, so shorter frames are slower in both directions at once, and the shortest always.
pub fn pins(traffic: Traffic, time: Duration) -> bool {
    let Traffic { sent_bytes, sent_frames, received_bytes, received_frames } = traffic;
    let (more, less) = (sent_bytes.max(received_bytes), sent_bytes.min(received_bytes));
    let frames_of_more = if sent_bytes > received_bytes { sent_frames } else { received_frames };
    let mean = |bytes: u64, frames: u64| bytes / frames.max(1);
    let is_bulk = u128::from(traffic.bytes()) >= u128::from(BULK_RATE) * time.as_millis() / 1000;
    let one_way = less <= more / 8 && mean(more, frames_of_more) >= LONG_FRAME_BYTES;
    let both_ways = mean(traffic.bytes(), sent_frames + received_frames) >= LONG_FRAME_BYTES_BOTH_WAYS;
    !time.is_zero() && is_bulk && (one_way || both_ways)
}

/// Least bytes per second of a thread in bulk.
const BULK_RATE: u64 = 80 << 20;
const LONG_FRAME_BYTES: u64 = 32 << 10;
const LONG_FRAME_BYTES_BOTH_WAYS: u64 = 200 << 10;

/// Whether a channel with `backlog` unacknowledged bytes may take another chunk, when the least loaded live
/// channel of the peer has `least`.
///
/// A channel that is far ahead of the others waits until they catch up.
pub fn may_take(backlog: u64, least: u64, chunk_bytes_max: usize) -> bool {
    backlog <= least.saturating_add(SPREAD_CHUNKS * chunk_bytes_max as u64)
}

/// Backlog, in chunks, by which a channel may be ahead of the least loaded one.
const SPREAD_CHUNKS: u64 = 8;

/// Bytes of operations taken in order that a channel with `backlog` bytes may take now from the peer's queue, once all
/// channels before it are busy. `least` is the backlog of the least loaded channel, `fill` the result of
/// [`fill_bytes`].
pub fn ordered_share(backlog: u64, least: u64, fill: u64) -> u64 {
    least.saturating_add(fill).saturating_sub(backlog)
}

/// Whether a channel with `backlog` bytes has room for operations taken in order, so that channels after it must leave them
/// to it. Half of `fill` is enough to keep the channel busy until it takes more.
pub fn has_ordered_room(backlog: u64, fill: u64) -> bool {
    backlog < fill / 2
}

const FILL_BYTES: u64 = 256 << 10;
const FILL_BYTES_IN_LONG_RUNS: u64 = 512 << 10;

/// Bytes of bulk that a channel within this host may take now, and its longest chunk in bytes. `sharing`
/// channels of one thread each have such a bound. `cached` is [`InCache::in_flight_bytes`], or more where no
/// cache is shared.
///
/// The threads at the two ends alternate on a core or share a cache, which holds the bytes in flight between
/// them. A bound no larger than the socket buffers keeps these bytes in the cache. It also lets the kernel
/// take each call whole. A partial call ends at an odd byte; the kernel copies sent bytes into pages that all
/// connections of a thread share, so all later bytes are misaligned and are copied out at half the speed. A
/// staging end adds its ring to the bound, since bytes wait there while they are copied. Staged payload comes from memory,
/// so `cached` does not bound it.
pub fn local_share(
    in_flight: u64,
    sharing: usize,
    ends_staged: u64,
    cached: u64,
    chunk_bytes_max: usize,
) -> (u64, usize) {
    let local = local_bytes(sharing).min(if ends_staged == 0 { cached } else { u64::MAX });
    let bound = local + ends_staged * limits::STAGING_OUT_RING_BYTES as u64;
    (bound.saturating_sub(in_flight), chunk_bytes_max.min(local as usize / 2))
}

/// Bytes of bulk in flight on each of `sharing` channels between two threads of one host; also the size of
/// their socket buffers.
pub fn local_bytes(sharing: usize) -> u64 {
    (LOCAL_BYTES / sharing.max(1) as u64).max(LOCAL_BYTES_MIN)
}

/// How many bytes of bulk lie between two threads of one host where no payload is staged, so that they stay in the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InCache {
    /// Bytes in flight from which a thread takes no more bulk out of order.
    pub in_flight_bytes: u64,
    /// Longest chunk in bytes of an operation that channels take in order.
    pub whole_bytes: u64,
}

impl InCache {
    /// The bytes on a host of `cores` cores with `threads` threads per endpoint, where a core's level 2 cache has `level_2`
    /// bytes.
    ///
    /// Two threads that alternate on a core have the bytes of the source, the kernel's copy and the target in its level 2
    /// cache, each thread on a core of its own only two of the three. With 2 MiB, 512 KiB in flight carry up to twice as
    /// much on shared cores as 1 MiB, for less CPU time. Where a cache holds less, more frequent changes between the
    /// threads cost more than it saves: the bytes then stay in level 3.
    pub fn new(level_2: Option<u64>, cores: usize, threads: usize) -> InCache {
        let quarter = level_2.unwrap_or(0) / 4;
        if quarter < LOCAL_BYTES_MIN {
            return InCache { in_flight_bytes: LOCAL_BYTES, whole_bytes: LOCAL_BYTES };
        }
        let in_flight_bytes = if has_spare_cores(cores, threads) { 2 * quarter } else { quarter };
        InCache { in_flight_bytes: in_flight_bytes.min(LOCAL_BYTES), whole_bytes: quarter.min(LOCAL_BYTES) }
    }
}

/// Bytes of bulk in flight between two threads of one host, divided among their channels; one channel has at
/// least `LOCAL_BYTES_MIN`.
const LOCAL_BYTES: u64 = 2 << 20;
const LOCAL_BYTES_MIN: u64 = 512 << 10;

/// Bytes of bulk that a channel with `backlog` bytes may take where payload is staged: an equal share of the
/// queue and of the backlogs of all `channels`.
///
/// Copies start long before the first byte can be sent. Without this bound a channel would take much more
/// than it sends, and a few channels would take everything.
pub fn staged_share(queued: u64, backlog_of_all: u64, channels: usize, backlog: u64) -> u64 {
    if queued == 0 {
        // A queue without bytes holds a notification that follows bytes cut earlier; any channel may take it.
        return 1;
    }
    // Rounded up, so that the least loaded channel may always take some.
    queued.saturating_add(backlog_of_all).div_ceil(channels.max(1) as u64).saturating_sub(backlog)
}

/// Shortest and longest chunk of staged payload in bytes. `in_flight` bytes are queued or in flight; `alone`
/// says that they belong to one operation.
///
/// With several operations a channel copies half of its share while the other half is on the wire. The size
/// is a whole number of steps, so no message leaves a small rest for a chunk of its own: each chunk costs the
/// GPU some time. A single operation waits for the copies of its first and last chunk, so it is cut finely.
pub fn staged_chunk_bytes(in_flight: u64, alone: bool, channels: usize) -> (usize, usize) {
    let (step, longest) = (limits::STAGING_CHUNK_BYTES_MIN, limits::STAGING_SLOT_BYTES);
    if alone {
        return (step, limits::STAGING_BATCH_BYTES);
    }
    let half = (in_flight / channels.max(1) as u64 / 2).min(longest as u64) as usize;
    (half.next_multiple_of(step).clamp(step, longest), longest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn hosts_have_a_thread_for_each_core_up_to_16() {
        let threads = [0, 1, 2, 8, 12, 16, 24, 32, 208].map(threads_default);
        assert_eq!(threads, [1, 1, 2, 8, 12, 16, 16, 16, 16]);
    }

    #[test]
    fn a_thread_is_pinned_in_bulk_of_long_frames() {
        let second = Duration::from_secs(1);
        let sends = |gigabytes: u64, frame: u64| Traffic {
            sent_bytes: gigabytes << 30,
            sent_frames: (gigabytes << 30) / frame,
            ..Traffic::default()
        };
        let received = |traffic: Traffic| Traffic {
            received_bytes: traffic.sent_bytes,
            received_frames: traffic.sent_frames,
            ..Traffic::default()
        };
        let both = |frame| sends(1, frame).plus(received(sends(1, frame)));
        for one_way in [sends(1, 64 << 10), received(sends(1, 64 << 10)), sends(1, 1 << 20)] {
            assert!(pins(one_way, second));
            assert!(!pins(one_way, 20 * second), "the thread has little to do");
        }
        assert!(!pins(sends(1, 4 << 10), second) && !pins(received(sends(1, 4 << 10)), second));
        assert!(!pins(both(64 << 10), second) && pins(both(1 << 20), second));
        // The requests of reads are few bytes against their answers.
        assert!(pins(sends(8, 64 << 10).plus(received(sends(1, 64))), second));
        assert!(!pins(Traffic::default(), second) && !pins(sends(1, 1 << 20), Duration::ZERO));
    }

    #[test]
    fn threads_wait_for_copies_for_long_where_cores_are_many_or_spare() {
        assert!(spin(8, 4).with_staging > spin(8, 5).with_staging);
        assert_eq!(spin(16, 16).with_staging, spin(32, 16).with_staging);
        assert!(spin(16, 17).with_staging < spin(16, 16).with_staging);
        assert!(spin(17, 16).in_deep_bulk < spin(16, 16).in_deep_bulk);
        let usual = Spin { usual: SPIN_TIME, with_staging: SPIN_TIME, in_deep_bulk: SPIN_TIME };
        assert_eq!([spin(2, 1), spin(2, 2), spin(8, 8), spin(1, 0)], [usual; 4]);
    }

    #[test]
    fn a_channel_that_has_filled_up_is_busy_until_half_of_that_is_acknowledged() {
        for fill in [fill_bytes(8, 8, false), fill_bytes(32, 16, false)] {
            assert_eq!(ordered_share(0, 0, fill), fill);
            assert!(has_ordered_room(0, fill) && has_ordered_room(fill / 2 - 1, fill));
            assert!(!has_ordered_room(fill / 2, fill) && ordered_share(fill / 2, 0, fill) > 0);
            // Once all channels are busy, all of them may take more.
            assert_eq!(ordered_share(fill, fill, fill), fill);
        }
        assert!(
            fill_bytes(8, 4, false) > fill_bytes(8, 5, false)
                && fill_bytes(9, 9, false) > fill_bytes(8, 8, false)
        );
        assert!(fill_bytes(32, 16, true) < fill_bytes(32, 16, false), "records cost time");
        assert_eq!(fill_bytes(16, 16, true), fill_bytes(16, 16, false), "no core is spare");
    }

    #[test]
    fn rings_are_short_where_many_channels_share_the_cache() {
        assert!(has_short_rings(16) && !has_short_rings(8));
    }

    #[test]
    fn in_bulk_a_channel_has_several_chunks() {
        assert!(!is_deep_bulk(16 << 20, 16), "a message of 1 MiB for each of 16 channels");
        assert!(is_deep_bulk(64 << 20, 16) && is_deep_bulk(4 << 20, 1));
    }

    #[test]
    fn every_pair_of_nics_gets_as_many_channels() {
        let near = Duration::from_micros(100);
        assert_eq!(channels_default(2, 1, near), 2);
        assert_eq!(channels_default(2, 4, near), 4);
        assert_eq!(channels_default(208, 3, near), 18);
    }

    #[test]
    fn a_long_path_has_as_many_channels_as_its_buffers_need() {
        assert_eq!(channels_default(2, 1, LONG_PATH_ROUND_TRIP), 8);
        assert_eq!(channels_default(2, 5, LONG_PATH_ROUND_TRIP), 8, "most of the NICs lead elsewhere");
        assert_eq!(channels_default(32, 1, LONG_PATH_ROUND_TRIP), 16);
        assert_eq!(channels_default(2, 1, LONG_PATH_ROUND_TRIP - Duration::from_micros(1)), 2);
        assert_eq!(channels_default(2, 1, Duration::ZERO), 2, "the round trip is unknown");
    }

    #[test]
    fn within_a_host_one_chunk_is_under_way_while_the_next_is_taken() {
        for (sharing, cached) in
            [(0, 2 << 20), (1, 2 << 20), (1, 512 << 10), (2, 1 << 20), (4, 1 << 20), (64, 2 << 20)]
        {
            let (share, chunk) = local_share(0, sharing, 0, cached, limits::CHUNK_BYTES_MAX);
            assert_eq!(share, 2 * chunk as u64);
            assert!(share <= cached);
            let second = local_share(chunk as u64, sharing, 0, cached, limits::CHUNK_BYTES_MAX);
            assert_eq!(second, (share / 2, chunk));
            assert_eq!(local_share(share + 1, sharing, 0, cached, 4096), (0, 4096));
            let staged = local_bytes(sharing) + 2 * limits::STAGING_OUT_RING_BYTES as u64;
            assert_eq!(local_share(0, sharing, 2, cached, 4096), (staged, 4096));
        }
        assert!(local_bytes(4) < local_bytes(1) && local_bytes(64) == local_bytes(4));
    }

    #[test]
    fn bytes_between_threads_stay_in_a_level_2_cache_that_holds_enough_of_them() {
        let in_cache = |level_2, cores, threads| {
            let InCache { in_flight_bytes, whole_bytes } = InCache::new(level_2, cores, threads);
            (in_flight_bytes >> 10, whole_bytes >> 10)
        };
        for level_2 in [None, Some(0), Some(1 << 20)] {
            assert_eq!([in_cache(level_2, 2, 2), in_cache(level_2, 32, 16)], [(2048, 2048); 2]);
        }
        assert_eq!([in_cache(Some(2 << 20), 2, 2), in_cache(Some(2 << 20), 16, 16)], [(512, 512); 2]);
        assert_eq!(in_cache(Some(2 << 20), 32, 16), (1024, 512));
        assert_eq!(in_cache(Some(64 << 20), 32, 16), (2048, 2048));
    }

    #[test]
    fn staged_bytes_are_shared_equally() {
        assert_eq!(staged_share(1 << 20, 0, 4, 0), 256 << 10);
        // A channel with more than the others waits until they have as much.
        assert_eq!(staged_share(1 << 20, 8 << 20, 4, 8 << 20), 0);
        assert_eq!(staged_share(1 << 20, 8 << 20, 4, 0), 9 << 18);
        // A single channel may take everything.
        assert_eq!(staged_share(1 << 30, 0, 1, 0), 1 << 30);
    }

    #[test]
    fn one_operation_is_cut_finely_and_many_are_not() {
        let (finest, slot) = (limits::STAGING_CHUNK_BYTES_MIN, limits::STAGING_SLOT_BYTES);
        let shortest = |in_flight, channels| staged_chunk_bytes(in_flight, false, channels).0;
        assert_eq!(staged_chunk_bytes(1 << 40, true, 16), (finest, slot / 2));
        assert_eq!(staged_chunk_bytes(0, false, 16), (finest, slot));
        assert_eq!(shortest(16 << 20, 16), 512 << 10);
        // When one of 16 messages of 1 MiB has just ended, the next are not cut into 480, 480 and 64 KiB.
        assert_eq!(shortest(15 << 20, 16), 512 << 10);
        assert_eq!([shortest(1 << 40, 16), shortest(1 << 40, 0)], [slot; 2]);
    }

    proptest! {
        #[test]
        fn the_least_loaded_channel_may_always_take(backlog: u64, chunk in 1usize..1 << 22) {
            prop_assert!(may_take(backlog, backlog, chunk));
        }

        /// At least one channel may take a chunk whenever bytes are queued.
        #[test]
        fn the_least_loaded_channel_may_take_what_is_staged(
            queued in 0u64..1 << 40,
            backlogs in proptest::collection::vec(0u64..1 << 30, 1..64),
        ) {
            let least = backlogs.iter().copied().min().unwrap_or(0);
            prop_assert!(staged_share(queued, backlogs.iter().sum(), backlogs.len(), least) > 0);
        }
    }
}
