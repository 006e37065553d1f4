//! The command's exit statuses and error output: the one place that decides the status and prints errors.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::io::{self, IsTerminal, Write};
use std::panic::{self, AssertUnwindSafe};
use std::process::ExitCode;
use std::thread;

use ferrywire::{Error, LossCause};
use serde::{Deserialize, Serialize};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt;
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

use crate::{sanitize, sys};

/// The advice for a lane without progress.
const STALLED_LANE_ADVICE: &str = "likely: the network between the plugin's NICs loses packets, or the plugin of one end \
hangs; try: -v on both ends for the plugin's log, and the run without --plugin to check the network";
/// The log target of plugins' lines.
const PLUGINS_LOG: &str = "ferrywire::plugin";

/// Why the command did not succeed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Failure {
    /// Bad usage: exit status 2.
    Usage(String),
    /// Failure of a peer, network, memory or data: exit status 1. The first line says what failed, further lines what to
    /// try.
    Failed(String),
    /// Another peer of the run has failed, and has reported the failure to this one: exit status 1.
    Hearsay(String),
    /// The serving end is busy with another run: exit status 1.
    Busy(String),
    /// Another socket has the address to listen on: exit status 1.
    AddressInUse(String),
    /// Ctrl-C: exit status 130. SIGTERM: exit status 143.
    Interrupted,
}

/// Success, or the failure.
pub type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    /// A failure with this message.
    pub fn failed(message: impl Into<String>) -> Failure {
        Failure::Failed(message.into())
    }

    /// A thread of this process has panicked; [`tell_panics`] has printed the message.
    pub fn panicked() -> Failure {
        Failure::failed("internal error, please report: a thread of the bench panicked")
    }

    /// The message, as stored with results.
    pub fn message(&self) -> String {
        match self {
            Failure::Usage(text) | Failure::Failed(text) => text.clone(),
            Failure::Hearsay(text) | Failure::Busy(text) | Failure::AddressInUse(text) => text.clone(),
            Failure::Interrupted => "interrupted".to_owned(),
        }
    }

    /// This failure with a changed message.
    pub fn map_message(self, change: impl FnOnce(String) -> String) -> Failure {
        match self {
            Failure::Usage(text) => Failure::Usage(change(text)),
            Failure::Failed(text) => Failure::Failed(change(text)),
            Failure::Hearsay(text) => Failure::Hearsay(change(text)),
            Failure::Busy(text) => Failure::Busy(change(text)),
            Failure::AddressInUse(text) => Failure::AddressInUse(change(text)),
            Failure::Interrupted => Failure::Interrupted,
        }
    }

    /// The first line of the message.
    pub fn first_line(&self) -> String {
        self.message().lines().next().unwrap_or_default().to_owned()
    }
}

impl<E: Into<Error>> From<E> for Failure {
    fn from(error: E) -> Failure {
        match &error.into() {
            // A lane does not report why its message makes no progress, so likely causes are added here.
            error if is_stalled_lane(error) => Failure::Failed(format!("{error}\n{STALLED_LANE_ADVICE}")),
            error if is_address_in_use(error) => Failure::AddressInUse(error.to_string()),
            error => Failure::Failed(error.to_string()),
        }
    }
}

fn is_stalled_lane(error: &Error) -> bool {
    match error {
        Error::PeerLost { cause, .. } => *cause == LossCause::LaneStalled,
        Error::Phase { error, .. } => is_stalled_lane(error),
        _ => false,
    }
}

fn is_address_in_use(error: &Error) -> bool {
    match error {
        Error::Io { code, .. } => *code == Some(libc::EADDRINUSE),
        Error::Phase { error, .. } => is_address_in_use(error),
        _ => false,
    }
}

/// Prints the requested output on standard output. A closed standard output is not a failure.
pub fn print(text: &str) -> Outcome {
    print_if_read(text).map(drop)
}

/// As [`print()`]; returns whether standard output has a reader.
pub fn print_if_read(text: &str) -> Outcome<bool> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(Failure::failed(format!("cannot write standard output: {error}"))),
    }
}

/// The outcome of a run and of writing its results. A failure of the run takes precedence.
pub fn with_results(outcome: Outcome, written: Outcome) -> Outcome {
    if let (Err(_), Err(failure)) = (&outcome, &written) {
        complain(&failure.message());
    }
    outcome.and(written)
}

/// Prints the error, if any, and returns the exit status.
pub fn report(outcome: Outcome) -> ExitCode {
    let Err(failure) = outcome else { return ExitCode::SUCCESS };
    let status = match failure {
        Failure::Interrupted => return ExitCode::from(sys::interrupted_status()),
        Failure::Usage(_) => 2,
        Failure::Failed(_) | Failure::Hearsay(_) | Failure::Busy(_) | Failure::AddressInUse(_) => 1,
    };
    complain(&failure.message());
    ExitCode::from(status)
}

/// Makes panics print one line, as other errors do.
pub fn tell_panics() {
    panic::set_hook(Box::new(|info| {
        let thread = thread::current();
        let name = thread.name().unwrap_or("without a name");
        let what = info.payload_as_str().unwrap_or("no message");
        let place = info.location().map(ToString::to_string).unwrap_or_default();
        complain(&format!("internal error, please report: thread {name} panicked at {place}: {what}"));
        let backtrace = Backtrace::capture();
        if backtrace.status() == BacktraceStatus::Captured {
            note(&backtrace.to_string());
        }
    }));
}

/// Does a part of a run for which other threads or processes wait: a panic is a failure, which they learn of.
pub fn guarded<T>(part: impl FnOnce() -> Outcome<T>) -> Outcome<T> {
    panic::catch_unwind(AssertUnwindSafe(part)).unwrap_or_else(|_| Err(Failure::panicked()))
}

/// Starts a thread whose result other threads wait for without joining it; a panic in the thread ends the process.
pub fn attend(name: &str, body: impl FnOnce() + Send + 'static) -> Outcome {
    let guarded = move || {
        if panic::catch_unwind(AssertUnwindSafe(body)).is_err() {
            ferrywire_devmem::release_nics();
            sys::exit_now(1);
        }
    };
    let spawned = thread::Builder::new().name(name.to_owned()).spawn(guarded);
    spawned.map(drop).map_err(|error| Failure::failed(format!("cannot start a thread: {error}")))
}

/// Prints an error. Control characters from peers and plugins are removed, so that they cannot steer a terminal.
pub fn complain(message: &str) {
    note(&format!("error: {}", sanitize::text(message)));
}

/// Prints a line for people on standard error.
pub fn note(line: &str) {
    aside(&format!("{line}\n"));
}

/// Prints text on standard error, beside the requested output. A closed standard error does not end the command.
pub fn aside(text: &str) {
    let _ = io::stderr().lock().write_all(text.as_bytes());
}

/// The engine's log goes to standard error: errors; with `-v` level info, with `-vv` debug, with `-vvv` trace.
///
/// A serving end also prints warnings, such as refused peers. On other ends the first line is the error, and lost
/// channels are listed below the table. A plugin's log needs `-v`, since some plugins warn of each receive; its last
/// line is part of the error when a plugin dies.
pub fn start_log(verbose: u8, serving: bool) {
    let level = match (verbose, serving) {
        (0, false) => tracing::Level::ERROR,
        (0, true) => tracing::Level::WARN,
        (1, _) => tracing::Level::INFO,
        (2, _) => tracing::Level::DEBUG,
        _ => tracing::Level::TRACE,
    };
    let of_plugins = if verbose == 0 { tracing::Level::ERROR } else { level };
    let passes = Targets::new().with_default(level).with_target(PLUGINS_LOG, of_plugins);
    let log = fmt::layer().with_writer(std::io::stderr).with_ansi(std::io::stderr().is_terminal());
    let log = log.without_time().with_target(false).compact().with_filter(passes);
    tracing_subscriber::registry().with(log).init();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hint_goes_by_the_cause_of_a_loss_and_not_by_its_words() {
        let hinted = |cause, why: &str| {
            let lost = Error::PeerLost { peer: "b".to_owned(), cause, why: why.to_owned() };
            Failure::from(lost).message().lines().any(|line| line == STALLED_LANE_ADVICE)
        };
        for words in ["its last test gave result 0, not done", "other words"] {
            assert!(hinted(LossCause::LaneStalled, words), "{words}");
            assert!(!hinted(LossCause::Silent, words), "{words}");
        }
    }
}
