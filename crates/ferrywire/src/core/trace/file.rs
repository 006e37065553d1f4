//! The file of a trace: its lock, its events as JSON, and its end.
//!
//! Invariant: up to the end, each write appends whole events to a JSON array that lacks only its closing bracket.

use super::{CHANNELS, ChannelName, DROPPED, Direction, EVENTS, Event, Row, Stage, VARIABLE, What};
use crossbeam_queue::ArrayQueue;
use ferrywire_proto::limits;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs::{File, TryLockError};
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

/// How often the events in the queue are written: a killed process loses those of the last interval.
const WRITE_INTERVAL: Duration = Duration::from_millis(10);
/// First `tid` of the file. Kernel thread ids are smaller, so no row counts as the process's main thread.
const FIRST_TID: u64 = 10_000_000;

/// The file, and what was written to it.
pub(super) struct TraceFile {
    file: File,
    path: String,
    process: u32,
    /// The same moment on the engine's clock and on the host's monotonic clock.
    clock: (Instant, Duration),
    named: BTreeSet<Row>,
    events: u64,
    /// Length of the file in bytes, without the closing brackets.
    bytes: u64,
    failed: bool,
}

/// Opens a file to write, and locks it. `None` if another process has locked it.
fn lock_file(path: &str) -> io::Result<Option<File>> {
    // Without the flag a FIFO that nothing reads would block.
    let mut options = File::options();
    let file = options.write(true).create(true).truncate(false).custom_flags(libc::O_NONBLOCK).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("the path is not a regular file"));
    }
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

impl TraceFile {
    /// Creates the file and writes its first event. A file that another process writes is left alone: this process then
    /// adds its id to the name.
    pub fn create(name: &str, process: u32) -> Result<TraceFile, (String, io::Error)> {
        let path = name.replace("%p", &process.to_string());
        let (path, file) = match lock_file(&path).map_err(|error| (path.clone(), error))? {
            Some(file) => (path, file),
            None => {
                let own = format!("{path}.{process}");
                tracing::info!("{VARIABLE}: another process writes {path}; this one writes {own}");
                match lock_file(&own) {
                    Ok(Some(file)) => (own, file),
                    Ok(None) => return Err((own, io::Error::other("another process writes this file"))),
                    Err(error) => return Err((own, error)),
                }
            }
        };
        let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let clock = (Instant::now(), Duration::new(time.tv_sec as u64, time.tv_nsec as u32));
        let named = BTreeSet::new();
        let mut file = TraceFile { file, path, process, clock, named, events: 0, bytes: 0, failed: false };
        let sample = ferrywire_metrics::process();
        let name = escaped(&format!("{} ({}), {process}", sample.program, sample.face));
        let first = format!(
            r#"[
{{"name":"process_name","ph":"M","pid":{process},"tid":{process},"args":{{"name":"{name}"}}}}"#
        );
        match file.file.set_len(0).and_then(|()| file.append(&first)) {
            Ok(()) => Ok(file),
            Err(error) => Err((file.path, error)),
        }
    }

    /// Removes the end of the file, for an endpoint that is built after all others were closed.
    pub fn go_on(mut self) -> Result<TraceFile, (String, io::Error)> {
        let cut = self.file.set_len(self.bytes).and_then(|()| self.file.seek(SeekFrom::Start(self.bytes)));
        match cut {
            Ok(_) => Ok(self),
            Err(error) => Err((self.path, error)),
        }
    }

    fn append(&mut self, text: &str) -> io::Result<()> {
        self.file.write_all(text.as_bytes())?;
        self.bytes += text.len() as u64;
        Ok(())
    }

    /// Writes events until the sender of `stopped` is dropped, and then the end of the file.
    pub fn write_until(mut self, stopped: &Receiver<()>) -> TraceFile {
        let mut text = String::new();
        loop {
            let stops = stopped.recv_timeout(WRITE_INTERVAL) != Err(RecvTimeoutError::Timeout);
            self.write_events(&mut text);
            if stops {
                let (dropped, events) = (DROPPED.load(Ordering::Relaxed), self.events);
                let (process, now) = (self.process, Microseconds(self.time(Instant::now())));
                let end = format!(
                    ",\n{{\"name\":\"end of trace\",\"ph\":\"i\",\"s\":\"p\",\"pid\":{process},\"tid\":{process},\
                     \"ts\":{now},\"args\":{{\"events\":{events},\"dropped\":{dropped}}}}}\n]\n"
                );
                if let Err(error) = self.file.write_all(end.as_bytes()) {
                    self.fail(&error);
                }
                return self;
            }
        }
    }

    /// Stops writing events, and removes what was written of the last ones.
    fn fail(&mut self, error: &io::Error) {
        self.failed = true;
        tracing::warn!(%error, path = self.path, "{VARIABLE}: cannot write the trace file: the trace ends early");
        let cut = self.file.set_len(self.bytes).and_then(|()| self.file.seek(SeekFrom::Start(self.bytes)));
        if let Err(error) = cut {
            tracing::warn!(%error, path = self.path, "{VARIABLE}: cannot shorten the trace file: its last event is cut off");
        }
    }

    fn write_events(&mut self, text: &mut String) {
        let before = self.events;
        // At most as many events as the queue holds: later ones wait for the next interval.
        for _ in 0..limits::TRACE_EVENTS_WAITING_MAX {
            let Some(event) = EVENTS.get().and_then(ArrayQueue::pop) else { break };
            if self.failed {
                DROPPED.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            self.events += 1;
            self.describe(&event, text);
        }
        if !self.failed
            && let Err(error) = self.append(text)
        {
            self.fail(&error);
            DROPPED.fetch_add(self.events - before, Ordering::Relaxed);
            self.events = before;
        }
        text.clear();
    }

    /// Time of the host's monotonic clock, so that the traces of several processes of a host have a common
    /// time.
    fn time(&self, at: Instant) -> Duration {
        self.clock.1 + at.saturating_duration_since(self.clock.0)
    }

    fn describe(&mut self, event: &Event, text: &mut String) {
        let channels = CHANNELS.lock().unwrap_or_else(PoisonError::into_inner);
        let channel = channels.get(&event.track);
        let (since, until) = (self.time(event.since), self.time(event.until));
        let (process, bytes, transfer) = (self.process, event.bytes, event.transfer);
        let number = channel.map_or(u64::from(event.track.0), |channel| u64::from(channel.index));
        let (name, category, args) = match event.what {
            What::Transfer { kind, failed } => {
                let peer = escaped(channel.map_or("", |channel| &channel.peer));
                let args =
                    format!(r#""peer":"{peer}","transfer":{transfer},"bytes":{bytes},"failed":{failed}"#);
                (kind.name().to_owned(), "transfer", args)
            }
            What::Chunk(direction) => {
                let args = format!(r#""channel":{number},"transfer":{transfer},"bytes":{bytes}"#);
                (format!("chunk {}, channel {number}", direction.name()), "chunk", args)
            }
            What::Stage(row) => {
                let name = row.stage.name();
                let tid = FIRST_TID + row.tid();
                if self.named.insert(row) {
                    let label = escaped(&row.label(number, channel));
                    let _ = write!(
                        text,
                        ",\n{{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":{process},\"tid\":{tid},\
                         \"args\":{{\"name\":\"{label}\"}}}}"
                    );
                }
                let (ts, dur) = (Microseconds(since), Microseconds(until.saturating_sub(since)));
                let _ = write!(
                    text,
                    ",\n{{\"name\":\"{name}\",\"cat\":\"stage\",\"ph\":\"X\",\"pid\":{process},\"tid\":{tid},\
                     \"ts\":{ts},\"dur\":{dur},\"args\":{{\"channel\":{number}"
                );
                // Only socket calls have bytes: copies overlap, and a wait moves nothing.
                if let Stage::Socket(_) = row.stage {
                    let _ = write!(text, ",\"bytes\":{bytes}");
                }
                text.push_str("}}");
                return;
            }
        };
        // Transfers and chunks overlap, so they are pairs of events with a number of their own.
        let id = self.events;
        let args = format!(",\"args\":{{{args}}}");
        for (phase, at, args) in [("b", since, &*args), ("e", until, "")] {
            let ts = Microseconds(at);
            let _ = write!(
                text,
                ",\n{{\"name\":\"{name}\",\"cat\":\"{category}\",\"ph\":\"{phase}\",\"id2\":{{\"local\":\"0x{id:x}\"}},\
                 \"pid\":{process},\"tid\":{process},\"ts\":{ts}{args}}}"
            );
        }
    }
}

impl Stage {
    fn name(self) -> &'static str {
        match self {
            Stage::D2h => "d2h",
            Stage::H2d => "h2d",
            Stage::Socket(_) => "socket",
            Stage::Waiting(_) => "waiting",
        }
    }
}

impl Direction {
    fn name(self) -> &'static str {
        match self {
            Direction::Tx => "tx",
            Direction::Rx => "rx",
        }
    }
}

impl Row {
    /// The number that identifies this row in the file.
    fn tid(self) -> u64 {
        let stage = match self.stage {
            Stage::D2h => 0,
            Stage::Socket(Direction::Tx) => 1,
            Stage::Waiting(Direction::Tx) => 2,
            Stage::H2d => 3,
            Stage::Socket(Direction::Rx) => 4,
            Stage::Waiting(Direction::Rx) => 5,
        };
        // A channel has fewer GPUs than this.
        (u64::from(self.track.0) << 10) + ((self.number as u64) << 3) + stage
    }

    fn label(self, number: u64, channel: Option<&ChannelName>) -> String {
        let mut label = format!("channel {number} {}", self.stage.name());
        if let Stage::Socket(direction) | Stage::Waiting(direction) = self.stage {
            let _ = write!(label, " {}", direction.name());
        }
        if self.number > 0 {
            let _ = write!(label, " {}", self.number + 1);
        }
        if let Some(ChannelName { peer, nic, worker, .. }) = channel {
            let _ = write!(label, ", {nic}, worker {worker}, {peer}");
        }
        label
    }
}

/// A time in the unit of the format: microseconds.
struct Microseconds(Duration);

impl std::fmt::Display for Microseconds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{:03}", self.0.as_micros(), self.0.subsec_nanos() % 1000)
    }
}

/// Text for a JSON string. Peers name themselves, so a name may contain anything.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for sign in text.chars() {
        match sign {
            '"' | '\\' => escaped.extend(['\\', sign]),
            sign if sign.is_control() => _ = write!(escaped, "\\u{:04x}", u32::from(sign)),
            sign => escaped.push(sign),
        }
    }
    escaped
}
