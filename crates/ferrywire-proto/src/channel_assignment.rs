//! Which NIC each channel of a peer goes over: evenly, or by speed where every NIC tells its own.
//!
//! The engine deals so when it connects, and a topology's plan shows it: this is the one place for both.
//! Read next: the engine's `control/pairs.rs`, for what is dealt to; the crate `ferrywire-host`.

/// For each of so many channels the NIC, by its place among those with these speeds. Of equals the one at `first` comes
/// first, and the others follow in their order.
///
/// A NIC that has no channel yet goes before all that have: a slow one only takes less, it is not left out.
pub fn spread(speeds_mbps: &[Option<u32>], first: usize, channels: usize) -> Vec<usize> {
    let count = speeds_mbps.len();
    let told: Option<Vec<u64>> = speeds_mbps.iter().map(|speed| speed.map(u64::from)).collect();
    let speeds = told.unwrap_or_else(|| vec![1; count]);
    let fastest = speeds.iter().copied().max().unwrap_or(1);
    // What one channel weighs there, beside 1000 on the fastest.
    let weights: Vec<u64> = speeds.iter().map(|speed| fastest * 1000 / (*speed).max(1)).collect();
    let mut own = vec![0u64; count];
    let mut dealt = Vec::with_capacity(channels);
    for _ in 0..channels {
        let load = |at: &usize| (own[*at] > 0, (own[*at] + 1) * weights[*at]);
        let Some(at) = (0..count).map(|at| (first + at) % count).min_by_key(load) else { break };
        own[at] += 1;
        dealt.push(at);
    }
    dealt
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
