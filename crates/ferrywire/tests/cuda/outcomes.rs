//! Memory of a CUDA GPU that its user drops, and receives into it that are cancelled, while copies of the driver are in
//! flight: those of the copy engines, and those of the kernel that copies lists of short runs.
//!
//! The rule: bytes written to memory after its user had it back are never sent, and a message whose send ends with
//! `Ok` is in the memory of exactly one receive. In the first round nothing is copied until the user has acted: a
//! stand-in for the driver holds all copies, and on a GPU blocks of this test occupy the multiprocessors; nothing can
//! hold its copy engines. The moments of the other rounds are random.

use crate::ends::{contents, pattern};
use crate::occupied::Occupied;
use crate::{ALONE, gpu, is_real, moves, of_stand_in, passes};
use ferrywire::{Block, BlockList, Endpoint, Peer, Region, StagingStats, Transfer, TransferError};
use ferrywire_memory::cuda::CudaGpu;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(60);
const ROUNDS: u64 = 60;
/// Content of sources until they are dropped, and of memory that its user has back.
const CONTENT: u8 = 5;
const REUSED: u8 = 0xEE;

/// The way in which bytes are copied between the GPU and pinned memory.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Copies {
    /// One long run by the copy engines. In a process whose launches wait for their kernels nothing else copies.
    Engines,
    /// Many short runs, which only the kernel copies.
    Kernel,
}

impl Copies {
    /// Offset and length of each run. Those of the kernel are contiguous nowhere, and take it long enough.
    fn runs(self) -> Vec<(u64, u64)> {
        const SHORT_BYTES: u64 = 16;
        // A CPU takes so much longer for each.
        let on_cpu = of_stand_in(c"stand_in_hold_kernels").is_some();
        let count: u64 = if on_cpu { 5_000 } else { 20_000 };
        match self {
            Copies::Engines => vec![(0, 1 << 20)],
            Copies::Kernel => {
                (0..count).map(|run| (run * 7919 % count * 2 * SHORT_BYTES, SHORT_BYTES)).collect()
            }
        }
    }

    /// Bytes from the first run to the last.
    fn spread_bytes(self) -> usize {
        self.runs().iter().map(|(offset, bytes)| offset + bytes).max().unwrap() as usize
    }

    fn bytes(self) -> u64 {
        self.runs().iter().map(|(_, bytes)| bytes).sum()
    }

    /// Blocks these copies until it is dropped; `None` if they cannot be blocked.
    fn hold(self, gpu: &Arc<CudaGpu>) -> Option<Hold> {
        let name = match self {
            Copies::Engines => c"stand_in_hold_copies",
            Copies::Kernel => c"stand_in_hold_kernels",
        };
        if let Some(found) = of_stand_in(name) {
            // SAFETY: both functions have this type.
            let hold = unsafe { std::mem::transmute::<*mut c_void, extern "C" fn(c_int)>(found) };
            return Some(Hold::StandIn(hold));
        }
        (self == Copies::Kernel && is_real(gpu)).then(|| Hold::Occupied(Occupied::new(gpu)))
    }
}

/// Keeps copies from being made.
enum Hold {
    StandIn(extern "C" fn(c_int)),
    Occupied(Occupied),
}

impl Hold {
    fn begin(&self) {
        match self {
            Hold::StandIn(hold) => hold(1),
            Hold::Occupied(occupied) => occupied.begin(),
        }
    }

    fn end(&self) {
        match self {
            Hold::StandIn(hold) => hold(0),
            Hold::Occupied(occupied) => occupied.end(),
        }
    }
}

/// Two endpoints with one channel between them, and a GPU.
struct Scene {
    copies: Copies,
    gpu: Arc<CudaGpu>,
    hold: Option<Hold>,
    rng: StdRng,
    ends: [Endpoint; 2],
    peers: [Peer; 2],
    /// How long a transfer of all runs takes.
    whole: Duration,
}

impl Scene {
    /// In a process of its own, where no other test's copies are held. `None` where the test cannot run, or has run.
    fn new(copies: Copies, test: &str) -> Option<Scene> {
        let gpu = gpu()?;
        if std::env::var_os(ALONE).is_none() {
            let engines_alone = [("CUDA_LAUNCH_BLOCKING", "1")];
            passes(test, if copies == Copies::Engines { &engines_alone } else { &[] });
            return None;
        }
        let hold = copies.hold(&gpu);
        if hold.is_none() && !is_real(&gpu) {
            println!("SKIPPED: needs a stand-in that runs kernels");
            return None;
        }
        let seed = std::env::var("FERRYWIRE_SEED").ok().and_then(|seed| seed.parse().ok());
        let seed = seed.unwrap_or_else(rand::random);
        println!("FERRYWIRE_SEED={seed}");
        let builder = || Endpoint::builder().channels(1);
        let far = builder().listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
        let near = builder().build().unwrap();
        let peer = near.connect(far.listen_addresses()[0], LONG).unwrap();
        let peers = [peer, far.accept(LONG).unwrap()];
        let (rng, ends) = (StdRng::seed_from_u64(seed), [near, far]);
        let mut scene = Scene { copies, gpu, hold, rng, ends, peers, whole: Duration::ZERO };
        let [source, target] = [scene.on_gpu(0), scene.on_gpu(1)];
        let list = scene.list(&source, &target);
        // The first transfer makes what the channel needs; the second one is like those to come.
        for _ in 0..2 {
            let begun = Instant::now();
            scene.peers[0].write_blocks(&list, None, None).unwrap().wait(LONG).unwrap();
            scene.whole = begun.elapsed();
        }
        Some(scene)
    }

    fn on_gpu(&self, end: usize) -> Region {
        self.ends[end].alloc_cuda(self.gpu.index(), self.copies.spread_bytes()).unwrap()
    }

    fn list(&self, source: &Region, target: &Region) -> BlockList {
        let block = |(offset, bytes)| Block { local_offset: offset, remote_offset: offset, bytes };
        let blocks: Vec<_> = self.copies.runs().into_iter().map(block).collect();
        BlockList::new(source, &target.descriptor(), &blocks).unwrap()
    }

    /// Blocks the copies of a round until the user has acted.
    fn hold_of(&self, round: u64) -> Option<&Hold> {
        self.hold.as_ref().filter(|_| round == 0)
    }

    /// Waits until a random moment of a transfer.
    fn pause(&mut self) {
        let pause = self.whole.mul_f64(self.rng.random_range(0.0..2.0));
        // A kernel on the CPU needs the cores; on a GPU a transfer takes less than a sleep is exact to.
        if of_stand_in(c"stand_in_hold_copies").is_some() {
            return std::thread::sleep(pause);
        }
        let since = Instant::now();
        while since.elapsed() < pause {
            std::hint::spin_loop();
        }
    }

    /// Waits until a count of what an end has staged is so high.
    fn until_staged(&self, end: usize, count: fn(StagingStats) -> u64, least: u64) {
        let begun = Instant::now();
        while self.staged(end, count) < least {
            assert!(begun.elapsed() < LONG, "{} bytes staged, not {least}", self.staged(end, count));
            std::thread::yield_now();
        }
    }

    fn staged(&self, end: usize, count: fn(StagingStats) -> u64) -> u64 {
        let channels = self.peers[end].stats().channels.into_iter();
        channels.filter_map(|channel| channel.staging).map(count).sum()
    }

    /// No connection was lost, and other transfers go on.
    fn goes_on(self) {
        let Scene { ends: [near, far], peers, gpu, .. } = self;
        let [source, target] = [&near, &far].map(|end| end.alloc_cuda(gpu.index(), 1 << 20).unwrap());
        moves(&peers[0], &source, &target, 7);
        assert_eq!(peers.map(|peer| peer.stats().lost_channels), [const { Vec::<String>::new() }; 2]);
    }
}

/// Drops the source of each write before, while and after it is copied, and reuses its memory.
fn drop_sources(copies: Copies, test: &str) {
    let Some(mut scene) = Scene::new(copies, test) else { return };
    let spread_bytes = copies.spread_bytes();
    let buffer = scene.gpu.alloc(spread_bytes, 4096).unwrap();
    let mut complete = 0;
    for round in 0..ROUNDS {
        let held = scene.hold_of(round).is_some();
        scene.gpu.write_from_slice(buffer.address(), &vec![CONTENT; spread_bytes]).unwrap();
        // SAFETY: the buffer stays until the end.
        let source = unsafe { scene.ends[0].register_raw(buffer.as_ptr(), spread_bytes) }.unwrap();
        let target = scene.ends[1].alloc_host(spread_bytes).unwrap();
        let list = scene.list(&source, &target);
        let sent_bytes = |staging: StagingStats| staging.sent_bytes;
        let before = scene.staged(0, sent_bytes);
        scene.hold_of(round).inspect(|hold| hold.begin());
        let write = scene.peers[0].write_blocks(&list, None, None).unwrap();
        drop(list);
        match held {
            true => scene.until_staged(0, sent_bytes, before + 1),
            false => scene.pause(),
        }
        // Held copies keep this waiting until the engine gives up.
        drop(source);
        assert!(!held || write.poll().is_none(), "{:?}: copies were held", write.poll());
        scene.gpu.write_from_slice(buffer.address(), &vec![REUSED; spread_bytes]).unwrap();
        scene.hold_of(round).inspect(|hold| hold.end());
        let written = write.wait(LONG);
        complete += u64::from(written.is_ok());
        let found = contents(&target);
        assert!(!found.contains(&REUSED), "{written:?}: bytes of reused memory were sent");
        assert!(!held || written.is_err(), "{written:?}: nothing was copied before the drop");
        let placed = found.iter().filter(|byte| **byte == CONTENT).count() as u64;
        assert!(written.is_err() || placed == copies.bytes(), "{placed} bytes placed of a complete write");
    }
    println!("{complete} of {ROUNDS} writes complete, held: {}", scene.hold.is_some());
    scene.goes_on();
}

/// Cancels the receive of each message before, while and after it is copied, and compares what both ends report.
fn cancel_receives(copies: Copies, test: &str) {
    let Some(mut scene) = Scene::new(copies, test) else { return };
    let (runs, spread_bytes, bytes) = (copies.runs(), copies.spread_bytes(), copies.bytes());
    let [near, far] = scene.peers.clone();
    let targets = [scene.on_gpu(1), scene.on_gpu(1)];
    let received_bytes = |staging: StagingStats| staging.received_bytes;
    let mut counts = [0; 3];
    for round in 0..ROUNDS {
        let held = scene.hold_of(round).is_some();
        let message = pattern(bytes as usize, round);
        let source = scene.ends[0].register(message.clone()).unwrap();
        targets.iter().for_each(|target| target.write_at(0, &vec![0; spread_bytes]).unwrap());
        let before = scene.staged(1, received_bytes);
        scene.hold_of(round).inspect(|hold| hold.begin());
        let receive_into = |target: &Region| far.recv_blocks(round, target, &runs).unwrap();
        let early: Option<Transfer> = (held || scene.rng.random::<bool>()).then(|| receive_into(&targets[0]));
        let send = near.send(round, &source, 0, bytes).unwrap();
        let receive = early.unwrap_or_else(|| receive_into(&targets[0]));
        match held {
            true => scene.until_staged(1, received_bytes, before + bytes),
            false => scene.pause(),
        }
        receive.cancel();
        scene.hold_of(round).inspect(|hold| hold.end());
        let first = receive.wait(LONG);
        // After a receive was cancelled nothing more is placed into its memory.
        if first.is_err() {
            targets[0].write_at(0, &vec![REUSED; spread_bytes]).unwrap();
        }
        // A message that the first receive did not take is the second one's, unless it was refused to its sender.
        let again = receive_into(&targets[1]);
        let sent = send.wait(LONG);
        if first.is_ok() || sent.is_err() {
            again.cancel();
        }
        let second = again.wait(LONG);
        let outcomes = format!("held: {held}, {sent:?}, {first:?}, {second:?}");
        let takers = usize::from(first.is_ok()) + usize::from(second.is_ok());
        assert_eq!(takers, usize::from(sent.is_ok()), "{outcomes}");
        if held {
            assert_eq!(first, Err(TransferError::Cancelled), "{outcomes}");
            assert!(matches!(sent, Err(TransferError::AccessRefused { .. })), "{outcomes}");
        }
        counts[if first.is_ok() { 0 } else { 1 + usize::from(second.is_err()) }] += 1;
        for (target, outcome) in targets.iter().zip([&first, &second]) {
            let found = contents(target);
            let found = runs.iter().flat_map(|(offset, bytes)| &found[*offset as usize..][..*bytes as usize]);
            assert!(outcome.is_err() || found.eq(&message), "{outcomes}: other bytes");
        }
        let reused = first.is_ok() || contents(&targets[0]).iter().all(|byte| *byte == REUSED);
        assert!(reused, "{outcomes}: bytes placed after the cancellation");
    }
    let [first, second, refused] = counts;
    println!(
        "{first} received at first, {second} by the second receive, {refused} refused, held: {}",
        scene.hold.is_some()
    );
    scene.goes_on();
}

#[test]
fn nothing_is_sent_of_dropped_memory_though_the_copy_engines_were_slow() {
    drop_sources(
        Copies::Engines,
        "outcomes::nothing_is_sent_of_dropped_memory_though_the_copy_engines_were_slow",
    );
}

#[test]
fn nothing_is_sent_of_short_runs_of_dropped_memory_though_the_kernel_was_slow() {
    drop_sources(
        Copies::Kernel,
        "outcomes::nothing_is_sent_of_short_runs_of_dropped_memory_though_the_kernel_was_slow",
    );
}

#[test]
fn a_cancelled_receive_refuses_missing_bytes_though_copy_engines_are_slow() {
    cancel_receives(
        Copies::Engines,
        "outcomes::a_cancelled_receive_refuses_missing_bytes_though_copy_engines_are_slow",
    );
}

#[test]
fn a_cancelled_receive_of_short_runs_refuses_missing_bytes_though_the_kernel_is_slow() {
    cancel_receives(
        Copies::Kernel,
        "outcomes::a_cancelled_receive_of_short_runs_refuses_missing_bytes_though_the_kernel_is_slow",
    );
}
