//! The meaning of `ferrywire watch`'s flags.
//!
//! Read next: [`crate::watch`].

use std::time::Duration;

use super::seconds;
use crate::args::WatchFlags;
use crate::exit::Outcome;

/// Time between two samples of `watch`, in seconds.
const WATCH_INTERVAL_S_DEFAULT: f64 = 1.0;

/// The plan of `watch`.
#[derive(Clone, Debug)]
pub struct WatchPlan {
    /// Whether to print once and end.
    pub once: bool,
    /// Whether to print JSON.
    pub json: bool,
    /// Time between two samples.
    pub interval: Duration,
    /// Whether to print a row per channel.
    pub verbose: bool,
}

pub(super) fn plan(flags: &WatchFlags, verbose: bool) -> Outcome<WatchPlan> {
    let WatchFlags { once, json, interval } = *flags;
    let interval = seconds("--interval", interval)?.unwrap_or(WATCH_INTERVAL_S_DEFAULT);
    Ok(WatchPlan { once, json, interval: Duration::from_secs_f64(interval), verbose })
}
