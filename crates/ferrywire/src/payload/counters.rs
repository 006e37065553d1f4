//! What a lane over devmem TCP has done, for reports: plain atomics, written by the lane's thread.
//!
//! The backend is a crate above. What it counts is plain data, and is here so that a channel's statistics name every number.
//! Invariant: one thread writes, any thread reads. Read next: `lane.rs`.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counters of one channel's lane, of its current connection: the numbers of [`DevmemStats`].
#[derive(Debug, Default)]
pub struct DevmemCounters {
    /// [`DevmemStats::pool_bytes`].
    pub pool_bytes: AtomicU64,
    /// [`DevmemStats::receive_calls`].
    pub receive_calls: AtomicU64,
    /// [`DevmemStats::release_calls`].
    pub release_calls: AtomicU64,
    /// [`DevmemStats::send_calls`].
    pub send_calls: AtomicU64,
    /// [`DevmemStats::fragments`].
    pub fragments: AtomicU64,
    /// [`DevmemStats::fragment_bytes`].
    pub fragment_bytes: AtomicU64,
    /// [`DevmemStats::released`].
    pub released: AtomicU64,
    /// [`DevmemStats::linear_bytes`].
    pub linear_bytes: AtomicU64,
    /// [`DevmemStats::plain_bytes`].
    pub plain_bytes: AtomicU64,
    /// [`DevmemStats::gathers`].
    pub gathers: AtomicU64,
    /// [`DevmemStats::device_sent_bytes`].
    pub device_sent_bytes: AtomicU64,
    /// [`DevmemStats::staged_sent_bytes`].
    pub staged_sent_bytes: AtomicU64,
    /// [`DevmemStats::host_sent_bytes`].
    pub host_sent_bytes: AtomicU64,
    /// [`DevmemStats::waits`].
    pub waits: AtomicU64,
}

/// What a channel's lane over devmem TCP has done, over its current connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DevmemStats {
    /// Bytes of the pool that the lane's NIC fills, shared by the lanes over it.
    pub pool_bytes: u64,
    /// `recvmsg` calls, those in vain included.
    pub receive_calls: u64,
    /// Calls that gave fragments back.
    pub release_calls: u64,
    /// `sendmsg` calls, those in vain included.
    pub send_calls: u64,
    /// Fragments that arrived in the pool.
    pub fragments: u64,
    /// Their bytes.
    pub fragment_bytes: u64,
    /// Fragments that were given back to the kernel.
    pub released: u64,
    /// Bytes of packets whose other bytes went to the pool, that the kernel copied to host memory.
    pub linear_bytes: u64,
    /// Bytes that the kernel copied to host memory because their packet had nothing in the pool.
    pub plain_bytes: u64,
    /// Launches on the GPU that gathered: kernels, or batches of copies.
    pub gathers: u64,
    /// Payload that the NIC read from GPU memory, in bytes.
    pub device_sent_bytes: u64,
    /// Payload of a GPU that was copied to host memory first.
    pub staged_sent_bytes: u64,
    /// Payload of host memory.
    pub host_sent_bytes: u64,
    /// How often what had arrived had to wait for room to be gathered.
    pub waits: u64,
}

impl DevmemCounters {
    /// The numbers as they are now.
    pub fn snapshot(&self) -> DevmemStats {
        DevmemStats {
            pool_bytes: self.pool_bytes.load(Relaxed),
            receive_calls: self.receive_calls.load(Relaxed),
            release_calls: self.release_calls.load(Relaxed),
            send_calls: self.send_calls.load(Relaxed),
            fragments: self.fragments.load(Relaxed),
            fragment_bytes: self.fragment_bytes.load(Relaxed),
            released: self.released.load(Relaxed),
            linear_bytes: self.linear_bytes.load(Relaxed),
            plain_bytes: self.plain_bytes.load(Relaxed),
            gathers: self.gathers.load(Relaxed),
            device_sent_bytes: self.device_sent_bytes.load(Relaxed),
            staged_sent_bytes: self.staged_sent_bytes.load(Relaxed),
            host_sent_bytes: self.host_sent_bytes.load(Relaxed),
            waits: self.waits.load(Relaxed),
        }
    }
}

/// Adds, without a locked instruction's cost where only one thread writes.
pub fn add(counter: &AtomicU64, count: usize) {
    counter.store(counter.load(Relaxed) + count as u64, Relaxed);
}
