//! `SIGPIPE`: ignoring it, and suppressing it for one call.
//!
//! Every send in `socket.rs` passes `MSG_NOSIGNAL`. `splice` has no such flag, so the engine blocks the
//! signal around it. A program that writes to pipes should ignore the signal.

use std::io;
use std::mem;
use std::ptr;

/// Ignores `SIGPIPE` in this process: a write to a closed pipe then returns `EPIPE` instead of ending the
/// process.
pub fn ignore_sigpipe() -> io::Result<()> {
    // SAFETY: `SIG_IGN` is a valid disposition, and no handler runs.
    let previous = unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    if previous == libc::SIG_ERR { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Runs `call` with `SIGPIPE` blocked for the current thread, and discards a signal that `call` raised. The
/// process's signal disposition does not change. A call can transfer some bytes, meet the closed end and
/// still succeed; `whole` returns true for a result that rules this out, so pending signals are not checked.
pub(crate) fn without_sigpipe<T>(call: impl FnOnce() -> T, whole: impl FnOnce(&T) -> bool) -> T {
    // SAFETY: all zero is a valid signal set.
    let (mut pipe, mut before, mut pending): (libc::sigset_t, libc::sigset_t, libc::sigset_t) =
        unsafe { (mem::zeroed(), mem::zeroed(), mem::zeroed()) };
    // SAFETY: the signal sets and the signal are valid. A signal that is pending before the call belongs to
    // the program.
    let waits = unsafe {
        libc::sigemptyset(&mut pipe);
        libc::sigaddset(&mut pipe, libc::SIGPIPE);
        libc::pthread_sigmask(libc::SIG_BLOCK, &pipe, &mut before);
        libc::sigismember(&before, libc::SIGPIPE) == 1
            && libc::sigpending(&mut pending) == 0
            && libc::sigismember(&pending, libc::SIGPIPE) == 1
    };
    let result = call();
    // SAFETY: the signal sets were filled by the calls above, and the signal is valid.
    unsafe {
        if !waits && !whole(&result) {
            let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            libc::sigtimedwait(&pipe, ptr::null_mut(), &now);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, ptr::null_mut());
    }
    result
}

#[cfg(test)]
mod tests {
    use std::io::{self, Write};
    use std::sync::atomic::{AtomicU32, Ordering};

    static SIGNALS: AtomicU32 = AtomicU32::new(0);

    extern "C" fn count(_signal: libc::c_int) {
        SIGNALS.fetch_add(1, Ordering::SeqCst);
    }

    #[test]
    fn writing_to_a_closed_pipe_is_an_error() {
        // SAFETY: a handler that only counts.
        unsafe { libc::signal(libc::SIGPIPE, count as *const () as libc::sighandler_t) };
        let (reader, mut writer) = io::pipe().unwrap();
        drop(reader);
        for signals in [0, 0, 1] {
            let result = match signals {
                // The result is not asked for, as that of a call that had done a part of its work.
                0 => super::without_sigpipe(|| writer.write(b"x"), |_| false),
                _ => writer.write(b"x"),
            };
            assert_eq!(result.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
            assert_eq!(SIGNALS.load(Ordering::SeqCst), signals, "held back, and only there");
        }
        super::ignore_sigpipe().unwrap();
        let (reader, mut writer) = std::io::pipe().unwrap();
        drop(reader);
        assert_eq!(writer.write(b"x").unwrap_err().kind(), std::io::ErrorKind::BrokenPipe);
    }
}
