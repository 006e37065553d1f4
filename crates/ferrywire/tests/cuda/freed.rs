//! Memory that its owner frees before it is copied, where copies follow its address: that ended the process, with the driver's
//! SIGSEGV.

use crate::case::case;
use crate::ends::{Ends, LIMIT, builder, contents, loopback, pattern, plugin};
use crate::gpus::{location, on_gpus};
use cudarc::driver::sys;
use ferrywire::{Endpoint, MemoryLocation, Region, TransferError};
use ferrywire_memory::cuda::{CudaError, CudaGpu};
use ferrywire_memory::unpack::UnpackMode;
use std::sync::Arc;

const BYTES: usize = 300_000;

/// The GPU of an end, which is the first one where there are no others.
fn gpu_of(index: u32) -> Arc<CudaGpu> {
    let MemoryLocation::Cuda(index) = location(index) else { panic!("{}", location(index)) };
    CudaGpu::open(index).unwrap()
}

/// Memory that the driver allocates, registered.
fn allocated(end: &Endpoint, gpu: &CudaGpu) -> (u64, Region) {
    let mut address = 0;
    // SAFETY: room for an address.
    let code = gpu.with_current(|| unsafe { sys::cuMemAlloc_v2(&mut address, BYTES) });
    assert_eq!(code.unwrap() as u32, 0);
    // SAFETY: it is not: that is the test.
    (address, unsafe { end.register_raw(address as *mut u8, BYTES) }.unwrap())
}

fn free(gpu: &CudaGpu, address: u64) {
    // SAFETY: freed once.
    let code = gpu.with_current(|| unsafe { sys::cuMemFree_v2(address) });
    assert_eq!(code.unwrap() as u32, 0);
}

/// Messages are packed and unpacked, each with one copy, since the plugin is given no memory of GPUs.
#[test]
fn memory_that_is_freed_before_its_copy_in_one_piece_costs_its_operation_alone() {
    for mode in [UnpackMode::Kernel, UnpackMode::Copy, UnpackMode::Host] {
        on_gpus(case!("same_host=allow")).with("NCCL_USE_DMA_BUF", "0").passes(|| {
            let end = |index| {
                builder().plugin(plugin().gpu(location(index)).allow_same_host_gpu(true).unpack(mode))
            };
            let ends = Ends::of(loopback(end(1)), end(0));
            let [here, there] = [gpu_of(0), gpu_of(1)];
            let write = |source: &Region, target: &Region| {
                let write = ends.near.write(source, 0, &target.descriptor(), 0, BYTES as u64).unwrap();
                write.wait(LIMIT)
            };
            let room = ends.accepting.alloc_cuda(there.index(), BYTES).unwrap();
            let bytes = ends.connecting.alloc_cuda(here.index(), BYTES).unwrap();
            bytes.write_at(0, &pattern(BYTES, 1)).unwrap();

            let (address, source) = allocated(&ends.connecting, &here);
            free(&here, address);
            let error = write(&source, &room).unwrap_err();
            assert!(matches!(error, TransferError::Cuda(CudaError::Freed { .. })), "{error}");
            let (address, target) = allocated(&ends.accepting, &there);
            free(&there, address);
            let error = write(&bytes, &target).unwrap_err();
            assert!(error.to_string().contains("the peer's copy to GPU memory failed"), "{error}");

            assert_eq!(write(&bytes, &room), Ok(BYTES as u64));
            assert!(contents(&room) == pattern(BYTES, 1));
            for peer in [&ends.near, &ends.far] {
                assert_eq!(peer.stats().lost_channels, [""; 0]);
            }
            ends.close();
        });
    }
}
