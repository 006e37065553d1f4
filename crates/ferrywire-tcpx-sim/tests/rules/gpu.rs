//! GPU memory: registration, scattered receives, the receive pool and its pages.

use std::cell::Cell;
use std::sync::Arc;

use ferrywire_memory::sim::{SimBuffer, SimGpu, SimGpuTable, set_current};
use ferrywire_ncclnet::abi::{DeviceHandle, PTR_CUDA};

use crate::case::case;
use crate::driver::{DONE, Handle, Memory, NOT_YET, OK, Pair, Plugin, Ptr, last_logged, logged, pattern};

/// Offset of the counts in the metadata.
const COUNTS: u64 = 16 * 2048 * 16;

/// A GPU with a connection of which it has both ends.
pub struct Bench {
    gpu: Arc<SimGpu>,
    pair: Pair,
    /// The number of receives so far.
    received: Cell<u64>,
}

/// An entry of the metadata.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    pub source: u32,
    pub len: u32,
    pub target: u64,
}

impl Bench {
    pub fn new() -> Bench {
        Bench::on(0)
    }

    fn on(index: u32) -> Bench {
        Bench::over(SimGpu::open(index).unwrap(), index, Plugin::start())
    }

    /// A further connection of a started plugin.
    fn over(gpu: Arc<SimGpu>, index: u32, plugin: &'static Plugin) -> Bench {
        set_current(index).unwrap();
        Bench { pair: plugin.pair(), gpu, received: Cell::new(0) }
    }

    /// GPU memory with these bytes, registered for sending.
    fn source(&self, bytes: &[u8]) -> (SimBuffer, Memory) {
        let buffer = self.gpu.alloc(bytes.len().next_multiple_of(4096), 4096).unwrap();
        self.gpu.write_from_slice(buffer.address(), bytes).unwrap();
        let memory = self.pair.send.gpu(buffer.address(), bytes.len().next_multiple_of(4096));
        (buffer, memory)
    }

    /// GPU memory registered for receiving.
    fn target(&self, bytes: usize) -> (SimBuffer, Memory) {
        let buffer = self.gpu.alloc(bytes.next_multiple_of(4096), 4096).unwrap();
        let memory = self.pair.recv.gpu(buffer.address(), bytes.next_multiple_of(4096));
        (buffer, memory)
    }

    /// The addresses of the metadata and the pool.
    fn words(&self) -> [u64; 2] {
        let DeviceHandle { handle, size, .. } = self.pair.device_handle;
        let words = self.gpu.read_to_vec(handle as u64, size).unwrap();
        let word = |k: usize| u64::from_ne_bytes(words[k * 8..k * 8 + 8].try_into().unwrap());
        assert_eq!(word(2), !0, "the head");
        [word(0), word(1)]
    }

    /// The entries of receive number `k`.
    pub fn entries(&self, k: u64) -> Vec<Entry> {
        let [metadata, _] = self.words();
        let slot = k % 16;
        // SAFETY: mapped memory of the plugin, of the size that the rules give.
        let count = unsafe { ((metadata + COUNTS + slot * 8) as *const u64).read_volatile() };
        let entry = |n: u64| {
            let at = metadata + (slot * 2048 + n) * 16;
            // SAFETY: as above; n is below the count.
            unsafe {
                Entry {
                    source: (at as *const u32).read_volatile(),
                    len: ((at + 4) as *const u32).read_volatile(),
                    target: ((at + 8) as *const u64).read_volatile(),
                }
            }
        };
        (0..count).map(entry).collect()
    }

    /// The bytes of receive number `k`, gathered from the pool.
    fn gather(&self, k: u64) -> Vec<u8> {
        let entries = self.entries(k);
        let mut bytes = vec![0; entries.iter().map(|entry| entry.len as usize).sum()];
        for entry in entries {
            let piece = self.gpu.read_to_vec(self.words()[1] + u64::from(entry.source), entry.len as usize);
            let at = entry.target as usize;
            bytes[at..at + entry.len as usize].copy_from_slice(&piece.unwrap());
        }
        bytes
    }

    /// Sends and receives; returns the receive's request.
    fn transfer(&self, bytes: &[u8]) -> Ptr {
        let (source, target) = (self.source(bytes), self.target(bytes.len().max(1)));
        self.received.set(self.received.get() + 1);
        self.pair.transfer(&source.1, &target.1, bytes.len())
    }
}

impl Bench {
    /// Sends, receives, checks and consumes, in GPU memory.
    pub fn gather_one(&self, bytes: &[u8]) {
        let k = self.received.get();
        let recv = self.transfer(bytes);
        assert!(self.gather(k) == bytes);
        assert_eq!(self.pair.recv.consumed(recv), OK);
    }

    /// Sends and receives without checking anything.
    pub fn gather_nothing(&self, bytes: &[u8]) {
        self.transfer(bytes);
    }
}

const ALLOW: &str = "same_host=allow";

/// Each last `accept` checks for the pool and then imports it, without a lock against a second one in between.
#[test]
fn accepts_that_overlap_each_import_the_pool_and_the_earlier_ones_bytes_are_wrong() {
    let two_at_once = || {
        let (gpu, plugin) = (SimGpu::open(0).unwrap(), Plugin::start());
        let accept = || {
            let gpu = gpu.clone();
            std::thread::spawn(move || Bench::over(gpu, 0, plugin))
        };
        let benches = [accept(), accept()].map(|thread| thread.join().unwrap());
        let bytes = pattern(100_000, 1);
        benches.map(|bench| {
            bench.transfer(&bytes);
            (bench.words()[1], bench.gather(0) == bytes)
        })
    };
    // Long enough for both accepts to overlap.
    case!("same_host=allow,import_ms=2000").passes(|| {
        let [first, second] = two_at_once();
        assert_ne!(first.0, second.0, "one import");
        assert_ne!(first.1, second.1, "one of the two reads what is no longer there");
        assert_eq!(logged("receive pool imported"), 2);
    });
    case!("same_host=allow,import_ms=2000,import_race=off").passes(|| {
        let [first, second] = two_at_once();
        assert_eq!((first.0, first.1, second.1), (second.0, true, true));
        assert_eq!(logged("receive pool imported"), 1);
    });
}

#[test]
fn every_size_arrives_scattered() {
    let sizes = || {
        let bench = Bench::new();
        let sizes = [0, 1, 4095, 4096, 4097, 10_000, 65_536, 524_287, 524_288];
        for (k, size) in sizes.into_iter().cycle().take(40).enumerate() {
            let bytes = pattern(size, k as u8);
            let recv = bench.transfer(&bytes);
            assert!(bench.gather(k as u64) == bytes, "receive {k} of {size} bytes");
            assert_eq!(bench.pair.recv.flushed_size(recv), size as i32);
            assert_eq!(bench.pair.recv.consumed(recv), OK);
        }
    };
    case!(ALLOW).passes(sizes);
    case!("same_host=allow,seed=9,partial_io=on,delay_us=0-100").passes(sizes);
    case!("same_host=allow,scatter=off").passes(sizes);
    case!("same_host=allow,fragment_bytes=1448").passes(sizes);
    case!(ALLOW).with("NCCL_NSOCKS_PERTHREAD", "4").with("NCCL_DYNAMIC_CHUNK_SIZE", "65536").passes(sizes);
}

#[test]
fn fragments_are_at_most_a_page_and_some_are_odd() {
    let odd_ones = || {
        let bench = Bench::new();
        bench.transfer(&pattern(400_000, 1));
        let entries = bench.entries(0);
        assert!(entries.iter().all(|entry| (1..=4096).contains(&entry.len)));
        assert!(entries.iter().all(|entry| entry.source % 4096 + entry.len <= 4096), "within a page");
        let sum: u64 = entries.iter().map(|entry| u64::from(entry.len)).sum();
        assert_eq!(sum, 400_000);
        entries.iter().filter(|entry| entry.source % 2 == 1).count()
    };
    case!(ALLOW).passes(|| assert!(odd_ones() > 0));
    case!("same_host=allow,scatter=off").passes(|| assert_eq!(odd_ones(), 0));
}

#[test]
fn with_several_sockets_targets_are_not_ascending() {
    case!("same_host=allow,delay_us=0-300")
        .with("NCCL_SOCKET_NTHREADS", "4")
        .with("NCCL_DYNAMIC_CHUNK_SIZE", "8192")
        .passes(|| {
            let bench = Bench::new();
            let bytes = pattern(400_000, 1);
            let mut k = 0;
            // Which socket ends first is chance: among many receives, some has its chunks out of order.
            loop {
                let recv = bench.transfer(&bytes);
                let targets: Vec<u64> = bench.entries(k).iter().map(|entry| entry.target).collect();
                assert!(bench.gather(k) == bytes);
                assert_eq!(bench.pair.recv.consumed(recv), OK);
                if !targets.is_sorted() {
                    break;
                }
                k += 1;
            }
        });
}

#[test]
fn the_kth_receive_uses_slot_k_mod_16_empty_ones_included() {
    case!(ALLOW).passes(|| {
        let bench = Bench::new();
        for k in 0..35 {
            let bytes = pattern(if k % 3 == 1 { 0 } else { 100 + k }, k as u8);
            let recv = bench.transfer(&bytes);
            assert!(bench.gather(k as u64) == bytes, "receive {k}");
            assert_eq!(bench.pair.recv.consumed(recv), OK);
        }
    });
}

#[test]
fn host_memory_has_no_entries_beside_gpu_memory() {
    case!(ALLOW).passes(|| {
        let bench = Bench::new();
        let (_buffer, source) = bench.source(&pattern(5000, 4));
        let target = bench.pair.recv.host(vec![0; 5000]);
        bench.pair.transfer(&source, &target, 5000);
        assert!(target.bytes() == pattern(5000, 4), "from a GPU into host memory");
        assert_eq!(bench.entries(0).len(), 0);
        let source = bench.pair.send.host(pattern(6000, 5));
        let (_buffer, target) = bench.target(6000);
        bench.pair.transfer(&source, &target, 6000);
        assert!(bench.gather(1) == pattern(6000, 5), "from host memory into a GPU");
    });
}

#[test]
fn pages_are_poisoned_when_recycled() {
    let after_consuming = || {
        let bench = Bench::new();
        let bytes = vec![0x11; 20_000];
        let recv = bench.transfer(&bytes);
        assert!(bench.gather(0) == bytes, "until it is consumed");
        assert_eq!(bench.pair.recv.consumed(recv), OK);
        bench.gather(0)
    };
    case!(ALLOW).passes(|| assert!(after_consuming().iter().all(|byte| *byte == 0xDE)));
    case!("same_host=allow,poison=off")
        .passes(|| assert!(after_consuming().iter().all(|byte| *byte == 0x11)));
}

/// Pages taken and given back, as the closing receive comm logs them.
fn pages_at_close(bench: &Bench) -> (u64, u64) {
    bench.pair.recv.close();
    let line = last_logged("side=Recv");
    let count = |name: &str| {
        let word = line.split(' ').find_map(|word| word.strip_prefix(name)).expect("a line with counts");
        word.parse().unwrap()
    };
    (count("pages_taken="), count("pages_returned="))
}

#[test]
fn two_chunks_on_one_socket_leak_pages() {
    let pages = |chunks: usize| {
        let bench = Bench::new();
        for k in 0..4 {
            let bytes = pattern(chunks * 8192, k);
            let recv = bench.transfer(&bytes);
            assert!(bench.gather(k.into()) == bytes, "the data is right all the same");
            assert_eq!(bench.pair.recv.consumed(recv), OK);
        }
        pages_at_close(&bench)
    };
    // More chunks than a socket has in flight: the first is finished before the last is queued.
    let leaks = move || {
        let (taken, returned) = pages(12);
        assert!(returned < taken, "{returned} of {taken} came back");
    };
    let keeps = move |chunks| {
        let (taken, returned) = pages(chunks);
        assert_eq!(returned, taken);
    };
    let case = |switches| case!(switches).with("NCCL_DYNAMIC_CHUNK_SIZE", "8192");
    case("same_host=allow,stats=on").passes(leaks);
    case("same_host=allow,stats=on").passes(|| keeps(1));
    case("same_host=allow,stats=on,leak=off").passes(|| keeps(12));
}

#[test]
fn an_empty_pool_stalls_until_pages_come_back() {
    // One byte is one fragment, however a socket divides larger amounts.
    case!("same_host=allow,pool_pages=2").passes(|| {
        let bench = Bench::new();
        let [first, _] = [b"a", b"b"].map(|byte| bench.transfer(byte));
        let (source, target) = (bench.source(b"c"), bench.target(1));
        let send = bench.pair.send.isend(&source.1, 1).unwrap();
        let third = bench.pair.recv.irecv(&target.1, 1).unwrap();
        assert_eq!(bench.pair.send.finish(send), DONE);
        for _ in 0..2000 {
            assert_eq!(bench.pair.recv.test(third), NOT_YET);
        }
        assert_eq!(bench.pair.recv.consumed(first), OK);
        assert_eq!(bench.pair.recv.finish(third), DONE);
        assert_eq!([bench.gather(1), bench.gather(2)], [b"b", b"c"]);
    });
}

#[test]
fn a_closed_comm_gives_its_pages_back() {
    case!("same_host=allow,pool_pages=2").passes(|| {
        let first = Bench::new();
        [b"a", b"b"].iter().for_each(|byte| assert!(!first.transfer(*byte).is_null()));
        first.pair.recv.close();
        set_current(0).unwrap();
        let second = Bench { pair: second_pair(), gpu: first.gpu.clone(), received: Cell::new(0) };
        [b"c", b"d"].iter().for_each(|byte| assert!(!second.transfer(*byte).is_null()));
        assert_eq!([second.gather(0), second.gather(1)], [b"c", b"d"]);
    });
}

fn second_pair() -> Pair {
    let plugin: &'static Plugin = Box::leak(Box::new(Plugin::load()));
    assert_eq!(plugin.init(), 3, "it runs already");
    plugin.pair()
}

#[test]
fn gpu_payload_of_the_same_host_ends_the_process() {
    let receive = || {
        let bench = Bench::new();
        bench.transfer(&[1; 100]);
    };
    case!("").exits(1, "data landed on host memory 1 times", receive);
    case!(ALLOW).passes(receive);
}

#[test]
fn gpu_memory_is_registered_in_whole_aligned_pages() {
    let register = |refused: bool| {
        let bench = Bench::new();
        let buffer = bench.gpu.alloc(8192, 4096).unwrap();
        let code = |offset, len| bench.pair.recv.register(buffer.address() + offset, len, PTR_CUDA).err();
        assert_eq!(code(0, 8192), None);
        assert_eq!(code(8, 4096), refused.then_some(1));
        assert_eq!(code(0, 4097), refused.then_some(1));
        assert_eq!(code(4096, 8192), Some(1), "beyond the allocation");
        let host = [0_u8; 16];
        assert_eq!(bench.pair.recv.register(host.as_ptr() as u64 & !4095, 4096, PTR_CUDA), Err(1));
    };
    case!("").passes(|| register(true));
    case!("alignment=off").passes(|| register(false));
    case!("").with("NCCL_USE_DMA_BUF", "0").passes(|| {
        let bench = Bench::new();
        let buffer = bench.gpu.alloc(8192, 4096).unwrap();
        assert_eq!(bench.pair.recv.register(buffer.address(), 8192, PTR_CUDA), Err(1));
    });
}

#[test]
fn registering_on_a_nic_without_pci_path_is_a_memory_fault() {
    case!("pci_path=off").dies_by(libc::SIGSEGV, "which has no PCI path", || {
        let bench = Bench::new();
        bench.target(4096);
    });
}

#[test]
fn memory_of_a_gpu_that_is_not_current_is_refused() {
    case!("").passes(|| {
        let bench = Bench::new();
        let other = SimGpu::open(1).unwrap();
        let buffer = other.alloc(4096, 4096).unwrap();
        let register = || bench.pair.recv.register(buffer.address(), 4096, PTR_CUDA);
        assert_eq!(register(), Err(1));
        set_current(1).unwrap();
        assert!(register().is_ok());
    });
}

#[test]
fn a_send_comm_belongs_to_the_gpu_of_its_first_connect() {
    let register = || {
        let bench = Bench::on(0);
        let other = SimGpu::open(1).unwrap();
        let buffer = other.alloc(4096, 4096).unwrap();
        set_current(1).unwrap();
        bench.pair.send.register(buffer.address(), 4096, PTR_CUDA).is_ok()
    };
    case!("").passes(|| assert!(!register()));
    case!("comm_gpu=off").passes(|| assert!(register()));
}

#[test]
fn packets_land_where_listen_said_and_the_host_reads_where_accept_said() {
    let pair_over = |of_listen: u32, of_accept: u32| {
        let gpus = [0, 1].map(|index| SimGpu::open(index).unwrap());
        let plugin = Plugin::start();
        let mut handle = Handle([0; 128]);
        set_current(of_listen).unwrap();
        let listen = plugin.listen(0, &mut handle).unwrap();
        set_current(of_accept).unwrap();
        let pair = plugin.pair_over(listen, handle);
        Bench { gpu: gpus[of_accept as usize].clone(), pair, received: Cell::new(0) }
    };
    case!(ALLOW).passes(|| {
        let bench = pair_over(1, 1);
        bench.transfer(&pattern(5000, 2));
        assert!(bench.gather(0) == pattern(5000, 2));
    });
    case!(ALLOW).passes(|| {
        let bench = pair_over(0, 1);
        bench.transfer(&pattern(5000, 2));
        assert!(bench.gather(0) != pattern(5000, 2), "two GPUs, two pools");
    });
}

#[test]
fn too_many_fragments_end_the_process() {
    let chunk = |bytes: usize| {
        let bench = Bench::new();
        bench.transfer(&pattern(bytes, 0));
    };
    let case = |switches| case!(switches).with("NCCL_DYNAMIC_CHUNK_SIZE", "4194304");
    case("same_host=allow,scatter=off,fragment_bytes=1024")
        .exits(1, "fragments in one chunk", || chunk(2 << 20));
    case("same_host=allow,scatter=off,fragment_bytes=1024").passes(|| chunk(1 << 20));
    // Three chunks below the limit, which together exceed the room of one request.
    case!("same_host=allow,scatter=off,fragment_bytes=256").with("NCCL_DYNAMIC_CHUNK_SIZE", "262144").exits(
        1,
        "more fragments in one request",
        || chunk(768 << 10),
    );
}

#[test]
fn sends_from_outside_of_a_registration_are_refused() {
    case!(ALLOW).passes(|| {
        let bench = Bench::new();
        let (buffer, memory) = bench.source(&[1; 8192]);
        let send =
            |offset: u64, bytes| bench.pair.send.isend_raw(buffer.address() + offset, bytes, memory.handle);
        assert_eq!(send(4096, 4097), Err(3));
        assert!(send(4096, 4096).is_ok());
    });
}

#[test]
fn comms_share_a_pool_without_mixing_their_bytes() {
    case!("same_host=allow,pool_pages=2048,leak=off,delay_us=0-50,import_race=off")
        .with("NCCL_NSOCKS_PERTHREAD", "2")
        .with("NCCL_DYNAMIC_CHUNK_SIZE", "65536")
        .passes(|| {
            let gpu = SimGpu::open(0).unwrap();
            let plugin = Plugin::start();
            let one_comm = |seed: u8| {
                let gpu = gpu.clone();
                set_current(0).unwrap();
                let bench = Bench { pair: plugin.pair(), gpu, received: Cell::new(0) };
                for k in 0..30 {
                    bench.gather_one(&pattern(200_001, seed.wrapping_mul(31) ^ k));
                }
            };
            std::thread::scope(|scope| {
                (0..4).for_each(|seed| drop(scope.spawn(move || one_comm(seed))));
            });
        });
}

#[test]
fn a_gpu_that_appears_after_accept_is_too_late() {
    case!(ALLOW).passes(|| {
        let pair = Plugin::start().pair();
        let gpu = SimGpu::open(0).unwrap();
        let buffer = gpu.alloc(4096, 4096).unwrap();
        let target = pair.recv.gpu(buffer.address(), 4096);
        assert_eq!(pair.recv.irecv(&target, 4096), Err(3));
    });
}

#[test]
fn metadata_and_words_go_with_the_comm() {
    case!(ALLOW).passes(|| {
        let bench = Bench::new();
        let words = bench.pair.device_handle.handle as u64;
        assert!(SimGpu::of(words).is_some());
        bench.pair.recv.close();
        assert!(SimGpu::of(words).is_none());
        assert!(SimGpuTable::find().is_some());
    });
}
