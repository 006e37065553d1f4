//! Runs another program and returns its output, with a time limit.

use std::fmt;
use std::io::{self, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use crate::{exit, sys};

/// Output beyond this size is discarded.
const OUTPUT_BYTES_MAX: u64 = 1 << 20;
/// How often a program is checked for its end.
const POLL: Duration = Duration::from_millis(2);
/// Longest wait for the end of a killed program. A program that a driver holds in the kernel does not end.
const KILLED_MAX: Duration = Duration::from_secs(1);

/// Why a program gave no output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoOutput {
    /// The program could not be started.
    NotStarted(String),
    /// The program failed: how it ended, and the end of its output.
    Failed(String),
    /// The program took too long, or the user pressed Ctrl-C.
    Late(Duration),
}

impl fmt::Display for NoOutput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoOutput::NotStarted(why) | NoOutput::Failed(why) => f.write_str(why),
            NoOutput::Late(limit) => write!(f, "no answer within {} s", limit.as_secs_f64()),
        }
    }
}

/// The program's output; `None` if the program is missing, fails or takes too long.
pub fn output(program: &str, args: &[&str], limit: Duration) -> Option<String> {
    run(Command::new(program).args(args), limit).ok()
}

/// The program's output, or why there is none: it cannot be started, it failed (with the end of its output), or it took
/// too long.
pub fn run(command: &mut Command, limit: Duration) -> Result<String, NoOutput> {
    let until = Instant::now() + limit;
    let spawned = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = spawned.map_err(|error| NoOutput::NotStarted(error.to_string()))?;
    let (said, complaints) = (read(child.stdout.take()), read(child.stderr.take()));
    let Some(status) = ended(&mut child, || Instant::now() >= until || sys::interrupted()) else {
        let _ = kill(&mut child, KILLED_MAX);
        return Err(NoOutput::Late(limit));
    };
    // A process started by the program may hold the pipes open.
    let rest = |pipe: &Receiver<String>| pipe.recv_timeout(until.saturating_duration_since(Instant::now()));
    if !status.success() {
        let complaints = rest(&complaints).unwrap_or_default();
        let last = complaints.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default();
        let how = format!("{status}: {}", last.trim());
        return Err(NoOutput::Failed(how.trim_end_matches(": ").to_owned()));
    }
    rest(&said).map_err(|_| NoOutput::Late(limit))
}

fn read(pipe: Option<impl Read + Send + 'static>) -> Receiver<String> {
    let (done, said) = mpsc::channel();
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(pipe) = pipe {
            let _ = pipe.take(OUTPUT_BYTES_MAX).read_to_end(&mut bytes);
        }
        done.send(String::from_utf8_lossy(&bytes).into_owned())
    });
    said
}

/// A process that can be killed and asked whether it has ended.
pub trait Process {
    fn kill(&mut self) -> io::Result<()>;
    fn try_wait(&mut self) -> io::Result<Option<ExitStatus>>;
}

impl Process for Child {
    fn kill(&mut self) -> io::Result<()> {
        Child::kill(self)
    }

    fn try_wait(&mut self) -> io::Result<Option<ExitStatus>> {
        Child::try_wait(self)
    }
}

/// Kills a process with a plugin or with memory of a GPU and waits for its end, up to a limit. Notes one that has not ended.
pub fn kill_or_note(child: &mut Child, limit: Duration) {
    if kill(child, limit).is_none() {
        let number = child.id();
        exit::note(&format!(
            "process {number} does not end although it was killed: it may hold its port and its GPU"
        ));
    }
}

/// Kills a process and waits for its end, up to a limit: a process that a driver holds in the kernel does not end.
/// `None` if it has not ended.
pub fn kill(process: &mut impl Process, limit: Duration) -> Option<ExitStatus> {
    let _ = process.kill();
    let until = Instant::now() + limit;
    ended(process, || Instant::now() >= until)
}

/// Waits for the end of a process until `is_over`.
fn ended(process: &mut impl Process, is_over: impl Fn() -> bool) -> Option<ExitStatus> {
    loop {
        match process.try_wait() {
            Ok(Some(status)) => return Some(status),
            Ok(None) if !is_over() => thread::sleep(POLL),
            _ => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process that the kernel does not let end.
    #[derive(Default)]
    struct Held {
        killed: bool,
    }

    impl Process for Held {
        fn kill(&mut self) -> io::Result<()> {
            self.killed = true;
            Ok(())
        }

        fn try_wait(&mut self) -> io::Result<Option<ExitStatus>> {
            Ok(None)
        }
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_program_that_is_missing_fails_or_hangs_says_nothing() {
        assert_eq!(output("echo", &["there"], LONG), Some("there\n".to_owned()));
        assert_eq!(output("no-such-program", &[], LONG), None);
        assert_eq!(output("false", &[], LONG), None);
        assert_eq!(output("sleep", &["600"], Duration::from_millis(10)), None);
    }

    #[test]
    fn the_cause_of_a_missing_answer_is_reported() {
        let shell = |script: &str, limit| run(Command::new("sh").args(["-c", script]), limit);
        let failed = |how: &str| Err(NoOutput::Failed(how.to_owned()));
        assert_eq!(shell("echo one; echo two >&2; exit 3", LONG), failed("exit status: 3: two"));
        assert_eq!(shell("exit 3", LONG), failed("exit status: 3"));
        let limit = Duration::from_millis(50);
        assert_eq!(shell("exec >&- 2>&-; exec sleep 600", limit), Err(NoOutput::Late(limit)));
        assert_eq!(NoOutput::Late(limit).to_string(), "no answer within 0.05 s");
        let missing = run(&mut Command::new("no-such-program"), LONG);
        assert!(matches!(missing, Err(NoOutput::NotStarted(why)) if why.contains("No such file")));
    }

    /// Regression: the parent of a plugin's process waited for the end of the killed process without a limit.
    #[test]
    fn a_killed_process_that_does_not_end_is_given_up() {
        let mut held = Held::default();
        assert_eq!(kill(&mut held, Duration::from_millis(10)), None);
        assert!(held.killed);
        let mut child = Command::new("sleep").arg("600").spawn().expect("it starts");
        assert!(kill(&mut child, LONG).is_some_and(|status| !status.success()));
    }
}
