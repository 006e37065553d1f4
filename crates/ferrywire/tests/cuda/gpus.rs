//! Which GPUs the plugin's tests have: those of this machine, or the stand-in's.

use crate::case::{CASE, Case};
use crate::driver::{WITH_KERNELS, stand_in};
use ferrywire::MemoryLocation;
use ferrywire_memory::cuda::{CudaError, CudaGpu};
use std::path::PathBuf;
use std::sync::LazyLock;

/// Bytes that are much for these GPUs: those of the stand-in do it all with one CPU.
pub const MANY: usize = 24 << 20;

/// The GPU with this number, or the first one where there are fewer.
pub fn location(index: u32) -> MemoryLocation {
    MemoryLocation::Cuda(index % CudaGpu::count().unwrap())
}

/// The case, with GPUs of this machine where there are some.
pub fn on_gpus(case: Case) -> Case {
    // The process of the case has loaded a driver.
    if std::env::var_os(CASE).is_some() {
        return case;
    }
    match CudaGpu::count() {
        Err(CudaError::NoDriver | CudaError::NoDevice) => {
            static STAND_IN: LazyLock<PathBuf> = LazyLock::new(|| stand_in(&[WITH_KERNELS]));
            println!("SKIPPED: needs a CUDA device; this runs with a stand-in for its driver");
            case.with("LD_LIBRARY_PATH", STAND_IN.to_str().unwrap())
        }
        _ => case,
    }
}

/// Whether a stand-in for the driver reports what is left of it when a case ends.
pub fn have_a_stand_in() -> bool {
    matches!(CudaGpu::count(), Err(CudaError::NoDriver | CudaError::NoDevice))
}
