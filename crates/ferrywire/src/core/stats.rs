//! Counters that channels keep and reports read: plain atomics, no locks.

use crate::payload::DevmemStats;
use crate::payload::lane::LaneBy;
use ferrywire_net::{Conn, PathHealth};
use ferrywire_proto::limits;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Where a channel's connection runs.
#[derive(Clone, Debug)]
struct Path {
    local: SocketAddr,
    remote: SocketAddr,
    congestion_control: String,
}

/// The backlog of a channel that is down, or whose lane the peer has not got ready yet.
pub(crate) const NO_BACKLOG: u64 = u64::MAX;

/// Counters of one channel, over all its connections.
#[derive(Default)]
pub(crate) struct ChannelCounters {
    pub sent_bytes: AtomicU64,
    pub received_bytes: AtomicU64,
    pub rtt_us: AtomicU64,
    pub mss_bytes: AtomicU32,
    send_buffer_bytes: AtomicUsize,
    receive_buffer_bytes: AtomicUsize,
    /// Bytes in the window; [`NO_BACKLOG`] while the channel takes none, so that it is nobody's least loaded.
    pub backlog: AtomicU64,
    pub generation: AtomicU32,
    pub alive: AtomicBool,
    pub zero_copy: AtomicBool,
    /// Name of the NIC, as it was when the connection was made: it may be gone when it is asked for.
    nic: Mutex<String>,
    pub lane: Arc<LaneCounters>,
    pub staging: StagingCounters,
    path: Mutex<Option<Path>>,
}

/// Counters of what a channel stages, of its current connection but for `full` and `socket_ns`.
#[derive(Default)]
pub(crate) struct StagingCounters {
    pub pinned_bytes: AtomicU64,
    pub sent_bytes: AtomicU64,
    pub received_bytes: AtomicU64,
    pub ring_full_events: AtomicU64,
    pub d2h_ns: AtomicU64,
    pub h2d_ns: AtomicU64,
    pub socket_ns: AtomicU64,
    pub send_ring_full_ns: AtomicU64,
    pub receive_full_ns: AtomicU64,
    pub driver_calls: AtomicU64,
}

impl StagingCounters {
    fn snapshot(&self) -> Option<StagingStats> {
        let pinned_bytes = self.pinned_bytes.load(Ordering::Relaxed);
        let time = |ns: &AtomicU64| Duration::from_nanos(ns.load(Ordering::Relaxed));
        (pinned_bytes > 0).then(|| StagingStats {
            pinned_bytes,
            slot_bytes: limits::STAGING_SLOT_BYTES as u64,
            sent_bytes: self.sent_bytes.load(Ordering::Relaxed),
            received_bytes: self.received_bytes.load(Ordering::Relaxed),
            ring_full_events: self.ring_full_events.load(Ordering::Relaxed),
            d2h: time(&self.d2h_ns),
            h2d: time(&self.h2d_ns),
            socket: time(&self.socket_ns),
            send_ring_full_time: time(&self.send_ring_full_ns),
            receive_full: time(&self.receive_full_ns),
            driver_calls: self.driver_calls.load(Ordering::Relaxed),
        })
    }
}

/// Counters of a channel's lane, over all its connections.
#[derive(Default)]
pub(crate) struct LaneCounters {
    /// Requests posted at most.
    pub sends_most: AtomicU64,
    pub receives_most: AtomicU64,
    /// Results of the current connection that said the peer may be closing.
    pub closing_results: AtomicU64,
    pub setup_us: AtomicU64,
    /// Messages that have arrived, or that the peer has acknowledged.
    pub moved: AtomicU64,
    /// What carries it; nothing without a lane.
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
            receives_posted_most: self.receives_most.load(Ordering::Relaxed),
            closing_results: self.closing_results.load(Ordering::Relaxed),
            setup: Duration::from_micros(self.setup_us.load(Ordering::Relaxed)),
            devmem: devmem.map(|counters| counters.snapshot()),
        })
    }
}

impl ChannelCounters {
    pub fn new() -> ChannelCounters {
        ChannelCounters { backlog: AtomicU64::new(NO_BACKLOG), ..ChannelCounters::default() }
    }

    /// The connection that is about to take up the channel runs over this NIC.
    pub fn runs_over(&self, nic: String) {
        *self.nic.lock().unwrap_or_else(PoisonError::into_inner) = nic;
    }

    /// A connection takes up the channel.
    pub fn start(&self, conn: &dyn Conn, generation: u32) {
        let mut path = self.path.lock().unwrap_or_else(PoisonError::into_inner);
        let congestion_control = conn.congestion_control();
        *path = Some(Path { local: conn.local(), remote: conn.remote(), congestion_control });
        self.generation.store(generation, Ordering::Relaxed);
        self.backlog.store(0, Ordering::Relaxed);
        self.alive.store(true, Ordering::Relaxed);
        self.zero_copy.store(conn.zero_copy(), Ordering::Relaxed);
        self.note_health(&conn.health());
        self.note_buffers(conn);
    }

    /// What is known of the path changes while a connection runs.
    pub fn note_health(&self, health: &PathHealth) {
        self.rtt_us.store(health.rtt.as_micros() as u64, Ordering::Relaxed);
        self.mss_bytes.store(health.mss_bytes, Ordering::Relaxed);
    }

    /// Socket buffers may be chosen anew while a connection runs.
    pub fn note_buffers(&self, conn: &dyn Conn) {
        let (send, receive) = conn.buffer_bytes();
        self.send_buffer_bytes.store(send, Ordering::Relaxed);
        self.receive_buffer_bytes.store(receive, Ordering::Relaxed);
    }

    /// Bytes on their way; none while the channel is down.
    pub fn in_flight(&self) -> u64 {
        match self.backlog.load(Ordering::Relaxed) {
            NO_BACKLOG => 0,
            bytes => bytes,
        }
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
            rtt: Duration::from_micros(self.rtt_us.load(Ordering::Relaxed)),
            mss_bytes: self.mss_bytes.load(Ordering::Relaxed),
            send_buffer_bytes: self.send_buffer_bytes.load(Ordering::Relaxed),
            receive_buffer_bytes: self.receive_buffer_bytes.load(Ordering::Relaxed),
            congestion_control: path.congestion_control,
            generation: self.generation.load(Ordering::Relaxed),
            zero_copy: self.zero_copy.load(Ordering::Relaxed),
            lane: self.lane.snapshot(),
            staging: self.staging.snapshot(),
        })
    }
}

/// What carries a channel's payload where it does not go through the connection itself.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LaneStats {
    /// Name of the plugin, or `devmem`.
    pub plugin: String,
    /// Version of its interface.
    pub version: String,
    /// Index of its device here.
    pub device: i32,
    /// The device's own name.
    pub device_name: String,
    /// Most sends that were ever posted at once.
    pub max_outstanding_sends: u64,
    /// Most receives that were ever posted, or finished and not given back, at once.
    pub receives_posted_most: u64,
    /// How often the plugin said that the peer may be closing; absorbed if all arrived.
    pub closing_results: u64,
    /// Time from the channel's connection until both directions stood.
    pub setup: Duration,
    /// What it did with fragments, where it is of devmem TCP.
    pub devmem: Option<DevmemStats>,
}

/// What a channel moves between GPUs and its connection, through pinned memory.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StagingStats {
    /// Pinned memory it has, in bytes.
    pub pinned_bytes: u64,
    /// Largest run that is staged at once, in bytes.
    pub slot_bytes: u64,
    /// Payload staged to be sent, in bytes, over its current connection.
    pub sent_bytes: u64,
    /// Payload staged to GPUs, likewise.
    pub received_bytes: u64,
    /// How often a payload that arrived had to wait for room.
    pub ring_full_events: u64,
    /// How long copies from GPUs were under way, until that was seen. Times of stages overlap.
    pub d2h: Duration,
    /// How long copies to GPUs were, likewise.
    pub h2d: Duration,
    /// Time in socket calls that took payload from or to a ring.
    pub socket: Duration,
    /// How long the rings had no room for another frame to be sent.
    pub send_ring_full_time: Duration,
    /// How long payloads that arrived waited for room.
    pub receive_full: Duration,
    /// Calls of the driver for copies and marks behind them, and questions whether they have failed.
    pub driver_calls: u64,
}

/// One channel of a peer, as it stands.
#[derive(Clone, Debug)]
pub struct ChannelStats {
    /// Its number, the same on both sides.
    pub index: u16,
    /// Name of the local NIC it runs over, as it was when it was connected; else the NIC's address.
    pub nic: String,
    /// Local address.
    pub local: SocketAddr,
    /// The peer's address.
    pub remote: SocketAddr,
    /// Whether it carries data now.
    pub alive: bool,
    /// Bytes sent, frames' heads included, over all its connections.
    pub sent_bytes: u64,
    /// Bytes received, likewise.
    pub received_bytes: u64,
    /// Smoothed round trip as the kernel measures it.
    pub rtt: Duration,
    /// Payload of a packet at most, as the path allows it so far; 0 where nobody knows.
    pub mss_bytes: u32,
    /// Size of its socket buffer for sending as the kernel counts it, which is twice what was asked for.
    pub send_buffer_bytes: usize,
    /// The same for receiving.
    pub receive_buffer_bytes: usize,
    /// Congestion control in force.
    pub congestion_control: String,
    /// How often it has been connected anew.
    pub generation: u32,
    /// Whether sends spare the copy.
    pub zero_copy: bool,
    /// What carries the payload, if it is not this connection.
    pub lane: Option<LaneStats>,
    /// What is staged, if anything was.
    pub staging: Option<StagingStats>,
}

/// A peer, as it stands.
#[derive(Clone, Debug, Default)]
pub struct PeerStats {
    /// Name of the transport.
    pub transport: &'static str,
    /// Why it is that one, where it was a choice.
    pub transport_reason: String,
    /// Its channels.
    pub channels: Vec<ChannelStats>,
    /// Chunks sent again because their channel was lost.
    pub resent_chunks: u64,
    /// Channels lost, one line each: which, over which NIC, why.
    pub lost_channels: Vec<String>,
    /// Time from the first dial until all channels stood.
    pub setup: Duration,
    /// Largest chunk in force, in bytes.
    pub chunk_bytes: usize,
    /// Frames in flight per channel at most.
    pub window: usize,
    /// Whether chunks carry a checksum.
    pub crc: bool,
}
