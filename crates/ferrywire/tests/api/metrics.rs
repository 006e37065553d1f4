//! What metrics say of peers: lost channels, their fences and their counters, and how full rings are.

use crate::case::case;
use crate::netns::Hosts;
use crate::{LIMIT, Pair, builder, pair};
use ferrywire::metrics::{OccupancySample, PeerSample, StagingSample, process};
use ferrywire::{Endpoint, Region, limits};
use ferrywire_memory::sim::SimGpu;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The GPU of these tests and of no others, and the lock to use it.
const GPU: u32 = 2;
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < LIMIT, "never: {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// The sample of an endpoint's only peer.
fn sample(end: &Endpoint) -> PeerSample {
    let identity = end.identity().to_string();
    let peers = process().peers;
    peers.into_iter().find(|peer| peer.endpoint == identity).expect("its peer is connected")
}

/// The rings of all channels, for sending and for receiving; `None` if nothing was staged.
fn rings(end: &Endpoint) -> Option<[OccupancySample; 2]> {
    let staged: Vec<_> = sample(end).channels.into_iter().filter_map(|channel| channel.staging).collect();
    let sum = |of: fn(&ferrywire::metrics::StagingSample) -> OccupancySample| OccupancySample {
        size: staged.iter().map(|staging| of(staging).size).sum(),
        used: staged.iter().map(|staging| of(staging).used).sum(),
    };
    (!staged.is_empty()).then(|| [sum(|each| each.send_ring_bytes), sum(|each| each.receive_ring_bytes)])
}

/// Writes while the copies of a GPU stand still, and reads the rings of `end` meanwhile and afterwards: one
/// direction, by its index, is in use.
fn ring_is_in_use_while_copies_stand_still(
    pair: &Pair,
    gpu: &SimGpu,
    source: &Region,
    target: &Region,
    end: usize,
    way: usize,
) {
    assert_eq!(rings(&pair.ends[end]), None, "nothing was staged yet");
    gpu.set_stall(true);
    let bytes = source.len();
    let write = pair.near.write(source, 0, &target.descriptor(), 0, bytes).unwrap();
    let mut used = 0;
    until("a ring in use", || {
        let Some(rings) = rings(&pair.ends[end]) else { return false };
        assert_eq!(rings[1 - way].used, 0, "{rings:?}");
        assert!(rings[way].used <= rings[way].size, "{rings:?}");
        used = used.max(rings[way].used);
        used >= bytes
    });
    assert_eq!(rings(&pair.ends[1 - end]), None, "the other end stages nothing");
    gpu.set_stall(false);
    assert_eq!(write.wait(LIMIT), Ok(bytes));
    until("an empty ring", || {
        rings(&pair.ends[end]).is_some_and(|rings| rings[way].used == 0 && rings[way].size > 0)
    });
}

const BYTES: usize = 100_000;

#[test]
fn a_ring_for_received_payload_is_in_use_until_the_gpu_has_it() {
    let (_alone, pair) = (alone(), pair());
    let gpu = SimGpu::open(GPU).unwrap();
    let source = pair.ends[0].register(vec![7; BYTES]).unwrap();
    let target = pair.ends[1].alloc_sim(GPU, BYTES).unwrap();
    ring_is_in_use_while_copies_stand_still(&pair, &gpu, &source, &target, 1, 1);
}

#[test]
fn a_ring_for_payload_to_send_is_in_use_until_it_is_sent() {
    let (_alone, pair) = (alone(), pair());
    let gpu = SimGpu::open(GPU).unwrap();
    let source = pair.ends[0].alloc_sim(GPU, BYTES).unwrap();
    let target = pair.ends[1].alloc_host(BYTES).unwrap();
    ring_is_in_use_while_copies_stand_still(&pair, &gpu, &source, &target, 0, 0);
}

#[test]
fn rings_are_short_while_payload_goes_in_both_directions_over_many_channels() {
    const SMALL: usize = 50_000;
    let _alone = alone();
    let gpu = SimGpu::open(GPU).unwrap();
    // More channels than fit into a cache with whole rings, each with a thread.
    let build = || builder().listen("127.0.0.1:0".parse().unwrap()).threads(9).channels(9).build();
    let ends = [build().unwrap(), build().unwrap()];
    let near = ends[0].connect(ends[1].listen_addresses()[0], LIMIT).unwrap();
    let far = ends[1].accept(LIMIT).unwrap();
    let on_gpu = [0; 2].map(|_| ends[0].alloc_sim(GPU, SMALL).unwrap());
    let on_host = [0; 2].map(|_| ends[1].alloc_host(SMALL).unwrap());
    gpu.set_stall(true);
    let sent = near.write(&on_gpu[0], 0, &on_host[0].descriptor(), 0, SMALL as u64).unwrap();
    let mut received = Vec::new();
    let sizes = || -> Vec<[u64; 2]> {
        let staging = sample(&ends[0]).channels.into_iter().map(|channel| channel.staging);
        let size = |ring: OccupancySample| ring.size;
        let of_both = |of: Option<StagingSample>| {
            of.map_or([0; 2], |of| [size(of.send_ring_bytes), size(of.receive_ring_bytes)])
        };
        staging.map(of_both).collect()
    };
    let short = limits::STAGING_SHORT_RING_BYTES as u64;
    let is_short = |sizes: &[u64; 2]| *sizes == [short; 2];
    // The first of these uses the second ring, and the next ones find it in use.
    until("short rings", || {
        if received.len() < 4 {
            received.push(far.write(&on_host[1], 0, &on_gpu[1].descriptor(), 0, SMALL as u64).unwrap());
        }
        sizes().iter().any(is_short)
    });
    let channel = sizes().iter().position(is_short).unwrap();
    gpu.set_stall(false);
    received.iter().chain([&sent]).for_each(|write| assert_eq!(write.wait(LIMIT), Ok(SMALL as u64)));
    until("a whole ring", || {
        let sent = near.write(&on_gpu[0], 0, &on_host[0].descriptor(), 0, SMALL as u64).unwrap();
        assert_eq!(sent.wait(LIMIT), Ok(SMALL as u64));
        sizes()[channel][0] == limits::STAGING_OUT_RING_BYTES as u64
    });
}

/// A region that is dropped while the GPU may still write to it costs the channel.
#[test]
fn each_end_counts_one_fence_for_each_lost_channel() {
    let (_alone, pair) = (alone(), pair());
    let gpu = SimGpu::open(GPU).unwrap();
    let buffer = gpu.alloc(BYTES, 4096).unwrap();
    // SAFETY: the buffer stays until the end.
    let target = unsafe { pair.ends[1].register_raw(buffer.as_ptr(), BYTES) }.unwrap();
    let source = pair.ends[0].register(vec![7; BYTES]).unwrap();
    assert_eq!(pair.ends.each_ref().map(|end| (sample(end).lost_channels, sample(end).fences)), [(0, 0); 2]);
    gpu.set_stall(true);
    let write = pair.near.write(&source, 0, &target.descriptor(), 0, BYTES as u64).unwrap();
    until("staged bytes", || rings(&pair.ends[1]).is_some_and(|rings| rings[1].used >= BYTES as u64));
    drop(target);
    until("a lost channel", || sample(&pair.ends[1]).lost_channels > 0);
    gpu.set_stall(false);
    assert!(write.wait(LIMIT).is_err());
    until("the fences", || {
        let counts = pair.ends.each_ref().map(|end| (sample(end).lost_channels, sample(end).fences));
        counts.iter().all(|(lost, fences)| lost > &0 && lost == fences)
    });
}

/// Counters of staging, summed over channels: waits for room, and times in nanoseconds.
fn staged(end: &Endpoint) -> [u64; 4] {
    let channels = sample(end).channels.into_iter();
    let mut sums = [0; 4];
    for staging in channels.filter_map(|channel| channel.staging) {
        let ns = |seconds: f64| (seconds * 1e9).round() as u64;
        let counts =
            [staging.ring_full_events, ns(staging.h2d_s), ns(staging.socket_s), ns(staging.ring_full_s)];
        sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
    }
    sums
}

/// Neither while the channel is down, nor on its next connection.
#[test]
fn counters_of_staging_do_not_shrink_with_a_lost_channel() {
    let (_alone, pair) = (alone(), pair());
    let gpu = SimGpu::open(GPU).unwrap();
    let buffer = gpu.alloc(BYTES, 4096).unwrap();
    let source = pair.ends[0].register(vec![7; BYTES]).unwrap();
    let kept = pair.ends[1].alloc_sim(GPU, BYTES).unwrap();
    let fill = |count| {
        for _ in 0..count {
            let write = pair.near.write(&source, 0, &kept.descriptor(), 0, BYTES as u64).unwrap();
            assert_eq!(write.wait(LIMIT), Ok(BYTES as u64));
        }
    };
    fill(50);
    // SAFETY: the buffer stays until the end.
    let target = unsafe { pair.ends[1].register_raw(buffer.as_ptr(), BYTES) }.unwrap();
    let mut last = staged(&pair.ends[1]);
    assert!(last[1] > 0 && last[2] > 0, "{last:?}");
    let mut grows = || {
        let now = staged(&pair.ends[1]);
        assert!(now.iter().zip(&last).all(|(now, last)| now >= last), "{now:?} after {last:?}");
        last = now;
    };
    gpu.set_stall(true);
    let write = pair.near.write(&source, 0, &target.descriptor(), 0, BYTES as u64).unwrap();
    until("staged bytes", || rings(&pair.ends[1]).is_some_and(|rings| rings[1].used >= BYTES as u64));
    drop(target);
    until("a lost channel", || {
        grows();
        sample(&pair.ends[1]).lost_channels > 0
    });
    gpu.set_stall(false);
    assert!(write.wait(LIMIT).is_err());
    until("the next connection", || {
        grows();
        sample(&pair.ends[1]).channels.iter().all(|channel| channel.alive)
            && sample(&pair.ends[1]).channels.iter().any(|channel| channel.reconnects > 0)
    });
    fill(1);
    until("bytes over it", || {
        grows();
        rings(&pair.ends[1]).is_some_and(|rings| rings[1].size > 0)
    });
}

/// The kernel counts those of one connection.
#[test]
fn retransmits_do_not_shrink_when_a_channel_is_connected_again() {
    let Some(hosts) = Hosts::new() else { return };
    let builder = || Endpoint::builder().secret("correct horse").channels(1).threads(1);
    let near = hosts.on(0, || builder().build()).unwrap();
    let far = hosts.on(1, || builder().listen(Hosts::listen()).build()).unwrap();
    let peer = hosts.on(0, || near.connect(Hosts::listen(), LIMIT)).unwrap();
    let (source, target) = (near.register(vec![7; BYTES]).unwrap(), far.alloc_host(BYTES).unwrap());
    let write = || peer.write(&source, 0, &target.descriptor(), 0, BYTES as u64).unwrap();
    assert_eq!(write().wait(LIMIT), Ok(BYTES as u64));
    let channel = || sample(&near).channels.remove(0);
    let before = channel();
    assert_eq!(before.reconnects, 0);
    // The far host drops what is sent to it.
    hosts.set(1, "addr del 10.214.0.2/24 dev fw0");
    let write = write();
    until("a retransmitted packet", || channel().retransmits > before.retransmits);
    let mut last = channel();
    let mut grows = || {
        let now = channel();
        assert!(now.retransmits >= last.retransmits, "{now:?} after {last:?}");
        last = now;
    };
    until("a lost channel", || {
        grows();
        sample(&near).lost_channels > 0
    });
    hosts.set(1, "addr add 10.214.0.2/24 dev fw0");
    until("another connection", || {
        grows();
        channel().reconnects > 0 && channel().alive
    });
    assert_eq!(write.wait(LIMIT), Ok(BYTES as u64));
    grows();
}

#[test]
fn a_wrong_secret_counts_before_the_first_sample() {
    case!("").passes(|| {
        let builder = |secret: &str| Endpoint::builder().secret(secret).channels(1);
        let far = builder("of one end").listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
        let near = builder("of another").build().unwrap();
        near.connect(far.listen_addresses()[0], LIMIT).unwrap_err();
        until("the other end has counted it", || far.auth_failures() == 1);
        assert_eq!(process().auth_failures, 1);
    });
}
