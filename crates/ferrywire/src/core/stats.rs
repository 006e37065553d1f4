//! Counters that channels keep and reports read: plain atomics, no locks.

use crate::core::trace::Track;
use crate::payload::DevmemStats;
use crate::payload::lane::LaneBy;
use ferrywire_metrics::{ChannelSample, LaneSample, OccupancySample, StagingSample};
use ferrywire_net::{Conn, PathHealth};
use ferrywire_proto::limits;
use ferrywire_proto::protection::Protection;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The addresses of a channel's connection.
#[derive(Clone, Debug)]
struct Path {
    local: SocketAddr,
    remote: SocketAddr,
    congestion_control: String,
}

/// Backlog of a channel that is down, or whose lane is not ready at the peer.
pub(crate) const NO_BACKLOG: u64 = u64::MAX;

/// The kernel's last report about the current connection.
#[derive(Default)]
struct HealthCounters {
    rtt_us: AtomicU64,
    mss_bytes: AtomicU32,
    retransmits: AtomicU32,
    /// Retransmits of earlier connections, as last read from the kernel.
    past_retransmits: AtomicU64,
    congestion_window_bytes: AtomicU64,
    unsent_bytes: AtomicU32,
    send_buffer_bytes: AtomicUsize,
    receive_buffer_bytes: AtomicUsize,
}

impl HealthCounters {
    /// Retransmits of all connections. Those of the current one alone would make a counter shrink.
    fn all_retransmits(&self) -> u64 {
        let current = u64::from(self.retransmits.load(Ordering::Relaxed));
        self.past_retransmits.load(Ordering::Relaxed) + current
    }
}

/// Counters of one channel, over all its connections.
#[derive(Default)]
pub(crate) struct ChannelCounters {
    /// The channel in traces.
    pub track: Track,
    pub sent_bytes: AtomicU64,
    pub received_bytes: AtomicU64,
    health: HealthCounters,
    /// Bytes in the window. [`NO_BACKLOG`] while the channel takes no frames, so that it never is the least
    /// loaded.
    pub backlog: AtomicU64,
    /// Whether the channel has room for operations that channels take in order, so that channels after it take none.
    pub has_ordered_room: AtomicBool,
    pub generation: AtomicU32,
    /// Number of connections after the first one.
    reconnects: AtomicU32,
    pub alive: AtomicBool,
    pub zero_copy: AtomicBool,
    /// Name of the NIC when the connection was made. The NIC may be gone when the name is read.
    nic: Mutex<String>,
    pub lane: Arc<LaneCounters>,
    pub staging: StagingCounters,
    path: Mutex<Option<Path>>,
}

/// A bounded resource: how much there is of it, and how much is in use.
#[derive(Default)]
pub(crate) struct Occupancy {
    size: AtomicU64,
    used: AtomicU64,
}

impl Occupancy {
    /// Sets the size of the resource, and how much of it is in use.
    pub fn set(&self, (size, used): (usize, usize)) {
        self.size.store(size as u64, Ordering::Relaxed);
        self.used.store(used as u64, Ordering::Relaxed);
    }

    fn sample(&self) -> OccupancySample {
        let (size, used) = (self.size.load(Ordering::Relaxed), self.used.load(Ordering::Relaxed));
        OccupancySample { size, used }
    }
}

/// Counters of a channel's staging, over all its connections.
#[derive(Default)]
pub(crate) struct StagingCounters {
    pub pinned_bytes: AtomicU64,
    /// Pinned memory for short messages to GPUs, which belongs to the peer: its first channel counts it.
    pub message_bytes: AtomicU64,
    /// The rings of each direction, in bytes.
    pub send_ring: Occupancy,
    pub receive_ring: Occupancy,
    pub sent_bytes: AtomicU64,
    pub received_bytes: AtomicU64,
    pub ring_full_events: AtomicU64,
    pub d2h_ns: AtomicU64,
    pub h2d_ns: AtomicU64,
    pub socket_ns: AtomicU64,
    pub send_ring_full_ns: AtomicU64,
    pub receive_ring_full_ns: AtomicU64,
    pub driver_calls: AtomicU64,
}

impl StagingCounters {
    /// The counters to which each connection adds what it has counted itself.
    pub fn of_connections(&self) -> [&AtomicU64; 7] {
        [
            &self.sent_bytes,
            &self.received_bytes,
            &self.driver_calls,
            &self.d2h_ns,
            &self.h2d_ns,
            &self.send_ring_full_ns,
            &self.receive_ring_full_ns,
        ]
    }

    fn snapshot(&self) -> Option<StagingStats> {
        let messages = self.message_bytes.load(Ordering::Relaxed);
        let pinned_bytes = self.pinned_bytes.load(Ordering::Relaxed) + messages;
        // A channel that is down has no rings, and keeps its counts.
        let is_used = pinned_bytes > 0 || self.driver_calls.load(Ordering::Relaxed) > 0;
        let time = |ns: &AtomicU64| Duration::from_nanos(ns.load(Ordering::Relaxed));
        is_used.then(|| StagingStats {
            pinned_bytes,
            slot_bytes: limits::STAGING_SLOT_BYTES as u64,
            sent_bytes: self.sent_bytes.load(Ordering::Relaxed),
            received_bytes: self.received_bytes.load(Ordering::Relaxed),
            ring_full_events: self.ring_full_events.load(Ordering::Relaxed),
            d2h: time(&self.d2h_ns),
            h2d: time(&self.h2d_ns),
            socket: time(&self.socket_ns),
            send_ring_full_time: time(&self.send_ring_full_ns),
            receive_ring_full_time: time(&self.receive_ring_full_ns),
            driver_calls: self.driver_calls.load(Ordering::Relaxed),
        })
    }
}

/// Counters of a channel's lane, over all its connections.
#[derive(Default)]
pub(crate) struct LaneCounters {
    /// Largest number of sends posted at once.
    pub sends_most: AtomicU64,
    pub receives_most: AtomicU64,
    /// Results of the current connection that reported that the peer may be closing.
    pub closing_results: AtomicU64,
    pub setup_us: AtomicU64,
    /// Number of messages that have arrived at this end, or that the peer has acknowledged.
    pub moved: AtomicU64,
    /// The windows of the current connection, in requests.
    pub sends: Occupancy,
    pub receives: Occupancy,
    /// The lane's backend; `None` without a lane.
    pub by: Mutex<Option<LaneBy>>,
}

impl LaneCounters {
    fn snapshot(&self) -> Option<LaneStats> {
        let LaneBy { plugin, version, device, device_name, devmem } =
            self.by.lock().unwrap_or_else(PoisonError::into_inner).clone()?;
        Some(LaneStats {
            plugin,
            version,
            device,
            device_name,
            max_outstanding_sends: self.sends_most.load(Ordering::Relaxed),
            max_outstanding_receives: self.receives_most.load(Ordering::Relaxed),
            closing_results: self.closing_results.load(Ordering::Relaxed),
            setup: Duration::from_micros(self.setup_us.load(Ordering::Relaxed)),
            devmem: devmem.map(|counters| counters.snapshot()),
        })
    }
}

impl ChannelCounters {
    pub fn new() -> ChannelCounters {
        ChannelCounters {
            track: Track::next(),
            backlog: AtomicU64::new(NO_BACKLOG),
            ..ChannelCounters::default()
        }
    }

    /// Sets the name of the NIC of the next connection.
    pub fn runs_over(&self, nic: String) {
        *self.nic.lock().unwrap_or_else(PoisonError::into_inner) = nic;
    }

    /// Resets the counters of a connection for a new one.
    pub fn start(&self, conn: &dyn Conn, generation: u32) {
        let mut path = self.path.lock().unwrap_or_else(PoisonError::into_inner);
        let congestion_control = conn.congestion_control();
        let before = path.replace(Path { local: conn.local(), remote: conn.remote(), congestion_control });
        self.reconnects.fetch_add(u32::from(before.is_some()), Ordering::Relaxed);
        let past = self.health.retransmits.swap(0, Ordering::Relaxed);
        self.health.past_retransmits.fetch_add(past.into(), Ordering::Relaxed);
        self.generation.store(generation, Ordering::Relaxed);
        self.backlog.store(0, Ordering::Relaxed);
        self.alive.store(true, Ordering::Relaxed);
        self.zero_copy.store(conn.zero_copy(), Ordering::Relaxed);
        self.note_health(&conn.health());
        self.note_buffers(conn);
    }

    /// Stores the kernel's report: RTT and MSS of the path change while a connection runs.
    pub fn note_health(&self, health: &PathHealth) {
        self.health.rtt_us.store(health.rtt.as_micros() as u64, Ordering::Relaxed);
        self.health.mss_bytes.store(health.mss_bytes, Ordering::Relaxed);
        self.health.retransmits.store(health.retransmits, Ordering::Relaxed);
        self.health.congestion_window_bytes.store(health.congestion_window_bytes, Ordering::Relaxed);
        self.health.unsent_bytes.store(health.unsent_bytes, Ordering::Relaxed);
    }

    /// Stores the sizes of the connection's socket buffers, which the kernel may change at any time.
    pub fn note_buffers(&self, conn: &dyn Conn) {
        let (send, receive) = conn.buffer_bytes();
        self.health.send_buffer_bytes.store(send, Ordering::Relaxed);
        self.health.receive_buffer_bytes.store(receive, Ordering::Relaxed);
    }

    /// Bytes in flight; 0 while the channel is down.
    pub fn in_flight(&self) -> u64 {
        match self.backlog.load(Ordering::Relaxed) {
            NO_BACKLOG => 0,
            bytes => bytes,
        }
    }

    /// The figures for metrics; `None` before the first connection.
    pub fn sample(&self, index: u16) -> Option<ChannelSample> {
        let stats = self.snapshot(index)?;
        let retransmits = {
            // Hold the lock under which a new connection moves the counts of the last one.
            let _path = self.path.lock().unwrap_or_else(PoisonError::into_inner);
            self.health.all_retransmits()
        };
        let staging = stats.staging.map(|staging| StagingSample {
            pinned_bytes: staging.pinned_bytes,
            d2h_s: staging.d2h.as_secs_f64(),
            h2d_s: staging.h2d.as_secs_f64(),
            socket_s: staging.socket.as_secs_f64(),
            ring_full_s: (staging.send_ring_full_time + staging.receive_ring_full_time).as_secs_f64(),
            ring_full_events: staging.ring_full_events,
            send_ring_bytes: self.staging.send_ring.sample(),
            receive_ring_bytes: self.staging.receive_ring.sample(),
        });
        let lane = stats
            .lane
            .map(|_| LaneSample { sends: self.lane.sends.sample(), receives: self.lane.receives.sample() });
        Some(ChannelSample {
            channel: index,
            nic: stats.nic,
            alive: stats.alive,
            tx_bytes: stats.sent_bytes,
            rx_bytes: stats.received_bytes,
            reconnects: u64::from(self.reconnects.load(Ordering::Relaxed)),
            retransmits,
            rtt_s: stats.rtt.as_secs_f64(),
            congestion_window_bytes: self.health.congestion_window_bytes.load(Ordering::Relaxed),
            send_queue_bytes: u64::from(self.health.unsent_bytes.load(Ordering::Relaxed)),
            in_flight_bytes: self.in_flight(),
            staging,
            lane,
        })
    }

    pub fn snapshot(&self, index: u16) -> Option<ChannelStats> {
        let path = self.path.lock().unwrap_or_else(PoisonError::into_inner).clone()?;
        Some(ChannelStats {
            index,
            nic: self.nic.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            local: path.local,
            remote: path.remote,
            alive: self.alive.load(Ordering::Relaxed),
            sent_bytes: self.sent_bytes.load(Ordering::Relaxed),
            received_bytes: self.received_bytes.load(Ordering::Relaxed),
            rtt: Duration::from_micros(self.health.rtt_us.load(Ordering::Relaxed)),
            mss_bytes: self.health.mss_bytes.load(Ordering::Relaxed),
            send_buffer_bytes: self.health.send_buffer_bytes.load(Ordering::Relaxed),
            receive_buffer_bytes: self.health.receive_buffer_bytes.load(Ordering::Relaxed),
            congestion_control: path.congestion_control,
            generation: self.generation.load(Ordering::Relaxed),
            zero_copy: self.zero_copy.load(Ordering::Relaxed),
            lane: self.lane.snapshot(),
            staging: self.staging.snapshot(),
        })
    }
}

/// Figures of a channel's lane, which carries payload beside the channel's connection.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LaneStats {
    /// Name of the plugin, or `devmem`.
    pub plugin: String,
    /// Version of the plugin's interface.
    pub version: String,
    /// Index of the plugin's device on this host.
    pub device: i32,
    /// The device's own name.
    pub device_name: String,
    /// Largest number of sends posted at once so far.
    pub max_outstanding_sends: u64,
    /// Largest number of receives so far that were posted at once, or finished and not reused.
    pub max_outstanding_receives: u64,
    /// How often the plugin reported that the peer may be closing. Harmless if all messages arrived.
    pub closing_results: u64,
    /// Time from the channel's connection until both directions of the lane were ready.
    pub setup: Duration,
    /// Figures of gather, for devmem TCP.
    pub devmem: Option<DevmemStats>,
}

/// Figures of a channel's staging: payload copied between GPUs and the connection through pinned memory. Counts and times
/// are those of all connections of the channel.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StagingStats {
    /// Bytes of pinned memory in use. A peer's first channel counts those for short messages to GPUs too.
    pub pinned_bytes: u64,
    /// Largest piece staged by one copy, in bytes.
    pub slot_bytes: u64,
    /// Bytes staged to be sent.
    pub sent_bytes: u64,
    /// Bytes staged to GPUs.
    pub received_bytes: u64,
    /// How often a received payload had to wait for room in the ring.
    pub ring_full_events: u64,
    /// Time during which copies from GPUs were in flight, as observed. Times of different stages overlap.
    pub d2h: Duration,
    /// Time during which copies to GPUs were in flight, as observed.
    pub h2d: Duration,
    /// Time in socket calls that moved payload from or to a ring.
    pub socket: Duration,
    /// Time during which the ring had no room for another frame to send.
    pub send_ring_full_time: Duration,
    /// Time during which received payloads waited for room in the ring.
    pub receive_ring_full_time: Duration,
    /// Driver calls: copies, events behind them, and queries of their state.
    pub driver_calls: u64,
}

/// Figures of one channel of a peer.
#[derive(Clone, Debug)]
pub struct ChannelStats {
    /// Index of the channel, the same at both ends.
    pub index: u16,
    /// Name of the local NIC when the connection was made, or its address if it has no known name.
    pub nic: String,
    /// Local address of the connection.
    pub local: SocketAddr,
    /// Remote address of the connection.
    pub remote: SocketAddr,
    /// Whether the channel is connected.
    pub alive: bool,
    /// Bytes sent, including headers, over all connections of the channel.
    pub sent_bytes: u64,
    /// Bytes received, including headers, over all connections of the channel.
    pub received_bytes: u64,
    /// Smoothed RTT, as measured by the kernel.
    pub rtt: Duration,
    /// Maximum segment size of the path in bytes; 0 if unknown.
    pub mss_bytes: u32,
    /// Socket send buffer in bytes as the kernel counts it, which is twice the requested size.
    pub send_buffer_bytes: usize,
    /// Socket receive buffer in bytes as the kernel counts it, which is twice the requested size.
    pub receive_buffer_bytes: usize,
    /// Congestion control in use.
    pub congestion_control: String,
    /// Number of the current connection: it grows with each attempt to reconnect.
    pub generation: u32,
    /// Whether sends avoid the copy into the kernel.
    pub zero_copy: bool,
    /// Figures of the lane that carries the payload, if there is one.
    pub lane: Option<LaneStats>,
    /// Figures of staging, if anything was staged.
    pub staging: Option<StagingStats>,
}

/// Figures of a peer.
#[derive(Clone, Debug, Default)]
pub struct PeerStats {
    /// Name of the transport that carries the payload.
    pub transport: &'static str,
    /// Why this transport was chosen, where there was a choice.
    pub transport_reason: String,
    /// The peer's channels.
    pub channels: Vec<ChannelStats>,
    /// Chunks resent because their channel was lost.
    pub resent_chunks: u64,
    /// Lost channels, one line each: channel, NIC and reason.
    pub lost_channels: Vec<String>,
    /// Failed attempts to connect a channel. A path that leads nowhere is tried less and less often.
    pub failed_dials: u64,
    /// Time from the first dial until all channels were connected.
    pub setup: Duration,
    /// Largest chunk in bytes.
    pub chunk_bytes: usize,
    /// Most frames in flight per channel.
    pub window: usize,
    /// Whether chunks carry a checksum.
    pub crc: bool,
    /// How data connections are protected, for example `aes-256-gcm`; `None` if everything but the control session
    /// travels in clear.
    pub protection: Option<Protection>,
}
