//! Formatting shared by messages for users.

use std::time::Duration;

/// Rounds a duration for a message: the rest of a limit of 30 s reads as `30s`, not `29.99999996s`.
pub fn rounded(duration: Duration) -> Duration {
    let unit_ns: u128 = match duration.as_nanos() {
        0..1_000_000 => 1000,
        1_000_000..10_000_000_000 => 1_000_000,
        _ => 100_000_000,
    };
    let units = (duration.as_nanos() + unit_ns / 2) / unit_ns;
    Duration::from_nanos(u64::try_from(units * unit_ns).unwrap_or(u64::MAX))
}
