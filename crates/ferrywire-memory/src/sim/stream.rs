//! Streams of a simulated GPU: queues of work, each in order, independent of one another.
//!
//! Invariant: a failed stream does no more work; every later call returns its first failure.
//! Read next: `engine.rs`.

use super::allocation::check_host;
use super::event::{HostGate, Mark};
use super::work::{HostPointer, Work};
use super::{Result, SimEvent, SimGpu};
use crate::GpuCopy;
use crate::unpack::GatherRun;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// A queue of asynchronous work of a simulated GPU. Dropping it discards work that has not started and waits
/// for the work that runs; afterwards nothing accesses the memory involved.
///
/// Device addresses may be of any simulated GPU, or of mapped host memory. They are checked when the work
/// runs; a wrong address fails the stream.
///
/// # Errors
/// Each method returns the stream's first failure, once there is one.
pub struct SimStream {
    gpu: Arc<SimGpu>,
    queue: u64,
}

impl SimStream {
    pub(super) fn new(gpu: &Arc<SimGpu>) -> SimStream {
        SimStream { gpu: gpu.clone(), queue: gpu.engine.add() }
    }

    /// The GPU of the stream.
    pub fn gpu(&self) -> &Arc<SimGpu> {
        &self.gpu
    }

    pub(super) fn enqueue(&self, work: Work) -> Result<()> {
        self.gpu.engine.enqueue(self.queue, work)
    }

    /// Enqueues a copy from device memory to host memory.
    ///
    /// # Safety
    /// `bytes` bytes at `target` stay writable, and no other code uses them, until the copy is done or the
    /// stream is dropped.
    pub unsafe fn to_host(&self, source: u64, target: *mut u8, bytes: usize) -> Result<()> {
        check_host(target, bytes)?;
        self.enqueue(Work::ToHost { source, target: HostPointer(target), bytes })
    }

    /// Enqueues a copy from host memory to device memory.
    ///
    /// # Safety
    /// `bytes` bytes at `source` stay readable and unchanged until the copy is done or the stream is dropped.
    pub unsafe fn from_host(&self, source: *const u8, target: u64, bytes: usize) -> Result<()> {
        check_host(source, bytes)?;
        self.enqueue(Work::FromHost { source: HostPointer(source.cast_mut()), target, bytes })
    }

    /// Enqueues a copy from device memory to device memory.
    pub fn copy(&self, source: u64, target: u64, bytes: usize) -> Result<()> {
        self.gather(vec![GpuCopy { source, target, bytes }])
    }

    /// Enqueues a kernel that copies all pieces in order, or none if one is out of bounds.
    pub fn gather(&self, pieces: Vec<GpuCopy>) -> Result<()> {
        self.enqueue(Work::Gather(pieces))
    }

    /// Enqueues a kernel that copies the fragments of all runs in order. The kernel reads the fragments in
    /// place when it runs, and copies none if one is out of bounds.
    pub fn gather_runs(&self, runs: Vec<GatherRun>) -> Result<()> {
        self.enqueue(Work::GatherRuns(runs))
    }

    /// Enqueues a fill of device memory with `byte`.
    pub fn fill(&self, target: u64, byte: u8, bytes: usize) -> Result<()> {
        self.enqueue(Work::Fill { target, byte, bytes })
    }

    /// CRC-32 of device memory; waits for all work up to the computation.
    pub fn checksum(&self, source: u64, bytes: usize, timeout: Duration) -> Result<u32> {
        let into = Arc::new(Mutex::new(0));
        self.enqueue(Work::Checksum { source, bytes, into: into.clone() })?;
        self.wait(timeout)?;
        Ok(*into.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Enqueues a write of `value` to `flag` after all earlier work: a reader that sees the value also sees
    /// the earlier copies.
    pub fn write_flag(&self, flag: &Arc<AtomicU64>, value: u64) -> Result<()> {
        self.enqueue(Work::Flag(flag.clone(), value))
    }

    /// Records an event in this stream: it is done when all work enqueued so far is done.
    pub fn record(&self, event: &SimEvent) -> Result<()> {
        let mark = Arc::new(Mark::new(self.gpu.index()));
        event.set(mark.clone());
        self.enqueue(Work::Record(mark.clone())).inspect_err(|cause| mark.complete(Err(cause.clone())))
    }

    /// Makes later work of this stream wait, on the GPU, for the event. The caller does not wait.
    pub fn wait_event(&self, event: &SimEvent) -> Result<()> {
        let Some(mark) = event.mark() else { return Ok(()) };
        mark.watch(&self.gpu.engine);
        self.enqueue(Work::WaitFor(mark))
    }

    /// Makes later work of this stream wait until the host opens the returned gate.
    pub fn hold(&self) -> Result<HostGate> {
        let mark = Arc::new(Mark::new(self.gpu.index()));
        mark.watch(&self.gpu.engine);
        self.enqueue(Work::WaitFor(mark.clone()))?;
        Ok(HostGate::new(mark))
    }

    /// Whether all enqueued work of the stream is done. Does not block.
    pub fn query(&self) -> Result<bool> {
        self.gpu.engine.query(self.queue)
    }

    /// Waits until all enqueued work of the stream is done.
    ///
    /// # Errors
    /// The stream's first failure, or [`SimGpuError::TimedOut`](super::SimGpuError::TimedOut); after a
    /// timeout the work goes on.
    pub fn wait(&self, timeout: Duration) -> Result<()> {
        self.gpu.engine.wait(self.queue, timeout)
    }
}

impl Drop for SimStream {
    fn drop(&mut self) {
        self.gpu.engine.remove(self.queue);
    }
}

impl std::fmt::Debug for SimStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SimStream({} of GPU {})", self.queue, self.gpu.index())
    }
}
