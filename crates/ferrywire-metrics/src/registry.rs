//! The sources of this process, and the counts of sources that were dropped.
//!
//! Invariant: each count of a peer is in the samples exactly once: as the peer's own until the peer is retired, then under
//! its label while a live peer has the same one, and in the peer named [`CLOSED`] afterwards. So no counter of a
//! label falls, and labels of closed peers do not accumulate.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use prometheus::{Histogram, HistogramOpts, HistogramVec, exponential_buckets};

use crate::fork::PerProcess;
use crate::sample::{ChannelSample, PeerSample, ProcessSample};

/// Name of the peer in which the counts of closed peers are summed.
pub(crate) const CLOSED: &str = "closed";
/// Most NICs of closed peers with counts of their own; more are summed as `other`.
const CLOSED_NICS_MAX: usize = 64;
/// How often a sample waits for threads that are dropping a source, before it goes on without the counts of that source.
const RETIRE_YIELDS_MAX: usize = 1000;

/// An object whose counters a scrape reads.
pub trait Source: Send + Sync {
    /// Reads the counters of this source; must not block.
    fn sample(&self) -> PeerSample;
}

/// The kind of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A one-sided write.
    Write,
    /// A one-sided read.
    Read,
    /// A message to the peer.
    Send,
    /// A message from the peer.
    Recv,
    /// A notification without a transfer.
    Notify,
    /// The answer to a peer's read.
    Serve,
}

impl Kind {
    /// All kinds of operations; a kind's number is its index here.
    pub const ALL: [Kind; 6] = [Kind::Write, Kind::Read, Kind::Send, Kind::Recv, Kind::Notify, Kind::Serve];

    /// The kind's name in labels of metrics.
    pub fn name(self) -> &'static str {
        ["write", "read", "send", "recv", "notify", "serve"][self as usize]
    }
}

#[derive(Default)]
struct Sources {
    live: Vec<Live>,
    /// Counts of closed peers, by their label, which a live peer has too.
    kept: BTreeMap<String, PeerSample>,
    closed: PeerSample,
    /// Sessions that were refused because the peer did not prove the secret.
    auth_failures: u64,
}

/// A source, and the label of its samples.
struct Live {
    label: String,
    source: Weak<dyn Source>,
}

impl Live {
    /// Whether the source is being dropped, and was not retired yet.
    fn is_ending(&self) -> bool {
        self.source.strong_count() == 0
    }
}

/// Adds the counts of a closed peer to those under the label `label`.
fn add_closed(sum: &mut PeerSample, label: &str, counts: &PeerSample) {
    let mut counts = counts.clone();
    if sum.channels.len() >= CLOSED_NICS_MAX {
        let new = |channel: &&mut ChannelSample| !sum.channels.iter().any(|known| known.nic == channel.nic);
        counts.channels.iter_mut().filter(new).for_each(|channel| channel.nic = "other".into());
    }
    (sum.peer, sum.label) = (CLOSED.into(), label.into());
    sum.retire(&counts);
}

/// What this process counts.
struct Registry {
    sources: Mutex<Sources>,
    times: LazyLock<Times>,
    threads: Mutex<Threads>,
}

static REGISTRY: PerProcess<Registry> = PerProcess::new(|| Registry {
    sources: Mutex::default(),
    times: LazyLock::new(Times::new),
    threads: Mutex::default(),
});
static TIMED: AtomicBool = AtomicBool::new(false);
static FACE: OnceLock<&'static str> = OnceLock::new();

fn sources() -> MutexGuard<'static, Sources> {
    REGISTRY.get().sources.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adds a source whose samples have the label `label`. Its counters are part of all samples; its drop has to [`retire`] it.
pub fn register(label: String, source: Weak<dyn Source>) {
    sources().live.push(Live { label, source });
}

/// Keeps the counts of a source that is being dropped: under its label while another source has the same one, then in the
/// peer named `closed`.
pub fn retire(last: &PeerSample) {
    let mut sources = sources();
    let Sources { live, kept, closed, .. } = &mut *sources;
    // A forked child may drop a source of its parent.
    let Some(its) = live.iter().position(|each| each.is_ending() && each.label == last.label) else { return };
    live.swap_remove(its);
    let sum = kept.entry(last.label.clone()).or_default();
    add_closed(sum, &last.label, last);
    if !live.iter().any(|each| each.label == last.label)
        && let Some(counts) = kept.remove(&last.label)
    {
        add_closed(closed, CLOSED, &counts);
    }
}

/// Says how this process uses ferrywire; the first call counts.
pub fn set_face(face: &'static str) {
    let _ = FACE.set(face);
}

/// Counts a session that was refused because the peer did not prove the secret.
pub fn count_auth_failure() {
    sources().auth_failures += 1;
}

/// Whether times of operations are to be recorded.
pub fn are_timed() -> bool {
    TIMED.load(Ordering::Relaxed)
}

pub(crate) fn time_from_now_on() {
    TIMED.store(true, Ordering::Relaxed);
}

/// The histograms of transfers and of posts, with one child per kind, so that recording looks nothing up.
pub(crate) struct Times {
    transfer: HistogramVec,
    post: HistogramVec,
    transfer_of: [Histogram; Kind::ALL.len()],
    post_of: [Histogram; Kind::ALL.len()],
}

impl Times {
    fn new() -> Times {
        let made = |name: &str, help: &str, start: f64, count: usize| {
            let buckets = exponential_buckets(start, 4.0, count).expect("constants that are positive");
            HistogramVec::new(HistogramOpts::new(name, help).buckets(buckets), &["kind"])
                .expect("constant names")
        };
        let transfer = made(
            "ferrywire_transfer_seconds",
            "Time from the post of an operation to its end, in seconds.",
            4e-6,
            14,
        );
        let post = made(
            "ferrywire_post_seconds",
            "Time that the call which posts an operation takes, in seconds.",
            1e-6,
            10,
        );
        let of = |family: &HistogramVec| Kind::ALL.map(|kind| family.with_label_values(&[kind.name()]));
        Times { transfer_of: of(&transfer), post_of: of(&post), transfer, post }
    }

    pub(crate) fn families(&self) -> [&HistogramVec; 2] {
        [&self.transfer, &self.post]
    }
}

/// The times of this process's operations.
pub(crate) fn times() -> &'static Times {
    &REGISTRY.get().times
}

/// Records the time from an operation's post to its end.
pub fn record_transfer(kind: Kind, time: Duration) {
    // A child that has a peer has registered it, so this is not its parent's. Asking for the process would be a system call.
    REGISTRY.last().times.transfer_of[kind as usize].observe(time.as_secs_f64());
}

/// Records the time of the call that posted an operation.
pub fn record_post(kind: Kind, time: Duration) {
    REGISTRY.last().times.post_of[kind as usize].observe(time.as_secs_f64());
}

/// Reads all sources of this process.
pub fn process() -> ProcessSample {
    let (live, kept, closed, auth_failures) = {
        let mut sources = sources();
        // The counts of a source that another thread is dropping are nowhere until that thread has retired it.
        for _ in 0..RETIRE_YIELDS_MAX {
            if !sources.live.iter().any(Live::is_ending) {
                break;
            }
            drop(sources);
            thread::yield_now();
            sources = self::sources();
        }
        let live: Vec<_> = sources.live.iter().filter_map(|each| each.source.upgrade()).collect();
        let kept: Vec<_> = sources.kept.values().cloned().collect();
        (live, kept, sources.closed.clone(), sources.auth_failures)
    };
    let mut peers: Vec<PeerSample> = live.iter().map(|source| source.sample()).collect();
    // The sources are dropped without the lock: a source that ends here is retired.
    drop(live);
    peers.extend(kept);
    if !closed.peer.is_empty() {
        peers.push(closed);
    }
    let cpu = cpu_seconds();
    ProcessSample {
        pid: std::process::id(),
        program: program(),
        face: FACE.get().copied().unwrap_or("rust").into(),
        at_s: now(),
        cpu_s: cpu.current,
        ended_cpu_s: cpu.ended,
        total_cpu_s: cpu.total,
        auth_failures,
        peers,
        ..ProcessSample::default()
    }
}

fn program() -> String {
    std::fs::read_to_string("/proc/self/comm").map_or_else(|_| "?".into(), |name| name.trim_end().into())
}

/// Seconds of the host's monotonic clock.
fn now() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// A thread: its id, and the time at which it began, because ids are used again.
type Thread = (u32, u64);

/// CPU times of threads whose name begins with `ferrywire`, in nanoseconds.
#[derive(Default)]
struct Threads {
    /// Time of the threads that [`thread_ends`] was called for.
    ended_ns: u64,
    /// Time of other threads that have ended, as of the last sample with them: short-lived ones, and those of another library.
    gone_ns: u64,
    /// Time of the threads in the last sample.
    seen_ns: HashMap<Thread, u64>,
}

fn threads() -> MutexGuard<'static, Threads> {
    REGISTRY.get().threads.lock().unwrap_or_else(PoisonError::into_inner)
}

/// CPU times of the threads of this process whose name begins with `ferrywire`, in seconds.
struct CpuSeconds {
    /// Of threads that run, and of this library's that have ended.
    current: f64,
    /// Of this library's threads that have ended.
    ended: f64,
    /// Of all threads that were in a sample; never shrinks.
    total: f64,
}

fn cpu_seconds() -> CpuSeconds {
    let mut threads = threads();
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let mut live: HashMap<Thread, u64> = tasks.filter_map(|task| cpu_ns_of(&task.path())).collect();
    for (thread, before) in std::mem::take(&mut threads.seen_ns) {
        // A list may lack a thread that runs, if another one ends meanwhile.
        let of_thread = || cpu_ns_of(&Path::new("/proc/self/task").join(thread.0.to_string()));
        match live
            .get(&thread)
            .copied()
            .or_else(|| of_thread().filter(|now| now.0 == thread).map(|now| now.1))
        {
            Some(now) => drop(live.insert(thread, now.max(before))),
            None => threads.gone_ns += before,
        }
    }
    let current = threads.ended_ns + live.values().sum::<u64>();
    threads.seen_ns = live;
    let seconds = |ns: u64| ns as f64 / 1e9;
    CpuSeconds {
        current: seconds(current),
        ended: seconds(threads.ended_ns),
        total: seconds(current + threads.gone_ns),
    }
}

/// Keeps the CPU time of the calling thread, which is about to end. Of other threads that end, the time since the last
/// sample is lost.
pub fn thread_ends() {
    let mut threads = threads();
    let path = Path::new("/proc/thread-self");
    // The thread is renamed first, so that it is not counted twice while it is still listed.
    if let Some((thread, ns)) = cpu_ns_of(path)
        && std::fs::write(path.join("comm"), "ended").is_ok()
    {
        threads.ended_ns += ns.max(threads.seen_ns.remove(&thread).unwrap_or(0));
    }
}

/// A thread and its CPU time in nanoseconds; `None` if the thread is not one of ferrywire's.
fn cpu_ns_of(task: &Path) -> Option<(Thread, u64)> {
    let stat = std::fs::read_to_string(task.join("stat")).ok()?;
    // The name of a thread is in parentheses and may contain any character.
    let (id, rest) = stat.split_once(" (")?;
    let (name, rest) = rest.rsplit_once(')')?;
    if !name.starts_with("ferrywire") {
        return None;
    }
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    let number = |index: usize| fields.get(index)?.parse::<u64>().ok();
    let thread = (id.parse().ok()?, number(19)?);
    // A worker that moves little, since callers move their own bytes, runs for less than a clock tick.
    let precise = std::fs::read_to_string(task.join("schedstat")).ok();
    if let Some(ns) = precise.as_deref().and_then(|text| text.split_ascii_whitespace().next()?.parse().ok()) {
        return Some((thread, ns));
    }
    let (user, kernel) = (number(11)?, number(12)?);
    Some((thread, ((user + kernel) as f64 / ticks_per_second() * 1e9) as u64))
}

fn ticks_per_second() -> f64 {
    // SAFETY: the call takes a number and returns one.
    let ticks = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    if ticks > 0 { ticks as f64 } else { 100.0 }
}
