//! Copies between a slot and the ranges of one message, for lanes: on the host at once, on a GPU through a
//! queue.
//!
//! Invariant: one message at a time in each direction.
//!
//! Read next: `unpack/copies.rs` of `ferrywire-memory`.

use super::lane::{Run, Way, copy_on_host};
use crate::error::{Error, Result};
use ferrywire_memory::unpack::CopyQueue;
use ferrywire_memory::{self as memory, Gpu, GpuCopy, MemoryLocation};
use std::task::Poll;

/// Copy queues of a lane, one in each direction, created at first use. When they are dropped, nothing touches
/// memory any more.
pub struct Copiers {
    gpu: Option<Gpu>,
    queues: [Option<CopyQueue>; 2],
}

impl Copiers {
    /// Creates the copiers. `gpu` is the GPU whose memory is moved, if any.
    pub fn new(gpu: Option<Gpu>) -> Copiers {
        Copiers { gpu, queues: [None, None] }
    }

    /// Starts to copy a message, or continues. Ready when it is copied. One message at a time in each
    /// direction.
    ///
    /// # Errors
    /// [`Error::Cuda`] or [`Error::SimGpu`] if the GPU fails.
    pub fn copy(&mut self, way: Way, slot: &Run, ranges: &[Run]) -> Poll<Result<()>> {
        let on_host = |run: &Run| run.memory.location() == MemoryLocation::Host;
        if on_host(slot) && ranges.iter().all(on_host) {
            copy_on_host(way, slot, ranges);
            Poll::Ready(Ok(()))
        } else {
            self.copy_on_gpu(way, slot, ranges)
        }
    }

    /// Ends all GPU copies: afterwards nothing touches memory any more.
    pub fn stop(&mut self) {
        self.queues = [None, None];
    }

    fn copy_on_gpu(&mut self, way: Way, slot: &Run, ranges: &[Run]) -> Poll<Result<()>> {
        let copier = &mut self.queues[way as usize];
        let ready = match (copier.take(), &self.gpu) {
            (Some(copier), _) => Ok(copier),
            (None, Some(gpu)) => gpu.queue().map(CopyQueue::new),
            (None, None) => {
                return Poll::Ready(Err(Error::Internal(
                    "a lane without a GPU has GPU memory to copy".into(),
                )));
            }
        };
        let progress = ready.and_then(|mut ready| {
            let progress = go_on(&mut ready, || pieces(way, slot, ranges));
            // A queue that has failed is dropped.
            progress.inspect(|_| *copier = Some(ready))
        });
        match progress {
            Ok(true) => Poll::Ready(Ok(())),
            Ok(false) => Poll::Pending,
            Err(error) => Poll::Ready(Err(error.into())),
        }
    }
}

/// Starts to copy a message if none is being copied. Returns whether it is copied.
fn go_on(copier: &mut CopyQueue, pieces: impl FnOnce() -> Vec<GpuCopy>) -> memory::Result<bool> {
    if !copier.copying() {
        copier.begin(&pieces())?;
    }
    copier.is_done()
}

/// The GPU copies between a slot and the ranges of one message.
fn pieces(way: Way, slot: &Run, ranges: &[Run]) -> Vec<GpuCopy> {
    let mut at = slot.base() as u64;
    let mut out = Vec::with_capacity(ranges.len());
    for range in ranges {
        let (bytes, address) = (range.bytes, range.base() as u64);
        let (source, target) = match way {
            Way::Pack => (address, at),
            Way::Unpack => (at, address),
        };
        out.push(GpuCopy { source, target, bytes });
        at += bytes as u64;
    }
    out
}
