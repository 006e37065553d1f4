//! NCCL's logger.
//!
//! The logger is C-variadic, so the finished text is passed as the argument of `"%s"`. Lines are written only on NCCL's
//! threads, inside a call of NCCL, so the logger is valid whenever it is used.
//! Invariant: without a logger, lines are lost and nothing else changes.

use std::collections::HashSet;
use std::ffi::{CString, c_int, c_ulong};
use std::fmt::Arguments;
use std::sync::{LazyLock, Mutex, PoisonError, RwLock};

use ferrywire_ncclnet::abi::{LOG_INFO, LOG_WARN, Log, subsystem};

static LOGGER: RwLock<Log> = RwLock::new(None);

/// Keeps the logger of the latest `init` that passed one.
pub fn set_logger(logger: Log) {
    if logger.is_some() {
        *LOGGER.write().unwrap_or_else(PoisonError::into_inner) = logger;
    }
}

/// Logs a line that is shown whenever NCCL shows warnings.
pub fn warn(text: Arguments<'_>) {
    line(LOG_WARN, subsystem::ALL, text);
}

/// Most different lines that are logged once: hundreds of comms report the same problem.
const TOLD_MAX: usize = 1024;

/// Logs a warning, at most once per text.
pub fn warn_once(text: Arguments<'_>) {
    warn_once_of(&text.to_string(), text);
}

/// Logs a warning, at most once for each `what`.
pub fn warn_once_of(what: &str, text: Arguments<'_>) {
    static TOLD: LazyLock<Mutex<HashSet<String>>> = LazyLock::new(Mutex::default);
    let mut reported = TOLD.lock().unwrap_or_else(PoisonError::into_inner);
    if reported.len() < TOLD_MAX && reported.insert(what.to_owned()) {
        drop(reported);
        warn(text);
    }
}

/// Logs a line for `NCCL_DEBUG=INFO`.
pub fn info(text: Arguments<'_>) {
    line(LOG_INFO, subsystem::INIT | subsystem::NET, text);
}

fn line(level: c_int, flags: c_ulong, text: Arguments<'_>) {
    let Some(log) = *LOGGER.read().unwrap_or_else(PoisonError::into_inner) else { return };
    let text = format!("NET/ferrywire : {text}").replace('\0', " ");
    let text = CString::new(text).unwrap_or_default();
    // SAFETY: `init` was given a logger of this signature; the strings end in NUL and outlive the call.
    unsafe { log(level, flags, c"ferrywire".as_ptr(), 0, c"%s".as_ptr(), text.as_ptr()) }
}
