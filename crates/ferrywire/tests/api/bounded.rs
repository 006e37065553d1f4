//! Bounds of a whole process, whatever its endpoints and channels: pipes whose pages are lent to sockets, and pinned memory of
//! staging rings. Each test runs in a process of its own, where no other test has pipes or rings.

use crate::LIMIT;
use crate::outcomes::{contents, pattern};
use ferrywire::{Endpoint, Peer, StagingStats, limits};
use ferrywire_memory::sim::SimGpu;
use std::collections::HashSet;
use std::fs;
use std::io::{self, PipeReader, PipeWriter};
use std::os::fd::AsRawFd;
use std::process::Command;
use std::thread;
use std::time::Instant;

/// Set in a process in which only one test runs.
const ALONE: &str = "FERRYWIRE_TEST_ALONE";

/// Whether this is a process in which only that test runs. If not, sees the test pass in such a process.
fn is_alone(test: &str) -> bool {
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    let output = child.args(["--exact", test, "--nocapture"]).env(ALONE, "1").output().unwrap();
    let said =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
    println!("{said}");
    false
}

/// Two connected endpoints, and the first one's peer.
struct Pair {
    ends: [Endpoint; 2],
    peers: [Peer; 2],
}

impl Pair {
    fn new(channels: usize) -> Pair {
        let builder = || Endpoint::builder().channels(channels).threads(1);
        let far = builder().listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
        let near = builder().build().unwrap();
        let peer = near.connect(far.listen_addresses()[0], LIMIT).unwrap();
        let peers = [peer, far.accept(LIMIT).unwrap()];
        Pair { ends: [near, far], peers }
    }

    /// Writes from a simulated GPU to the same one at the other end, and checks every byte.
    fn write(&self, gpu: u32, bytes: usize, salt: u64) {
        let [source, target] = self.ends.each_ref().map(|end| end.alloc_sim(gpu, bytes).unwrap());
        source.write_at(0, &pattern(bytes, salt)).unwrap();
        let write = self.peers[0].write(&source, 0, &target.descriptor(), 0, bytes as u64).unwrap();
        assert_eq!(write.wait(LIMIT), Ok(bytes as u64));
        assert!(contents(&target) == pattern(bytes, salt), "a write of {bytes} bytes arrived wrong");
    }

    /// The staging statistics of an end's channels that have staged anything.
    fn staging(&self, end: usize) -> impl Iterator<Item = StagingStats> {
        self.peers[end].stats().channels.into_iter().filter_map(|channel| channel.staging)
    }

    /// Pinned memory of both ends' staging, in bytes.
    fn pinned_bytes(&self) -> usize {
        self.staging(0).chain(self.staging(1)).map(|staging| staging.pinned_bytes as usize).sum()
    }

    fn close(self) {
        let [near, far] = self.peers;
        near.close(LIMIT).unwrap();
        drop(far);
        self.ends.iter().for_each(|end| end.close(LIMIT).unwrap());
    }
}

/// Pipes that this process has open.
fn pipes() -> usize {
    let links =
        fs::read_dir("/proc/self/fd").unwrap().filter_map(|file| fs::read_link(file.unwrap().path()).ok());
    let pipes: HashSet<_> = links.filter(|link| link.to_string_lossy().starts_with("pipe:")).collect();
    pipes.len()
}

/// Whether this user may have so many pipes more: those of a user without privileges share a quota.
fn may_have_pipes(count: usize) -> bool {
    let room = |pipe: &(PipeReader, PipeWriter)| {
        // SAFETY: an open pipe; no memory is passed.
        unsafe {
            libc::fcntl(pipe.1.as_raw_fd(), libc::F_SETPIPE_SZ, limits::LENDING_PIPE_BYTES as libc::c_int)
        }
    };
    let pipes: Vec<_> = (0..count).map(|_| io::pipe().unwrap()).collect();
    pipes.iter().all(|pipe| room(pipe) >= limits::LENDING_PIPE_BYTES as libc::c_int)
}

/// Channels whose turn comes first have pipes, and those that come too late copy. Pipes of closed channels are others'.
#[test]
fn sockets_are_lent_pages_through_so_many_pipes_and_no_more() {
    const CHANNELS: usize = limits::LENDING_PIPES_MAX + 16;
    if !is_alone("bounded::sockets_are_lent_pages_through_so_many_pipes_and_no_more") {
        return;
    }
    if !may_have_pipes(limits::LENDING_PIPES_MAX) {
        return println!("SKIPPED: needs a user who may have {} pipes", limits::LENDING_PIPES_MAX);
    }
    let before = pipes();
    for round in 0..2 {
        let pair = Pair::new(CHANNELS);
        let (begun, mut most) = (Instant::now(), 0);
        // Each of them has sent something long enough to be lent.
        let all_have_sent = || pair.staging(0).filter(|staging| staging.sent_bytes > 0).count() == CHANNELS;
        while !all_have_sent() {
            assert!(begun.elapsed() < LIMIT, "round {round}: not all channels have sent");
            pair.write(0, CHANNELS * limits::STAGING_CHUNK_BYTES_MIN, round);
            most = most.max(pipes() - before);
        }
        println!("round {round}: {most} pipes, {CHANNELS} channels");
        assert_eq!(most, limits::LENDING_PIPES_MAX, "round {round}");
        pair.close();
        let begun = Instant::now();
        while pipes() > before {
            assert!(begun.elapsed() < LIMIT, "round {round}: {} pipes of closed channels", pipes() - before);
            thread::yield_now();
        }
    }
}

/// Beyond the bound of all together new rings are small, and data go through them as through others. Room of rings that
/// are gone is for new ones.
#[test]
fn rings_beyond_the_bound_are_small() {
    const GPUS: u32 = limits::SIM_GPUS_MAX as u32;
    const LARGE: usize = limits::STAGING_OUT_RING_BYTES;
    const _: () = assert!(LARGE == limits::STAGING_IN_RING_BYTES);
    if !is_alone("bounded::rings_beyond_the_bound_are_small") {
        return;
    }
    // They are the same ones all the time.
    let _open: Vec<_> = (0..GPUS).map(|gpu| SimGpu::open(gpu).unwrap()).collect();
    // A pair over one channel has two rings of each GPU: to send from at one end, to receive into at the other.
    let rings_of_pair = 2 * GPUS as usize;
    let all_large = limits::STAGING_RINGS_BYTES / LARGE;
    let mut pairs: Vec<Pair> = Vec::new();
    let expected = |rings: usize| {
        let large = rings.min(all_large);
        large * LARGE + (rings - large) * limits::STAGING_SMALL_RING_BYTES
    };
    while pairs.len() * rings_of_pair < all_large + rings_of_pair {
        let pair = Pair::new(1);
        for gpu in 0..GPUS {
            pair.write(gpu, 1000, u64::from(gpu));
        }
        pairs.push(pair);
        until_pinned(&pairs, expected(pairs.len() * rings_of_pair));
    }
    println!("{} rings, {} MiB", pairs.len() * rings_of_pair, expected(pairs.len() * rings_of_pair) >> 20);
    // Many times what a small ring holds.
    pairs[pairs.len() - 1].write(0, 5 * LARGE + 1, 1);
    until_pinned(&pairs, expected(pairs.len() * rings_of_pair));
    pairs.drain(..2).for_each(Pair::close);
    let pair = Pair::new(1);
    pair.write(0, 1000, 2);
    until_pinned(&[pair], 2 * LARGE);
}

/// Waits until these pairs say that they have so much pinned memory: an end may count it after a write has ended.
fn until_pinned(pairs: &[Pair], bytes: usize) {
    let (begun, pinned) = (Instant::now(), || pairs.iter().map(Pair::pinned_bytes).sum::<usize>());
    while pinned() != bytes {
        assert!(begun.elapsed() < LIMIT / 4, "{} bytes are pinned, not {bytes}", pinned());
        thread::yield_now();
    }
}
