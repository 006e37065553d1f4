//! Both ends of a transfer report the same outcome, whatever happens to it and when: cancelled, its memory
//! deregistered or dropped, its connections cut. On real threads, within a host and between two, with sockets that
//! copy and that do not, and with memory of the host and of a simulated GPU.
//!
//! The rule: a message whose send ends with `Ok` is in the memory of exactly one receive, and a receive that ends
//! with `Ok` has a message whose send ends with `Ok`. What was written to memory after its user had it back is never
//! at the target.

use crate::LIMIT;
use crate::case::case;
use crate::netns::Hosts;
use ferrywire::{Builder, Endpoint, MemoryLocation, Peer, PluginConfig, Region, TransferError};
use ferrywire_memory::sim::{SimFaults, SimGpu};
use ferrywire_net::tcp::{TcpTransport, ZeroCopyPolicy};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::hint;
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Cancels and drops in each of the eight cells: some 1,000 and 200 in all.
const CANCELS: usize = 130;
const DROPS: usize = 26;
const CUTS: usize = 12;
const CHANNELS: usize = 3;
/// Contents of memory that its user has reused.
const REUSED: u8 = 0xEE;
/// The simulated GPU of the test over TCP alone, and those of the two ends of the test over a plugin.
const GPUS: [[u32; 2]; 2] = [[14, 14], [0, 1]];

#[derive(Clone, Copy, Debug)]
struct Cell {
    /// Payload goes over the simulated plugin, within this host.
    over_plugin: bool,
    between_hosts: bool,
    zero_copy: ZeroCopyPolicy,
    on_gpu: bool,
}

impl Cell {
    fn all() -> impl Iterator<Item = Cell> {
        (0..8).map(|bits| Cell {
            over_plugin: false,
            between_hosts: bits & 1 > 0,
            zero_copy: if bits & 2 > 0 { ZeroCopyPolicy::Always } else { ZeroCopyPolicy::Auto },
            on_gpu: bits & 4 > 0,
        })
    }

    /// The GPU of an end.
    fn gpu(self, end: usize) -> u32 {
        GPUS[usize::from(self.over_plugin)][end]
    }

    /// The plugin of an end.
    fn plugin(self, end: usize) -> PluginConfig {
        let library = std::env::current_exe().unwrap().with_file_name("libferrywire_tcpx_sim.so");
        // SAFETY: the file was built with these tests, and no other thread reads the environment.
        let plugin = unsafe { PluginConfig::at(library) };
        match self.on_gpu {
            true => plugin.gpu(MemoryLocation::SimGpu(self.gpu(end))).allow_same_host_gpu(true),
            false => plugin,
        }
    }
}

/// Two connected endpoints, the second of which has its memory on a GPU where the cell says so.
struct World {
    cell: Cell,
    rng: StdRng,
    ends: [Endpoint; 2],
    peers: [Peer; 2],
    hosts: Option<Hosts>,
    next_tag: u64,
    /// Messages that arrived all the same, and those that did not; and so of writes.
    ended: [usize; 4],
}

impl World {
    /// `None` where the hosts cannot be made.
    fn new(cell: Cell) -> Option<World> {
        let seed = std::env::var("FERRYWIRE_SEED").ok().and_then(|seed| seed.parse().ok());
        let seed = seed.unwrap_or_else(rand::random);
        println!("{cell:?}, FERRYWIRE_SEED={seed}");
        let hosts = match cell.between_hosts {
            true => Some(Hosts::new()?),
            false => None,
        };
        let builder = || {
            let tcp = TcpTransport::default().zero_copy(cell.zero_copy);
            Endpoint::builder().transport(Arc::new(tcp)).secret("correct horse").channels(CHANNELS).threads(2)
        };
        let build = |end: usize, builder: Builder| {
            let builder = if cell.over_plugin { builder.plugin(cell.plugin(end)) } else { builder };
            match &hosts {
                Some(hosts) => hosts.on(end, || builder.build()),
                None => builder.build(),
            }
        };
        let listen = if hosts.is_some() { Hosts::listen() } else { "127.0.0.1:0".parse().unwrap() };
        let far = build(1, builder().listen(listen)).unwrap();
        let near = build(0, builder()).unwrap();
        let to = far.listen_addresses()[0];
        let connect = || near.connect(to, LIMIT);
        let peer = match &hosts {
            Some(hosts) => hosts.on(0, connect),
            None => connect(),
        };
        let peers = [peer.unwrap(), far.accept(LIMIT).unwrap()];
        Some(World {
            cell,
            rng: StdRng::seed_from_u64(seed),
            ends: [near, far],
            peers,
            hosts,
            next_tag: 1,
            ended: [0; 4],
        })
    }

    fn target(&self, bytes: usize) -> Region {
        match self.cell.on_gpu {
            true => self.ends[1].alloc_sim(self.cell.gpu(1), bytes).unwrap(),
            false => self.ends[1].alloc_host(bytes).unwrap(),
        }
    }

    /// Registers bytes at the first end; on a GPU now and then, where the cell has one.
    fn source(&mut self, bytes: &[u8]) -> Region {
        if !self.cell.on_gpu || self.rng.random() {
            return self.ends[0].register(bytes.to_vec()).unwrap();
        }
        let region = self.ends[0].alloc_sim(self.cell.gpu(0), bytes.len()).unwrap();
        region.write_at(0, bytes).unwrap();
        region
    }

    fn bytes(&mut self) -> usize {
        match self.rng.random_range(0..4) {
            0 => self.rng.random_range(1..=64 << 10),
            1 => self.rng.random_range(64 << 10..256 << 10),
            _ => self.rng.random_range(64 << 10..2 << 20),
        }
    }

    /// Waits for a random moment of a transfer.
    fn pause(&mut self) {
        let pause = Duration::from_micros(self.rng.random_range(0..600));
        let since = Instant::now();
        while since.elapsed() < pause {
            hint::spin_loop();
        }
    }

    fn tag(&mut self) -> u64 {
        self.next_tag += 1;
        self.next_tag
    }
}

/// Bytes of a message: none of them is what unused or reused memory holds.
pub fn pattern(bytes: usize, salt: u64) -> Vec<u8> {
    (0..bytes as u64).map(|at| 1 + ((at.wrapping_mul(31) ^ at >> 11 ^ salt) % 200) as u8).collect()
}

/// The contents of a region.
pub fn contents(region: &Region) -> Vec<u8> {
    let mut out = vec![0; region.len() as usize];
    region.read_at(0, &mut out).unwrap();
    out
}

/// An event at the receiving end of a message.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Event {
    CancelReceive,
    CancelSend,
    Deregister,
}

/// One message, and what happened to it at a random moment.
fn message(world: &mut World, event: Event) {
    let (bytes, tag) = (world.bytes(), world.tag());
    let expected = pattern(bytes, tag);
    let source = world.source(&expected);
    let (target, spare) = (world.target(bytes), world.target(bytes));
    let [near, far] = world.peers.clone();
    let post_receive = || far.recv(tag, &target, 0, bytes as u64).unwrap();
    let post_send = || near.send(tag, &source, 0, bytes as u64).unwrap();
    let (send, receive) = match world.rng.random() {
        true => {
            let receive = post_receive();
            (post_send(), receive)
        }
        false => {
            let send = post_send();
            world.pause();
            (send, post_receive())
        }
    };
    world.pause();
    match event {
        Event::CancelReceive => receive.cancel(),
        Event::CancelSend => send.cancel(),
        Event::Deregister => target.clone().deregister().unwrap(),
    }
    let what = format!("{event:?} of {bytes} bytes with {:?}", world.cell);
    let arrived = if event == Event::CancelSend {
        let sent = send.wait(LIMIT);
        if sent.is_err() {
            // The receive may wait for the next message of its tag.
            receive.cancel();
        }
        let received = receive.wait(LIMIT);
        assert_eq!(received.is_ok(), sent.is_ok(), "{what}: {sent:?}, {received:?}");
        received.is_ok()
    } else {
        let received = receive.wait(LIMIT);
        // A message that the receive did not take is this one's, unless it was refused to its sender.
        let second = far.recv(tag, &spare, 0, bytes as u64).unwrap();
        let sent = send.wait(LIMIT);
        if received.is_ok() || sent.is_err() {
            second.cancel();
        }
        let again = second.wait(LIMIT);
        let takers = usize::from(received.is_ok()) + usize::from(again.is_ok());
        assert_eq!(takers, usize::from(sent.is_ok()), "{what}: {sent:?}, {received:?}, {again:?}");
        if again.is_ok() {
            assert!(contents(&spare) == expected, "{what}: the second receive has other bytes");
        }
        received.is_ok()
    };
    world.ended[usize::from(!arrived)] += 1;
    if receive.poll().unwrap().is_ok() && event != Event::Deregister {
        assert!(contents(&target) == expected, "{what}: the receive has other bytes");
    }
}

/// One write, send or served read from memory that its user drops at a random moment, and then uses for something else.
fn dropped_source(world: &mut World) {
    let (bytes, tag) = (world.bytes(), world.tag());
    let mut memory = pattern(bytes, 7);
    let expected = memory.clone();
    // SAFETY: the memory stays until the end.
    let region = unsafe { world.ends[0].register_raw(memory.as_mut_ptr(), bytes) }.unwrap();
    let target = world.target(bytes);
    let [near, far] = world.peers.clone();
    let len = bytes as u64;
    let (posted, other) = match world.rng.random_range(0..3) {
        0 => (near.write(&region, 0, &target.descriptor(), 0, len).unwrap(), None),
        1 => (far.read(&target, 0, &region.descriptor(), 0, len).unwrap(), None),
        _ => {
            let receive = far.recv(tag, &target, 0, len).unwrap();
            (near.send(tag, &region, 0, len).unwrap(), Some(receive))
        }
    };
    world.pause();
    drop(region);
    memory.fill(REUSED);
    let ended = posted.wait(LIMIT);
    world.ended[2 + usize::from(ended.is_err())] += 1;
    if let Some(receive) = other {
        if ended.is_err() {
            // The receive may wait for the next message of its tag.
            receive.cancel();
        }
        let received = receive.wait(LIMIT);
        assert_eq!(received.is_ok(), ended.is_ok(), "{ended:?}, {received:?}, {:?}", world.cell);
    }
    let found = contents(&target);
    assert!(!found.contains(&REUSED), "{ended:?}: reused memory was sent, {:?}", world.cell);
    assert!(ended.is_err() || found == expected, "not all bytes are in their location, {:?}", world.cell);
    drop(memory);
}

/// One write into memory that its user drops at a random moment, and then uses for something else.
fn dropped_target(world: &mut World) {
    let bytes = world.bytes();
    let source = world.ends[0].register(pattern(bytes, 9)).unwrap();
    let mut memory = vec![0; bytes];
    // SAFETY: the memory stays until the end.
    let region = unsafe { world.ends[1].register_raw(memory.as_mut_ptr(), bytes) }.unwrap();
    let write = world.peers[0].write(&source, 0, &region.descriptor(), 0, bytes as u64).unwrap();
    world.pause();
    drop(region);
    let complete = memory == contents(&source);
    memory.fill(REUSED);
    let written = write.wait(LIMIT);
    world.ended[2 + usize::from(written.is_err())] += 1;
    assert!(
        memory.iter().all(|byte| *byte == REUSED),
        "{written:?}: placed after the drop, {:?}",
        world.cell
    );
    assert!(written.is_err() || complete, "the write did not location all bytes, {:?}", world.cell);
}

/// Ends one connection of the two, as a middlebox or an operator does. False where this kernel cannot.
fn cut(world: &mut World) -> bool {
    let up: Vec<_> = world.peers[0].stats().channels.into_iter().filter(|channel| channel.alive).collect();
    if up.is_empty() {
        return true;
    }
    let port = up[world.rng.random_range(0..up.len())].local.port();
    let kill = || {
        let arguments = ["-K", "-H", "-t", "state", "established", "sport", "=", &format!(":{port}")];
        Command::new("ss").args(arguments).output().is_ok_and(|out| out.status.success())
    };
    match &world.hosts {
        Some(hosts) => hosts.on(0, kill),
        None => kill(),
    }
}

/// Messages and writes while connections are cut.
fn cuts(world: &mut World) {
    const BYTES: usize = 4 << 20;
    for round in 0..CUTS {
        let expected = pattern(BYTES, round as u64);
        let source = world.source(&expected);
        let targets = [world.target(BYTES), world.target(BYTES)];
        let tag = world.tag();
        let [near, far] = world.peers.clone();
        let receive = far.recv(tag, &targets[0], 0, BYTES as u64).unwrap();
        let send = near.send(tag, &source, 0, BYTES as u64).unwrap();
        let write = near.write(&source, 0, &targets[1].descriptor(), 0, BYTES as u64).unwrap();
        world.pause();
        if !cut(world) {
            return println!("SKIPPED: needs root, ss, and a kernel with INET_DIAG_DESTROY");
        }
        let outcomes = [&send, &receive, &write].map(|transfer| transfer.wait(LIMIT));
        assert_eq!(outcomes, [const { Ok(BYTES as u64) }; 3], "{:?}", world.cell);
        targets.iter().for_each(|target| assert!(contents(target) == expected, "{:?}", world.cell));
    }
}

/// Opens GPUs whose copies take their time.
fn open(gpus: [u32; 2]) -> [Arc<SimGpu>; 2] {
    gpus.map(|gpu| {
        let gpu = SimGpu::open(gpu).unwrap();
        let copy_delay = Duration::ZERO..=Duration::from_micros(100);
        gpu.set_faults(SimFaults { copy_delay, ..SimFaults::default() });
        gpu
    })
}

/// Both ends agree on the outcome over a plugin too, whose posted receives cannot be withdrawn.
#[test]
fn both_ends_tell_the_same_outcome_over_a_plugin() {
    for on_gpu in [false, true] {
        let cell = Cell { over_plugin: true, between_hosts: false, zero_copy: ZeroCopyPolicy::Auto, on_gpu };
        case!("same_host=allow").passes(|| {
            let _open = open(GPUS[1]);
            let Some(mut world) = World::new(cell) else { return };
            for round in 0..CANCELS / 2 {
                let event = [Event::CancelReceive, Event::CancelSend, Event::Deregister][round % 3];
                message(&mut world, event);
            }
            (0..DROPS / 2).for_each(|_| dropped_source(&mut world));
        });
    }
}

/// Sends of messages that no receive had ended with `Ok`, and reused memory was sent.
#[test]
fn both_ends_report_the_same_outcome() {
    let _only = crate::only_user_of_gpu(GPUS[0][0]);
    let _open = open(GPUS[0]);
    thread::scope(|scope| {
        for cell in Cell::all() {
            let run = move || {
                let Some(mut world) = World::new(cell) else { return };
                for round in 0..CANCELS {
                    let event = [Event::CancelReceive, Event::CancelSend, Event::Deregister][round % 3];
                    message(&mut world, event);
                }
                for round in 0..DROPS {
                    match round % 2 {
                        0 => dropped_source(&mut world),
                        _ => dropped_target(&mut world),
                    }
                }
                cuts(&mut world);
                let [received, not, written, refused] = world.ended;
                println!(
                    "  {received} messages received, {not} not; {written} writes complete, {refused} not"
                );
            };
            // One after the other: each has the cores that its races need.
            scope.spawn(run).join().unwrap();
        }
    });
}

/// Regression: the message was lost, because its sender reported `Ok` and its receive a deregistered region.
#[test]
fn a_short_message_whose_receive_has_lost_its_memory_is_for_the_next_receive() {
    let pair = crate::pair();
    let [first, second] = [(); 2].map(|()| pair.ends[1].alloc_host(100).unwrap());
    let receive = pair.far.recv(3, &first, 0, 100).unwrap();
    first.deregister().unwrap();
    let source = pair.ends[0].register(vec![6; 100]).unwrap();
    assert_eq!(pair.near.send(3, &source, 0, 100).unwrap().wait(LIMIT), Ok(100));
    let error = receive.wait(LIMIT).unwrap_err();
    assert!(matches!(error, TransferError::Invalid { .. }), "{error}");
    assert_eq!(pair.far.recv(3, &second, 0, 100).unwrap().wait(LIMIT), Ok(100));
    assert_eq!(contents(&second), [6; 100]);
}

/// Regression: this message was lost too.
#[test]
fn a_short_message_whose_receive_has_lost_its_gpu_is_for_the_next_receive() {
    const GPU: u32 = 3;
    let _only = crate::only_user_of_gpu(GPU);
    let gpu = SimGpu::open(GPU).unwrap();
    let pair = crate::pair();
    let on_gpu = pair.ends[1].alloc_sim(GPU, 100).unwrap();
    let target = pair.ends[1].alloc_host(100).unwrap();
    let source = pair.ends[0].register(vec![6; 100]).unwrap();
    gpu.set_faults(SimFaults { fail_after: Some(0), ..SimFaults::default() });
    let receive = pair.far.recv(3, &on_gpu, 0, 100).unwrap();
    assert_eq!(pair.near.send(3, &source, 0, 100).unwrap().wait(LIMIT), Ok(100));
    assert!(receive.wait(LIMIT).is_err());
    assert_eq!(pair.far.recv(3, &target, 0, 100).unwrap().wait(LIMIT), Ok(100));
    assert_eq!(contents(&target), [6; 100]);
}
