//! Streams: queues of work for a simulated GPU, each done in order, independent of one another.
//!
//! Invariant: a stream that has failed does nothing more; every later call on it gives the first cause.
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

/// A queue of asynchronous work. When it is dropped, work that has not begun is not done, work that has
/// begun is waited for, and nothing touches the memory it names any more.
///
/// Device addresses may be of any simulated GPU, or of mapped host memory. They are checked when their
/// turn comes; a wrong one fails the stream.
///
/// # Errors
/// Each method fails with the stream's first failure, once there is one.
pub struct SimStream {
    gpu: Arc<SimGpu>,
    lane: u64,
}

impl SimStream {
    pub(super) fn new(gpu: &Arc<SimGpu>) -> SimStream {
        SimStream { gpu: gpu.clone(), lane: gpu.engine.add() }
    }

    /// The GPU that does the work.
    pub fn gpu(&self) -> &Arc<SimGpu> {
        &self.gpu
    }

    pub(super) fn enqueue(&self, work: Work) -> Result<()> {
        self.gpu.engine.enqueue(self.lane, work)
    }

    /// Copies from the device to host memory.
    ///
    /// # Safety
    /// `bytes` bytes at `target` must stay writable, and be left alone, until the copy is done or the
    /// stream is dropped.
    pub unsafe fn to_host(&self, source: u64, target: *mut u8, bytes: usize) -> Result<()> {
        check_host(target, bytes)?;
        self.enqueue(Work::ToHost { source, target: HostPointer(target), bytes })
    }

    /// Copies from host memory to the device.
    ///
    /// # Safety
    /// `bytes` bytes at `source` must stay readable and unchanged until the copy is done or the stream
    /// is dropped.
    pub unsafe fn from_host(&self, source: *const u8, target: u64, bytes: usize) -> Result<()> {
        check_host(source, bytes)?;
        self.enqueue(Work::FromHost { source: HostPointer(source.cast_mut()), target, bytes })
    }

    /// Copies from device to device.
    pub fn copy(&self, source: u64, target: u64, bytes: usize) -> Result<()> {
        self.gather(vec![GpuCopy { source, target, bytes }])
    }

    /// Runs a kernel that copies all pieces, in order; none of them if one is out of bounds.
    pub fn gather(&self, pieces: Vec<GpuCopy>) -> Result<()> {
        self.enqueue(Work::Gather(pieces))
    }

    /// Runs a kernel that copies the fragments of all runs, in order, and reads them in place when its turn
    /// comes; it copies none if one is out of bounds.
    pub fn gather_runs(&self, runs: Vec<GatherRun>) -> Result<()> {
        self.enqueue(Work::GatherRuns(runs))
    }

    /// Sets bytes of the device.
    pub fn fill(&self, target: u64, byte: u8, bytes: usize) -> Result<()> {
        self.enqueue(Work::Fill { target, byte, bytes })
    }

    /// CRC-32 of bytes of the device; waits for it and for all before it.
    pub fn checksum(&self, source: u64, bytes: usize, timeout: Duration) -> Result<u32> {
        let into = Arc::new(Mutex::new(0));
        self.enqueue(Work::Checksum { source, bytes, into: into.clone() })?;
        self.wait(timeout)?;
        Ok(*into.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Writes a number when everything enqueued so far is done: who reads it finds there what was copied before.
    pub fn write_flag(&self, flag: &Arc<AtomicU64>, value: u64) -> Result<()> {
        self.enqueue(Work::Flag(flag.clone(), value))
    }

    /// Puts the event here: it is done when everything enqueued so far is.
    pub fn record(&self, event: &SimEvent) -> Result<()> {
        let mark = Arc::new(Mark::new(self.gpu.index()));
        event.set(mark.clone());
        self.enqueue(Work::Record(mark.clone())).inspect_err(|cause| mark.complete(Err(cause.clone())))
    }

    /// What is enqueued from here on waits for the event, on the device; the caller does not.
    pub fn wait_event(&self, event: &SimEvent) -> Result<()> {
        let Some(mark) = event.mark() else { return Ok(()) };
        mark.watch(&self.gpu.engine);
        self.enqueue(Work::WaitFor(mark))
    }

    /// What is enqueued from here on waits until the host opens the gate.
    pub fn hold(&self) -> Result<HostGate> {
        let mark = Arc::new(Mark::new(self.gpu.index()));
        mark.watch(&self.gpu.engine);
        self.enqueue(Work::WaitFor(mark.clone()))?;
        Ok(HostGate::new(mark))
    }

    /// Whether everything enqueued is done. Does not block.
    pub fn query(&self) -> Result<bool> {
        self.gpu.engine.query(self.lane)
    }

    /// Waits until everything enqueued is done.
    ///
    /// # Errors
    /// The stream's failure, or [`SimGpuError::TimedOut`](super::SimGpuError::TimedOut); after that the
    /// work goes on.
    pub fn wait(&self, timeout: Duration) -> Result<()> {
        self.gpu.engine.wait(self.lane, timeout)
    }
}

impl Drop for SimStream {
    fn drop(&mut self) {
        self.gpu.engine.remove(self.lane);
    }
}

impl std::fmt::Debug for SimStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SimStream({} of GPU {})", self.lane, self.gpu.index())
    }
}
