//! Regions of GPU memory, and descriptors.

use super::*;
use crate::Endpoint;
use ferrywire_memory::dmabuf_fd;
use ferrywire_memory::sim::{self, SimGpu, SimGpuError};

fn endpoint() -> Endpoint {
    Endpoint::builder().build().unwrap()
}

fn bytes_of(region: &Region, offset: u64, len: usize) -> Vec<u8> {
    let mut out = vec![0xEE; len];
    region.read_at(offset, &mut out).unwrap();
    out
}

#[test]
fn a_region_of_gpu_memory_is_read_and_written_through_the_copy_engine() {
    let end = endpoint();
    let region = end.alloc_sim(1, 100_000).unwrap();
    assert_eq!((region.location(), region.len()), (MemoryLocation::SimGpu(1), 100_000));
    assert_eq!(SimGpu::of(region.as_ptr() as u64), Some((1, region.as_ptr() as u64, 100_000)));
    region.write_at(99_990, &[7; 10]).unwrap();
    assert_eq!(bytes_of(&region, 99_988, 12), [0, 0, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7]);
    assert_eq!(bytes_of(&region, 100_000, 0), [0_u8; 0]);
    let outside =
        |side, offset| Err(RegisterError::OutOfRegion { side, offset, len: 10, region_bytes: 100_000 });
    assert_eq!(region.write_at(99_991, &[7; 10]), outside("target", 99_991));
    assert_eq!(region.read_at(u64::MAX, &mut [0; 10]), outside("source", u64::MAX));
}

#[test]
fn a_gpu_region_keeps_its_memory_until_it_is_deregistered() {
    let end = endpoint();
    let region = end.alloc_sim(0, 4096).unwrap();
    let (address, again) = (region.as_ptr() as u64, region.clone());
    drop(region);
    assert!(SimGpu::of(address).is_some());
    again.deregister().unwrap();
    assert_eq!(SimGpu::of(address), None);
    assert!(end.alloc_sim(0, 0).unwrap().is_empty());
    let no_such = RegisterError::SimGpu(SimGpuError::NoSuchGpu { index: 99 });
    assert_eq!(end.alloc_sim(99, 1).unwrap_err(), no_such);
    assert_eq!(no_such.kind(), crate::ErrorKind::Gpu);
}

/// Registered memory is also the user's own buffer, and may be passed as the slice.
#[test]
fn a_region_is_read_into_and_written_from_its_own_buffer() {
    const BYTES: usize = 4096;
    let end = endpoint();
    let mut buffer: Vec<u8> = (0..BYTES).map(|at| (at % 251) as u8).collect();
    // SAFETY: the buffer outlives the region, and is touched between calls only.
    let region = unsafe { end.register_raw(buffer.as_mut_ptr(), BYTES) }.unwrap();
    for (offset, slice) in [(0, 100..BYTES), (100, 0..BYTES - 100), (0, 1..2000), (1500, 1000..3000)] {
        let mut expected = buffer.clone();
        expected.copy_within(offset..offset + slice.len(), slice.start);
        region.read_at(offset as u64, &mut buffer[slice]).unwrap();
        assert!(buffer == expected, "read from {offset}");
        let mut expected = buffer.clone();
        expected.copy_within(500..2500, offset);
        region.write_at(offset as u64, &buffer[500..2500]).unwrap();
        assert!(buffer == expected, "written to {offset}");
    }
    region.deregister().unwrap();
}

#[test]
fn a_users_gpu_memory_is_recognised_by_its_address() {
    let end = endpoint();
    let gpu = SimGpu::open(1).unwrap();
    let buffer = gpu.alloc(10_000, 4096).unwrap();
    // SAFETY: the buffer is freed while it is registered, on purpose: after that only `read_at` accesses it.
    let region = unsafe { end.register_raw(buffer.as_ptr().wrapping_add(100), 9900) }.unwrap();
    assert_eq!(region.location(), MemoryLocation::SimGpu(1));
    region.write_at(0, &[3; 9900]).unwrap();
    assert_eq!(gpu.read_to_vec(buffer.address() + 99, 2).unwrap(), [0, 3]);
    let address = buffer.address() + 100;
    let outside = SimGpuError::OutOfRange { address, bytes: 9901, base: buffer.address(), len: 10_000 };
    // SAFETY: the registration is refused, so nothing accesses the memory.
    let refused = unsafe { end.register_raw(buffer.as_ptr().wrapping_add(100), 9901) };
    assert_eq!(refused.unwrap_err(), RegisterError::SimGpu(outside));
    drop(buffer);
    let freed = SimGpuError::NotAllocated { address };
    assert_eq!(region.read_at(0, &mut [0; 10]), Err(RegisterError::SimGpu(freed)));
    let host = end.register(vec![0; 10]).unwrap();
    assert_eq!(host.location(), MemoryLocation::Host);
}

#[test]
fn a_failure_of_the_gpu_is_the_callers_to_see() {
    let end = endpoint();
    let region = end.alloc_sim(13, 4096).unwrap();
    let gpu = SimGpu::open(13).unwrap();
    gpu.set_faults(sim::SimFaults { fail_after: Some(0), ..Default::default() });
    let failed = |operation| Err(RegisterError::SimGpu(SimGpuError::Injected { gpu: 13, operation }));
    assert_eq!(region.write_at(0, &[1]), failed(0));
    assert_eq!(region.read_at(0, &mut [1]), failed(1));
}

#[test]
fn a_descriptor_has_the_memory_location() {
    let end = endpoint();
    for (region, location) in [
        (end.register(vec![0; 77]).unwrap(), MemoryLocation::Host),
        (end.alloc_sim(1, 78).unwrap(), MemoryLocation::SimGpu(1)),
    ] {
        let parsed = RemoteRegion::from_bytes(&region.descriptor().to_bytes()).unwrap();
        assert_eq!(parsed, region.descriptor());
        assert_eq!(
            (parsed.location(), parsed.len(), parsed.owner()),
            (location, region.len(), end.identity())
        );
    }
}

#[test]
fn descriptors_of_other_versions_and_places_are_refused() {
    let good = endpoint().register(vec![0; 7]).unwrap().descriptor().to_bytes();
    let refusal = |bytes: &[u8]| RemoteRegion::from_bytes(bytes).unwrap_err().to_string();
    let first_version = [&[1], &good[1..33]].concat();
    assert!(refusal(&first_version).contains("another version"), "{}", refusal(&first_version));
    assert!(refusal(&good[..35]).contains("35 bytes long"));
    assert!(refusal(&[]).contains("0 bytes long"));
    for (kind, index) in [(0, 1), (1, 16), (1, u16::MAX), (2, 64), (3, 0), (255, 0)] {
        let mut bytes = good.clone();
        bytes[33] = kind;
        bytes[34..].copy_from_slice(&index.to_le_bytes());
        assert!(refusal(&bytes).contains("kind of memory"), "{kind} {index}");
    }
}

#[test]
fn only_memory_of_a_gpu_becomes_a_dmabuf() {
    let refused = |location| Error::from(dmabuf_fd(location, 4096, 4096).unwrap_err());
    assert!(matches!(refused(MemoryLocation::Host), Error::Invalid { what, .. } if what == "dma-buf"));
    assert!(matches!(
        refused(MemoryLocation::SimGpu(0)),
        Error::SimGpu(SimGpuError::NotAllocated { address: 4096 })
    ));
    assert!(matches!(refused(MemoryLocation::Cuda(0)), Error::Cuda(_)));
}
