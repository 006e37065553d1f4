//! Signals.
//!
//! Every send in `socket.rs` passes `MSG_NOSIGNAL`, so the engine needs nothing from here; a program that
//! writes to pipes does.

use std::io;

/// Makes a write to a closed pipe an error (`EPIPE`) instead of the end of the process.
pub fn ignore_sigpipe() -> io::Result<()> {
    // SAFETY: `SIG_IGN` is a valid disposition, and no handler runs.
    let previous = unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    if previous == libc::SIG_ERR { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    #[test]
    fn writing_to_a_closed_pipe_is_an_error() {
        super::ignore_sigpipe().unwrap();
        let (reader, mut writer) = std::io::pipe().unwrap();
        drop(reader);
        assert_eq!(writer.write(b"x").unwrap_err().kind(), std::io::ErrorKind::BrokenPipe);
    }
}
