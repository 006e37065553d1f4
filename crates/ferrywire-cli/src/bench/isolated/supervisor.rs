//! The parent's watch over one child: its messages, its end, and calls of its plugin that do not return.
//!
//! Read next: `message.rs`.

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use ferrywire::payload::plugin::{SetBy, Variable};
use ferrywire_ncclnet::log::{LastLines, LogLine};
use ferrywire_ncclnet::{EndKind, explained};

use super::super::link::{CLOSE_TIMEOUT, RUN_END_TIMEOUT};
use super::super::parent;
use super::Order;
use super::message::{Assembler, Call, Message};
use crate::exit::{Failure, Outcome};
use crate::file;
use crate::plugin::{KILLED_MAX, end_of};
use crate::transport::PluginUse;
use crate::units::rounded;
use crate::{sys, tool};

/// How often a silent child is checked.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// The engine gives up a call that does not return; the parent does so this much later.
const CALL_GRACE: Duration = Duration::from_secs(5);
/// A call is overdue after this many reports in a row, so that a pause of the whole machine does not count.
const OVERDUE_REPORTS: u32 = 5;
/// Longest silence of a child that has not ended.
const SILENCE_LIMIT: Duration = Duration::from_secs(60);
/// Longest text of `--config` for a child. Linux limits a variable to 128 KiB, and some characters take two bytes there.
const CONFIG_BYTES_MAX: usize = 60 << 10;
/// Longest time for a child to end after Ctrl-C. It exceeds what telling all peers and closing take.
const INTERRUPT_GRACE: Duration =
    Duration::from_secs(RUN_END_TIMEOUT.as_secs() + CLOSE_TIMEOUT.as_secs() + 3);
/// How long the pipe of a child that has ended is read, in case one of its own processes holds it.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// An event of the child.
#[derive(Debug)]
pub enum Event {
    /// The child sent a message.
    Said(Message),
    /// The child has ended or was killed, for this reason.
    Ended(Failure),
}

enum Seen {
    Message(Message),
    Logged(LogLine),
}

/// A running child; it is killed when this is dropped.
pub struct Supervisor<'a> {
    plugin: &'a PluginUse,
    child: Child,
    seen: Receiver<Seen>,
    stage: String,
    logged: LastLines,
    call: Option<Call>,
    overdue_reports: u32,
    /// Time without a message, and time since Ctrl-C, without time in which this process was stopped.
    silent: Duration,
    interrupted: Option<Duration>,
}

impl<'a> Supervisor<'a> {
    /// Starts this command again as a child that works with the plugin.
    pub fn start(
        plugin: &'a PluginUse,
        environment: &[Variable],
        order: Order,
        hand_secrets: impl FnOnce(&mut Command),
    ) -> Outcome<Supervisor<'a>> {
        let failed = |error: std::io::Error| Failure::failed(format!("cannot start a process: {error}"));
        let set = || environment.iter().filter(|variable| variable.set_by == SetBy::Ferrywire);
        let config = file::text_read();
        if let Some(text) = config.as_ref().filter(|text| text.len() > CONFIG_BYTES_MAX) {
            return Err(Failure::Usage(format!(
                "--config: the file has {} bytes: with a plugin, {CONFIG_BYTES_MAX} at most",
                text.len()
            )));
        }
        let set_before = set().map(|variable| variable.name.to_owned()).collect();
        let order = Order { set_before, config, ..order };
        let mut command = Command::new(std::env::current_exe().map_err(failed)?);
        command.args(std::env::args_os().skip(1)).envs([order.as_variable()]);
        command.envs(set().map(|variable| (variable.name, &variable.value)));
        hand_secrets(&mut command);
        parent::do_not_ask(&mut command);
        sys::name_parent(&mut command);
        // The child gets a process group of its own, so that Ctrl-C reaches only this process, which passes
        // it on.
        command.process_group(0).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(failed)?;
        let (sender, seen) = channel();
        if let Some(pipe) = child.stdout.take() {
            read(pipe, sender);
        }
        Ok(Supervisor {
            plugin,
            child,
            seen,
            stage: "before it was started".to_owned(),
            logged: LastLines::new(),
            call: None,
            overdue_reports: 0,
            silent: Duration::ZERO,
            interrupted: None,
        })
    }

    /// Waits for the next event of the child.
    pub fn next(&mut self) -> Event {
        loop {
            let began = Instant::now();
            match self.seen.recv_timeout(POLL_INTERVAL) {
                Ok(Seen::Message(message)) => {
                    self.silent = Duration::ZERO;
                    if let Some(event) = self.hear(message) {
                        return event;
                    }
                }
                Ok(Seen::Logged(line)) => self.logged.keep(line),
                Err(RecvTimeoutError::Disconnected) => return self.died(),
                Err(RecvTimeoutError::Timeout) if matches!(self.child.try_wait(), Ok(Some(_))) => {
                    return self.last_words();
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            if let Some(failure) = self.check(began.elapsed().min(2 * POLL_INTERVAL)) {
                return Event::Ended(failure);
            }
        }
    }

    /// Whether the plugin is in a call that should have returned.
    pub fn is_overdue(&self) -> bool {
        self.overdue_reports >= OVERDUE_REPORTS
    }

    fn hear(&mut self, message: Message) -> Option<Event> {
        match message {
            Message::Stage(stage) => self.stage = stage,
            Message::Alive(call) => {
                let limit = self.plugin.call_limit + CALL_GRACE;
                let is_overdue = |call: &Call| Duration::from_millis(call.under_way_ms) > limit;
                let overdue = call.as_ref().is_some_and(is_overdue);
                self.overdue_reports = if overdue { self.overdue_reports + 1 } else { 0 };
                self.call = call;
            }
            said => {
                match &said {
                    Message::RunBegins(name) => self.stage = format!("during a run of {name}"),
                    Message::Listening { .. } => "before a run began".clone_into(&mut self.stage),
                    Message::RunOver { .. } => "between two runs".clone_into(&mut self.stage),
                    _ => {}
                }
                return Some(Event::Said(said));
            }
        }
        None
    }

    /// Checks for events that the child does not report.
    fn check(&mut self, passed: Duration) -> Option<Failure> {
        self.silent += passed;
        if sys::interrupted() {
            let since = self.interrupted.get_or_insert_with(|| {
                sys::interrupt(self.child.id());
                Duration::ZERO
            });
            *since += passed;
            return (*since > INTERRUPT_GRACE).then_some(Failure::Interrupted);
        }
        if self.is_overdue() {
            return Some(self.hangs());
        }
        (self.silent > SILENCE_LIMIT).then(|| {
            self.failure(
                &format!("the child process has sent no message for {SILENCE_LIMIT:?}"),
                EndKind::Silent,
            )
        })
    }

    fn last_words(&mut self) -> Event {
        while let Ok(seen) = self.seen.recv_timeout(LAST_WORDS) {
            match seen {
                Seen::Logged(line) => self.logged.keep(line),
                Seen::Message(message) => {
                    if let Some(event) = self.hear(message) {
                        return event;
                    }
                }
            }
        }
        self.died()
    }

    fn died(&mut self) -> Event {
        if sys::interrupted() {
            return Event::Ended(Failure::Interrupted);
        }
        let (how, end) = end_of(&mut self.child);
        Event::Ended(self.failure(&how, end))
    }

    fn hangs(&mut self) -> Failure {
        let what = self.call.as_ref().map_or("a call", |call| &call.what).to_owned();
        let limit = rounded(self.plugin.call_limit);
        let how = format!("the plugin's {what} has not returned within {limit:?} and was ended");
        self.failure(&how, EndKind::CallHangs)
    }

    fn failure(&self, how: &str, end: EndKind) -> Failure {
        let path = self.plugin.path.display();
        Failure::failed(format!("{path}: {how} {}; {}", self.stage, explained(end, &self.logged)))
    }
}

impl Drop for Supervisor<'_> {
    fn drop(&mut self) {
        tool::kill_or_note(&mut self.child, KILLED_MAX);
    }
}

fn read(pipe: ChildStdout, sender: Sender<Seen>) {
    std::thread::spawn(move || {
        let mut assembler = Assembler::default();
        for line in BufReader::new(pipe).split(b'\n').map_while(Result::ok) {
            let logged = || LogLine::parse(&String::from_utf8_lossy(&line)).map(Seen::Logged);
            let seen = assembler.take(&line).map(Seen::Message).or_else(logged);
            if seen.is_some_and(|seen| sender.send(seen).is_err()) {
                break;
            }
        }
    });
}
