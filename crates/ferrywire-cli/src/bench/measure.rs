//! Clocks and counters of the timed part: rates over intervals, latencies, CPU time and bytes.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use ferrywire::{Peer, PeerStats};
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use super::host::Workplace;
use super::protocol::{ChannelBytes, PEERS_MAX, SideReport, SocketBuffers};
use super::staged;
use crate::{nics, sys};

/// Shortest interval over which a rate is taken; a longer iteration makes a longer interval.
pub const INTERVAL: Duration = Duration::from_millis(100);
/// Most intervals of a flow, and of all flows in one direction of one serving end, which every pair receives; longer
/// runs have longer intervals.
const INTERVALS_MAX: usize = 8192;
const INTERVALS_OF_ALL_MAX: usize = 1024 * PEERS_MAX;
/// Longest latency that the histogram distinguishes.
const LATENCY_NS_MAX: u64 = 3_600_000_000_000;
/// Significant digits of latencies.
const LATENCY_DIGITS: u8 = 2;

/// The limits of a loop, which stops at whichever comes first.
#[derive(Clone, Copy, Debug)]
pub struct Limit {
    /// Most messages of the loop.
    pub iterations: u64,
    /// Longest time of the loop.
    pub time: Duration,
}

impl Limit {
    /// A limit of this many messages.
    pub fn iterations(iterations: u64) -> Limit {
        Limit { iterations, time: Duration::MAX }
    }

    /// Whether another message may start.
    pub fn allows(self, posted: u64, elapsed: Duration) -> bool {
        posted < self.iterations && (posted == 0 || elapsed < self.time)
    }
}

/// Bytes completed in one interval of the timed part.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// Seconds since the start of the timed part.
    pub start_s: f64,
    /// Seconds since the start of the timed part.
    pub end_s: f64,
    /// Bytes completed in the interval.
    pub bytes: u64,
}

/// Counts completed messages, with bytes by interval and latencies.
#[derive(Debug)]
pub struct Meter {
    start: Instant,
    open: Interval,
    intervals: Vec<Interval>,
    /// Shortest length of an interval, in seconds.
    least_s: f64,
    /// Most intervals that are kept: an even number, so that they can be merged in pairs.
    intervals_max: usize,
    latency: Latency,
}

impl Meter {
    /// Starts to measure, for one of `peers` pairs of a serving end.
    pub fn start(peers: usize) -> Meter {
        let intervals_max = (INTERVALS_OF_ALL_MAX / peers).min(INTERVALS_MAX) / 2 * 2;
        let open = Interval { start_s: 0.0, end_s: 0.0, bytes: 0 };
        let (intervals, least_s, latency) = (Vec::new(), INTERVAL.as_secs_f64(), Latency::default());
        Meter { start: Instant::now(), open, intervals, least_s, intervals_max, latency }
    }

    /// Time from the start of the timed part until `now`.
    pub fn elapsed(&self, now: Instant) -> Duration {
        now.duration_since(self.start)
    }

    /// Counts a completed message. Returns the time since the start of the timed part.
    pub fn completed(&mut self, now: Instant, bytes: u64, took: Duration) -> Duration {
        self.latency.record(took);
        self.moved(now, bytes)
    }

    /// Counts moved bytes alone. Returns the time since the start of the timed part.
    pub fn moved(&mut self, now: Instant, bytes: u64) -> Duration {
        let elapsed = self.elapsed(now);
        self.open.bytes += bytes;
        self.open.end_s = elapsed.as_secs_f64();
        if self.open.end_s - self.open.start_s >= self.least_s {
            if self.intervals.len() == self.intervals_max {
                self.merge();
            }
            self.intervals.push(self.open);
            self.open = Interval { start_s: self.open.end_s, end_s: self.open.end_s, bytes: 0 };
        }
        elapsed
    }

    /// Doubles the length of intervals, past ones included.
    fn merge(&mut self) {
        let one = |two: &[Interval]| Interval {
            start_s: two[0].start_s,
            end_s: two[1].end_s,
            bytes: two[0].bytes + two[1].bytes,
        };
        self.intervals = self.intervals.chunks_exact(2).map(one).collect();
        self.least_s *= 2.0;
    }

    /// The intervals and latencies. A last, short interval counts only if it is the only one.
    pub fn finish(mut self) -> (Vec<Interval>, LatencyCounts) {
        if self.intervals.is_empty() && self.open.end_s > 0.0 {
            self.intervals.push(self.open);
        }
        (self.intervals, self.latency.counts())
    }
}

/// A histogram of latencies.
#[derive(Clone, Debug)]
pub struct Latency(Histogram<u64>);

impl Default for Latency {
    fn default() -> Latency {
        let histogram = Histogram::new_with_bounds(1, LATENCY_NS_MAX, LATENCY_DIGITS);
        Latency(histogram.expect("the bounds are good"))
    }
}

impl Latency {
    /// Counts a latency.
    pub fn record(&mut self, took: Duration) {
        self.0.saturating_record(took.as_nanos() as u64);
    }

    /// The counts, in the form in which they are sent.
    pub fn counts(&self) -> LatencyCounts {
        let counts =
            self.0.iter_recorded().map(|step| (step.value_iterated_to(), step.count_since_last_iteration()));
        LatencyCounts { counts: counts.collect() }
    }
}

/// A histogram of latencies as it is sent: latencies in nanoseconds with their counts, in order.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LatencyCounts {
    counts: Vec<(u64, u64)>,
}

impl LatencyCounts {
    /// The sum of several histograms.
    pub fn merged<'a>(parts: impl IntoIterator<Item = &'a LatencyCounts>) -> LatencyCounts {
        let mut counts: Vec<(u64, u64)> =
            parts.into_iter().flat_map(|part| part.counts.iter().copied()).collect();
        counts.sort_unstable();
        LatencyCounts { counts }
    }

    /// The latency in microseconds that this share of the latencies does not exceed.
    pub fn quantile_us(&self, share: f64) -> Option<f64> {
        let total: u64 = self.counts.iter().map(|(_, count)| count).sum();
        let rank = ((total as f64 * share).ceil() as u64).max(1);
        let mut seen = 0;
        let found = self.counts.iter().find(|(_, count)| {
            seen += count;
            seen >= rank
        });
        found.map(|(ns, _)| *ns as f64 / 1000.0)
    }
}

/// Clocks and counters at one moment.
pub struct Snapshot {
    at: Instant,
    cpu_s: f64,
    host_ticks: Option<(u64, u64)>,
    threads: HashMap<u64, (String, f64)>,
    stats: PeerStats,
}

impl Snapshot {
    /// Reads all clocks and counters.
    pub fn take(peer: &Peer) -> Snapshot {
        let (threads, stats, host_ticks) = (thread_seconds(), peer.stats(), host_ticks());
        Snapshot { threads, stats, host_ticks, cpu_s: sys::cpu_seconds(), at: Instant::now() }
    }

    /// The report on the time from `self` until now.
    pub fn report(&self, peer: &Peer) -> SideReport {
        let wall_s = self.at.elapsed().as_secs_f64();
        let cpu_s = sys::cpu_seconds() - self.cpu_s;
        let now = peer.stats();
        SideReport {
            place: Workplace::this(),
            wall_s,
            cpu_s,
            host_busy: self.host_busy(),
            busiest_thread: self.busiest_thread(wall_s),
            driven: None,
            channels: now.channels.iter().map(|channel| self.channel_bytes(channel)).collect(),
            staged: staged::between(&self.stats, &now),
            resent_chunks: now.resent_chunks - self.stats.resent_chunks,
            lost_channels: now.lost_channels,
        }
    }

    fn channel_bytes(&self, now: &ferrywire::ChannelStats) -> ChannelBytes {
        let before = self.stats.channels.iter().find(|c| c.index == now.index);
        let (sent, received) = before.map_or((0, 0), |c| (c.sent_bytes, c.received_bytes));
        ChannelBytes {
            channel: now.index,
            line_bytes_per_s: nics::line_rate_bytes_per_s(&now.nic),
            nic: now.nic.clone(),
            tx_bytes: now.sent_bytes.saturating_sub(sent),
            rx_bytes: now.received_bytes.saturating_sub(received),
            buffers: SocketBuffers { send: now.send_buffer_bytes, receive: now.receive_buffer_bytes },
        }
    }

    fn host_busy(&self) -> Option<f64> {
        let ((busy_before, all_before), (busy, all)) = (self.host_ticks?, host_ticks()?);
        let passed = all.saturating_sub(all_before);
        (passed > 0).then(|| busy.saturating_sub(busy_before) as f64 / passed as f64)
    }

    fn busiest_thread(&self, wall_s: f64) -> Option<(String, f64)> {
        let ran = thread_seconds().into_iter().map(|(id, (name, seconds))| {
            let before = self.threads.get(&id).map_or(0.0, |(_, seconds)| *seconds);
            (name, (seconds - before) / wall_s)
        });
        ran.max_by(|a, b| a.1.total_cmp(&b.1)).filter(|_| wall_s > 0.0)
    }
}

/// Ticks in which the host's cores were busy, and all ticks, if the kernel reports them.
fn host_ticks() -> Option<(u64, u64)> {
    let text = std::fs::read_to_string("/proc/stat").ok()?;
    let ticks: Vec<u64> =
        text.lines().next()?.split_whitespace().skip(1).take(8).flat_map(str::parse).collect();
    let all: u64 = ticks.iter().sum();
    // The fourth number is idle time, and the fifth is time spent waiting for disks.
    Some((all - ticks.get(3)? - ticks.get(4)?, all))
}

/// Name and CPU seconds of each thread of this process, if the kernel reports them.
fn thread_seconds() -> HashMap<u64, (String, f64)> {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else {
        return HashMap::new();
    };
    let read = |task: std::fs::DirEntry| {
        let id = task.file_name().to_str()?.parse().ok()?;
        let name = std::fs::read_to_string(task.path().join("comm")).ok()?.trim().to_owned();
        let ran = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        let ns: f64 = ran.split_whitespace().next()?.parse().ok()?;
        Some((id, (name, ns / 1e9)))
    };
    tasks.flatten().filter_map(read).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_of_merged_latencies() {
        let counted = |us: &[u64]| {
            let mut latency = Latency::default();
            us.iter().for_each(|us| latency.record(Duration::from_micros(*us)));
            latency.counts()
        };
        let both = LatencyCounts::merged([&counted(&[10, 30]), &counted(&[20, 1000])]);
        let near = |share: f64, us: f64| {
            both.quantile_us(share).is_some_and(|found| (found / us - 1.0).abs() < 0.02)
        };
        assert!(near(0.5, 20.0) && near(0.99, 1000.0) && near(0.0, 10.0));
        assert_eq!(LatencyCounts::default().quantile_us(0.5), None);
    }

    #[test]
    fn a_short_run_is_one_interval() {
        let mut meter = Meter::start(1);
        let now = Instant::now() + Duration::from_millis(10);
        meter.completed(now, 5, Duration::from_micros(1));
        let (intervals, _) = meter.finish();
        assert_eq!(intervals.iter().map(|interval| interval.bytes).collect::<Vec<_>>(), [5]);
    }

    #[test]
    fn the_reports_of_a_week_fit_into_a_message() {
        use super::super::link::MESSAGE_BYTES_MAX;
        use super::super::protocol::{FlowReport, SECONDS_MAX};
        let mut meter = Meter::start(PEERS_MAX);
        let (start, ends) = (Instant::now(), SECONDS_MAX as u64 * 10);
        for i in 1..=ends {
            // These latencies fill every bucket that the histogram distinguishes.
            let took = Duration::from_nanos((1u64 << (i % 41)) * (1000 + i % 1000) / 1000);
            meter.completed(start + INTERVAL * i as u32, 1 << 30, took);
        }
        let (intervals, latency) = meter.finish();
        let moved: u64 = intervals.iter().map(|interval| interval.bytes).sum();
        let length_s = |interval: &Interval| interval.end_s - interval.start_s;
        let longest_s = intervals.iter().map(length_s).fold(0.0, f64::max);
        assert!(moved >> 30 <= ends && moved as f64 / (ends << 30) as f64 > 0.99, "{moved}");
        assert!(longest_s < SECONDS_MAX / 256.0, "{longest_s}");
        let driven = Some(FlowReport { iterations: ends, intervals, latency, ..FlowReport::default() });
        let side = SideReport { driven, ..SideReport::default() };
        // The intervals of both ends, for data in both directions.
        let reports_bytes = serde_json::to_vec(&side).expect("JSON").len() * 2 * PEERS_MAX;
        assert!(reports_bytes < MESSAGE_BYTES_MAX / 4 * 3, "{reports_bytes}");
    }

    /// A single pair has room for the intervals of ten minutes.
    #[test]
    fn few_pairs_keep_short_intervals_for_long() {
        let mut meter = Meter::start(1);
        let start = Instant::now();
        for i in 1..=6_000 {
            meter.completed(start + INTERVAL * 11 / 10 * i, 1, Duration::ZERO);
        }
        let (intervals, _) = meter.finish();
        assert!(intervals.iter().all(|interval| interval.end_s - interval.start_s < 0.12));
    }

    #[test]
    fn intervals_are_at_least_100_ms() {
        let mut meter = Meter::start(1);
        let start = Instant::now();
        for i in 1..=35 {
            meter.completed(start + Duration::from_millis(i * 10), 1, Duration::ZERO);
        }
        let (intervals, _) = meter.finish();
        assert_eq!(intervals.len(), 3);
        assert!(intervals.iter().all(|interval| interval.end_s - interval.start_s >= 0.1));
    }
}
