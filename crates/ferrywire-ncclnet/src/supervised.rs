//! A process of its own for what hosts a plugin, for programs that must outlive one.
//!
//! ```text
//!   the caller's program ── SupervisedProcess::spawn ──> a program that hosts the plugin: exits, crashes
//!          └──── SupervisedProcess::wait: how it ended <── lines of the plugin's log, over a pipe ──┘
//! ```
//!
//! The other program may be the same file with other arguments. It does nothing for this: when it loads a
//! plugin it finds the pipe in its environment. What the two have to say to each other besides is their own
//! affair. A call that never returns is no end: the engine over there gives it up, as it does anywhere.
//!
//! Invariant: nothing that the plugin does ends, blocks or changes the caller's process.
//! Read next: `ending.rs`.

use std::io::{self, BufRead, BufReader, PipeReader};
use std::os::fd::AsRawFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use super::ending::{EndKind, explained};
use super::log::{self, LastLines, LogLine};

/// `pid:descriptor`: the process that watches, and where the lines go.
const VARIABLE: &str = "FERRYWIRE_PLUGIN_WATCHED";
/// The source file that a line about an exit has: no plugin's has such a name.
const EXIT: &str = "(exit)";

/// Whether the lines go to a process that watches this one.
static WATCHED: AtomicBool = AtomicBool::new(false);

/// A child process that hosts a plugin. Dropping this leaves the process alone.
#[derive(Debug)]
pub struct SupervisedProcess {
    child: Child,
    said: JoinHandle<(LastLines, Option<String>)>,
}

/// How it ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExitReport {
    /// As the system tells it.
    pub status: ExitStatus,
    /// Where the plugin called `exit`, if it did: "in isend on device 0".
    pub exit: Option<String>,
    /// What plugins logged last.
    pub last_lines: LastLines,
}

impl SupervisedProcess {
    /// Starts the program. Its standard streams, environment and arguments are what the command says.
    ///
    /// # Errors
    /// The system's, when it starts no process.
    pub fn spawn(mut command: Command) -> io::Result<SupervisedProcess> {
        let (reader, writer) = io::pipe()?;
        let descriptor = writer.as_raw_fd();
        command.env(VARIABLE, format!("{}:{descriptor}", std::process::id()));
        let keep = move || {
            // SAFETY: a descriptor of this process; the call may be made between fork and exec.
            match unsafe { libc::fcntl(descriptor, libc::F_SETFD, 0) } {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            }
        };
        // SAFETY: the closure allocates nothing and takes no lock.
        unsafe { command.pre_exec(keep) };
        let child = command.spawn()?;
        drop(writer);
        let said = thread::Builder::new().name("ferrywire-watch".into()).spawn(move || last_lines(reader))?;
        Ok(SupervisedProcess { child, said })
    }

    /// The process: for its streams, or to end it.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Waits until it ends, and until no process that it left behind holds the pipe.
    ///
    /// # Errors
    /// The system's.
    pub fn wait(mut self) -> io::Result<ExitReport> {
        let status = self.child.wait()?;
        let (last_lines, exit) = self.said.join().unwrap_or_default();
        Ok(ExitReport { status, exit, last_lines })
    }
}

impl ExitReport {
    /// What a plugin did to the process, in one line with its last words and what follows from them; `None` where
    /// the program ended as it wanted.
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

/// What plugins logged last, and where one called `exit`.
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

/// From now on lines go to the process that watches this one, if there is one.
pub(super) fn report() {
    let told = std::env::var(VARIABLE).ok();
    let parts = told.as_deref().and_then(|told| told.split_once(':'));
    let Some((watcher, descriptor)) = parts.and_then(|(pid, fd)| Some((pid.parse().ok()?, fd.parse().ok()?)))
    else {
        return;
    };
    // SAFETY: no memory is passed.
    let parent = unsafe { libc::getppid() };
    // Where the variable came down from further above, the descriptor is something else here.
    if parent == watcher && !log::is_teed() {
        // SAFETY: as above; a descriptor that is not there is an error, and is not used.
        let own = unsafe { libc::fcntl(descriptor, libc::F_SETFD, libc::FD_CLOEXEC) };
        log::tee_to_fd((own == 0).then_some(descriptor));
        WATCHED.store(own == 0, Ordering::Relaxed);
    }
}

/// Tells the process that watches this one where a plugin called `exit`; false where there is none.
pub(super) fn tell_exit(plugin: &str, place: &str) -> bool {
    let watched = WATCHED.load(Ordering::Relaxed);
    if watched {
        log::tell_supervisor(plugin, EXIT, place);
    }
    watched
}
