use super::*;
use crate::GpuCopy;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;

#[test]
fn the_cpu_may_not_touch_it() {
    if let Some(task) = child_task() {
        let gpu = SimGpu::open(0).unwrap();
        let buffer = gpu.alloc(8192, 4096).unwrap();
        gpu.fill(buffer.address(), 3, 8192).unwrap();
        let address = buffer.as_ptr();
        match task.as_str() {
            // SAFETY: unsound on purpose: this process must die of it.
            "load" => _ = std::hint::black_box(unsafe { address.add(5000).read_volatile() }),
            // SAFETY: as above.
            "store" => unsafe { address.write_volatile(1) },
            "freed" => {
                drop(buffer);
                // SAFETY: as above.
                let _ = std::hint::black_box(unsafe { address.read_volatile() });
            }
            _ => assert_eq!(gpu.read_to_vec(buffer.address() + 5000, 1).unwrap(), [3]),
        }
        return;
    }
    let run = |task| run_child("memory::the_cpu_may_not_touch_it", task, &[]);
    for task in ["load", "store", "freed"] {
        assert_eq!(signal_of(&run(task)), Some(libc::SIGSEGV), "{task}");
    }
    assert_passed(&run("copy engine"));
}

#[test]
fn system_calls_that_name_it_give_efault() {
    let buffer = SimGpu::open(0).unwrap().alloc(4096, 4096).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (mut far, _) = listener.accept().unwrap();
    far.write_all(b"payload").unwrap();
    let (fd, at) = (near.as_raw_fd(), buffer.as_ptr().cast::<libc::c_void>());
    let failed = || std::io::Error::last_os_error().raw_os_error();
    // SAFETY: a system call checks the address itself.
    assert_eq!(unsafe { libc::recv(fd, at, 7, 0) }, -1);
    assert_eq!(failed(), Some(libc::EFAULT));
    // SAFETY: as above.
    assert_eq!(unsafe { libc::send(fd, at, 7, 0) }, -1);
    assert_eq!(failed(), Some(libc::EFAULT));
    let mut host = [0; 7];
    near.read_exact(&mut host).unwrap();
    assert_eq!(&host, b"payload");
}

#[test]
fn bytes_go_in_and_out_through_the_copy_engine() {
    let gpu = SimGpu::open(0).unwrap();
    let buffer = gpu.alloc(300_001, 4096).unwrap();
    let at = buffer.address();
    assert_eq!(gpu.read_to_vec(at, buffer.len()).unwrap(), vec![0; buffer.len()]);
    let data = pattern(300_001, 1);
    gpu.write_from_slice(at, &data).unwrap();
    assert_eq!(gpu.read_to_vec(at, data.len()).unwrap(), data);
    assert_eq!(gpu.checksum(at, data.len()).unwrap(), crc32fast::hash(&data));
    assert_eq!(gpu.checksum(at + 1, 100).unwrap(), crc32fast::hash(&data[1..101]));
    gpu.fill(at + 7, 9, 5).unwrap();
    let expected = [&data[..7], &[9; 5], &data[12..20]].concat();
    assert_eq!(gpu.read_to_vec(at, 20).unwrap(), expected);
}

#[test]
fn one_number_is_one_gpu_and_there_are_sixteen() {
    let gpu = SimGpu::open(0).unwrap();
    assert!(Arc::ptr_eq(&gpu, &SimGpu::open(0).unwrap()));
    assert!(!Arc::ptr_eq(&gpu, &SimGpu::open(1).unwrap()));
    assert_eq!(SimGpu::open(16).unwrap_err(), SimGpuError::NoSuchGpu { index: 16 });
}

#[test]
fn a_gpu_lives_as_long_as_its_memory() {
    let buffer = SimGpu::open(2).unwrap().alloc(100, 4096).unwrap();
    let again = SimGpu::opened(2).unwrap();
    assert!(Arc::ptr_eq(&again, buffer.gpu()));
    drop(again);
    drop(buffer);
    assert!(SimGpu::opened(2).is_none());
    assert_eq!(SimGpu::open(2).unwrap().index(), 2);
}

#[test]
fn an_address_gives_its_gpu_and_allocation() {
    let (first, second) = (SimGpu::open(0).unwrap(), SimGpu::open(1).unwrap());
    let (one, two) = (first.alloc(10_000, 4096).unwrap(), second.alloc(5, 2 << 20).unwrap());
    assert_eq!(SimGpu::of(one.address()), Some((0, one.address(), 10_000)));
    assert_eq!(SimGpu::of(one.address() + 9_999), Some((0, one.address(), 10_000)));
    assert_eq!(SimGpu::of(one.address() + 10_000), None);
    assert_eq!(SimGpu::of(two.address() + 4), Some((1, two.address(), 5)));
    assert_eq!(two.address() % (2 << 20), 0);
    let host = [0u8; 8];
    assert_eq!(SimGpu::of(host.as_ptr() as u64), None);
    assert_eq!(first.alloc(1, 3).unwrap_err(), SimGpuError::Alignment { align: 3 });
}

#[test]
fn ranges_that_leave_their_allocation_are_refused_and_move_nothing() {
    let gpu = SimGpu::open(0).unwrap();
    let buffer = gpu.alloc(1000, 4096).unwrap();
    let (base, len) = (buffer.address(), 1000);
    let outside = |address, bytes| SimGpuError::OutOfRange { address, bytes, base, len };
    // The page of the allocation's end is not all the allocation's memory.
    assert_eq!(gpu.write_from_slice(base + 990, &[1; 11]), Err(outside(base + 990, 11)));
    assert_eq!(gpu.read_to_vec(base, 1001), Err(outside(base, 1001)));
    assert_eq!(gpu.fill(base + 1, 1, 1000), Err(outside(base + 1, 1000)));
    assert_eq!(gpu.checksum(base + 1, usize::MAX).unwrap_err(), outside(base + 1, u64::MAX));
    // The byte before the allocation may belong to an allocation of another test, which ends there.
    match gpu.write_from_slice(base - 1, &[1; 2]).unwrap_err() {
        SimGpuError::NotAllocated { address } => assert_eq!(address, base - 1),
        SimGpuError::OutOfRange { address, bytes: 2, base: other, len } => {
            assert_eq!((address, other + len), (base - 1, base));
        }
        error => panic!("{error}"),
    }
    assert_eq!(gpu.read_to_vec(base, 1000).unwrap(), [0; 1000]);
    // An empty range is valid everywhere inside, at the end too, and nowhere else.
    assert_eq!(gpu.write_from_slice(base + 1000, &[]), Ok(()));
    assert_eq!(gpu.fill(base + 1001, 1, 0), Err(SimGpuError::NotAllocated { address: base + 1001 }));
}

#[test]
fn a_gather_with_one_piece_out_of_bounds_moves_none() {
    let gpu = SimGpu::open(0).unwrap();
    let (source, target) = (gpu.alloc(100, 4096).unwrap(), gpu.alloc(100, 4096).unwrap());
    gpu.fill(source.address(), 7, 100).unwrap();
    let good = GpuCopy { source: source.address(), target: target.address(), bytes: 50 };
    let bad = GpuCopy { source: source.address() + 60, target: target.address() + 50, bytes: 50 };
    let stream = gpu.stream();
    stream.gather(vec![good, bad]).unwrap();
    let error = stream.wait(SOON).unwrap_err();
    assert!(matches!(error, SimGpuError::OutOfRange { bytes: 50, .. }), "{error}");
    assert_eq!(gpu.read_to_vec(target.address(), 100).unwrap(), [0; 100]);
    let stream = gpu.stream();
    stream.gather(vec![good]).unwrap();
    stream.wait(SOON).unwrap();
    assert_eq!(gpu.read_to_vec(target.address(), 51).unwrap()[49..], [7, 0]);
}

#[test]
fn a_freed_address_is_unknown() {
    let gpu = SimGpu::open(0).unwrap();
    let buffer = gpu.alloc(4096, 4096).unwrap();
    let address = buffer.address();
    drop(buffer);
    let unknown = SimGpuError::NotAllocated { address };
    assert_eq!(SimGpu::of(address), None);
    assert_eq!(gpu.read_to_vec(address, 1), Err(unknown.clone()));
    assert_eq!(gpu.write_from_slice(address, &[1]), Err(unknown.clone()));
    // SAFETY: the call returns an error and no pointer.
    assert_eq!(unsafe { SimGpu::dma_view(address, 1) }, Err(unknown));
}

#[test]
fn memory_freed_before_its_copy_begins_is_an_error_of_the_stream() {
    let gpu = SimGpu::open(3).unwrap();
    let buffer = gpu.alloc(4096, 4096).unwrap();
    let address = buffer.address();
    gpu.set_stall(true);
    let stream = gpu.stream();
    stream.fill(address, 1, 4096).unwrap();
    drop(buffer);
    gpu.set_stall(false);
    assert_eq!(stream.wait(SOON), Err(SimGpuError::NotAllocated { address }));
}

#[test]
fn device_memory_is_refused_where_host_memory_belongs() {
    let gpu = SimGpu::open(0).unwrap();
    let buffer = gpu.alloc(4096, 4096).unwrap();
    let (address, stream) = (buffer.address(), gpu.stream());
    let refused = Err(SimGpuError::NotHostMemory { address, gpu: 0 });
    // SAFETY: the call is rejected, so no byte is accessed.
    unsafe {
        assert_eq!(stream.to_host(address, buffer.as_ptr(), 10), refused);
        assert_eq!(stream.from_host(buffer.as_ptr(), address, 10), refused);
    }
    assert_eq!(stream.query(), Ok(true));
}

#[test]
fn mapped_memory_has_one_address_for_host_and_gpu() {
    let gpu = SimGpu::open(0).unwrap();
    let (mapped, buffer) = (MappedBuffer::new(5000, 4096).unwrap(), gpu.alloc(5000, 4096).unwrap());
    // SAFETY: 5000 bytes that no other code uses now.
    unsafe { mapped.as_ptr().write_bytes(4, 5000) };
    let stream = gpu.stream();
    stream.copy(mapped.address(), buffer.address(), 5000).unwrap();
    stream.fill(mapped.address() + 1, 5, 1).unwrap();
    stream.wait(SOON).unwrap();
    assert_eq!(gpu.read_to_vec(buffer.address(), 5000).unwrap(), [4; 5000]);
    // SAFETY: the stream is done.
    assert_eq!(unsafe { mapped.as_ptr().add(1).read() }, 5);
    assert_eq!(SimGpu::of(mapped.address()), None);
}

#[test]
fn a_nic_sees_what_the_copy_engine_sees() {
    let gpu = SimGpu::open(0).unwrap();
    let buffer = gpu.alloc(4096, 4096).unwrap();
    // SAFETY: the buffer outlives the pointer, and no stream uses it meanwhile.
    unsafe {
        let view = SimGpu::dma_view(buffer.address() + 100, 3996).unwrap();
        view.write(77);
    }
    assert_eq!(gpu.read_to_vec(buffer.address() + 99, 3).unwrap(), [0, 77, 0]);
    // SAFETY: the call returns an error and no pointer.
    assert!(unsafe { SimGpu::dma_view(buffer.address() + 100, 3997) }.is_err());
}

#[test]
fn other_devices_get_whole_pages_of_one_allocation() {
    let gpu = SimGpu::open(0).unwrap();
    let (buffer, mapped) = (gpu.alloc(10_000, 4096).unwrap(), MappedBuffer::new(4096, 4096).unwrap());
    let address = buffer.address();
    for (first, bytes) in [(address, 12_288), (address + 4096, 4096)] {
        match dmabuf_fd(first, bytes) {
            Ok(fd) => assert!(fd.as_raw_fd() > 2),
            Err(error) => {
                assert!(!ferrywire_sys::udmabuf::is_there(), "{error}");
                println!("SKIPPED: needs /dev/udmabuf: {error}");
                assert!(matches!(error, SimGpuError::DmaBuf { .. }), "{error}");
            }
        }
    }
    let outside = SimGpuError::OutOfRange { address, bytes: 16_384, base: address, len: 10_000 };
    assert_eq!(dmabuf_fd(address, 16_384).unwrap_err(), outside);
    assert!(matches!(dmabuf_fd(address + 4096, u64::MAX).unwrap_err(), SimGpuError::OutOfRange { .. }));
    for (first, bytes) in [(address + 1, 4096), (address, 100), (address, 0)] {
        let why = dmabuf_fd(first, bytes).unwrap_err().to_string();
        assert!(why.contains("multiples of 4096"), "{why}");
    }
    let why = dmabuf_fd(mapped.address(), 4096).unwrap_err().to_string();
    assert!(why.contains("not in GPU memory"), "{why}");
    drop(buffer);
    assert_eq!(dmabuf_fd(address, 4096).unwrap_err(), SimGpuError::NotAllocated { address });
}

#[test]
fn freed_addresses_are_kept_for_a_while_and_not_for_ever() {
    // In a child process: other tests rely on freed addresses that this test returns to the kernel.
    if child_task().is_none() {
        let test = "memory::freed_addresses_are_kept_for_a_while_and_not_for_ever";
        assert_passed(&run_child(test, "run", &[]));
        return;
    }
    let gpu = SimGpu::open(0).unwrap();
    for round in 0..2 * limits::SIM_FREED_RANGES_KEPT {
        drop(gpu.alloc(1 << 20, 4096).unwrap());
        assert!((1..=limits::SIM_FREED_RANGES_KEPT).contains(&allocation::freed_ranges()), "{round}");
    }
}
