//! Pairs of NICs over which the peer was unreachable.
//!
//! A comm needs ten seconds to detect such a pair, and NCCL makes hundreds of comms, many of them one after another.
//! The first comm to detect it does so for all: new comms leave the pair out for a while, or until no other pair works.
//! A pair's life: dialled -> unreachable, noted -> (a while passes | no other pair works) -> dialled.
//! Invariant: the number of noted pairs is bounded; a pair that is tried again is not noted any more.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{LazyLock, Mutex};
use std::time::{Duration, Instant};

use crate::comm::locked;
use crate::pairs::Pair;

/// Time for which new comms leave an unreachable pair out.
pub const LEFT_OUT_FOR: Duration = Duration::from_secs(60);
/// Most pairs that are noted; each comm detects further ones itself.
const NOTED_MAX: usize = 4096;

static NOTED: LazyLock<Mutex<Noted>> = LazyLock::new(Mutex::default);

/// The time at which a local address was found not to reach a remote one.
#[derive(Default)]
struct Noted(HashMap<(IpAddr, IpAddr), Instant>);

/// Notes that the peer was unreachable over this pair of NICs.
pub fn note(pair: &Pair) {
    locked(&NOTED).note(pair, Instant::now());
}

/// Whether the pair was found unreachable recently.
pub fn has(pair: &Pair) -> bool {
    locked(&NOTED).has(pair, Instant::now())
}

/// Forgets noted pairs, because they are tried again.
pub fn forget(pairs: &[Pair]) {
    let mut noted = locked(&NOTED);
    for pair in pairs {
        noted.0.remove(&key(pair));
    }
}

/// Splits pairs into those to dial and the spares, which are dialled only if none of the first works. If all pairs
/// are noted, all are dialled.
pub fn part(pairs: Vec<Pair>) -> (Vec<Pair>, Vec<Pair>) {
    let (spare, hopeful): (Vec<_>, Vec<_>) = pairs.into_iter().partition(has);
    if hopeful.is_empty() {
        forget(&spare);
        return (spare, hopeful);
    }
    (hopeful, spare)
}

impl Noted {
    fn note(&mut self, pair: &Pair, now: Instant) {
        self.0.retain(|_, since| is_recent(*since, now));
        if self.0.len() < NOTED_MAX || self.0.contains_key(&key(pair)) {
            self.0.insert(key(pair), now);
        }
    }

    fn has(&self, pair: &Pair, now: Instant) -> bool {
        self.0.get(&key(pair)).is_some_and(|since| is_recent(*since, now))
    }
}

fn is_recent(since: Instant, now: Instant) -> bool {
    now.duration_since(since) < LEFT_OUT_FOR
}

/// The addresses of a pair, without the port, which differs for each listener.
fn key(pair: &Pair) -> (IpAddr, IpAddr) {
    (pair.nic.address, pair.to.ip())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrywire_net::Nic;
    use std::net::SocketAddr;

    /// A pair of addresses, each given by its last number.
    fn pair(from: u16, to: u16, port: u16) -> Pair {
        let address = |net: u8, number: u16| IpAddr::from([10, net, (number >> 8) as u8, number as u8]);
        let nic = Nic {
            name: format!("eth{from}"),
            address: address(91, from),
            prefix_len: 16,
            speed_mbps: None,
            loopback: false,
            up: true,
        };
        Pair { nic, to: SocketAddr::new(address(92, to), port) }
    }

    #[test]
    fn a_pair_is_left_out_for_a_while_whatever_the_port() {
        let (mut noted, start) = (Noted::default(), Instant::now());
        noted.note(&pair(1, 1, 4000), start);
        let almost = start + LEFT_OUT_FOR - Duration::from_millis(1);
        assert!(noted.has(&pair(1, 1, 5000), almost));
        assert!(!noted.has(&pair(1, 2, 4000), almost) && !noted.has(&pair(2, 1, 4000), almost));
        assert!(!noted.has(&pair(1, 1, 4000), start + LEFT_OUT_FOR));
        // Tried again, without success.
        noted.note(&pair(1, 1, 4000), start + LEFT_OUT_FOR);
        assert!(noted.has(&pair(1, 1, 4000), almost + LEFT_OUT_FOR));
    }

    #[test]
    fn unreachable_paths_are_bounded_and_expire() {
        let (mut noted, start) = (Noted::default(), Instant::now());
        for to in 0..=NOTED_MAX as u16 {
            noted.note(&pair(1, to, 1), start);
        }
        assert_eq!(noted.0.len(), NOTED_MAX);
        // A pair that is found unreachable again stays noted for longer.
        let later = start + LEFT_OUT_FOR / 2;
        noted.note(&pair(1, 0, 1), later);
        assert!(
            noted.has(&pair(1, 0, 1), start + LEFT_OUT_FOR)
                && !noted.has(&pair(1, 1, 1), start + LEFT_OUT_FOR)
        );
        noted.note(&pair(2, 2, 1), later + LEFT_OUT_FOR);
        assert_eq!(noted.0.len(), 1);
    }

    #[test]
    fn if_all_paths_are_unreachable_all_are_tried_again() {
        let pairs = [pair(3, 3, 1), pair(4, 4, 1)];
        note(&pairs[1]);
        assert_eq!(part(pairs.to_vec()), (vec![pairs[0].clone()], vec![pairs[1].clone()]));
        note(&pairs[0]);
        assert_eq!(part(pairs.to_vec()), (pairs.to_vec(), vec![]));
        assert!(!has(&pairs[0]) && !has(&pairs[1]));
    }
}
