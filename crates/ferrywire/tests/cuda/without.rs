//! Where something is missing: no driver, an old one, half of one, no device; and all other tests with a stand-in.

use crate::driver::{WITH_KERNELS, has_kernels, stand_in};
use crate::ends;
use crate::rounds::lose_a_peer;
use ferrywire::{Endpoint, Error, MemoryLocation, RegisterError, TransferError};
use ferrywire_memory::cuda::{CudaError, CudaGpu, pointer};
use std::ffi::{CStr, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};
use std::{mem, ptr};

const CHILD: &str = "FERRYWIRE_CUDA_CHILD";
/// Far more than anything here takes.
const LONG: Duration = Duration::from_secs(60);
/// Runs tests of this program in a process with that driver; returns what it says.
fn child(folder: &Path, tests: &[&str]) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(tests).args(["--nocapture", "--test-threads=2"]);
    let output = command.env("LD_LIBRARY_PATH", folder).env(CHILD, "1").output().unwrap();
    let said =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{:?}\n{said}", output.status);
    said
}

/// Runs the body of a test in a process that finds this driver.
fn with_driver(name: &str, defines: &[&str], body: impl FnOnce()) {
    with_folder(name, || stand_in(defines), body);
}

/// Runs the body of a test in a process that finds the libraries of a folder, or of several with colons between them.
fn with_folder(name: &str, folder: impl FnOnce() -> PathBuf, body: impl FnOnce()) {
    if std::env::var_os(CHILD).is_some() {
        return body();
    }
    let said = child(&folder(), &["--exact", name]);
    assert!(said.contains("1 passed"), "{said}");
}

fn unsupported_reason() -> CudaError {
    let error = CudaGpu::open(0).unwrap_err();
    assert_eq!(CudaGpu::open(0).unwrap_err(), error, "the same again");
    assert_eq!(Error::from(error.clone()).kind(), ferrywire::ErrorKind::Gpu);
    let end = Endpoint::builder().build().unwrap();
    assert_eq!(end.alloc_cuda(0, 4096).unwrap_err(), RegisterError::Cuda(error.clone()));
    error
}

#[test]
fn without_a_driver_host_memory_works_and_the_error_says_what_is_missing() {
    if !matches!(CudaGpu::count(), Err(CudaError::NoDriver)) {
        return println!("SKIPPED: needs a machine without a CUDA driver");
    }
    let error = unsupported_reason();
    assert_eq!(error, CudaError::NoDriver);
    assert!(error.to_string().contains("libcuda.so.1"), "{error}");
    assert_eq!(pointer::of(&raw const error as u64), None);
    assert!(CudaGpu::opened(0).is_none());
}

#[test]
fn an_old_driver_is_refused_with_both_versions() {
    with_driver("without::an_old_driver_is_refused_with_both_versions", &["VERSION=11080"], || {
        let error = unsupported_reason();
        assert_eq!(error, CudaError::OldDriver { found: 11080, needed: 12000 });
        // Before a plugin is searched.
        let with_gpu = Endpoint::builder().plugin(ends::plugin().gpu(MemoryLocation::Cuda(0)));
        assert_eq!(with_gpu.build().unwrap_err(), Error::Cuda(error.clone()));
        assert!(error.to_string().contains("CUDA 11.8"), "{error}");
    });
}

/// The folder of the toolkit's stub, which has only the short name, before that of the driver.
fn stub_and_driver() -> PathBuf {
    let stub = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda-stub");
    std::fs::create_dir_all(&stub).unwrap();
    let copy = stub.join(format!("libcuda.{}", std::process::id()));
    std::fs::copy(stand_in(&["VERSION=11080"]).join("libcuda.so"), &copy).unwrap();
    std::fs::rename(copy, stub.join("libcuda.so")).unwrap();
    let folders = std::env::join_paths([stub, stand_in(&[])]).unwrap();
    folders.into()
}

/// Regression: the stub was loaded beside the driver, and called instead of it.
#[test]
fn a_stub_beside_the_driver_is_not_loaded() {
    with_folder("without::a_stub_beside_the_driver_is_not_loaded", stub_and_driver, || {
        // SAFETY: a name with its end.
        assert!(!unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) }.is_null());
        assert_eq!(ferrywire_memory::cuda::driver_version(), Ok(12040));
        CudaGpu::open(0).unwrap();
    });
}

#[test]
fn a_driver_without_a_function_is_an_error_and_no_panic() {
    with_driver("without::a_driver_without_a_function_is_an_error_and_no_panic", &["INCOMPLETE"], || {
        let missing = CudaError::MissingSymbol { symbol: "cuPointerGetAttributes", version: 12040 };
        assert_eq!(unsupported_reason(), missing);
    });
}

#[test]
fn a_driver_without_a_device_says_so() {
    with_driver("without::a_driver_without_a_device_says_so", &["DEVICES=0"], || {
        assert_eq!(unsupported_reason(), CudaError::NoDevice);
    });
}

#[test]
fn host_memory_is_registered_without_loading_or_initialising_the_driver() {
    let name = "without::host_memory_is_registered_without_loading_or_initialising_the_driver";
    with_driver(name, &[], || {
        let mapped = || std::fs::read_to_string("/proc/self/maps").unwrap().contains("libcuda");
        let end = Endpoint::builder().build().unwrap();
        let mut bytes = [0u8; 100];
        // SAFETY: the bytes outlive the region.
        let region = unsafe { end.register_raw(bytes.as_mut_ptr(), 100) }.unwrap();
        assert_eq!(region.location(), MemoryLocation::Host);
        assert!(!mapped());
        // Another library loads the driver without using it.
        // SAFETY: a name with its end.
        assert!(!unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) }.is_null());
        assert!(mapped());
        assert_eq!(pointer::of(bytes.as_ptr() as u64), None);
        let mut count = -1;
        // SAFETY: room for a number; the stand-in has the function.
        let asked = unsafe { cudarc::driver::sys::cuDeviceGetCount(&mut count) } as u32;
        assert_eq!(asked, 3, "CUDA_ERROR_NOT_INITIALIZED");
    });
}

/// A symbol of the loaded driver.
fn symbol(name: &CStr) -> *mut c_void {
    // SAFETY: names with their ends.
    let found = unsafe {
        let driver = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW);
        assert!(!driver.is_null());
        libc::dlsym(driver, name.as_ptr())
    };
    assert!(!found.is_null(), "{name:?}");
    found
}

/// Allocates memory of GPU 0 as another library does.
fn foreign_memory(bytes: usize) -> *mut u8 {
    type Init = unsafe extern "C" fn(u32) -> u32;
    type Retain = unsafe extern "C" fn(*mut *mut c_void, i32) -> u32;
    type Push = unsafe extern "C" fn(*mut c_void) -> u32;
    type Alloc = unsafe extern "C" fn(*mut *mut u8, usize) -> u32;
    let (mut context, mut memory) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: the functions of the stand-in have these types, and write pointers, for which there is room.
    let codes = unsafe {
        let init = mem::transmute::<*mut c_void, Init>(symbol(c"cuInit"));
        let retain = mem::transmute::<*mut c_void, Retain>(symbol(c"cuDevicePrimaryCtxRetain"));
        let push = mem::transmute::<*mut c_void, Push>(symbol(c"cuCtxPushCurrent_v2"));
        let alloc = mem::transmute::<*mut c_void, Alloc>(symbol(c"cuMemAlloc_v2"));
        [init(0), retain(&mut context, 0), push(context), alloc(&mut memory, bytes)]
    };
    assert_eq!(codes, [0; 4]);
    memory
}

/// Registers memory of the caller, which has to live long enough; says where it is.
fn registered(end: &Endpoint, base: *mut u8, bytes: usize) -> Result<MemoryLocation, RegisterError> {
    // SAFETY: the caller keeps the memory, and the region is dropped here.
    unsafe { end.register_raw(base, bytes) }.map(|region| region.location())
}

/// Regression: the memory was registered as the host's, and the first access to it ended the process.
#[test]
fn memory_of_a_gpu_whose_driver_is_too_old_is_refused_and_host_memory_is_not() {
    let name = "without::memory_of_a_gpu_whose_driver_is_too_old_is_refused_and_host_memory_is_not";
    with_driver(name, &["VERSION=11080"], || {
        let end = Endpoint::builder().build().unwrap();
        let memory = foreign_memory(4096);
        let too_old = CudaError::OldDriver { found: 11080, needed: 12000 };
        assert_eq!(registered(&end, memory, 4096), Err(RegisterError::Cuda(too_old)));
        let mut bytes = [0u8; 100];
        assert_eq!(registered(&end, bytes.as_mut_ptr(), 100), Ok(MemoryLocation::Host));
    });
}

/// Regression: it was registered as the host's.
#[test]
fn memory_whose_lookup_fails_is_refused() {
    with_driver("without::memory_whose_lookup_fails_is_refused", &[], || {
        let end = Endpoint::builder().build().unwrap();
        let memory = foreign_memory(4096);
        assert_eq!(registered(&end, memory, 4096), Ok(MemoryLocation::Cuda(0)));
        let mut bytes = [0u8; 100];
        // SAFETY: the stand-in has this `int`, which only this thread uses.
        let code = unsafe { AtomicI32::from_ptr(symbol(c"lookup_code").cast()) };
        code.store(700, Ordering::SeqCst);
        let refused = registered(&end, memory, 4096).unwrap_err();
        let RegisterError::Cuda(CudaError::Call { failure }) = refused else { panic!("{refused}") };
        assert_eq!((failure.call, failure.code), ("cuPointerGetAttributes", 700));
        // Some drivers refuse an address of the host so.
        code.store(1, Ordering::SeqCst);
        assert_eq!(registered(&end, bytes.as_mut_ptr(), 100), Ok(MemoryLocation::Host));
    });
}

#[test]
fn a_driver_that_pins_no_more_memory_is_reported_with_what_to_try() {
    with_driver("without::a_driver_that_pins_no_more_memory_is_reported_with_what_to_try", &[], || {
        let gpu = CudaGpu::open(0).unwrap();
        let error = gpu.pinned((1 << 30) + 1).unwrap_err().to_string();
        let call =
            "cuMemHostRegister on CUDA GPU 0 (1073745920 bytes): CUDA_ERROR_OUT_OF_MEMORY (2): out of memory";
        assert!(
            error.contains(call)
                && error.contains("1073741825 bytes of pinned")
                && error.contains("ulimit -l")
        );
        assert_eq!(gpu.pinned(100).unwrap().len(), 100);
    });
}

#[test]
fn a_transfer_without_pinned_memory_ends_with_what_to_try_and_the_connection_goes_on() {
    let name = "without::a_transfer_without_pinned_memory_ends_with_what_to_try_and_the_connection_goes_on";
    with_driver(name, &["PINNED_MAX=1000000"], || {
        let accepting = Endpoint::builder().listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
        let connecting = Endpoint::builder().build().unwrap();
        let near = connecting.connect(accepting.listen_addresses()[0], LONG).unwrap();
        let (host, far) = (connecting.register(vec![7; 1 << 20]).unwrap(), accepting.alloc_host(1 << 20));
        let (on_gpu, far) = (connecting.alloc_cuda(0, 1 << 20).unwrap(), far.unwrap());
        for _ in 0..3 {
            let write = near.write(&on_gpu, 0, &far.descriptor(), 0, 1 << 20).unwrap();
            let error = write.wait(LONG).unwrap_err();
            assert!(matches!(error, TransferError::Cuda(CudaError::Pinned { .. })), "{error}");
            assert!(error.to_string().contains("ulimit -l"), "{error}");
            let write = near.write(&host, 0, &far.descriptor(), 0, 1 << 20).unwrap();
            assert_eq!(write.wait(LONG), Ok(1 << 20));
        }
        // And where the other end is the one without.
        let there = accepting.alloc_cuda(1, 1 << 20).unwrap();
        let write = near.write(&host, 0, &there.descriptor(), 0, 1 << 20).unwrap();
        assert!(write.wait(LONG).is_err());
        let write = near.write(&host, 0, &far.descriptor(), 0, 1 << 20).unwrap();
        assert_eq!(write.wait(LONG), Ok(1 << 20));
    });
}

/// Regression: memory that could not be zeroed was freed at once, and that waited for the stream.
#[test]
fn an_allocation_that_fails_while_a_stream_waits_does_not_wait_for_it() {
    let name = "without::an_allocation_that_fails_while_a_stream_waits_does_not_wait_for_it";
    with_driver(name, &["PINNED_MAX=1000000"], || {
        let gpu = CudaGpu::open(0).unwrap();
        let accepting = Endpoint::builder().listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
        let connecting = Endpoint::builder().build().unwrap();
        let near = connecting.connect(accepting.listen_addresses()[0], LONG).unwrap();
        let far = accepting.accept(LONG).unwrap();
        let (source, target) = (connecting.alloc_host(64).unwrap(), accepting.alloc_host(64).unwrap());
        let (received, stream) = (far.recv(1, &target, 0, 64).unwrap(), gpu.stream().unwrap());
        received.block_stream(&stream).unwrap();
        let all_that_may_be_pinned: Vec<_> = std::iter::from_fn(|| gpu.pinned(64 << 10).ok()).collect();
        let (ended, end) = std::sync::mpsc::channel();
        let allocates = gpu.clone();
        std::thread::spawn(move || ended.send(allocates.alloc(4096, 4096).map(drop)));
        let outcome = end.recv_timeout(LONG / 4);
        drop(all_that_may_be_pinned);
        near.send(1, &source, 0, 64).unwrap().wait(LONG).unwrap();
        stream.wait(LONG).unwrap();
        assert!(matches!(outcome, Ok(Err(CudaError::Pinned { .. }))), "{outcome:?}");
    });
}

/// Threads that move data need pinned memory, and free nothing.
#[test]
fn rings_of_lost_peers_are_freed_when_pinned_memory_runs_out() {
    let name = "without::rings_of_lost_peers_are_freed_when_pinned_memory_runs_out";
    with_driver(name, &["PINNED_MAX=33000000"], || {
        const BYTES: usize = 16 << 20;
        let accepting =
            Endpoint::builder().listen("127.0.0.1:0".parse().unwrap()).channels(1).build().unwrap();
        let connecting = Endpoint::builder().channels(1).build().unwrap();
        let source = connecting.alloc_cuda(0, BYTES).unwrap();
        let target = accepting.alloc_host(BYTES).unwrap();
        for _ in 0..10 {
            lose_a_peer(&connecting, &accepting, &source, &target);
        }
        let near = connecting.connect(accepting.listen_addresses()[0], LONG).unwrap();
        let start = Instant::now();
        let write = || near.write(&source, 0, &target.descriptor(), 0, BYTES as u64).unwrap();
        while let Err(error) = write().wait(LONG) {
            assert!(start.elapsed() < LONG / 4, "{error}");
        }
    });
}

/// The code that places short messages looks up its GPU each time.
#[test]
fn a_gpu_is_found_while_another_is_opened() {
    with_driver("without::a_gpu_is_found_while_another_is_opened", &["SLOW_CONTEXTS"], || {
        let _gpu = CudaGpu::open(0).unwrap();
        // SAFETY: the driver is loaded; the stand-in has both, and they are `int`s that are only used as atomics.
        let [begun, may] = unsafe {
            let driver = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
            assert!(!driver.is_null());
            [c"context_begun", c"context_may"]
                .map(|name| AtomicI32::from_ptr(libc::dlsym(driver, name.as_ptr()).cast::<i32>()))
        };
        std::thread::scope(|scope| {
            let opening = scope.spawn(|| CudaGpu::open(1).map(drop));
            while begun.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            let found = scope.spawn(|| CudaGpu::opened(0).is_some() && CudaGpu::open(0).is_ok());
            let start = Instant::now();
            while !found.is_finished() && start.elapsed() < LONG / 4 {
                std::thread::yield_now();
            }
            let waited = !found.is_finished();
            may.store(1, Ordering::SeqCst);
            assert!(found.join().unwrap() && !waited, "it waited for the other: {waited}");
            opening.join().unwrap().unwrap();
        });
    });
}

#[test]
fn all_tests_pass_with_kernels_on_the_cpu() {
    if std::env::var_os(CHILD).is_some() {
        return;
    }
    if !has_kernels() {
        return println!("SKIPPED: needs a C++ compiler");
    }
    let tests = [
        "captured::",
        "device::",
        "failed_calls::",
        "gather::",
        "held::",
        "joined::",
        "launched::",
        "outcomes::",
        "pattern::",
        "rounds::",
    ];
    let said = child(&stand_in(&[WITH_KERNELS]), &tests);
    assert!(!said.contains("needs a CUDA device that runs kernels"), "{said}");
    assert!(said.contains("stand-in: left 0 contexts, 0 streams, 0 events, 0 ranges, 0 pushed"), "{said}");
}

/// All that needs no kernel, with drivers that copy one by one and in batches.
#[test]
fn the_devices_tests_pass_with_a_stand_in() {
    if std::env::var_os(CHILD).is_some() {
        return;
    }
    for defines in [&[][..], &["BATCHES", "VERSION=12080"]] {
        let said = child(
            &stand_in(defines),
            &["captured::", "device::", "failed_calls::", "held::", "joined::", "outcomes::", "rounds::"],
        );
        assert!(!said.contains("needs a CUDA device\n"), "{said}");
        let left = "stand-in: left 0 contexts, 0 streams, 0 events, 0 ranges, 0 pushed";
        assert!(said.contains(left), "{said}");
    }
}
