//! GPU resources for staging that are created when GPU memory is registered, and kept as long as the
//! endpoint.
//!
//! A driver may wait for all of a GPU's work before it loads a kernel, and before the first copy of a new
//! stream. If a transfer were the first to need either, a stream that waits for that transfer would wait for
//! ever.
//!
//! Invariant: no lock is held during a driver call, so that registering memory of one GPU never waits for
//! another GPU. Read next: `cuda.rs`.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferrywire_memory::MemoryLocation;
use ferrywire_memory::cuda::CudaGpu;
use ferrywire_memory::unpack::Kernels;

/// GPUs with their kernels; `None` for a GPU on which they could not be loaded.
#[derive(Default)]
pub(crate) struct Prepared(Mutex<Vec<(u32, Option<Arc<Kernels>>)>>);

impl Prepared {
    /// Prepares an open GPU. A GPU whose kernels cannot be loaded is used without them.
    pub fn prepare(&self, location: MemoryLocation) {
        let MemoryLocation::Cuda(index) = location else { return };
        let known =
            self.kept().iter().find(|(other, _)| *other == index).map(|(_, kernels)| kernels.is_some());
        if known == Some(true) {
            return;
        }
        let Some(gpu) = CudaGpu::opened(index) else { return };
        let (streams, kernels) = (gpu.prepare_streams(), Kernels::of(&gpu));
        // Warn only once: each registration of memory tries again.
        if known.is_none() {
            if let Err(error) = streams {
                tracing::warn!(
                    %error,
                    "cannot create the streams for staging on CUDA GPU {index} in advance: the first transfer creates \
                     them"
                );
            }
            if let Err(error) = &kernels {
                tracing::warn!(%error, "cannot load copy kernels on CUDA GPU {index}: copy engines copy piece by piece");
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
