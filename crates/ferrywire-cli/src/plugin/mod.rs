//! `ferrywire plugin`: shows what an NCCL net plugin exports, by starting it.
//!
//! A plugin may exit, crash or hang, so it runs in a child process ([`child`]), which sends a line for each step, for
//! each line of the plugin's log, and for the result. If the child fails, this process says in one line how, and exits
//! with 1.
//! Read next: [`child`], then [`report`].

pub mod child;
mod report;

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use ferrywire_ncclnet::log::{LastLines, LogLine};
use ferrywire_ncclnet::{EndKind, signal_name};

use crate::exit::{self, Failure, Outcome};
use crate::plan::PluginPlan;
use crate::units::rounded;
use crate::{sys, tool};
use child::Message;
use report::Report;

/// How often a silent child is checked.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// After the child's end each further line is waited for at most this long, in case a process of its own holds the
/// pipe.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// Longest wait for the end of a killed child with a plugin or GPU memory, whose driver takes seconds to release both.
pub const KILLED_MAX: Duration = Duration::from_secs(30);
/// Limit of lines that are read after the child's end, in case a process of the child continues to write.
const LAST_LINES_MAX: usize = 10_000;
/// Lines of the plugin's output that are kept for the report of its end.
const PRINTED_LINES_KEPT: usize = 8;

/// Starts the plugin in a child and prints the report.
pub fn run(plan: &PluginPlan) -> Outcome {
    let (report, outcome) = match Watch::start(plan)?.outcome() {
        Ok(report) => {
            let outcome = report.first_error().map_or(Ok(()), |error| Err(Failure::failed(error)));
            (Some(report), outcome)
        }
        Err(failure) => (None, Err(failure)),
    };
    let text = match (plan.json, &report, &outcome) {
        (true, _, Err(Failure::Interrupted)) => String::new(),
        (true, ..) => format!("{}\n", report::json(report.as_ref(), outcome.as_ref().err(), &plan.path)),
        (false, Some(report), _) => report::text(report),
        (false, None, _) => String::new(),
    };
    let printed = exit::print(&text);
    outcome.and(printed)
}

/// Starts the plugin in a child; returns the number of its devices and its name.
///
/// # Errors
/// As for [`run`].
pub fn devices(plan: &PluginPlan) -> Outcome<(usize, String)> {
    let report = Watch::start(plan)?.outcome()?;
    match report.first_error() {
        Some(error) => Err(Failure::failed(error)),
        None => Ok((report.devices.len(), report.name)),
    }
}

/// An event of a thread that reads from the child.
enum Seen {
    Message(Message),
    Logged(LogLine),
    Printed(String),
}

/// The watch over a running child.
struct Watch<'a> {
    plan: &'a PluginPlan,
    child: Child,
    seen: Receiver<Seen>,
    step: String,
    logged: LastLines,
    printed: VecDeque<String>,
    /// Time in the present step, without time in which this process was stopped.
    waited: Duration,
}

impl Watch<'_> {
    fn start(plan: &PluginPlan) -> Outcome<Watch<'_>> {
        let failed = |error: std::io::Error| {
            Failure::failed(format!("cannot start a child process for the plugin: {error}"))
        };
        let mut command = Command::new(std::env::current_exe().map_err(failed)?);
        command.arg("plugin-child").args(plan.version.map(|version| format!("--version={version}")));
        command.arg("--").arg(&plan.path);
        sys::name_parent(&mut command);
        // The child gets a process group of its own, so that Ctrl-C reaches only this process, which then
        // ends the child.
        command.process_group(0).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(failed)?;
        let (sender, seen) = channel();
        if let (Some(messages), Some(printed)) = (child.stdout.take(), child.stderr.take()) {
            read_lines(messages, sender.clone(), understood);
            read_lines(printed, sender, |line| Some(Seen::Printed(line)));
        }
        let step = "before its file was loaded".to_owned();
        let (logged, printed, waited) = (LastLines::new(), VecDeque::new(), Duration::ZERO);
        Ok(Watch { plan, child, seen, step, logged, printed, waited })
    }

    /// The child's result, or why there is none.
    fn outcome(mut self) -> Outcome<Report> {
        loop {
            let began = Instant::now();
            match self.seen.recv_timeout(CHECK_INTERVAL) {
                Ok(Seen::Message(Message::Step(step))) => {
                    self.step = step;
                    self.waited = Duration::ZERO;
                }
                Ok(Seen::Message(result)) => return self.finish(result),
                Ok(seen) => self.note(seen),
                Err(RecvTimeoutError::Disconnected) => return Err(self.died()),
                Err(RecvTimeoutError::Timeout) if sys::interrupted() => return Err(Failure::Interrupted),
                Err(RecvTimeoutError::Timeout) if self.has_ended() => return self.last_words(),
                Err(RecvTimeoutError::Timeout) => {}
            }
            self.waited += began.elapsed().min(2 * CHECK_INTERVAL);
            if self.waited > self.plan.timeout {
                return Err(self.hangs());
            }
        }
    }

    fn finish(mut self, result: Message) -> Outcome<Report> {
        if self.plan.verbose {
            // The child is ending; the plugin's output comes through another pipe and may be late.
            for _ in 0..LAST_LINES_MAX {
                let Some(seen) = self.next_of_the_last() else { break };
                self.note(seen);
            }
        }
        match result {
            Message::Report(report) => Ok(*report),
            Message::Failed(why) => Err(Failure::failed(why)),
            Message::Step(_) => Err(self.died()),
        }
    }

    fn note(&mut self, seen: Seen) {
        match seen {
            Seen::Message(_) => {}
            Seen::Logged(line) => {
                if self.plan.verbose {
                    exit::note(&report::log_line(&line));
                }
                self.logged.keep(line);
            }
            Seen::Printed(line) => {
                if self.plan.verbose {
                    exit::note(&line);
                }
                self.printed.truncate(PRINTED_LINES_KEPT - 1);
                self.printed.push_front(line);
            }
        }
    }

    fn has_ended(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(Some(_)))
    }

    /// Reads what is left in the pipes of a child that has ended.
    fn last_words(mut self) -> Outcome<Report> {
        for _ in 0..LAST_LINES_MAX {
            let Some(seen) = self.next_of_the_last() else { break };
            match seen {
                Seen::Message(Message::Step(step)) => self.step = step,
                Seen::Message(result) => return self.finish(result),
                seen => self.note(seen),
            }
        }
        Err(self.died())
    }

    fn next_of_the_last(&mut self) -> Option<Seen> {
        self.seen.recv_timeout(LAST_WORDS).ok()
    }

    fn died(&mut self) -> Failure {
        let (how, _) = end_of(&mut self.child);
        self.failure(&how)
    }

    fn hangs(&mut self) -> Failure {
        let how = format!("the plugin did not return within {:?}", rounded(self.plan.timeout));
        self.failure(&how)
    }

    fn failure(&self, how: &str) -> Failure {
        let logged = self.logged.warning().or_else(|| self.logged.iter().next_back());
        let said = logged.map(|line| &line.text).or(self.printed.front());
        let said = said.map_or_else(|| "no output".to_owned(), |said| format!("last output: {said}"));
        let fix =
            self.logged.cause().map_or_else(String::new, |(cause, _)| format!("; fix: {}", cause.fix()));
        Failure::failed(format!("{}: {how} {}; {said}{fix}", self.plan.path.display(), self.step))
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        tool::kill_or_note(&mut self.child, KILLED_MAX);
    }
}

/// How a child with a plugin ended, as text and as a value. A child that only closed its pipe is killed.
pub fn end_of(child: &mut Child) -> (String, EndKind) {
    let until = Instant::now() + LAST_WORDS;
    while matches!(child.try_wait(), Ok(None)) {
        if Instant::now() > until {
            tool::kill_or_note(child, KILLED_MAX);
            let how = "the plugin closed the standard output of its process, which was killed".to_owned();
            return (how, EndKind::Exit);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    match child.wait() {
        Ok(status) => (how_it_ended(status), status.signal().map_or(EndKind::Exit, EndKind::Signal)),
        Err(error) => (error.to_string(), EndKind::Exit),
    }
}

/// How a process ended, as text.
fn how_it_ended(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("the plugin ended its process with exit status {code}"),
        (None, Some(signal)) => format!("the plugin died by signal {signal}{}", signal_name(signal)),
        (None, None) => "the plugin's process ended".to_owned(),
    }
}

/// Sends `make` of each line, until the pipe ends or the receiver is gone.
fn read_lines(
    pipe: impl Read + Send + 'static,
    sender: Sender<Seen>,
    make: impl Fn(String) -> Option<Seen> + Send + 'static,
) {
    std::thread::spawn(move || {
        for line in BufReader::new(pipe).split(b'\n').map_while(Result::ok) {
            let seen = make(String::from_utf8_lossy(&line).into_owned());
            if seen.is_some_and(|seen| sender.send(seen).is_err()) {
                break;
            }
        }
    });
}

fn understood(line: String) -> Option<Seen> {
    match LogLine::parse(&line) {
        Some(logged) => Some(Seen::Logged(logged)),
        None => serde_json::from_str(&line).ok().map(Seen::Message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_closes_its_pipe_and_stays_is_killed() {
        let mut child = Command::new("sh").args(["-c", "exec sleep 600 >&-"]).spawn().expect("a shell");
        assert!(end_of(&mut child).0.contains("which was killed"));
        let mut child = Command::new("sh").args(["-c", "exit 3"]).spawn().expect("a shell");
        assert!(end_of(&mut child).0.contains("exit status 3"));
    }
}
