//! The gather queue of a simulated GPU: one stream per connection.
//!
//! Invariant: the contract of [`GatherDevice`]; a dropped stream no longer uses any memory.
//! Read next: `../sim/stream.rs`.

use super::device::{Extent, GatherDevice, GatherRun, Mapped};
use crate::cuda::deferred_free::Launching;
use crate::error::{Error, Result};
use crate::sim::{MappedBuffer, SimEvent, SimGpu, SimStream};
use crate::{GpuCopy, MemoryLocation};
use ferrywire_proto::limits;
use std::sync::Arc;

/// A gather queue on a simulated GPU.
#[derive(Debug)]
pub struct SimQueue {
    stream: SimStream,
    events: [SimEvent; limits::GATHER_LAUNCHES_MAX],
    marked: u64,
    reached: u64,
}

impl SimQueue {
    /// A gather queue with a stream of its own.
    pub fn new(gpu: &Arc<SimGpu>) -> SimQueue {
        SimQueue { stream: gpu.stream(), events: Default::default(), marked: 0, reached: 0 }
    }

    fn event(&self, mark: u64) -> &SimEvent {
        &self.events[(mark % self.events.len() as u64) as usize]
    }
}

// SAFETY: mapped buffers of the simulated GPU are ordinary memory of this process, and a dropped `SimStream`
// no longer uses any memory.
unsafe impl GatherDevice for SimQueue {
    fn location(&self) -> MemoryLocation {
        MemoryLocation::SimGpu(self.stream.gpu().index())
    }

    fn device_memory(&self, address: u64, _bytes: u64) -> Option<(MemoryLocation, Extent)> {
        SimGpu::of(address)
            .map(|(index, base, bytes)| (MemoryLocation::SimGpu(index), Extent { base, bytes }))
    }

    fn mapped_memory(&self, address: u64) -> Option<Extent> {
        SimGpu::mapped(address).map(|(base, bytes)| Extent { base, bytes })
    }

    fn read(&self, address: u64, into: &mut [u8]) -> Result<()> {
        Ok(self.stream.gpu().read_into_slice(address, into)?)
    }

    fn map(&self, bytes: usize) -> Result<Mapped> {
        let buffer = MappedBuffer::new(bytes, 1)?;
        // SAFETY: the buffer is aligned to a page, has that size, is owned here, and stays mapped as long as
        // it lives.
        Ok(unsafe { Mapped::new(buffer.as_ptr(), bytes, buffer) })
    }

    fn launching(&self) -> Option<Launching> {
        Some(Launching::unrestricted())
    }

    fn gather(&mut self, runs: &[GatherRun]) -> Result<()> {
        Ok(self.stream.gather_runs(runs.to_vec())?)
    }

    fn copy(&mut self, copies: &[GpuCopy]) -> Result<()> {
        // Copies are enqueued one by one, so that injected faults can hit between them.
        for GpuCopy { source, target, bytes } in copies {
            self.stream.copy(*source, *target, *bytes)?;
        }
        Ok(())
    }

    fn mark(&mut self) -> Result<()> {
        if self.marked - self.reached >= self.events.len() as u64 {
            return Err(Error::Internal("a gather recorded more marks than its queue holds".into()));
        }
        self.stream.record(self.event(self.marked))?;
        self.marked += 1;
        Ok(())
    }

    fn reached(&mut self) -> Result<u64> {
        let before = self.reached;
        while self.reached < self.marked {
            match self.event(self.reached).query() {
                Ok(true) => self.reached += 1,
                Ok(false) => break,
                // Marks before the failure are reported first; the next call returns the error.
                Err(_) if self.reached > before => break,
                Err(cause) => return Err(cause.into()),
            }
        }
        Ok(self.reached)
    }
}
