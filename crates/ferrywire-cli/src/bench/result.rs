//! The results of one size, computed from measurements, as they are printed and stored.
//!
//! Read next: `report.rs`.

use std::collections::BTreeMap;
use std::ops::Range;

use ferrywire::{DevmemStats, LaneStats};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::bottleneck::bottleneck;
use super::cpu_accounting::BothEnds;
use super::layout;
use super::measure::{INTERVAL, Interval, LatencyCounts};
use super::protocol::{FlowReport, Run, SideReport, SocketBuffers};
use super::session::StepReport;
use super::staged;
use crate::args::{Op, Pattern, Unpack};

/// Minimum, median and maximum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    pub min: f64,
    pub p50: f64,
    pub max: f64,
}

/// Latencies in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LatencyUs {
    /// The median.
    pub p50: f64,
    /// The 99th percentile.
    pub p99: f64,
    pub max: f64,
}

/// CPU seconds per 1e9 bytes at both ends of the data.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct CpuPerGb {
    /// The end from which the data came.
    pub source: f64,
    /// The end to which the data went.
    pub target: f64,
}

/// Bytes over one NIC of the connecting end.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NicBytes {
    pub nic: String,
    /// Bytes sent over the NIC.
    pub tx_bytes: u64,
    /// Bytes received over the NIC.
    pub rx_bytes: u64,
}

/// Bytes over one channel, in both directions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChannelTotal {
    /// The channel's index.
    pub channel: u16,
    /// The connecting end's NIC.
    pub nic: String,
    /// Bytes over the channel, both directions together.
    pub bytes: u64,
}

/// One result, in the form in which it is stored.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ResultRow {
    pub op: Op,
    /// The memory location of the connecting end.
    pub memory: String,
    /// The memory location of the serving end.
    pub peer_memory: String,
    /// The transport of the channels.
    pub transport: String,
    /// How scattered receives are gathered, if receives can be scattered.
    pub unpack: Option<Unpack>,
    /// Which ends send to which.
    pub pattern: Pattern,
    /// The name of this end's GPU, or of its endpoint if there are several; `all` for all of them.
    pub gpu: Option<String>,
    /// The name of the other end's GPU.
    pub peer_gpu: Option<String>,
    /// `to_peer`, `from_peer` or `both`.
    pub direction: String,
    /// Size of a message in bytes.
    pub size_bytes: u64,
    /// Transfers in flight.
    pub depth: usize,
    /// Blocks per message.
    pub blocks: Option<u64>,
    /// Messages in the timed part.
    pub iterations: u64,
    /// Channels per peer.
    pub channels: usize,
    /// Chunk size in bytes.
    pub chunk_bytes: u64,
    /// Requests in flight per channel.
    pub window: u64,
    /// Progress threads of the connecting end.
    pub threads: usize,
    /// Congestion control of the data connections.
    pub congestion_control: String,
    /// Whether all checked bytes were right; `None` if nothing was checked.
    pub verified: Option<bool>,
    /// Rate in GB/s over the intervals of the timed part.
    pub gb_per_s: Spread,
    /// Time of a message, or half of a round trip, in microseconds.
    pub latency_us: Option<LatencyUs>,
    pub cpu_s_per_gb: Option<CpuPerGb>,
    /// The bottleneck of the result.
    pub bottleneck: String,
    /// Time until the first size could start, in seconds.
    pub setup_s: f64,
    /// Seconds that each stage took, by its name.
    pub stages_s: BTreeMap<String, f64>,
    /// Bytes by NIC.
    pub per_nic: Vec<NicBytes>,
    /// Bytes by channel.
    pub per_channel: Vec<ChannelTotal>,
    /// Fields that only some runs have.
    pub extra: Map<String, Value>,
}

/// Two ranks that move data to each other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankPair {
    /// The connecting rank and the serving rank.
    pub ranks: (u32, u32),
    /// The hosts of the two ranks.
    pub hosts: (String, String),
}

/// The facts that hold for all sizes of a run.
#[derive(Clone, Debug)]
pub struct Circumstances<'a> {
    /// The parameters of the run.
    pub run: &'a Run,
    /// The GPUs of all pairs, by peer, in a run with several endpoints.
    pub pairs: &'a [(u32, u32)],
    /// The name of this end's GPU, if its memory is on one.
    pub gpu: Option<String>,
    /// The name of the other end's GPU, if its memory is on one.
    pub peer_gpu: Option<String>,
    /// The pairs of ranks, in a run of several ranks.
    pub ranks: &'a [RankPair],
    /// The transport of the channels.
    pub transport: String,
    /// Why this transport was chosen, if there was a choice.
    pub transport_reason: String,
    /// How data connections are protected; `None` in clear.
    pub protection: Option<String>,
    /// How scattered receives are gathered, if receives can be scattered.
    pub unpack: Option<Unpack>,
    /// The lanes of a plugin or of devmem; empty without them.
    pub lanes: Vec<LaneStats>,
    /// Channels per peer.
    pub channels: usize,
    /// Chunk size in bytes.
    pub chunk_bytes: u64,
    /// Effective window, in frames or requests per channel.
    pub window: u64,
    /// Progress threads of this end.
    pub threads: usize,
    /// Effective congestion control of the data connections.
    pub congestion_control: String,
    /// Time until the first size could start, in seconds.
    pub setup_s: f64,
}

/// The flows that make one result, with the costs at both ends.
struct Share<'a> {
    direction: &'static str,
    /// The names of both endpoints, if there are several; `all` for all of them.
    gpus: Option<(String, String)>,
    /// The memory locations of both ends; only the kind for several endpoints together.
    memory: (String, String),
    member: Option<usize>,
    flows: Vec<&'a FlowReport>,
    members: &'a [SideReport],
    /// The serving end's reports on all pairs of its process.
    serve: &'a [SideReport],
    /// The pairs of this result.
    pairs: Range<usize>,
}

/// The results of one size.
pub fn results(now: &Circumstances, step: usize, report: &StepReport) -> Vec<ResultRow> {
    let ends = BothEnds::of(now.ranks, now.run.multi_gpu, report.members.len());
    let limit = bottleneck(&ends, &report.members, &report.serve);
    let limit =
        if now.run.pattern == Pattern::Latency { "the round trip (latency)".to_owned() } else { limit };
    let shares = shares(now, report);
    shares.iter().map(|share| row(now, step, report, share, &limit)).collect()
}

fn shares<'a>(now: &Circumstances, report: &'a StepReport) -> Vec<Share<'a>> {
    let run = now.run;
    let part = Part { run, report, of_ranks: !now.ranks.is_empty() };
    let everybody = 0..report.members.len();
    let all = || Some((ALL.to_owned(), ALL.to_owned()));
    let there = run.peer_memory.unwrap_or(run.memory);
    let of_one = || (run.memory.to_string(), there.to_string());
    match (run.pattern, run.multi_gpu || part.of_ranks) {
        (_, true) => {
            let first = now.pairs.first().map(|(_, peer_gpu)| *peer_gpu);
            let share = |(at, (gpu, peer_gpu)): (usize, (u32, u32))| {
                // `Circumstances` has the first pair's GPU; an end with one endpoint may use any GPU.
                let peer_gpu =
                    if Some(peer_gpu) == first { there.index().unwrap_or(peer_gpu) } else { peer_gpu };
                let names = (run.memory.name_on(gpu), there.name_on(peer_gpu));
                let memory = (run.memory.on(gpu).to_string(), there.on(peer_gpu).to_string());
                part.shares(at..at + 1, Some(names), memory)
            };
            let kinds = (run.memory.kind().to_owned(), there.kind().to_owned());
            let each = everybody.clone().zip(now.pairs.iter().copied()).flat_map(share);
            each.chain(part.shares(everybody, all(), kinds)).collect()
        }
        (Pattern::Incast, false) => {
            let one = |at: usize| {
                let of_one = part.shares(at..at + 1, None, of_one());
                of_one.into_iter().map(move |share| Share { member: Some(at), ..share })
            };
            everybody.clone().flat_map(one).chain(part.shares(everybody, all(), of_one())).collect()
        }
        (_, false) => part.shares(everybody, None, of_one()),
    }
}

/// The name of all endpoints of an end together.
pub const ALL: &str = "all";

/// Access to the reports on one size.
struct Part<'a, 'b> {
    run: &'b Run,
    report: &'a StepReport,
    of_ranks: bool,
}

impl<'a> Part<'a, '_> {
    /// The bytes that some of the peers moved, in each direction and in both.
    fn shares(
        &self,
        of: Range<usize>,
        gpus: Option<(String, String)>,
        memory: (String, String),
    ) -> Vec<Share<'a>> {
        let driven = |sides: &'a [SideReport]| -> Vec<&'a FlowReport> {
            sides.iter().filter_map(|side| side.driven.as_ref()).collect()
        };
        let members = &self.report.members[of.clone()];
        let (forward, backward) = (driven(members), driven(&self.report.serve[of.clone()]));
        // One process serves all pairs, or each pair has its own.
        let serve = if self.of_ranks { &self.report.serve[of.clone()] } else { &self.report.serve };
        let share = |direction, flows| Share {
            direction,
            gpus: gpus.clone(),
            memory: memory.clone(),
            member: None,
            flows,
            members,
            serve,
            pairs: of.clone(),
        };
        let (to_peer, from_peer) = match self.run.op {
            Op::Read => ("from_peer", "to_peer"),
            _ => ("to_peer", "from_peer"),
        };
        if self.run.pattern != Pattern::Bidir {
            return vec![share(to_peer, forward)];
        }
        let both = forward.iter().chain(&backward).copied().collect();
        vec![share(to_peer, forward), share(from_peer, backward), share("both", both)]
    }
}

/// Seconds by stage: of the whole size, and of staging in its timed part.
fn stages_s(report: &StepReport, share: &Share) -> BTreeMap<String, f64> {
    let mut stages_s = report.stages_s.clone();
    stages_s.extend(staged::stages_s(share.members, share.serve));
    stages_s
}

/// Bytes of a flow; a ping-pong moves each message in both directions.
fn bytes(run: &Run, flow: &FlowReport, size: u64) -> u64 {
    let ways = if run.pattern == Pattern::Latency && run.op != Op::Read { 2 } else { 1 };
    flow.iterations * size * ways
}

fn row(now: &Circumstances, step: usize, report: &StepReport, share: &Share, limit: &str) -> ResultRow {
    let run = now.run;
    let size = run.sizes[step];
    let intervals: Vec<&[Interval]> = share.flows.iter().map(|flow| flow.intervals.as_slice()).collect();
    let latency = LatencyCounts::merged(share.flows.iter().map(|flow| &flow.latency));
    let (rates, interval_s) = rates(&intervals);
    let gb_per_s = spread(rates);
    let (per_nic, per_channel) = moved(share.members);
    ResultRow {
        op: run.op,
        memory: share.memory.0.clone(),
        peer_memory: share.memory.1.clone(),
        transport: now.transport.clone(),
        unpack: now.unpack,
        pattern: run.pattern,
        gpu: gpu(share.gpus.as_ref().map(|(here, _)| here), &now.gpu),
        peer_gpu: gpu(share.gpus.as_ref().map(|(_, there)| there).filter(|_| several(now)), &now.peer_gpu),
        direction: share.direction.to_owned(),
        size_bytes: size,
        depth: layout::depth(run, size),
        blocks: run.blocks,
        iterations: share.flows.iter().map(|flow| flow.iterations).sum(),
        channels: now.channels,
        chunk_bytes: now.chunk_bytes,
        window: now.window,
        threads: now.threads,
        congestion_control: now.congestion_control.clone(),
        verified: verified_iterations(report, share).map(|_| true),
        gb_per_s,
        latency_us: latency_us(&latency),
        cpu_s_per_gb: cpu_per_gb(now, size, report, share),
        bottleneck: limit.to_owned(),
        setup_s: now.setup_s,
        stages_s: stages_s(report, share),
        per_nic,
        per_channel,
        extra: extra(now, size, report, share, (gb_per_s, interval_s)),
    }
}

/// Iterations of the verified passes of these pairs, if each of them had one.
fn verified_iterations(report: &StepReport, share: &Share) -> Option<u64> {
    Some(report.verified_iterations.get(share.pairs.clone())?.iter().sum())
}

/// The name of the endpoint, or of the only endpoint's GPU.
fn gpu(of_several: Option<&String>, own: &Option<String>) -> Option<String> {
    of_several.or(own.as_ref()).cloned()
}

/// Whether both ends have several named endpoints.
fn several(now: &Circumstances) -> bool {
    now.run.multi_gpu || !now.ranks.is_empty()
}

impl Share<'_> {
    fn is_of_one(&self) -> bool {
        self.gpus.as_ref().is_some_and(|(here, _)| here != ALL)
    }
}

/// CPU cost. An end that moves data in both directions, or to several others, spends its time on all of it.
fn cpu_per_gb(now: &Circumstances, size: u64, report: &StepReport, share: &Share) -> Option<CpuPerGb> {
    let sides = report.members.iter().zip(&report.serve);
    let of_pair = |(near, far): (&SideReport, &SideReport)| {
        [near, far]
            .into_iter()
            .filter_map(|side| side.driven.as_ref())
            .map(|flow| bytes(now.run, flow, size))
            .sum()
    };
    let moved: Vec<u64> = sides.map(of_pair).collect();
    let ends = BothEnds::of(now.ranks, now.run.multi_gpu, report.members.len());
    let near = ends.near.cpu_s_per_gb(&report.members, &moved, share.pairs.clone())?;
    let far = ends.far.cpu_s_per_gb(&report.serve, &moved, share.pairs.clone())?;
    let from_near = share.direction != "from_peer";
    Some(if from_near {
        CpuPerGb { source: near, target: far }
    } else {
        CpuPerGb { source: far, target: near }
    })
}

/// The counters of this end's devmem lanes since they were made, all channels together.
fn devmem(lanes: &[LaneStats]) -> Option<Value> {
    let counted: Vec<&DevmemStats> = lanes.iter().filter_map(|lane| lane.devmem.as_ref()).collect();
    let sum = |of: fn(&DevmemStats) -> u64| counted.iter().map(|stats| of(stats)).sum::<u64>();
    counted.first().map(|first| {
        json!({
            "pool_bytes": first.pool_bytes,
            "receive_calls": sum(|stats| stats.receive_calls),
            "release_calls": sum(|stats| stats.release_calls),
            "send_calls": sum(|stats| stats.send_calls),
            "fragments": sum(|stats| stats.fragments),
            "fragment_bytes": sum(|stats| stats.fragment_bytes),
            "released": sum(|stats| stats.released),
            "linear_bytes": sum(|stats| stats.linear_bytes),
            "plain_bytes": sum(|stats| stats.plain_bytes),
            "gathers": sum(|stats| stats.gathers),
            "device_sent_bytes": sum(|stats| stats.device_sent_bytes),
            "staged_sent_bytes": sum(|stats| stats.staged_sent_bytes),
            "host_sent_bytes": sum(|stats| stats.host_sent_bytes),
            "waits": sum(|stats| stats.waits),
        })
    })
}

fn extra(
    now: &Circumstances,
    size: u64,
    report: &StepReport,
    share: &Share,
    (gb_per_s, interval_s): (Spread, f64),
) -> Map<String, Value> {
    let run = now.run;
    let mut extra = Map::new();
    if let Some(protection) = &now.protection {
        extra.insert("protection".into(), json!(protection));
    }
    if !now.transport_reason.is_empty() {
        extra.insert("transport_reason".into(), json!(now.transport_reason));
    }
    if let Some(lane) = now.lanes.first() {
        let most = |of: fn(&LaneStats) -> u64| now.lanes.iter().map(of).max();
        match devmem(&now.lanes) {
            Some(counted) => drop(extra.insert("devmem".into(), counted)),
            None => drop(extra.insert("plugin".into(), json!(format!("{} ({})", lane.plugin, lane.version)))),
        }
        extra.insert("max_outstanding_sends".into(), json!(most(|lane| lane.max_outstanding_sends)));
        extra.insert("max_outstanding_receives".into(), json!(most(|lane| lane.max_outstanding_receives)));
        extra.insert("closing_results".into(), json!(most(|lane| lane.closing_results)));
    }
    extra.insert("interval_s".into(), json!(interval_s));
    // With few or bursty messages the median over intervals says little.
    let moved_bytes: u64 = share.flows.iter().map(|flow| bytes(run, flow, size)).sum();
    let wall_s = share.members.iter().map(|side| side.wall_s).fold(0.0, f64::max);
    if wall_s > 0.0 {
        extra.insert("mean_gb_per_s".into(), json!(moved_bytes as f64 / wall_s / 1e9));
    }
    if let (Some(blocks), true) = (run.blocks, gb_per_s.p50 > 0.0) {
        // Bytes per nanosecond are GB/s.
        extra.insert("ns_per_block".into(), json!(size as f64 / gb_per_s.p50 / blocks as f64));
    }
    for (name, latency) in share.flows.iter().flat_map(|flow| &flow.extra) {
        extra.insert(name.clone(), json!(latency_us(latency)));
    }
    if let (Some((here, there)), true) = (&share.gpus, several(now)) {
        extra.insert("pair".into(), json!([here, there]));
    }
    if let (Some(pair), true) = (now.ranks.get(share.pairs.start), share.is_of_one()) {
        extra.insert("ranks".into(), json!(pair.ranks));
        extra.insert("hosts".into(), json!(pair.hosts));
    }
    if let Some(member) = share.member {
        extra.insert("member".into(), json!(member));
    }
    if let Some(iterations) = verified_iterations(report, share) {
        extra.insert("verified_iterations".into(), json!(iterations));
    }
    if let Some(reported) = staged::staging_fields(share.members, share.serve) {
        extra.insert("staging".into(), reported);
    }
    extra.insert("peer_per_nic".into(), json!(moved(share.serve).0));
    extra.insert("socket_buffer_bytes".into(), json!(least_buffers(share.members)));
    extra.insert("peer_socket_buffer_bytes".into(), json!(least_buffers(share.serve)));
    let sides = || report.members.iter().chain(&report.serve);
    let resent: u64 = sides().map(|side| side.resent_chunks).sum();
    if resent > 0 {
        extra.insert("resent_chunks".into(), json!(resent));
    }
    let lost: Vec<&String> = sides().flat_map(|side| &side.lost_channels).collect();
    if !lost.is_empty() {
        extra.insert("lost_channels".into(), json!(lost));
    }
    extra
}

/// The smallest socket buffers among an end's data connections.
fn least_buffers(members: &[SideReport]) -> Option<SocketBuffers> {
    let buffers = members.iter().flat_map(|side| &side.channels).map(|channel| channel.buffers);
    buffers.reduce(|a, b| SocketBuffers { send: a.send.min(b.send), receive: a.receive.min(b.receive) })
}

fn latency_us(latency: &LatencyCounts) -> Option<LatencyUs> {
    let quantile = |share| latency.quantile_us(share);
    Some(LatencyUs { p50: quantile(0.5)?, p99: quantile(0.99)?, max: quantile(1.0)? })
}

fn moved(members: &[SideReport]) -> (Vec<NicBytes>, Vec<ChannelTotal>) {
    let mut by_nic: BTreeMap<&str, NicBytes> = BTreeMap::new();
    let mut by_channel: BTreeMap<(u16, &str), u64> = BTreeMap::new();
    for channel in members.iter().flat_map(|side| &side.channels) {
        let nic = by_nic.entry(&channel.nic).or_default();
        nic.tx_bytes += channel.tx_bytes;
        nic.rx_bytes += channel.rx_bytes;
        *by_channel.entry((channel.channel, &channel.nic)).or_default() +=
            channel.tx_bytes + channel.rx_bytes;
    }
    let nics = by_nic.into_iter().map(|(nic, bytes)| NicBytes { nic: nic.to_owned(), ..bytes });
    let total =
        |((channel, nic), bytes): ((u16, &str), u64)| ChannelTotal { channel, nic: nic.to_owned(), bytes };
    (nics.collect(), by_channel.into_iter().map(total).collect())
}

/// Rates in GB/s: for one flow by its own intervals, for several added up over common intervals; and the length of the
/// longest interval in seconds.
fn rates(flows: &[&[Interval]]) -> (Vec<f64>, f64) {
    let all = || flows.iter().copied().flatten();
    let longest = all().map(|i| i.end_s - i.start_s).fold(0.0, f64::max);
    if let [one] = flows {
        return (one.iter().map(rate).collect(), longest);
    }
    let longest = longest.max(INTERVAL.as_secs_f64());
    let ends = flows.iter().map(|flow| flow.last().map_or(0.0, |interval| interval.end_s));
    let common_s = ends.fold(f64::INFINITY, f64::min);
    let cells = (common_s / longest).floor();
    if !(cells >= 1.0 && cells.is_finite()) {
        let end_s = all().map(|interval| interval.end_s).fold(0.0, f64::max);
        let bytes = all().map(|interval| interval.bytes).sum();
        return (vec![rate(&Interval { start_s: 0.0, end_s, bytes })], end_s);
    }
    // Each interval overlaps few cells, which avoids a sum of all intervals for all cells.
    let mut moved = vec![0.0; cells as usize];
    for interval in all() {
        let (first, last) = ((interval.start_s / longest) as usize, (interval.end_s / longest) as usize);
        for (cell, bytes) in moved.iter_mut().enumerate().take(last + 1).skip(first) {
            *bytes += overlap(interval, cell as f64 * longest, (cell + 1) as f64 * longest);
        }
    }
    (moved.into_iter().map(|bytes| bytes / longest / 1e9).collect(), longest)
}

fn rate(interval: &Interval) -> f64 {
    let length_s = interval.end_s - interval.start_s;
    if length_s > 0.0 { interval.bytes as f64 / length_s / 1e9 } else { 0.0 }
}

/// Bytes of an interval between two times, if they are evenly spread.
fn overlap(interval: &Interval, start: f64, end: f64) -> f64 {
    let common = interval.end_s.min(end) - interval.start_s.max(start);
    interval.bytes as f64 * (common / (interval.end_s - interval.start_s)).clamp(0.0, 1.0)
}

fn spread(mut rates: Vec<f64>) -> Spread {
    rates.sort_unstable_by(f64::total_cmp);
    let at = |i: usize| rates.get(i).copied().unwrap_or(0.0);
    let last = rates.len().saturating_sub(1);
    // The two middle values, which are one if the number of values is odd.
    let p50 = f64::midpoint(at(last / 2), at(rates.len() / 2));
    Spread { min: at(0), p50, max: at(last) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interval(start_s: f64, end_s: f64, bytes: u64) -> Interval {
        Interval { start_s, end_s, bytes }
    }

    #[test]
    fn one_flow_has_its_own_intervals() {
        let flow = [interval(0.0, 0.1, 100_000_000), interval(0.1, 0.3, 100_000_000)];
        let (rates, longest_s) = rates(&[&flow]);
        assert!((longest_s - 0.2).abs() < 1e-9);
        assert!((rates[0] - 1.0).abs() < 1e-9 && (rates[1] - 0.5).abs() < 1e-9);
    }

    #[test]
    fn several_flows_add_up_where_all_run() {
        let a = [interval(0.0, 0.2, 200_000_000), interval(0.2, 0.4, 200_000_000)];
        let b = [interval(0.0, 0.2, 400_000_000)];
        let (rates, longest_s) = rates(&[&a, &b]);
        assert!((longest_s - 0.2).abs() < 1e-9);
        assert_eq!(rates.len(), 1);
        assert!((rates[0] - 3.0).abs() < 1e-9);
    }

    #[test]
    fn a_spread_is_ordered() {
        assert_eq!(spread(vec![3.0, 1.0, 2.0]), Spread { min: 1.0, p50: 2.0, max: 3.0 });
        assert_eq!(spread(vec![3.0, 1.0]), Spread { min: 1.0, p50: 2.0, max: 3.0 });
        assert_eq!(spread(Vec::new()), Spread::default());
    }
}
