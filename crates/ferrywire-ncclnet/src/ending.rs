//! How a plugin ends the process it runs in: what explains it, and a hook that tells it.
//!
//! Plugins call `exit` where they should return an error, inside a call or on a thread of their own, often
//! without a word. Who supervises the process hears of it there ([`super::log::tee_to_fd`], [`super::SupervisedProcess`]).
//! In a program that hosts a plugin itself, the hook prints one line to standard error: plugin, call, device,
//! what the plugin warned of last, and the fix where the cause is known. Against signals only a process of its own helps.
//!
//! Invariant: an end that the program itself wants is not told: the thread that ends the process has to be in
//! a plugin's call, or code of a plugin has to be on its stack.
//! Read next: `cause.rs`, what warnings tell; `clock.rs`, which knows the calls; `supervised.rs`.

use std::ffi::{c_int, c_void};
use std::panic::catch_unwind;
use std::sync::{Mutex, Once, PoisonError};

use super::clock::{self, PluginId};
use super::log::{self, LastLines, LogLine};
use super::supervised;

/// How a process that hosts a plugin came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EndKind {
    /// It called `exit`.
    Exit,
    /// This signal ended it.
    Signal(i32),
    /// A call of the plugin did not return, so that the process was ended.
    CallHangs,
    /// It said nothing any more, so that it was ended.
    Silent,
}

/// What a plugin had logged when its process ended, and what follows from it: the fix, where one of its last warnings
/// tells the cause; else the likely cause, where the kind of the end alone tells one.
pub fn explained(end: EndKind, logged: &LastLines) -> String {
    let told = logged.told();
    match (logged.cause(), likely(end)) {
        (Some((cause, _)), _) => format!("{told}; fix: {}", cause.fix()),
        (None, Some(likely)) => format!("{told}; likely: {likely}"),
        (None, None) => told,
    }
}

fn likely(end: EndKind) -> Option<&'static str> {
    match end {
        EndKind::Signal(libc::SIGPIPE) => Some("the plugin wrote to a peer that is gone"),
        EndKind::Signal(libc::SIGKILL) => Some("memory ran out, or another process ended it"),
        EndKind::Signal(libc::SIGSEGV | libc::SIGBUS | libc::SIGILL | libc::SIGFPE | libc::SIGABRT) => {
            Some("a defect of the plugin, or a call that it does not support")
        }
        EndKind::Silent => Some("the process is stopped, or the host has no time for it"),
        EndKind::Exit | EndKind::Signal(_) | EndKind::CallHangs => None,
    }
}

/// Where the libraries of plugins lie.
static LIBRARIES: Mutex<Vec<(usize, PluginId)>> = Mutex::new(Vec::new());

/// From now on an `exit` by this plugin, whose table is at `address`, is told.
pub(super) fn watch(plugin: PluginId, address: *const c_void) {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        supervised::report();
        // SAFETY: the handler does not unwind, and is there for as long as the code around it. Where there is
        // no room for it, nothing is told.
        let _ = unsafe { libc::atexit(at_exit) };
    });
    if let Some(base) = base_of(address) {
        LIBRARIES.lock().unwrap_or_else(PoisonError::into_inner).push((base, plugin));
    }
}

extern "C" fn at_exit() {
    let _ = catch_unwind(|| {
        if let Some(line) = told() {
            // SAFETY: the bytes are a whole string of ours.
            unsafe { libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len()) };
        }
    });
}

/// What there is to say about this end of the process; `None` where it is none of a plugin's, or somebody
/// else says it.
fn told() -> Option<String> {
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

/// The plugin whose code has called what runs here.
fn plugin_on_stack() -> Option<PluginId> {
    let libraries = LIBRARIES.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let mut search = Search { libraries, found: None };
    // SAFETY: the frames of this thread are looked at, and `search` outlives the call.
    unsafe { _Unwind_Backtrace(look, (&raw mut search).cast()) };
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
        look: unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int,
        search: *mut c_void,
    ) -> c_int;
    fn _Unwind_GetIP(frame: *mut c_void) -> usize;
}

/// # Safety
/// A frame of the unwinder's, and a [`Search`].
unsafe extern "C" fn look(frame: *mut c_void, search: *mut c_void) -> c_int {
    // SAFETY: by the caller's promise.
    let (code, search) = unsafe { (_Unwind_GetIP(frame), &mut *search.cast::<Search>()) };
    // The address is behind the call, which may be a function's last instruction.
    let base = base_of(std::ptr::without_provenance(code.saturating_sub(1)));
    search.found = search.libraries.iter().find(|(library, _)| Some(*library) == base).map(|(_, id)| *id);
    if search.found.is_some() { STOP } else { CONTINUE }
}

/// Where the library begins that holds an address.
fn base_of(address: *const c_void) -> Option<usize> {
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: any address may be asked for; the pointer is to a whole Dl_info.
    let found = unsafe { libc::dladdr(address, info.as_mut_ptr()) } != 0;
    // SAFETY: pointers alone, null until they are set.
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
    fn a_warning_with_a_known_cause_is_told_with_its_fix_whatever_the_end() {
        let landed = logged(LogLevel::Warn, "fatal, a->b data landed on host memory 1 times");
        for end in [EndKind::Exit, EndKind::CallHangs, EndKind::Signal(libc::SIGSEGV)] {
            let said = explained(end, &landed);
            assert!(
                said.starts_with("it warned: fatal, a->b data landed on host memory 1 times; fix: header"),
                "{said}"
            );
        }
    }

    /// "unix" and "GPU" stand in the first lines of every run.
    #[test]
    fn nothing_is_guessed() {
        let start = logged(LogLevel::Info, "NET/GPUDirectTCPX : unix client prefix /run/tcpx");
        let told = "it logged last: NET/GPUDirectTCPX : unix client prefix /run/tcpx";
        assert_eq!(explained(EndKind::Exit, &start), told);
        assert_eq!(explained(EndKind::CallHangs, &start), told);
        let segfault = explained(EndKind::Signal(libc::SIGSEGV), &start);
        assert_eq!(
            segfault,
            format!("{told}; likely: a defect of the plugin, or a call that it does not support")
        );
        assert!(explained(EndKind::Signal(libc::SIGPIPE), &LastLines::new()).contains("gone"));
    }
}
