//! The trace of a process, `FERRYWIRE_TRACE`: when its transfers, chunks and stages began and ended, in the JSON array
//! format of Chrome and Perfetto.
//!
//! Threads of the engine put an event into a bounded queue when a transfer, chunk or stage ends, so that every event in
//! the file is complete. The thread `ferrywire-trace` writes the file, and ends it when the last endpoint closes. Without
//! that end only the closing bracket is missing, and the format allows that.
//!
//! Invariants: without a trace a hook costs one relaxed load, and nothing is allocated. No thread that moves payload
//! waits for the file.
//! Read next: `trace/file.rs`, the file; `staging/stopwatch.rs` and `channel/`, which record events.

mod file;

use crate::core::operation::Op;
use crate::error::{Error, Result};
use crossbeam_queue::ArrayQueue;
use ferrywire_metrics::Kind;
use ferrywire_proto::limits;
use file::TraceFile;
use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

const VARIABLE: &str = "FERRYWIRE_TRACE";
/// Longest wait for the end of the file when the last endpoint closes.
const END_TIMEOUT: Duration = Duration::from_secs(5);

static ON: AtomicBool = AtomicBool::new(false);
static EVENTS: OnceLock<ArrayQueue<Event>> = OnceLock::new();
/// Number of events kept for the file so far; `DROPPED` counts those that found the queue full.
static KEPT: AtomicU64 = AtomicU64::new(0);
static DROPPED: AtomicU64 = AtomicU64::new(0);
static CHANNELS: Mutex<BTreeMap<Track, ChannelName>> = Mutex::new(BTreeMap::new());
/// The process that writes the trace; 0 before it begins.
static PROCESS: AtomicU32 = AtomicU32::new(0);
static TRACE: Mutex<Trace> = Mutex::new(Trace { endpoints: 0, state: State::New });

// ---- hooks ----

/// Whether a trace is written.
#[inline]
pub(crate) fn is_on() -> bool {
    ON.load(Ordering::Relaxed)
}

/// The number of a channel in the trace of this process; 0 for no channel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Track(u32);

impl Track {
    pub fn next() -> Track {
        static LAST: AtomicU32 = AtomicU32::new(0);
        Track(LAST.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// The row of the trace that shows a stage of this channel.
    pub fn row(self, stage: Stage) -> Row {
        Row { track: self, stage, number: 0 }
    }

    /// Names the channel, once it is connected.
    pub fn name(self, name: impl FnOnce() -> ChannelName) {
        if is_on() {
            let mut channels = CHANNELS.lock().unwrap_or_else(PoisonError::into_inner);
            if channels.len() < limits::TRACE_CHANNELS_MAX {
                channels.entry(self).or_insert_with(name);
            }
        }
    }

    /// The beginning of a chunk on this channel, if a trace is written.
    #[inline]
    pub fn chunk(self) -> Option<ChunkStart> {
        is_on().then(|| ChunkStart { track: self, since: Instant::now() })
    }
}

/// How the trace names a channel.
pub(crate) struct ChannelName {
    pub peer: String,
    pub index: u16,
    pub nic: String,
    pub worker: usize,
}

/// A stage of payload on its way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stage {
    #[default]
    D2h,
    H2d,
    /// Socket calls.
    Socket(Direction),
    /// A full staging ring keeps payload waiting.
    Waiting(Direction),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Direction {
    Tx,
    Rx,
}

/// A row of the trace, whose events do not overlap: a stage of a channel, and of one GPU if it is a copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Row {
    track: Track,
    stage: Stage,
    /// Index of the GPU among those of the channel.
    number: usize,
}

impl Row {
    /// The row of the copies of a GPU, the `number`th of this row's channel.
    pub fn of_copies(self, stage: Stage, number: usize) -> Row {
        Row { stage, number, ..self }
    }

    /// Records a stage that began at `since` and ends now, unless it is of no channel; `bytes` is recorded for socket stages
    /// only.
    #[inline]
    pub fn ends(self, since: Instant, bytes: usize) {
        if is_on() && self.track != Track::default() {
            record(self.track, What::Stage(self), since, bytes as u64, 0);
        }
    }
}

/// When a chunk began, and the channel that carries it.
#[derive(Clone, Copy)]
pub(crate) struct ChunkStart {
    track: Track,
    since: Instant,
}

impl ChunkStart {
    /// Records a chunk of a transfer that is placed now.
    pub fn placed(self, direction: Direction, transfer: u64, bytes: u64) {
        record(self.track, What::Chunk(direction), self.since, bytes, transfer);
    }
}

/// Records a transfer, which ends now. `track` is any channel of its peer.
pub(crate) fn transfer_ended(track: Track, op: &Op, since: Instant) {
    if is_on() {
        record(track, What::Transfer { kind: op.kind(), failed: op.failed() }, since, op.moved(), op.id);
    }
}

struct Event {
    track: Track,
    what: What,
    since: Instant,
    until: Instant,
    bytes: u64,
    /// The transfer's number at its source; 0 for a stage.
    transfer: u64,
}

enum What {
    Transfer { kind: Kind, failed: bool },
    Chunk(Direction),
    Stage(Row),
}

#[cold]
fn record(track: Track, what: What, since: Instant, bytes: u64, transfer: u64) {
    let fits = KEPT.fetch_add(1, Ordering::Relaxed) < limits::TRACE_EVENTS_MAX;
    let event = Event { track, what, since, until: Instant::now(), bytes, transfer };
    let kept = fits && EVENTS.get().is_some_and(|events| events.push(event).is_ok());
    if !kept {
        KEPT.fetch_sub(1, Ordering::Relaxed);
        DROPPED.fetch_add(1, Ordering::Relaxed);
    }
}

// ---- begin and end ----

/// The trace of this process.
struct Trace {
    /// Endpoints that are not closed.
    endpoints: usize,
    state: State,
}

/// `new -> writing -> ended -> writing`, and `lost` if the end of the file took too long.
enum State {
    New,
    Writing { stop: Sender<()>, ended: Receiver<TraceFile> },
    Ended(TraceFile),
    Lost,
}

fn trace() -> MutexGuard<'static, Trace> {
    TRACE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps the trace open for one endpoint: the file ends when the last of these is dropped.
pub(crate) struct Tracing {
    process: u32,
}

/// Begins the trace if `FERRYWIRE_TRACE` asks for one, or joins the trace that another endpoint has begun.
///
/// # Errors
/// [`Error::Invalid`] if the file cannot be written.
pub(crate) fn start() -> Result<Option<Tracing>> {
    let Some(name) = std::env::var_os(VARIABLE).filter(|name| !name.is_empty()) else { return Ok(None) };
    let process = std::process::id();
    // A forked child has no trace thread, and the locks are in an unknown state.
    let began = PROCESS.compare_exchange(0, process, Ordering::SeqCst, Ordering::SeqCst);
    if began.is_err_and(|other| other != process) {
        ON.store(false, Ordering::SeqCst);
        tracing::warn!("{VARIABLE}: a forked child process writes no trace");
        return Ok(None);
    }
    let mut trace = trace();
    if trace.endpoints == 0 && !matches!(trace.state, State::Lost) {
        let cannot =
            |path: &str, error: io::Error| Error::invalid(VARIABLE, format!("cannot write {path}: {error}"));
        let file = match std::mem::replace(&mut trace.state, State::New) {
            State::Ended(file) => file.go_on().map_err(|(path, error)| cannot(&path, error)),
            _ => {
                let name = name
                    .into_string()
                    .map_err(|name| Error::invalid(VARIABLE, format!("{} is not UTF-8", name.display())))?;
                TraceFile::create(&name, process).map_err(|(path, error)| cannot(&path, error))
            }
        }?;
        EVENTS.get_or_init(|| ArrayQueue::new(limits::TRACE_EVENTS_WAITING_MAX));
        let ((stop, stopped), (end, ended)) = (mpsc::channel(), mpsc::channel());
        let run = move || drop(end.send(file.write_until(&stopped)));
        let thread = std::thread::Builder::new().name("ferrywire-trace".into()).spawn(run);
        thread.map_err(|error| Error::io("start a thread", &error))?;
        trace.state = State::Writing { stop, ended };
        ON.store(true, Ordering::SeqCst);
    }
    trace.endpoints += 1;
    Ok(Some(Tracing { process }))
}

impl Drop for Tracing {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            return;
        }
        let mut trace = trace();
        trace.endpoints -= 1;
        if trace.endpoints > 0 {
            return;
        }
        ON.store(false, Ordering::SeqCst);
        trace.state = match std::mem::replace(&mut trace.state, State::Lost) {
            State::Writing { stop, ended } => {
                drop(stop);
                match ended.recv_timeout(END_TIMEOUT) {
                    Ok(file) => State::Ended(file),
                    Err(_) => {
                        tracing::warn!(
                            "{VARIABLE}: the trace file is not complete: writing it takes too long"
                        );
                        State::Lost
                    }
                }
            }
            other => other,
        };
    }
}
