//! Rates between two samples of a process.
//!
//! A process has a sample of each library of ferrywire in it, such as the Python module and the NCCL plugin. It is one
//! process here, whose rows name the face.
//!
//! Invariant: a peer or channel that is not in the earlier sample has rates of zero, and no rate is negative.

use std::collections::BTreeMap;

use ferrywire_metrics::{ChannelSample, PeerSample, ProcessSample};
use serde::Serialize;

/// The rates of one process.
#[derive(Debug, Serialize)]
pub struct ProcessRates {
    /// Process id.
    pub pid: u32,
    /// Name of the program.
    pub program: String,
    /// How the program uses ferrywire; several faces are separated by `+`.
    pub face: String,
    /// The faces through which the program uses ferrywire, also those without a peer.
    #[serde(skip)]
    pub faces: Vec<String>,
    /// Cores that ferrywire's own threads use.
    pub cpu_cores: f64,
    /// Connected peers, with a row for each NIC.
    pub paths: Vec<PathRates>,
}

/// The rates of one peer's channels over one NIC.
#[derive(Debug, Serialize)]
pub struct PathRates {
    /// The face that connected the peer.
    pub face: String,
    /// Name of the peer.
    pub peer: String,
    /// The local NIC.
    pub nic: String,
    /// Transport that carries the payload.
    pub transport: String,
    /// Decimal gigabytes per second sent.
    pub tx_gb_per_s: f64,
    /// Decimal gigabytes per second received.
    pub rx_gb_per_s: f64,
    /// Operations with the peer that ended, per second; in the peer's first row only.
    pub operations_per_s: Option<f64>,
    /// Longest smoothed round-trip time in microseconds.
    pub rtt_us: f64,
    /// Packets that the kernel retransmitted, per second.
    pub retransmits_per_s: f64,
    /// Lost connections of channels so far; in the peer's first row only.
    pub lost_channels: Option<u64>,
    /// The channels of the peer over the NIC.
    pub channels: Vec<ChannelRates>,
}

/// The rates of one channel.
#[derive(Debug, Serialize)]
pub struct ChannelRates {
    /// The channel's number.
    pub channel: u16,
    /// Whether the channel is connected.
    pub alive: bool,
    /// Decimal gigabytes per second sent.
    pub tx_gb_per_s: f64,
    /// Decimal gigabytes per second received.
    pub rx_gb_per_s: f64,
    /// Smoothed round-trip time in microseconds.
    pub rtt_us: f64,
    /// Packets that the kernel retransmitted, per second.
    pub retransmits_per_s: f64,
    /// How often the channel was reconnected.
    pub reconnects: u64,
}

impl ProcessRates {
    /// The rates of all processes since the earlier samples.
    pub fn of_all(before: &[ProcessSample], now: &[ProcessSample]) -> Vec<ProcessRates> {
        let mut processes: Vec<Vec<&ProcessSample>> = Vec::new();
        for sample in now {
            let is_same = |process: &&mut Vec<&ProcessSample>| {
                sample.reader_pid != 0 && process[0].reader_pid == sample.reader_pid
            };
            match processes.iter_mut().find(is_same) {
                Some(process) => process.push(sample),
                None => processes.push(vec![sample]),
            }
        }
        processes.iter().map(|now| ProcessRates::between(before, now)).collect()
    }

    /// The rates of the process with these samples.
    fn between(before: &[ProcessSample], now: &[&ProcessSample]) -> ProcessRates {
        let earlier = |now: &ProcessSample| before.iter().find(|before| before.socket == now.socket);
        let mut paths = Vec::new();
        for now in now {
            let before = earlier(now);
            let per_s = |grown: f64| per_s(grown, before.map_or(0.0, |before| now.at_s - before.at_s));
            // A peer that is gone has no rate.
            for peer in now.peers.iter().filter(|peer| !peer.transport.is_empty()) {
                let before = before.and_then(|before| before.peers.iter().find(|old| same(old, peer)));
                paths.extend(paths_of(&now.face, before, peer, &per_s));
            }
        }
        // A library that was loaded meanwhile brings the time of its threads that have ended.
        let before: Option<Vec<_>> = now.iter().map(|now| earlier(now)).collect();
        let cpu_cores =
            before.map_or(0.0, |before| per_s(cpu_s(now) - cpu_s(&before), now[0].at_s - before[0].at_s));
        let mut faces: Vec<String> = now.iter().map(|now| now.face.clone()).collect();
        faces.dedup();
        let (pid, program) = (now[0].pid, now[0].program.clone());
        ProcessRates { pid, program, face: faces.join("+"), faces, cpu_cores, paths }
    }
}

fn per_s(grown: f64, seconds: f64) -> f64 {
    if seconds > 0.0 { grown.max(0.0) / seconds } else { 0.0 }
}

/// CPU seconds of a process: each of its libraries counts all threads that run, and its own that have ended.
fn cpu_s(samples: &[&ProcessSample]) -> f64 {
    let running = samples.iter().map(|each| each.cpu_s - each.ended_cpu_s).fold(0.0, f64::max);
    running + samples.iter().map(|each| each.ended_cpu_s).sum::<f64>()
}

fn same(a: &PeerSample, b: &PeerSample) -> bool {
    (&a.endpoint, &a.peer, a.session) == (&b.endpoint, &b.peer, b.session)
}

fn ended(peer: &PeerSample) -> u64 {
    peer.operations.iter().map(|kind| kind.completed + kind.failed).sum()
}

fn paths_of(
    face: &str,
    before: Option<&PeerSample>,
    now: &PeerSample,
    per_s: &dyn Fn(f64) -> f64,
) -> Vec<PathRates> {
    let mut nics: BTreeMap<&str, Vec<ChannelRates>> = BTreeMap::new();
    for channel in &now.channels {
        let before = before.and_then(|peer| peer.channels.iter().find(|old| old.channel == channel.channel));
        let before = before.unwrap_or(channel);
        let grown = |of: fn(&ChannelSample) -> u64| of(channel).saturating_sub(of(before)) as f64;
        nics.entry(&channel.nic).or_default().push(ChannelRates {
            channel: channel.channel,
            alive: channel.alive,
            tx_gb_per_s: per_s(grown(|each| each.tx_bytes)) / 1e9,
            rx_gb_per_s: per_s(grown(|each| each.rx_bytes)) / 1e9,
            rtt_us: channel.rtt_s * 1e6,
            retransmits_per_s: per_s(grown(|each| each.retransmits)),
            reconnects: channel.reconnects,
        });
    }
    let operations = ended(now).saturating_sub(before.map_or(ended(now), ended)) as f64;
    let rows = nics.into_iter().enumerate().map(|(index, (nic, channels))| PathRates {
        face: face.to_owned(),
        peer: now.peer.clone(),
        nic: nic.to_owned(),
        transport: now.transport.clone(),
        tx_gb_per_s: channels.iter().map(|each| each.tx_gb_per_s).sum(),
        rx_gb_per_s: channels.iter().map(|each| each.rx_gb_per_s).sum(),
        operations_per_s: (index == 0).then(|| per_s(operations)),
        rtt_us: channels.iter().map(|each| each.rtt_us).fold(0.0, f64::max),
        retransmits_per_s: channels.iter().map(|each| each.retransmits_per_s).sum(),
        lost_channels: (index == 0).then_some(now.lost_channels),
        channels,
    });
    rows.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: both were compared with the first one's sample of before, so one had the difference of the two as its
    /// rate.
    #[test]
    fn two_sessions_with_one_peer_have_rates_of_their_own() {
        let peer = |session, tx_bytes| PeerSample {
            peer: "host:7431".into(),
            session,
            transport: "tcp".into(),
            channels: vec![ChannelSample { nic: "eth1".into(), tx_bytes, ..ChannelSample::default() }],
            ..PeerSample::default()
        };
        let sample = |at_s, second| ProcessSample {
            at_s,
            peers: vec![peer(1, 1_000_000_000), peer(2, second)],
            ..ProcessSample::default()
        };
        let rates = ProcessRates::of_all(&[sample(1.0, 100_000_000_000)], &[sample(2.0, 103_000_000_000)]);
        let sent: Vec<f64> = rates[0].paths.iter().map(|path| path.tx_gb_per_s).collect();
        assert_eq!(sent, [0.0, 3.0]);
    }
}
