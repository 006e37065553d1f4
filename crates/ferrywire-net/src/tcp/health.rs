//! How long the peer's kernel has failed to answer.
//!
//! The kernel's time since the last acknowledgement is no evidence by itself: after an idle minute it is a
//! minute when the first packet is lost, and a peer with a closed window is probed at ever longer intervals.
//! So silence counts from the first sample that found data waiting. States: idle -> waiting -> idle; samples
//! that are far apart start a new wait.
//! Invariant: the reported silence is no longer than the kernel's time since the last acknowledgement, and no
//! longer than data has waited.

use std::time::Duration;

use crate::PathHealth;
use ferrywire_proto::limits::PATH_CHECK_INTERVAL;
use ferrywire_sys::tcp_info::TcpInfo;

/// Most time between two samples of a path; samples further apart do not show what happened in between.
const SAMPLES_APART_MAX: Duration = Duration::from_millis(500);
const _: () = assert!(SAMPLES_APART_MAX.as_millis() >= 2 * PATH_CHECK_INTERVAL.as_millis());

/// The earlier health samples of one connection.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Watch {
    sampled_at: Duration,
    waiting_since: Option<Duration>,
}

impl Watch {
    /// Takes a sample and returns the path's health at `now`.
    pub(super) fn sample(&mut self, now: Duration, info: &TcpInfo) -> PathHealth {
        let apart = now.saturating_sub(self.sampled_at);
        self.sampled_at = now;
        let since = self.waiting_since.filter(|_| apart <= SAMPLES_APART_MAX).unwrap_or(now);
        self.waiting_since = info.waiting().then_some(since);
        let waited = self.waiting_since.map_or(Duration::ZERO, |since| now.saturating_sub(since));
        // One window probe is answered within a round trip, however long ago the previous probe was.
        let only_asked = info.unacked == 0 && info.probes < 2;
        PathHealth {
            waiting: info.waiting(),
            unanswered: info.unanswered(),
            silent_for: if only_asked { Duration::ZERO } else { waited.min(info.last_ack_recv) },
            rtt: info.rtt,
            min_rtt: info.min_rtt,
            acked_bytes: info.acked_bytes,
            mss_bytes: info.send_mss,
            retransmits: info.total_retrans,
            congestion_window_bytes: u64::from(info.congestion_window) * u64::from(info.send_mss),
            unsent_bytes: info.notsent_bytes,
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

    /// The silence that is reported after `samples` samples, 200 ms apart, of `info`; the kernel's silence
    /// begins at `silent`.
    fn silence_after(samples: u64, info: TcpInfo, silent: Duration) -> Duration {
        let mut watch = Watch::default();
        let sample = |i| {
            watch.sample(
                millis(60_000 + 200 * i),
                &TcpInfo { last_ack_recv: silent + millis(200 * i), ..info },
            )
        };
        (0..=samples).map(sample).last().unwrap().silent_for
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
        watch.sample(millis(100), &lost());
        let health = watch.sample(millis(400), &TcpInfo { last_ack_recv: millis(5), ..lost() });
        assert_eq!(health.silent_for, millis(5));
    }

    #[test]
    fn samples_far_apart_begin_a_new_wait() {
        let mut watch = Watch::default();
        watch.sample(millis(100), &lost());
        let health = watch.sample(millis(5000), &TcpInfo { last_ack_recv: millis(4900), ..lost() });
        assert_eq!(health.silent_for, millis(0));
    }

    #[test]
    fn one_window_probe_proves_nothing_and_two_do() {
        let shut_window = TcpInfo { notsent_bytes: 1, probes: 1, ..TcpInfo::default() };
        assert_eq!(silence_after(20, shut_window, millis(0)), millis(0));
        assert_eq!(silence_after(20, TcpInfo { probes: 2, ..shut_window }, millis(0)), millis(4000));
    }
}
