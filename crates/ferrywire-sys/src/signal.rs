//! `SIGPIPE`: ignoring it, and suppressing it for calls that have no flag for it.
//!
//! Every send in `socket.rs` passes `MSG_NOSIGNAL`. `splice` has no such flag, so the engine blocks the
//! signal. Each change of a thread's mask takes a lock of the whole process, which threads that send at a
//! high rate contend for: the engine's threads block the signal once ([`block_sigpipe`]), and callers that
//! send block it at most once per [`SigpipeScope`]. A program that writes to pipes should ignore the signal.
//!
//! Invariant: a caller's mask is the one from before when its outermost scope has ended, and a signal that was
//! pending before stays pending.
//! Read next: `lending.rs`, whose `splice` needs this.

use std::cell::Cell;
use std::io;
use std::marker::PhantomData;
use std::mem;
use std::ptr;

/// Ignores `SIGPIPE` in this process: a write to a closed pipe then returns `EPIPE` instead of ending the
/// process.
pub fn ignore_sigpipe() -> io::Result<()> {
    // SAFETY: `SIG_IGN` is a valid disposition, and no handler runs.
    let previous = unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    if previous == libc::SIG_ERR { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// What the current thread does about `SIGPIPE`.
#[derive(Clone, Copy)]
enum Suppression {
    /// Each call blocks the signal.
    PerCall,
    /// The first call blocks the signal, until the scope ends.
    InScope,
    /// The signal is blocked until the scope ends.
    Blocked(Blocked),
    /// The signal is blocked for good.
    ForGood,
}

thread_local! {
    static SUPPRESSION: Cell<Suppression> = const { Cell::new(Suppression::PerCall) };
}

/// Blocks `SIGPIPE` in the current thread for good. For threads that run no code of the program and start no
/// process, which would inherit this.
pub fn block_sigpipe() {
    SUPPRESSION.set(Suppression::ForGood);
    Blocked::new();
}

/// While this lives, the current thread blocks `SIGPIPE` at the first call that could raise it, instead of at
/// each one. The end of the outermost scope discards a signal that was raised, and restores the thread's mask.
pub struct SigpipeScope {
    is_outermost: bool,
    /// The scope belongs to its thread.
    _thread: PhantomData<*mut ()>,
}

impl SigpipeScope {
    /// Begins a scope of the current thread.
    pub fn new() -> SigpipeScope {
        let is_outermost = matches!(SUPPRESSION.get(), Suppression::PerCall);
        if is_outermost {
            SUPPRESSION.set(Suppression::InScope);
        }
        SigpipeScope { is_outermost, _thread: PhantomData }
    }
}

impl Default for SigpipeScope {
    fn default() -> SigpipeScope {
        SigpipeScope::new()
    }
}

impl Drop for SigpipeScope {
    fn drop(&mut self) {
        if self.is_outermost
            && let Suppression::Blocked(blocked) = SUPPRESSION.replace(Suppression::PerCall)
        {
            blocked.end();
        }
    }
}

/// The thread's mask before `SIGPIPE` was blocked.
#[derive(Clone, Copy)]
struct Blocked {
    before: libc::sigset_t,
    /// Whether a signal waited before: it belongs to the program.
    waited: bool,
    /// Whether a call may have raised the signal.
    raised: bool,
}

impl Blocked {
    fn new() -> Blocked {
        // SAFETY: all zero is a valid signal set.
        let (mut before, mut pending): (libc::sigset_t, libc::sigset_t) =
            unsafe { (mem::zeroed(), mem::zeroed()) };
        // SAFETY: the signal sets and the signal are valid.
        let waited = unsafe {
            libc::pthread_sigmask(libc::SIG_BLOCK, &sigpipe(), &mut before);
            libc::sigismember(&before, libc::SIGPIPE) == 1
                && libc::sigpending(&mut pending) == 0
                && libc::sigismember(&pending, libc::SIGPIPE) == 1
        };
        Blocked { before, waited, raised: false }
    }

    /// Discards the signal that a call may have raised, and restores the mask.
    fn end(self) {
        // SAFETY: the signal sets are valid.
        unsafe {
            if self.raised && !self.waited {
                let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
                libc::sigtimedwait(&sigpipe(), ptr::null_mut(), &now);
            }
            libc::pthread_sigmask(libc::SIG_SETMASK, &self.before, ptr::null_mut());
        }
    }
}

/// The set of `SIGPIPE` alone.
fn sigpipe() -> libc::sigset_t {
    // SAFETY: all zero is a valid signal set, and the signal is valid.
    unsafe {
        let mut set = mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGPIPE);
        set
    }
}

/// Runs `call` with `SIGPIPE` blocked for the current thread, and discards a signal that `call` raised, at the
/// latest when the thread's [`SigpipeScope`] ends. The process's signal disposition does not change. A call can
/// transfer some bytes, meet the closed end and still succeed; `whole` returns true for a result that rules this
/// out, so pending signals are not checked.
pub(crate) fn without_sigpipe<T>(call: impl FnOnce() -> T, whole: impl FnOnce(&T) -> bool) -> T {
    let suppression = SUPPRESSION.get();
    let mut blocked = match suppression {
        Suppression::ForGood => return call(),
        Suppression::Blocked(blocked) => blocked,
        Suppression::PerCall | Suppression::InScope => Blocked::new(),
    };
    let result = call();
    blocked.raised |= !whole(&result);
    match suppression {
        Suppression::PerCall => blocked.end(),
        _ => SUPPRESSION.set(Suppression::Blocked(blocked)),
    }
    result
}

#[cfg(test)]
mod tests {
    use std::io::{self, Write};
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::SigpipeScope;

    static SIGNALS: AtomicU32 = AtomicU32::new(0);

    extern "C" fn count(_signal: libc::c_int) {
        SIGNALS.fetch_add(1, Ordering::SeqCst);
    }

    /// Writes to a pipe whose other end is closed, as a call that had done a part of its work.
    fn write_to_closed(suppressed: bool) {
        let (reader, mut writer) = io::pipe().unwrap();
        drop(reader);
        let result = match suppressed {
            true => super::without_sigpipe(|| writer.write(b"x"), |_| false),
            false => writer.write(b"x"),
        };
        assert_eq!(result.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }

    fn is_blocked() -> bool {
        // SAFETY: a null set changes nothing, and all zero is a valid signal set.
        unsafe {
            let mut mask = std::mem::zeroed();
            libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &mut mask);
            libc::sigismember(&mask, libc::SIGPIPE) == 1
        }
    }

    /// One test, because a process has one disposition.
    #[test]
    fn writing_to_a_closed_pipe_is_an_error() {
        // SAFETY: a handler that only counts.
        unsafe { libc::signal(libc::SIGPIPE, count as *const () as libc::sighandler_t) };
        let signals = || SIGNALS.load(Ordering::SeqCst);
        for _ in 0..2 {
            write_to_closed(true);
            assert!(signals() == 0 && !is_blocked(), "held back, and only there");
        }
        {
            let _outer = SigpipeScope::new();
            assert!(!is_blocked(), "a scope without a call changes no mask");
            write_to_closed(true);
            drop(SigpipeScope::new());
            assert!(is_blocked(), "the outermost scope lasts");
            write_to_closed(true);
        }
        assert!(signals() == 0 && !is_blocked(), "held back, and only in the scope");
        std::thread::spawn(|| {
            super::block_sigpipe();
            drop(SigpipeScope::new());
            write_to_closed(true);
            assert!(is_blocked(), "for good");
        })
        .join()
        .unwrap();
        assert_eq!(signals(), 0);
        write_to_closed(false);
        assert_eq!(signals(), 1, "the program's own calls raise it");
        super::ignore_sigpipe().unwrap();
        write_to_closed(false);
        assert_eq!(signals(), 1);
    }
}
