//! A data socket and the chunks that are queued on it.
//!
//! The thread that tests requests adds chunks and collects finished ones; a worker moves them, in order.
//! Invariant: at most [`CHUNKS_PER_LANE_MAX`] chunks are queued, under way or waiting to be collected.
//! Read next: `worker.rs`.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::pool::Fragment;
use crate::sync::locked;

/// Chunks in flight on one data socket.
pub const CHUNKS_PER_LANE_MAX: usize = 6;

/// The pages that a request has taken on one socket.
pub type PageRecord = Arc<Mutex<Vec<u32>>>;

/// What a worker does with a chunk.
#[derive(Debug)]
pub enum Work {
    /// Sends it from here.
    Send {
        /// First byte.
        source: *const u8,
        /// Which is an address of this real device.
        cuda: Option<i32>,
    },
    /// Receives it here.
    Host {
        /// First byte.
        target: *mut u8,
    },
    /// Receives it into pages of the pool.
    Pages {
        /// Where the pages are noted.
        record: PageRecord,
    },
}

/// A chunk on its way.
#[derive(Debug)]
pub struct Chunk {
    /// Slot of its request.
    pub slot: usize,
    /// Where it begins in the message.
    pub offset: usize,
    /// Bytes of it.
    pub len: usize,
    /// Bytes moved.
    pub moved: usize,
    /// What is done with it.
    pub work: Work,
    /// Where received bytes lie, for [`Work::Pages`].
    pub fragments: Vec<Fragment>,
}

// SAFETY: the pointers are the host's, which keeps the memory until the request is done, whatever thread
// of ours uses it.
unsafe impl Send for Chunk {}

/// A data socket with its queue.
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
    /// An idle socket.
    pub fn new(socket: OwnedFd) -> Lane {
        Lane {
            socket,
            queue: Mutex::default(),
            in_flight: AtomicUsize::new(0),
            finished_count: AtomicUsize::new(0),
        }
    }

    /// The socket.
    pub fn fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    /// Whether another chunk may be queued.
    pub fn has_room(&self) -> bool {
        self.in_flight.load(Ordering::Relaxed) < CHUNKS_PER_LANE_MAX
    }

    /// Queues a chunk; only where there is room.
    pub fn push(&self, chunk: Chunk) {
        debug_assert!(self.has_room());
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        locked(&self.queue).waiting.push_back(chunk);
    }

    /// The next chunk for the worker.
    pub fn next(&self) -> Option<Chunk> {
        locked(&self.queue).waiting.pop_front()
    }

    /// Whether a chunk waits for the worker.
    pub fn is_waiting(&self) -> bool {
        !locked(&self.queue).waiting.is_empty()
    }

    /// The worker is done with a chunk.
    pub fn finish(&self, chunk: Chunk) {
        locked(&self.queue).finished.push_back(chunk);
        self.finished_count.fetch_add(1, Ordering::Release);
    }

    /// A chunk that the worker is done with.
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
