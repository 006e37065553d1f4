//! Memory of GPUs over the plugin: scattered receives are gathered, in every mode.
//!
//! These are tests of two programs: here the GPUs are simulated, in `tests/cuda` they are real, or the stand-in's.
//! `gpus.rs` of each says which there are.

use crate::case::case;
use crate::ends::{Ends, LIMIT, builder, contents, long, loopback, pattern, plugin};
use crate::gpus::{MANY, have_a_stand_in, location, on_gpus};
use ferrywire::{Block, BlockList, Endpoint, MemoryLocation, Peer, PluginConfig, Region, TransferError};
use ferrywire_memory::unpack::UnpackMode;

const CHUNK: usize = 512 << 10;
/// Both ends are in one process, so nothing crosses a NIC.
const SAME_HOST: &str = "same_host=allow";

fn with_gpu(index: u32) -> PluginConfig {
    plugin().gpu(location(index)).allow_same_host_gpu(true)
}

/// Ends with a GPU each, whose scattered receives are gathered so.
fn with_gpus(mode: UnpackMode) -> Ends {
    ends_of(2, mode)
}

fn ends_of(channels: usize, mode: UnpackMode) -> Ends {
    let end = |index| builder().channels(channels).plugin(with_gpu(index).unpack(mode));
    Ends::of(loopback(end(1)), end(0))
}

fn register(end: &Endpoint, index: u32, bytes: usize) -> Region {
    match location(index) {
        MemoryLocation::SimGpu(index) => end.alloc_sim(index, bytes).unwrap(),
        MemoryLocation::Cuda(index) => end.alloc_cuda(index, bytes).unwrap(),
        location => panic!("{location}"),
    }
}

fn on_gpu(end: &Endpoint, index: u32, bytes: &[u8]) -> Region {
    let region = register(end, index, bytes.len());
    region.write_at(0, bytes).unwrap();
    region
}

/// Writes from one memory to another, and checks all of the target.
fn write(ends: &Ends, source: &Region, target: &Region, bytes: usize, salt: u64) {
    let write = ends.near.write(source, 0, &target.descriptor(), 64, bytes as u64).unwrap();
    assert_eq!(write.wait(LIMIT), Ok(bytes as u64));
    let mut expected = vec![0; bytes + 128];
    expected[64..64 + bytes].copy_from_slice(&pattern(bytes, salt));
    assert!(contents(target) == expected, "a write of {bytes} bytes arrived wrong");
}

#[test]
fn writes_from_gpu_to_gpu_arrive_in_every_mode() {
    for mode in [UnpackMode::Kernel, UnpackMode::Copy, UnpackMode::Host] {
        on_gpus(case!(SAME_HOST)).passes(|| {
            let ends = with_gpus(mode);
            let sizes = [1, 777, 4095, 4096, 65_537, CHUNK - 1, CHUNK, CHUNK + 1, 20 * CHUNK + 13];
            for (salt, bytes) in sizes.into_iter().enumerate() {
                let source = on_gpu(&ends.connecting, 0, &pattern(bytes, salt as u64));
                let target = on_gpu(&ends.accepting, 1, &vec![0; bytes + 128]);
                write(&ends, &source, &target, bytes, salt as u64);
            }
            ends.close();
        });
    }
}

/// Eight channels, both ways at once, from a byte to what no window holds.
#[test]
fn eight_channels_carry_messages_of_every_size_both_ways() {
    for mode in [UnpackMode::Kernel, UnpackMode::Copy, UnpackMode::Host] {
        on_gpus(case!(SAME_HOST)).passes(|| {
            let ends = ends_of(8, mode);
            let most = MANY - 64;
            let sources = [(&ends.connecting, 0, 1), (&ends.accepting, 1, 2)]
                .map(|(end, index, salt)| on_gpu(end, index, &pattern(most, salt)));
            let targets = [(&ends.accepting, 1), (&ends.connecting, 0)]
                .map(|(end, index)| on_gpu(end, index, &vec![0; MANY]));
            let sizes =
                std::iter::successors(Some(1), |bytes| Some(bytes * 9 + 4)).take_while(|bytes| *bytes < most);
            for bytes in sizes.chain([most]) {
                // Not at the beginning of a page at the one end.
                let begin = |peer: &Peer, way: usize| {
                    peer.write(&sources[way], 0, &targets[way].descriptor(), 33, bytes as u64).unwrap()
                };
                let writes = [begin(&ends.near, 0), begin(&ends.far, 1)];
                writes.iter().for_each(|write| assert_eq!(write.wait(LIMIT), Ok(bytes as u64)));
                for (target, salt) in targets.iter().zip([1, 2]) {
                    let mut seen = vec![1; bytes + 2];
                    target.read_at(32, &mut seen).unwrap();
                    assert!(seen[1..=bytes] == pattern(bytes, salt), "{bytes} bytes, {mode}");
                    assert_eq!([seen[0], seen[bytes + 1]], [0, 0], "beside {bytes} bytes, {mode}");
                }
            }
            ends.close();
        });
    }
}

/// Their last `accept` calls come at the same time, and each would import the pool that the others have.
#[test]
fn channels_that_are_set_up_at_once_have_one_pool() {
    for channels in [4, 8] {
        for _ in 0..if long() { 50 } else { 3 } {
            on_gpus(case!(SAME_HOST)).passes(|| {
                let ends = ends_of(channels, UnpackMode::Kernel);
                let bytes = 2 * channels * CHUNK;
                let sources = [(&ends.connecting, 0, 1), (&ends.accepting, 1, 2)]
                    .map(|(end, index, salt)| on_gpu(end, index, &pattern(bytes, salt)));
                let targets = [(&ends.accepting, 1), (&ends.connecting, 0)]
                    .map(|(end, index)| on_gpu(end, index, &vec![0; bytes]));
                let begin = |peer: &Peer, way: usize| {
                    peer.write(&sources[way], 0, &targets[way].descriptor(), 0, bytes as u64).unwrap()
                };
                let writes = [begin(&ends.near, 0), begin(&ends.far, 1)];
                writes.iter().for_each(|write| assert_eq!(write.wait(LIMIT), Ok(bytes as u64)));
                for (target, salt) in targets.iter().zip([1, 2]) {
                    let expected = pattern(bytes, salt);
                    let wrong = contents(target).iter().zip(&expected).filter(|(a, b)| a != b).count();
                    assert_eq!(wrong, 0, "of {bytes} bytes over {channels} channels are wrong");
                }
                ends.close();
            });
        }
    }
}

#[test]
fn many_channels_come_about() {
    on_gpus(case!(SAME_HOST)).passes(|| {
        let began = std::time::Instant::now();
        let ends = ends_of(64, UnpackMode::Kernel);
        println!("64 channels in {:.3} s", began.elapsed().as_secs_f64());
        let stats = ends.near.stats();
        assert_eq!((stats.channels.len(), stats.lost_channels.len()), (64, 0));
        let source = on_gpu(&ends.connecting, 0, &pattern(64 * CHUNK, 1));
        let target = on_gpu(&ends.accepting, 1, &vec![0; 64 * CHUNK + 128]);
        write(&ends, &source, &target, 64 * CHUNK, 1);
        ends.close();
    });
}

/// A small pool, whose pages are recycled and spoiled many times.
#[test]
fn pages_are_given_back_after_their_bytes_were_gathered_and_not_before() {
    for mode in [UnpackMode::Kernel, UnpackMode::Copy, UnpackMode::Host] {
        on_gpus(case!(&format!("{SAME_HOST},pool_pages=1024"))).passes(|| {
            let ends = ends_of(2, mode);
            for salt in 0..4 {
                let bytes = 30 * CHUNK + 5;
                let source = on_gpu(&ends.connecting, 0, &pattern(bytes, salt));
                let target = on_gpu(&ends.accepting, 1, &vec![0; bytes + 128]);
                write(&ends, &source, &target, bytes, salt);
            }
            ends.close();
        });
    }
}

#[test]
fn host_and_gpu_memory_mix() {
    on_gpus(case!(SAME_HOST)).passes(|| {
        let ends = with_gpus(UnpackMode::Kernel);
        let bytes = 3_000_001;
        for (salt, (from_gpu, to_gpu)) in
            [(false, true), (true, false), (false, false)].into_iter().enumerate()
        {
            let from = pattern(bytes, salt as u64);
            let source = match from_gpu {
                true => on_gpu(&ends.connecting, 0, &from),
                false => ends.connecting.register(from).unwrap(),
            };
            let target = match to_gpu {
                true => on_gpu(&ends.accepting, 1, &vec![0; bytes + 128]),
                false => ends.accepting.register(vec![0; bytes + 128]).unwrap(),
            };
            write(&ends, &source, &target, bytes, salt as u64);
        }
        ends.close();
    });
}

/// Scattered at both ends: packed and unpacked by the GPU's copy queue.
fn write_scattered(ends: &Ends) {
    let count = 700u64;
    let blocks: Vec<Block> = (0..count)
        .map(|at| Block { local_offset: at * 900, remote_offset: (count - 1 - at) * 900, bytes: 700 })
        .collect();
    let source = on_gpu(&ends.connecting, 0, &pattern(900 * count as usize, 9));
    let target = on_gpu(&ends.accepting, 1, &vec![0; 900 * count as usize]);
    let list = BlockList::new(&source, &target.descriptor(), &blocks).unwrap();
    assert_eq!(ends.near.write_blocks(&list, None, None).unwrap().wait(LIMIT), Ok(700 * count));
    let (from, to) = (pattern(900 * count as usize, 9), contents(&target));
    for block in &blocks {
        let (here, there) = (block.local_offset as usize, block.remote_offset as usize);
        assert!(to[there..there + 700] == from[here..here + 700]);
        assert!(to[there + 700..there + 900] == [0; 200]);
    }
}

#[test]
fn reads_messages_and_blocks_of_gpu_memory() {
    on_gpus(case!(SAME_HOST)).passes(|| {
        let ends = with_gpus(UnpackMode::Kernel);
        let bytes = 2_000_003;
        let there = on_gpu(&ends.accepting, 1, &pattern(bytes, 1));
        let here = on_gpu(&ends.connecting, 0, &vec![0; bytes]);
        let read = ends.near.read(&here, 0, &there.descriptor(), 0, bytes as u64).unwrap();
        assert_eq!(read.wait(LIMIT), Ok(bytes as u64));
        assert!(contents(&here) == pattern(bytes, 1));

        // A small message is not read by the CPU; from host memory it goes at once, and is copied in.
        for (tag, bytes) in [(1, 5_000), (2, 1_000_000)] {
            for host in [false, true] {
                let message = match host {
                    true => ends.connecting.register(pattern(bytes, tag)).unwrap(),
                    false => on_gpu(&ends.connecting, 0, &pattern(bytes, tag)),
                };
                let room = on_gpu(&ends.accepting, 1, &vec![0; bytes]);
                let receive = ends.far.recv(tag, &room, 0, bytes as u64).unwrap();
                let send = ends.near.send(tag, &message, 0, bytes as u64).unwrap();
                assert_eq!((receive.wait(LIMIT), send.wait(LIMIT)), (Ok(bytes as u64), Ok(bytes as u64)));
                assert!(contents(&room) == pattern(bytes, tag));
            }
        }

        write_scattered(&ends);
        ends.close();
    });
}

/// A plugin may refuse memory of GPUs, of one region or of all: messages of it go through slots, the rest as before.
#[test]
fn gpu_memory_that_cannot_be_registered_is_copied() {
    on_gpus(case!(SAME_HOST)).with("NCCL_USE_DMA_BUF", "0").passes(|| {
        for mode in [UnpackMode::Kernel, UnpackMode::Host] {
            let ends = with_gpus(mode);
            let host = |end: &Endpoint, bytes: &[u8]| end.register(bytes.to_vec()).unwrap();
            let bytes = 20 * CHUNK + 13;
            for (salt, (from_gpu, to_gpu)) in
                [(true, false), (false, true), (true, true), (false, false)].into_iter().enumerate()
            {
                let from = pattern(bytes, salt as u64);
                let source = match from_gpu {
                    true => on_gpu(&ends.connecting, 0, &from),
                    false => host(&ends.connecting, &from),
                };
                let target = match to_gpu {
                    true => on_gpu(&ends.accepting, 1, &vec![0; bytes + 128]),
                    false => host(&ends.accepting, &vec![0; bytes + 128]),
                };
                write(&ends, &source, &target, bytes, salt as u64);
            }
            write_scattered(&ends);
            for peer in [&ends.near, &ends.far] {
                assert_eq!(peer.stats().lost_channels, [""; 0]);
            }
            ends.close();
        }
    });
}

/// The plugin leaves a context on the thread's stack each time it cannot register memory of a GPU.
#[test]
fn failed_registrations_leave_no_context_behind() {
    let said = on_gpus(case!(SAME_HOST)).with("NCCL_USE_DMA_BUF", "0").passes(|| {
        let ends = ends_of(1, UnpackMode::Kernel);
        for salt in 0..20 {
            let source = on_gpu(&ends.connecting, 0, &pattern(CHUNK, salt));
            let target = on_gpu(&ends.accepting, 1, &vec![0; CHUNK + 128]);
            write(&ends, &source, &target, CHUNK, salt);
        }
        ends.close();
    });
    // The stand-in for a driver counts them when its process ends; a driver cannot be asked.
    let left: Vec<&str> = said.lines().filter(|line| line.starts_with("stand-in: left")).collect();
    assert!(left.iter().all(|line| line.ends_with(" 0 pushed")), "{left:?}");
    assert_eq!(left.is_empty(), !have_a_stand_in(), "{said}");
}

/// A driver exports no page that an allocation has only a part of.
#[test]
fn pages_that_an_allocation_shares_are_copied() {
    on_gpus(case!(SAME_HOST)).passes(|| {
        let ends = with_gpus(UnpackMode::Kernel);
        for (salt, bytes) in [(1, 777), (2, 1_000_000), (3, 2 * CHUNK + 4095)] {
            let source = on_gpu(&ends.connecting, 0, &pattern(bytes, salt));
            let target = on_gpu(&ends.accepting, 1, &vec![0; bytes + 128]);
            write(&ends, &source, &target, bytes, salt);
        }
        // A piece at the end of an allocation, as allocators cut it.
        let (begin, bytes) = (3 * 512, 1_000_000 - 3 * 512);
        let part = |end: &Endpoint, whole: &Region| {
            // SAFETY: a part of the region, which stays until the end.
            unsafe { end.register_raw(whole.as_ptr().add(begin), bytes) }.unwrap()
        };
        let sent = pattern(1_000_000, 4);
        let whole = [on_gpu(&ends.connecting, 0, &sent), on_gpu(&ends.accepting, 1, &vec![0; 1_000_000])];
        let (source, target) = (part(&ends.connecting, &whole[0]), part(&ends.accepting, &whole[1]));
        let write = ends.near.write(&source, 0, &target.descriptor(), 0, bytes as u64).unwrap();
        assert_eq!(write.wait(LIMIT), Ok(bytes as u64));
        let read = ends.near.read(&source, 0, &target.descriptor(), 0, bytes as u64).unwrap();
        assert_eq!(read.wait(LIMIT), Ok(bytes as u64));
        let there = contents(&whole[1]);
        assert!(there[begin..] == sent[begin..] && there[..begin].iter().all(|byte| *byte == 0));
        assert!(contents(&whole[0]) == sent);
        assert_eq!(ends.near.stats().lost_channels, [""; 0]);
        ends.close();
    });
}

#[test]
fn gpu_memory_within_one_host_is_refused() {
    on_gpus(case!("")).passes(|| {
        let accepting = loopback(builder()).build().unwrap();
        let connecting = builder().plugin(plugin().gpu(location(0))).build().unwrap();
        let error = connecting.connect(accepting.listen_addresses()[0], LIMIT).unwrap_err().to_string();
        assert!(error.contains("both ends are on one host"), "{error}");
        let accepting = loopback(builder().plugin(plugin().gpu(location(0)))).build().unwrap();
        let connecting = builder().build().unwrap();
        let error = connecting.connect(accepting.listen_addresses()[0], LIMIT).unwrap_err().to_string();
        assert!(error.contains("both ends are on one host"), "{error}");
    });
}

#[test]
fn memory_of_another_gpu_is_refused_by_either_end() {
    on_gpus(case!(SAME_HOST)).passes(|| {
        let ends = with_gpus(UnpackMode::Kernel);
        let host = ends.connecting.register(pattern(1000, 1)).unwrap();
        if location(0) == location(1) {
            return println!("SKIPPED: needs two GPUs");
        }
        // Each is the other end's.
        let wrong_here = register(&ends.connecting, 1, 1000);
        let wrong_there = register(&ends.accepting, 0, 1000);
        let good = ends.accepting.register(vec![0; 1000]).unwrap();
        let error = ends.near.write(&wrong_here, 0, &good.descriptor(), 0, 1000).unwrap_err();
        let TransferError::UnsupportedMemory { side: "local", location: of, .. } = error else {
            panic!("{error}")
        };
        assert_eq!(of, location(1));
        let error = ends.near.write(&host, 0, &wrong_there.descriptor(), 0, 1000).unwrap().wait(LIMIT);
        assert!(matches!(error, Err(TransferError::AccessRefused { .. })), "{error:?}");
        assert!(contents(&wrong_there) == [0; 1000]);
        ends.close();
    });
}

#[test]
fn invalid_fragments_are_errors() {
    for lie in ["range", "dst", "len"] {
        let switches = format!("{SAME_HOST},lie_fragment={lie},lie_after=3,fault_side=recv");
        on_gpus(case!(&switches)).passes(|| {
            let ends = ends_of(1, UnpackMode::Kernel);
            let bytes = 10 * CHUNK;
            let source = on_gpu(&ends.connecting, 0, &pattern(bytes, 1));
            let target = on_gpu(&ends.accepting, 1, &vec![0; bytes]);
            let write = ends.near.write(&source, 0, &target.descriptor(), 0, bytes as u64).unwrap();
            let error = write.wait(LIMIT).unwrap_err().to_string();
            assert!(error.contains("fragment"), "{error}");
        });
    }
}

#[test]
fn checksums_are_refused_where_a_gpu_is_involved() {
    on_gpus(case!(SAME_HOST)).passes(|| {
        let accepting = loopback(builder().plugin(with_gpu(0))).build().unwrap();
        let connecting = builder().crc(true).plugin(with_gpu(1)).build().unwrap();
        let error = connecting.connect(accepting.listen_addresses()[0], LIMIT).unwrap_err().to_string();
        assert!(error.contains("checksums need host memory at both ends"), "{error}");
    });
}
