//! Memory of real GPUs, through the raw table.
//!
//! Without an NVIDIA GPU these tests print so and run with a stand-in for the driver (the engine's
//! `tests/cuda/stand_in.c`), whose device memory the CPU cannot touch either.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::path::PathBuf;
use std::ptr;
use std::sync::{LazyLock, OnceLock};

use ferrywire_ncclnet::abi::PTR_CUDA;

use crate::case::{Case, case};
use crate::cuda_driver::stand_in;
use crate::driver::{Memory, OK, Pair, Plugin, Ptr, pattern};

/// Offset of the counts in the metadata.
const COUNTS: u64 = 16 * 2048 * 16;
const ALLOW: &str = "same_host=allow";

macro_rules! driver {
    ($($name:ident $symbol:literal ($($argument:ty),*);)+) => {
        /// The functions of the CUDA driver that the tests call.
        struct Driver {
            $($name: unsafe extern "C" fn($($argument),*) -> c_int,)+
        }

        impl Driver {
            fn load() -> Result<Driver, String> {
                // SAFETY: a string; the file is the CUDA driver, or stands in for it.
                let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
                if library.is_null() {
                    return Err("there is no libcuda.so.1".into());
                }
                Ok(Driver {
                    // SAFETY: functions of these names have these types.
                    $($name: unsafe {
                        let found = libc::dlsym(library, $symbol.as_ptr());
                        assert!(!found.is_null(), "{:?}", $symbol);
                        std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> c_int>(found)
                    },)+
                })
            }
        }
    };
}

driver! {
    init c"cuInit" (u32);
    device_count c"cuDeviceGetCount" (*mut c_int);
    primary_retain c"cuDevicePrimaryCtxRetain" (*mut *mut c_void, c_int);
    set_current c"cuCtxSetCurrent" (*mut c_void);
    get_current c"cuCtxGetCurrent" (*mut *mut c_void);
    mem_alloc c"cuMemAlloc_v2" (*mut u64, usize);
    copy_up c"cuMemcpyHtoD_v2" (u64, *const c_void, usize);
    copy_down c"cuMemcpyDtoH_v2" (*mut c_void, u64, usize);
    attribute c"cuPointerGetAttribute" (*mut c_void, c_int, u64);
}

// SAFETY: functions that may be called from any thread.
unsafe impl Sync for Driver {}
// SAFETY: as above.
unsafe impl Send for Driver {}

impl Driver {
    /// The driver with a device, or why there is none.
    fn find() -> Result<&'static Driver, String> {
        static FOUND: OnceLock<Result<Driver, String>> = OnceLock::new();
        let found = FOUND.get_or_init(|| {
            let (driver, mut count) = (Driver::load()?, 0);
            // SAFETY: room for a number.
            let codes = unsafe { ((driver.init)(0), (driver.device_count)(&mut count)) };
            match (codes, count) {
                ((0, 0), 1..) => Ok(driver),
                _ => Err(format!("cuInit and cuDeviceGetCount give {codes:?} and {count} devices")),
            }
        });
        found.as_ref().map_err(String::clone)
    }

    /// Makes the device current on this thread.
    fn set(&self, device: i32) {
        let mut context = ptr::null_mut();
        // SAFETY: room for a pointer, which is a context then.
        let codes = unsafe { ((self.primary_retain)(&mut context, device), (self.set_current)(context)) };
        assert_eq!(codes, (0, 0));
    }

    fn current(&self) -> *mut c_void {
        let mut context = ptr::null_mut();
        // SAFETY: room for a pointer.
        assert_eq!(unsafe { (self.get_current)(&mut context) }, 0);
        context
    }

    /// Device memory that begins at a page boundary, which drivers do not promise.
    fn alloc(&self, bytes: usize) -> u64 {
        let mut address = 0u64;
        // SAFETY: room for a number.
        assert_eq!(unsafe { (self.mem_alloc)(&mut address, bytes + 4096) }, 0);
        address.next_multiple_of(4096)
    }

    fn write(&self, address: u64, bytes: &[u8]) {
        // SAFETY: the driver checks the device address.
        assert_eq!(unsafe { (self.copy_up)(address, bytes.as_ptr().cast(), bytes.len()) }, 0);
    }

    fn read(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        // SAFETY: as above, and the vector is as long.
        assert_eq!(unsafe { (self.copy_down)(bytes.as_mut_ptr().cast(), address, len) }, 0);
        bytes
    }

    fn is_device_memory(&self, address: u64) -> bool {
        let mut kind = 0u32;
        // SAFETY: room for a number.
        let code = unsafe { (self.attribute)((&raw mut kind).cast(), 2, address) };
        code == 0 && kind == 2
    }
}

/// The case on this machine's GPU, or with the stand-in.
fn on_a_gpu(case: Case) -> Case {
    // The search path of the parent may already contain it.
    if std::env::var_os(crate::case::CASE).is_some() {
        return case;
    }
    let Err(why) = Driver::find() else { return case };
    println!("SKIPPED: needs an NVIDIA GPU ({why}); this runs with a stand-in for its driver");
    static STAND_IN: LazyLock<PathBuf> = LazyLock::new(|| stand_in(&[]));
    case.with("LD_LIBRARY_PATH", STAND_IN.to_str().unwrap())
}

/// A connection with both ends on one device.
struct Bench {
    driver: &'static Driver,
    pair: Pair,
    received: Cell<u64>,
}

impl Bench {
    fn new() -> Bench {
        let driver = Driver::find().unwrap();
        driver.set(0);
        let before = driver.current();
        let pair = Plugin::start().pair();
        assert_eq!(driver.current(), before, "the plugin leaves another device current");
        Bench { driver, pair, received: Cell::new(0) }
    }

    fn room(bytes: usize) -> usize {
        bytes.max(1).next_multiple_of(4096)
    }

    fn source(&self, bytes: &[u8]) -> Memory {
        let room = Bench::room(bytes.len());
        let address = self.driver.alloc(room);
        self.driver.write(address, bytes);
        self.pair.send.gpu(address, room)
    }

    fn target(&self, bytes: usize) -> Memory {
        let room = Bench::room(bytes);
        self.pair.recv.gpu(self.driver.alloc(room), room)
    }

    /// Sends and receives; returns the receive's request.
    fn transfer(&self, source: &Memory, target: &Memory, bytes: usize) -> Ptr {
        self.received.set(self.received.get() + 1);
        self.pair.transfer(source, target, bytes)
    }

    /// The addresses of the metadata and the pool.
    fn words(&self) -> [u64; 2] {
        let words = self.driver.read(self.pair.device_handle.handle as u64, 24);
        let word = |k: usize| u64::from_ne_bytes(words[k * 8..k * 8 + 8].try_into().unwrap());
        assert_eq!(word(2), !0, "the head");
        [word(0), word(1)]
    }

    /// The bytes of receive number `k`, gathered from the pool.
    fn gather(&self, k: u64) -> Vec<u8> {
        let [metadata, pool] = self.words();
        let slot = k % 16;
        // SAFETY: mapped memory of the plugin, of the size that the rules give.
        let count = unsafe { ((metadata + COUNTS + slot * 8) as *const u64).read_volatile() };
        let mut bytes = Vec::new();
        for n in 0..count {
            let at = metadata + (slot * 2048 + n) * 16;
            // SAFETY: as above; n is below the count.
            let (source, len, target) = unsafe {
                (
                    (at as *const u32).read_volatile(),
                    ((at + 4) as *const u32).read_volatile() as usize,
                    ((at + 8) as *const u64).read_volatile() as usize,
                )
            };
            bytes.resize(bytes.len().max(target + len), 0);
            bytes[target..target + len].copy_from_slice(&self.driver.read(pool + u64::from(source), len));
        }
        bytes
    }
}

fn every_size() {
    let bench = Bench::new();
    let sizes = [0, 1, 4095, 4096, 4097, 10_000, 65_536, 300_000, 524_288];
    for (k, size) in sizes.into_iter().cycle().take(25).enumerate() {
        let bytes = pattern(size, k as u8);
        let (source, target) = (bench.source(&bytes), bench.target(size));
        let recv = bench.transfer(&source, &target, size);
        assert!(bench.gather(k as u64) == bytes, "receive {k} of {size} bytes");
        assert_eq!(bench.pair.recv.flushed_size(recv), size as i32);
        assert_eq!(bench.pair.recv.consumed(recv), OK);
    }
}

#[test]
fn every_size_arrives_scattered_in_memory_of_a_gpu() {
    on_a_gpu(case!(ALLOW)).passes(every_size);
    on_a_gpu(case!("same_host=allow,seed=9,partial_io=on")).passes(every_size);
    on_a_gpu(case!(ALLOW))
        .with("NCCL_SOCKET_NTHREADS", "2")
        .with("NCCL_NSOCKS_PERTHREAD", "2")
        .with("NCCL_DYNAMIC_CHUNK_SIZE", "65536")
        .passes(every_size);
}

#[test]
fn words_and_pool_are_device_memory_and_the_table_is_mapped() {
    on_a_gpu(case!(ALLOW)).passes(|| {
        let bench = Bench::new();
        let [metadata, pool] = bench.words();
        let kinds = [bench.pair.device_handle.handle as u64, pool, metadata];
        assert_eq!(kinds.map(|address| bench.driver.is_device_memory(address)), [true, true, false]);
        assert_eq!((metadata % 4096, pool % 256), (0, 0));
    });
}

#[test]
fn memory_of_a_gpu_and_of_the_host_mix() {
    on_a_gpu(case!(ALLOW)).passes(|| {
        let bench = Bench::new();
        let bytes = pattern(70_000, 3);
        let (source, target) = (bench.source(&bytes), bench.pair.recv.host(vec![0; bytes.len()]));
        let recv = bench.transfer(&source, &target, bytes.len());
        assert!(target.bytes() == bytes, "from a GPU into host memory");
        assert_eq!(bench.gather(0).len(), 0);
        assert_eq!(bench.pair.recv.consumed(recv), OK);
        let (source, target) = (bench.pair.send.host(pattern(6000, 5)), bench.target(6000));
        bench.transfer(&source, &target, 6000);
        assert!(bench.gather(1) == pattern(6000, 5), "from host memory into a GPU");
    });
}

#[test]
fn pages_of_a_gpu_are_poisoned_when_recycled() {
    on_a_gpu(case!("same_host=allow,pool_pages=64")).passes(|| {
        let bench = Bench::new();
        for round in 0..20 {
            let bytes = vec![round as u8 + 1; 40_000];
            let (source, target) = (bench.source(&bytes), bench.target(bytes.len()));
            let recv = bench.transfer(&source, &target, bytes.len());
            assert!(bench.gather(round) == bytes, "until it is consumed");
            assert_eq!(bench.pair.recv.consumed(recv), OK);
            // The GPU poisons the pages in the background; a case that hangs is killed.
            while !bench.gather(round).iter().all(|byte| *byte == 0xDE) {
                std::thread::yield_now();
            }
        }
    });
}

#[test]
fn memory_of_a_gpu_is_registered_in_whole_aligned_pages() {
    on_a_gpu(case!(ALLOW)).passes(|| {
        let bench = Bench::new();
        let address = bench.driver.alloc(8192);
        let code = |offset, len| bench.pair.recv.register(address + offset, len, PTR_CUDA).err();
        assert_eq!((code(0, 8192), code(8, 4096), code(0, 4097)), (None, Some(1), Some(1)));
        assert_eq!(code(4096, 1 << 30), Some(1), "beyond the allocation");
        let host = [0_u8; 16];
        assert_eq!(bench.pair.recv.register(host.as_ptr() as u64 & !4095, 4096, PTR_CUDA), Err(1));
        // On a thread without a current device.
        let unset = std::thread::scope(|scope| {
            scope.spawn(|| bench.pair.recv.register(address, 8192, PTR_CUDA).err()).join().unwrap()
        });
        assert_eq!(unset, Some(1));
    });
}

#[test]
fn gpu_payload_of_the_same_host_ends_the_process_here_too() {
    on_a_gpu(case!("")).exits(1, "data landed on host memory 1 times", || {
        let bench = Bench::new();
        let (source, target) = (bench.source(&[1; 100]), bench.target(100));
        bench.transfer(&source, &target, 100);
    });
}
