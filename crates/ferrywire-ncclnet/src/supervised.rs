//! A supervised child process that hosts a plugin, for programs that must outlive the plugin.
//!
//! ```text
//!   the caller's program ── SupervisedProcess::spawn ──> a program that hosts the plugin: exits, crashes
//!          └──── SupervisedProcess::wait: how it ended <── lines of the plugin's log, over a pipe ──┘
//! ```
//!
//! The child may be the same program with other arguments. It needs no code for this: when it loads a plugin,
//! it finds the pipe in its environment. Any other communication between the two programs is their own. A
//! call that never returns does not end the child; the engine in it abandons the call, as everywhere.
//!
//! Invariant: nothing that the plugin does can end, block or change the caller's process.
//! Read next: `ending.rs`.

use std::io::{self, BufRead, BufReader, PipeReader};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use super::ending::{EndKind, explained};
use super::log::{self, LastLines, LogLine};

/// Environment variable with `pid:descriptor:device:inode`: the supervising process, and the pipe for log lines.
const VARIABLE: &str = "FERRYWIRE_PLUGIN_WATCHED";
/// Source file of the line that reports an exit; no plugin's source file has this name.
const EXIT: &str = "(exit)";

/// Whether the log lines of this process go to a supervising process.
static WATCHED: AtomicBool = AtomicBool::new(false);

/// A child process that hosts a plugin. Dropping this value leaves the process running.
#[derive(Debug)]
pub struct SupervisedProcess {
    child: Child,
    said: JoinHandle<(LastLines, Option<String>)>,
}

/// How a supervised child process ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExitReport {
    /// Exit status from the operating system.
    pub status: ExitStatus,
    /// Where the plugin called `exit`, for example "in isend on device 0"; `None` if it did not.
    pub exit: Option<String>,
    /// The last lines that plugins logged.
    pub last_lines: LastLines,
}

impl SupervisedProcess {
    /// Starts the program. The command sets its standard streams, environment and arguments.
    ///
    /// # Errors
    /// The operating system's error when the process, or the thread that reads its log lines, cannot be started. No
    /// process runs then.
    pub fn spawn(mut command: Command) -> io::Result<SupervisedProcess> {
        let (reader, writer) = io::pipe()?;
        let descriptor = writer.as_raw_fd();
        let (device, inode) = file_of(descriptor)?;
        command.env(VARIABLE, format!("{}:{descriptor}:{device}:{inode}", std::process::id()));
        let keep = move || {
            // SAFETY: the descriptor is one of this process; the call may be made between fork and exec.
            match unsafe { libc::fcntl(descriptor, libc::F_SETFD, 0) } {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            }
        };
        // SAFETY: the closure allocates nothing and takes no lock.
        unsafe { command.pre_exec(keep) };
        // The thread comes first: a child that runs is never reported as an error.
        let said = thread::Builder::new().name("ferrywire-watch".into()).spawn(move || last_lines(reader))?;
        let child = command.spawn()?;
        // The thread ends when no process has this end of the pipe.
        drop(writer);
        Ok(SupervisedProcess { child, said })
    }

    /// The child process, to use its streams or to end it.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Waits until the child has ended, and until no process that it left behind holds the pipe.
    ///
    /// # Errors
    /// The operating system's error of the wait.
    pub fn wait(mut self) -> io::Result<ExitReport> {
        let status = self.child.wait()?;
        let (last_lines, exit) = self.said.join().unwrap_or_default();
        Ok(ExitReport { status, exit, last_lines })
    }
}

impl ExitReport {
    /// One line about a child that a plugin ended: how it ended, the plugin's last lines, and the fix or
    /// likely cause. `None` where the program ended by itself.
    pub fn cause(&self) -> Option<String> {
        let (how, end) = match (&self.exit, self.status.signal()) {
            (Some(place), _) => (format!("the plugin ended its process by exit {place}"), EndKind::Exit),
            (None, Some(signal)) => {
                (format!("died by signal {signal}{}", signal_name(signal)), EndKind::Signal(signal))
            }
            (None, None) => return None,
        };
        Some(format!("{how}; {}", explained(end, &self.last_lines)))
    }
}

/// The name of a signal that ends processes, in brackets.
pub fn signal_name(signal: i32) -> String {
    let name = match signal {
        libc::SIGILL => "SIGILL",
        libc::SIGABRT => "SIGABRT",
        libc::SIGBUS => "SIGBUS",
        libc::SIGFPE => "SIGFPE",
        libc::SIGKILL => "SIGKILL",
        libc::SIGSEGV => "SIGSEGV",
        libc::SIGPIPE => "SIGPIPE",
        libc::SIGTERM => "SIGTERM",
        _ => return String::new(),
    };
    format!(" ({name})")
}

/// Reads the pipe to its end: the last lines, and the place where a plugin called `exit`.
fn last_lines(reader: PipeReader) -> (LastLines, Option<String>) {
    let (mut kept, mut exit) = Default::default();
    for line in BufReader::new(reader).split(b'\n').map_while(Result::ok) {
        match LogLine::parse(&String::from_utf8_lossy(&line)) {
            Some(line) if line.file == EXIT => exit = Some(line.text),
            Some(line) => LastLines::keep(&mut kept, line),
            None => {}
        }
    }
    (kept, exit)
}

/// Sends log lines of this process to the supervising process from now on, if there is one.
pub(super) fn report() {
    let value = std::env::var(VARIABLE).ok();
    let Some((watcher, descriptor, pipe)) = value.as_deref().and_then(supervisor) else { return };
    // SAFETY: no memory is passed.
    let parent = unsafe { libc::getppid() };
    // The variable may be inherited from an ancestor, and this process may have closed the pipe before; the
    // descriptor is then a different file.
    let is_pipe = || file_of(descriptor).is_ok_and(|file| file == pipe);
    if parent == watcher && !log::is_teed() && is_pipe() {
        // SAFETY: no memory is passed; a descriptor that does not exist gives an error, and is not used.
        let own = unsafe { libc::fcntl(descriptor, libc::F_SETFD, libc::FD_CLOEXEC) };
        log::tee_to_fd((own == 0).then_some(descriptor));
        WATCHED.store(own == 0, Ordering::Relaxed);
    }
}

/// Process, descriptor, and device and inode of the pipe, from the variable's value.
fn supervisor(value: &str) -> Option<(libc::pid_t, RawFd, (u64, u64))> {
    let mut parts = value.split(':');
    let (watcher, descriptor) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    Some((watcher, descriptor, (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?)))
}

/// Device and inode of an open file.
fn file_of(descriptor: RawFd) -> io::Result<(u64, u64)> {
    let mut about = std::mem::MaybeUninit::<libc::stat>::zeroed();
    // SAFETY: there is room for the struct; a descriptor that does not exist gives an error.
    if unsafe { libc::fstat(descriptor, about.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the struct holds only numbers.
    let about = unsafe { about.assume_init() };
    Ok((about.st_dev, about.st_ino))
}

/// Reports to the supervising process where a plugin called `exit`; false where no process supervises.
pub(super) fn tell_exit(plugin: &str, place: &str) -> bool {
    let watched = WATCHED.load(Ordering::Relaxed);
    if watched {
        log::tell_supervisor(plugin, EXIT, place);
    }
    watched
}
