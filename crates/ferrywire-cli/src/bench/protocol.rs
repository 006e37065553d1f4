//! The messages between the two ends of a bench: JSON in notifications of the engine.
//!
//! A `connect` with several endpoints first sends `Ask` and receives `Here`. Each peer of a run sends `Hello`; `serve`
//! answers `Welcome` or `Refused`; `connect` sends its own region. Then both go through the sizes in lockstep, see
//! [`super::session`]. `Bye` ends the run, or after `Here` a visit without a run.
//! Invariant: each message that an end waits for is one that the other end sends at that point.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::host::{Host, Workplace};
use super::measure::{Interval, LatencyCounts};
use super::ranks::messages::RankMessage;
use super::verify::Mismatch;
use crate::args::{Op, Pattern, Unpack, Verify};
use crate::exit::Failure;
use crate::memory::Memory;
use crate::sanitize;
use crate::units::{SIZE_BYTES_MAX, SIZES_MAX};

/// Version of these messages.
pub const VERSION: u32 = 11;

/// Longest timed part, and longest timeout: a week.
pub const SECONDS_MAX: f64 = 7.0 * 86400.0;
/// Most transfers in flight.
pub const DEPTH_MAX: usize = 4096;
/// Most blocks of one message.
pub const BLOCKS_MAX: u64 = 1 << 24;
/// Most peers of a run: 8 GPUs to 8 GPUs, and twice that.
pub const PEERS_MAX: usize = 128;

/// The parameters on which both ends must agree; the connecting end decides them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    pub op: Op,
    /// Which ends send to which.
    pub pattern: Pattern,
    /// The memory location of the connecting end.
    pub memory: Memory,
    /// The memory location of the serving end; `None` for that end's choice.
    pub peer_memory: Option<Memory>,
    /// How both ends gather scattered receives; `None` if no receive is scattered.
    #[serde(default)]
    pub unpack: Option<Unpack>,
    /// Message sizes in bytes, in order.
    pub sizes: Vec<u64>,
    /// Transfers in flight; `None` for a default by size.
    pub depth: Option<usize>,
    /// Blocks per message; `None` for one piece.
    pub blocks: Option<u64>,
    /// Peers that join this run, each with its own conversation.
    pub peers: usize,
    /// Whether the peers are endpoints of one process, one per GPU; otherwise they are processes.
    #[serde(default)]
    pub multi_gpu: bool,
    /// Number of messages of the timed part.
    pub iters: Option<u64>,
    /// Length of the timed part in seconds; with `iters`, the limit that is reached first.
    pub seconds: Option<f64>,
    /// Messages before the timed part; `None` for a default by depth.
    pub warmup: Option<u64>,
    /// How much of the data is verified.
    pub verify: Verify,
    /// Longest time without progress, in seconds.
    pub timeout_s: f64,
    /// Seed of contents and shuffles.
    pub seed: u64,
}

impl Run {
    /// Checks the parameters that the other end sent.
    ///
    /// # Errors
    /// A parameter is outside of its limits.
    pub fn check(&self) -> Result<(), String> {
        let seconds = [self.seconds, Some(self.timeout_s)];
        let good = (1..=SIZES_MAX).contains(&self.sizes.len())
            && self.sizes.iter().all(|size| *size <= SIZE_BYTES_MAX && *size >= self.blocks.unwrap_or(0))
            && self.depth.is_none_or(|depth| (1..=DEPTH_MAX).contains(&depth))
            && self.blocks.is_none_or(|blocks| (1..=BLOCKS_MAX).contains(&blocks))
            && (1..=PEERS_MAX).contains(&self.peers)
            && seconds.into_iter().flatten().all(|s| s > 0.0 && s <= SECONDS_MAX)
            && (self.seconds.is_some() || self.iters.is_some());
        if good { Ok(()) } else { Err("the options of this run are out of range".to_owned()) }
    }
}

/// One of the two ends of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Side {
    /// The connecting end, which configures the run.
    Connect,
    /// The serving end, which listens.
    Serve,
}

impl Side {
    pub fn other(self) -> Side {
        match self {
            Side::Connect => Side::Serve,
            Side::Serve => Side::Connect,
        }
    }
}

/// The first message of a peer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Hello {
    /// [`VERSION`] of the sender.
    pub version: u32,
    /// The run's id, which the peers of an incast share.
    pub run_id: String,
    /// The index of this peer in the run.
    pub member: usize,
    /// The boot id of the peer's machine, see [`Host`].
    pub boot_id: String,
    /// The parameters of the run.
    pub run: Run,
}

/// A point that both ends reach before either continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Point {
    /// Memory is filled or poisoned.
    Ready,
    /// The warm-up is over.
    Warm,
    /// The timed part may start.
    Go,
    /// The timed part is over.
    Over,
    /// Memory is poisoned for the verified pass.
    Verify,
    /// This peer's received data were verified.
    Verified,
}

/// Bytes that one end moved over one channel.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ChannelBytes {
    /// Index of the channel.
    pub channel: u16,
    /// The NIC of the channel.
    #[serde(deserialize_with = "sanitize::one_line")]
    pub nic: String,
    /// Bytes sent by this end.
    pub tx_bytes: u64,
    /// Bytes received by this end.
    pub rx_bytes: u64,
    /// Line rate of the NIC in bytes per second, if its driver reports one.
    pub line_bytes_per_s: Option<f64>,
    /// Sizes of the channel's socket buffers as the kernel counts them.
    #[serde(default)]
    pub buffers: SocketBuffers,
}

/// Sizes of a connection's socket buffers, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SocketBuffers {
    pub send: usize,
    pub receive: usize,
}

/// Measurements of one end about the flow that it drove.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FlowReport {
    /// Number of messages of the timed part.
    pub iterations: u64,
    /// Bytes completed in each interval of the timed part.
    pub intervals: Vec<Interval>,
    /// The time that each message took.
    pub latency: LatencyCounts,
    /// Further latencies by name.
    #[serde(deserialize_with = "sanitize::names")]
    pub extra: BTreeMap<String, LatencyCounts>,
}

/// Bytes and times of one end's staging between GPUs and connections, over all channels; stages overlap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Staged {
    /// Pinned memory of the staging rings at the end of the timed part, in bytes.
    pub pinned_bytes: u64,
    /// Payload that went through the rings, in bytes.
    pub bytes: u64,
    /// Seconds in which copies from GPUs were in flight.
    pub d2h_s: f64,
    /// Seconds in socket calls with payload of the rings.
    pub socket_s: f64,
    /// Seconds in which copies to GPUs were in flight.
    pub h2d_s: f64,
    /// Seconds in which a ring had no room for bytes to send or bytes received.
    pub waiting_s: f64,
    /// Calls of the GPUs' drivers.
    pub driver_calls: u64,
}

/// One end's report on the timed part of one size.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SideReport {
    /// The machine and cores of the process.
    pub place: Workplace,
    /// Length of the timed part in seconds.
    pub wall_s: f64,
    /// CPU seconds of the process in the timed part.
    pub cpu_s: f64,
    /// Share of the time in which the host's cores ran anything.
    pub host_busy: Option<f64>,
    /// The busiest thread, and the share of the time in which it ran.
    #[serde(default, deserialize_with = "sanitize::named_if_any")]
    pub busiest_thread: Option<(String, f64)>,
    /// The flow that this end drove.
    pub driven: Option<FlowReport>,
    /// Bytes by channel.
    pub channels: Vec<ChannelBytes>,
    /// Staging, if there was any.
    #[serde(default)]
    pub staged: Option<Staged>,
    /// Chunks that were resent.
    pub resent_chunks: u64,
    /// Channels lost since the ends connected, as messages.
    #[serde(deserialize_with = "sanitize::list")]
    pub lost_channels: Vec<String>,
}

/// All messages of both ends.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Message {
    /// `connect` asks which endpoints the process has, before `Hello`.
    Ask {
        /// Longest time without progress of the coming run, in seconds.
        #[serde(default)]
        timeout_s: f64,
    },
    /// `serve` lists its endpoints with their addresses. The endpoint that was asked is the first.
    Here {
        /// GPU and addresses of each endpoint.
        endpoints: Vec<(u32, Vec<SocketAddr>)>,
        /// The peer whose run is active now; `None` without one.
        #[serde(default)]
        busy: Option<String>,
    },
    /// `connect` asks for a run.
    Hello(Box<Hello>),
    /// `serve` refuses the run.
    Refused {
        /// The reason, for the user.
        #[serde(deserialize_with = "sanitize::some_lines")]
        why: String,
    },
    /// `serve` accepts the run.
    Welcome {
        /// The serving end's host.
        host: Box<Host>,
        /// Descriptor of the serving end's region, in hex.
        region: String,
        /// Number of the serving end's progress threads.
        threads: usize,
        /// The memory location of the serving end.
        memory: Memory,
        /// The name of the serving end's GPU.
        #[serde(default, deserialize_with = "sanitize::line_if_any")]
        gpu: Option<String>,
    },
    /// `connect` sends the descriptor of its own region.
    Region {
        /// The descriptor, in hex.
        region: String,
    },
    /// The sender has reached this point in measuring a size.
    At {
        /// Index of the size in the run's list.
        step: usize,
        /// The point that the sender has reached.
        point: Point,
    },
    /// The sender of a two-sided flow has sent this many messages and stops.
    Stop {
        /// Number of messages sent.
        count: u64,
    },
    /// `connect` has finished the timed part of a step.
    Done {
        /// The report of the connecting end.
        report: Box<SideReport>,
    },
    /// `serve` has received `Done` from every peer of the run.
    Reports {
        /// The peers' reports, by member.
        members: Vec<SideReport>,
        /// The serving end's report on each peer, by member.
        serve: Vec<SideReport>,
    },
    /// The sender's verification of its memory.
    Verdict {
        /// The first wrong byte.
        mismatch: Option<Box<Mismatch>>,
    },
    /// The driver of a flow asks the other end to do its part of one verified iteration.
    Part {
        /// Number of the iteration.
        iteration: u64,
        /// Slot of the iteration's message.
        slot: u64,
    },
    /// The sender has done its part of the iteration.
    PartDone,
    /// The driver has finished its verified pass.
    PassOver {
        /// Number of iterations of the pass.
        iterations: u64,
    },
    /// `serve` has verified a step with every peer of the run.
    Verified {
        /// Iterations of the verified pass, by member.
        iterations: Vec<u64>,
    },
    /// The sender waits for other peers of the run and must not be given up.
    Waiting,
    /// A message between ranks and rank 0.
    Rank(Box<RankMessage>),
    /// The sender cannot continue.
    Failed {
        /// The reason, for the user.
        #[serde(deserialize_with = "sanitize::some_lines")]
        why: String,
        /// Whether the sender only reports another peer's failure.
        #[serde(default)]
        hearsay: bool,
    },
    /// The run is over.
    Bye,
}

impl Message {
    /// The message that reports this end's failure.
    pub fn failed(failure: &Failure) -> Message {
        Message::Failed { why: failure.first_line(), hearsay: matches!(failure, Failure::Hearsay(_)) }
    }

    /// The message's kind as text, as in its JSON.
    pub fn kind(&self) -> String {
        let json = serde_json::to_value(self).unwrap_or_default();
        json["kind"].as_str().unwrap_or("unknown").to_owned()
    }
}

/// The error for a peer with another version.
pub fn other_version(theirs: u64) -> String {
    format!("this end speaks bench version {VERSION}, the other {theirs}: install the same ferrywire")
}

/// Bytes as hex digits.
pub fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Hex digits as bytes.
pub fn from_hex(text: &str) -> Option<Vec<u8>> {
    if !text.len().is_multiple_of(2) || !text.is_ascii() {
        return None;
    }
    (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hex_goes_there_and_back() {
        assert_eq!(from_hex(&to_hex(&[0, 1, 0xab, 255])), Some(vec![0, 1, 0xab, 255]));
        assert_eq!((from_hex("abc"), from_hex("zz")), (None, None));
    }
}
