//! The driver's functions, bound so that their return codes are plain numbers.
//!
//! Bindings that return an enumeration cannot be called: a newer driver has codes that today's list lacks,
//! and a value outside of an enumeration is undefined behaviour as soon as it is returned.
//!
//! Invariant: the types are those of the bindings, which are generated from the driver's header; the compiler
//! compares them.
//! Read next: `driver.rs`, which loads the functions; `error.rs`, which converts return codes.

use super::error::{CudaError, Result};
use cudarc::driver::sys::{
    self, CUDA_MEMCPY2D, CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction,
    CUmemRangeHandleType, CUmodule, CUpointer_attribute, CUstream, CUstreamCaptureMode,
    CUstreamCaptureStatus, CUuuid,
};
use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};

macro_rules! functions {
    ($($name:ident($($argument:ty),*);)+) => {
        /// The functions that every supported driver must have.
        #[derive(Debug)]
        #[allow(non_snake_case, reason = "these are their names")]
        pub(super) struct Functions {
            $(pub $name: unsafe extern "C" fn($($argument),*) -> u32,)+
        }

        impl Functions {
            /// Loads all functions of the driver; returns an error for the first that is missing.
            ///
            /// # Safety
            /// The file is the driver library, is never unloaded, and has this version.
            pub(super) unsafe fn of(file: &libloading::Library, version: u32) -> Result<Functions> {
                Ok(Functions {
                    $($name: {
                        let symbol = stringify!($name);
                        // SAFETY: the function of this name has this type, which the compiler compares with
                        // the bindings.
                        *unsafe { file.get(symbol.as_bytes()) }
                            .map_err(|_| CudaError::MissingSymbol { symbol, version })?
                    },)+
                })
            }
        }

        const _: () = {
            $(let _: unsafe fn($($argument),*) -> sys::CUresult = sys::$name;)+
        };
    };
}

functions! {
    cuInit(c_uint);
    cuDeviceGetCount(*mut c_int);
    cuDeviceGet(*mut CUdevice, c_int);
    cuDeviceGetName(*mut c_char, c_int, CUdevice);
    cuDeviceGetUuid_v2(*mut CUuuid, CUdevice);
    cuDeviceGetAttribute(*mut c_int, CUdevice_attribute, CUdevice);
    cuDeviceTotalMem_v2(*mut usize, CUdevice);
    cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice);
    cuDevicePrimaryCtxRelease_v2(CUdevice);
    cuCtxGetCurrent(*mut CUcontext);
    cuCtxPushCurrent_v2(CUcontext);
    cuCtxPopCurrent_v2(*mut CUcontext);
    cuCtxGetStreamPriorityRange(*mut c_int, *mut c_int);
    cuMemGetInfo_v2(*mut usize, *mut usize);
    cuMemAlloc_v2(*mut CUdeviceptr, usize);
    cuMemFree_v2(CUdeviceptr);
    cuMemcpyAsync(CUdeviceptr, CUdeviceptr, usize, CUstream);
    cuMemcpyHtoDAsync_v2(CUdeviceptr, *const c_void, usize, CUstream);
    cuMemcpyDtoHAsync_v2(*mut c_void, CUdeviceptr, usize, CUstream);
    cuMemcpy2DAsync_v2(*const CUDA_MEMCPY2D, CUstream);
    cuMemsetD8Async(CUdeviceptr, c_uchar, usize, CUstream);
    cuMemHostRegister_v2(*mut c_void, usize, c_uint);
    cuMemHostUnregister(*mut c_void);
    cuMemHostGetDevicePointer_v2(*mut CUdeviceptr, *mut c_void, c_uint);
    cuMemGetHandleForAddressRange(*mut c_void, CUdeviceptr, usize, CUmemRangeHandleType, c_ulonglong);
    cuPointerGetAttributes(c_uint, *mut CUpointer_attribute, *mut *mut c_void, CUdeviceptr);
    cuStreamCreate(*mut CUstream, c_uint);
    cuStreamCreateWithPriority(*mut CUstream, c_uint, c_int);
    cuStreamDestroy_v2(CUstream);
    cuStreamQuery(CUstream);
    cuStreamSynchronize(CUstream);
    cuStreamWaitEvent(CUstream, CUevent, c_uint);
    cuStreamWriteValue32_v2(CUstream, CUdeviceptr, u32, c_uint);
    cuStreamWriteValue64_v2(CUstream, CUdeviceptr, u64, c_uint);
    cuStreamWaitValue64_v2(CUstream, CUdeviceptr, u64, c_uint);
    cuStreamIsCapturing(CUstream, *mut CUstreamCaptureStatus);
    cuThreadExchangeStreamCaptureMode(*mut CUstreamCaptureMode);
    cuEventCreate(*mut CUevent, c_uint);
    cuEventDestroy_v2(CUevent);
    cuEventRecord(CUevent, CUstream);
    cuEventQuery(CUevent);
    cuModuleLoadData(*mut CUmodule, *const c_void);
    cuModuleUnload(CUmodule);
    cuModuleGetFunction(*mut CUfunction, CUmodule, *const c_char);
    cuLaunchKernel(
        CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream, *mut *mut c_void,
        *mut *mut c_void
    );
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    /// A function of the bindings would convert any return code into an enumeration.
    #[test]
    fn the_driver_is_called_through_the_table_alone() {
        let (mut folders, mut calls) = (vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src")], 0);
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                    continue;
                }
                let Ok(text) = std::fs::read_to_string(&path) else { continue };
                calls += text.matches("call!(").count() + text.matches("ask!(").count();
                let binding = concat!("sys", "::cu");
                let direct = text.split(binding).skip(1).find(|rest| rest.starts_with(char::is_uppercase));
                assert!(direct.is_none(), "{}: {binding}{:.20}", path.display(), direct.unwrap());
            }
        }
        assert!(calls > 30, "the search found only {calls}");
    }
}
