//! What staging of a GPU needs that is made when memory of it is registered, and kept as long as the endpoint.
//!
//! A driver may wait for all of a GPU's work before it loads a kernel, and before the first streams copy. A stream that
//! waits for a transfer would then wait for ever, if the transfer were the first to need either.
//!
//! Invariant: nothing is locked here while a driver is called, so that who registers memory of one GPU waits for no other.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferrywire_memory::MemoryLocation;
use ferrywire_memory::cuda::CudaGpu;
use ferrywire_memory::unpack::Kernels;

/// GPUs, each with its kernels; none of one that could not load them.
#[derive(Default)]
pub(crate) struct Prepared(Mutex<Vec<(u32, Option<Arc<Kernels>>)>>);

impl Prepared {
    /// Loads what a GPU that is open needs; one that takes no kernel does without.
    pub fn prepare(&self, location: MemoryLocation) {
        let MemoryLocation::Cuda(index) = location else { return };
        let known =
            self.kept().iter().find(|(other, _)| *other == index).map(|(_, kernels)| kernels.is_some());
        if known == Some(true) {
            return;
        }
        let Some(gpu) = CudaGpu::opened(index) else { return };
        let (streams, kernels) = (gpu.prepare_streams(), Kernels::of(&gpu));
        // Once: it is tried again whenever memory is registered.
        if known.is_none() {
            if let Err(error) = streams {
                tracing::warn!(%error, "no streams on CUDA GPU {index} ahead of transfers");
            }
            if let Err(error) = &kernels {
                tracing::warn!(%error, "no kernels on CUDA GPU {index}: copy engines alone copy, run by run");
            }
        }
        self.keep(index, kernels.ok());
    }

    fn keep(&self, index: u32, kernels: Option<Arc<Kernels>>) {
        let mut kept = self.kept();
        match kept.iter_mut().find(|(other, _)| *other == index) {
            Some((_, slot)) => *slot = slot.take().or(kernels),
            None => kept.push((index, kernels)),
        }
    }

    fn kept(&self) -> MutexGuard<'_, Vec<(u32, Option<Arc<Kernels>>)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
