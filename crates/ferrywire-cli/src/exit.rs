//! How the command ends: the one place that decides exit statuses, and where errors are printed.

use std::io::IsTerminal;
use std::process::ExitCode;

use serde::{Deserialize, Serialize};

/// Why the command did not succeed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Failure {
    /// What was typed makes no sense: 2.
    Usage(String),
    /// Peer, network, memory or data: 1. The first line says what; more lines say what to try.
    Failed(String),
    /// Ctrl-C: 130.
    Interrupted,
}

/// Success, or why not.
pub type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    /// A failure with this message.
    pub fn failed(message: impl Into<String>) -> Failure {
        Failure::Failed(message.into())
    }

    /// The message, as stored with results.
    pub fn message(&self) -> String {
        match self {
            Failure::Usage(message) | Failure::Failed(message) => message.clone(),
            Failure::Interrupted => "interrupted".to_owned(),
        }
    }

    /// The first line of the message.
    pub fn first_line(&self) -> String {
        self.message().lines().next().unwrap_or_default().to_owned()
    }
}

impl From<ferrywire::Error> for Failure {
    fn from(error: ferrywire::Error) -> Failure {
        Failure::Failed(error.to_string())
    }
}

/// Prints the error, if any, and gives the exit status.
pub fn report(outcome: Outcome) -> ExitCode {
    let (message, status) = match outcome {
        Ok(()) => return ExitCode::SUCCESS,
        Err(Failure::Interrupted) => return ExitCode::from(130),
        Err(Failure::Usage(message)) => (message, 2),
        Err(Failure::Failed(message)) => (message, 1),
    };
    eprintln!("error: {message}");
    ExitCode::from(status)
}

/// The engine's log goes to standard error: more with `-v`, everything with `-vv`.
///
/// A serving end also prints warnings, such as peers that were turned away. On other ends the first line is
/// what went wrong, and lost channels are told under the table.
pub fn start_log(verbose: u8, serving: bool) {
    let level = match (verbose, serving) {
        (0, false) => tracing::Level::ERROR,
        (0, true) => tracing::Level::WARN,
        (1, _) => tracing::Level::INFO,
        (2, _) => tracing::Level::DEBUG,
        _ => tracing::Level::TRACE,
    };
    let log = tracing_subscriber::fmt().with_max_level(level).with_writer(std::io::stderr);
    let colours = std::io::stderr().is_terminal();
    log.with_ansi(colours).without_time().with_target(false).compact().init();
}
