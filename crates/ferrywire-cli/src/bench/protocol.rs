//! What the two ends of a bench say to each other: JSON in notifications of the engine.
//!
//! A `connect` with several endpoints first says `Ask`, and hears `Here`. Each peer of a run says `Hello`; `serve`
//! answers `Welcome` or `Refused`; `connect` gives its own region. Then both walk through the sizes in lockstep, see
//! [`super::session`]. `Bye` ends the run, or after `Here` a visit that asks for none.
//! Invariant: an end never waits for a message that the other end, doing its part, does not send.

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
pub const VERSION: u32 = 9;

/// Longest timed part, and longest timeout: a week.
pub const SECONDS_MAX: f64 = 7.0 * 86400.0;
/// Most transfers in flight.
pub const DEPTH_MAX: usize = 4096;
/// Most blocks of one message.
pub const BLOCKS_MAX: u64 = 1 << 24;
/// Most peers of a run: 8 GPUs to 8 GPUs, and as many again.
pub const PEERS_MAX: usize = 128;

/// What both ends must agree on; decided by the connecting end.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// The operation.
    pub op: Op,
    /// Who sends to whom.
    pub pattern: Pattern,
    /// Where the connecting end's bytes lie.
    pub memory: Memory,
    /// Where the serving end's bytes lie; `None`: where that end chooses.
    pub peer_memory: Option<Memory>,
    /// How scattered receives are gathered at both ends; `None`: none are.
    #[serde(default)]
    pub unpack: Option<Unpack>,
    /// Message sizes, in order.
    pub sizes: Vec<u64>,
    /// Transfers in flight; `None`: by size.
    pub depth: Option<usize>,
    /// Blocks per message; `None`: the message is one piece.
    pub blocks: Option<u64>,
    /// Peers that join this run, each with a conversation of its own.
    pub peers: usize,
    /// Whether they are endpoints of one process, one for each GPU; else processes.
    #[serde(default)]
    pub multi_gpu: bool,
    /// Messages of the timed part.
    pub iters: Option<u64>,
    /// Length of the timed part; with `iters`, whichever ends first.
    pub seconds: Option<f64>,
    /// Messages before the timed part; `None`: by depth.
    pub warmup: Option<u64>,
    /// How much is checked.
    pub verify: Verify,
    /// Longest time without progress.
    pub timeout_s: f64,
    /// Seed of contents and shuffles.
    pub seed: u64,
}

impl Run {
    /// Checks what came from the other end, which may not ask for anything absurd.
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

/// One of the two ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Side {
    /// The end that configures.
    Connect,
    /// The end that listens.
    Serve,
}

impl Side {
    /// The other end.
    pub fn other(self) -> Side {
        match self {
            Side::Connect => Side::Serve,
            Side::Serve => Side::Connect,
        }
    }
}

/// The first message.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Hello {
    /// [`VERSION`] of the sender.
    pub version: u32,
    /// The run; peers of an incast share it.
    pub run_id: String,
    /// Which peer of the run this is.
    pub member: usize,
    /// The machine that it runs on, see [`Host`].
    pub boot_id: String,
    /// What is to be done.
    pub run: Run,
}

/// A point that both ends reach before either goes on.
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
    /// What arrived was right, as far as this peer is concerned.
    Verified,
}

/// Bytes that one end moved over one channel.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ChannelBytes {
    /// Index of the channel.
    pub channel: u16,
    /// The NIC it ran over.
    #[serde(deserialize_with = "sanitize::one_line")]
    pub nic: String,
    /// Sent by this end.
    pub tx_bytes: u64,
    /// Received by this end.
    pub rx_bytes: u64,
    /// Line rate of the NIC, where its driver tells one.
    pub line_bytes_per_s: Option<f64>,
    /// Its socket buffers as the kernel counts them.
    #[serde(default)]
    pub buffers: SocketBuffers,
}

/// Sizes of a connection's socket buffers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SocketBuffers {
    /// To send.
    pub send: usize,
    /// To receive.
    pub receive: usize,
}

/// What one end measured of the flow it drove.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FlowReport {
    /// Messages.
    pub iterations: u64,
    /// Bytes per interval.
    pub intervals: Vec<Interval>,
    /// Time of each message.
    pub latency: LatencyCounts,
    /// Further latencies by name.
    #[serde(deserialize_with = "sanitize::names")]
    pub extra: BTreeMap<String, LatencyCounts>,
}

/// What one end staged between GPUs and its connections, over all channels; stages overlap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Staged {
    /// Pinned memory of the rings at the end.
    pub pinned_bytes: u64,
    /// Payload that went through them.
    pub bytes: u64,
    /// Seconds in which copies from GPUs were under way.
    pub d2h_s: f64,
    /// Seconds in socket calls with payload of the rings.
    pub socket_s: f64,
    /// Seconds in which copies to GPUs were under way.
    pub h2d_s: f64,
    /// Seconds in which a ring had no room for what was to be sent, or had arrived.
    pub waiting_s: f64,
    /// Calls of the GPUs' drivers.
    pub driver_calls: u64,
}

/// What one end saw of the timed part of one size.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SideReport {
    /// Where the process works.
    pub place: Workplace,
    /// Length of the timed part.
    pub wall_s: f64,
    /// CPU seconds of the process in it.
    pub cpu_s: f64,
    /// Share of the time that the host's cores ran anything at all.
    pub host_busy: Option<f64>,
    /// The busiest thread and the share of the time it ran.
    #[serde(default, deserialize_with = "sanitize::named_if_any")]
    pub busiest_thread: Option<(String, f64)>,
    /// The flow this end drove.
    pub driven: Option<FlowReport>,
    /// Bytes by channel.
    pub channels: Vec<ChannelBytes>,
    /// What was staged, if anything was.
    #[serde(default)]
    pub staged: Option<Staged>,
    /// Chunks that were sent again.
    pub resent_chunks: u64,
    /// Channels lost so far, in words.
    #[serde(deserialize_with = "sanitize::list")]
    pub lost_channels: Vec<String>,
}

/// Everything both ends say.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Message {
    /// `connect` asks which endpoints the process has, before it greets.
    Ask {
        /// Longest time without progress of the run that is to come.
        #[serde(default)]
        timeout_s: f64,
    },
    /// `serve` names them, by GPU, with the addresses of each. The one that was asked is the first.
    Here {
        /// Number of the GPU and addresses.
        endpoints: Vec<(u32, Vec<SocketAddr>)>,
        /// Whose run takes place there now; nothing: none.
        #[serde(default)]
        busy: Option<String>,
    },
    /// `connect` asks for a run.
    Hello(Box<Hello>),
    /// `serve` does not take part.
    Refused {
        /// Why, for the user.
        #[serde(deserialize_with = "sanitize::some_lines")]
        why: String,
    },
    /// `serve` takes part.
    Welcome {
        /// Its host.
        host: Box<Host>,
        /// Descriptor of its region, in hex.
        region: String,
        /// Progress threads.
        threads: usize,
        /// Where its bytes lie.
        memory: Memory,
        /// The GPU there.
        #[serde(default, deserialize_with = "sanitize::line_if_any")]
        gpu: Option<String>,
    },
    /// `connect` answers with the descriptor of its own region.
    Region {
        /// In hex.
        region: String,
    },
    /// The sender has reached a point of a step.
    At {
        /// Index into the sizes.
        step: usize,
        /// The point.
        point: Point,
    },
    /// The sender of a two-sided flow has sent this many messages and stops.
    Stop {
        /// Messages sent.
        count: u64,
    },
    /// `connect` has finished the timed part of a step.
    Done {
        /// What it saw.
        report: Box<SideReport>,
    },
    /// `serve` has heard `Done` from every peer of the run.
    Reports {
        /// The peers' reports, by member.
        members: Vec<SideReport>,
        /// The serving end's report on each of them.
        serve: Vec<SideReport>,
    },
    /// What the sender found in its memory.
    Verdict {
        /// The first wrong byte.
        mismatch: Option<Box<Mismatch>>,
    },
    /// The driver of a flow asks the other end to do its part for one verified iteration.
    Part {
        /// The iteration.
        iteration: u64,
        /// Where in memory.
        slot: u64,
    },
    /// The part is done.
    PartDone,
    /// The driver has finished its verified pass.
    PassOver {
        /// Iterations it took.
        iterations: u64,
    },
    /// `serve` has verified a step with every peer of the run.
    Verified {
        /// Iterations of the verified pass, by member.
        iterations: Vec<u64>,
    },
    /// The sender waits for others of the run, and is not to be given up.
    Waiting,
    /// What ranks say to each other where they meet.
    Rank(Box<RankMessage>),
    /// The sender cannot go on.
    Failed {
        /// Why, for the user.
        #[serde(deserialize_with = "sanitize::some_lines")]
        why: String,
        /// Whether the sender has only heard of the failure of another peer.
        #[serde(default)]
        hearsay: bool,
    },
    /// The run is over.
    Bye,
}

impl Message {
    /// That the sender has failed.
    pub fn failed(failure: &Failure) -> Message {
        Message::Failed { why: failure.first_line(), hearsay: matches!(failure, Failure::Hearsay(_)) }
    }
}

/// What a peer is told that speaks another version.
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
