//! The socket calls of the workers: send, receive into host memory, receive into pages.
//!
//! No call blocks. Sends have no `MSG_NOSIGNAL`: a dead peer raises SIGPIPE, as with the real plugin.
//! Invariant: a failed call moves nothing; pages that it did not need are free again.

use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering;

use crate::cuda::Stream;
use crate::gpu::GpuPool;
use crate::lane::PageRecord;
use crate::log::warning;
use crate::pool::{Carver, Fragment};
use crate::sync::locked;
use crate::worker::Shared;

/// Most pages that one call receives into.
const PAGES_PER_CALL_MAX: usize = 256;

/// The outcome of a socket call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moved {
    /// Number of bytes that were moved, at least one.
    Bytes(usize),
    /// No bytes can be moved now.
    NotReady,
    /// No page of the pool is free.
    Starved,
    /// The connection failed and is unusable.
    Failed,
}

impl Moved {
    fn from(result: isize) -> Moved {
        match result {
            0 => Moved::Failed,
            count if count > 0 => Moved::Bytes(count as usize),
            _ => match io::Error::last_os_error().kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Moved::NotReady,
                _ => Moved::Failed,
            },
        }
    }
}

/// Sends from memory that the host keeps readable. Memory that was freed only fails the call.
pub fn send(fd: RawFd, source: *const u8, len: usize, shared: &Shared) -> Moved {
    let quiet = if shared.sigpipe { 0 } else { libc::MSG_NOSIGNAL };
    // SAFETY: the kernel checks the range itself, and the host promised in `isend` to keep it.
    Moved::from(unsafe { libc::send(fd, source.cast(), len, libc::MSG_DONTWAIT | quiet) })
}

/// Most bytes of device memory that are copied to the host for one call.
const STAGE_BYTES: usize = 256 << 10;

/// The host buffer through which a worker sends from real device memory.
pub struct Stage {
    stream: Stream,
    bytes: Vec<u8>,
}

impl Stage {
    /// Makes a stage for sends from a device; `None` if the device has no stream.
    pub fn new(device: i32) -> Option<Stage> {
        Some(Stage { stream: Stream::new(device)?, bytes: vec![0; STAGE_BYTES] })
    }

    /// Number of the stage's device.
    pub fn device(&self) -> i32 {
        self.stream.device()
    }

    /// Sends from device memory that the host keeps unchanged.
    pub fn send(&mut self, fd: RawFd, source: u64, len: usize, shared: &Shared) -> Moved {
        let len = len.min(STAGE_BYTES);
        // SAFETY: only this worker uses the buffer, which is long enough.
        let copied = unsafe { self.stream.down(self.bytes.as_mut_ptr(), source, len) };
        if copied.and_then(|()| self.stream.finish()).is_none() {
            warning!("a copy from device memory failed");
            return Moved::Failed;
        }
        send(fd, self.bytes.as_ptr(), len, shared)
    }
}

/// Receives into memory that the host keeps writable. Memory that was freed only fails the call.
pub fn recv(fd: RawFd, target: *mut u8, len: usize, shared: &Shared) -> Moved {
    // SAFETY: the kernel checks the range itself, and the host promised in `irecv` to keep it.
    let moved = Moved::from(unsafe { libc::recv(fd, target.cast(), len, libc::MSG_DONTWAIT) });
    if shared.host_warning
        && let Moved::Bytes(bytes) = moved
    {
        warning!("{bytes} bytes received through linear host memory");
    }
    moved
}

/// Where a socket's GPU payload is received.
pub struct Landing<'a> {
    /// The receive pool, which has the pages.
    pub pool: &'a GpuPool,
    /// Decides where in the pages the bytes are placed.
    pub carver: &'a Carver,
    /// The record of pages that the request has taken.
    pub record: &'a PageRecord,
    /// Number of bytes that the socket has received into pages so far.
    pub position: u64,
}

/// Receives into free pages of the pool; records the pages, and the fragments in the chunk.
pub fn recv_pages(
    fd: RawFd,
    landing: &Landing<'_>,
    most: usize,
    fragments_of_chunk: &mut Vec<Fragment>,
    shared: &Shared,
) -> Moved {
    let mut fragments = take_fragments(landing, most, shared.id);
    if fragments.is_empty() {
        return Moved::Starved;
    }
    let moved = receive_into(fd, landing.pool, &fragments);
    let bytes = if let Moved::Bytes(bytes) = moved { bytes } else { 0 };
    trim(&mut fragments, bytes, landing.pool);
    if !landing.pool.settle(&fragments) {
        warning!("a copy into the receive pool failed");
        return Moved::Failed;
    }
    shared.pages_taken.fetch_add(fragments.len() as u64, Ordering::Relaxed);
    locked(landing.record).extend(fragments.iter().map(|fragment| fragment.page));
    fragments_of_chunk.append(&mut fragments);
    moved
}

/// Takes fragments with room for `most` bytes, or for as many as one call takes and the pool has.
fn take_fragments(landing: &Landing<'_>, most: usize, owner: u64) -> Vec<Fragment> {
    let (mut fragments, mut room) = (Vec::new(), 0);
    let mut pages = locked(&landing.pool.pages);
    while room < most && fragments.len() < PAGES_PER_CALL_MAX {
        let Some(page) = pages.take(owner) else { break };
        let fragment = landing.carver.carve(page, most - room, landing.position + room as u64);
        room += fragment.len as usize;
        fragments.push(fragment);
    }
    fragments
}

fn receive_into(fd: RawFd, pool: &GpuPool, fragments: &[Fragment]) -> Moved {
    let mut pieces: Vec<libc::iovec> = fragments
        .iter()
        .map(|fragment| libc::iovec { iov_base: pool.view(fragment).cast(), iov_len: fragment.len as usize })
        .collect();
    // SAFETY: all zero is a valid `msghdr`: null pointers with zero lengths.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_mut_ptr();
    message.msg_iovlen = pieces.len() as _;
    // SAFETY: the pieces are in pages that this comm owns, in the pool's mapping, which is never unmapped.
    Moved::from(unsafe { libc::recvmsg(fd, &mut message, libc::MSG_DONTWAIT) })
}

/// Keeps the fragments of the first `bytes` bytes, and frees the other pages.
fn trim(fragments: &mut Vec<Fragment>, bytes: usize, pool: &GpuPool) {
    let (mut left, mut used) = (bytes, 0);
    for fragment in fragments.iter_mut() {
        if left == 0 {
            break;
        }
        fragment.len = fragment.len.min(left as u32);
        left -= fragment.len as usize;
        used += 1;
    }
    let mut pages = locked(&pool.pages);
    fragments.drain(used..).rev().for_each(|fragment| pages.put_back(fragment.page));
}
