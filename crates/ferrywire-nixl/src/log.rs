//! Lines on standard error, as `FERRYWIRE_LOG` asks for (`warn` unless it says otherwise: off, error, warn, info, debug).
//!
//! What an operator has to see once, such as the path that carries the bytes, is a line of its own that only `off`
//! silences.

use std::collections::HashSet;
use std::fmt::Arguments;
use std::io::Write;
use std::sync::{LazyLock, Mutex, Once, PoisonError};

use tracing_subscriber::filter::LevelFilter;

/// Lines that are told once, at most.
const TOLD_MAX: usize = 1024;

fn level() -> LevelFilter {
    let asked = std::env::var("FERRYWIRE_LOG").unwrap_or_default();
    // The parser takes no text at all for `error`.
    let asked = Some(asked.trim()).filter(|asked| !asked.is_empty());
    asked.and_then(|asked| asked.parse().ok()).unwrap_or(LevelFilter::WARN)
}

/// Lets the engine's own lines out too.
pub fn start() {
    static START: Once = Once::new();
    START.call_once(|| {
        let lines =
            tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).with_max_level(level());
        // The library has its own copy of the global default, which nothing else sets.
        let _ = lines.try_init();
    });
}

/// A line that an operator has to see.
pub fn announce(text: Arguments<'_>) {
    if level() != LevelFilter::OFF {
        // Where nobody reads standard error, nothing can be told.
        let _ = writeln!(std::io::stderr(), "ferrywire: {text}");
    }
}

/// The same, the first time that it is to be said in this process.
pub fn announce_once(text: Arguments<'_>) {
    static TOLD: LazyLock<Mutex<HashSet<String>>> = LazyLock::new(Mutex::default);
    let line = text.to_string();
    let mut told = TOLD.lock().unwrap_or_else(PoisonError::into_inner);
    if told.len() < TOLD_MAX && told.insert(line) {
        drop(told);
        announce(text);
    }
}
