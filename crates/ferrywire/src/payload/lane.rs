//! A path for payload beside a channel's connection: messages in order, each into memory that the receiver
//! has posted for it.
//!
//! A backend gives each channel a [`Lane`]. The channel's connection carries headers, acknowledgements and
//! small messages. `core/posted/` drives the lane and has all the rules: order, windows, credit, and what an
//! error means. An implementation executes calls and reports results.
//!
//! Invariant: in each direction only the oldest request is tested, and no more than [`Lane::window`] requests
//! are posted.
//! Read next: `plugin/lane.rs`, then `core/posted/mod.rs`.

use super::counters::DevmemCounters;
use crate::error::Error;
use ferrywire_memory::{Memory, MemoryLocation};
use ferrywire_ncclnet::abi::HANDLE_BYTES;
use ferrywire_net::Conn;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

const _: () = assert!(HANDLE_BYTES == ferrywire_proto::limits::LANE_HANDLE_BYTES);

/// Why a transfer failed whose memory the kernel or a NIC cannot read although it is still registered.
pub const UNREADABLE: &str =
    "the memory cannot be read any more: it was unmapped, or its file is shorter now";

/// The plugin and device of a lane.
#[derive(Clone, Debug)]
pub struct LaneBy {
    /// Name of the plugin or other backend.
    pub plugin: String,
    /// Version of the plugin's interface.
    pub version: String,
    /// Index of the device on this host.
    pub device: i32,
    /// The device's own name.
    pub device_name: String,
    /// Counters of a lane over devmem TCP.
    pub devmem: Option<Arc<DevmemCounters>>,
}

/// Identifies a posted request to its lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket(
    /// The lane's own number for the request.
    pub usize,
);

/// The result of posting a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Post {
    /// The request is posted.
    Posted(Ticket),
    /// The request cannot be posted now: the window is full, or the peer is not ready. The text names the
    /// sign.
    Full(&'static str),
    /// The lane has failed for this reason and cannot be used any more.
    Failed(String),
}

/// The result of testing the oldest request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// The request is not done.
    Pending,
    /// The request is done.
    Done,
    /// The peer may be closing or gone. Messages in flight may still arrive.
    Closing(String),
    /// The memory of the oldest send, or of one behind it, cannot be read. Its bytes can never be sent, so
    /// the lane cannot be used any more. Another lane would fail on that memory too.
    Unreadable(Ticket, Error),
    /// The lane has failed for this reason and cannot be used any more.
    Failed(String),
}

/// A contiguous range of memory that is part of one message.
#[derive(Clone)]
pub struct Run {
    pub(crate) memory: Arc<Memory>,
    pub(crate) offset: u64,
    pub(crate) bytes: usize,
}

impl Run {
    /// The memory that the run lies in.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Offset of the run in that memory, in bytes.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Length of the run in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Address of the first byte. Access it only while the memory may be accessed.
    pub fn base(&self) -> *mut u8 {
        // The range was checked when the run was created.
        self.memory.span(self.offset, self.bytes as u64).unwrap_or(std::ptr::null_mut())
    }
}

/// The direction of a copy between a slot and the ranges of one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// From the ranges to the slot.
    Pack,
    /// From the slot to the ranges.
    Unpack,
}

/// Why a receive cannot be gathered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ungathered {
    /// The bytes cannot be copied to their target. The lane can be used further.
    Target(Error),
    /// The lane has failed for this reason and cannot be used any more.
    Failed(String),
}

/// Copies between a slot and ranges, all in host memory.
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

/// Whether requests of a lane are posted and not returned, in each direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InFlight {
    /// Whether sends are posted and not returned.
    pub sends: bool,
    /// Whether receives are posted and not returned.
    pub receives: bool,
}

impl InFlight {
    /// No requests in either direction.
    pub const NOTHING: InFlight = InFlight { sends: false, receives: false };

    /// Whether neither direction has requests in flight.
    pub fn is_nothing(self) -> bool {
        self == InFlight::NOTHING
    }
}

/// Progress of a lane's set-up.
pub enum Progress {
    /// Nothing has changed since the last poll.
    Pending,
    /// The handle to send to the other end; returned once.
    Handle(Box<[u8; HANDLE_BYTES]>),
    /// The lane is ready, with its plugin and device.
    Ready(Box<dyn Lane>, LaneBy),
    /// The set-up has failed, for this reason.
    Failed(String),
}

/// The set-up of one lane. The control thread polls it, so nothing here blocks.
pub trait Setup: Send {
    /// Whether the lane needs a connection of its own; true at most once. The end that opened the session then dials a
    /// connection. While the other end is busy, the channel is dialled again, and both ends set up a new lane.
    fn wants_connection(&mut self) -> bool {
        false
    }

    /// Delivers the connection that [`Setup::wants_connection`] requested, proven at both ends.
    ///
    /// # Errors
    /// Why the lane cannot be set up.
    fn connected(&mut self, _conn: Box<dyn Conn>) -> Result<(), String> {
        Err("the peer dialled a connection for a lane that needs none".into())
    }

    /// Delivers the other end's handle.
    ///
    /// # Errors
    /// Why the lane cannot be set up.
    fn peer_listens(&mut self, handle: [u8; HANDLE_BYTES]) -> Result<(), String>;

    /// Returns progress since the last call. Does not block.
    fn poll(&mut self, now: Duration) -> Progress;

    /// Time since the set-up began.
    fn age(&self, now: Duration) -> Duration;
}

/// Both directions of one channel's payload. One thread at a time uses it.
pub trait Lane: Send {
    /// Most requests in each direction that may be posted and not returned.
    fn window(&self) -> usize;

    /// Most sends that may be posted and not returned.
    fn send_window(&self) -> usize {
        self.window()
    }

    /// Whether this end of the lane may be ready while the other end cannot take payload yet. If true,
    /// nothing is sent before the other end's first frame on the channel's connection, which it sends when it
    /// is ready.
    fn may_stand_alone(&self) -> bool {
        false
    }

    /// How long to pause after a poll without progress; `None` leaves this to the caller.
    fn pause(&self) -> Option<Duration> {
        None
    }

    /// Largest message in bytes.
    fn message_bytes_max(&self) -> usize;

    /// A description of a dead path under the lane. A finished send proves nothing: the peer may never get
    /// it.
    fn path_trouble(&self) -> Option<String> {
        None
    }

    /// Whether payload has waited for this end's GPU for so long that the peer's packets may be dropped for
    /// lack of buffers. The engine reports this to the peer, which then does not take the silence for a dead
    /// path. Meanwhile no missing message counts as stalled.
    fn holds_payload(&self) -> bool {
        false
    }

    /// Whether the lane can send from this memory (pack), or receive into it (unpack). Other memory goes
    /// through a slot, and the reason is logged.
    fn takes(&mut self, _way: Way, _run: &Run) -> bool {
        true
    }

    /// Posts a send. The memory must not change until the request is done or the lane is closed.
    fn isend(&mut self, run: &Run) -> Post;

    /// Posts a receive for the next message, which has exactly this length.
    fn irecv(&mut self, run: &Run) -> Post;

    /// Tests the oldest send.
    fn test_send(&mut self, ticket: Ticket) -> Step;

    /// Tests the oldest receive that is not done.
    fn test_recv(&mut self, ticket: Ticket) -> Step;

    /// Whether bytes received for this memory arrive elsewhere, in fragments, and must be gathered.
    fn scatters(&self, memory: &Memory) -> bool;

    /// The GPU that gathers, if received bytes arrive in its memory.
    fn gathers_on(&self) -> Option<MemoryLocation> {
        None
    }

    /// Starts to gather the fragments of the lane's receive `number`, which is done.
    ///
    /// # Errors
    /// Why the receive cannot be gathered.
    fn gather(&mut self, number: u64, run: &Run) -> Result<(), Ungathered>;

    /// Whether the gather of receive `number` is finished. After an error no further receive can be gathered.
    fn gathered(&mut self, number: u64) -> Poll<Result<(), Error>>;

    /// Returns the oldest finished receive to the lane, since its bytes have been taken.
    ///
    /// # Errors
    /// Why the lane has failed.
    fn consumed(&mut self, ticket: Ticket) -> Result<(), String>;

    /// Packs ranges into a slot, or unpacks a slot to them. The first call starts the copy, further calls
    /// continue it. One copy at a time in each direction. The lane can be used after an error.
    fn copy(&mut self, way: Way, slot: &Run, ranges: &[Run]) -> Poll<Result<(), Error>>;

    /// Allocates memory for slots through which messages of memory `like` go; `None` for messages that are
    /// discarded.
    ///
    /// # Errors
    /// Why there is no memory.
    fn slot_memory(&self, like: Option<&Memory>, bytes: usize) -> Result<Arc<Memory>, String>;

    /// Allocates host memory for slots that [`Lane::copy`] reaches as well as GPU memory, for a lane that
    /// cannot use GPU memory.
    ///
    /// # Errors
    /// Why there is no memory.
    fn host_slot_memory(&self, bytes: usize) -> Result<Arc<Memory>, String> {
        self.slot_memory(None, bytes)
    }

    /// Undoes registrations of dropped regions, except memory that `busy` says is in use.
    fn forget_revoked(&mut self, busy: &dyn Fn(&Arc<Memory>) -> bool);

    /// Closes both directions, whatever is in flight. Nothing touches any memory once [`Lane::has_released`]
    /// returns true.
    fn close(&mut self, in_flight: InFlight);

    /// Whether a closed lane no longer reads the memory of its sends. Poll until true.
    fn has_released(&mut self) -> bool {
        true
    }

    /// Plugin, device and NIC, for error messages.
    fn describe(&self) -> String;
}
