//! CUDA kernels: PTX text for an old GPU, which the driver compiles for the GPU that is present. So building
//! needs no CUDA, and new GPUs need no release.

use super::deferred_free::{self, Idle};
use super::error::{Result, call};
use super::gpu::CudaGpu;
use cudarc::driver::sys;
use std::ffi::CStr;
use std::ptr;
use std::sync::Arc;

/// Kernels loaded on one GPU. They are unloaded after the module and its functions are dropped.
#[derive(Debug)]
pub struct CudaModule(Option<Loaded>);

#[derive(Debug)]
pub(super) struct Loaded {
    pub(super) gpu: Arc<CudaGpu>,
    raw: sys::CUmodule,
}

// SAFETY: modules of the driver may be used on any thread.
unsafe impl Send for Loaded {}
// SAFETY: modules of the driver may be used on several threads at once.
unsafe impl Sync for Loaded {}

/// One kernel of a module.
#[derive(Debug)]
pub struct CudaFunction {
    pub(super) raw: sys::CUfunction,
    _module: Arc<CudaModule>,
}

// SAFETY: functions of the driver may be used on any thread.
unsafe impl Send for CudaFunction {}
// SAFETY: functions of the driver may be used on several threads at once.
unsafe impl Sync for CudaFunction {}

impl CudaModule {
    /// Compiles PTX for the GPU, and loads it. The driver caches the compiled code itself.
    ///
    /// # Errors
    /// The driver's error, for example when the text is not PTX or needs a newer driver.
    pub fn load(gpu: &Arc<CudaGpu>, ptx: &CStr) -> Result<Arc<CudaModule>> {
        let _current = gpu.make_current()?;
        let (mut raw, bytes) = (ptr::null_mut(), ptx.count_bytes());
        // SAFETY: the PTX is a terminated text; the driver writes one pointer, for which there is room.
        unsafe { call!(gpu.about().bytes(bytes), cuModuleLoadData(&mut raw, ptx.as_ptr().cast())) }?;
        Ok(Arc::new(CudaModule(Some(Loaded { gpu: gpu.clone(), raw }))))
    }

    /// The kernel called `name`; returns the driver's error when the module has none of this name.
    pub fn function(self: &Arc<Self>, name: &CStr) -> Result<CudaFunction> {
        let Some(Loaded { gpu, raw: module }) = &self.0 else {
            unreachable!("it is loaded until it is dropped")
        };
        let _current = gpu.make_current()?;
        let mut raw = ptr::null_mut();
        // SAFETY: the module is loaded, the name is a terminated text, and the driver writes one pointer, for
        // which there is room.
        unsafe { call!(gpu.about(), cuModuleGetFunction(&mut raw, *module, name.as_ptr())) }?;
        Ok(CudaFunction { raw, _module: self.clone() })
    }
}

impl Drop for CudaModule {
    fn drop(&mut self) {
        if let Some(loaded) = self.0.take() {
            deferred_free::leave(Idle::Module(loaded));
        }
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        if let Ok(_current) = self.gpu.make_current() {
            // SAFETY: the module was loaded by `load`, is unloaded once, and its functions are dropped.
            let _ = unsafe { call!(self.gpu.about(), cuModuleUnload(self.raw)) };
        }
    }
}
