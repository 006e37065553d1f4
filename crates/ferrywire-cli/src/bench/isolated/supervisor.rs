//! The parent's watch over one child: what it says, how it ends, and whether its plugin still returns.

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use ferrywire::payload::plugin::{SetBy, Variable};
use ferrywire_ncclnet::log::{LastLines, LogLine};
use ferrywire_ncclnet::{EndKind, explained};

use super::super::{child_secret, parent};
use super::Order;
use super::message::{Assembler, Call, Message};
use crate::exit::{Failure, Outcome};
use crate::plugin::end_of;
use crate::sys;
use crate::transport::PluginUse;
use crate::units::rounded;

/// How often the child is looked at while it says nothing.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// The engine gives a call that does not return up by itself; this much later so does the parent.
const CALL_GRACE: Duration = Duration::from_secs(5);
/// A call is overdue when so many reports in a row say so: not because everything stood still for a while.
const OVERDUE_REPORTS: u32 = 5;
/// Longest silence of a child that has not ended.
const SILENCE_LIMIT: Duration = Duration::from_secs(60);
/// After Ctrl-C a child has this long to end.
const INTERRUPT_GRACE: Duration = Duration::from_secs(10);
/// A child that has ended is listened to for this long, in case a process of its own holds the pipe.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// What has happened.
#[derive(Debug)]
pub enum Event {
    /// The child said something.
    Said(Message),
    /// It has ended, or had to be ended, and why.
    Ended(Failure),
}

enum Seen {
    Message(Message),
    Logged(LogLine),
}

/// A child under way; it ends with this value.
pub struct Supervisor<'a> {
    plugin: &'a PluginUse,
    child: Child,
    seen: Receiver<Seen>,
    stage: String,
    logged: LastLines,
    call: Option<Call>,
    overdue_reports: u32,
    /// Time without a word, and since Ctrl-C; time in which this process was stopped does not count.
    silent: Duration,
    interrupted: Option<Duration>,
}

impl<'a> Supervisor<'a> {
    /// Starts this command once more, as a child that works with the plugin.
    pub fn start(
        plugin: &'a PluginUse,
        environment: &[Variable],
        order: Order,
        secret: Option<&[u8]>,
    ) -> Outcome<Supervisor<'a>> {
        let failed = |error: std::io::Error| Failure::failed(format!("cannot start a process: {error}"));
        let set = || environment.iter().filter(|variable| variable.set_by == SetBy::Ferrywire);
        let order = Order { set_before: set().map(|variable| variable.name.to_owned()).collect(), ..order };
        let mut command = Command::new(std::env::current_exe().map_err(failed)?);
        command.args(std::env::args_os().skip(1)).envs([order.as_variable()]);
        command.envs(set().map(|variable| (variable.name, &variable.value)));
        child_secret::hand(&mut command, secret);
        parent::do_not_ask(&mut command);
        // In a process group of its own, Ctrl-C reaches this end only, which passes it on.
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

    /// Waits for what happens next.
    pub fn next(&mut self) -> Event {
        loop {
            let began = Instant::now();
            match self.seen.recv_timeout(LOOK_INTERVAL) {
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
            if let Some(failure) = self.look(began.elapsed().min(2 * LOOK_INTERVAL)) {
                return Event::Ended(failure);
            }
        }
    }

    /// Whether its plugin is in a call that should have returned.
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

    /// Looks for what the child does not say.
    fn look(&mut self, passed: Duration) -> Option<Failure> {
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
            self.failure(&format!("its process has said nothing for {SILENCE_LIMIT:?}"), EndKind::Silent)
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
        let _ = self.child.kill();
        let _ = self.child.wait();
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
