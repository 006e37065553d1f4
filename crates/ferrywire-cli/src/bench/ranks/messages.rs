//! What ranks say to each other where they meet: each to rank 0, and rank 0 to all.
//!
//! ```text
//!   rank r                     rank 0
//!   Join ──────────────────▶   (options, version, world as its own?)
//!   Here ──────────────────▶   (addresses, memory)         once all are ready
//!        ◀────────────────── Table
//!   Note ──────────────────▶   what might be better there, from ranks that have something to say
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

/// One thing said.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RankMessage {
    /// A rank is there.
    Join(Box<Card>),
    /// It is ready for the others.
    Here(Box<Place>),
    /// Everybody is ready: who is who.
    Table(Box<Table>),
    /// A serving rank has come to the next start or end of a timed part.
    Arrived,
    /// So many times all of them have.
    Pass(u64),
    /// What a pair measured.
    Step(Box<PairReport>),
    /// What might be better at a rank, for people: rank 0 prints.
    Note(String),
    /// A rank has nothing more to do.
    Done,
    /// A rank cannot go on.
    Failed {
        /// Whose fault it is, where it is another's.
        blamed: Option<u32>,
        /// Why.
        why: String,
    },
    /// The run is over.
    Over(Option<Fault>),
}

/// How a rank introduces itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Card {
    /// Its number.
    pub rank: u32,
    /// How many it believes there are.
    pub world_size: u32,
    /// Its number on its host.
    pub local_rank: u32,
    /// The name of its host.
    #[serde(deserialize_with = "sanitize::one_line")]
    pub host: String,
    /// That host, for this boot.
    #[serde(deserialize_with = "sanitize::one_line")]
    pub boot_id: String,
    /// Version of the bench's protocol.
    pub protocol: u32,
    /// Version of the command.
    #[serde(deserialize_with = "sanitize::one_line")]
    pub version: String,
    /// What its launcher calls this run, where it does.
    pub job: Option<String>,
    /// Its options, as far as all ranks must have the same.
    pub options: BTreeMap<String, String>,
}

/// Where a rank is found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Where it listens; empty for a rank that connects.
    pub addresses: Vec<SocketAddr>,
    /// Where its bytes lie.
    pub memory: Memory,
    /// Number of its GPU, or of its endpoint where bytes lie on the host.
    pub gpu: u32,
}

/// Who is who, and what is to be done.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Table {
    /// Names the run.
    pub run_id: String,
    /// What is to be done.
    pub run: Run,
    /// All ranks, in order.
    pub ranks: Vec<Entry>,
}

/// One rank of the table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// The name of its host.
    #[serde(deserialize_with = "sanitize::one_line")]
    pub host: String,
    /// That host, for this boot.
    #[serde(deserialize_with = "sanitize::one_line")]
    pub boot_id: String,
    /// Its number on its host.
    pub local_rank: u32,
    /// Where it is found.
    pub place: Place,
}

/// What a pair measured in one size.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PairReport {
    /// Index of the size.
    pub step: usize,
    /// Index of the pair, see [`super::pairs`].
    pub pair: usize,
    /// What the end that connects saw.
    pub near: SideReport,
    /// What the end that serves saw.
    pub far: SideReport,
    /// Iterations of the verified pass, if there was one.
    pub verified_iterations: Option<u64>,
}

/// Why a run ended, and whose doing that is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// The rank.
    pub rank: u32,
    /// Its host, where that is known.
    #[serde(default, deserialize_with = "sanitize::line_if_any")]
    pub host: Option<String>,
    /// What happened.
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
