//! What messages for people have in common.

use std::time::Duration;

/// A duration as messages have it: what is left of a limit of 30 s reads as `30s`, not `29.99999996s`.
pub fn rounded(duration: Duration) -> Duration {
    let unit_ns: u128 = match duration.as_nanos() {
        0..1_000_000 => 1000,
        1_000_000..10_000_000_000 => 1_000_000,
        _ => 100_000_000,
    };
    let units = (duration.as_nanos() + unit_ns / 2) / unit_ns;
    Duration::from_nanos(u64::try_from(units * unit_ns).unwrap_or(u64::MAX))
}
