//! Runs another program and returns its output, with a time limit.

use std::fmt;
use std::io::Read;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use crate::sys;

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
    let Some(status) = ended(&mut child, until) else {
        let _ = child.kill();
        let _ = ended(&mut child, Instant::now() + KILLED_MAX);
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

fn ended(child: &mut Child, until: Instant) -> Option<ExitStatus> {
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Some(status),
            Ok(None) if Instant::now() < until && !sys::interrupted() => thread::sleep(POLL),
            _ => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
