//! The host's logger, and the ways in which the plugin ends a process.
//!
//! The logger is C-variadic: finished text is passed as the argument of `"%s"`. Before the process ends, the reason is
//! written to the logger and to stderr.
//! Invariant: a missing logger loses lines and nothing else.

use std::ffi::{CString, c_int};
use std::fmt::Arguments;
use std::io::Write;
use std::sync::OnceLock;

use ferrywire_ncclnet::abi::{LOG_INFO, LOG_WARN, Log, subsystem};

static LOGGER: OnceLock<Log> = OnceLock::new();

/// Keeps the host's logger; the first one stays.
pub fn set_logger(logger: Log) {
    let _ = LOGGER.set(logger);
}

/// Logs a line of the given level.
pub fn line(level: c_int, line: u32, text: Arguments<'_>) {
    let Some(Some(log)) = LOGGER.get() else { return };
    let text = CString::new(text.to_string().replace('\0', " ")).unwrap_or_default();
    // SAFETY: `init` was given a logger of this signature; the strings end in NUL and outlive the call.
    unsafe {
        log(level, subsystem::NET, c"tcpx_sim".as_ptr(), line as c_int, c"%s".as_ptr(), text.as_ptr());
    }
}

/// Logs a warning; the arguments are those of `format!`.
macro_rules! warning {
    ($($arg:tt)*) => { $crate::log::line($crate::log::WARN, line!(), format_args!($($arg)*)) };
}

/// Logs a line of information; the arguments are those of `format!`.
macro_rules! info {
    ($($arg:tt)*) => { $crate::log::line($crate::log::INFO, line!(), format_args!($($arg)*)) };
}

pub(crate) use {info, warning};

/// Level of the lines of [`warning!`].
pub const WARN: c_int = LOG_WARN;
/// Level of the lines of [`info!`].
pub const INFO: c_int = LOG_INFO;

/// Writes the last line of a process in one piece. `eprintln!` writes several, and another thread that ends the process meanwhile
/// left a line without an end, to which the host's error was joined.
fn last_line(why: Arguments<'_>) {
    let _ = std::io::stderr().write_all(format!("tcpx-sim: {why}\n").as_bytes());
}

/// Ends the process by `exit(1)`, which runs exit handlers, where the real plugin does the same.
pub fn exit_1(why: Arguments<'_>) -> ! {
    warning!("{why}: exit(1)");
    last_line(format_args!("{why}: exit(1)"));
    // SAFETY: the call ends the process; the C library runs the exit handlers.
    unsafe { libc::exit(1) }
}

/// Ends the process by SIGABRT and names the rule that the host has broken; the real plugin would use freed
/// or foreign memory.
pub fn misuse(why: Arguments<'_>) -> ! {
    warning!("misuse: {why}");
    last_line(format_args!("misuse: {why}"));
    std::process::abort()
}

/// Writes through a null pointer, where the real plugin does the same.
pub fn segfault(why: Arguments<'_>) -> ! {
    warning!("{why}: SIGSEGV");
    last_line(format_args!("{why}: SIGSEGV"));
    // SAFETY: no memory is mapped at the address, and the fault is intended.
    unsafe { std::ptr::without_provenance_mut::<u64>(8).write_volatile(0) };
    std::process::abort()
}
