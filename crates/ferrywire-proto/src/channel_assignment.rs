//! Which NIC carries each channel of a peer: evenly, or by speed where the speeds of all NICs are known.
//!
//! Both the engine, when it connects, and the topology plan that users see call this function.
//! Read next: the engine's `control/pairs.rs`, which makes the list of NIC pairs; the crate `ferrywire-host`.

/// Assigns `channels` channels to NICs with these speeds in Mbit/s; returns the index of a NIC for each
/// channel. Among equal NICs the one at `first` comes first, the others follow in order.
///
/// A NIC without a channel comes before all NICs that have one, so a slow NIC carries less but is never left
/// out.
pub fn spread(speeds_mbps: &[Option<u32>], first: usize, channels: usize) -> Vec<usize> {
    let count = speeds_mbps.len();
    let reported: Option<Vec<u64>> = speeds_mbps.iter().map(|speed| speed.map(u64::from)).collect();
    let speeds = reported.unwrap_or_else(|| vec![1; count]);
    let fastest = speeds.iter().copied().max().unwrap_or(1);
    // Load that one channel adds to a NIC, relative to 1000 on the fastest NIC.
    let weights: Vec<u64> = speeds.iter().map(|speed| fastest * 1000 / (*speed).max(1)).collect();
    let mut own = vec![0u64; count];
    let mut assigned = Vec::with_capacity(channels);
    for _ in 0..channels {
        let load = |at: &usize| (own[*at] > 0, (own[*at] + 1) * weights[*at]);
        let Some(at) = (0..count).map(|at| (first + at) % count).min_by_key(load) else { break };
        own[at] += 1;
        assigned.push(at);
    }
    assigned
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equals_take_turns_from_the_first_on() {
        for speeds in [[None; 3], [Some(10); 3], [Some(10), None, Some(1000)]] {
            assert_eq!(spread(&speeds, 0, 7), [0, 1, 2, 0, 1, 2, 0]);
            assert_eq!(spread(&speeds, 7421, 4), [2, 0, 1, 2], "{speeds:?}");
        }
        assert_eq!(spread(&[], 3, 2), [0usize; 0]);
        assert_eq!(spread(&[None], 3, 2), [0, 0]);
    }

    #[test]
    fn a_faster_nic_takes_more_and_a_slow_one_something() {
        let count = |first, channels| {
            let dealt = spread(&[Some(200_000), Some(50_000)], first, channels);
            [0, 1].map(|nic| dealt.iter().filter(|at| **at == nic).count())
        };
        assert_eq!([count(0, 1), count(0, 2), count(0, 5), count(0, 10)], [[1, 0], [1, 1], [4, 1], [8, 2]]);
        assert_eq!(count(0, 8), [7, 1]);
        assert_eq!(spread(&[Some(0), Some(1)], 0, 3).len(), 3, "a speed of nothing is no speed to divide by");
    }
}
