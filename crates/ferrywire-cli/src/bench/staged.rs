//! Staging between GPUs and sockets in the timed part: seconds by stage, driver calls, pinned memory.
//!
//! Seconds are sums over channels and, in a result, over both ends. Stages overlap, so their sum exceeds the elapsed
//! time.
//! Read next: `ferrywire::StagingStats`, the counters.

use std::collections::BTreeMap;
use std::time::Duration;

use ferrywire::{PeerStats, StagingStats};
use serde_json::{Value, json};

use super::protocol::{SideReport, Staged};
use super::result::ResultRow;
use crate::units::Bytes;

/// One end's staging between two moments.
pub fn between(before: &PeerStats, now: &PeerStats) -> Option<Staged> {
    let stages = now.channels.iter().filter_map(|channel| {
        let before = before.channels.iter().find(|c| c.index == channel.index);
        Some(since(channel.staging.as_ref()?, before.and_then(|before| before.staging.as_ref())))
    });
    stages.reduce(sum)
}

fn since(now: &StagingStats, before: Option<&StagingStats>) -> Staged {
    let count = |of: fn(&StagingStats) -> u64| of(now).saturating_sub(before.map_or(0, of));
    let seconds = |of: fn(&StagingStats) -> Duration| {
        of(now).saturating_sub(before.map_or(Duration::ZERO, of)).as_secs_f64()
    };
    Staged {
        pinned_bytes: now.pinned_bytes,
        bytes: count(|s| s.sent_bytes) + count(|s| s.received_bytes),
        d2h_s: seconds(|s| s.d2h),
        socket_s: seconds(|s| s.socket),
        h2d_s: seconds(|s| s.h2d),
        waiting_s: seconds(|s| s.send_ring_full_time) + seconds(|s| s.receive_ring_full_time),
        driver_calls: count(|s| s.driver_calls),
    }
}

fn sum(a: Staged, b: Staged) -> Staged {
    Staged {
        pinned_bytes: a.pinned_bytes + b.pinned_bytes,
        bytes: a.bytes + b.bytes,
        d2h_s: a.d2h_s + b.d2h_s,
        socket_s: a.socket_s + b.socket_s,
        h2d_s: a.h2d_s + b.h2d_s,
        waiting_s: a.waiting_s + b.waiting_s,
        driver_calls: a.driver_calls + b.driver_calls,
    }
}

fn of(reports: &[SideReport]) -> Option<Staged> {
    reports.iter().filter_map(|report| report.staged).reduce(sum)
}

/// Seconds by stage of a result, for the stages that occurred.
pub fn stages_s(members: &[SideReport], serve: &[SideReport]) -> BTreeMap<String, f64> {
    let Some(all) = of(members).into_iter().chain(of(serve)).reduce(sum) else { return BTreeMap::new() };
    let stages =
        [("d2h", all.d2h_s), ("socket", all.socket_s), ("h2d", all.h2d_s), ("waiting", all.waiting_s)];
    stages.into_iter().map(|(name, seconds)| (name.to_owned(), seconds)).collect()
}

/// Further fields of a result about staging.
pub fn staging_fields(members: &[SideReport], serve: &[SideReport]) -> Option<Value> {
    let (here, there) = (of(members), of(serve));
    here.or(there)?;
    let pinned = |end: Option<Staged>| end.map_or(0, |end| end.pinned_bytes);
    Some(json!({
        "pinned_bytes": pinned(here),
        "peer_pinned_bytes": pinned(there),
        "driver_calls_per_gb": here.and_then(calls_per_gb),
        "peer_driver_calls_per_gb": there.and_then(calls_per_gb),
    }))
}

fn calls_per_gb(end: Staged) -> Option<f64> {
    (end.bytes > 0).then(|| end.driver_calls as f64 / (end.bytes as f64 / 1e9))
}

/// A line of text about a result's staging.
pub fn line(row: &ResultRow) -> Option<String> {
    let reported = row.extra.get("staging")?;
    let seconds = |name: &str| row.stages_s.get(name).copied().unwrap_or(0.0);
    let end =
        |bytes: &str, calls: &str| match (reported[bytes].as_u64().unwrap_or(0), reported[calls].as_f64()) {
            (0, _) => "no staging ring".to_owned(),
            (bytes, None) => format!("{} pinned", Bytes(bytes)),
            (bytes, Some(calls)) => format!("{} pinned, {calls:.0} driver calls per GB", Bytes(bytes)),
        };
    Some(format!(
        "staging in {:.2} s, summed over channels: d2h {:.2} s, socket {:.2} s, h2d {:.2} s, waiting {:.2} s; this end \
         {}; peer {}",
        seconds("timed"),
        seconds("d2h"),
        seconds("socket"),
        seconds("h2d"),
        seconds("waiting"),
        end("pinned_bytes", "driver_calls_per_gb"),
        end("peer_pinned_bytes", "peer_driver_calls_per_gb"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(bytes: u64, seconds: f64) -> SideReport {
        let staged =
            Staged { pinned_bytes: 2 << 20, bytes, d2h_s: seconds, driver_calls: 30, ..Staged::default() };
        SideReport { staged: Some(staged), ..SideReport::default() }
    }

    #[test]
    fn both_ends_and_all_peers_add_up() {
        let (members, serve) =
            ([report(3_000_000_000, 1.0), report(3_000_000_000, 0.5)], [SideReport::default()]);
        let stages = stages_s(&members, &serve);
        assert_eq!((stages["d2h"], stages["h2d"]), (1.5, 0.0));
        let reported = staging_fields(&members, &serve).expect("something was staged");
        assert_eq!((&reported["pinned_bytes"], &reported["peer_pinned_bytes"]), (&json!(4 << 20), &json!(0)));
        assert_eq!(
            (&reported["driver_calls_per_gb"], &reported["peer_driver_calls_per_gb"]),
            (&json!(10.0), &json!(null))
        );
    }

    #[test]
    fn without_staging_nothing_is_reported() {
        let none = [SideReport::default()];
        assert!(stages_s(&none, &none).is_empty() && staging_fields(&none, &none).is_none());
    }
}
