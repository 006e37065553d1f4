//! Scenarios of devmem TCP alone, in the VM of `tests/devmem-vm`, whose NICs inject faults.
//!
//! Read next: `vm.rs`, the two hosts; `nics.rs`, their NICs.

use crate::nics::{Counter, Knob, counted};
use crate::vm::{HERE, Hosts, LIMIT, THERE};
use crate::world::{assert_same, contents, pattern};
use ferrywire::{
    Builder, ConnectError, DevmemStats, Endpoint, Error, MemoryLocation, Peer, Region, TransferError,
};
use ferrywire_devmem::DevmemConfig;
use ferrywire_devmem::sys::flow::{Flow, Flows};
use ferrywire_memory::sim::SimGpu;
use ferrywire_proto::limits;
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

/// Sizes with ragged ends, and one of many chunks.
const SIZES: [usize; 6] = [1, 4095, 70_001, 524_288, 1_048_577, 8 << 20];

/// Both ends of a session, and their memory.
pub struct Ends {
    pub near: Peer,
    pub far: Peer,
    pub ends: [Endpoint; 2],
    gpus: [Option<u32>; 2],
}

impl Ends {
    fn new(hosts: &Hosts, gpu: Option<u32>, adapt: impl Fn(DevmemConfig) -> DevmemConfig) -> Ends {
        let builder = |index| hosts.plain(index).channels(4).payload_backend(adapt(hosts.devmem(gpu)));
        Ends::build(hosts, [gpu; 2], builder)
    }

    /// Connects the endpoints that these builders make, each with memory of its GPU.
    pub fn build(hosts: &Hosts, gpus: [Option<u32>; 2], builder: impl Fn(usize) -> Builder) -> Ends {
        let ends = [0, 1].map(|index| {
            let builder = builder(index);
            hosts.on(index, || builder.build()).unwrap()
        });
        let address = ends[1].listen_addresses()[0];
        let near = ends[0].connect(address, LIMIT).unwrap();
        let far = ends[1].accept(LIMIT).unwrap();
        assert_eq!(near.stats().transport, "devmem");
        Ends { near, far, ends, gpus }
    }

    pub fn region(&self, end: usize, bytes: &[u8]) -> Region {
        let region = match self.gpus[end] {
            Some(gpu) => self.ends[end].alloc_sim(gpu, bytes.len()).unwrap(),
            None => return self.ends[end].register(bytes.to_vec()).unwrap(),
        };
        region.write_at(0, bytes).unwrap();
        region
    }

    /// Writes and reads, one way and the other, and compares.
    pub fn exchange(&self, bytes: usize) {
        for (salt, peer, from) in [(1, &self.near, 0), (2, &self.far, 1)] {
            let (source, target) =
                (self.region(from, &pattern(bytes, salt)), self.region(1 - from, &vec![0; bytes]));
            let len = bytes as u64;
            peer.write(&source, 0, &target.descriptor(), 0, len).unwrap().wait(LIMIT).unwrap();
            assert_same(&contents(&target), &pattern(bytes, salt), "what was written");
            source.write_at(0, &vec![0; bytes]).unwrap();
            peer.read(&source, 0, &target.descriptor(), 0, len).unwrap().wait(LIMIT).unwrap();
            assert_same(&contents(&source), &pattern(bytes, salt), "what was read back");
        }
    }

    /// Bytes of frames that the second end has received.
    fn received_bytes(&self) -> u64 {
        self.far.stats().channels.iter().map(|channel| channel.received_bytes).sum()
    }

    /// Waits until a part of a transfer to the second end has arrived.
    fn until_some_has_arrived(&self, before: u64) {
        let since = Instant::now();
        while self.received_bytes() < before + (1 << 20) {
            assert!(since.elapsed() < LIMIT, "nothing arrives");
            thread::yield_now();
        }
    }

    /// The statistics of both ends.
    pub fn counted(&self) -> DevmemStats {
        let mut sum = DevmemStats::default();
        for peer in [&self.near, &self.far] {
            for counted in peer.stats().channels.into_iter().filter_map(|channel| channel.lane?.devmem) {
                sum.fragments += counted.fragments;
                sum.fragment_bytes += counted.fragment_bytes;
                sum.released += counted.released;
                sum.linear_bytes += counted.linear_bytes;
                sum.plain_bytes += counted.plain_bytes;
                sum.device_sent_bytes += counted.device_sent_bytes;
                sum.staged_sent_bytes += counted.staged_sent_bytes;
            }
        }
        sum
    }
}

fn same(config: DevmemConfig) -> DevmemConfig {
    config
}

#[test]
fn bytes_land_in_the_pool_and_all_fragments_are_given_back() {
    let Some(hosts) = Hosts::here() else { return };
    for gpu in [None, Some(0)] {
        let ends = Ends::new(&hosts, gpu, same);
        // Whole pages, as NICs read them.
        let sizes = SIZES.map(|bytes| bytes.next_multiple_of(4096));
        let packets =
            || [0, 1].iter().flat_map(|end| counted(&hosts, *end, Counter::DevmemPackets)).sum::<u64>();
        let before = packets();
        sizes.iter().for_each(|bytes| ends.exchange(*bytes));
        let counted = ends.counted();
        let total = 4 * sizes.iter().sum::<usize>() as u64;
        assert_eq!(counted.fragment_bytes, total, "{counted:?}");
        let packets = packets() - before;
        assert!(packets >= total / 9000, "the NICs tell of {packets} packets into pools, for {total} bytes");
        assert_eq!((counted.linear_bytes, counted.plain_bytes), (0, 0), "{counted:?}");
        assert_eq!(counted.fragments, counted.released, "{counted:?}");
        assert_eq!(counted.device_sent_bytes > 0, gpu.is_some(), "{counted:?}");
        assert_eq!(counted.staged_sent_bytes, 0, "{counted:?}");
    }
}

#[test]
fn bytes_that_miss_the_pool_are_counted_and_copied() {
    let Some(hosts) = Hosts::here() else { return };
    let _knob = Knob::set("split_linear", "100");
    for gpu in [None, Some(0)] {
        let ends = Ends::new(&hosts, gpu, same);
        SIZES.iter().for_each(|bytes| ends.exchange(*bytes));
        assert!(ends.counted().linear_bytes > 0, "{:?}", ends.counted());
    }
}

#[test]
fn lost_packets_are_sent_again() {
    let Some(hosts) = Hosts::here() else { return };
    let _knob = Knob::set("drop_every", "97");
    for gpu in [None, Some(0)] {
        let ends = Ends::new(&hosts, gpu, same);
        SIZES.iter().for_each(|bytes| ends.exchange(*bytes));
    }
}

#[test]
fn a_pool_that_runs_empty_fills_again() {
    let Some(hosts) = Hosts::here() else { return };
    let _knob = Knob::set("pack", "0");
    for gpu in [None, Some(0)] {
        let ends = Ends::new(&hosts, gpu, |config| config.pool_bytes(2 << 20));
        let empty = || [0, 1].map(|end| counted(&hosts, end, Counter::PoolEmpty));
        let before = empty();
        ends.exchange(16 << 20);
        // The counts only grow.
        assert_ne!(empty(), before, "no pool ran empty");
    }
}

/// Regression: what waited for a GPU filled the pool, and the sender took the silence for a dead path.
#[test]
fn a_pool_that_a_stalled_gpu_keeps_full_ends_no_lane() {
    let Some(hosts) = Hosts::here() else { return };
    let _knob = Knob::set("pack", "0");
    let gpu = SimGpu::open(1).unwrap();
    let gpus = [None, Some(1)];
    let builder = |index: usize| {
        let devmem = hosts.devmem(gpus[index]).pool_bytes(2 << 20);
        hosts.plain(index).channels(2).payload_backend(devmem)
    };
    let ends = Ends::build(&hosts, gpus, builder);
    ends.exchange(1 << 20);
    let bytes = 16 << 20;
    let (source, target) = (ends.region(0, &pattern(bytes, 12)), ends.region(1, &vec![0; bytes]));
    let empty = || counted(&hosts, 1, Counter::PoolEmpty);
    let before = empty();
    gpu.set_stall(true);
    let transfer = ends.near.write(&source, 0, &target.descriptor(), 0, bytes as u64).unwrap();
    let since = Instant::now();
    while empty() == before {
        assert!(since.elapsed() < LIMIT, "the pool does not run empty");
        thread::sleep(Duration::from_millis(10));
    }
    // Longer than it takes to find a path dead.
    thread::sleep(3 * limits::PATH_DEAD_AFTER);
    let lost = [&ends.near, &ends.far].map(|peer| peer.stats().lost_channels);
    gpu.set_stall(false);
    assert_eq!(lost, [vec![], vec![]] as [Vec<String>; 2], "lanes ended");
    transfer.wait(LIMIT).unwrap();
    assert_same(&contents(&target), &pattern(bytes, 12), "after the stall");
}

#[test]
fn memory_that_a_nic_cannot_read_is_staged() {
    let Some(hosts) = Hosts::here() else { return };
    let limit = "/sys/module/udmabuf/parameters/size_limit_mb";
    let before = fs::read_to_string(limit).unwrap();
    let ends = Ends::new(&hosts, Some(0), same);
    fs::write(limit, "1").unwrap();
    ends.exchange(4 << 20);
    fs::write(limit, before).unwrap();
    let counted = ends.counted();
    assert!(counted.staged_sent_bytes > 0 && counted.device_sent_bytes == 0, "{counted:?}");
}

/// Each costs the lane that it was to be sent over. Lanes that end for that are not counted as lanes that move nothing,
/// which would end the session.
#[test]
fn memory_that_cannot_be_read_fails_what_reads_it_however_often_and_everything_else_goes_on() {
    let Some(hosts) = Hosts::here() else { return };
    let ends = Ends::new(&hosts, None, same);
    ends.exchange(1 << 20);
    let bytes = 4 << 20;
    // SAFETY: a name; then a mapping of our own of that file, until the process ends, which nothing else touches.
    let source = unsafe {
        let file = libc::memfd_create(c"unmapped".as_ptr(), 0);
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        let base = libc::mmap(std::ptr::null_mut(), bytes, protection, flags, file, 0);
        assert_ne!(base, libc::MAP_FAILED);
        ends.ends[0].register_raw(base.cast(), bytes).unwrap()
    };
    let target = ends.region(1, &vec![0; bytes]);
    for round in 0..8 {
        // Lanes that have lasted count as those that stood still.
        thread::sleep(Duration::from_millis(1100));
        let len = if round % 2 == 0 { 100_000 } else { bytes as u64 };
        let written = ends.near.write(&source, 0, &target.descriptor(), 0, len).unwrap().wait(LIMIT);
        let error = written.expect_err("there is nothing to read");
        assert!(matches!(&error, TransferError::Invalid { what, .. } if what == "region"), "{error}");
        let read = ends.far.read(&target, 0, &source.descriptor(), 0, len).unwrap().wait(LIMIT);
        let error = read.expect_err("there is nothing to read");
        assert!(matches!(error, TransferError::AccessRefused { .. }), "{error}");
    }
    ends.exchange(1 << 20);
}

#[test]
fn several_queues_share_the_lanes() {
    let Some(hosts) = Hosts::here() else { return };
    let ends = Ends::new(&hosts, Some(0), |config| config.queues(3));
    let packets = || [0, 1].map(|end| counted(&hosts, end, Counter::DevmemPackets));
    let before = packets();
    ends.exchange(8 << 20);
    assert_eq!(ends.counted().plain_bytes, 0);
    for (after, before) in packets().iter().zip(&before) {
        let used: Vec<bool> = after.iter().zip(before).map(|(after, before)| after > before).collect();
        assert!(!used[0] && used.iter().filter(|used| **used).count() > 1, "{before:?}, {after:?}");
    }
}

#[test]
fn a_gpu_at_one_end_only() {
    let Some(hosts) = Hosts::here() else { return };
    let near = hosts.plain(0).channels(2).payload_backend(hosts.devmem(Some(0))).build().unwrap();
    let far = hosts.plain(1).channels(2).payload_backend(hosts.devmem(None));
    let far = hosts.on(1, || far.build()).unwrap();
    let peer = near.connect(far.listen_addresses()[0], LIMIT).unwrap();
    let bytes = 3_000_001;
    let on_gpu = near.alloc_sim(0, bytes).unwrap();
    let on_host = far.register(pattern(bytes, 7)).unwrap();
    peer.read(&on_gpu, 0, &on_host.descriptor(), 0, bytes as u64).unwrap().wait(LIMIT).unwrap();
    assert_same(&contents(&on_gpu), &pattern(bytes, 7), "from the host to the GPU");
    on_host.write_at(0, &vec![0; bytes]).unwrap();
    peer.write(&on_gpu, 0, &on_host.descriptor(), 0, bytes as u64).unwrap().wait(LIMIT).unwrap();
    assert_same(&contents(&on_host), &pattern(bytes, 7), "from the GPU to the host");
    // Host memory beside it, over the same lanes.
    let (source, target) = (near.register(pattern(bytes, 8)).unwrap(), far.register(vec![0; bytes]).unwrap());
    peer.write(&source, 0, &target.descriptor(), 0, bytes as u64).unwrap().wait(LIMIT).unwrap();
    assert_same(&contents(&target), &pattern(bytes, 8), "between the hosts");
}

#[test]
fn tcp_and_devmem_share_a_port() {
    let Some(hosts) = Hosts::here() else { return };
    let serving = hosts.plain(1).channels(2).payload_backend(hosts.devmem(None).optional());
    let serving = hosts.on(1, || serving.build()).unwrap();
    let address = serving.listen_addresses()[0];
    let over = |builder: Builder| {
        let end = builder.channels(2).build().unwrap();
        let peer = end.connect(address, LIMIT).unwrap();
        (peer.stats(), peer, end)
    };
    let (one, by_devmem, first) = over(hosts.plain(0).payload_backend(hosts.devmem(None).optional()));
    let (other, by_tcp, second) = over(hosts.plain(0));
    assert_eq!((one.transport, other.transport), ("devmem", "tcp"));
    assert_eq!(one.transport_reason, "both ends can");
    let target = serving.register(vec![0; 4 << 20]).unwrap();
    for (salt, peer, end) in [(3, &by_devmem, &first), (4, &by_tcp, &second)] {
        let source = end.register(pattern(4 << 20, salt)).unwrap();
        peer.write(&source, 0, &target.descriptor(), 0, 4 << 20).unwrap().wait(LIMIT).unwrap();
        assert_same(&contents(&target), &pattern(4 << 20, salt), "over one port");
    }
    let accepted: Vec<&str> = (0..2).map(|_| serving.accept(LIMIT).unwrap().stats().transport).collect();
    assert!(accepted.contains(&"devmem") && accepted.contains(&"tcp"), "{accepted:?}");
}

/// Flow rules of another program in all locations of a NIC, until they are dropped.
struct Full<'a> {
    hosts: &'a Hosts,
    end: usize,
    places: Vec<u32>,
}

impl Full<'_> {
    fn new(hosts: &Hosts, end: usize) -> Full<'_> {
        let local = SocketAddr::new(IpAddr::V4(if end == 0 { HERE } else { THERE }), 22);
        let mut places = Vec::new();
        hosts.on(end, || {
            let flows = Flows::open(&format!("dm{end}")).unwrap();
            for port in 1.. {
                let flow = Flow::new(local, SocketAddr::new([10, 9, 0, 9].into(), port), 0).unwrap();
                match flows.insert(&flow) {
                    Ok(location) => places.push(location),
                    Err(error) => return assert_eq!(error.raw_os_error(), Some(libc::ENOSPC)),
                }
            }
        });
        Full { hosts, end, places }
    }
}

impl Drop for Full<'_> {
    fn drop(&mut self) {
        self.hosts.on(self.end, || {
            let flows = Flows::open(&format!("dm{}", self.end)).unwrap();
            self.places.iter().for_each(|location| flows.delete(*location).unwrap());
        });
    }
}

#[test]
fn a_session_whose_lanes_do_not_come_about_goes_over_tcp_where_both_ends_can_do_without() {
    let Some(hosts) = Hosts::here() else { return };
    let optional = |index| hosts.plain(index).channels(2).payload_backend(hosts.devmem(None).optional());
    let ends = [0, 1].map(|index| hosts.on(index, || optional(index).build()).unwrap());
    let address = ends[1].listen_addresses()[0];
    let bytes = 3_000_001;
    let mut kept = Vec::new();
    for (end, name) in [(0, "connects"), (1, "accepts")] {
        let full = Full::new(&hosts, end);
        let near = ends[0].connect(address, LIMIT).unwrap();
        let far = ends[1].accept(LIMIT).unwrap();
        for stats in [near.stats(), far.stats()] {
            assert_eq!(stats.transport, "tcp");
            for words in [format!("at the end that {name}"), format!("NIC dm{end}"), "steer".into()] {
                assert!(stats.transport_reason.contains(&words), "{words}: {}", stats.transport_reason);
            }
        }
        let (source, target) =
            (ends[0].register(pattern(bytes, 9)).unwrap(), ends[1].register(vec![0; bytes]).unwrap());
        near.write(&source, 0, &target.descriptor(), 0, bytes as u64).unwrap().wait(LIMIT).unwrap();
        assert_same(&contents(&target), &pattern(bytes, 9), "over TCP");
        drop(full);
        let again = [ends[0].connect(address, LIMIT).unwrap(), ends[1].accept(LIMIT).unwrap()];
        assert_eq!(again.each_ref().map(|peer| peer.stats().transport), ["devmem", "devmem"]);
        // Rules that went while a table is being filled would leave room.
        kept.extend(again);
    }
    // An end that cannot do without says why the other one could not.
    let strict = hosts.plain(1).payload_backend(hosts.devmem(None));
    let strict = hosts.on(1, || strict.build()).unwrap();
    let _full = Full::new(&hosts, 0);
    let error = ends[0].connect(strict.listen_addresses()[0], LIMIT).unwrap_err().to_string();
    assert!(error.contains("steer") && error.contains("devmem at the end that accepts"), "{error}");
}

#[test]
fn an_end_that_cannot_is_named() {
    let Some(hosts) = Hosts::here() else { return };
    // Nothing is set up, and nothing may be: each says so, and what is missing.
    let only_if_ready = DevmemConfig::default();
    let refused = hosts.plain(0).payload_backend(only_if_ready.clone()).build().unwrap_err().to_string();
    assert!(refused.contains("dm0") && refused.contains("allow"), "{refused}");
    let near = hosts.plain(0).payload_backend(only_if_ready.optional()).build().unwrap();
    let far = hosts.plain(1).payload_backend(hosts.devmem(None).optional());
    let far = hosts.on(1, || far.build()).unwrap();
    let peer = near.connect(far.listen_addresses()[0], LIMIT).unwrap();
    let stats = peer.stats();
    assert!(stats.transport == "tcp" && stats.transport_reason.contains("dm0"), "{}", stats.transport_reason);
    let reported = far.accept(LIMIT).unwrap().stats();
    assert!(
        reported.transport == "tcp" && reported.transport_reason.contains("dm0"),
        "{}",
        reported.transport_reason
    );
    // An end that needs it refuses one that has none.
    let strict = hosts.plain(1).payload_backend(hosts.devmem(None));
    let strict = hosts.on(1, || strict.build()).unwrap();
    let error = near.connect(strict.listen_addresses()[0], LIMIT).unwrap_err();
    assert!(matches!(&error, ConnectError::Refused { why, .. } if why.contains("devmem")), "{error}");
    // And packets that never cross a NIC are no use.
    let beside = hosts.plain(0).payload_backend(hosts.devmem(None)).build().unwrap();
    let error = beside.connect(near.listen_addresses()[0], LIMIT).unwrap_err().to_string();
    assert!(error.contains("stay on this host"), "{error}");
}

#[test]
fn a_nic_that_goes_down_comes_back() {
    let Some(hosts) = Hosts::here() else { return };
    let ends = Ends::new(&hosts, Some(0), same);
    ends.exchange(1 << 20);
    let bytes = 64 << 20;
    let (source, target) = (ends.region(0, &pattern(bytes, 5)), ends.region(1, &vec![0; bytes]));
    let before = ends.received_bytes();
    let transfer = ends.near.write(&source, 0, &target.descriptor(), 0, bytes as u64).unwrap();
    let link = |up: &str| {
        assert!(Command::new("ip").args(["link", "set", "dm0", up]).status().unwrap().success());
    };
    ends.until_some_has_arrived(before);
    link("down");
    thread::sleep(Duration::from_millis(300));
    link("up");
    transfer.wait(LIMIT).unwrap();
    assert_same(&contents(&target), &pattern(bytes, 5), "across a NIC that was down");
}

#[test]
fn bindings_that_end_in_mid_transfer_lose_nothing() {
    let Some(hosts) = Hosts::here() else { return };
    // Of a GPU's memory those to send from end too: a send says so, and a lane made anew binds the region again.
    for gpu in [None, Some(0)] {
        let ends = Ends::new(&hosts, gpu, same);
        ends.exchange(1 << 20);
        let bytes = 64 << 20;
        let (source, target) = (ends.region(0, &pattern(bytes, 6)), ends.region(1, &vec![0; bytes]));
        // The write binds the region.
        ends.near.write(&source, 0, &target.descriptor(), 0, 1).unwrap().wait(LIMIT).unwrap();
        let before = ends.received_bytes();
        let transfer = ends.near.write(&source, 0, &target.descriptor(), 0, bytes as u64).unwrap();
        ends.until_some_has_arrived(before);
        unbind_all();
        transfer.wait(LIMIT).unwrap();
        assert_same(&contents(&target), &pattern(bytes, 6), "with a queue that lost its pool");
        target.write_at(0, &vec![0; bytes]).unwrap();
        let again = ends.near.write(&source, 0, &target.descriptor(), 0, bytes as u64).unwrap();
        again.wait(LIMIT).unwrap();
        assert_same(&contents(&target), &pattern(bytes, 6), "from a region that lost its binding");
        ends.exchange(1 << 20);
        assert!(ends.counted().plain_bytes > 0, "{:?}", ends.counted());
        let reported = ends.near.stats().lost_channels.join("; ");
        assert_eq!(reported.contains("the binding for sending is gone"), gpu.is_some(), "{reported}");
    }
}

/// Ends every binding of this process, as a NIC's driver may: they live as long as a netlink socket.
fn unbind_all() {
    let nowhere = fs::File::open("/dev/null").unwrap();
    for entry in fs::read_dir("/proc/self/fd").unwrap() {
        let name = entry.unwrap().file_name();
        let Ok(fd) = name.to_str().unwrap_or_default().parse::<i32>() else { continue };
        let mut domain: libc::c_int = 0;
        let mut len = size_of::<libc::c_int>() as libc::socklen_t;
        let into = (&raw mut domain).cast();
        // SAFETY: room for an int; a descriptor that is no socket gives an error.
        let got = unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_DOMAIN, into, &raw mut len) };
        if got == 0 && domain == libc::AF_NETLINK {
            // SAFETY: no memory is passed; what used the number finds a file that answers nothing.
            unsafe { libc::dup2(AsRawFd::as_raw_fd(&nowhere), fd) };
        }
    }
}

#[test]
fn a_lane_that_stalls_is_made_anew() {
    let Some(hosts) = Hosts::here() else { return };
    let ends = Ends::new(&hosts, Some(0), same);
    ends.exchange(1 << 20);
    let bytes = 16 << 20;
    let (source, target) = (ends.region(0, &pattern(bytes, 10)), ends.region(1, &vec![0; bytes]));
    let knob = Knob::set("swallow", "1");
    let transfer = ends.near.write(&source, 0, &target.descriptor(), 0, bytes as u64).unwrap();
    let since = Instant::now();
    while ends.near.stats().lost_channels.is_empty() {
        assert!(since.elapsed() < LIMIT, "nobody notices that lanes stand still");
        thread::sleep(Duration::from_millis(10));
    }
    drop(knob);
    transfer.wait(LIMIT).unwrap();
    assert_same(&contents(&target), &pattern(bytes, 10), "over lanes made anew");
    assert_eq!(ends.counted().plain_bytes, 0, "{:?}", ends.counted());
}

#[test]
fn lanes_that_stall_again_and_again_end_the_session_with_the_reason() {
    let Some(hosts) = Hosts::here() else { return };
    let ends = Ends::new(&hosts, None, same);
    let bytes = 1 << 20;
    let (source, target) = (ends.region(0, &pattern(bytes, 11)), ends.region(1, &vec![0; bytes]));
    let knob = Knob::set("swallow", "1");
    let transfer = ends.near.write(&source, 0, &target.descriptor(), 0, bytes as u64).unwrap();
    let error = transfer.wait(LIMIT).unwrap_err();
    for error in [error.into(), ends.near.error().unwrap(), lost_peer_error(&ends.far)] {
        assert!(matches!(error, Error::PeerLost { .. }), "{error}");
        assert!(error.to_string().contains("lanes of the channel in a row have moved nothing"), "{error}");
    }
    drop(knob);
    let again = ends.ends[0].connect(ends.ends[1].listen_addresses()[0], LIMIT).unwrap();
    again.write(&source, 0, &target.descriptor(), 0, bytes as u64).unwrap().wait(LIMIT).unwrap();
    assert_same(&contents(&target), &pattern(bytes, 11), "over the next session");
}

/// The error of a lost peer.
fn lost_peer_error(peer: &Peer) -> Error {
    let since = Instant::now();
    loop {
        if let Some(error) = peer.error() {
            return error;
        }
        assert!(since.elapsed() < LIMIT, "nobody tells");
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn messages_of_no_bytes_and_of_many_pass() {
    let Some(hosts) = Hosts::here() else { return };
    let ends = Ends::new(&hosts, Some(0), same);
    for (tag, bytes) in [(1, 0), (2, 1), (3, 64 << 20)] {
        let (source, target) = (ends.region(0, &pattern(bytes, tag)), ends.region(1, &vec![0; bytes]));
        let received = ends.far.recv(tag, &target, 0, bytes as u64).unwrap();
        ends.near.send(tag, &source, 0, bytes as u64).unwrap().wait(LIMIT).unwrap();
        assert_eq!(received.wait(LIMIT), Ok(bytes as u64));
        assert_same(&contents(&target), &pattern(bytes, tag), "a message");
    }
}

/// Addresses are those of the NICs, whatever the endpoints' ports.
#[test]
fn lanes_are_in_the_statistics() {
    let Some(hosts) = Hosts::here() else { return };
    let ends = Ends::new(&hosts, Some(0), same);
    ends.exchange(1 << 20);
    for channel in ends.near.stats().channels {
        let lane = channel.lane.unwrap();
        assert_eq!((lane.plugin.as_str(), lane.device_name.as_str()), ("devmem", "dm0"));
        assert!(lane.version.contains(&MemoryLocation::SimGpu(0).to_string()), "{}", lane.version);
        assert_eq!(channel.remote.ip(), IpAddr::V4(THERE));
        assert_ne!(channel.remote, SocketAddr::new(IpAddr::V4(THERE), 0));
    }
}
