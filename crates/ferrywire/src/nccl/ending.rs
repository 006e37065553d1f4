//! How a plugin ends the process it runs in: the likely cause, and a hook that tells it.
//!
//! Plugins call `exit` where they should return an error, inside a call or on a thread of their own, often
//! without a word. Who supervises the process hears of it there ([`super::log::tee_to_fd`], [`super::Watched`]).
//! In a program that hosts a plugin itself, the hook prints one line to standard error: plugin, call, device,
//! what the plugin logged last, the likely cause. Against signals only a process of its own helps.
//!
//! Invariant: an end that the program itself wants is not told: the thread that ends the process has to be in
//! a plugin's call, or code of a plugin has to be on its stack.
//! Read next: `clock.rs`, which knows the calls; `watched.rs`.

use std::ffi::{c_int, c_void};
use std::panic::catch_unwind;
use std::sync::{Mutex, Once, PoisonError};

use super::clock::{self, PluginId};
use super::log::{self, LastLines, LogLine};
use super::watched;

/// The likely cause of a plugin's end, from how the process ended and what was said before, in words.
pub fn likely_cause(how: &str, said: &str) -> &'static str {
    let (how, said) = (how.to_lowercase(), said.to_lowercase());
    let causes: [(bool, &str); 9] = [
        (
            said.contains("cmsg"),
            "GPU memory was received that did not cross a NIC, as within one host, or the NIC does not split headers",
        ),
        (
            said.contains("fragments"),
            "messages too large for the plugin's table of fragments: use smaller chunks",
        ),
        (
            said.contains("dp-manager") || said.contains("unix"),
            "the plugin's manager does not run on this host",
        ),
        (said.contains("cuda") || said.contains("gpu"), "the GPU, or what the plugin may do with it"),
        (how.contains("has not returned"), "a peer or NIC the plugin waits for without end"),
        (how.contains("said nothing"), "the process is stopped, or the host has no time for it"),
        (how.contains("sigpipe"), "the plugin wrote to a peer that is gone"),
        (how.contains("sigkill"), "memory ran out, or somebody ended it"),
        (how.contains("signal"), "a defect of the plugin, or a call that it does not support"),
    ];
    causes.iter().find(|(fits, _)| *fits).map_or("an error after which the plugin gives up", |cause| cause.1)
}

/// Where the libraries of plugins lie.
static LIBRARIES: Mutex<Vec<(usize, PluginId)>> = Mutex::new(Vec::new());

/// From now on an `exit` by this plugin, whose table is at `address`, is told.
pub(super) fn watch(plugin: PluginId, address: *const c_void) {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        watched::report();
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
    if watched::tell_exit(&plugin, &place) || log::is_teed() {
        return None;
    }
    let of_plugin = |line: &LogLine| line.plugin.as_ref().is_none_or(|name| *name == plugin);
    let said = log::last_lines().into_iter().filter(of_plugin).collect::<LastLines>().told();
    let likely = likely_cause("exit", &said);
    Some(format!("ferrywire: plugin {plugin} ended this process by exit {place}; {said}; likely: {likely}\n"))
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
    use super::likely_cause;

    #[test]
    fn likely_causes_are_told_from_how_it_ended_and_what_it_said() {
        let exit = "the plugin ended its process with exit status 1";
        assert!(likely_cause(exit, "no cmsg in this message").contains("did not cross a NIC"));
        assert!(likely_cause(exit, "it had logged nothing").contains("gives up"));
        assert!(likely_cause(exit, "2048 fragments in one chunk").contains("smaller chunks"));
        assert!(likely_cause("died by signal 11 (SIGSEGV)", "").contains("defect"));
        assert!(likely_cause("died by signal 13 (SIGPIPE)", "").contains("gone"));
        assert!(likely_cause("test has not returned", "").contains("without end"));
    }
}
