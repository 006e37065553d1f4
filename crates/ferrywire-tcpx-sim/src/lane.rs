//! A data socket and the chunks that are queued on it.
//!
//! The thread that tests requests adds chunks and collects finished ones; a worker moves them, in order.
//! Invariant: at most [`CHUNKS_PER_LANE_MAX`] chunks are queued, in flight, or finished and not collected.
//! Read next: `worker.rs`.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::pool::Fragment;
use crate::sync::locked;

/// Most chunks in flight on one data socket.
pub const CHUNKS_PER_LANE_MAX: usize = 6;

/// The pages that a request has taken on one socket.
pub type PageRecord = Arc<Mutex<Vec<u32>>>;

/// A worker's work on a chunk.
#[derive(Debug)]
pub enum Work {
    /// Send from an address.
    Send {
        /// Address of the chunk's first byte.
        source: *const u8,
        /// Number of the real device, if the address is a device address.
        cuda: Option<i32>,
    },
    /// Receive to a host address.
    Host {
        /// Address for the chunk's first byte.
        target: *mut u8,
    },
    /// Receive into pages of the receive pool.
    Pages {
        /// The record of pages that the request has taken.
        record: PageRecord,
    },
}

/// A chunk in flight.
#[derive(Debug)]
pub struct Chunk {
    /// Slot of the chunk's request.
    pub slot: usize,
    /// Offset of the chunk in the message, in bytes.
    pub offset: usize,
    /// Size of the chunk in bytes.
    pub len: usize,
    /// Number of the chunk's bytes that were moved.
    pub moved: usize,
    /// What the worker does with the chunk.
    pub work: Work,
    /// Places of the received bytes in the pool, for [`Work::Pages`].
    pub fragments: Vec<Fragment>,
}

// SAFETY: the pointers are the host's, which keeps the memory until the request is done; any thread may use
// them.
unsafe impl Send for Chunk {}

/// A data socket with its queue of chunks.
#[derive(Debug)]
pub struct Lane {
    socket: OwnedFd,
    queue: Mutex<Queue>,
    in_flight: AtomicUsize,
    finished_count: AtomicUsize,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<Chunk>,
    finished: VecDeque<Chunk>,
}

impl Lane {
    /// A data socket without chunks.
    pub fn new(socket: OwnedFd) -> Lane {
        Lane {
            socket,
            queue: Mutex::default(),
            in_flight: AtomicUsize::new(0),
            finished_count: AtomicUsize::new(0),
        }
    }

    /// The descriptor of the socket.
    pub fn fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    /// Whether another chunk may be queued on the socket.
    pub fn has_room(&self) -> bool {
        self.in_flight.load(Ordering::Relaxed) < CHUNKS_PER_LANE_MAX
    }

    /// Queues a chunk; only if there is room.
    pub fn push(&self, chunk: Chunk) {
        debug_assert!(self.has_room());
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        locked(&self.queue).waiting.push_back(chunk);
    }

    /// Takes the next chunk for the worker.
    pub fn next(&self) -> Option<Chunk> {
        locked(&self.queue).waiting.pop_front()
    }

    /// Whether a chunk waits for the worker.
    pub fn is_waiting(&self) -> bool {
        !locked(&self.queue).waiting.is_empty()
    }

    /// Stores a chunk that the worker has finished.
    pub fn finish(&self, chunk: Chunk) {
        locked(&self.queue).finished.push_back(chunk);
        self.finished_count.fetch_add(1, Ordering::Release);
    }

    /// Takes a chunk that the worker has finished.
    pub fn collect(&self) -> Option<Chunk> {
        if self.finished_count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let chunk = locked(&self.queue).finished.pop_front()?;
        self.finished_count.fetch_sub(1, Ordering::Relaxed);
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
        Some(chunk)
    }

    /// Ends both directions of the connection.
    pub fn shut_down(&self) {
        // SAFETY: no memory is passed.
        unsafe { libc::shutdown(self.fd(), libc::SHUT_RDWR) };
    }
}
