//! Counters of lanes over devmem TCP, for reports: plain atomics, written by the lane's thread.
//!
//! The devmem backend is a crate above this one. The counters are plain data and are here so that a channel's
//! statistics can include them.
//! Invariant: one thread writes, any thread reads. Read next: `lane.rs`.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counters of one channel's lane over its current connection; see [`DevmemStats`].
#[derive(Debug, Default)]
pub struct DevmemCounters {
    /// Counter of [`DevmemStats::pool_bytes`].
    pub pool_bytes: AtomicU64,
    /// Counter of [`DevmemStats::receive_calls`].
    pub receive_calls: AtomicU64,
    /// Counter of [`DevmemStats::release_calls`].
    pub release_calls: AtomicU64,
    /// Counter of [`DevmemStats::send_calls`].
    pub send_calls: AtomicU64,
    /// Counter of [`DevmemStats::fragments`].
    pub fragments: AtomicU64,
    /// Counter of [`DevmemStats::fragment_bytes`].
    pub fragment_bytes: AtomicU64,
    /// Counter of [`DevmemStats::released`].
    pub released: AtomicU64,
    /// Counter of [`DevmemStats::linear_bytes`].
    pub linear_bytes: AtomicU64,
    /// Counter of [`DevmemStats::plain_bytes`].
    pub plain_bytes: AtomicU64,
    /// Counter of [`DevmemStats::gathers`].
    pub gathers: AtomicU64,
    /// Counter of [`DevmemStats::device_sent_bytes`].
    pub device_sent_bytes: AtomicU64,
    /// Counter of [`DevmemStats::staged_sent_bytes`].
    pub staged_sent_bytes: AtomicU64,
    /// Counter of [`DevmemStats::host_sent_bytes`].
    pub host_sent_bytes: AtomicU64,
    /// Counter of [`DevmemStats::waits`].
    pub waits: AtomicU64,
}

/// Figures of a channel's lane over devmem TCP, over its current connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DevmemStats {
    /// Bytes of the NIC's receive pool in GPU memory. The lanes over one NIC share it.
    pub pool_bytes: u64,
    /// `recvmsg` calls, including those that returned nothing.
    pub receive_calls: u64,
    /// Calls that returned fragments to the kernel.
    pub release_calls: u64,
    /// `sendmsg` calls, including those that sent nothing.
    pub send_calls: u64,
    /// Fragments that arrived in the pool.
    pub fragments: u64,
    /// Bytes of these fragments.
    pub fragment_bytes: u64,
    /// Fragments that were returned to the kernel.
    pub released: u64,
    /// Bytes that the kernel copied to host memory from packets whose other bytes went to the pool.
    pub linear_bytes: u64,
    /// Bytes that the kernel copied to host memory from packets without any bytes in the pool.
    pub plain_bytes: u64,
    /// GPU launches for gathers: kernels, or batches of copies.
    pub gathers: u64,
    /// Payload bytes that the NIC read from GPU memory.
    pub device_sent_bytes: u64,
    /// Payload bytes from GPU memory that were copied to host memory before sending.
    pub staged_sent_bytes: u64,
    /// Payload bytes from host memory.
    pub host_sent_bytes: u64,
    /// How often received bytes had to wait for room to be gathered.
    pub waits: u64,
}

impl DevmemCounters {
    /// Reads the current values.
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

/// Adds `count` without an atomic read-modify-write. Only one thread may write the counter.
pub fn add(counter: &AtomicU64, count: usize) {
    counter.store(counter.load(Relaxed) + count as u64, Relaxed);
}
