//! Rates between two samples of a process.
//!
//! Invariant: a peer or channel that is not in the earlier sample has rates of zero, and no rate is negative.

use std::collections::BTreeMap;

use ferrywire_metrics::{ChannelSample, PeerSample, ProcessSample};
use serde::Serialize;

/// A process.
#[derive(Debug, Serialize)]
pub struct ProcessRates {
    /// Process id.
    pub pid: u32,
    /// Name of the program.
    pub program: String,
    /// How the program uses ferrywire.
    pub face: String,
    /// Cores that ferrywire's own threads use.
    pub cpu_cores: f64,
    /// Connected peers, with a row for each NIC.
    pub paths: Vec<PathRates>,
}

/// The channels of one peer over one NIC.
#[derive(Debug, Serialize)]
pub struct PathRates {
    /// The peer.
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
    /// The channels.
    pub channels: Vec<ChannelRates>,
}

/// A channel.
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
    /// The rates of a process since the earlier samples.
    pub fn between(before: &[ProcessSample], now: &ProcessSample) -> ProcessRates {
        let before = before.iter().find(|process| process.pid == now.pid && process.program == now.program);
        let seconds = before.map_or(0.0, |before| now.at_s - before.at_s);
        let per_s = |grown: f64| if seconds > 0.0 { grown.max(0.0) / seconds } else { 0.0 };
        let mut paths = Vec::new();
        // A peer that is gone has no rate.
        for peer in now.peers.iter().filter(|peer| !peer.transport.is_empty()) {
            let before = before.and_then(|before| before.peers.iter().find(|old| same(old, peer)));
            paths.extend(paths_of(before, peer, &per_s));
        }
        ProcessRates {
            pid: now.pid,
            program: now.program.clone(),
            face: now.face.clone(),
            cpu_cores: per_s(now.cpu_s - before.map_or(now.cpu_s, |before| before.cpu_s)),
            paths,
        }
    }
}

fn same(a: &PeerSample, b: &PeerSample) -> bool {
    (&a.endpoint, &a.peer) == (&b.endpoint, &b.peer)
}

fn ended(peer: &PeerSample) -> u64 {
    peer.operations.iter().map(|kind| kind.completed + kind.failed).sum()
}

fn paths_of(before: Option<&PeerSample>, now: &PeerSample, per_s: &dyn Fn(f64) -> f64) -> Vec<PathRates> {
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
