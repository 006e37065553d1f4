//! How long a peer's kernel has owed us an answer.
//!
//! The kernel tells for how long the peer has been silent, which by itself is no evidence: after an idle
//! minute it is a minute when the first packet is lost, and a peer that keeps its window shut is asked
//! again only after ever longer waits. So silence counts from the first look that found us waiting.
//! A watch's life: idle -> waiting -> idle; looks that are far apart begin a new wait.
//! Invariant: silence is never reported longer than the kernel has seen it, nor longer than we waited.

use std::time::Duration;

use crate::PathHealth;
use ferrywire_proto::limits::PATH_CHECK_INTERVAL;
use ferrywire_sys::tcp_info::TcpInfo;

/// Looks further apart than this say nothing about the time between them.
const LOOKS_APART_MAX: Duration = Duration::from_millis(500);
const _: () = assert!(LOOKS_APART_MAX.as_millis() >= 2 * PATH_CHECK_INTERVAL.as_millis());

/// What earlier looks at a connection have found.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Watch {
    looked_at: Duration,
    waiting_since: Option<Duration>,
}

impl Watch {
    /// Takes in what the kernel says now.
    pub(super) fn look(&mut self, now: Duration, info: &TcpInfo) -> PathHealth {
        let apart = now.saturating_sub(self.looked_at);
        self.looked_at = now;
        let since = self.waiting_since.filter(|_| apart <= LOOKS_APART_MAX).unwrap_or(now);
        self.waiting_since = info.waiting().then_some(since);
        let waited = self.waiting_since.map_or(Duration::ZERO, |since| now.saturating_sub(since));
        // A single window probe is answered within a round trip, however long ago the one before was.
        let only_asked = info.unacked == 0 && info.probes < 2;
        PathHealth {
            waiting: info.waiting(),
            unanswered: info.unanswered(),
            silent_for: if only_asked { Duration::ZERO } else { waited.min(info.last_ack_recv) },
            rtt: info.rtt,
            min_rtt: info.min_rtt,
            acked_bytes: info.acked_bytes,
            mss_bytes: info.send_mss,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lost() -> TcpInfo {
        TcpInfo { unacked: 1, retransmits: 1, ..TcpInfo::default() }
    }

    fn millis(count: u64) -> Duration {
        Duration::from_millis(count)
    }

    /// The silence after looks every 200 ms that find `info`, silent for `silent` at first.
    fn silence_after(looks: u64, info: TcpInfo, silent: Duration) -> Duration {
        let mut watch = Watch::default();
        let look = |i| {
            watch.look(millis(60_000 + 200 * i), &TcpInfo { last_ack_recv: silent + millis(200 * i), ..info })
        };
        (0..=looks).map(look).last().unwrap().silent_for
    }

    #[test]
    fn a_lost_packet_after_a_long_idle_time_is_not_long_silence() {
        assert_eq!(silence_after(1, lost(), millis(60_000)), millis(200));
    }

    #[test]
    fn silence_grows_while_we_wait() {
        assert_eq!(silence_after(7, lost(), millis(60_000)), millis(1400));
    }

    #[test]
    fn silence_is_no_longer_than_the_kernel_says() {
        let mut watch = Watch::default();
        watch.look(millis(100), &lost());
        let health = watch.look(millis(400), &TcpInfo { last_ack_recv: millis(5), ..lost() });
        assert_eq!(health.silent_for, millis(5));
    }

    #[test]
    fn looks_far_apart_begin_a_new_wait() {
        let mut watch = Watch::default();
        watch.look(millis(100), &lost());
        let health = watch.look(millis(5000), &TcpInfo { last_ack_recv: millis(4900), ..lost() });
        assert_eq!(health.silent_for, millis(0));
    }

    #[test]
    fn one_window_probe_proves_nothing_and_two_do() {
        let shut_window = TcpInfo { notsent_bytes: 1, probes: 1, ..TcpInfo::default() };
        assert_eq!(silence_after(20, shut_window, millis(0)), millis(0));
        assert_eq!(silence_after(20, TcpInfo { probes: 2, ..shut_window }, millis(0)), millis(4000));
    }
}
