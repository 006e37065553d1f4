//! How a plugin ended its process: an explanation for errors, and an exit hook that prints it.
//!
//! Plugins call `exit` where they should return an error, inside a call or on a thread of their own, often
//! without a message. A supervisor learns of it through [`super::log::tee_to_fd`] and
//! [`super::SupervisedProcess`]. In a program that hosts a plugin itself, the hook prints one line to
//! standard error: plugin, call, device, the plugin's last warnings, and the fix where the cause is known.
//! Only a process of its own protects against signals.
//!
//! Invariant: an exit that the program itself wants is not reported: the exiting thread must be in a plugin's
//! call, or have a plugin's code on its stack.
//! Read next: `cause.rs`, the causes that warnings state; `clock.rs`, which knows the calls; `supervised.rs`.

use std::ffi::{c_int, c_void};
use std::panic::catch_unwind;
use std::sync::{Mutex, Once, PoisonError};

use super::clock::{self, PluginId};
use super::log::{self, LastLines, LogLine};
use super::supervised;

/// How a process that hosted a plugin ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EndKind {
    /// The process called `exit`.
    Exit,
    /// This signal ended the process.
    Signal(i32),
    /// A plugin call did not return, so the supervisor ended the process.
    CallHangs,
    /// The process stopped responding, so the supervisor ended it.
    Silent,
}

/// A plugin's last log lines before its process ended, followed by the fix when a warning states a known
/// cause, else by the likely cause when the kind of end suggests one.
pub fn explained(end: EndKind, logged: &LastLines) -> String {
    let summary = logged.summary();
    match (logged.cause(), likely(end)) {
        (Some((cause, _)), _) => format!("{summary}; fix: {}", cause.fix()),
        (None, Some(likely)) => format!("{summary}; likely: {likely}"),
        (None, None) => summary,
    }
}

fn likely(end: EndKind) -> Option<&'static str> {
    match end {
        EndKind::Signal(libc::SIGPIPE) => Some("the plugin wrote to a connection that the peer had closed"),
        EndKind::Signal(libc::SIGKILL) => {
            Some("the host's memory ran out, or another process ended this one")
        }
        EndKind::Signal(libc::SIGSEGV | libc::SIGBUS | libc::SIGILL | libc::SIGFPE | libc::SIGABRT) => {
            Some("a defect of the plugin, or a call that it does not support")
        }
        EndKind::Silent => Some("the process is stopped, or the host is overloaded"),
        EndKind::Exit | EndKind::Signal(_) | EndKind::CallHangs => None,
    }
}

/// Base address of each loaded plugin's library.
static LIBRARIES: Mutex<Vec<(usize, PluginId)>> = Mutex::new(Vec::new());

/// Reports an `exit` by this plugin from now on. `address` is that of its table.
pub(super) fn watch(plugin: PluginId, address: *const c_void) {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        supervised::report();
        // SAFETY: the handler does not unwind and lives as long as the code around it. When the C library has
        // no room for the handler, exits are not reported.
        let _ = unsafe { libc::atexit(at_exit) };
    });
    if let Some(base) = base_of(address) {
        LIBRARIES.lock().unwrap_or_else(PoisonError::into_inner).push((base, plugin));
    }
}

extern "C" fn at_exit() {
    let _ = catch_unwind(|| {
        if let Some(line) = exit_message() {
            // SAFETY: the bytes are a whole string that this function owns.
            unsafe { libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len()) };
        }
    });
}

/// The line that reports this exit; `None` when no plugin caused it or a supervisor reports it.
fn exit_message() -> Option<String> {
    let (plugin, place) = match clock::ending_call() {
        Some((plugin, call, Some(device))) => (plugin, format!("in {call} on device {device}")),
        Some((plugin, call, None)) => (plugin, format!("in {call}")),
        None => (clock::name_of(plugin_on_stack()?), "on a thread of its own".to_owned()),
    };
    if supervised::tell_exit(&plugin, &place) || log::is_teed() {
        return None;
    }
    let of_plugin = |line: &LogLine| line.plugin.as_ref().is_none_or(|name| *name == plugin);
    let logged: LastLines = log::last_lines().into_iter().filter(of_plugin).collect();
    let explained = explained(EndKind::Exit, &logged);
    Some(format!("ferrywire: plugin {plugin} ended this process by exit {place}; {explained}\n"))
}

/// The plugin whose code is on the current thread's stack.
fn plugin_on_stack() -> Option<PluginId> {
    let libraries = LIBRARIES.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let mut search = Search { libraries, found: None };
    // SAFETY: only this thread's frames are read, and `search` outlives the call.
    unsafe { _Unwind_Backtrace(visit_frame, (&raw mut search).cast()) };
    search.found
}

struct Search {
    libraries: Vec<(usize, PluginId)>,
    found: Option<PluginId>,
}

const CONTINUE: c_int = 0;
const STOP: c_int = 5;

unsafe extern "C" {
    fn _Unwind_Backtrace(
        visit: unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int,
        search: *mut c_void,
    ) -> c_int;
    fn _Unwind_GetIP(frame: *mut c_void) -> usize;
}

/// # Safety
/// `frame` comes from the unwinder, and `search` points at a [`Search`].
unsafe extern "C" fn visit_frame(frame: *mut c_void, search: *mut c_void) -> c_int {
    // SAFETY: the caller promises a frame of the unwinder and a pointer to a `Search`.
    let (code, search) = unsafe { (_Unwind_GetIP(frame), &mut *search.cast::<Search>()) };
    // The return address lies behind the call, which may be the last instruction of a function.
    let base = base_of(std::ptr::without_provenance(code.saturating_sub(1)));
    search.found = search.libraries.iter().find(|(library, _)| Some(*library) == base).map(|(_, id)| *id);
    if search.found.is_some() { STOP } else { CONTINUE }
}

/// Base address of the library that contains `address`.
fn base_of(address: *const c_void) -> Option<usize> {
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: dladdr accepts any address; the pointer is to a whole Dl_info.
    let found = unsafe { libc::dladdr(address, info.as_mut_ptr()) } != 0;
    // SAFETY: the struct holds only pointers, which are null until dladdr sets them.
    found.then(|| unsafe { info.assume_init() }.dli_fbase as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::LogLevel;

    fn logged(level: LogLevel, text: &str) -> LastLines {
        [LogLine::new(level, None, None, b"x.cc", 1, text.as_bytes())].into_iter().collect()
    }

    #[test]
    fn a_warning_with_a_known_cause_is_reported_with_its_fix_whatever_the_end() {
        let landed = logged(LogLevel::Warn, "fatal, a->b data landed on host memory 1 times");
        for end in [EndKind::Exit, EndKind::CallHangs, EndKind::Signal(libc::SIGSEGV)] {
            let said = explained(end, &landed);
            assert!(
                said.starts_with(
                    "the plugin warned: fatal, a->b data landed on host memory 1 times; fix: header"
                ),
                "{said}"
            );
        }
    }

    /// The first lines of every run contain "unix" and "GPU".
    #[test]
    fn nothing_is_guessed() {
        let start = logged(LogLevel::Info, "NET/GPUDirectTCPX : unix client prefix /run/tcpx");
        let reported = "the plugin logged last: NET/GPUDirectTCPX : unix client prefix /run/tcpx";
        assert_eq!(explained(EndKind::Exit, &start), reported);
        assert_eq!(explained(EndKind::CallHangs, &start), reported);
        let segfault = explained(EndKind::Signal(libc::SIGSEGV), &start);
        assert_eq!(
            segfault,
            format!("{reported}; likely: a defect of the plugin, or a call that it does not support")
        );
        assert!(explained(EndKind::Signal(libc::SIGPIPE), &LastLines::new()).contains("the peer had closed"));
    }
}
