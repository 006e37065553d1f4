//! Rules of plugins that a host has to keep, one test each; `docs/plugins.md` is the list, with those that
//! stand elsewhere.

use crate::case::case;
use crate::compile::compile_in;
use crate::ends::{Ends, LIMIT, builder, contents, hanging_call, library, loopback, pattern, plugin};
use ferrywire::{Block, BlockList, Endpoint, MemoryLocation, PluginConfig, RemoteRegion};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

/// The stall timeout of these tests: short, but longer than any step takes.
const STALL: Duration = Duration::from_secs(4);
const CHUNK: usize = 512 << 10;

fn with_stall_limit() -> Ends {
    Ends::with(|builder| builder.channels(1).plugin(plugin().stall_timeout(STALL)))
}

/// The plugin that remembers how it was used.
fn attentive() -> PathBuf {
    compile_in("../ferrywire/tests/plugin", "rules.c", &[])
}

/// The attentive plugin under a name of TCPX.
fn attentive_tcpx() -> PathBuf {
    compile_in("../ferrywire/tests/plugin", "rules.c", &["NAME=\"GPUDirectTCPX_attentive\""])
}

/// The plugin's variable of this name.
fn remembered<T: Copy>(name: &str) -> T {
    remembered_by(attentive(), name)
}

fn remembered_by<T: Copy>(file: PathBuf, name: &str) -> T {
    // SAFETY: rules.c defines it with this type.
    unsafe { **libloading::Library::new(file).unwrap().get::<*const T>(name.as_bytes()).unwrap() }
}

/// Sets an integer of it, which is volatile there.
fn set(file: PathBuf, name: &str, value: i32) {
    // SAFETY: rules.c has this integer; the library stays loaded.
    unsafe {
        let library = libloading::Library::new(file).unwrap();
        (*library.get::<*mut i32>(name.as_bytes()).unwrap()).write_volatile(value);
        std::mem::forget(library);
    }
}

/// Endpoints with it; the connection cannot come about, and what is said of that is given.
fn attempt(channels: usize) -> String {
    attempt_with(attentive(), channels)
}

fn attempt_with(file: PathBuf, channels: usize) -> String {
    // SAFETY: the file is ours, and nothing else runs in this process.
    let plugin = || unsafe { PluginConfig::at(&file) }.setup_timeout(Duration::from_secs(3));
    let end = || Endpoint::builder().channels(channels).threads(1).plugin(plugin());
    let (accepting, connecting) = (loopback(end()).build().unwrap(), end().build().unwrap());
    connecting.connect(accepting.listen_addresses()[0], LIMIT).unwrap_err().to_string()
}

#[test]
fn the_environment_is_set_before_loading() {
    case!("").without("NCCL_DYNAMIC_CHUNK_SIZE").passes(|| {
        // SAFETY: as above.
        let plugin = unsafe { PluginConfig::at(attentive()) }.message_bytes_max(65_536);
        let _end = Endpoint::builder().plugin(plugin).build().unwrap();
        assert_eq!(&remembered::<[u8; 32]>("chunk_at_open")[..6], b"65536\0");
    });
}

#[test]
fn a_gpu_is_refused_where_flushes_are_needed() {
    for (support, why) in [("1", "takes host memory only"), ("3", "needs a flush after each receive")] {
        case!("").passes(|| {
            let define = format!("PTR_SUPPORT={support}");
            let file = compile_in("../ferrywire/tests/plugin", "rules.c", &[&define]);
            // SAFETY: as above.
            let plugin = unsafe { PluginConfig::at(file) }.gpu(MemoryLocation::SimGpu(0));
            let error = Endpoint::builder().plugin(plugin).build().unwrap_err().to_string();
            assert!(error.contains("GPU of the plugin") && error.contains(why), "{error}");
        });
    }
}

/// The real plugin follows the path of every NIC on which it registers GPU memory.
#[test]
fn gpu_memory_is_refused_on_a_nic_without_a_pci_path() {
    case!("same_host=allow,pci_path=off").passes(|| {
        let end = |index| plugin().gpu(MemoryLocation::SimGpu(index)).allow_same_host_gpu(true);
        let accepting = loopback(builder().plugin(end(1))).build().unwrap();
        let connecting = builder().plugin(end(0)).build().unwrap();
        let error = connecting.connect(accepting.listen_addresses()[0], LIMIT).unwrap_err().to_string();
        assert!(error.contains("GPU memory") && error.contains("NIC lo, which has no PCI path"), "{error}");
        assert!(error.contains("--nics"), "{error}");
    });
    case!("pci_path=off").passes(|| {
        let ends = with_stall_limit();
        ends.write(CHUNK, 1);
        ends.close();
    });
}

#[test]
fn a_handle_that_holds_a_pointer_is_refused() {
    case!("lie_handle=on").passes(|| {
        let (accepting, connecting) = (loopback(builder()).build().unwrap(), builder().build().unwrap());
        let error = connecting.connect(accepting.listen_addresses()[0], LIMIT).unwrap_err().to_string();
        assert!(error.contains("the peer's handle has a pointer in it"), "{error}");
    });
}

#[test]
fn a_nics_device_is_found_by_its_name() {
    case!("").passes(|| {
        attempt(1);
        assert_eq!(remembered::<i32>("listened_on"), 2);
    });
}

#[test]
fn channels_are_set_up_in_parallel() {
    case!("").passes(|| {
        set(attentive(), "accepts_wanted", 4);
        let said = attempt(2);
        assert_eq!(remembered::<i32>("accepts_most"), 4, "{said}");
        assert_eq!(remembered::<i32>("listens"), 4, "two channels, two ends");
    });
}

/// NCCL calls it from one thread; each of these takes longer than it takes to ask again.
#[test]
fn polling_accepts_of_tcpx_do_not_overlap() {
    case!("").passes(|| {
        set(attentive_tcpx(), "later_accept_us", 5000);
        let said = attempt_with(attentive_tcpx(), 4);
        let later = |name| remembered_by::<i32>(attentive_tcpx(), name);
        assert!(later("later_accepts") > 8, "{said}");
        assert_eq!(later("later_accepts_most"), 1, "of eight, four channels at two ends");
    });
}

#[test]
fn an_endless_accept_leaves_its_listener_open() {
    let wait = "NCCL_GPUDIRECTTCPX_PROGRAM_FLOW_STEERING_WAIT_MICROS";
    // Closing the listener would end the process.
    case!("").with(wait, "3600000000").passes(|| {
        // The endpoints are dropped in each attempt.
        let (error, timeout) = hanging_call("accept has not ended", |timeout| {
            let end = || builder().channels(1).plugin(plugin().setup_timeout(timeout));
            let (accepting, connecting) = (loopback(end()).build().unwrap(), end().build().unwrap());
            connecting.connect(accepting.listen_addresses()[0], LIMIT).unwrap_err()
        });
        let told = format!("accept has not ended after {} s", timeout.as_secs());
        assert!(error.to_string().contains(&told), "{error}");
        while threads().iter().any(|name| name.starts_with("ferrywire-acc")) {
            std::thread::sleep(Duration::from_millis(5));
        }
    });
}

/// The names of this process's threads.
fn threads() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok()).collect()
}

/// The other process of the next test: says why it cannot connect.
#[test]
#[ignore = "the other process of another test"]
fn an_end_with_another_environment() {
    let address = std::env::var("FERRYWIRE_TEST_ADDRESS").unwrap().parse().unwrap();
    println!("{}", builder().build().unwrap().connect(address, LIMIT).unwrap_err());
}

/// The other process of the next test: writes as soon as it is connected.
#[test]
#[ignore = "the other process of another test"]
fn an_end_that_writes_at_once() {
    let address = std::env::var("FERRYWIRE_TEST_ADDRESS").unwrap().parse().unwrap();
    let bytes = std::env::var("FERRYWIRE_TEST_REGION").unwrap();
    let bytes: Vec<u8> = bytes.split(' ').map(|byte| byte.parse().unwrap()).collect();
    let target = RemoteRegion::from_bytes(&bytes).unwrap();
    let end = builder().build().unwrap();
    let peer = end.connect(address, LIMIT).unwrap();
    let source = end.register(pattern(CHUNK, 1)).unwrap();
    let write = peer.write_notify(&source, 0, &target, 0, CHUNK as u64, b"all").unwrap();
    assert_eq!(write.wait(LIMIT), Ok(CHUNK as u64));
    end.close(LIMIT).unwrap();
}

/// The connect ends at once; the accept sleeps until flow rules are in force.
#[test]
fn nothing_is_sent_before_the_peers_accept() {
    let wait = "NCCL_GPUDIRECTTCPX_PROGRAM_FLOW_STEERING_WAIT_MICROS";
    case!("early_payload=die").with(wait, "500000").passes(|| {
        let accepting = loopback(builder()).build().unwrap();
        let target = accepting.register(vec![0; CHUNK]).unwrap();
        let region: Vec<String> =
            target.descriptor().to_bytes().iter().map(|byte| byte.to_string()).collect();
        let mut other = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "rules::an_end_that_writes_at_once", "--ignored", "--nocapture"])
            .env_remove("TCPX_RULES_CASE")
            .env("FERRYWIRE_TEST_ADDRESS", accepting.listen_addresses()[0].to_string())
            .env("FERRYWIRE_TEST_REGION", region.join(" "))
            .env(wait, "1000")
            .spawn()
            .unwrap();
        let peer = accepting.accept(LIMIT).unwrap();
        assert_eq!(peer.wait_notification(LIMIT).unwrap(), b"all");
        assert!(contents(&target) == pattern(CHUNK, 1));
        assert!(other.wait().unwrap().success());
    });
}

#[test]
fn ends_with_different_environments_are_refused() {
    for (name, value, said) in [
        ("NCCL_DYNAMIC_CHUNK_SIZE", "65536", "NCCL_DYNAMIC_CHUNK_SIZE is 524288 at the end that accepts"),
        ("NCCL_GPUDIRECTTCPX_RECV_SYNC", "1", "NCCL_GPUDIRECTTCPX_RECV_SYNC is 0 at the end that accepts"),
        ("NCCL_INLINE_THRESHOLD", "1024", "NCCL_INLINE_THRESHOLD is 0 at the end that accepts"),
    ] {
        case!("").passes(|| {
            let accepting = loopback(builder()).build().unwrap();
            let other = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "rules::an_end_with_another_environment", "--ignored", "--nocapture"])
                .env_remove("TCPX_RULES_CASE")
                .env("FERRYWIRE_TEST_ADDRESS", accepting.listen_addresses()[0].to_string())
                .env(name, value)
                .output()
                .unwrap();
            let error = String::from_utf8_lossy(&other.stdout);
            assert!(error.contains(said), "{error}");
        });
    }
}

/// A plugin reads its environment once.
#[test]
fn later_endpoints_keep_the_environment() {
    const CHUNK_BYTES: &str = "NCCL_DYNAMIC_CHUNK_SIZE";
    case!("").without(CHUNK_BYTES).passes(|| {
        let end = |bytes| loopback(builder().plugin(plugin().message_bytes_max(bytes))).build().unwrap();
        let (first, larger, smaller) = (end(65_536), end(1 << 20), end(16_384));
        for end in [&first, &larger, &smaller] {
            let environment = end.effective_environment();
            let chunk = environment.into_iter().find(|each| each.name == CHUNK_BYTES).unwrap();
            assert_eq!((chunk.value.as_str(), format!("{:?}", chunk.set_by)), ("65536", "Ferrywire".into()));
        }
        assert_eq!(std::env::var(CHUNK_BYTES).unwrap(), "65536");
        let peer = larger.connect(first.listen_addresses()[0], LIMIT).unwrap();
        assert_eq!(peer.stats().chunk_bytes, 65_536);
        let error = smaller.connect(first.listen_addresses()[0], LIMIT).unwrap_err().to_string();
        assert!(error.contains("is 65536 at the end that accepts and 16384 at the end that"), "{error}");
    });
}

#[test]
fn an_environment_that_cannot_work_is_refused() {
    let refused = |gpu: bool, part: &str| {
        let plugin = if gpu { plugin().gpu(MemoryLocation::SimGpu(0)) } else { plugin() };
        let error = builder().plugin(plugin).build().map(drop).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    };
    case!("").with("NCCL_INLINE_THRESHOLD", "1024").passes(|| refused(true, "NCCL_INLINE_THRESHOLD"));
    case!("").with("NCCL_INLINE_THRESHOLD", "1024").passes(|| drop(builder().build().unwrap()));
    case!("").with("NCCL_SOCKET_NTHREADS", "9").passes(|| refused(false, "NCCL_SOCKET_NTHREADS"));
}

#[test]
fn every_receive_is_consumed() {
    case!("").passes(|| {
        let ends = with_stall_limit();
        // Three windows, and messages of 0 bytes between them.
        for salt in 0..3 {
            ends.write(16 * CHUNK, salt);
            ends.write(0, salt);
        }
        ends.close();
    });
}

#[test]
fn lengths_are_never_taken_from_the_plugin() {
    for switches in ["sizes=keep", "sizes=write"] {
        case!(switches).passes(|| {
            let ends = with_stall_limit();
            for (salt, bytes) in [1, 777, 4097, CHUNK + 13].into_iter().enumerate() {
                ends.write(bytes, salt as u64);
            }
            ends.close();
        });
    }
}

#[test]
fn registrations_end_before_their_comm() {
    // One that came after would end the process.
    case!("").passes(|| {
        let ends = Ends::new();
        let source = ends.connecting.register(pattern(3 * CHUNK, 1)).unwrap();
        let target = ends.accepting.register(vec![0; 3 * CHUNK]).unwrap();
        let write = ends.near.write(&source, 0, &target.descriptor(), 0, 3 * CHUNK as u64).unwrap();
        assert_eq!(write.wait(LIMIT), Ok(3 * CHUNK as u64));
        ends.close();
        while threads().iter().any(|name| name.starts_with("tcpx-")) {
            std::thread::sleep(Duration::from_millis(5));
        }
        // Registered until here.
        drop((source, target));
    });
}

#[test]
fn a_close_with_a_write_in_flight_drains_first() {
    // With this switch every comm whose peer closes while anything is tested says so.
    case!("close_error=always").passes(|| {
        for round in 0..10 {
            let ends = Ends::with(|builder| builder.channels(1));
            let bytes = 5 * CHUNK + round as usize;
            let source = ends.connecting.register(pattern(bytes, round)).unwrap();
            let target = ends.accepting.register(vec![0; bytes]).unwrap();
            let remote = target.descriptor();
            let write = ends.near.write_notify(&source, 0, &remote, 0, bytes as u64, b"all").unwrap();
            ends.near.close(LIMIT).unwrap();
            assert_eq!(write.wait(LIMIT), Ok(bytes as u64));
            assert_eq!(ends.far.wait_notification(LIMIT).unwrap(), b"all");
            assert!(contents(&target) == pattern(bytes, round), "round {round}");
            assert_eq!(ends.far.stats().channels[0].lane.as_ref().unwrap().closing_results, 0);
        }
    });
}

#[test]
fn blocking_accept_and_connect_stop_nothing() {
    case!("null_first=off").passes(|| {
        let ends = with_stall_limit();
        ends.write(CHUNK, 1);
        ends.close();
    });
}

#[test]
fn connect_and_accept_are_repeated() {
    case!("setup_ms=50").passes(|| {
        let ends = with_stall_limit();
        ends.write(CHUNK, 1);
        ends.close();
    });
}

#[test]
fn no_message_is_larger_than_the_plugins_chunk() {
    // A second chunk of a message would lose the pages of the first, and the pool be empty soon.
    case!("same_host=allow,pool_pages=1024").with("NCCL_DYNAMIC_CHUNK_SIZE", "65536").passes(|| {
        let end = |index| {
            plugin().gpu(MemoryLocation::SimGpu(index)).allow_same_host_gpu(true).stall_timeout(STALL)
        };
        let one = |index| loopback(builder().channels(1).chunk_bytes(1 << 20).plugin(end(index)));
        let ends = Ends::of(one(1), one(0));
        assert_eq!(ends.near.stats().chunk_bytes, 65_536);
        let bytes = 12 << 20;
        let source = ends.connecting.alloc_sim(0, bytes).unwrap();
        source.write_at(0, &pattern(bytes, 1)).unwrap();
        let target = ends.accepting.alloc_sim(1, bytes).unwrap();
        let write = ends.near.write(&source, 0, &target.descriptor(), 0, bytes as u64).unwrap();
        assert_eq!(write.wait(LIMIT), Ok(bytes as u64));
        assert!(contents(&target) == pattern(bytes, 1));
        ends.close();
    });
}

#[test]
fn no_message_has_more_fragments_than_tcpx_takes() {
    let case = case!("same_host=allow,fragment_bytes=1448").with("NCCL_DYNAMIC_CHUNK_SIZE", "4194304");
    case.passes(|| {
        let end = |index| {
            plugin().gpu(MemoryLocation::SimGpu(index)).allow_same_host_gpu(true).stall_timeout(STALL)
        };
        let one = |index| loopback(builder().channels(1).chunk_bytes(4 << 20).plugin(end(index)));
        let ends = Ends::of(one(1), one(0));
        let bytes = 12 << 20;
        let source = ends.connecting.alloc_sim(0, bytes).unwrap();
        source.write_at(0, &pattern(bytes, 1)).unwrap();
        let target = ends.accepting.alloc_sim(1, bytes).unwrap();
        let write = ends.near.write(&source, 0, &target.descriptor(), 0, bytes as u64).unwrap();
        assert_eq!(write.wait(LIMIT), Ok(bytes as u64));
        assert!(contents(&target) == pattern(bytes, 1));
        assert_eq!(ends.near.stats().chunk_bytes, 1 << 20);
        ends.close();
    });
}

/// The simulated plugin under another name, of which nothing is known beforehand.
fn renamed() -> PathBuf {
    let (name, other) = (b"GPUDirectTCPX_v7", b"AnotherUnpacking");
    let mut bytes = std::fs::read(library()).unwrap();
    let at = bytes.windows(name.len()).position(|window| window == name).unwrap();
    bytes[at..at + name.len()].copy_from_slice(other);
    let file = std::env::temp_dir().join(format!("libferrywire-renamed-{}.so", std::process::id()));
    std::fs::write(&file, bytes).unwrap();
    file
}

/// Fragments of the seventeenth would be listed where those of the first are.
#[test]
fn receives_are_bounded_by_the_slots_of_the_table() {
    case!("same_host=allow,slots=32").passes(|| {
        let file = renamed();
        // SAFETY: as above.
        let plugin = |index| unsafe { PluginConfig::at(&file) }.window(32).gpu(MemoryLocation::SimGpu(index));
        let one = |index| loopback(builder().channels(1).plugin(plugin(index)));
        let ends = Ends::of(one(1), one(0));
        std::fs::remove_file(&file).unwrap();
        let bytes = 100 * CHUNK;
        let source = ends.connecting.alloc_sim(0, bytes).unwrap();
        source.write_at(0, &pattern(bytes, 1)).unwrap();
        let target = ends.accepting.alloc_sim(1, bytes).unwrap();
        let write = ends.near.write(&source, 0, &target.descriptor(), 0, bytes as u64).unwrap();
        assert_eq!(write.wait(LIMIT), Ok(bytes as u64));
        assert!(contents(&target) == pattern(bytes, 1));
        // In pieces, which are packed: as many slots as there are sends.
        let blocks: Vec<Block> = (0..40_000)
            .map(|at| Block { local_offset: at * 1000, remote_offset: at * 1000, bytes: 700 })
            .collect();
        let list = BlockList::new(&source, &target.descriptor(), &blocks).unwrap();
        assert_eq!(ends.near.write_blocks(&list, None, None).unwrap().wait(LIMIT), Ok(28_000_000));
        let [sends, receives] =
            [&ends.near, &ends.far].map(|peer| peer.stats().channels[0].lane.clone().unwrap());
        assert!(sends.max_outstanding_sends > 16, "{}", sends.max_outstanding_sends);
        assert_eq!(receives.max_outstanding_receives, 16);
        ends.close();
    });
}

#[test]
fn receives_into_host_memory_take_slots() {
    case!("same_host=allow").passes(|| {
        let end = |index| plugin().gpu(MemoryLocation::SimGpu(index)).allow_same_host_gpu(true);
        let one = |index| loopback(builder().channels(1).plugin(end(index)));
        let ends = Ends::of(one(1), one(0));
        for salt in 0..20 {
            let bytes = 1000 + salt as usize;
            ends.write(bytes, salt);
            let source = ends.connecting.register(pattern(bytes, salt)).unwrap();
            let target = ends.accepting.alloc_sim(1, bytes).unwrap();
            let write = ends.near.write(&source, 0, &target.descriptor(), 0, bytes as u64).unwrap();
            assert_eq!(write.wait(LIMIT), Ok(bytes as u64));
            assert!(contents(&target) == pattern(bytes, salt), "round {salt}");
        }
        ends.close();
    });
}

#[test]
fn the_gpu_is_current_where_calls_need_it() {
    // No call may depend on the GPU that a thread has by default.
    case!("same_host=allow").passes(|| {
        let end = |index| {
            plugin().gpu(MemoryLocation::SimGpu(index)).allow_same_host_gpu(true).stall_timeout(STALL)
        };
        let ends = Ends::of(loopback(builder().plugin(end(2))), loopback(builder().plugin(end(1))));
        let bytes = 3 * CHUNK;
        let source = ends.connecting.alloc_sim(1, bytes).unwrap();
        source.write_at(0, &pattern(bytes, 1)).unwrap();
        let target = ends.accepting.alloc_sim(2, bytes).unwrap();
        let write = ends.near.write(&source, 0, &target.descriptor(), 0, bytes as u64).unwrap();
        assert_eq!(write.wait(LIMIT), Ok(bytes as u64));
        assert!(contents(&target) == pattern(bytes, 1));
        ends.close();
    });
}

#[test]
fn regions_beyond_2_gib_are_registered_in_parts() {
    case!("").passes(|| {
        let ends = with_stall_limit();
        let len = (5 << 30) + 4097;
        let [source, target] = [reserved(len), reserved(len)];
        // SAFETY: mappings that stay for as long as the process does.
        let [from, to] = unsafe {
            [ends.connecting.register_raw(source, len), ends.accepting.register_raw(target, len)]
                .map(Result::unwrap)
        };
        let bytes = 600_001;
        for (salt, offset) in [0, (1 << 30) - 300_000, (2 << 30) - 1, len - bytes].into_iter().enumerate() {
            let sent = pattern(bytes, salt as u64);
            from.write_at(offset as u64, &sent).unwrap();
            let write = ends.near.write(&from, offset as u64, &to.descriptor(), offset as u64, bytes as u64);
            assert_eq!(write.unwrap().wait(LIMIT), Ok(bytes as u64));
            let mut there = vec![0; bytes];
            to.read_at(offset as u64, &mut there).unwrap();
            assert!(there == sent, "at {offset}");
        }
        ends.close();
    });
}

/// Memory that takes no place until it is touched.
fn reserved(len: usize) -> *mut u8 {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a fresh mapping of no file.
    let mapped =
        unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    assert_ne!(mapped, libc::MAP_FAILED);
    mapped.cast()
}
