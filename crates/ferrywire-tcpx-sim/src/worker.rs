//! The threads that move the chunks of a comm.
//!
//! Each thread serves its share of the data sockets and sleeps in `poll` when no socket has work. A fatal
//! socket error ends the thread without a report: its chunks never finish, and only the host's own timeout
//! can detect that.
//! Invariant: a chunk's bytes are moved in order, and nothing is touched after the thread was joined.
//! Read next: `transfer.rs`, the socket calls.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::faults::{Direction, Faults};
use crate::gpu::GpuPool;
use crate::lane::{Chunk, Lane, Work};
use crate::log::exit_1;
use crate::metadata::ENTRIES_PER_SLOT;
use crate::pool::Carver;
use crate::random::Random;
use crate::rate::Rate;
use crate::sync::Wake;
use crate::transfer::{self, Landing, Moved, Stage};

/// Pause in milliseconds after which a worker without pages tries again.
const STARVED_PAUSE_MS: i32 = 1;
/// Interval at which a worker that waits for its NIC's rate checks whether it has to stop.
const STOP_CHECK: Duration = Duration::from_millis(10);

/// State that the workers share with their comm.
#[derive(Debug)]
pub struct Shared {
    /// Number of the comm among those of its direction in this process, from 1.
    pub id: u64,
    /// The direction of the comm.
    pub direction: Direction,
    /// Whether idle workers spin instead of sleeping.
    pub spin: bool,
    /// Faults that are injected for this comm.
    pub faults: Faults,
    /// The allowance of the NIC's rate; `None` without a limit.
    pub rate: Option<Arc<Rate>>,
    /// The pool for GPU payload; `None` for host memory only.
    pub landing: Option<Arc<GpuPool>>,
    /// Whether GPU payload arrives in linear host memory, which is fatal.
    pub linear: bool,
    /// Whether each receive call into host memory logs a warning.
    pub host_warning: bool,
    /// Whether writing to a dead peer raises SIGPIPE.
    pub sigpipe: bool,
    /// Seed of the workers' random choices.
    pub seed: u64,
    /// Whether fragments are scattered over shuffled pages.
    pub scatter: bool,
    /// Longest fragment in bytes.
    pub fragment_bytes: u32,
    /// Whether a worker has died.
    pub dead: AtomicBool,
    /// Number of bytes of moved chunks.
    pub bytes: AtomicU64,
    /// Number of pages that were taken for this comm.
    pub pages_taken: AtomicU64,
}

/// The running workers of a comm.
#[derive(Debug)]
pub struct Crew {
    stop: Arc<AtomicBool>,
    workers: Vec<(Arc<Wake>, JoinHandle<()>)>,
}

impl Crew {
    /// Starts `threads` workers over the sockets; each serves every `threads`-th socket.
    pub fn start(shared: &Arc<Shared>, lanes: &[Arc<Lane>], threads: usize) -> std::io::Result<Crew> {
        let stop = Arc::new(AtomicBool::new(false));
        let mut workers = Vec::new();
        for k in 0..threads {
            let lanes: Vec<Arc<Lane>> = lanes.iter().skip(k).step_by(threads).cloned().collect();
            let wake = Arc::new(Wake::new()?);
            let worker = Worker::new(shared.clone(), stop.clone(), wake.clone(), lanes, k);
            let name = format!("tcpx-{}{}-{k}", shared.direction.letter(), shared.id);
            workers.push((wake, thread::Builder::new().name(name).spawn(move || worker.run())?));
        }
        Ok(Crew { stop, workers })
    }

    /// Wakes the worker of a socket for a new chunk.
    pub fn wake(&self, lane: usize) {
        let (wake, _) = &self.workers[lane % self.workers.len()];
        wake.wake();
    }

    /// Stops the workers at once and waits until they have ended.
    pub fn stop(self) {
        self.stop.store(true, Ordering::SeqCst);
        self.workers.iter().for_each(|(wake, _)| wake.wake());
        for (_, worker) in self.workers {
            let _ = worker.join();
        }
    }
}

/// The state of one worker thread.
struct Worker {
    shared: Arc<Shared>,
    stop: Arc<AtomicBool>,
    wake: Arc<Wake>,
    lanes: Vec<Arc<Lane>>,
    current: Vec<Option<Chunk>>,
    /// Number of bytes that each socket has received into pages.
    landed: Vec<u64>,
    /// The stage for sends from real device memory.
    stage: Option<Stage>,
    random: Random,
    carver: Carver,
}

/// The outcome of a pass over one socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    /// Bytes were moved, or a chunk ended.
    Progress,
    /// The socket has no chunk, or is not ready.
    Nothing,
    /// The pool has no free page.
    Starved,
}

impl Worker {
    fn new(
        shared: Arc<Shared>,
        stop: Arc<AtomicBool>,
        wake: Arc<Wake>,
        lanes: Vec<Arc<Lane>>,
        index: usize,
    ) -> Worker {
        let stream = shared.id * 64 + index as u64;
        let seed = Random::new(shared.seed, stream).next();
        let carver = Carver::new(seed, shared.scatter, shared.fragment_bytes);
        let landed = vec![0; lanes.len()];
        let current = lanes.iter().map(|_| None).collect();
        let random = Random::new(shared.seed, !stream);
        Worker { shared, stop, wake, lanes, current, landed, stage: None, random, carver }
    }

    fn run(mut self) {
        while !self.stopped() {
            let turns: Result<Vec<Turn>, ()> = (0..self.lanes.len()).map(|k| self.turn(k)).collect();
            match turns {
                Err(()) => return self.shared.dead.store(true, Ordering::SeqCst),
                Ok(turns) if turns.contains(&Turn::Progress) => {}
                Ok(_) if self.shared.spin => thread::yield_now(),
                Ok(turns) => self.sleep(turns.contains(&Turn::Starved)),
            }
        }
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    /// Makes one socket call for a chunk of a socket.
    fn turn(&mut self, k: usize) -> Result<Turn, ()> {
        let Some(mut chunk) = self.current[k].take().or_else(|| self.lanes[k].next()) else {
            return Ok(Turn::Nothing);
        };
        let turn = if chunk.moved < chunk.len { self.advance(k, &mut chunk)? } else { Turn::Progress };
        if chunk.moved == chunk.len {
            Worker::check_fragments(&chunk);
            self.lanes[k].finish(chunk);
        } else {
            self.current[k] = Some(chunk);
        }
        Ok(turn)
    }

    fn advance(&mut self, k: usize, chunk: &mut Chunk) -> Result<Turn, ()> {
        let most = self.allowance(chunk.len - chunk.moved);
        let fd = self.lanes[k].fd();
        let moved = match &chunk.work {
            Work::Send { source, cuda: None } => {
                transfer::send(fd, source.wrapping_add(chunk.moved), most, &self.shared)
            }
            Work::Send { source, cuda: Some(device) } => {
                let kept = self.stage.take().filter(|stage| stage.device() == *device);
                let stage = self.stage.insert(kept.or_else(|| Stage::new(*device)).ok_or(())?);
                stage.send(fd, *source as u64 + chunk.moved as u64, most, &self.shared)
            }
            Work::Host { target } => transfer::recv(fd, target.wrapping_add(chunk.moved), most, &self.shared),
            Work::Pages { record } => {
                let pool = self.shared.landing.as_ref().ok_or(())?;
                let landing = Landing { pool, carver: &self.carver, record, position: self.landed[k] };
                let moved = transfer::recv_pages(fd, &landing, most, &mut chunk.fragments, &self.shared);
                self.after_landing(k, moved);
                moved
            }
        };
        match moved {
            Moved::Bytes(bytes) => {
                chunk.moved += bytes;
                self.account(bytes);
                Ok(Turn::Progress)
            }
            Moved::NotReady => Ok(Turn::Nothing),
            Moved::Starved => Ok(Turn::Starved),
            Moved::Failed => Err(()),
        }
    }

    /// Ends the process if payload of this host was received into pages, since it never crosses a NIC.
    fn after_landing(&mut self, k: usize, moved: Moved) {
        let Moved::Bytes(bytes) = moved else { return };
        if self.shared.linear {
            exit_1(format_args!(
                "fatal, comm {} data landed on host memory 1 times (payload of this host never crosses a NIC; \
                 FERRYWIRE_TCPX_SIM=same_host=allow lets the simulated plugin take it)",
                self.shared.id
            ));
        }
        self.landed[k] += bytes as u64;
    }

    /// Number of bytes that the next call may move, after the injected delay.
    fn allowance(&mut self, wanted: usize) -> usize {
        let delay_us = self.random.within(&self.shared.faults.delay_us);
        if delay_us > 0 {
            thread::sleep(Duration::from_micros(delay_us));
        }
        let most = self.shared.rate.as_ref().map_or(wanted, |rate| wanted.min(rate.quantum()));
        if self.shared.faults.partial_io { 1 + self.random.below(most as u64) as usize } else { most }
    }

    fn account(&self, bytes: usize) {
        self.shared.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        let Some(rate) = &self.shared.rate else { return };
        let until = rate.charge(bytes);
        while !self.stopped() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            thread::sleep(left.min(STOP_CHECK));
        }
    }

    fn check_fragments(chunk: &Chunk) {
        if chunk.fragments.len() >= ENTRIES_PER_SLOT {
            exit_1(format_args!(
                "received {0}/{ENTRIES_PER_SLOT} segs, failstop, {0} fragments in one chunk",
                chunk.fragments.len()
            ));
        }
    }

    /// Sleeps until a socket with a chunk is ready, a chunk is queued, or, briefly, until pages may be free.
    fn sleep(&self, starved: bool) {
        self.wake.prepare();
        let mut woken = false;
        let has_work = |k: usize| self.current[k].is_none() && self.lanes[k].is_waiting();
        if !self.stopped() && !(0..self.lanes.len()).any(has_work) {
            let events = match self.shared.direction {
                Direction::Send => libc::POLLOUT,
                Direction::Recv => libc::POLLIN,
            };
            let mut fds = vec![libc::pollfd { fd: self.wake.fd(), events: libc::POLLIN, revents: 0 }];
            let busy = (0..self.lanes.len()).filter(|k| !starved && self.current[*k].is_some());
            fds.extend(busy.map(|k| libc::pollfd { fd: self.lanes[k].fd(), events, revents: 0 }));
            let timeout_ms = if starved { STARVED_PAUSE_MS } else { -1 };
            // SAFETY: the kernel writes only into `fds`, whose length is given.
            unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, timeout_ms) };
            woken = fds[0].revents != 0;
        }
        self.wake.awake(woken);
    }
}
