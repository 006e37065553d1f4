//! Plugin logs: to `tracing`, to a short history for error reports, and to a supervisor.
//!
//! A plugin gets one C function to log with, without a context pointer. So a line is attributed to the plugin
//! whose call the current thread is in; on a plugin's own threads, to the only plugin that is loaded, if
//! there is just one.
//!
//! | plugin's level | `tracing` |
//! |---|---|
//! | abort | error |
//! | warn | warn |
//! | version, info, unknown ones | info |
//! | trace, none | trace |
//!
//! Some plugins warn once per received piece. A *place* is a source line at one level. Of each place
//! [`PLUGIN_LOG_BURST_LINES`] lines pass per [`PLUGIN_LOG_INTERVAL`], whatever their text; the rest is
//! counted, and the next line that passes carries the number in `held_back`. `abort` always passes.
//!
//! Invariant: no panic unwinds into the plugin, and no lock is held while `tracing` runs.
//! Read next: `log.c`, which formats; `throttle.rs`; `line.rs`; `last.rs`.

mod last;
mod line;
mod throttle;

use std::ffi::{CStr, c_char, c_int, c_ulong};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::fd::RawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

pub use last::LastLines;
pub use line::{LogLevel, LogLine};
use throttle::Throttle;

use super::{abi, clock};
#[allow(unused_imports, reason = "named in the documentation")]
use ferrywire_proto::limits::{PLUGIN_LOG_BURST_LINES, PLUGIN_LOG_INTERVAL, PLUGIN_LOG_LINES_KEPT};

unsafe extern "C" {
    fn ferrywire_nccl_log(
        level: c_int,
        subsystems: c_ulong,
        file: *const c_char,
        line: c_int,
        format: *const c_char,
        ...
    );
    fn ferrywire_nccl_log_into(sink: Option<Sink>);
}

/// Function to which `log.c` passes a formatted text.
type Sink = unsafe extern "C" fn(c_int, *const c_char, c_int, *const c_char, usize);

/// The logger that `init` passes to a plugin. Any thread may call it at any time.
pub fn logger() -> abi::Log {
    // SAFETY: the sink accepts the arguments that log.c passes, and lives for ever.
    unsafe { ferrywire_nccl_log_into(Some(sink)) };
    Some(ferrywire_nccl_log)
}

/// The last lines of all plugins, oldest first; at most [`PLUGIN_LOG_LINES_KEPT`].
pub fn last_lines() -> Vec<LogLine> {
    state().kept.iter().cloned().collect()
}

/// Writes every passing line to a descriptor too, for a supervisor that outlives this process. `None` stops
/// it.
///
/// Each line is one `write`, in the form that [`LogLine::parse`] reads, and short enough not to mix with
/// others in a pipe. A line that cannot be written is lost. Make the descriptor non-blocking if its reader
/// may stop reading.
pub fn tee_to_fd(fd: Option<RawFd>) {
    TEE.store(fd.unwrap_or(-1), Ordering::Relaxed);
}

/// Whether plugin log lines are written to a supervisor.
pub(super) fn is_teed() -> bool {
    TEE.load(Ordering::Relaxed) >= 0
}

/// Writes a line about a plugin to the supervisor only.
pub(super) fn tell_supervisor(plugin: &str, file: &str, text: &str) {
    let plugin = Some(plugin.to_owned());
    let line = LogLine::new(LogLevel::Abort, plugin, None, file.as_bytes(), 0, text.as_bytes());
    write_to(TEE.load(Ordering::Relaxed), &line);
}

/// The kept log lines whose number is at least `sequence`.
pub fn lines_since(sequence: u64) -> LastLines {
    last_lines().into_iter().filter(|line| line.sequence >= sequence).collect()
}

/// The number that the next log line will have.
pub fn next_sequence() -> u64 {
    state().next_sequence
}

static TEE: AtomicI32 = AtomicI32::new(-1);
static STATE: Mutex<State> =
    Mutex::new(State { kept: LastLines::new(), next_sequence: 0, throttle: None, began: None });

struct State {
    kept: LastLines,
    next_sequence: u64,
    throttle: Option<Throttle>,
    began: Option<Instant>,
}

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// # Safety
/// `file` is null or a C string, and `text_bytes` bytes at `text` can be read.
unsafe extern "C" fn sink(
    level: c_int,
    file: *const c_char,
    line: c_int,
    text: *const c_char,
    text_bytes: usize,
) {
    let _ = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: the caller promises that `file` is null or a C string.
        let file = if file.is_null() { c"?" } else { unsafe { CStr::from_ptr(file) } };
        // SAFETY: the caller promises that the bytes of the text can be read.
        let text = unsafe { std::slice::from_raw_parts(text.cast::<u8>(), text_bytes) };
        take(LogLevel::of(level), file.to_bytes(), line, text);
    }));
}

fn take(level: LogLevel, file: &[u8], line: c_int, text: &[u8]) {
    let mut hasher = DefaultHasher::new();
    (level, file, line).hash(&mut hasher);
    let place = hasher.finish();
    let (plugin, device) = clock::speaker();
    let line = LogLine::new(level, plugin, device, file, line, text);
    let admitted = state().admit_now(place, line);
    if let Some(line) = admitted {
        tell(&line);
    }
}

impl State {
    fn admit_now(&mut self, place: u64, line: LogLine) -> Option<LogLine> {
        let now = self.began.get_or_insert_with(Instant::now).elapsed();
        self.admit(place, line, now)
    }

    /// Numbers and keeps a log line; returns the line when the throttle lets it pass.
    fn admit(&mut self, place: u64, mut line: LogLine, now: Duration) -> Option<LogLine> {
        line.sequence = self.next_sequence;
        self.next_sequence += 1;
        let held_back = match line.level {
            LogLevel::Abort => Some(0),
            _ => self.throttle.get_or_insert_default().admit(place, now),
        };
        line.held_back = held_back.unwrap_or(0);
        self.kept.keep(line.clone());
        held_back.map(|_| line)
    }
}

fn tell(line: &LogLine) {
    write_to(TEE.load(Ordering::Relaxed), line);
    line.trace();
}

fn write_to(fd: RawFd, line: &LogLine) {
    if fd >= 0 {
        let written = line.to_line();
        // SAFETY: the bytes are a whole string that this function owns; a wrong descriptor gives EBADF.
        unsafe { libc::write(fd, written.as_ptr().cast(), written.len()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn empty() -> State {
        State { kept: LastLines::new(), next_sequence: 0, throttle: None, began: None }
    }

    fn line(level: LogLevel, text: &str) -> LogLine {
        LogLine::new(level, None, None, b"x.c", 1, text.as_bytes())
    }

    #[test]
    fn a_flood_is_held_back_but_an_abort_never_is() {
        let mut state = empty();
        let reported = |state: &mut State, level| {
            (0..100).filter(|_| state.admit(level as u64, line(level, "x"), Duration::ZERO).is_some()).count()
        };
        assert_eq!(reported(&mut state, LogLevel::Warn) as u64, PLUGIN_LOG_BURST_LINES);
        assert_eq!(reported(&mut state, LogLevel::Abort), 100);
    }
}
