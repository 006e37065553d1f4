//! Memory that other libraries allocate: mapped piece by piece, managed, of another process.

use crate::gather::queue;
use crate::{is_real, other_gpu};
use cudarc::driver::sys;
use ferrywire::{Endpoint, MemoryLocation, RegisterError};
use ferrywire_memory::cuda::{CudaGpu, pointer};
use std::process::Command;
use std::sync::Arc;

fn right(code: sys::CUresult) {
    assert_eq!(code as u32, 0, "{code:?}");
}

/// GPU 0, if it is a real one: the stand-in has none of what is needed here.
fn gpu() -> Option<Arc<CudaGpu>> {
    queue().map(|(gpu, _)| gpu).filter(|gpu| is_real(gpu))
}

/// A range of addresses behind which pieces of memory are mapped one after another.
struct Expandable {
    base: u64,
    piece_bytes: usize,
    pieces: Vec<sys::CUmemGenericAllocationHandle>,
}

impl Expandable {
    fn new(gpu: &CudaGpu, count: usize) -> Expandable {
        gpu.with_current(|| Expandable::mapped(gpu, count)).unwrap()
    }

    /// With its context current.
    fn mapped(gpu: &CudaGpu, count: usize) -> Expandable {
        let location = sys::CUmemLocation {
            type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
            id: gpu.index() as i32,
        };
        let access = sys::CUmemAccessDesc {
            location,
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: all zero is a valid value: no handle type, no flags.
        let mut kind: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
        kind.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        kind.location = location;
        let (piece_bytes, mut base, mut pieces) = (2 << 20, 0, Vec::new());
        // SAFETY: one range, with pieces of their own mapped side by side.
        unsafe {
            right(sys::cuMemAddressReserve(&mut base, piece_bytes * (count + 1), 0, 0, 0));
            for index in 0..count {
                let mut piece = 0;
                right(sys::cuMemCreate(&mut piece, piece_bytes, &kind, 0));
                right(sys::cuMemMap(base + (index * piece_bytes) as u64, piece_bytes, 0, piece, 0));
                pieces.push(piece);
            }
            right(sys::cuMemSetAccess(base, piece_bytes * count, &access, 1));
        }
        Expandable { base, piece_bytes, pieces }
    }
}

impl Drop for Expandable {
    fn drop(&mut self) {
        // SAFETY: what `new` made, unmapped once.
        unsafe {
            right(sys::cuMemUnmap(self.base, self.piece_bytes * self.pieces.len()));
            self.pieces.iter().for_each(|piece| right(sys::cuMemRelease(*piece)));
            right(sys::cuMemAddressFree(self.base, self.piece_bytes * (self.pieces.len() + 1)));
        }
    }
}

#[test]
fn a_segment_of_several_pieces_is_one_region() {
    let Some(gpu) = gpu() else { return };
    let gpu = other_gpu(&gpu);
    let segment = Expandable::new(&gpu, 3);
    let bytes = segment.piece_bytes as u64;
    let found = pointer::of(segment.base + bytes + 5).unwrap();
    println!("a piece of an expandable segment at {:#x}: {found:x?}", segment.base);
    assert_eq!((found.gpu, found.kind), (gpu.index(), pointer::Kind::Device));
    assert_eq!(pointer::gpu_of_range(segment.base, 3 * bytes), Ok(Some(gpu.index())));
    assert_eq!((found.base, found.bytes), (segment.base + bytes, bytes));
    let reaches = |wanted| pointer::stretch(segment.base + 5, wanted).map(|found| found.base + found.bytes);
    assert_eq!(reaches(bytes), Some(segment.base + 2 * bytes));
    assert_eq!(reaches(u64::MAX), Some(segment.base + 3 * bytes), "the rest is not mapped");
    assert_eq!(pointer::of(segment.base + 3 * bytes), None);
    let outside = pointer::gpu_of_range(segment.base + bytes, 2 * bytes + 1);
    assert!(outside.is_err(), "{outside:?}");
    let end = Endpoint::builder().build().unwrap();
    let (base, len) = ((segment.base + bytes - 100) as *mut u8, bytes as usize + 200);
    // SAFETY: the segment outlives the region.
    let region = unsafe { end.register_raw(base, len) }.unwrap();
    assert_eq!(region.location(), MemoryLocation::Cuda(gpu.index()));
    let written: Vec<u8> = (0..len).map(|k| k as u8 ^ (k >> 8) as u8).collect();
    region.write_at(0, &written).unwrap();
    let mut seen = vec![0; len];
    region.read_at(0, &mut seen).unwrap();
    assert!(seen == written);
    region.deregister().unwrap();
}

#[test]
fn managed_memory_is_memory_of_a_gpu() {
    let Some(gpu) = gpu() else { return };
    let mut base = 0;
    // SAFETY: room for an address; 1: for every stream.
    right(gpu.with_current(|| unsafe { sys::cuMemAllocManaged(&mut base, 10_000, 1) }).unwrap());
    let found = pointer::of(base + 10).unwrap();
    assert_eq!((found.gpu, found.kind), (gpu.index(), pointer::Kind::Managed));
    gpu.write_from_slice(base + 10, b"managed").unwrap();
    assert_eq!(gpu.read_to_vec(base + 10, 7).unwrap(), b"managed");
    // SAFETY: what was allocated above.
    right(gpu.with_current(|| unsafe { sys::cuMemFree_v2(base) }).unwrap());
    assert_eq!(pointer::of(base + 10), None);
}

/// Runs in a process of its own: opens what its parent has allocated.
#[test]
fn memory_of_another_process_is_registered() {
    const HANDLE: &str = "FERRYWIRE_CUDA_IPC";
    let Some(gpu) = gpu() else { return };
    gpu.with_current(|| match std::env::var(HANDLE) {
        Ok(text) => write_into(&text),
        Err(_) => share_with_a_child(&gpu, HANDLE),
    })
    .unwrap();
}

fn share_with_a_child(gpu: &CudaGpu, variable: &str) {
    let mut base = 0;
    let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
    // SAFETY: room for what is given; IPC shares whole allocations that the driver itself made.
    unsafe {
        right(sys::cuMemAlloc_v2(&mut base, 2 << 20));
        let code = sys::cuIpcGetMemHandle(&mut handle, base) as u32;
        if code != 0 {
            right(sys::cuMemFree_v2(base));
            return println!("SKIPPED: needs CUDA's IPC, which answers {code}");
        }
    }
    let text: String = handle.reserved.iter().map(|byte| format!("{:02x}", *byte as u8)).collect();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "foreign::memory_of_another_process_is_registered", "--nocapture"])
        .env(variable, text)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stdout).into_owned() + &String::from_utf8_lossy(&child.stderr);
    assert!(child.status.success() && said.contains("1 passed"), "{said}");
    if said.contains("SKIPPED") {
        println!("{said}");
    } else {
        assert_eq!(gpu.read_to_vec(base + 1000, 10).unwrap(), b"the child\0");
    }
    // SAFETY: what was allocated above; the child is gone.
    right(unsafe { sys::cuMemFree_v2(base) });
}

fn write_into(text: &str) {
    let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
    for (at, byte) in handle.reserved.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * at..][..2], 16).unwrap() as _;
    }
    let mut base = 0;
    // SAFETY: a handle that another process made; 1: with access of other GPUs where it takes some.
    let code = unsafe { sys::cuIpcOpenMemHandle_v2(&mut base, handle, 1) } as u32;
    if code != 0 {
        return println!("SKIPPED: needs CUDA's IPC, which answers {code} in the other process");
    }
    let found = pointer::of(base + 1000).unwrap();
    println!("memory of another process: {found:x?}");
    let end = Endpoint::builder().build().unwrap();
    // SAFETY: open until the end.
    let region = unsafe { end.register_raw((base + 1000) as *mut u8, 1000) }.unwrap();
    assert_eq!(region.location(), MemoryLocation::Cuda(found.gpu));
    region.write_at(0, b"the child").unwrap();
    // SAFETY: refused: it leaves the allocation.
    let refused = unsafe { end.register_raw(base as *mut u8, 1 << 40) };
    assert!(matches!(refused, Err(RegisterError::Cuda(_))), "{refused:?}");
    region.deregister().unwrap();
    // SAFETY: opened above.
    right(unsafe { sys::cuIpcCloseMemHandle(base) });
}
