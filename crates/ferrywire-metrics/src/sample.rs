//! A sample: the counters of a process at one moment. Counters only grow while their peer is connected.
//!
//! Invariant: a field that a process of another version does not send has its default, so `ferrywire watch` reads
//! samples of that process too.

use serde::{Deserialize, Serialize};

/// A library of ferrywire in a process. A process may have several: a Python program whose NCCL uses the plugin has two.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ProcessSample {
    /// Process id, in the PID namespace of the process.
    pub pid: u32,
    /// Name of the program that uses ferrywire.
    pub program: String,
    /// How the program uses ferrywire: `command`, `rust`, `python`, `c`, `nixl` or `nccl`.
    pub face: String,
    /// Seconds since an arbitrary moment of the host, for rates between two samples.
    pub at_s: f64,
    /// CPU seconds of ferrywire's own threads: of all libraries those that run, and of this library those that have ended.
    pub cpu_s: f64,
    /// The part of `cpu_s` that threads used which have ended.
    pub ended_cpu_s: f64,
    /// CPU seconds of all of ferrywire's threads that were in a sample of this library, also when they have ended. Never
    /// shrinks, but of threads that end, several libraries may count the same seconds.
    pub total_cpu_s: f64,
    /// Sessions refused because the peer did not prove the secret.
    pub auth_failures: u64,
    /// The connected peers of all endpoints, and peers named `closed` with the counts of those that are gone: one for each
    /// label that a connected peer has too, and one for all others.
    pub peers: Vec<PeerSample>,
    /// Name of the socket that gave the sample: each library of ferrywire in a process has one of its own.
    #[serde(skip)]
    pub socket: String,
    /// Process id in the PID namespace of the reader; 0 if the reader does not see the process.
    #[serde(skip)]
    pub reader_pid: u32,
}

/// A peer of an endpoint, with its counters.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PeerSample {
    /// Identity of the local endpoint; of the NCCL plugin `nccl`.
    pub endpoint: String,
    /// Name of the peer, with its port. Two sessions with one endpoint have the same.
    pub peer: String,
    /// Number of the session; of the NCCL plugin 0.
    pub session: u64,
    /// The peer's label in metrics: without a port, so that a peer that connects again has the same label.
    pub label: String,
    /// Transport that carries the payload.
    pub transport: String,
    /// Why this transport was chosen; empty where there was no choice.
    pub reason: String,
    /// Chunks resent because their channel was lost.
    pub resent_chunks: u64,
    /// Connections of channels that were lost.
    pub lost_channels: u64,
    /// Fences that were passed: both ends had closed a lost connection and reported what they had placed.
    pub fences: u64,
    /// Operations of each kind that were posted at this end.
    pub operations: Vec<KindSample>,
    /// The peer's channels that were connected at least once.
    pub channels: Vec<ChannelSample>,
}

/// Counts of the operations of one kind with one peer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct KindSample {
    /// Name of the kind: `write`, `read`, `send`, `recv`, `notify` or `serve` (the answer to a peer's read); of the
    /// NCCL plugin `isend` or `irecv`.
    pub kind: String,
    /// Number of operations that were posted.
    pub started: u64,
    /// Number of operations that finished.
    pub completed: u64,
    /// Number of operations that ended with an error, or were cancelled.
    pub failed: u64,
}

/// A channel of a peer, with its counters.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ChannelSample {
    /// Number of the channel within its peer.
    pub channel: u16,
    /// Name of the local NIC, or its address if it has no known name.
    pub nic: String,
    /// Whether the channel is connected.
    pub alive: bool,
    /// Bytes that the channel has sent, including headers.
    pub tx_bytes: u64,
    /// Bytes that the channel has received, including headers.
    pub rx_bytes: u64,
    /// Number of times that the channel was reconnected.
    pub reconnects: u64,
    /// Number of packets that the kernel retransmitted, over all connections of the channel.
    pub retransmits: u64,
    /// Smoothed round-trip time of the current connection in seconds.
    pub rtt_s: f64,
    /// Congestion window of the current connection in bytes.
    pub congestion_window_bytes: u64,
    /// Bytes in the kernel's send queue that were not sent.
    pub send_queue_bytes: u64,
    /// Bytes sent and not acknowledged by the peer's engine; of the NCCL plugin, by the peer's kernel.
    pub in_flight_bytes: u64,
    /// Staging of the channel through pinned memory, if there was any.
    pub staging: Option<StagingSample>,
    /// The lane of the channel, if payload goes over one.
    pub lane: Option<LaneSample>,
}

/// A lane of a channel: use of its windows, in requests.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LaneSample {
    /// Size and use of the window for sends.
    pub sends: OccupancySample,
    /// Size and use of the window for receives.
    pub receives: OccupancySample,
}

/// Size and use of a bounded resource at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct OccupancySample {
    /// Size of the resource.
    pub size: u64,
    /// How much of the resource is in use.
    pub used: u64,
}

/// Staging of a channel: copies between a GPU and pinned memory.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct StagingSample {
    /// Pinned bytes of the channel's rings.
    pub pinned_bytes: u64,
    /// Seconds during which copies from the GPU were in flight.
    pub d2h_s: f64,
    /// Seconds during which copies to the GPU were in flight.
    pub h2d_s: f64,
    /// Seconds in socket calls that moved payload from or to a ring.
    pub socket_s: f64,
    /// Seconds during which a full ring kept payload waiting.
    pub ring_full_s: f64,
    /// Number of times that received payload waited for room in a ring.
    pub ring_full_events: u64,
    /// Size and use of the rings for payload to send, in bytes.
    pub send_ring_bytes: OccupancySample,
    /// Size and use of the rings for received payload, in bytes.
    pub receive_ring_bytes: OccupancySample,
}

impl ChannelSample {
    /// Adds another channel's counters to these; gauges stay as they are.
    fn retire(&mut self, other: &ChannelSample) {
        self.tx_bytes += other.tx_bytes;
        self.rx_bytes += other.rx_bytes;
        self.reconnects += other.reconnects;
        self.retransmits += other.retransmits;
        if let Some(other) = &other.staging {
            let own = self.staging.get_or_insert_default();
            own.d2h_s += other.d2h_s;
            own.h2d_s += other.h2d_s;
            own.socket_s += other.socket_s;
            own.ring_full_s += other.ring_full_s;
            own.ring_full_events += other.ring_full_events;
        }
    }
}

impl PeerSample {
    /// Adds the counts of a closed peer to these: its channels are summed by NIC.
    pub(crate) fn retire(&mut self, other: &PeerSample) {
        self.resent_chunks += other.resent_chunks;
        self.lost_channels += other.lost_channels;
        self.fences += other.fences;
        for other in &other.operations {
            match self.operations.iter_mut().find(|own| own.kind == other.kind) {
                Some(own) => {
                    own.started += other.started;
                    own.completed += other.completed;
                    own.failed += other.failed;
                }
                None => self.operations.push(other.clone()),
            }
        }
        for other in &other.channels {
            let index = self.channels.iter().position(|own| own.nic == other.nic).unwrap_or_else(|| {
                let channel = self.channels.len() as u16;
                self.channels.push(ChannelSample {
                    channel,
                    nic: other.nic.clone(),
                    ..ChannelSample::default()
                });
                self.channels.len() - 1
            });
            self.channels[index].retire(other);
        }
    }
}
