//! The rate of a NIC: one allowance per NIC and direction, shared by every comm on it.
//!
//! Invariant: over any time the bytes charged are at most rate x time plus one quantum per worker.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use crate::faults::Direction;
use crate::sync::locked;

/// Most bytes that one call may move under a rate.
const QUANTUM_BYTES_MAX: u64 = 64 << 10;
/// Number of calls per second on which the quantum is based.
const QUANTA_PER_S: u64 = 500;

/// Allowances by index of the device and direction (true for sending).
type Rates = HashMap<(usize, bool), Arc<Rate>>;
static NICS: LazyLock<Mutex<Rates>> = LazyLock::new(Mutex::default);

/// The allowance of one direction of a NIC.
#[derive(Debug)]
pub struct Rate {
    bytes_per_s: u64,
    free_at: Mutex<Instant>,
}

impl Rate {
    /// The allowance of a device, made at first use; `None` without a limit.
    pub fn of(device: usize, direction: Direction, bytes_per_s: u64) -> Option<Arc<Rate>> {
        let make = || Arc::new(Rate { bytes_per_s, free_at: Mutex::new(Instant::now()) });
        (bytes_per_s > 0).then(|| {
            let mut nics = locked(&NICS);
            let key = (device, direction == Direction::Send);
            nics.entry(key).or_insert_with(make).clone()
        })
    }

    /// Number of bytes that the next call may move.
    pub fn quantum(&self) -> usize {
        (self.bytes_per_s / QUANTA_PER_S).clamp(1, QUANTUM_BYTES_MAX) as usize
    }

    /// Charges bytes that were moved; the caller moves no more bytes before the time returned.
    pub fn charge(&self, bytes: usize) -> Instant {
        self.charge_at(bytes, Instant::now())
    }

    fn charge_at(&self, bytes: usize, now: Instant) -> Instant {
        let cost = Duration::from_nanos((bytes as u128 * 1_000_000_000 / self.bytes_per_s as u128) as u64);
        let mut free_at = locked(&self.free_at);
        *free_at = (*free_at).max(now) + cost;
        *free_at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn charges_add_up_and_idle_time_is_not_saved() {
        let start = Instant::now();
        let rate = Rate { bytes_per_s: 1000, free_at: Mutex::new(start) };
        assert_eq!(rate.charge_at(500, start), start + Duration::from_millis(500));
        assert_eq!(rate.charge_at(500, start), start + Duration::from_secs(1));
        let later = start + Duration::from_secs(9);
        assert_eq!(rate.charge_at(1000, later), later + Duration::from_secs(1));
    }

    #[test]
    fn comms_of_one_nic_share_an_allowance() {
        let send = Rate::of(3, Direction::Send, 1000).unwrap();
        assert!(Arc::ptr_eq(&send, &Rate::of(3, Direction::Send, 1000).unwrap()));
        assert!(!Arc::ptr_eq(&send, &Rate::of(3, Direction::Recv, 1000).unwrap()));
        assert!(Rate::of(3, Direction::Send, 0).is_none());
    }
}
