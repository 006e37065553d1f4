//! Logs to standard error at the level of `FERRYWIRE_LOG` (off, error, warn, info or debug; `warn` by default).
//!
//! Lines that an operator has to see once, such as the transport that carries the bytes, are silenced only by `off`.

use std::collections::HashSet;
use std::fmt::Arguments;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{LazyLock, Mutex, Once, PoisonError};

use tracing_subscriber::filter::LevelFilter;

/// Most different lines that are logged once; further ones are dropped.
const LINES_ONCE_MAX: usize = 1024;

fn level() -> LevelFilter {
    let asked = std::env::var("FERRYWIRE_LOG").unwrap_or_default();
    // The parser does not accept an empty text.
    let asked = Some(asked.trim()).filter(|asked| !asked.is_empty());
    asked.and_then(|asked| asked.parse().ok()).unwrap_or(LevelFilter::WARN)
}

/// Starts the log, also of the engine's lines.
pub fn start() {
    static START: Once = Once::new();
    START.call_once(|| {
        let lines = tracing_subscriber::fmt()
            .with_writer(std::io::stderr)
            .with_ansi(false)
            .with_max_level(level())
            // Else a line that cannot be written is reported on standard error by a call that panics.
            .log_internal_errors(false);
        // The library has its own copy of `tracing`'s global default, which no other code sets.
        let _ = lines.try_init();
    });
}

/// Logs a line that an operator has to see, unless the log is off.
pub fn announce(text: Arguments<'_>) {
    if level() != LevelFilter::OFF {
        // An error of a closed standard error is ignored.
        let _ = writeln!(std::io::stderr(), "ferrywire: {text}");
    }
}

/// Logs why a call fails in a forked child, at most once per child. Takes no lock: another thread of the parent may have
/// held it at the fork.
pub fn announce_in_child(text: Arguments<'_>) {
    static TOLD: AtomicBool = AtomicBool::new(false);
    if level() != LevelFilter::OFF && !TOLD.swap(true, Ordering::Relaxed) {
        let line = format!("ferrywire: {text}\n");
        // SAFETY: the line lives during the call. An error of a closed standard error is ignored.
        unsafe { libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len()) };
    }
}

/// Logs a line that an operator has to see, at most once per process.
pub fn announce_once(text: Arguments<'_>) {
    static TOLD: LazyLock<Mutex<HashSet<String>>> = LazyLock::new(Mutex::default);
    let line = text.to_string();
    let mut reported = TOLD.lock().unwrap_or_else(PoisonError::into_inner);
    if reported.len() < LINES_ONCE_MAX && reported.insert(line) {
        drop(reported);
        announce(text);
    }
}
