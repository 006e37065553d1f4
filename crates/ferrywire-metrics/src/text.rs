//! The samples as Prometheus metrics, in the text format of version 0.0.4.
//!
//! Units are seconds and bytes. Label values are NICs, connected peers, kinds and stages, so their number is bounded by
//! the number of connected peers and NICs.
//! Invariant: each metric has help, a type and a base unit, and `docs/metrics.md` has its name.
//! Read next: `sample.rs`, the samples that are rendered.

use std::collections::BTreeMap;

use prometheus::TextEncoder;
use prometheus::core::Collector;
use prometheus::proto::{Counter, Gauge, LabelPair, Metric, MetricFamily, MetricType};

use crate::registry::{CLOSED, Kind, are_timed, times};
use crate::sample::{ChannelSample, OccupancySample, PeerSample, ProcessSample, StagingSample};

/// All metrics of a sample as text. The histograms of times are those of this process.
pub fn render(process: &ProcessSample) -> String {
    let mut families = Vec::new();
    by_path(process, &mut families);
    by_peer(process, &mut families);
    occupancies(process, &mut families);
    of_the_process(process, &mut families);
    if are_timed() {
        families.extend(times().families().into_iter().flat_map(Collector::collect).map(without_empty_kinds));
    }
    families.retain(|family| !family.get_metric().is_empty());
    families.sort_by(|a, b| a.name().cmp(b.name()));
    TextEncoder::new().encode_to_string(&families).unwrap_or_default()
}

/// Leaves out kinds of operations that this process never posted.
fn without_empty_kinds(mut family: MetricFamily) -> MetricFamily {
    let mut rows = family.take_metric();
    rows.retain(|row| row.get_histogram().get_sample_count() > 0);
    family.set_metric(rows);
    family
}

/// Adds the metrics of channels, summed over the channels of one NIC and peer.
fn by_path(process: &ProcessSample, out: &mut Vec<MetricFamily>) {
    let mut paths: BTreeMap<[&str; 2], Vec<&ChannelSample>> = BTreeMap::new();
    for peer in &process.peers {
        for channel in &peer.channels {
            paths.entry([&channel.nic, &peer.label]).or_default().push(channel);
        }
    }
    let sum = |of: fn(&ChannelSample) -> u64| {
        let paths = paths.iter();
        let rows = paths.map(move |(labels, channels)| {
            (*labels, channels.iter().map(|each| of(each)).sum::<u64>() as f64)
        });
        rows.collect::<Vec<_>>()
    };
    let labels = ["nic", "peer"];
    out.push(counter(
        "tx_bytes_total",
        "Bytes sent on connections, including headers.",
        labels,
        sum(|c| c.tx_bytes),
    ));
    out.push(counter(
        "rx_bytes_total",
        "Bytes received on connections, including headers.",
        labels,
        sum(|c| c.rx_bytes),
    ));
    out.push(counter(
        "reconnects_total",
        "Times that a channel was connected again.",
        labels,
        sum(|c| c.reconnects),
    ));
    out.push(counter(
        "tcp_retransmits_total",
        "Packets that the kernel retransmitted.",
        labels,
        sum(|c| c.retransmits),
    ));
    out.push(gauge(
        "tcp_congestion_window_bytes",
        "Congestion windows of the channels' connections, in bytes.",
        labels,
        sum(|c| c.congestion_window_bytes),
    ));
    out.push(gauge(
        "tcp_send_queue_bytes",
        "Bytes in the kernel's send queues that were not sent.",
        labels,
        sum(|c| c.send_queue_bytes),
    ));
    out.push(gauge(
        "in_flight_bytes",
        "Bytes sent that the peer's engine has not acknowledged.",
        labels,
        sum(|c| c.in_flight_bytes),
    ));
    out.push(gauge("channels", "Channels that are connected.", labels, sum(|c| u64::from(c.alive))));
    let rtt = paths
        .iter()
        .map(|(labels, channels)| (*labels, channels.iter().map(|c| c.rtt_s).fold(0.0, f64::max)));
    out.push(gauge(
        "tcp_rtt_seconds",
        "Longest smoothed round-trip time of the channels' connections, in seconds.",
        labels,
        rtt.collect(),
    ));
}

/// Adds the metrics that have the label of a peer.
fn by_peer(process: &ProcessSample, out: &mut Vec<MetricFamily>) {
    let mut peers: BTreeMap<&str, PeerSample> = BTreeMap::new();
    let mut infos: BTreeMap<[&str; 4], f64> = BTreeMap::new();
    for peer in &process.peers {
        // Several peers may have the same label.
        peers.entry(&peer.label).or_default().retire(peer);
        for channel in peer.channels.iter().filter(|_| !peer.transport.is_empty()) {
            infos.insert([&channel.nic, &peer.label, &peer.reason, &peer.transport], 1.0);
        }
    }
    out.push(gauge(
        "path_info",
        "The transport that carries payload over a NIC to a peer, and why it was chosen; always 1.",
        ["nic", "peer", "reason", "transport"],
        infos.into_iter().collect(),
    ));
    let all = |of: fn(&PeerSample) -> u64| {
        peers.iter().map(|(peer, each)| ([*peer], of(each) as f64)).collect::<Vec<_>>()
    };
    out.push(counter(
        "lost_channels_total",
        "Connections of channels that were lost; each was fenced and its chunks were resent.",
        ["peer"],
        all(|peer| peer.lost_channels),
    ));
    out.push(counter(
        "fences_total",
        "Fences that were passed: both ends had closed a lost connection and reported what they had placed.",
        ["peer"],
        all(|peer| peer.fences),
    ));
    out.push(counter(
        "resent_chunks_total",
        "Chunks resent because their channel was lost.",
        ["peer"],
        all(|peer| peer.resent_chunks),
    ));
    let unused = unused_kinds(process);
    let mut operations: [Vec<([&str; 2], f64)>; 3] =
        [(); 3].map(|()| unused.iter().map(|kind| ([*kind, CLOSED], 0.0)).collect());
    for (peer, each) in &peers {
        for kind in &each.operations {
            let counts = [kind.started, kind.completed, kind.failed];
            for (rows, count) in operations.iter_mut().zip(counts) {
                rows.push(([kind.kind.as_str(), peer], count as f64));
            }
        }
    }
    let [started, completed, failed] = operations;
    let labels = ["kind", "peer"];
    out.push(counter("operations_started_total", "Operations that were posted.", labels, started));
    out.push(counter("operations_completed_total", "Operations that finished.", labels, completed));
    out.push(counter(
        "operations_failed_total",
        "Operations that ended with an error or were cancelled.",
        labels,
        failed,
    ));
}

/// The kinds of operations of which no closed peer has a count. They have rows with zeros, since the growth of a series
/// counts from its first value: a failure before the first scrape of its kind would not be seen.
fn unused_kinds(process: &ProcessSample) -> Vec<&'static str> {
    let all =
        if process.face == "nccl" { vec!["isend", "irecv"] } else { Kind::ALL.map(Kind::name).to_vec() };
    let closed =
        || process.peers.iter().filter(|peer| peer.label == CLOSED).flat_map(|peer| &peer.operations);
    all.into_iter().filter(|name| !closed().any(|kind| kind.kind == *name)).collect()
}

/// Adds the sizes of rings and windows, and how much of them is in use.
fn occupancies(process: &ProcessSample, out: &mut Vec<MetricFamily>) {
    let rings = occupancy(process, |channel| {
        channel.staging.as_ref().map(|staging| [staging.send_ring_bytes, staging.receive_ring_bytes])
    });
    let windows = occupancy(process, |channel| channel.lane.as_ref().map(|lane| [lane.sends, lane.receives]));
    let labels = ["direction", "peer"];
    out.push(gauge(
        "staging_ring_bytes",
        "Size of the staging rings, in bytes.",
        labels,
        rings.iter().map(|(labels, ring)| (*labels, ring.size as f64)).collect(),
    ));
    out.push(gauge(
        "staging_ring_used_bytes",
        "Bytes of the staging rings that are in use.",
        labels,
        rings.iter().map(|(labels, ring)| (*labels, ring.used as f64)).collect(),
    ));
    out.push(gauge(
        "lane_window_requests",
        "Requests that fit into the windows of lanes.",
        labels,
        windows.iter().map(|(labels, window)| (*labels, window.size as f64)).collect(),
    ));
    out.push(gauge(
        "lane_requests",
        "Requests that are in flight in lanes.",
        labels,
        windows.iter().map(|(labels, window)| (*labels, window.used as f64)).collect(),
    ));
}

/// Adds sizes and use of connected channels' resources, for sending and for receiving, summed by direction and
/// peer.
fn occupancy(
    process: &ProcessSample,
    of: impl Fn(&ChannelSample) -> Option<[OccupancySample; 2]>,
) -> BTreeMap<[&str; 2], OccupancySample> {
    let mut sums: BTreeMap<[&str; 2], OccupancySample> = BTreeMap::new();
    for peer in &process.peers {
        for both in peer.channels.iter().filter(|channel| channel.alive).filter_map(&of) {
            for (direction, more) in ["send", "receive"].into_iter().zip(both) {
                let sum = sums.entry([direction, &peer.label]).or_default();
                sum.size += more.size;
                sum.used += more.used;
            }
        }
    }
    sums
}

/// Adds the metrics that have no label of a peer.
fn of_the_process(process: &ProcessSample, out: &mut Vec<MetricFamily>) {
    let staged: Vec<&StagingSample> = process
        .peers
        .iter()
        .flat_map(|peer| &peer.channels)
        .filter_map(|channel| channel.staging.as_ref())
        .collect();
    if !staged.is_empty() {
        let sum = |of: fn(&StagingSample) -> f64| staged.iter().map(|each| of(each)).sum::<f64>();
        let stages = [
            (["d2h"], sum(|s| s.d2h_s)),
            (["socket"], sum(|s| s.socket_s)),
            (["h2d"], sum(|s| s.h2d_s)),
            (["waiting"], sum(|s| s.ring_full_s)),
        ];
        out.push(counter(
            "staging_seconds_total",
            "Time of each stage between GPUs and sockets, in seconds; stages overlap.",
            ["stage"],
            stages.into(),
        ));
        out.push(counter(
            "staging_ring_full_total",
            "Times that received payload waited for room in a ring.",
            [],
            vec![([], sum(|s| s.ring_full_events as f64))],
        ));
        out.push(gauge(
            "staging_pinned_bytes",
            "Pinned memory of the channels' rings, in bytes.",
            [],
            vec![([], sum(|s| s.pinned_bytes as f64))],
        ));
    }
    out.push(counter(
        "cpu_seconds_total",
        "CPU time of ferrywire's own threads, in seconds.",
        [],
        vec![([], process.total_cpu_s)],
    ));
    out.push(counter(
        "auth_failures_total",
        "Sessions refused because the peer did not prove the secret.",
        [],
        vec![([], process.auth_failures as f64)],
    ));
    out.push(gauge(
        "info",
        "How this process uses ferrywire, and the version; always 1.",
        ["face", "version"],
        vec![([process.face.as_str(), env!("CARGO_PKG_VERSION")], 1.0)],
    ));
}

fn counter<const N: usize>(
    name: &str,
    help: &str,
    labels: [&str; N],
    rows: Vec<([&str; N], f64)>,
) -> MetricFamily {
    let row = |metric: &mut Metric, value: f64| {
        let mut counter = Counter::default();
        counter.set_value(value.max(0.0));
        metric.set_counter(counter);
    };
    family(name, help, MetricType::COUNTER, labels, rows, row)
}

fn gauge<const N: usize>(
    name: &str,
    help: &str,
    labels: [&str; N],
    rows: Vec<([&str; N], f64)>,
) -> MetricFamily {
    let row = |metric: &mut Metric, value: f64| {
        let mut gauge = Gauge::default();
        gauge.set_value(value);
        metric.set_gauge(gauge);
    };
    family(name, help, MetricType::GAUGE, labels, rows, row)
}

/// A family with a series for each row. It is not built with the library's `CounterVec` and `GaugeVec`: these hash a row's
/// label values without a separator, so `("eth1", "110.0.0.2")` and `("eth11", "10.0.0.2")` would be one series.
fn family<const N: usize>(
    name: &str,
    help: &str,
    kind: MetricType,
    labels: [&str; N],
    rows: Vec<([&str; N], f64)>,
    set: impl Fn(&mut Metric, f64),
) -> MetricFamily {
    let rows = rows.into_iter().map(|(values, value)| {
        let pairs = labels.iter().zip(values).map(|(name, value)| {
            let mut pair = LabelPair::default();
            pair.set_name((*name).into());
            pair.set_value(value.into());
            pair
        });
        let mut metric = Metric::from_label(pairs.collect());
        set(&mut metric, value);
        metric
    });
    let mut family = MetricFamily::default();
    family.set_name(format!("ferrywire_{name}"));
    family.set_help(help.into());
    family.set_field_type(kind);
    family.set_metric(rows.collect());
    family
}
