//! The messages of ranks: from each rank to rank 0, and from rank 0 to all.
//!
//! ```text
//!   rank r                     rank 0
//!   Join ──────────────────▶   (options, version, world as its own?)
//!   Here ──────────────────▶   (addresses, memory)         once all are ready
//!        ◀────────────────── Table
//!   Note ──────────────────▶   notes about choices that may be slower, from ranks that have some
//!   Arrived ───────────────▶   at the start and at the end of each timed part, from ranks that serve
//!        ◀────────────────── Pass                          once all of them have arrived
//!   Step ──────────────────▶   what a pair measured, from ranks that connect
//!   Done or Failed ────────▶
//!        ◀────────────────── Over                          well, or with the first failure
//! ```

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::super::protocol::{Run, SideReport};
use crate::memory::Memory;
use crate::sanitize;

/// One message between a rank and rank 0.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RankMessage {
    /// A rank has joined.
    Join(Box<Card>),
    /// A rank is ready for the others.
    Here(Box<Place>),
    /// All ranks are ready; here are their places.
    Table(Box<Table>),
    /// A serving rank has reached the next start or end of a timed part.
    Arrived,
    /// All serving ranks have arrived this many times.
    Pass(u64),
    /// A pair's measurements.
    Step(Box<PairReport>),
    /// A note about a rank, for rank 0 to print.
    Note(String),
    /// A rank has finished.
    Done,
    /// A rank cannot continue.
    Failed {
        /// The rank at fault, if it is another one.
        blamed: Option<u32>,
        /// Why the rank cannot continue.
        why: String,
    },
    /// The run is over.
    Over(Option<Fault>),
}

/// The message by which a rank introduces itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Card {
    pub rank: u32,
    /// The world size that the rank was started with.
    pub world_size: u32,
    /// The rank's number on its host.
    pub local_rank: u32,
    /// The name of the rank's host.
    #[serde(deserialize_with = "sanitize::one_line")]
    pub host: String,
    /// The boot id of that host.
    #[serde(deserialize_with = "sanitize::one_line")]
    pub boot_id: String,
    /// Version of the bench's protocol.
    pub protocol: u32,
    /// Version of the command.
    #[serde(deserialize_with = "sanitize::one_line")]
    pub version: String,
    /// The launcher's id of the run, if it has one.
    pub job: Option<String>,
    /// The options that all ranks must have in common.
    pub options: BTreeMap<String, String>,
}

/// The addresses, memory and GPU of a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Addresses on which the rank listens; empty for a rank that connects.
    pub addresses: Vec<SocketAddr>,
    /// The rank's memory location.
    pub memory: Memory,
    /// Index of the rank's GPU, or of its endpoint for host memory.
    pub gpu: u32,
}

/// The places of all ranks, and the parameters of the run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Table {
    /// The run's id.
    pub run_id: String,
    /// The run's parameters.
    pub run: Run,
    /// All ranks, in order.
    pub ranks: Vec<Entry>,
}

/// One rank of the table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// The name of the rank's host.
    #[serde(deserialize_with = "sanitize::one_line")]
    pub host: String,
    /// The boot id of that host.
    #[serde(deserialize_with = "sanitize::one_line")]
    pub boot_id: String,
    /// The rank's number on its host.
    pub local_rank: u32,
    /// The addresses, memory and GPU of the rank.
    pub place: Place,
}

/// A pair's measurements for one size.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PairReport {
    /// Index of the size.
    pub step: usize,
    /// Index of the pair, see [`super::pairs`].
    pub pair: usize,
    /// The report of the connecting end.
    pub near: SideReport,
    /// The report of the serving end.
    pub far: SideReport,
    /// Iterations of the verified pass, if there was one.
    pub verified_iterations: Option<u64>,
}

/// The end of a run, and the rank at fault.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    pub rank: u32,
    /// The rank's host, if it is known.
    #[serde(default, deserialize_with = "sanitize::line_if_any")]
    pub host: Option<String>,
    /// Why the run failed.
    #[serde(deserialize_with = "sanitize::some_lines")]
    pub why: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Some(host) => write!(f, "rank {} ({host}): {}", self.rank, self.why),
            None => write!(f, "rank {}: {}", self.rank, self.why),
        }
    }
}
