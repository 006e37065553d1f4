//! What staging of a GPU needs that is made when memory of it is registered, and kept as long as the endpoint.
//!
//! A driver may wait for all of a GPU's work before it loads a kernel, and before the first streams copy. A stream that
//! waits for a transfer would then wait for ever, if the transfer were the first to need either.

use std::sync::{Arc, Mutex, PoisonError};

use crate::memory::Place;
use crate::memory::cuda::CudaGpu;
use crate::memory::unpack::Kernels;

#[derive(Default)]
pub(crate) struct Prepared(Mutex<Vec<(u32, Arc<Kernels>)>>);

impl Prepared {
    /// Loads what a GPU that is open needs; one that takes no kernel does without.
    pub fn prepare(&self, place: Place) {
        let Place::Cuda(index) = place else { return };
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.iter().any(|(other, _)| *other == index) {
            return;
        }
        let Some(gpu) = CudaGpu::opened(index) else { return };
        if let Err(error) = gpu.prepare_streams() {
            tracing::debug!(%error, "no streams on CUDA GPU {index} ahead of transfers");
        }
        match Kernels::of(&gpu) {
            Ok(kernels) => kept.push((index, kernels)),
            Err(error) => tracing::debug!(%error, "no kernels on CUDA GPU {index}"),
        }
    }
}
