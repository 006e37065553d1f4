//! A way for payload beside a channel's connection: messages posted in order, each into memory that the
//! receiver has posted for it.
//!
//! A *posted* transport gives each channel a [`Lane`]; the channel's connection (its companion) goes on to
//! carry heads, acknowledgements and small messages. A lane is driven by `core/posted/`, which holds all the
//! rules: order, windows, credit, what an error means. An implementation only does what it is told and
//! says what it saw.
//!
//! Invariant: of each direction only the oldest request is ever tested, and nothing is posted beyond
//! [`Lane::window`].
//! Read next: `plugin/lane.rs`, then `core/posted/mod.rs`.

use super::counters::DevmemCounters;
use crate::error::Error;
use ferrywire_memory::Memory;
use ferrywire_ncclnet::abi::HANDLE_BYTES;
use ferrywire_net::Conn;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

const _: () = assert!(HANDLE_BYTES == ferrywire_proto::limits::LANE_HANDLE_BYTES);

/// Why the kernel or a NIC cannot read memory that its owner has not taken back: what a failed operation says of its region.
pub const UNREADABLE: &str = "it cannot be read any more: unmapped, or of a file that is shorter now";

/// Which plugin and device carry a lane.
#[derive(Clone, Debug)]
pub struct LaneBy {
    /// Name of the plugin, or of what else carries it.
    pub plugin: String,
    /// Version of the plugin's interface.
    pub version: String,
    /// Index of the device here.
    pub device: i32,
    /// The device's own name.
    pub device_name: String,
    /// Counters of the lane, where devmem TCP carries it.
    pub devmem: Option<Arc<DevmemCounters>>,
}

/// A posted request, as its lane knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket(
    /// The lane's own number of it.
    pub usize,
);

/// What came of posting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Post {
    /// It is posted.
    Posted(Ticket),
    /// Not now: too many are posted, or the peer is not ready. With what was seen.
    Full(&'static str),
    /// The lane is of no use any more, and why.
    Failed(String),
}

/// What came of testing the oldest request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// It is not done.
    Pending,
    /// It is done.
    Done,
    /// The peer may be closing, or gone: what is under way may still arrive.
    Closing(String),
    /// Of a send, the oldest or one behind it, whose memory cannot be read, and why. What was to come there never will:
    /// the lane is of no use any more, and another one would fare no better with that memory.
    Unreadable(Ticket, Error),
    /// The lane is of no use any more, and why.
    Failed(String),
}

/// A run of bytes that one message moves from or to.
#[derive(Clone)]
pub struct Run {
    pub(crate) memory: Arc<Memory>,
    pub(crate) offset: u64,
    pub(crate) bytes: usize,
}

impl Run {
    /// The memory that it is part of.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Where in that memory it begins.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// How long it is.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Its first byte; only to be touched where the memory may be.
    pub fn base(&self) -> *mut u8 {
        // What is made into a run was checked against its memory.
        self.memory.span(self.offset, self.bytes as u64).unwrap_or(std::ptr::null_mut())
    }
}

/// Which way bytes are copied, between a slot and the ranges of one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// From the ranges to the slot.
    Pack,
    /// From the slot to the ranges.
    Unpack,
}

/// Why a receive is not gathered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ungathered {
    /// Its bytes cannot go where they belong; the lane goes on.
    Target(Error),
    /// The lane is of no use any more, and why.
    Failed(String),
}

/// Copies within host memory.
pub(crate) fn copy_on_host(way: Way, slot: &Run, ranges: &[Run]) {
    let mut at = slot.base();
    let mut left = slot.bytes;
    for range in ranges {
        let bytes = range.bytes.min(left);
        let (from, to) = match way {
            Way::Pack => (range.base(), at),
            Way::Unpack => (at, range.base()),
        };
        // SAFETY: both are inside live host memory, checked when the runs were made; a slot is memory of
        // its own, so they do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
        left -= bytes;
        // SAFETY: `at` stays within the slot, of which `left` bytes are left.
        at = unsafe { at.add(bytes) };
    }
}

/// Which directions of a lane have requests that are posted and not given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InFlight {
    /// Sends.
    pub sends: bool,
    /// Receives.
    pub receives: bool,
}

impl InFlight {
    /// None.
    pub const NOTHING: InFlight = InFlight { sends: false, receives: false };

    /// Whether neither direction has any.
    pub fn is_nothing(self) -> bool {
        self == InFlight::NOTHING
    }
}

/// Where the set-up of a lane stands.
pub enum Progress {
    /// It goes on.
    Pending,
    /// For the other end, once.
    Handle(Box<[u8; HANDLE_BYTES]>),
    /// It stands, and this carries it.
    Ready(Box<dyn Lane>, LaneBy),
    /// There will be no lane, and why.
    Failed(String),
}

/// The set-up of one lane, turned by the control side: nothing here blocks.
pub trait Setup: Send {
    /// Whether a connection of its own has to be dialled for it: by the end that opened the session, once.
    fn wants_connection(&mut self) -> bool {
        false
    }

    /// That connection, proven at both ends.
    fn connected(&mut self, _conn: Box<dyn Conn>) -> Result<(), String> {
        Err("it needs no connection, and the peer has dialled one".into())
    }

    /// The other end's handle has come.
    fn peer_listens(&mut self, handle: [u8; HANDLE_BYTES]) -> Result<(), String>;

    /// What has happened since it was last asked.
    fn poll(&mut self, now: Duration) -> Progress;

    /// Time since it began.
    fn age(&self, now: Duration) -> Duration;
}

/// Both directions of one channel's payload. Used by one thread at a time.
pub trait Lane: Send {
    /// Requests per direction that may be posted and not given back.
    fn window(&self) -> usize;

    /// Of those that send.
    fn send_window(&self) -> usize {
        self.window()
    }

    /// Whether a connection of it may stand here before the other end can take anything: nothing is sent then before that
    /// end has said something on the channel's connection, which it does first of all.
    fn may_stand_alone(&self) -> bool {
        false
    }

    /// How long to leave it alone after it was asked in vain; `None`: for whoever asks to say.
    fn pause(&self) -> Option<Duration> {
        None
    }

    /// Largest message.
    fn message_bytes_max(&self) -> usize;

    /// A dead path under it, in words. A send that is done says nothing of that: the peer may lack it for ever.
    fn path_trouble(&self) -> Option<String> {
        None
    }

    /// Whether such memory can be sent from (packed), or received into. What cannot goes through a slot; why is logged.
    fn takes(&mut self, _way: Way, _run: &Run) -> bool {
        true
    }

    /// Posts a message. Its memory stays as it is until the request is done or the lane closed.
    fn isend(&mut self, run: &Run) -> Post;

    /// Posts room for the next message, which is exactly as long.
    fn irecv(&mut self, run: &Run) -> Post;

    /// Tests the oldest send.
    fn test_send(&mut self, ticket: Ticket) -> Step;

    /// Tests the oldest receive that is not done.
    fn test_recv(&mut self, ticket: Ticket) -> Step;

    /// Whether what arrives for this memory lies elsewhere, in fragments, until it is gathered.
    fn scatters(&self, memory: &Memory) -> bool;

    /// Begins to gather a receive that is done, the lane's `number`th.
    fn gather(&mut self, number: u64, run: &Run) -> Result<(), Ungathered>;

    /// Whether that is done. After an error nothing more can be gathered.
    fn gathered(&mut self, number: u64) -> Poll<Result<(), Error>>;

    /// Gives the oldest finished receive back; what it brought has been taken.
    fn consumed(&mut self, ticket: Ticket) -> Result<(), String>;

    /// Packs ranges into a slot, or unpacks a slot to them. Begins, and goes on when it is called again; one
    /// at a time each way. The lane goes on after an error.
    fn copy(&mut self, way: Way, slot: &Run, ranges: &[Run]) -> Poll<Result<(), Error>>;

    /// Memory for slots through which messages of such memory go; for those that are thrown away, `None`.
    fn slot_memory(&self, like: Option<&Memory>, bytes: usize) -> Result<Arc<Memory>, String>;

    /// The same of the host, which [`Lane::copy`] reaches beside memory of a GPU: where the lane takes none of that.
    fn host_slot_memory(&self, bytes: usize) -> Result<Arc<Memory>, String> {
        self.slot_memory(None, bytes)
    }

    /// Undoes what it keeps for memory whose region is gone, unless `busy` says that it is in use.
    fn forget_revoked(&mut self, busy: &dyn Fn(&Arc<Memory>) -> bool);

    /// Closes both directions, whatever is in flight. Afterwards nothing touches any memory, once
    /// [`Lane::has_released`] says so.
    fn close(&mut self, in_flight: InFlight);

    /// Whether nothing reads the memory of messages any more that a closed lane was sending. Ask again.
    fn has_released(&mut self) -> bool {
        true
    }

    /// Plugin, device and NIC, for errors.
    fn describe(&self) -> String;
}
