//! How many channels and progress threads an endpoint has, and how long an idle thread spins.
//!
//! Pure: numbers in, numbers out.
//! Read next: `transfer.rs`, which divides transfers among channels.

use crate::limits;
use std::time::Duration;

/// Default number of channels per peer: enough to busy every core and NIC pair, few enough to stay in the
/// cache.
pub fn channels_default(cores: usize, pairs: usize) -> usize {
    workers(cores).next_multiple_of(pairs.max(1)).min(limits::CHANNELS_MAX)
}

/// Default number of progress threads: one per core that can be kept busy.
pub fn threads_default(cores: usize) -> usize {
    workers(cores)
}

/// How long an idle progress thread spins before it sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spin {
    /// Spin time in general.
    pub usual: Duration,
    /// Spin time while [`is_deep_bulk`] holds.
    pub in_deep_bulk: Duration,
}

/// How long `threads` progress threads spin on a host with `cores` cores.
///
/// Waking a thread takes longer than sending 64 KiB, so where cores are spare a thread should wait for the
/// next of a few messages. In deep bulk a wake that is some microseconds late delays nothing, while spinning
/// costs half a core. Where threads share cores with other senders and receivers, yielding is the better way
/// to alternate.
pub fn spin(cores: usize, threads: usize) -> Spin {
    if cores >= 2 * threads.max(1) && cores > 4 { SPIN_ON_SPARE_CORES } else { SPIN }
}

/// Whether `bytes` in flight are several chunks for each channel.
pub fn is_deep_bulk(bytes: u64, channels: usize) -> bool {
    bytes >= channels as u64 * DEEP_BYTES
}

const SPIN: Spin = Spin { usual: Duration::from_micros(50), in_deep_bulk: Duration::from_micros(50) };
const SPIN_ON_SPARE_CORES: Spin = Spin { usual: Duration::from_micros(500), in_deep_bulk: Duration::ZERO };
const DEEP_BYTES: u64 = 2 << 20;

/// All cores of a small host, half of the cores of a large one; the rest is left to other work.
fn workers(cores: usize) -> usize {
    match cores {
        0..=8 => cores.max(1),
        _ => (cores / 2).clamp(8, 16),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn every_pair_of_nics_gets_as_many_channels() {
        assert_eq!(channels_default(2, 1), 2);
        assert_eq!(channels_default(2, 4), 4);
        assert_eq!(channels_default(208, 3), 18);
    }
}
